"""What is in k8s/, rendered by kubectl: the API's schemas take it, our loaders take what is in it.

Nothing is started here (`test_kubernetes_pods`).
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config import Root
from kvtier.local.health import DEADLINE_S
from kvtier.local.vllm.commands import command as vllm_command
from kvtier.security.endpoints import check_listen
from kvtier.security.roles import from_uri
from kvtier.types import InstanceId
from kvtier_router.config import RouterConfig
from kvtier_router.config import check_listen as check_router
from kvtier_router.metrics import DEFINITIONS as ROUTER
from kvtier_services.bridge.config import TOLD, BridgeConfig
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.store.main import reachable
from kvtier_services.worker.config import WorkerConfig
from kvtier_services.worker.draining import drain_command
from tests.harness.ports import free_port
from tests.support.manifest_configs import (
    FIELDS,
    SECRETS,
    config_of,
    connector_of,
    flags_of,
    for_looks,
    in_memory,
    needs,
    service_of,
    told,
)
from tests.support.manifests import (
    K8S,
    KUBECTL,
    Object,
    Overlay,
    Workload,
    allowed_edges,
    argv_of,
    number_of,
    port_of,
    rendered,
    selects,
)

pytestmark = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl with kustomize 5 is not installed: nothing renders k8s/"
)

OVERLAYS = ("overlays/dev", "overlays/vllm", "overlays/production")
VERSIONS = ("1.30", "1.34")
"""Of Kubernetes: the oldest that k8s/ is meant for, and a newer one."""
OUR_USER = 10_001
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
STORE_SOCKET = "unix:/run/kvtier/store/store.sock"
SOCKETS = "/run/kvtier/engine/sockets"
CUSTOM = {
    "Issuer": {"selfSigned", "ca"},
    "Certificate": {
        "commonName", "dnsNames", "duration", "isCA", "issuerRef", "privateKey", "renewBefore",
        "secretName", "uris", "usages",
    },
    "ServiceMonitor": {"endpoints", "jobLabel", "selector"},
}  # fmt: skip
"""Kinds that have no schema in the API, each with the fields of its spec that are in use here."""


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> Overlay:
    return rendered(request.param)


def containers(overlay: Overlay) -> Iterator[tuple[Workload, Object]]:
    for workload in overlay.workloads:
        for container in workload.every_container:
            yield workload, container


def ours(overlay: Overlay) -> Iterator[tuple[Workload, Object]]:
    for workload, container in containers(overlay):
        if service_of(container) is not None:
            yield workload, container


# ---- the API


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_of_the_api_take_every_object(overlay: Overlay, version: str) -> None:
    import kubernetes_validate

    kinds = set()
    for one in overlay.objects:
        if one["kind"] in CUSTOM:
            assert set(one["spec"]) <= CUSTOM[one["kind"]], one["metadata"]["name"]
            continue
        kubernetes_validate.validate(one, version, strict=True)
        kinds.add(one["kind"])
    assert {"DaemonSet", "StatefulSet", "Deployment", "Service", "NetworkPolicy"} <= kinds
    assert {"ConfigMap", "PodDisruptionBudget", "ServiceAccount", "Namespace"} <= kinds


def test_a_field_that_the_api_does_not_know_would_be_seen(overlay: Overlay) -> None:
    import kubernetes_validate

    one = dict(overlay.of_kind("PodDisruptionBudget")[0])
    one["spec"] = {**one["spec"], "minAvailible": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, VERSIONS[0], strict=True)


def test_every_folder_of_k8s_is_rendered_by_a_test() -> None:
    folders = {path.parent.relative_to(K8S).as_posix() for path in K8S.rglob("kustomization.yaml")}
    assert {one for one in folders if one.startswith("overlays")} == set(OVERLAYS)


def test_objects_refer_only_to_what_there_is(overlay: Overlay) -> None:
    accounts = {one["metadata"]["name"] for one in overlay.of_kind("ServiceAccount")}
    services = {one["metadata"]["name"] for one in overlay.of_kind("Service")}
    made = {one["spec"]["secretName"] for one in overlay.of_kind("Certificate")}
    for workload in overlay.workloads:
        assert workload.pod["serviceAccountName"] in accounts
        if workload.kind == "StatefulSet":
            assert workload.made["spec"]["serviceName"] in services
        for container in workload.every_container:
            for mount in container.get("volumeMounts", ()):
                workload.volume(mount["name"])
        for volume in workload.pod.get("volumes", ()):
            if "configMap" in volume:
                overlay.named("ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                assert volume["secret"]["secretName"] in {*made, *SECRETS}
    labels = [workload.labels for workload in overlay.workloads]
    for kind in ("Service", "PodDisruptionBudget"):
        for one in overlay.of_kind(kind):
            selector = one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= found.items() for found in labels), one["metadata"]["name"]
    for service in overlay.of_kind("Service"):
        behind = [
            w for w in overlay.workloads if service["spec"]["selector"].items() <= w.labels.items()
        ]
        names = {port["name"] for w in behind for c in w.containers for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_every_image_has_a_version(overlay: Overlay) -> None:
    for _, container in containers(overlay):
        assert re.fullmatch(r"[a-z0-9./-]+:[0-9][\w.-]*", container["image"]), container["image"]


# ---- the pods' rights


def test_pods_have_no_rights_beyond_their_work(overlay: Overlay) -> None:
    for workload in overlay.workloads:
        pod, told_user = workload.pod, workload.pod["securityContext"]
        assert pod["automountServiceAccountToken"] is False
        assert told_user["runAsNonRoot"] is True
        assert told_user["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in workload.every_container:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            if container in workload.containers:
                assert "runAsUser" not in rights
                assert "add" not in rights["capabilities"]
            else:
                assert rights["capabilities"].get("add", []) in ([], ["CHOWN", "FOWNER"])


def test_pods_that_share_memory_run_as_one_user(overlay: Overlay) -> None:
    for workload in overlay.workloads:
        mounted = [volume for volume in workload.pod["volumes"] if "hostPath" in volume]
        if mounted:
            assert workload.pod["securityContext"]["runAsUser"] == OUR_USER
        for container in workload.every_container:
            for mount in container["volumeMounts"]:
                volume = workload.volume(mount["name"])
                if "hostPath" in volume:
                    # The store tells its clients where its sockets are, by its own path.
                    assert volume["hostPath"]["path"] == mount["mountPath"]


# ---- what they are told


def test_the_loaders_know_every_key_flag_and_variable(overlay: Overlay, tmp_path: Path) -> None:
    read = [
        told(workload, container, tmp_path / workload.name / container["name"])
        for workload, container in ours(overlay)
    ]
    assert {IndexConfig, StoreConfig, RouterConfig} <= {type(one) for one in read}


def test_every_container_of_ours_has_a_file_and_is_told_to_read_it(overlay: Overlay) -> None:
    for workload, container in ours(overlay):
        (path, _), *more = workload.files(container)
        assert not more or all(other.endswith((".py",)) for other, _ in more)
        assert f"--config={path}" in argv_of(container, {})


def test_every_command_is_one_that_there_is(
    overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers run services; hooks that run `kvtier` are parsed by its own parser."""
    hooks = [
        container["lifecycle"]["preStop"]["exec"]["command"]
        for _, container in containers(overlay)
        if "exec" in container.get("lifecycle", {}).get("preStop", {})
    ]
    drains = [words for words in hooks if words[0] == "kvtier"]
    parsed: list[argparse.Namespace] = []
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *given: object) -> argparse.Namespace:
        parsed.append(real(self, *given))  # type: ignore[call-overload]  # as it was called
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for words in drains:
        assert words[1:3] == ["worker", "drain"]
        with pytest.raises(SystemExit, match="0"):
            drain_command(words[3:])
    assert len(parsed) == len(drains)


def test_probes_ask_for_work_and_none_only_for_an_open_port(overlay: Overlay) -> None:
    looks = 0
    for _, container in containers(overlay):
        probes = [container[kind] for kind in PROBES if kind in container]
        for probe in probes:
            assert "tcpSocket" not in probe
            words = probe.get("exec", {}).get("command", ())
            if words[:1] == ["kvtier"]:
                # It reads what the service reads, and has longer than a look takes at most.
                assert words[1:] == ["health", *container["args"]]
                assert probe["timeoutSeconds"] > 2 * DEADLINE_S
                looks += 1
    assert looks == (4 if "production" in overlay.name else 0)


def test_replicas_stand_on_several_nodes(overlay: Overlay) -> None:
    for name in ("kvtier-index", "kvtier-router"):
        workload = overlay.workload(name)
        apart = workload.pod["affinity"]["podAntiAffinity"]
        kinds = ["preferredDuringSchedulingIgnoredDuringExecution"]
        if name == "kvtier-index" and "dev" not in overlay.name:
            kinds = ["requiredDuringSchedulingIgnoredDuringExecution"]
        assert list(apart) == kinds
        (term,) = apart[kinds[0]]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert selects(term["labelSelector"], workload.labels)


def test_ports_probes_and_addresses_agree_with_the_configuration(
    overlay: Overlay, tmp_path: Path
) -> None:
    for workload, container in ours(overlay):
        config = told(workload, container, tmp_path / workload.name / container["name"])
        listening = _ports(config)
        assert listening == {port["containerPort"] for port in container["ports"]}
        for kind in PROBES:
            probe = container[kind]
            for how in ("httpGet", "grpc"):
                if how in probe:
                    assert port_of(container, probe[how]["port"]) in listening


def _ports(config: Root) -> set[int]:
    found = set()
    if isinstance(config, IndexConfig | StoreConfig | RouterConfig | WorkerConfig):
        found.add(int(config.listen.bind.rpartition(":")[2]))
        if config.telemetry.metrics_bind is not None:
            found.add(int(config.telemetry.metrics_bind.rpartition(":")[2]))
    if isinstance(config, BridgeConfig) and config.telemetry.metrics_bind is not None:
        found.add(int(config.telemetry.metrics_bind.rpartition(":")[2]))
    if isinstance(config, StoreConfig):
        found.add(config.bulk.port)
    return found


def test_a_pod_has_time_for_all_that_it_does_before_it_ends(
    overlay: Overlay, tmp_path: Path
) -> None:
    for workload, container in ours(overlay):
        config = told(workload, container, tmp_path / workload.name / container["name"])
        grace_ms = 1000 * workload.pod["terminationGracePeriodSeconds"]
        match config:
            case IndexConfig():
                assert grace_ms > config.drain_ms_max
            case StoreConfig():
                assert grace_ms > 2 * config.drain_ms_max
            case RouterConfig():
                assert (
                    config.drain_delay_ms >= 2 * 1000 * container["readinessProbe"]["periodSeconds"]
                )
                assert grace_ms > config.drain_delay_ms + config.drain_ms_max
            case WorkerConfig():
                stop = config.hot_set.write_ms_max + config.drain_delay_ms + config.drain_ms_max
                assert grace_ms > stop


def test_memory_limits_hold_what_the_configuration_will_use(
    overlay: Overlay, tmp_path: Path
) -> None:
    index = config_of(overlay, "index", IndexConfig, tmp_path)
    for workload, container in containers(overlay):
        limit = number_of(container["resources"]["limits"]["memory"])
        wanted = in_memory(workload, container)
        if container["name"] == "vllm":
            wanted += connector_of(workload, container).staging_bytes
        if service_of(container) is not None:
            config = told(workload, container, tmp_path / workload.name / container["name"])
            wanted += needs(config, index) + for_looks(container)
            # What is preallocated, or will be filled, is there from the start.
            assert number_of(container["resources"]["requests"]["memory"]) == limit
        assert wanted <= limit, (workload.name, container["name"], wanted / (1 << 30))


def test_the_autoscaler_looks_at_a_metric_that_routers_have() -> None:
    base = rendered("base")
    (scaler,) = base.of_kind("HorizontalPodAutoscaler")
    asked = [one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"] if "pods" in one]
    assert asked
    assert set(asked) <= {definition.name for definition in ROUTER}
    assert "replicas" not in base.workload("kvtier-router").made["spec"]


# ---- who may talk to whom


def test_the_edges_of_the_network_are_those_of_the_design(overlay: Overlay) -> None:
    engine = ("kvtier-worker", 7730) if "dev" in overlay.name else ("kvtier-vllm", 8000)
    assert allowed_edges(overlay) == {
        ("kvtier-router", "kvtier-index", 7710),
        ("kvtier-store", "kvtier-index", 7710),
        (engine[0], "kvtier-index", 7710),
        ("kvtier-store", "kvtier-store", 7720),
        ("kvtier-store", "kvtier-store", 7721),
        ("kvtier-router", *engine),
    }


def test_only_labelled_namespaces_and_pods_come_in(overlay: Overlay) -> None:
    for policy in overlay.of_kind("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            for peer in rule["from"]:
                selector = peer.get("namespaceSelector", peer.get("podSelector"))
                assert selector, policy["metadata"]["name"]


def test_disruptions_leave_one_of_each_that_has_several(overlay: Overlay) -> None:
    budgets = {
        one["metadata"]["name"]: one["spec"] for one in overlay.of_kind("PodDisruptionBudget")
    }
    for workload in overlay.workloads:
        if workload.kind != "DaemonSet":
            assert budgets[workload.name]["maxUnavailable"] == 1
            assert workload.replicas >= 2


def test_files_in_k8s_are_read_by_some_kustomization() -> None:
    named = set()
    for path in K8S.rglob("kustomization.yaml"):
        text = path.read_text()
        assert yaml.safe_load(text)["kind"] in {"Kustomization", "Component"}
        named |= {(path.parent / one).resolve() for one in re.findall(r"[\w./-]+\.\w+", text)}
        named.add(path.resolve())
    for path in K8S.rglob("*"):
        assert path.is_dir() or path.resolve() in named, path


# ---- vLLM


def vllm(overlay: Overlay) -> tuple[Workload, Object, list[str]]:
    """The workload, the container that runs vLLM, and its arguments as it gets them."""
    workload = overlay.workload("kvtier-vllm")
    container = workload.containers[0]
    assert container["name"] == "vllm"
    words = argv_of(container, workload.environment(container, FIELDS))
    assert not any("$(" in word for word in words)
    return workload, container, words


@pytest.fixture(params=["overlays/vllm", "overlays/production"])
def engine(request: pytest.FixtureRequest) -> Overlay:
    return rendered(request.param)


def test_vllm_has_every_flag_that_kvtier_prints_and_no_other_for_kvtier(
    engine: Overlay, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, words = vllm(engine)
    model = engine.named("ConfigMap", "kvtier-model")["data"]
    asked = [
        f"--store={STORE_SOCKET}",
        f"--run-dir={SOCKETS}",
        f"--revision={model['revision']}",
        f"--block-tokens={model['block_tokens']}",
        "--format=json",
        f"--served-model-name={model['name']}",
        "--host=0.0.0.0",
        "--port=8000",
    ]
    assert vllm_command(["flags", model["id"], *asked]) == 0
    printed = flags_of(json.loads(capsys.readouterr().out))
    assert printed.pop("--model") == model["id"]
    assert flags_of(words) == printed
    assert words[:3] == ["vllm", "serve", model["directory"]]


def test_connector_and_bridge_speak_of_one_model_and_meet_at_the_same_sockets(
    engine: Overlay, tmp_path: Path
) -> None:
    workload, container, words = vllm(engine)
    settings = connector_of(workload, container)
    bridge = config_of(engine, "bridge", BridgeConfig, tmp_path)
    events: Any = flags_of(words)["--kv-events-config"]
    assert (settings.model_id, settings.revision) == (bridge.model.model_id, bridge.model.revision)
    assert flags_of(words)["--block-size"] == str(bridge.model.block_tokens)
    assert flags_of(words)["--served-model-name"] == bridge.model.served_names[0]
    assert (events["endpoint"], events["replay_endpoint"], events["topic"]) == (
        bridge.engine.events,
        bridge.engine.replay,
        bridge.engine.topic,
    )
    assert settings.residents == str(bridge.engine.residents)
    assert bridge.model.namespace == TOLD
    store = config_of(engine, "store", StoreConfig, tmp_path)
    assert store.run_dir is not None
    assert settings.store == f"unix:{store.run_dir / 'store.sock'}"
    assert bridge.store == store.instance
    assert bridge.engine.http == f"{FIELDS['status.podIP']}:8000"
    router = config_of(engine, "router", RouterConfig, tmp_path)
    assert router.texts == (f"*={bridge.model.directory}",)


def test_vllm_and_its_bridge_share_the_folders_of_their_sockets(engine: Overlay) -> None:
    workload = engine.workload("kvtier-vllm")
    for path in ("/run/kvtier/engine",):
        names = {
            mount["name"]
            for container in workload.every_container
            for mount in container["volumeMounts"]
            if mount["mountPath"] == path
        }
        assert len(names) == 1
        assert "emptyDir" in workload.volume(names.pop())
    assert f"{path}/sockets" in argv_of(workload.pod["initContainers"][0], {})


def test_vllm_asks_for_a_gpu_and_stores_stand_where_gpus_are(engine: Overlay) -> None:
    _, container, _ = vllm(engine)
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    for name in ("kvtier-store", "kvtier-vllm"):
        tolerated = [one["key"] for one in engine.workload(name).pod["tolerations"]]
        assert tolerated == ["nvidia.com/gpu"]
    assert engine.workload("kvtier-store").pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize(("script", "status"), [("probe.py", 1), ("drain.py", 0)])
def test_an_engine_that_does_not_answer_fails_its_probe_and_holds_up_no_end(
    script: str, status: int
) -> None:
    path = K8S / "overlays" / "vllm" / "scripts" / script
    argv = [sys.executable, str(path), f"http://127.0.0.1:{free_port()}", "1"]
    ended = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert ended.returncode == status


# ---- production


@pytest.fixture
def production() -> Overlay:
    return rendered("overlays/production")


def test_nothing_in_production_is_open_but_pages_of_metrics(
    production: Overlay, tmp_path: Path
) -> None:
    for workload, container in ours(production):
        config = told(workload, container, tmp_path / workload.name / container["name"])
        text = "".join(text for _, text in workload.files(container))
        assert not re.search(r"^insecure", text, re.MULTILINE)
        match config:
            case IndexConfig() | StoreConfig():
                check_listen(config.listen)
                assert config.listen.tls is not None
                assert config.listen.tls.ca_file is not None
            case RouterConfig():
                check_router(config)
                assert config.upstream.bearer is not None
        if not isinstance(config, IndexConfig):
            assert isinstance(config, StoreConfig | RouterConfig | BridgeConfig)
            assert config.index.tls is not None
            assert config.index.tls.cert_file is not None


def test_certificates_carry_the_role_of_who_has_them_and_the_names_they_are_called_by(
    production: Overlay, tmp_path: Path
) -> None:
    certificates = {
        one["spec"]["secretName"]: one["spec"] for one in production.of_kind("Certificate")
    }
    for workload, container in ours(production):
        service = service_of(container)
        (mounted,) = [
            volume["secret"]["secretName"]
            for mount in container["volumeMounts"]
            if mount["name"] == "tls" and "secret" in (volume := workload.volume("tls"))
        ]
        (uri,) = certificates[mounted]["uris"]
        principal = from_uri(uri)
        assert principal.role == service
        config = told(workload, container, tmp_path / workload.name / container["name"])
        if isinstance(config, StoreConfig):
            assert principal.may_publish_as(InstanceId("any-node"))
            address = reachable(config, 7720)
            assert address == "10-1-2-3.kvtier-store.kvtier.svc:7720"
            (pattern,) = certificates[mounted]["dnsNames"]
            assert pattern.removeprefix("*") == address.removeprefix("10-1-2-3")[:-5]
        if isinstance(config, BridgeConfig):
            assert principal.may_publish_as(InstanceId(f"{workload.name}-6f-abc"))
            assert not principal.may_publish_as(InstanceId("another"))
        if not isinstance(config, IndexConfig):
            assert isinstance(config, StoreConfig | RouterConfig | BridgeConfig)
            hosts = [target.rpartition(":")[0] for target in config.index.targets]
            assert sorted(hosts) == sorted(certificates["kvtier-index-tls"]["dnsNames"])


def test_monitors_scrape_every_service_under_the_name_that_the_rules_know(
    production: Overlay,
) -> None:
    scraped = yaml.safe_load((K8S.parent / "deploy" / "prometheus.yml").read_text())
    known = {job["job_name"] for job in scraped["scrape_configs"]}
    services = production.of_kind("Service")
    jobs = set()
    for monitor in production.of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (found,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in found["spec"]["ports"]]
        relabelled = [one["replacement"] for one in endpoint.get("relabelings", ())]
        label = monitor["spec"].get("jobLabel", "")
        jobs.add(relabelled[0] if relabelled else found["metadata"]["labels"][label])
    assert jobs == {"kvtier-index", "kvtier-store", "kvtier-router", "kvtier-bridge"}
    assert jobs == known - {"kvtier-worker"}

"""docs/kubernetes.md, followed from an empty folder as far as one comes without a cluster.

What the page's Secrets open, and the request that it sends, are in `test_kubernetes_pods`.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from kvtier.config import load
from kvtier_router.front.tenants import TenantBook
from kvtier_router.metrics import DEFINITIONS as ROUTER
from kvtier_services.bridge.config import BridgeConfig
from kvtier_services.worker.config import WorkerConfig
from tests.harness.ports import free_port
from tests.support.dockerfile import read_dockerfile
from tests.support.kubernetes_page import (
    MINE,
    Follower,
    attached,
    commands,
    folder_of_follower,
    kustomizations,
    object_of,
    references,
    rendered_own,
    text,
)
from tests.support.manifest_configs import SECRETS, connector_of, told
from tests.support.manifests import K8S, KUBECTL, allowed_edges, rendered

pytestmark = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl with kustomize 5 is not installed: nothing renders k8s/"
)

NOT_HERE = ("docker", "curl")
"""Programs that the page runs, and that need an engine of containers or a cluster that serves."""
INLINE = [one for one in re.findall(r"`(kubectl [^`\n]+)`", text()) if one != "kubectl kustomize"]


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Follower:
    """Who has typed every command of the page, in order."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, and the page draws secrets with it")
    own = next(one for one in kustomizations() if "overlays/vllm" in one)
    root = folder_of_follower(tmp_path_factory.mktemp("follower"), own)
    followed = Follower(root, f"http://127.0.0.1:{free_port()}")
    for line in commands():
        if line.split()[0] not in NOT_HERE:
            followed.type(line)
    return followed


def test_every_command_works_as_it_stands_or_comes_as_far_as_the_cluster(
    follower: Follower,
) -> None:
    words = {line.split()[0] for line in commands()}
    assert words == {"docker", "kubectl", "curl", "kvtier", "printf", "openssl"}
    rendered_here = next(said for line, said in follower.said.items() if " kustomize " in line)
    assert list(yaml.safe_load_all(rendered_here)) == list(rendered("overlays/dev").objects)
    applied = [line for line in follower.said if " apply " in line]
    assert len(applied) >= 2


@pytest.mark.parametrize("line", INLINE)
def test_commands_within_sentences_come_as_far_as_the_cluster_too(
    follower: Follower, line: str
) -> None:
    follower.type(line)


def test_secrets_are_the_ones_that_the_overlay_mounts(follower: Follower) -> None:
    made = {name: set(files) for name, files in follower.secrets.items()}
    assert made == {name: set(files) for name, files in SECRETS.items()}
    assert follower.secrets["kvtier-engine"]["api_key"].strip().isalnum()
    # vLLM compares it with what a request shows, a line end included.
    assert not follower.secrets["kvtier-engine"]["api_key"].endswith(b"\n")
    book = TenantBook(follower.folder / "keys.toml", b"a secret of at least sixteen bytes")
    assert book.find(f"Bearer {follower.key}").tenant_id == "team"


def test_objects_that_commands_name_are_in_the_overlay() -> None:
    dev, vllm = rendered("overlays/dev"), rendered("overlays/vllm")
    named = [one for line in [*commands(), *INLINE] for one in references(line)]
    assert len(named) >= 4
    for reference in named:
        assert object_of(vllm if "vllm" in reference else dev, reference), reference
    (forward,) = [line for line in commands() if "port-forward" in line]
    here, there = forward.split()[-1].split(":")
    service = object_of(dev, references(forward)[0])
    assert int(there) in {port["port"] for port in service["spec"]["ports"]}
    assert any(f"http://127.0.0.1:{here}/" in line for line in commands() if "curl" in line)


def test_the_image_that_is_built_is_a_target_and_every_image_of_ours_has_one() -> None:
    (line,) = [one for one in commands() if one.startswith("docker ")]
    words = shlex.split(line)
    assert words[-1] == "kvtier"
    file = words[words.index("--file") + 1].removeprefix("kvtier/")
    stages = read_dockerfile(K8S.parent / file).stages
    assert words[words.index("--target") + 1] in stages
    tag = words[words.index("--tag") + 1]
    images = {
        container["image"]
        for name in ("overlays/dev", "overlays/production")
        for workload in rendered(name).workloads
        for container in workload.every_container
    }
    assert tag in images
    for image in images:
        name, version = image.split(":")
        assert version == tag.split(":")[1]
        assert f"`{name}`" in text()
        if name not in {"kvtier-vllm", "kvtier-worker"}:
            assert name.removeprefix("kvtier-") in stages


def test_words_of_a_model_need_what_the_page_says(tmp_path: Path) -> None:
    dev = rendered("overlays/dev")
    worker = dev.workload("kvtier-worker")
    (container,) = worker.containers
    assert 'set `model = "smollm2"`' in text()
    ((_, written),) = worker.files(container)
    path = tmp_path / "worker.toml"
    path.write_text(written.replace('model = "fake"', 'model = "smollm2"'), encoding="utf-8")
    assert load(WorkerConfig, ["--config", str(path)], {}).config.model.model == "smollm2"


def test_the_adapter_has_a_series_that_routers_export() -> None:
    (shown,) = [one for one in text().split("```yaml\n")[1:] if one.startswith("rules:")]
    (rule,) = yaml.safe_load(shown.split("```")[0])["rules"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series in {definition.name for definition in ROUTER}
    (scaler,) = rendered("base").of_kind("HorizontalPodAutoscaler")
    assert series in [
        one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"] if "pods" in one
    ]


@pytest.mark.parametrize("block", kustomizations(), ids=range(len(kustomizations())))
def test_every_kustomization_of_the_page_is_rendered(block: str, tmp_path: Path) -> None:
    import kubernetes_validate

    assert len(kustomizations()) >= 3
    overlay = rendered_own(tmp_path, block)
    for one in overlay.objects:
        kubernetes_validate.validate(one, "1.30", strict=True)
    assert {"kvtier-index", "kvtier-store", "kvtier-router"} <= {w.name for w in overlay.workloads}


def test_a_deployment_of_somebody_else_gets_connector_and_bridge_and_keeps_the_rest(
    tmp_path: Path,
) -> None:
    overlay = rendered_own(tmp_path, attached())
    mine = overlay.workload("mine")
    server, bridge = mine.containers
    assert (server["name"], bridge["name"]) == ("server", "kvtier-bridge")
    assert connector_of(mine, server).model_id == "org/model"
    assert mine.pod["securityContext"]["runAsUser"] == 10_001
    assert mine.labels.items() >= {"app": "mine", "kvtier/role": "engine"}.items()
    read = told(mine, bridge, tmp_path / "read")
    assert isinstance(read, BridgeConfig)
    assert read.model.served_names == ("chat",)
    # Without the component it is theirs again.
    before = yaml.safe_load(MINE)["spec"]["template"]["spec"]
    (their,) = before["containers"]
    for key in ("image", "ports", "readinessProbe", "resources"):
        assert server[key] == their[key]
    assert server["args"][: len(their["args"])] == their["args"]
    assert mine.pod["terminationGracePeriodSeconds"] == before["terminationGracePeriodSeconds"]


def test_the_table_of_edges_on_the_page_has_every_port() -> None:
    section = text().split("## Who may talk to whom")[1].split("\n## ")[0]
    names = ("overlays/dev", "overlays/vllm", "overlays/production")
    ports = {port for name in names for _, _, port in allowed_edges(rendered(name))}
    assert ports | {8000} == {int(port) for port in re.findall(r"\b[78]\d{3}\b", section)}

"""What `kubectl kustomize` makes of a folder in k8s/, and the pods that a cluster makes of it.

What must not live here: processes (`pods`), what a test expects.
"""

import functools
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[2] / "k8s"
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")
_RENDER_S = 60.0
_BESIDE_PYTHON = Path(sys.executable).parent
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

Object = Mapping[str, Any]


def kubectl() -> str | None:
    """Path of a kubectl whose kustomize knows components (5.x); None where there is none.

    That of the machine, or else the one that the extra `dev` puts beside Python.
    """
    for found in (shutil.which("kubectl"), shutil.which("kubectl", path=str(_BESIDE_PYTHON))):
        if found is None:
            continue
        asked = [found, "version", "--client", "--output=json"]
        told = subprocess.run(asked, capture_output=True, check=False, text=True)
        try:
            version = json.loads(told.stdout)["kustomizeVersion"]
        except (ValueError, KeyError):
            continue
        if version.startswith("v5"):
            return found
    return None


KUBECTL = kubectl()


@dataclass(frozen=True, slots=True)
class Overlay:
    """A rendered folder."""

    name: str
    objects: Sequence[Object]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        """The object of that name; a name without the hash that kustomize adds is one as well."""
        found = [
            one
            for one in self.of_kind(kind)
            if one["metadata"]["name"] == name or one["metadata"]["name"].rpartition("-")[0] == name
        ]
        assert len(found) == 1, (kind, name, [one["metadata"]["name"] for one in found])
        return found[0]

    @property
    def workloads(self) -> list["Workload"]:
        return [Workload(self, one) for one in self.of_kind(*WORKLOADS)]

    def workload(self, name: str) -> "Workload":
        return next(one for one in self.workloads if one.name == name)


@dataclass(frozen=True, slots=True)
class Workload:
    """A StatefulSet, DaemonSet or Deployment."""

    overlay: Overlay = field(repr=False)
    made: Object

    @property
    def name(self) -> str:
        return str(self.made["metadata"]["name"])

    @property
    def kind(self) -> str:
        return str(self.made["kind"])

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.made["spec"]["template"]["metadata"]["labels"]
        return found

    @property
    def pod(self) -> Object:
        found: Object = self.made["spec"]["template"]["spec"]
        return found

    @property
    def containers(self) -> list[Object]:
        return list(self.pod["containers"])

    @property
    def every_container(self) -> list[Object]:
        return [*self.pod.get("initContainers", ()), *self.containers]

    @property
    def replicas(self) -> int:
        """How many a cluster starts with; of a DaemonSet, one (a node)."""
        if self.kind == "DaemonSet":
            return 1
        for scaler in self.overlay.of_kind("HorizontalPodAutoscaler"):
            if scaler["spec"]["scaleTargetRef"]["name"] == self.name:
                return int(scaler["spec"]["minReplicas"])
        return int(self.made["spec"].get("replicas", 1))

    def volume(self, name: str) -> Object:
        return next(one for one in self.pod["volumes"] if one["name"] == name)

    def files(self, container: Object) -> Iterator[tuple[str, str]]:
        """Path in the container and text of every file that a ConfigMap gives it."""
        for mount in container.get("volumeMounts", ()):
            volume = self.volume(mount["name"])
            if "configMap" not in volume:
                continue
            data = self.overlay.named("ConfigMap", volume["configMap"]["name"])["data"]
            for name, text in data.items():
                yield f"{mount['mountPath']}/{name}", text

    def secret_files(
        self, container: Object, secrets: Mapping[str, Mapping[str, bytes]]
    ) -> Iterator[tuple[str, Mapping[str, bytes]]]:
        """Where a container mounts those of `secrets`, and their files."""
        for mount in container.get("volumeMounts", ()):
            name = self.volume(mount["name"]).get("secret", {}).get("secretName")
            if name in secrets:
                yield mount["mountPath"], secrets[name]

    def environment(
        self,
        container: Object,
        fields: Mapping[str, str],
        secrets: Mapping[str, Mapping[str, bytes]] | None = None,
    ) -> dict[str, str]:
        """Variables as the kubelet makes them; `fields` are those of the downward API."""
        found: dict[str, str] = {}
        for one in container.get("env", ()):
            if "value" in one:
                found[one["name"]] = expanded(one["value"], found)
                continue
            source = one["valueFrom"]
            if "fieldRef" in source:
                found[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                reference = source["configMapKeyRef"]
                data = self.overlay.named("ConfigMap", reference["name"])["data"]
                found[one["name"]] = data[reference["key"]]
            else:
                reference = source["secretKeyRef"]
                content = (secrets or {}).get(reference["name"], {})
                found[one["name"]] = content.get(reference["key"], b"secret").decode()
        return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet replaces it: unknown names stay."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def argv_of(container: Object, variables: Mapping[str, str]) -> list[str]:
    """Command and arguments as they are executed."""
    words = [*container.get("command", ()), *container.get("args", ())]
    return [expanded(word, variables) for word in words]


def number_of(quantity: object) -> int:
    """Bytes, or whatever is counted, of a quantity such as 2Gi."""
    text = str(quantity)
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def port_of(container: Object, port: object) -> int:
    """The number of a port that is given by number or by name."""
    if isinstance(port, int):
        return port
    for one in container["ports"]:
        if one.get("name") == port:
            return int(one["containerPort"])
    raise AssertionError(f"{container['name']} has no port {port}")


@functools.cache
def rendered(name: str) -> Overlay:
    """Render k8s/NAME by kubectl."""
    return rendered_at(K8S / name, name)


def rendered_at(folder: Path, name: str) -> Overlay:
    """Render a folder by kubectl."""
    assert KUBECTL is not None
    made = subprocess.run(
        [KUBECTL, "kustomize", str(folder)],
        capture_output=True,
        check=False,
        text=True,
        timeout=_RENDER_S,
    )
    assert made.returncode == 0, made.stderr
    assert not made.stderr, made.stderr
    return Overlay(name, [one for one in yaml.safe_load_all(made.stdout) if one])


def toml_of(text: str) -> dict[str, Any]:
    """A TOML document."""
    return tomllib.loads(text)


# Who may talk to whom


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; of operators it knows those in use here."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for one in selector.get("matchExpressions", ()):
        if one["operator"] == "In":
            if labels.get(one["key"]) not in one["values"]:
                return False
        else:
            assert one["operator"] == "Exists", one
            if one["key"] not in labels:
                return False
    return True


def _allows(overlay: Overlay, one: Workload, other: Workload, port: int, *, out: bool) -> bool:
    kind, peers = ("egress", "to") if out else ("ingress", "from")
    for policy in overlay.of_kind("NetworkPolicy"):
        spec = policy["spec"]
        if not selects(spec["podSelector"], one.labels):
            continue
        for rule in spec.get(kind, ()):
            if port not in [told["port"] for told in rule["ports"] if told["protocol"] == "TCP"]:
                continue
            for peer in rule[peers]:
                if "namespaceSelector" not in peer and selects(peer["podSelector"], other.labels):
                    return True
    return False


def allowed_edges(overlay: Overlay) -> set[tuple[str, str, int]]:
    """(who calls, who is called, port) of all that policies on both sides let through."""
    for direction in ("Ingress", "Egress"):
        assert any(
            policy["spec"]["podSelector"] == {} and direction in policy["spec"]["policyTypes"]
            for policy in overlay.of_kind("NetworkPolicy")
        ), f"{direction} is not denied by default"
    return {
        (one.name, other.name, port["containerPort"])
        for one in overlay.workloads
        for other in overlay.workloads
        for container in other.containers
        for port in container.get("ports", ())
        if _allows(overlay, one, other, port["containerPort"], out=True)
        and _allows(overlay, other, one, port["containerPort"], out=False)
    }

"""docs/kubernetes.md as somebody follows it: its kustomizations, commands, and Secrets.

A follower has an empty folder with this repository in it as `kvtier`, and goes from section to
section. What must not live here: what a test expects, processes (`pods`).
"""

import re
import shlex
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.harness.processes import clean_environment, kvtier_command
from tests.support.manifests import K8S, KUBECTL, Object, Overlay, rendered_at

PAGE = K8S.parent / "docs" / "kubernetes.md"
OWN = "own"
"""The folder of the follower's own overlay, beside the repository."""
_FENCED = re.compile(r"^```(\w*)\n(.+?)^```$", re.MULTILINE | re.DOTALL)
_STEP_S = 60.0
_REGISTRY = "registry.example/"
MINE = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: mine
  labels: {kvtier/attach: vllm}
spec:
  selector:
    matchLabels: {app: mine}
  template:
    metadata:
      labels: {app: mine}
    spec:
      terminationGracePeriodSeconds: 60
      containers:
      - name: server
        image: mine:1
        args: [--model=/models/model, --host=0.0.0.0, --port=8000]
        env: []
        ports: [{name: http, containerPort: 8000}]
        readinessProbe:
          httpGet: {path: /health, port: http}
        resources:
          limits: {memory: 16Gi}
        volumeMounts: [{name: models, mountPath: /models}]
      volumes:
      - name: models
        persistentVolumeClaim: {claimName: mine}
"""
"""A Deployment as somebody has it before they read the page."""


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def kustomizations() -> list[str]:
    """Every kustomization.yaml that is shown, with images that have a plain name."""
    return [
        body.replace(_REGISTRY, "")
        for kind, body in _FENCED.findall(text())
        if kind == "yaml" and body.startswith("# kustomization.yaml")
    ]


def attached() -> str:
    """The kustomization that adds the connector to a Deployment that is there."""
    (found,) = [one for one in kustomizations() if "my-vllm.yaml" in one]
    return found


def commands(section: str | None = None) -> list[str]:
    """Every line of the shell blocks as it is typed, without remarks; of one section, or of all."""
    page = text()
    if section is not None:
        page = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = [body for kind, body in _FENCED.findall(page) if not kind]
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def folder_of_follower(root: Path, kustomization: str | None = None) -> Path:
    """An empty folder with the repository in it, and an overlay of the follower's own."""
    shutil.copytree(K8S, root / "kvtier" / "k8s")
    own = root / OWN
    own.mkdir()
    if kustomization is not None:
        (own / "kustomization.yaml").write_text(kustomization, encoding="utf-8")
        (own / "my-vllm.yaml").write_text(MINE, encoding="utf-8")
    return root


def rendered_own(root: Path, kustomization: str) -> Overlay:
    """What the follower's own overlay makes, in an empty folder `root`."""
    return rendered_at(folder_of_follower(root, kustomization) / OWN, OWN)


def joined(overlay: Overlay, own: Overlay) -> Overlay:
    """`overlay` with the Deployments of `own` in its namespace, and what they mount.

    Both are made of the same base, and kustomize names ConfigMaps by what is in them: so this is
    what a cluster has after both were applied but for the ConfigMaps that nobody mounts any more.
    """
    known = {(one["kind"], one["metadata"]["name"]) for one in overlay.objects}
    more = [
        one
        for one in own.of_kind("Deployment", "ConfigMap")
        if (one["kind"], one["metadata"]["name"]) not in known
    ]
    return Overlay(f"{overlay.name}+{own.name}", [*overlay.objects, *more])


@dataclass(slots=True)
class Follower:
    """Who types the commands of the page, in an empty folder that has the repository in it."""

    folder: Path
    server: str
    """Where no cluster answers."""
    said: dict[str, str] = field(default_factory=dict)
    """What each command printed."""
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name of the Secret that a command would have made."""
    key: str = ""
    """What `kvtier tokens key` has drawn."""

    def type(self, line: str) -> None:
        """Run a command as it stands, with what the reader is told to put in; fails if it fails.

        What wants a cluster goes as far as the cluster: it is refused there, not by kubectl.
        """
        words = shlex.split(line.split(" > ")[0].split(" | ")[0])
        if words[0] == "kubectl" and "create" in words:
            self._create(line)
        elif words[0] == "kubectl" and "kustomize" not in words:
            self._ask_cluster(line)
        else:
            self.said[line] = self._run(line.replace("SHA256_OF_THE_KEY", self._digest())).stdout
            if words[:3] == ["kvtier", "tokens", "key"]:
                self.key = self.said[line].split()[0]

    def _digest(self) -> str:
        for said in self.said.values():
            found = re.search(r'sha256 = "([0-9a-f]{64})"', said)
            if found is not None:
                return found[1]
        return "SHA256_OF_THE_KEY"

    def _create(self, line: str) -> None:
        made = self._run(f"{line} --dry-run=client --output=yaml").stdout
        self.said[line] = made
        one: Object = yaml.safe_load(made)
        if one["kind"] == "Secret":
            content = {name: b64decode(data) for name, data in one["data"].items()}
            self.secrets[one["metadata"]["name"]] = content

    def _ask_cluster(self, line: str) -> None:
        done = self._start(f"{line} --server={self.server}")
        self.said[line] = done.stderr
        assert done.returncode == 1, (line, done.stderr)
        assert "connection refused" in done.stderr, (line, done.stderr)

    def _run(self, line: str) -> subprocess.CompletedProcess[str]:
        done = self._start(line)
        assert done.returncode == 0, (line, done.stderr)
        return done

    def _start(self, line: str) -> subprocess.CompletedProcess[str]:
        assert KUBECTL is not None
        there = [str(Path(KUBECTL).parent), str(Path(kvtier_command()[0]).parent)]
        environment = clean_environment() | {"HOME": str(self.folder)}
        environment["PATH"] = ":".join([*there, environment["PATH"]])
        return subprocess.run(
            ["bash", "-ec", line], cwd=self.folder, env=environment, capture_output=True,
            check=False, text=True, timeout=_STEP_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip


def object_of(overlay: Overlay, reference: str) -> Object:
    """What `statefulset/NAME` or `service/NAME` means in an overlay."""
    kind, _, name = reference.partition("/")
    (found,) = [
        one
        for one in overlay.objects
        if (one["kind"].lower(), one["metadata"]["name"]) == (kind, name)
    ]
    return found


def references(line: str) -> Sequence[str]:
    """Words of a command that name an object."""
    kinds = "statefulset|deployment|daemonset|service"
    return re.findall(rf"\b(?:{kinds})/[\w-]+", line)

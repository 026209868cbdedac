"""Pods without a cluster: what a kubelet would start of rendered manifests, as processes of this
machine.

What is executed is what the manifests say: command, arguments, environment, files of ConfigMaps,
probes, hooks. These substitutions are made, and no others:

- a pod's address is a loopback address of its own, so that ports stay as they are; `0.0.0.0`,
  `127.0.0.1` and `localhost` are that address, a service's or pod's DNS name is a pod's address;
- a volume's mount path is a folder below the test's: one a node for hostPath, one a pod for
  emptyDir, files of their own for ConfigMaps and Secrets;
- a claimed volume is a folder that the test fills (`claims/NAME` in the site's root);
- the user 10001 is the one who runs the test;
- vLLM is a process that stands for it (`fake_pod_vllm`), also where a container names no command:
  the entry point of its image is `vllm serve`;
- certificates are issued to whom the Certificates name, for the pods' addresses as well;
- what the test adds to the environment of a service (`Terms.added`), for sizes that this machine
  does not have, and fewer replicas (`Terms.replicas`).

What must not live here: what a test expects.
"""

import datetime
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvtier.security.certs import Issued, Validity, issue, new_authority
from kvtier.security.roles import from_uri
from tests.harness.processes import (
    REPOSITORY,
    Launch,
    Process,
    ProcessRunner,
    clean_environment,
    kvtier_command,
    python_module,
)
from tests.harness.readiness import grpc_ready
from tests.harness.waiting import eventually
from tests.support.manifest_configs import service_of
from tests.support.manifests import Object, Overlay, Workload, argv_of, port_of

NODES = ("n0", "n1")
_USER = "10001"
_BY_DASHES = "{dashes}.kvtier-store.kvtier.svc"
_SUFFIXES = ("", ".kvtier", ".kvtier.svc", ".kvtier.svc.cluster.local")
_EXEC_S = 90.0
_START_S = 180.0
_LOOPBACK = re.compile(r"\b(?:0\.0\.0\.0|127\.0\.0\.1|localhost)(?=:\d|\b)")


@contextmanager
def network() -> Iterator[str]:
    """A network of loopback addresses that no other test process has, such as `127.20.7.`."""
    for number in range(1 << 14):
        prefix = f"127.{64 + number // 256 % 64}.{(os.getpid() + number) % 256}."
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lease:
            try:
                lease.bind(f"\0kvtier-test-network-{prefix}")
            except OSError:
                continue
            yield prefix
            return
    raise AssertionError("no network is free")


@dataclass(slots=True)
class Pod:
    """One pod, on a node."""

    name: str
    workload: Workload
    node: str
    address: str
    folder: Path
    processes: dict[str, Process] = field(default_factory=dict)
    """By container, of those that were started."""

    @property
    def fields(self) -> dict[str, str]:
        return {
            "metadata.name": self.name,
            "metadata.namespace": "kvtier",
            "status.podIP": self.address,
            "spec.nodeName": self.node,
        }

    def container(self, name: str) -> Object:
        return next(one for one in self.workload.every_container if one["name"] == name)


@dataclass(slots=True)
class Site:
    """All pods of an overlay, on two nodes."""

    overlay: Overlay
    runner: ProcessRunner
    root: Path
    prefix: str
    terms: "Terms"
    pods: list[Pod] = field(default_factory=list)
    seen: set[tuple[str, str, int]] = field(default_factory=set)
    """Connections that `look` has found."""
    authority: Issued | None = None
    """Who has signed the certificates, where there are any."""

    def __post_init__(self) -> None:
        for workload in self.overlay.workloads:
            count = min(workload.replicas, self.terms.replicas)
            if workload.kind == "DaemonSet":
                count = len(NODES)
            for number in range(count):
                name = f"{workload.name}-{number}"
                self.pods.append(
                    Pod(
                        name,
                        workload,
                        NODES[number % len(NODES)],
                        f"{self.prefix}{len(self.pods) + 1}",
                        self.root / name,
                    )
                )

    def of(self, workload: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.workload.name == workload]

    # Starting

    def start(self) -> None:
        """Start every container of every pod, and wait for all startup and readiness probes."""
        for pod in self.pods:
            for container in pod.workload.pod.get("initContainers", ()):
                self._run(pod, container, self.argv(pod, container))
        for pod in self.pods:
            for container in pod.workload.containers:
                self._spawn(pod, container)
        every = [(pod, one) for pod in self.pods for one in pod.workload.containers]
        # A probe that is a process of ours comes when it will pass: each costs half a second.
        every.sort(key=lambda one: _is_ours(one[1].get("startupProbe", {})))
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            for pod, container in every:
                if kind in container and not _is_repeated(container, kind):
                    self._until(pod, container, kind)

    def _spawn(self, pod: Pod, container: Object) -> None:
        launch = Launch(
            f"{pod.name}.{container['name']}",
            self.argv(pod, container),
            environment=self.environment(pod, container),
            directory=pod.folder,
        )
        pod.processes[container["name"]] = self.runner.spawn(launch)

    def _until(self, pod: Pod, container: Object, kind: str) -> None:
        process = pod.processes[container["name"]]
        what = f"{kind} of {process.name}"
        eventually(lambda: not process.alive or self.probe(pod, container, kind), _START_S, what)
        assert process.alive, process.log_tail()

    def argv(self, pod: Pod, container: Object) -> Sequence[str]:
        """Its command as this machine runs it."""
        variables = pod.workload.environment(container, pod.fields, self.terms.secrets)
        words = [self.here(pod, container, word) for word in argv_of(container, variables)]
        return self._found(words if "command" in container else ["vllm", "serve", *words])

    def environment(self, pod: Pod, container: Object) -> dict[str, str]:
        """Its variables as this machine sets them."""
        variables = pod.workload.environment(container, pod.fields, self.terms.secrets)
        told = {name: self.here(pod, container, text) for name, text in variables.items()}
        added = dict(self.terms.added.get(service_of(container) or container["name"], {}))
        return told | added | {"PYTHONPATH": str(REPOSITORY)}

    def _found(self, words: Sequence[str]) -> Sequence[str]:
        if words[0] == "kvtier":
            return kvtier_command(*words[1:])
        if words[0] == "vllm":
            return python_module("tests.support.fake_pod_vllm", *words[1:])
        program = shutil.which(words[0])
        assert program is not None, words[0]
        return (program, *words[1:])

    def _run(self, pod: Pod, container: Object, words: Sequence[str]) -> None:
        ended = subprocess.run(
            self._found(words),
            env=clean_environment() | self.environment(pod, container),
            cwd=pod.folder,
            capture_output=True,
            check=False,
            timeout=_EXEC_S,
        )
        assert ended.returncode == 0, (pod.name, words, ended.stderr)

    # Substitutions

    def here(self, pod: Pod, container: Object, text: str) -> str:
        """`text` with the paths, names, addresses and users of this machine."""
        pod.folder.mkdir(parents=True, exist_ok=True)
        places = self._places(pod, container)
        if places:  # in one go: what is put in place of one path may look like another
            paths = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
            found = rf"(?<![\w.-])({paths})(?![\w.-])"
            text = re.sub(found, lambda match: str(places[match[1]]), text)
        text = text.replace(_BY_DASHES, pod.address)
        for name, address in self._names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=:\d)", address, text)
        text = _LOOPBACK.sub(pod.address, text)
        return str(os.getuid()) if text == _USER else text

    @property
    def _names(self) -> dict[str, str]:
        found = {}
        for pod in self.pods:
            service = pod.workload.made["spec"].get("serviceName")
            for suffix in _SUFFIXES if service else ():
                found[f"{pod.name}.{service}{suffix}"] = pod.address
        return found

    def _places(self, pod: Pod, container: Object) -> dict[str, Path]:
        found = {}
        for mount in container.get("volumeMounts", ()):
            path, volume = mount["mountPath"], pod.workload.volume(mount["name"])
            if "hostPath" in volume:
                place = self.root / pod.node / volume["hostPath"]["path"].lstrip("/")
            else:
                place = pod.folder / container["name"] / mount["name"]
                if "emptyDir" in volume:
                    place = pod.folder / mount["name"]
                if "persistentVolumeClaim" in volume:
                    place = self.root / "claims" / volume["persistentVolumeClaim"]["claimName"]
            found[path] = place
            if not place.exists():
                place.mkdir(parents=True)
                self._fill(pod, container, mount, place)
        return found

    def _fill(self, pod: Pod, container: Object, mount: Object, place: Path) -> None:
        volume = pod.workload.volume(mount["name"])
        if "configMap" in volume:
            data = self.overlay.named("ConfigMap", volume["configMap"]["name"])["data"]
            for name, text in data.items():
                (place / name).write_text(self.here(pod, container, text), encoding="utf-8")
        if "secret" in volume:
            wanted = volume["secret"]["secretName"]
            content_of = self.terms.secrets.get(wanted) or self._issued(wanted)
            for name, content in content_of.items():
                (place / name).write_bytes(content)
                (place / name).chmod(0o400)

    def _issued(self, secret_name: str) -> dict[str, bytes]:
        """What cert-manager would put into a Secret."""
        (spec,) = [
            one["spec"]
            for one in self.overlay.of_kind("Certificate")
            if one["spec"]["secretName"] == secret_name
        ]
        if self.authority is None:
            self.authority = new_authority(Validity(_now(), 30))
        hosts = [*spec["dnsNames"], *(pod.address for pod in self.pods)]
        (uri,) = spec["uris"]
        made = issue(self.authority, from_uri(uri), hosts, Validity(_now(), 10))
        return {"tls.crt": made.cert, "tls.key": made.key, "ca.crt": self.authority.cert}

    # Probes and hooks

    def probe(self, pod: Pod, container: Object, kind: str) -> bool:
        """Execute a probe once, as it is written."""
        told = container[kind]
        timeout_s = float(told.get("timeoutSeconds", 1))
        if "httpGet" in told:
            ask = told["httpGet"]
            port = port_of(container, ask["port"])
            return _got(pod.address, port, ask["path"], ask.get("scheme", "HTTP"), timeout_s)
        if "grpc" in told:
            address = f"{pod.address}:{told['grpc']['port']}"
            return grpc_ready(address, told["grpc"].get("service", ""))()
        words = [self.here(pod, container, word) for word in told["exec"]["command"]]
        ended = subprocess.run(
            self._found(words),
            env=clean_environment() | self.environment(pod, container),
            cwd=pod.folder,
            capture_output=True,
            check=False,
            timeout=_EXEC_S,
        )
        return ended.returncode == 0

    def end(self, pod: Pod) -> dict[str, int]:
        """End a pod as a kubelet does: preStop, then SIGTERM, each container by itself.

        Returns their exit statuses; fails where one takes longer than the grace period.
        """
        hooks = {
            container["name"]: container["lifecycle"]["preStop"]["exec"]["command"]
            for container in pod.workload.containers
            if "lifecycle" in container
        }
        for name, process in pod.processes.items():
            if name not in hooks:
                process.terminate()
        for name, command in hooks.items():
            container = pod.container(name)
            self._run(pod, container, [self.here(pod, container, word) for word in command])
            pod.processes[name].terminate()
        grace_s = float(pod.workload.pod["terminationGracePeriodSeconds"])
        return {name: process.wait(grace_s) for name, process in pod.processes.items()}

    # What they do

    def look(self) -> None:
        """Add the connections that there are now to `seen`: (caller, called, port)."""
        by_address = {pod.address: pod for pod in self.pods}
        for pod in self.pods:
            for process in pod.processes.values():
                for one in _connections(process):
                    # gRPC speaks IPv6 to IPv4 addresses.
                    ip = one.raddr.ip.removeprefix("::ffff:") if one.raddr else ""
                    called = by_address.get(ip)
                    if one.status != psutil.CONN_ESTABLISHED or called is None or called is pod:
                        continue
                    edge = (pod.workload.name, called.workload.name, one.raddr.port)
                    self.seen.add(edge)

    def resident_bytes(self, pod: Pod, name: str) -> int:
        """What a container's processes have in memory now."""
        return pod.processes[name].session_usage().rss_bytes


def _is_repeated(container: Object, kind: str) -> bool:
    """Whether a probe is a process of ours that the startup probe has run already."""
    first = container.get("startupProbe", {})
    return (
        kind != "startupProbe" and _is_ours(first) and container[kind].get("exec") == first["exec"]
    )


def _is_ours(probe: Object) -> bool:
    return bool(probe.get("exec", {}).get("command", ("",))[0] == "kvtier")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _connections(process: Process) -> list[Any]:
    """TCP connections that a process has now; none where it has ended."""
    try:
        return list(psutil.Process(process.pid).net_connections("tcp"))
    except psutil.NoSuchProcess:
        return []


def _got(host: str, port: int, path: str, scheme: str, timeout_s: float) -> bool:
    connection: http.client.HTTPConnection
    if scheme == "HTTPS":
        # A kubelet does not verify either.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Terms:
    """What a site has beyond its manifests."""

    added: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Variables by service (`store`): sizes of this machine."""
    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """Files by name of a Secret, beside those of Certificates."""
    replicas: int = 1 << 10
    """Pods of a workload at most."""


@contextmanager
def site(overlay: Overlay, test_name: str, terms: Terms | None = None) -> Iterator[Site]:
    """A site in a short folder of its own: paths of Unix sockets are short."""
    root = Path(tempfile.mkdtemp(prefix="kvt-k8s-"))
    try:
        with network() as prefix, ProcessRunner(test_name, root) as runner:
            yield Site(overlay, runner, root, prefix, terms or Terms())
    finally:
        shutil.rmtree(root, ignore_errors=True)

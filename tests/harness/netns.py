"""A network of its own for a test: nodes are network namespaces on one bridge, links break at will.

Each node has a network namespace, a mount namespace with a private `/dev/shm`, and a data directory
that is bound to the same path in every node. The bridge lives in a namespace too, so the machine's
own network is never touched and all addresses (10.77.0.0/24) are free. A node's namespaces are held
by a process that ends when this process does. Namespaces are named `kvt-<pid>-<n>-<node>`; those of
a dead test process are swept when the next network is made. Needs the right to make namespaces:
mark tests with `requires_netns`. What must not live here: faults of a byte stream (see `proxy`).
"""

import ctypes
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.proxy import Dial
from tests.harness.rights import run_command, tbf_missing

SUBNET = "10.77.0"
NODES_COUNT_MAX = 64
SHM_BYTES = 256 << 20
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"kvt-(\d+)-\d+-")
_NOBODY = "02:00:00:00:ff:ff"
_CLONE_NEWNET = 0x40000000
_CONNECT_TIMEOUT_S = 5.0
_TBF_LATENCY_MS = 200
_TBF_BURST_BYTES_MIN = 16 << 10
_networks = itertools.count()


class Cut(Enum):
    """How packets of one direction get lost."""

    SILENT = "silent"
    """They leave for a station that does not exist: a pulled cable, the sender is not told."""
    BLACKHOLE = "blackhole"
    """A route discards them: an established connection stalls, a new one fails at once (EINVAL)."""
    UNREACHABLE = "unreachable"
    """A route refuses them: a new connection fails at once (no route to host)."""


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """What has passed a node's interface since it was made, Ethernet headers included."""

    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int


class Node:
    """One machine of a `Network`."""

    def __init__(self, name: str, number: int, network: "Network") -> None:
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self.mac = f"02:00:00:00:00:{number:02x}"
        self.namespace = network.namespace(name)
        self.data_directory = network.directory / "data"
        """Where every process of the node sees the node's own data."""
        self.host_data_directory = network.directory / f"data-of-{name}"
        """The same directory as seen from the test itself."""
        self.host_data_directory.mkdir(parents=True)
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        """What makes a command run in this node, in its data directory: for `Launch.prefix`.

        It execs, so the pid is the command's own.
        """
        if self._holder is None:
            raise RuntimeError(f"node {self.name} is not up")
        enter = ("nsenter", "--target", str(self._holder.pid), "--mount", "--net", "--")
        return (*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(self.data_directory))

    def run(self, *argv: str) -> str:
        """Run a short command in the node and return its output; OSError if it fails."""
        return run_command(*self.prefix, *argv)

    def dial(self, port: int, host: str = "127.0.0.1") -> Dial:
        """What connects to a port from inside the node: for `TcpProxy`, so that a test in the
        machine's own network can talk to a server in the node."""

        def connect() -> socket.socket:
            return _in_namespace(self.namespace, (host, port))

        return connect

    def counters(self) -> LinkCounters:
        """Bytes and packets that have passed the node's interface."""
        text = run_command("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        stats = json.loads(text)[0]["stats64"]
        rx, tx = stats["rx"], stats["tx"]
        return LinkCounters(rx["bytes"], tx["bytes"], rx["packets"], tx["packets"])

    def hold(self) -> None:
        """Make the mount namespace; the holder ends at the end of its input."""
        script = (
            "mount --make-rprivate / && "
            f"mount -t tmpfs -o size={SHM_BYTES},mode=1777 tmpfs /dev/shm && "
            'mount --bind "$0" "$1" && echo up && exec cat'
        )
        paths = (str(self.host_data_directory), str(self.data_directory))
        enter = ("ip", "netns", "exec", self.namespace, "unshare", "--mount")
        self._holder = subprocess.Popen(
            [*enter, "sh", "-c", script, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            _, complaint = self._holder.communicate()
            raise OSError(f"node {self.name}: {complaint.decode(errors='replace')}")

    def release(self) -> None:
        """End the holder. Idempotent."""
        if self._holder is not None:
            self._holder.communicate()
            self._holder = None


class Network:
    """A context manager: a bridge and its nodes, all gone at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, Node] = {}
        self._prefix = f"kvt-{os.getpid()}-{next(_networks)}-"
        self._switch = self.namespace("switch")
        self._cuts: dict[tuple[str, str], Cut] = {}

    def namespace(self, node_name: str) -> str:
        """The name of a node's network namespace."""
        return f"{self._prefix}{node_name}"

    def __enter__(self) -> Self:
        sweep_dead_owners()
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        try:
            run_command("ip", "netns", "add", self._switch)
            self._ip(self._switch, "link add br0 type bridge\nlink set br0 up")
        except OSError:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def add_node(self, name: str) -> Node:
        """Add a node and connect it; it reaches all others until a link is cut."""
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or name in self.nodes:
            raise ValueError(f"node names are unique, of a-z 0-9 -, got {name!r}")
        if name == "switch" or len(self.nodes) >= NODES_COUNT_MAX:
            raise ValueError(f"no node {name!r}: reserved, or more than {NODES_COUNT_MAX} nodes")
        node = Node(name, len(self.nodes) + 1, self)
        self.nodes[name] = node
        run_command("ip", "netns", "add", node.namespace)
        port = self._port(node)
        # Neither IPv6 chatter nor flooding: what the counters show is what the test sent.
        self._ip(
            node.namespace,
            "link set lo up\n"
            f"link add eth0 address {node.mac} type veth peer name {port} netns {self._switch}\n"
            "link set eth0 addrgenmode none\n"
            f"address add {node.address}/24 dev eth0\n"
            "link set eth0 up",
        )
        self._ip(
            self._switch,
            f"link set {port} addrgenmode none\n"
            f"link set {port} master br0\n"
            f"link set {port} type bridge_slave flood off\n"
            f"link set {port} up",
        )
        run_command(
            *("bridge", "-n", self._switch, "fdb", "add", node.mac),
            *("dev", port, "master", "static"),
        )
        node.hold()
        return node

    def cut(self, source: Node, target: Node, kind: Cut = Cut.SILENT) -> None:
        """Lose every packet from `source` to `target`; the other direction is untouched."""
        self.heal(source, target)
        if kind is Cut.SILENT:
            neighbour = f"neigh replace {target.address} lladdr {_NOBODY} dev eth0 nud permanent"
            self._ip(source.namespace, neighbour)
        else:
            self._ip(source.namespace, f"route add {kind.value} {target.address}/32")
        self._cuts[source.name, target.name] = kind

    def heal(self, source: Node, target: Node) -> None:
        """Undo `cut` of this direction. Idempotent."""
        kind = self._cuts.pop((source.name, target.name), None)
        if kind is Cut.SILENT:
            self._ip(source.namespace, f"neigh del {target.address} dev eth0")
        elif kind is not None:
            self._ip(source.namespace, f"route del {kind.value} {target.address}/32")

    def partition(self, left: Sequence[Node], right: Sequence[Node]) -> None:
        """Cut every link between the two sides, both directions."""
        for one, other in itertools.product(left, right):
            self.cut(one, other)
            self.cut(other, one)

    def heal_all(self) -> None:
        """Undo every cut."""
        for source, target in list(self._cuts):
            self.heal(self.nodes[source], self.nodes[target])

    def is_cut(self, source: Node, target: Node) -> bool:
        """Whether packets from `source` to `target` are lost now."""
        return (source.name, target.name) in self._cuts

    def unplug(self, node: Node) -> None:
        """Take the node off the bridge: its peers see silence, its own interface has no carrier."""
        self._ip(self._switch, f"link set {self._port(node)} down")

    def plug(self, node: Node) -> None:
        """Undo `unplug`."""
        self._ip(self._switch, f"link set {self._port(node)} up")

    def limit_egress(self, node: Node, bytes_per_s: int) -> None:
        """Limit what the node sends; replaces an earlier limit. OSError where the kernel cannot."""
        self._tbf(node.namespace, "eth0", bytes_per_s)

    def limit_ingress(self, node: Node, bytes_per_s: int) -> None:
        """Limit what reaches the node; otherwise as `limit_egress`."""
        self._tbf(self._switch, self._port(node), bytes_per_s)

    def unlimit(self, node: Node) -> None:
        """Take both limits of a node away. Idempotent."""
        for namespace, device in ((node.namespace, "eth0"), (self._switch, self._port(node))):
            shown = run_command("tc", "-n", namespace, "qdisc", "show", "dev", device)
            if " tbf " in shown:
                run_command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def _tbf(self, namespace: str, device: str, bytes_per_s: int) -> None:
        reason = tbf_missing()
        if reason is not None:
            raise OSError(reason)
        burst = max(_TBF_BURST_BYTES_MIN, bytes_per_s // 50)
        limit = f"rate {8 * bytes_per_s}bit burst {burst} latency {_TBF_LATENCY_MS}ms"
        where = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf")
        run_command(*where, *limit.split())

    def _port(self, node: Node) -> str:
        return f"port{node.address.rpartition('.')[2]}"

    def _ip(self, namespace: str, batch: str) -> None:
        run_command("ip", "-n", namespace, "-batch", "-", stdin=f"{batch}\n")

    def _remove(self) -> None:
        for node in self.nodes.values():
            node.release()
        for namespace in our_namespaces():
            if namespace.startswith(self._prefix):
                _remove_namespace(namespace)
        for node in self.nodes.values():
            shutil.rmtree(node.host_data_directory, ignore_errors=True)


def our_namespaces(owner_pid: int | None = None) -> list[str]:
    """Names of the network namespaces that a test process (this one by default) has made."""
    owner = os.getpid() if owner_pid is None else owner_pid
    return [name for name, pid in _owned() if pid == owner]


def sweep_dead_owners() -> list[str]:
    """Remove the namespaces of test processes that are no more; return their names."""
    dead = [name for name, pid in _owned() if not Path(f"/proc/{pid}").exists()]
    for name in dead:
        _remove_namespace(name)
    return dead


def remove_own() -> list[str]:
    """Remove every namespace that this process has made and return their names."""
    names = our_namespaces()
    for name in names:
        _remove_namespace(name)
    return names


def _owned() -> list[tuple[str, int]]:
    if not _NAMESPACES.exists():
        return []
    matches = ((path.name, _NAME.match(path.name)) for path in _NAMESPACES.iterdir())
    return [(name, int(match[1])) for name, match in matches if match is not None]


def _remove_namespace(name: str) -> None:
    """Kill what runs in a namespace of ours and take its name away; another may do so meanwhile."""
    try:
        pids = [int(pid) for pid in run_command("ip", "netns", "pids", name).split()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        run_command("ip", "netns", "del", name)
    except OSError:
        if (_NAMESPACES / name).exists():
            raise


def _in_namespace(namespace: str, address: tuple[str, int]) -> socket.socket:
    """A socket that belongs to a network namespace: made in a thread that enters it and ends."""
    made: list[socket.socket | OSError] = []

    def connect() -> None:
        try:
            _enter(namespace)
            made.append(socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name=f"dial-{namespace}")
    thread.start()
    thread.join()
    result = made[0]
    if isinstance(result, OSError):
        raise result
    return result


def _enter(namespace: str) -> None:
    """Move the calling thread into a network namespace, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns {namespace}: {os.strerror(code)}")
    finally:
        os.close(descriptor)

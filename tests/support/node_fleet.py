"""Machines in network namespaces: a store and a worker on each, index and router on one of its own.

Every listener that another machine can reach has TLS and asks who calls; each process has a token
of its role. The test looks in from outside through windows: proxies whose server side is a socket
of the node itself, so looking costs nothing on the wire and no cut link is in its way.
What must not live here: faults, what a test expects.
"""

import asyncio
import contextlib
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import psutil

from kvtier.client.store import BlockStoreClient, StoreClientConfig
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.identity import chain_root
from kvtier.core.keys import prefix_keys
from kvtier.core.scopes import scope_salt
from kvtier.engines.transformers.tiny import write_byte_tokenizer
from kvtier.sections import DialConfig, TlsConfig
from kvtier.security import certs, files, new_principal
from kvtier.security.endpoints import Dialer
from kvtier.types import Fingerprint, ScopeId, Tier
from kvtier.wire import convert
from kvtier.wire import messages as pb
from kvtier_services.worker.l2.hot_record import page_name
from kvtier_services.worker.l2.shelf import PLACES_COUNT
from tests.harness.netns import Network, Node
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.proxy import TcpProxy
from tests.harness.toml_text import TomlTable, TomlValue
from tests.harness.waiting import NeverHappenedError, eventually
from tests.support.index_cluster import Copies, holders_of
from tests.support.worker_cluster import BLOCK_TOKENS, MODEL, Expected

MIB = 1 << 20
TOKEN_BYTES = 8192
BLOCK = BLOCK_TOKENS * TOKEN_BYTES
ANSWER_TOKENS = 8
REQUEST_S = 20.0
"""The router's deadline of a request."""
READY_S = 120.0
QUIET_S = 120.0
"""By when what is under way is over, and the index knows."""
INDEX_PORT, STORE_PORT, BULK_PORT, METRICS_PORT = 7710, 7720, 7721, 7790
WORKER_PORT, ROUTER_PORT, ADMIN_PORT = 7730, 8000, 8001
TENANT = "alice"
_SECRET = "a cluster secret of thirty bytes"
CALL_S = 90.0
_NONE = frozenset[int]()


@dataclass(frozen=True, slots=True)
class Credentials:
    """The cluster's authority and tokens, in a folder that every node sees."""

    folder: Path

    def tls(self, node: Node, role: str) -> dict[str, TomlValue]:
        """Settings of a listener of a node, which windows see as 127.0.0.1."""
        principal = new_principal(f"{role}-{node.name}", role)
        cert, key = certs.issue_into(self.folder, principal, [node.address, "127.0.0.1"])
        return {"cert_file": str(cert), "key_file": str(key)}

    def token(self, name: str, role: str) -> Path:
        """The file with a caller's token. All are made before a service starts, which would not
        hear of later ones at once."""
        path = self.folder / f"{name}.token"
        if not path.exists():
            token = certs.add_token(self.folder, new_principal(name, role))
            files.write_private(path, token.encode())
        return path

    def dial(self, target: str, token: Path) -> dict[str, TomlValue]:
        """Settings of a caller."""
        return {"targets": [target], "token_file": str(token), "tls": {"ca_file": self.ca_file}}

    @property
    def tokens_file(self) -> str:
        return str(self.folder / certs.TOKENS)

    @property
    def ca_file(self) -> str:
        return str(self.folder / certs.CA_CERT)


@dataclass(frozen=True, slots=True)
class Told:
    """What a request came to."""

    status: int
    text: str
    worker: str
    cached: Mapping[str, int]
    """Tokens by tier; those with none are left out."""
    prompt: Sequence[int]
    seconds: float
    body: bytes
    is_right: bool
    """Whether the text is what a worker without a cache answers."""

    @property
    def is_answer(self) -> bool:
        return self.status == 200


@dataclass(slots=True)
class Machine:
    """A node with a store and a worker on it."""

    node: Node
    store: Process
    worker: Process
    token: Path
    """Of the worker."""
    serves: bool = True
    """False: the worker has left the fleet."""

    @property
    def name(self) -> str:
        return self.node.name

    def client(self) -> BlockStoreClient:
        """As a worker of the node: over the store's socket, which files show everywhere."""
        run_dir = self.node.host_data_directory / "store" / "run"
        dial = DialConfig(targets=(f"unix:{run_dir}/store.sock",), token_file=self.token)
        return BlockStoreClient(dial, StoreClientConfig(deadline_s=20.0))


@dataclass(frozen=True, slots=True)
class Belongings:
    """What processes have open: sockets and shared memory, by the kernel's names."""

    sockets: frozenset[str]
    mappings: frozenset[str]
    networks: frozenset[str]


def belongings(processes: Sequence[Process]) -> Belongings:
    """Of these and of what they started."""
    sockets: set[str] = set()
    mappings: set[str] = set()
    networks: set[str] = set()
    for process in processes:
        top = psutil.Process(process.pid)
        for pid in (top.pid, *(child.pid for child in top.children(recursive=True))):
            folder = Path(f"/proc/{pid}")
            networks.add(str((folder / "ns" / "net").readlink()))
            for descriptor in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:"):
                        sockets.add(target)
            for line in (folder / "maps").read_text().splitlines():
                if "/memfd:" in line or "/dev/shm" in line:
                    fields = line.split()
                    mappings.add(f"{fields[3]} {fields[4]}")
    return Belongings(frozenset(sockets), frozenset(mappings), frozenset(networks))


@dataclass(frozen=True, slots=True)
class Crossing:
    """What has come to the machines over their cables, and over the peer tier of their stores."""

    wire_bytes: int
    peer_bytes: int
    lost: float
    """Loads that were given up or failed: what they moved is counted nowhere else."""

    def since(self, before: "Crossing") -> "Crossing":
        return Crossing(
            self.wire_bytes - before.wire_bytes,
            self.peer_bytes - before.peer_bytes,
            self.lost - before.lost,
        )


def sample(page: str, line: str) -> float:
    """A value of a page of metrics, 0 where it has none yet."""
    rows = (row.rpartition(" ") for row in page.splitlines())
    return next((float(value) for name, _, value in rows if name == line), 0.0)


@dataclass
class NodeFleet:
    """See the module. `start` fills it; what was started ends with the runner."""

    runner: ProcessRunner
    directory: Path
    stack: ExitStack
    tokens_per_s: float = 800.0
    machines: dict[str, Machine] = field(default_factory=dict)
    expected: Expected = field(default_factory=lambda: Expected(TOKEN_BYTES))
    _issued: list[Sequence[int]] = field(default_factory=list)
    _windows: dict[tuple[str, int], TcpProxy] = field(default_factory=dict)
    _lives: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- processes

    def start(self, names: Sequence[str], spares: Sequence[str] = ()) -> None:
        """Start everything side by side; credentials for spares are made now."""
        certs.init(self.directory / "certs")
        self.keys = Credentials(self.directory / "certs")
        for name in (*names, *spares):
            self.keys.token(f"store-{name}", "store")
            self.keys.token(f"worker-{name}", "worker")
        self.operator = self.keys.token("operator", "operator")
        self.keys.token("router-hub", "router")
        self._tls = ssl.create_default_context(cafile=self.keys.ca_file)
        self.network = self.stack.enter_context(Network(self.directory / "net"))
        nodes = [self.network.add_node(name) for name in names]
        self.hub = self.network.add_node("hub")
        launches = [self._index(), self._router()]
        for node in nodes:
            launches += [self._store(node), self._worker(node.name, node)]
        self.index, self.router, *rest = self._started(launches)
        for at, node in enumerate(nodes):
            self.machines[node.name] = self._machine(node, rest[2 * at], rest[2 * at + 1])
        self.meet()

    def replace(self, lost: Machine, name: str) -> Machine:
        """A machine that was not there before, with an empty disk, in the place of one that ended.

        Its processes are those of the old one on another command: a test leaves none behind.
        """
        node = self.network.add_node(name)
        lost.store.restart(self._store(node))
        lost.worker.restart(self._worker(name, node))
        self._wait([lost.store, lost.worker])
        self.machines[name] = self._machine(node, lost.store, lost.worker)
        self.meet()
        return self.machines[name]

    def again(self, machine: Machine) -> None:
        """Start the worker of a machine again, after it has left."""
        machine.worker.restart()
        self._wait([machine.worker])
        machine.serves = True
        self.meet()

    @contextmanager
    def another_worker(self, name: str, machine: Machine, port: int) -> Iterator[None]:
        """One more worker on a machine, under a name that has a token, for a while."""
        (worker,) = self._started([self._worker(name, machine.node, port)])
        try:
            yield
            worker.terminate()
            assert worker.wait(60.0) == 0
        finally:
            worker.end()

    def _machine(self, node: Node, store: Process, worker: Process) -> Machine:
        return Machine(node, store, worker, self.keys.token(f"worker-{node.name}", "worker"))

    def meet(self) -> None:
        """Wait until the router knows the worker of every machine, and nobody else's, as well."""
        wanted = {f"worker-{machine.name}" for machine in self._serving()}

        def is_met() -> bool:
            workers = json.loads(self.admin("GET", "/fleet"))["workers"]
            well = {one["worker"] for one in workers if one["state"] in {"candidate", "draining"}}
            return well == wanted

        eventually(is_met, QUIET_S, f"the router knows {sorted(wanted)}")

    def clean_logs(self) -> None:
        """Fails where a process logged an error that nobody handled."""
        for path in self.runner.log_directory.glob("*.log"):
            lines = path.read_text(errors="replace").splitlines()
            # What gRPC says itself of a caller whose deadline met its answer is no error of ours.
            errors = [line for line in lines if "Traceback" in line and "grpc._cython" not in line]
            assert errors == [], path.name

    def _started(self, launches: Sequence[Launch]) -> list[Process]:
        """Start side by side and wait until all say that they serve."""
        return self._wait([self.runner.spawn(launch) for launch in launches])

    def _wait(self, processes: list[Process]) -> list[Process]:
        def serve() -> bool:
            for process in processes:
                assert process.alive, process.log_text()
            return all("serving" in p.log_text().rpartition("--- start")[2] for p in processes)

        eventually(serve, READY_S, "all serve")
        return processes

    def _launch(self, command: str, name: str, node: Node, settings: TomlTable) -> Launch:
        self._lives += 1
        title = f"{name}.{self._lives}"
        path = self.runner.config_file(f"{title}.toml", settings)
        return Launch(title, kvtier_command(command, "--config", str(path)), prefix=node.prefix)

    def _listen(self, node: Node, role: str, port: int) -> dict[str, TomlValue]:
        return {
            "bind": f"{node.address}:{port}",
            "tokens_file": self.keys.tokens_file,
            "tls": self.keys.tls(node, role),
        }

    def _index(self) -> Launch:
        settings: TomlTable = {
            "lease_ms": 2_000,
            "grace_ms": 5_000,
            "listen": self._listen(self.hub, "index", INDEX_PORT),
        }
        return self._launch("index", "index", self.hub, settings)

    def _router(self) -> Launch:
        text = self.directory / "text"
        text.mkdir()
        write_byte_tokenizer(text, 1 << 20)
        secret, tenants = self.directory / "secret", self.directory / "tenants.toml"
        secret.write_text(_SECRET)
        digest = hashlib.sha256(TENANT.encode()).hexdigest()
        tenants.write_text(f'[[tenant]]\nid = "{TENANT}"\n[[tenant.key]]\nsha256 = "{digest}"\n')
        tenants.chmod(0o600)
        token = self.keys.token("router-hub", "router")
        settings: TomlTable = {
            "instance": "router-hub",
            "admin_bind": f"127.0.0.1:{ADMIN_PORT}",
            "texts": [f"*={text}"],
            "listen": {
                "bind": f"{self.hub.address}:{ROUTER_PORT}",
                "tls": self.keys.tls(self.hub, "router"),
            },
            "index": self.keys.dial(f"{self.hub.address}:{INDEX_PORT}", token),
            "tenants": {"keys_file": str(tenants), "cluster_secret_file": str(secret)},
            "upstream": {
                "bearer_file": str(token),
                "ca_file": self.keys.ca_file,
                "limits": {"connect_ms_max": 1_000},
                "silence": {"asked_after_ms": 1_000, "health_ms_max": 1_000},
            },
            "relay": {"request_ms_max": int(1000 * REQUEST_S)},
        }
        return self._launch("router", "router", self.hub, settings)

    def _store(self, node: Node) -> Launch:
        name = f"store-{node.name}"
        index = self.keys.dial(f"{self.hub.address}:{INDEX_PORT}", self.keys.token(name, "store"))
        settings: TomlTable = {
            "data_dir": str(node.data_directory / "store"),
            "instance": name,
            "node": node.name,
            "drain_ms_max": 1000,
            "listen": self._listen(node, "store", STORE_PORT),
            "bulk": {"port": BULK_PORT},
            "peers": {"deadline_ms": 3_000, "ask_ms": 3_000},
            "index": index,
            "telemetry": {"metrics_bind": f"127.0.0.1:{METRICS_PORT}"},
            "dram": {"bytes_max": 96 * MIB, "slab_bytes": 4 * MIB, "blocks_max": 4096},
            "nvme": {"enabled": False},
        }
        return self._launch("store", name, node, settings)

    def _worker(self, name: str, node: Node, port: int = WORKER_PORT) -> Launch:
        instance = f"worker-{name}"
        token = self.keys.token(instance, "worker")
        settings: TomlTable = {
            "listen": self._listen(node, "worker", port),
            "instance": instance,
            "node": node.name,
            "drain_ms_max": 5_000,
            "cache": {"kv_memory_bytes": 64 * MIB},
            "model": {
                "model": "fake",
                "fake": {"prefill_tokens_per_s": self.tokens_per_s, "token_bytes": TOKEN_BYTES},
            },
            "offload": {"lookup_ms_max": 5_000, "store_instance": f"store-{node.name}"},
            "hot_set": {"write_ms_max": 20_000, "prefetch_ms_max": 20_000},
            "index": self.keys.dial(f"{self.hub.address}:{INDEX_PORT}", token),
            "store": {
                "targets": [f"unix:{node.data_directory}/store/run/store.sock"],
                "token_file": str(self.keys.token(f"worker-{node.name}", "worker")),
            },
        }
        return self._launch("worker", instance, node, settings)

    # ---- looking in

    def window(self, node: Node, port: int) -> int:
        """A port of this machine that leads to one of a node."""
        with self._lock:
            if (node.name, port) not in self._windows:
                host = "127.0.0.1" if port in {METRICS_PORT, ADMIN_PORT} else node.address
                proxy = self.stack.enter_context(TcpProxy(node.dial(port, host)))
                self._windows[node.name, port] = proxy
            return self._windows[node.name, port].port

    def call(
        self, node: Node, port: int, method: str, path: str, body: object = None, token: str = ""
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One request over HTTP, with TLS but for pages of operators: status, headers, body."""
        connection: HTTPConnection
        if port in {METRICS_PORT, ADMIN_PORT}:
            connection = HTTPConnection("127.0.0.1", self.window(node, port), timeout=CALL_S)
        else:
            connection = HTTPSConnection(
                "127.0.0.1", self.window(node, port), timeout=CALL_S, context=self._tls
            )
        headers = {"content-type": "application/json", "x-kvtier-explain": "1"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body).encode(), headers
            )
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def admin(self, method: str, path: str) -> str:
        """A call of the router's operator."""
        status, _, body = self.call(self.hub, ADMIN_PORT, method, path)
        assert status == 200, body
        return body.decode()

    def store_metric(self, machine: Machine, line: str) -> float:
        _, _, page = self.call(machine.node, METRICS_PORT, "GET", "/metrics")
        return sample(page.decode(), line)

    def worker_metric(self, node: Node, line: str, port: int = WORKER_PORT) -> float:
        token = self.operator.read_text()
        _, _, page = self.call(node, port, "GET", "/metrics", token=token)
        return sample(page.decode(), line)

    def crossing(self) -> Crossing:
        """What came to all machines until now."""
        wire = peer = 0
        lost = 0.0
        for machine in self._serving():
            wire += machine.node.counters().rx_bytes
            peer += int(self.store_metric(machine, 'kvtier_store_read_bytes_total{tier="peer"}'))
            lost += self.worker_metric(machine.node, "kvtier_worker_loads_given_up_total")
            lost += self.store_metric(machine, "kvtier_store_peer_failures_total")
        return Crossing(wire, peer, lost)

    # ---- asking

    def only(self, *names: str) -> None:
        """Let the router send requests to the workers of these machines and to no others."""
        for name in self.machines:
            verb = "undrain" if name in names else "drain"
            self.admin("POST", f"/workers/worker-{name}/{verb}")

    def ask(self, prompt: Sequence[int]) -> Told:
        """One completion through the router."""
        return self._told(prompt, self.hub, ROUTER_PORT, TENANT, {})

    def ask_worker(self, node: Node, prompt: Sequence[int], port: int = WORKER_PORT) -> Told:
        """The same of a worker itself, as the router would ask it."""
        return self._told(prompt, node, port, self.operator.read_text(), {"cache_salt": self.salt})

    @property
    def salt(self) -> str:
        """What keeps the tenant's blocks apart."""
        return scope_salt(_SECRET.encode(), ScopeId(f"tenant:{TENANT}"), None)

    def _told(
        self,
        prompt: Sequence[int],
        node: Node,
        port: int,
        token: str,
        more: dict[str, object],
    ) -> Told:
        right = self.expected.text(prompt, ANSWER_TOKENS)
        with self._lock:
            self._issued.append([*prompt, *map(ord, right)])
        body = {
            "model": MODEL, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0,
        } | more  # fmt: skip
        began = time.monotonic()
        status, headers, told = self.call(node, port, "POST", "/v1/completions", body, token)
        seconds = time.monotonic() - began
        text, cached = "", {}
        if status == 200:
            answer = json.loads(told)
            text = answer["choices"][0]["text"]
            tiers = answer["usage"]["kvtier"]["cached_tokens"]
            cached = {tier: count for tier, count in tiers.items() if count}
        worker = headers.get("x-kvtier-worker", "")
        return Told(status, text, worker, cached, tuple(prompt), seconds, told, text == right)

    # ---- the truth

    def settle(self) -> None:
        """Wait until nothing is under way and the index knows exactly what everybody holds."""
        last = "nothing"

        def is_settled() -> bool:
            nonlocal last
            last = self._waiting() or asyncio.run(self._difference())
            return not last

        try:
            eventually(is_settled, QUIET_S, "the index knows what everybody holds")
        except NeverHappenedError as error:
            raise AssertionError(f"{error}: {last}") from None

    def _serving(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.serves]

    def _waiting(self) -> str:
        """Which worker has not written everything yet; empty for none."""
        for machine in self._serving():
            for state in ("queued", "in_flight"):
                line = f'kvtier_worker_saves_waiting{{state="{state}"}}'
                if self.worker_metric(machine.node, line):
                    return f"{machine.name} has blocks {state}"
        return ""

    async def _difference(self) -> str:
        """What the index believes and is not so; empty for nothing."""
        target = f"127.0.0.1:{self.window(self.hub, INDEX_PORT)}"
        dial = DialConfig((target,), TlsConfig(ca_file=Path(self.keys.ca_file)), self.operator)
        dialer = Dialer(dial, target)
        try:
            found = await holders_of(dialer.channel())
        finally:
            await dialer.close()
        model = next((holder for holder, _ in found if holder.hello.HasField("card")), None)
        if model is None:
            return "no worker is known"
        names = self._names(model)
        shown = {
            holder.hello.instance: (holder, shards.get(0, {}))
            for holder, shards in found
            if not holder.hidden and holder.hello.namespace_fingerprint == names[0].namespace
        }
        workers = {f"worker-{machine.name}" for machine in self._serving()}
        wanted = workers | {f"store-{name}" for name in self.machines}
        if gone := [h.hello.instance for h, _ in found if h.hello.instance not in wanted]:
            return f"{gone} are gone and still known"
        if not workers <= shown.keys():
            return f"only {sorted(shown)} are shown"
        for holder, _ in shown.values():
            if holder.trust != pb.TRUST_EXACT:
                return f"{holder.hello.instance} is degraded: {holder.degraded_reason}"
        for machine in self.machines.values():
            _, copies = shown.get(f"store-{machine.name}", (None, {}))
            if difference := await self._store_differs(machine, names, copies):
                return difference
        for machine in self._serving():
            told = _hashes(shown[f"worker-{machine.name}"][1], Tier.GPU)
            blocks = sum(
                self.worker_metric(machine.node, f'kvtier_worker_blocks{{state="{state}"}}')
                for state in ("cached", "used")
            )
            if blocks != len(told):
                return f"worker-{machine.name} has {blocks} blocks, not {len(told)}"
        return ""

    async def _store_differs(
        self, machine: Machine, names: Sequence[FrameName], copies: Copies
    ) -> str:
        """The same of one store, which holds this by what the index says."""
        async with machine.client() as client:
            tiers = await client.find(names)
        if tiers is None:
            return f"store-{machine.name} does not say what it has"
        held = {_hash(name) for name, at in zip(names, tiers, strict=True) if Tier.DRAM in at}
        told = _hashes(copies, Tier.DRAM)
        if held != told:
            return (
                f"store-{machine.name}: {len(held - told)} blocks are not known, "
                f"{len(told - held)} are not there"
            )
        return ""

    def _names(self, worker: pb.Holder) -> list[FrameName]:
        """All blocks that anybody may hold: of what was asked and answered, and hot sets' pages."""
        namespace = Fingerprint(worker.hello.namespace_fingerprint)
        root = chain_root(convert.card_from(worker.hello.card).pool, self.salt, None)
        keys: dict[bytes, None] = {}
        with self._lock:
            issued = list(self._issued)
        for tokens in issued:
            for row in prefix_keys(root, tokens, BLOCK_TOKENS).keys:
                keys[row.tobytes()] = None
        pages = [page_name(namespace, place, 0) for place in range(PLACES_COUNT)]
        return [*(FrameName(KeyKind.PREFIX_KEY, key, namespace) for key in keys), *pages]


def _hash(name: FrameName) -> int:
    return int.from_bytes(name.key[:8], "little")


def _hashes(copies: Copies, tier: Tier) -> frozenset[int]:
    return frozenset(copies[tier].tolist()) if tier in copies else _NONE


@contextmanager
def node_fleet(
    name: str, directory: Path, machines: Sequence[str], spares: Sequence[str] = ()
) -> Iterator[NodeFleet]:
    """A fleet of these machines that runs, and ends in an orderly way before its network goes."""
    with ExitStack() as stack, ProcessRunner(name, directory) as runner:
        fleet = NodeFleet(runner, directory, stack)
        fleet.start(machines, spares)
        yield fleet
        fleet.clean_logs()

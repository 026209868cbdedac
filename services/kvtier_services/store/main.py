"""`kvtier store`: read configuration, build, serve, drain.

What must not live here: decisions and RPC handlers.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TextIO

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kvtier import security
from kvtier.config import describe, load
from kvtier.core.fleet import TierCapacity
from kvtier.errors import BackendError, UnavailableError
from kvtier.garbage import settle
from kvtier.sections import ListenConfig
from kvtier.security import AccessRole, Policy, SecureServer
from kvtier.store import TieredStore, TierWatch, open_store
from kvtier.store.gates import ByteGate
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.metrics import Metrics, Readings
from kvtier.telemetry.service import Service, open_telemetry
from kvtier.tiers.arena.holdings import Trial
from kvtier.tiers.arena.server import ArenaListener, ArenaServer, ArenaServerConfig
from kvtier.tiers.redis.caretaker import RedisCaretaker
from kvtier.tiers.redis.holder import HolderPolicy
from kvtier.types import HOLDER_TIERS, InstanceId, NodeId
from kvtier.wire import rpc
from kvtier.wire.loop_thread import end
from kvtier_services.store import metrics as table
from kvtier_services.store import tiers as built
from kvtier_services.store.arena import GovernedArena
from kvtier_services.store.bulk import served_bulk
from kvtier_services.store.config import StoreConfig, parse_quota
from kvtier_services.store.dropping import drop_command
from kvtier_services.store.health import HealthWatch, Report
from kvtier_services.store.leases import LeaseBook
from kvtier_services.store.peers import opened_nixl, opened_peers
from kvtier_services.store.publishing import (
    Announcer,
    DigestHashes,
    Identity,
    SharedAnnouncer,
)
from kvtier_services.store.reservations import ReservationBook
from kvtier_services.store.service import Parts, StoreService
from kvtier_services.store.stats import StatsView

_ENGINES: Final = {AccessRole.WORKER, AccessRole.BRIDGE}
_READERS: Final = _ENGINES | {AccessRole.STORE}
_OPERATORS: Final = {AccessRole.OPERATOR}
_SERVICE: Final = f"/{rpc.STORE.full_name}"

POLICY: Final = Policy.of(
    {
        f"{_SERVICE}/Attach": _READERS | _OPERATORS | {AccessRole.ROUTER},
        f"{_SERVICE}/Contains": _READERS | _OPERATORS | {AccessRole.ROUTER},
        f"{_SERVICE}/Acquire": _ENGINES,
        f"{_SERVICE}/Release": _ENGINES,
        f"{_SERVICE}/Reserve": _ENGINES,
        f"{_SERVICE}/Commit": _ENGINES,
        f"{_SERVICE}/Abort": _ENGINES,
        f"{_SERVICE}/Get": _READERS,
        f"{_SERVICE}/Put": _ENGINES,
        f"{_SERVICE}/Announce": _ENGINES,
        f"{_SERVICE}/Prefetch": _ENGINES | {AccessRole.ROUTER},
        f"{_SERVICE}/Pin": _ENGINES | _OPERATORS,
        f"{_SERVICE}/Unpin": _ENGINES | _OPERATORS,
        f"{_SERVICE}/Drop": _ENGINES | _OPERATORS,
        f"{_SERVICE}/Stats": _OPERATORS,
    }
)
"""Who may call what; every method of the service is in it (a test enumerates them). Workers and
bridges read, write and drop what they name; operators also by namespace, scope and writer."""

LOG = EventLog("kvtier_services.store")
TICK_S: Final = 0.25
SOCKET: Final = "store.sock"
ARENA_SOCKET: Final = "arena.sock"


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A served store, for tests that run it inside their own process."""

    port: int
    socket: Path
    arena_socket: Path
    store: TieredStore
    metrics: Metrics
    arena: GovernedArena
    bulk_port: int
    """0 where the channel is off."""


@contextlib.asynccontextmanager
async def serve(
    config: StoreConfig, log: TextIO, fenced: Callable[[], None] = lambda: None
) -> AsyncIterator[RunningStore]:
    """Serve while entered; then drain within `drain_ms_max`, twice at most. Needs a running loop.

    `fenced` is called, on any thread, when another process speaks for this store.
    """
    clock = time.monotonic
    started_s = clock()
    async with contextlib.AsyncExitStack() as stack:
        alive = _Alive()
        telemetry = Service("store", table.DEFINITIONS, live=alive.is_alive)
        opened = await stack.enter_async_context(open_telemetry(config.telemetry, telemetry, log))
        run_dir = stack.enter_context(_owned(config.run_dir or config.data_dir / "run"))
        hashes = DigestHashes()
        announcer = Announcer(config.index, hashes, fenced)
        stack.push_async_callback(announcer.close)
        watch = TierWatch(announcer)
        timings = table.Timings(opened.metrics)
        host = socket.gethostname()
        instance = InstanceId(config.instance or host)
        peers = await stack.enter_async_context(
            opened_peers(config, instance, clock, hashes.hash_of)
        )
        tiers = await built.open_tiers(config, watch, peers)
        store = await stack.enter_async_context(
            open_store(built.store_config(config, tiers), tiers.tiers, watch, timings, clock)
        )
        alive.of(store)
        tiers.restore(store, watch)
        arena_path = run_dir / ARENA_SOCKET
        arena_server = ArenaServer(tiers.arena, _sessions(config), clock)
        listener = ArenaListener(arena_server, arena_path)
        tiers.arena.govern(store)
        stack.callback(tiers.arena.release)
        listener.start()
        stack.push_async_callback(listener.close)
        leases = LeaseBook(tiers.arena)
        reservations = ReservationBook(config.staging_bytes_max, clock)
        clients = _Clients(arena_server, leases, reservations)
        identity = Identity(
            instance=instance,
            node=NodeId(config.node or host),
            zone=config.zone,
            grpc_address="",
            capacities=tuple(
                TierCapacity(tier, 0, view.stats.bytes_max)
                for tier, view in store.stats().tiers.items()
                if tier in HOLDER_TIERS
            ),
        )
        parts = Parts(
            store=store,
            watch=watch,
            arena=tiers.arena,
            leases=leases,
            reservations=reservations,
            announcer=announcer,
            stats=StatsView(
                store,
                timings,
                tuple(map(parse_quota, config.quotas)),
                clock,
                started_s,
                clients.counts,
            ),
            staging=ByteGate(config.staging_bytes_max),
            clock=clock,
            instance=identity.instance,
            node=identity.node,
            arena_socket=str(arena_path),
            erase=tiers.erase,
        )
        _bind(opened.metrics, parts, clients)
        tcp, local, report = await _servers(stack, config, parts, run_dir / SOCKET)
        health = HealthWatch(_tried(parts), report)
        opened.metrics.pull(table.SERVING, lambda: [((), float(health.is_serving))])
        opened.metrics.pull(table.TRIALS_FAILED, lambda: [((), health.failures_count)])
        table.read_peers(opened.metrics, peers)
        table.read_service(opened.metrics, arena_server.stats, [tcp.guard, local.guard])
        identity = replace(identity, grpc_address=reachable(config, tcp.port))
        bulk_port = 0
        if config.bulk.enabled and identity.grpc_address:
            nixl = await opened_nixl(config.peers)
            bulk = served_bulk(config.listen, config.bulk.port, POLICY, parts, nixl)
            bulk_port = await stack.enter_async_context(bulk)
            told = reachable(config, bulk_port)
            identity = replace(identity, bulk_address=told)
        announcer.name(identity)
        stack.push_async_callback(end, [asyncio.create_task(_keep_time(reservations))])
        await health.look()
        stack.push_async_callback(end, [asyncio.create_task(health.run())])
        if tiers.redis is not None:
            policy = HolderPolicy()
            shared = SharedAnnouncer(config.index, identity, RedisCaretaker(tiers.redis, policy))
            stack.push_async_callback(shared.close)
            looking = asyncio.create_task(shared.run(policy.look_s))
            stack.push_async_callback(end, [looking])
        LOG.info("serving", bind=config.listen.bind, port=tcp.port, socket=str(run_dir / SOCKET))
        yield RunningStore(
            tcp.port, run_dir / SOCKET, arena_path, store, opened.metrics, tiers.arena, bulk_port
        )


async def _servers(
    stack: contextlib.AsyncExitStack, config: StoreConfig, parts: Parts, path: Path
) -> tuple[SecureServer, SecureServer, Report]:
    """The service over TCP and over its Unix socket, started; stopped before anything else.

    And how to say there that it serves, which nobody has said yet.
    """
    service = StoreService(parts)
    on_socket = ListenConfig(
        bind=f"unix:{path}",
        tokens_file=config.listen.tokens_file,
        reflection=config.listen.reflection,
    )
    servers: list[SecureServer] = []
    healths: list[HealthServicer] = []
    for listen in (config.listen, on_socket):
        with _private_files():
            secured = security.new_server(listen, POLICY)
        secured.server.add_generic_rpc_handlers((service.handler(),))
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, secured.server)
        if listen.reflection:
            names = (
                rpc.STORE.full_name,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            )
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), secured.server)
        await secured.server.start()
        stack.push_async_callback(secured.server.stop, config.drain_ms_max / 1000)
        stack.push_async_callback(health.enter_graceful_shutdown)
        servers.append(secured)
        healths.append(health)

    async def report(is_serving: bool) -> None:
        told = health_pb2.HealthCheckResponse
        for health in healths:
            for name in ("", rpc.STORE.full_name):
                await health.set(name, told.SERVING if is_serving else told.NOT_SERVING)

    await report(False)
    return servers[0], servers[1], report


def _tried(parts: Parts) -> Callable[[], Awaitable[Trial]]:
    """A trial of the store as a whole: of its DRAM, while its own tasks run."""

    async def try_out() -> Trial:
        return await parts.arena.try_out() if parts.store.is_running else Trial.FAILED

    return try_out


@dataclass(frozen=True, slots=True)
class _Clients:
    """What clients hold, in shared memory and through the service."""

    arena: ArenaServer
    leases: LeaseBook
    reservations: ReservationBook

    def counts(self) -> dict[str, int]:
        arena = self.arena.stats()
        return {
            "sessions": arena.sessions,
            "leases": arena.leases + self.leases.count,
            "leased_bytes": self.leases.leased_bytes,
            "reservations": arena.reservations + len(self.reservations),
            "reservations_expired": arena.reservations_expired + self.reservations.expired,
            "quarantined": arena.quarantined,
        }


def _bind(metrics: Metrics, parts: Parts, clients: _Clients) -> None:
    table.read_from(metrics, parts.store.stats)
    for definition, name in (
        (table.LEASES, "leases"),
        (table.RESERVATIONS, "reservations"),
        (table.RESERVATIONS_EXPIRED, "reservations_expired"),
    ):
        metrics.pull(definition, partial(_one, clients, name))
    metrics.pull(table.UNANNOUNCED, lambda: [((), parts.announcer.unannounced_namespaces)])


def _one(clients: _Clients, name: str) -> Readings:
    return [((), clients.counts()[name])]


class _Alive:
    """Whether the process is worth keeping: the store's own tasks run."""

    def __init__(self) -> None:
        self._store: TieredStore | None = None

    def of(self, store: TieredStore) -> None:
        self._store = store

    def is_alive(self) -> bool:
        return self._store is None or self._store.is_running


def _sessions(config: StoreConfig) -> ArenaServerConfig:
    return ArenaServerConfig(
        sessions_max=config.dram.sessions_max,
        segment_bytes_max=config.dram.segment_bytes_max,
        segments_bytes_max=config.dram.segments_bytes_max,
    )


@contextlib.contextmanager
def _owned(run_dir: Path) -> Iterator[Path]:
    """A directory of sockets that no other store has; stale sockets of a dead one are removed.

    UnavailableError where another store has it, BackendError where it cannot be made.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(
            run_dir / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise BackendError(f"run_dir {run_dir}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"another store has {run_dir}") from error
        for name in (SOCKET, ARENA_SOCKET):
            (run_dir / name).unlink(missing_ok=True)
        yield run_dir
    finally:
        os.close(lock)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """What is made meanwhile (a socket) only its user can reach."""
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


def reachable(config: StoreConfig, port: int) -> str:
    """The address to tell others; empty where they cannot reach it. Asks the host for its name."""
    bind = config.listen.bind
    if bind.startswith("unix:"):
        return ""
    host = bind.rpartition(":")[0]
    if config.advertise:
        host = config.advertise.replace("{dashes}", re.sub(r"[.:]", "-", host.strip("[]")))
    elif host in {"0.0.0.0", "[::]"}:  # noqa: S104 (compared, not bound)
        host = socket.gethostname()
    return f"{host}:{port}"


async def _keep_time(reservations: ReservationBook) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        reservations.expire()


async def run(config: StoreConfig) -> None:
    """Serve until SIGTERM or SIGINT, or until another store speaks for this one."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def fenced() -> None:
        loop.call_soon_threadsafe(stop.set)

    async with serve(config, sys.stderr, fenced):
        await stop.wait()
        LOG.info("stopping")


def command(argv: list[str]) -> int:
    """Entry point of `kvtier store` and of `kvtier store drop`."""
    if argv[:1] == ["drop"]:
        return drop_command(argv[1:])
    loaded = load(StoreConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    settle()
    asyncio.run(run(loaded.config))
    return 0

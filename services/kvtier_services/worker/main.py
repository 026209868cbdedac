"""`kvtier worker`: read configuration, load a model, serve, drain.

What must not live here: decisions, HTTP handlers.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, TextIO

from kvtier import __version__
from kvtier.client.store import StoreClientConfig
from kvtier.config import describe, load
from kvtier.garbage import settle
from kvtier.publisher import Publisher
from kvtier.security.tokens import TokenBook
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.metrics import Metrics
from kvtier.telemetry.service import Service, Telemetry, open_telemetry
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier.types import InstanceId, NodeId
from kvtier_services.worker import metrics as table
from kvtier_services.worker.config import WorkerConfig
from kvtier_services.worker.core import Below, CoreTerms, EngineCore
from kvtier_services.worker.engine import Observers, WorkerEngine
from kvtier_services.worker.http.access import CONTROLLERS, admit_by
from kvtier_services.worker.http.app import Surroundings, create_app, create_runner
from kvtier_services.worker.http.metrics import TABLE as ENDPOINT_TABLE
from kvtier_services.worker.l2.audit import AuditTerms, writer_text
from kvtier_services.worker.l2.comparing import TOLERANCES
from kvtier_services.worker.l2.connector import StoreConnector
from kvtier_services.worker.l2.shelf import HotSetShelf
from kvtier_services.worker.leaving import HandOver, Leaving, LeavingParts, take_over
from kvtier_services.worker.models import FAKE, Served, open_model
from kvtier_services.worker.offload import OffloadTerms
from kvtier_services.worker.pace import PacePolicy
from kvtier_services.worker.publishing import Identity, new_publisher
from kvtier_services.worker.scheduler import SchedulerLimits
from kvtier_services.worker.serving import bound, port_of, reachable, served

LOG = EventLog("kvtier_services.worker")
_SWITCH_S: Final = 0.0005
"""How long the engine's thread may keep the interpreter from the others."""
_SEGMENT_BYTES: Final = 64 << 20
_ALIASES: Final = {
    "--store": "--store-targets",
    "--index": "--index-targets",
    "--served-name": "--served-names",
    "--kv-memory": "--kv-memory-bytes",
}
"""Short spellings of the flags that nearly every worker is given."""


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A served worker, for tests and benches that run it inside their own process."""

    port: int
    engine: WorkerEngine
    core: EngineCore
    connector: StoreConnector | None
    publisher: Publisher | None
    metrics: Metrics
    leaving: Leaving


@contextlib.asynccontextmanager
async def serve(
    config: WorkerConfig,
    log: TextIO,
    fenced: Callable[[], None] = lambda: None,
    loaded: Callable[[], None] = lambda: None,
) -> AsyncIterator[RunningWorker]:
    """Serve while entered; then drain within `drain_ms_max`. Needs a running loop.

    `fenced` is called, on any thread, when another process speaks for this worker; `loaded` when
    the model is there and nobody is served yet.
    """
    async with contextlib.AsyncExitStack() as stack:
        holder: list[WorkerEngine] = []
        definitions = (*table.TABLE, *ENDPOINT_TABLE)
        service = Service(
            "worker", definitions, live=lambda: all(engine.is_alive for engine in holder)
        )
        telemetry = await stack.enter_async_context(open_telemetry(config.telemetry, service, log))
        made = stack.enter_context(bound(config.listen))
        model = await asyncio.to_thread(open_model, config.model, config.cache)
        LOG.info(
            "model loaded", model=model.card.model_id, blocks=model.machine.pool.blocks_counts[0]
        )
        loaded()
        running = await _started(stack, Start(config, model, made, telemetry, fenced))
        holder.append(running.engine)
        writer = _writer(running.connector)
        LOG.info("serving", bind=config.listen.bind, port=running.port, writer=writer)
        yield running
        await running.leaving.leave()


@dataclass(frozen=True, slots=True)
class Start:
    """What is there before the engine."""

    config: WorkerConfig
    model: Served
    made: socket.socket
    telemetry: Telemetry
    fenced: Callable[[], None]


async def _started(stack: contextlib.AsyncExitStack, start: Start) -> RunningWorker:
    """Everything behind the endpoint, then the endpoint, then the word to the index."""
    config, model, made, telemetry = start.config, start.model, start.made, start.telemetry
    identity = _identity(config, model, port_of(made))
    publisher = new_publisher(identity, config.index, start.fenced)
    wake = _Wake()
    connector = _connector(config, model, wake)
    core = EngineCore(
        model.machine,
        _core_terms(config),
        publisher,
        None if connector is None else Below(connector, _offload_terms(config, model)),
        time.monotonic,
    )
    looks = table.Looks(
        writer=_writer(connector),
        is_attached=lambda: connector is not None and connector.is_attached,
        is_fenced=lambda: publisher is not None and publisher.stats().is_fenced,
        now=time.monotonic,
    )
    watched = table.WorkerMetrics(telemetry.metrics, core, looks)
    observers = Observers(
        load=(lambda _: None) if publisher is None else publisher.set_load,
        step=watched.stepped,
        first_token=watched.first_token.observe,
    )
    engine = WorkerEngine(core, model.card, config.batch.queue_max, observers)
    wake.engine = engine
    await asyncio.to_thread(core.calibrate)
    hand_over = _hand_over(connector, identity)
    parts = LeavingParts(config, engine, core, publisher, hand_over)
    await take_over(parts)
    leaving = Leaving(parts)
    telemetry.metrics.pull(table.HOT_SET_LEFT, lambda: [((), leaving.left_blocks)])
    engine.start()
    stack.push_async_callback(_end, engine, connector)
    await engine.check()
    around = _surroundings(config, telemetry, leaving)
    app = create_app(engine, model.texts, config.endpoint, around)
    await stack.enter_async_context(served(create_runner(app), made, config.listen.tls))
    if publisher is not None:
        await asyncio.to_thread(publisher.start)
        stack.push_async_callback(asyncio.to_thread, publisher.close)
    return RunningWorker(
        port_of(made), engine, core, connector, publisher, telemetry.metrics, leaving
    )


class _Wake:
    """Wakes the engine once there is one: the connector is made before it."""

    def __init__(self) -> None:
        self.engine: WorkerEngine | None = None

    def __call__(self) -> None:
        if self.engine is not None:
            self.engine.wake()


async def _end(engine: WorkerEngine, connector: StoreConnector | None) -> None:
    """The engine first: nothing is begun any more when the connector ends what runs."""
    await engine.close()
    if connector is not None:
        await asyncio.to_thread(connector.close)


def _surroundings(config: WorkerConfig, telemetry: Telemetry, leaving: Leaving) -> Surroundings:
    file = config.listen.tokens_file
    if file is None:
        return Surroundings(telemetry.metrics, leave=leaving.leave)
    book = TokenBook(file)
    return Surroundings(
        telemetry.metrics, admit_by(book), admit_by(book, CONTROLLERS), leave=leaving.leave
    )


def _hand_over(connector: StoreConnector | None, identity: Identity) -> HandOver | None:
    if connector is None:
        return None
    of = identity.namespace, identity.block_bytes, identity.instance
    return HandOver(connector, lambda client: HotSetShelf(client, *of))


def _connector(
    config: WorkerConfig, model: Served, wake: Callable[[], None]
) -> StoreConnector | None:
    if not config.store.targets:
        return None
    geometry = model.machine.runner.geometry
    largest = max(geometry.block_bytes(group) for group in range(len(geometry.groups)))
    segment = max(_SEGMENT_BYTES, 4 * largest)
    client = StoreClientConfig(arena=ArenaClientConfig(segment, segment))
    return StoreConnector(config.store, client, wake, config.offload.save_deadline_ms / 1000)


def _core_terms(config: WorkerConfig) -> CoreTerms:
    batch = config.batch
    return CoreTerms(
        SchedulerLimits(batch.sequences_max, batch.step_tokens_max),
        PacePolicy(batch.stall_ratio_max, batch.stall_ms_min / 1000),
    )


def _writer(connector: StoreConnector | None) -> str:
    """What this worker's blocks are marked with, as `kvtier store drop --writer` takes it."""
    return "" if connector is None else writer_text(connector.writer_id)


def _offload_terms(config: WorkerConfig, model: Served) -> OffloadTerms:
    section = config.offload
    dtype = model.machine.runner.geometry.dtype
    tolerance = 0.0 if config.model.model == FAKE else TOLERANCES[dtype]
    audit = AuditTerms(section.audit_fraction, section.audit_blocks_max, tolerance)
    return OffloadTerms(
        namespace=model.namespaces[0],
        window_namespaces=model.namespaces[1:],
        write_policy=section.write_policy,
        in_flight_bytes_max=section.in_flight_bytes_max,
        lookup_s_max=section.lookup_ms_max / 1000,
        load_s_max=section.load_ms_max / 1000,
        prefill_wait_s_max=section.save_deadline_ms / 1000,
        audit=audit,
    )


def _identity(config: WorkerConfig, model: Served, port: int) -> Identity:
    host = socket.gethostname()
    address = config.advertise or reachable(config.listen, port)
    node = config.node or host
    attached = config.offload.store_instance or node
    return Identity(
        instance=InstanceId(config.instance or f"{host}:{port}"),
        node=NodeId(node),
        zone=config.zone,
        store=attached if config.store.targets else "",
        http_address=address,
        card=model.card,
        namespace=model.namespaces[0],
        blocks_count=model.machine.pool.blocks_counts[0],
        block_bytes=model.machine.runner.geometry.block_bytes(0),
        version=__version__,
        role=config.role,
    )


async def run(config: WorkerConfig) -> None:
    """Serve until SIGTERM or SIGINT, or until another process speaks for this worker."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def fenced() -> None:
        loop.call_soon_threadsafe(stop.set)

    async with serve(config, sys.stderr, fenced, settle):
        await stop.wait()
        LOG.info("stopping")


def command(argv: list[str]) -> int:
    """`kvtier worker` but for `drain` (entry.py)."""
    loaded = load(WorkerConfig, [_spelled_out(argument) for argument in argv])
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(run(loaded.config))
    return 0


def _spelled_out(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return _ALIASES.get(name, name) + equals + value

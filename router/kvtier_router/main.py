"""`kvtier router`: read configuration, build, serve, drain.

What must not live here: decisions, HTTP handlers.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import uvloop

from kvtier import __version__
from kvtier.config import describe, load
from kvtier.core.admission import AdmissionPolicy, ClassPolicy
from kvtier.core.health import RetryBudget
from kvtier.core.workers import WorkerName
from kvtier.errors import ConfigError, KvtierError
from kvtier.garbage import settle
from kvtier.sections import Reach, parse_address
from kvtier.security.clock import SYSTEM
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.service import Service, open_telemetry
from kvtier.text.model import TextModel
from kvtier.wire.loop_thread import end
from kvtier_router import metrics as table
from kvtier_router.brain import Brain, open_brain, router_name
from kvtier_router.config import RouterConfig, check_listen, pairs
from kvtier_router.front.access_log import AccessLog
from kvtier_router.front.admin import Admin, AdminParts
from kvtier_router.front.app import Front, FrontParts, FrontPolicy
from kvtier_router.front.credentials import Credentials
from kvtier_router.front.history import History
from kvtier_router.front.loads import LoadPoll
from kvtier_router.front.prompts import NamedTexts, PromptReader
from kvtier_router.front.queue import RequestQueue
from kvtier_router.front.quota import QuotaDesk
from kvtier_router.front.relay import Relay, RelayParts, RelayPolicy
from kvtier_router.front.silence import Silence
from kvtier_router.front.splitting import SplitParts, Splits
from kvtier_router.front.stickiness import Stickiness
from kvtier_router.front.tenants import TenantBook
from kvtier_router.gossip import (
    Gossip,
    GossipSockets,
    drain_quietly,
    open_link,
    open_sockets,
)
from kvtier_router.processes import supervise
from kvtier_router.routing.values import RoutingBrain
from kvtier_router.ui.dashboard import Dashboard, DashboardParts
from kvtier_router.ui.feed import Gauges, Who
from kvtier_router.web.server import HttpServer
from kvtier_router.web.tls import ServerTls
from kvtier_router.web.upstream import Upstream

LOG: Final = EventLog("kvtier_router")
TICK_S: Final = 0.1

BrainMaker = Callable[[RouterConfig, int], contextlib.AbstractAsyncContextManager[Brain]]
"""(configuration, number of the process) -> the brain while entered."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes that share a port this one is."""

    process: int = 0
    gossip: GossipSockets | None = None
    """None: alone."""


ALONE: Final = Place()


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """A served router, for tests that run it inside their own process."""

    port: int
    admin_port: int
    """0 where there is no admin listener, or it is a Unix socket."""
    brain: RoutingBrain
    front: Front


@contextlib.asynccontextmanager
async def serve(
    config: RouterConfig, log: TextIO, make_brain: BrainMaker, place: Place
) -> AsyncIterator[RunningRouter]:
    """Serve while entered; then drain."""
    check_listen(config)
    clock = time.monotonic
    async with contextlib.AsyncExitStack() as stack:
        service = Service("router", table.DEFINITIONS, live=lambda: True)
        telemetry = await stack.enter_async_context(open_telemetry(config.telemetry, service, log))
        made = await stack.enter_async_context(make_brain(config, place.process))
        brain = made.routing
        upstream = Upstream(config.upstream.limits, clock, _upstream_tls(config.upstream.ca_file))
        stack.callback(upstream.close)
        tenants = TenantBook(config.tenants.keys_file, config.tenants.secret())
        if tenants.is_open:
            LOG.warning("open mode: everybody is let in, and nothing separates tenants")
        quotas = QuotaDesk(clock)
        access = AccessLog(log)
        history = History()
        stack.push_async_callback(asyncio.to_thread, access.close)
        queue = RequestQueue(_admission(config), config.queue.wait_ms_max / 1e3, clock)
        stickiness = Stickiness()
        relay_parts = _relay_parts(config, made, upstream, stickiness, clock)
        relay = Relay(relay_parts)
        if not config.texts:
            LOG.warning(
                "no texts: prompts of text are routed by their letters, and hits of workers"
                " can be predicted for prompts of token ids only"
            )
        prompts = PromptReader(NamedTexts(load_texts(config)))
        parts = FrontParts(
            brain=brain,
            relay=relay,
            queue=queue,
            quotas=quotas,
            tenants=tenants,
            prompts=prompts,
            front_metrics=table.FrontMetrics(telemetry.metrics),
            metrics=telemetry.metrics,
            tracer=telemetry.tracer,
            access=access,
            history=history,
            clock=clock,
        )
        front = Front(parts, _policy(config))
        server = HttpServer(front, config.http, clock)
        table.bind_relay(telemetry.metrics, relay)
        table.bind_splits(telemetry.metrics, relay_parts.splits)
        table.bind_server(telemetry.metrics, server, queue)
        table.bind_brain(telemetry.metrics, brain)
        table.bind_access(telemetry.metrics, lambda: access.dropped_count)
        table.bind_keys(telemetry.metrics, lambda: tenants.reload_errors)
        gossip = Gossip(
            _secret(config, place), quotas, tenants, stickiness, partial(_follow, brain)
        )
        dashboard = Dashboard(
            DashboardParts(
                brain=brain,
                sight=made.sight,
                history=history,
                who=_who(config, place.process, clock()),
                gauges=partial(_gauges, relay, server, queue),
                clock=clock,
                wall=SYSTEM.wall,
            )
        )
        admin_parts = AdminParts(
            brain,
            prompts,
            telemetry.metrics,
            front.unready,
            gossip.order,
            dashboard.answer,
            relay_parts.splits,
        )
        admin = HttpServer(Admin(admin_parts), config.http, clock)
        admin_port = await _listen_admin(admin, config.admin_bind, place.process)
        stack.push_async_callback(admin.drain, 0.5)
        tls = None if config.listen.tls is None else ServerTls(config.listen.tls.files())
        bound = bind_public(config.listen.bind, shared=config.workers > 1)
        port = int(bound.getsockname()[1])
        await server.listen(bound, None if tls is None else tls.context)
        chores = [brain.tick, queue.pump, upstream.sweep, server.sweep, admin.sweep, access.flush]
        chores.append(dashboard.tick)
        silence = Silence(upstream, partial(_hidden, brain), config.upstream.silence, clock)
        stack.push_async_callback(silence.close)
        chores.append(silence.watch)
        loads = LoadPoll(upstream, brain, relay_parts.credentials, config.upstream.loads, clock)
        stack.push_async_callback(loads.close)
        chores.append(loads.watch)
        table.bind_loads(telemetry.metrics, loads)
        if tls is not None:
            chores.append(tls.follow)
        if place.gossip is not None:
            peers = config.gossip.peers
            link = await open_link(place.gossip, place.process, peers, gossip)
            stack.callback(link.close)
            chores.append(link.tell)
        ticking = asyncio.create_task(_tick(chores))
        stack.push_async_callback(end, [ticking])
        LOG.info("serving", bind=config.listen.bind, port=port, admin_port=admin_port)
        try:
            yield RunningRouter(port, admin_port, brain, front)
        finally:
            LOG.info("draining")
            front.draining = server.draining = True  # each answer ends its connection from now on
            await asyncio.sleep(config.drain_delay_ms / 1e3)
            await server.drain(config.drain_ms_max / 1e3)


def _relay_parts(
    config: RouterConfig,
    brain: Brain,
    upstream: Upstream,
    stickiness: Stickiness,
    clock: Callable[[], float],
) -> RelayParts:
    relay = config.relay
    budget = RetryBudget(relay.retry_ratio, burst=float(relay.retry_burst))
    splits = None
    if brain.splitter is not None:
        splits = Splits(SplitParts(brain.routing, brain.splitter, upstream, budget, clock))
    return RelayParts(
        brain=brain.routing,
        route_later=brain.route_later,
        upstream=upstream,
        credentials=Credentials(config.upstream.bearer, config.upstream.tokens_file),
        stickiness=stickiness,
        splits=splits,
        budget=budget,
        policy=RelayPolicy(relay.attempts_max, relay.shows_decision),
        clock=clock,
    )


def _admission(config: RouterConfig) -> AdmissionPolicy:
    queue = config.queue
    row = ClassPolicy(
        queued_requests_max=queue.queued_requests_max,
        running_requests_max=queue.running_requests_max,
    )
    return AdmissionPolicy(
        classes=(row,) * queue.classes,
        tenant_queued_requests_max=queue.tenant_queued_requests_max,
        running_requests_max=queue.running_requests_max,
    )


def _who(config: RouterConfig, process: int, now: float) -> Who:
    """Which process of which router the dashboard shows."""
    ports: tuple[int, ...] = ()
    if config.admin_bind and not config.admin_bind.startswith("unix:"):
        first = parse_address(config.admin_bind).port
        ports = tuple(first + number for number in range(config.workers)) if first else ()
    return Who(
        instance=router_name(config, process),
        version=__version__,
        policy=config.policy.value,
        process=process,
        processes=config.workers,
        admin_ports=ports,
        started_at=now,
    )


def _gauges(relay: Relay, server: HttpServer, queue: RequestQueue) -> Gauges:
    """What the front counts itself, for the dashboard."""
    return Gauges(
        running=queue.running,
        queued=queue.queued,
        connections=server.connections_count,
        queue_refused=queue.refused,
        queue_expired=queue.expired,
        retries={one.value: count for one, count in relay.retries.items()},
        resumptions={one.value: count for one, count in relay.resumptions.items()},
        losses={one.value: count for one, count in relay.losses.items()},
        turned_away={one.value: count for one, count in server.refused.items() if count},
    )


def _policy(config: RouterConfig) -> FrontPolicy:
    local = parse_address(config.listen.bind).reach is Reach.LOCAL
    return FrontPolicy(
        prompt_tokens_max=config.relay.prompt_tokens_max,
        request_s_max=config.relay.request_ms_max / 1e3,
        session_header=config.relay.session_header.lower(),
        shows_metrics=local,
        started=int(SYSTEM.wall()),
    )


def load_texts(config: RouterConfig) -> dict[str, TextModel]:
    """The text models that the configuration names. Blocks while they are built."""
    by_directory: dict[str, TextModel] = {}
    found: dict[str, TextModel] = {}
    for name, directory in pairs(config.texts, "texts"):
        if directory not in by_directory:
            by_directory[directory] = TextModel.load(Path(directory))
        found[name] = by_directory[directory]
    return found


def bind_public(bind: str, *, shared: bool) -> socket.socket:
    """A bound socket; `shared`: other processes may bind the same port. ConfigError."""
    address = parse_address(bind)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {bind}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


async def _listen_admin(admin: HttpServer, bind: str | None, process: int) -> int:
    """The port of the admin listener of a process; 0 where it has none."""
    if not bind:
        return 0
    address = parse_address(bind)
    if bind.startswith("unix:"):
        path = address.host if process == 0 else f"{address.host}.{process}"
        await admin.listen(_private_socket(path))
        return 0
    port = address.port + process if address.port else 0
    host = f"[{address.host}]" if ":" in address.host else address.host
    bound = bind_public(f"{host}:{port}", shared=False)
    await admin.listen(bound)
    return int(bound.getsockname()[1])


def _private_socket(path: str) -> socket.socket:
    """A bound Unix socket that only its user can reach. ConfigError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        Path(path).unlink(missing_ok=True)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on unix:{path}: {error.strerror}") from error
    finally:
        os.umask(mask)
    bound.setblocking(False)
    return bound


def _upstream_tls(ca_file: Path | None) -> ssl.SSLContext | None:
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file}: {error}") from error


def _secret(config: RouterConfig, place: Place) -> bytes:
    if place.gossip is not None:
        return place.gossip.secret
    return config.tenants.secret() or b"nobody listens"


def _hidden(brain: RoutingBrain) -> list[str]:
    """Addresses of workers that the index has stopped hearing."""
    return [report.address for report in brain.workers() if report.state == "hidden"]


def _follow(brain: RoutingBrain, worker: WorkerName, drains: bool) -> None:
    """Do what an operator said to another process or router."""
    drain_quietly(brain.drain if drains else brain.undrain, worker)


async def _tick(chores: Sequence[Callable[[], None]]) -> None:
    """What has to be done ten times a second. One that fails is logged, once in a row, and keeps
    neither the others nor, next time, itself from being done."""
    failing: set[int] = set()
    while True:
        await asyncio.sleep(TICK_S)
        for number, chore in enumerate(chores):
            try:
                chore()
            except Exception as error:  # outermost edge: without deadlines all would hang one day
                if number not in failing:
                    LOG.exception("a chore failed", error)
                failing.add(number)
            else:
                failing.discard(number)


async def run(
    config: RouterConfig, make_brain: BrainMaker, place: Place = ALONE, parent: int | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, or until the descriptor `parent` ends."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        loop.add_reader(parent, stop.set)
    async with serve(config, sys.stderr, make_brain, place):
        settle()
        await stop.wait()
        if parent is not None:
            loop.remove_reader(parent)
        LOG.info("stopping")


def run_processes(config: RouterConfig, make_brain: BrainMaker) -> int:
    """Serve with as many processes as the configuration says. Blocks; the exit status."""
    secret = config.tenants.secret()
    if config.workers == 1:
        alone = ALONE
        if config.gossip.bind is not None:
            alone = Place(0, open_sockets(config.gossip.bind, 1, secret))
        uvloop.run(run(config, make_brain, alone))
        return 0
    sockets = open_sockets(config.gossip.bind, config.workers, secret)
    reserved = bind_public(config.listen.bind, shared=True)
    port = int(reserved.getsockname()[1])
    host = config.listen.bind.rpartition(":")[0]
    listen = replace(config.listen, bind=f"{host}:{port}")
    shared = replace(config, listen=listen)

    def run_one(number: int, parent: int) -> int:
        try:
            uvloop.run(run(shared, make_brain, Place(number, sockets), parent))
        except KvtierError as error:
            sys.stderr.write(f"kvtier router: {error}\n")
            return 1
        return 0

    with contextlib.closing(reserved):
        return supervise(config.workers, run_one)


def command(argv: list[str]) -> int:
    """Entry point of `kvtier router`."""
    loaded = load(RouterConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    check_listen(loaded.config)
    return run_processes(loaded.config, open_brain)

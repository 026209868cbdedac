"""`kvtier index`: read configuration, build, serve, drain.

What must not live here: decisions and RPC handlers.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, TextIO

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from kvtier import security
from kvtier.config import describe, load
from kvtier.core.membership import LeaseConfig
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.errors import UnavailableError
from kvtier.garbage import settle
from kvtier.security import AccessRole, Policy
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.metrics import Metrics
from kvtier.telemetry.service import Service, open_telemetry
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import end
from kvtier_services.index.broadcast import Broadcast
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.metrics import DEFINITIONS, IndexMetrics
from kvtier_services.index.service import IndexService
from kvtier_services.index.state import IndexState, StateConfig

_PUBLISHERS: Final = {AccessRole.WORKER, AccessRole.STORE, AccessRole.BRIDGE}
_READERS: Final = {AccessRole.ROUTER, AccessRole.OPERATOR}
_SERVICE: Final = f"/{rpc.INDEX.full_name}"

POLICY: Final = Policy.of(
    {
        f"{_SERVICE}/Publish": _PUBLISHERS,
        f"{_SERVICE}/Match": _READERS | _PUBLISHERS,
        f"{_SERVICE}/Locate": {AccessRole.STORE, AccessRole.OPERATOR},
        f"{_SERVICE}/Reserve": {AccessRole.ROUTER},
        f"{_SERVICE}/Release": {AccessRole.ROUTER, AccessRole.OPERATOR},
        f"{_SERVICE}/Snapshot": {AccessRole.ROUTER, AccessRole.INDEX, AccessRole.OPERATOR},
        f"{_SERVICE}/WatchFleet": _READERS | {AccessRole.STORE, AccessRole.INDEX},
        f"{_SERVICE}/Stats": {AccessRole.OPERATOR},
    }
)
"""Who may call what; every method of the service is in it (a test enumerates them)."""

LOG = EventLog("kvtier_services.index")
TICK_S_MIN: Final = 0.005
TICK_S_MAX: Final = 0.25


@dataclass(frozen=True, slots=True)
class RunningIndex:
    """A served index, for tests that run it inside their own process."""

    port: int
    state: IndexState
    metrics: Metrics


@contextlib.asynccontextmanager
async def serve(config: IndexConfig, log: TextIO) -> AsyncIterator[RunningIndex]:
    """Serve while entered; draining ends within `drain_ms_max`. Needs a running event loop."""
    clock = time.monotonic
    index = NativePrefixIndex(bytes_max=config.index_bytes_max)
    broadcast = Broadcast(index, clock, secrets.randbits(63) + 1)
    state_config = StateConfig(
        lease=_lease_config(config), holder_blocks_max=config.holder_blocks_max
    )
    state = IndexState(index, state_config, broadcast)
    broadcast.attach(state)
    ticking = asyncio.create_task(keep_time(state, clock))
    telemetry = Service("index", DEFINITIONS, live=lambda: not ticking.done())
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(end, [ticking])
        opened = await stack.enter_async_context(open_telemetry(config.telemetry, telemetry, log))
        index_metrics = IndexMetrics(opened.metrics, clock)
        secured = security.new_server(config.listen, POLICY)
        index_metrics.read_from(state, broadcast, secured.guard)
        welcome = _welcome(config, broadcast.index_epoch)
        service = IndexService(state, broadcast, index_metrics, clock, welcome)
        secured.server.add_generic_rpc_handlers((service.handler(),))
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, secured.server)
        if config.listen.reflection:
            names = (
                rpc.INDEX.full_name,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            )
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), secured.server)
        await secured.server.start()
        stack.push_async_callback(_drained, secured.server, service, config.drain_ms_max / 1000)
        stack.push_async_callback(health.enter_graceful_shutdown)
        for name in ("", rpc.INDEX.full_name):
            await health.set(name, health_pb2.HealthCheckResponse.SERVING)
        LOG.info("serving", bind=config.listen.bind, port=secured.port)
        yield RunningIndex(secured.port, state, opened.metrics)


async def _drained(server: grpc.aio.Server, service: IndexService, drain_s_max: float) -> None:
    """Take no more calls, end the streams and wait for what is under way, within `drain_s_max`."""
    stopping = asyncio.create_task(server.stop(drain_s_max))
    await asyncio.sleep(0)  # from here on, who is sent away is not let in again
    service.stop(UnavailableError("the index is stopping"))
    await stopping


async def keep_time(state: IndexState, clock: Callable[[], float]) -> None:
    """Tick the state for as long as the service lives."""
    while True:
        now = clock()
        state.tick(now)
        deadline = state.next_deadline()
        wait_s = (
            TICK_S_MAX if deadline is None else min(max(deadline - now, TICK_S_MIN), TICK_S_MAX)
        )
        await asyncio.sleep(wait_s)


def _lease_config(config: IndexConfig) -> LeaseConfig:
    return LeaseConfig(
        lease_s=config.lease_ms / 1000,
        grace_s=config.grace_ms / 1000,
        stall_s_max=min(1.0, config.lease_ms / 2000),
    )


def _welcome(config: IndexConfig, index_epoch: int) -> pb.Welcome:
    return pb.Welcome(
        lease_ms=config.lease_ms,
        heartbeat_ms=max(20, config.lease_ms // 4),
        index_epoch=index_epoch,
        protocol_version=convert.PROTOCOL_VERSION,
    )


async def run(config: IndexConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(config, sys.stderr):
        await stop.wait()
        LOG.info("stopping")


def command(argv: list[str]) -> int:
    """Entry point of `kvtier index`."""
    loaded = load(IndexConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    settle()
    asyncio.run(run(loaded.config))
    return 0

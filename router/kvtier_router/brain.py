"""Builds the routing brain that the configuration asks for, with its index.

What must not live here: decisions.
"""

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import uvloop

from kvtier.client import IndexClient
from kvtier.client.reservations import ReserveDesk
from kvtier.errors import ConfigError
from kvtier.replica import IndexReplica, ReplicaConfig
from kvtier.telemetry.logs import EventLog
from kvtier.wire.loop_thread import LoopThread, end
from kvtier_router.config import IndexMode, RouterConfig, pairs
from kvtier_router.routing import Router, RoutingBrain, RoutingConfig, StaticWorker, static_worker
from kvtier_router.routing.config import NameRule, NameTarget
from kvtier_router.routing.remote import RemoteFleet
from kvtier_router.routing.splitting import SplitPolicy, Splitter
from kvtier_router.routing.values import RouteAsk, RouteDecision
from kvtier_router.ui.watching import NO_SIGHT, IndexSight

LOG: Final = EventLog("kvtier_router")
_TARGET: Final = re.compile(r"(?P<name>.+?)(@@(?P<revision>[^*]+))?(\*(?P<share>[0-9.eE+-]+))?")
_FIRST_PICTURE_S: Final = 3.0
_DESK_S: Final = 10.0
"""To open or close what runs on the index's thread; passing it means that the thread is stuck."""


@dataclass(frozen=True, slots=True)
class Brain:
    """The brain, and how to ask it where an index elsewhere has to be asked first."""

    routing: RoutingBrain
    route_later: Callable[[RouteAsk], Awaitable[RouteDecision]] | None = None
    sight: IndexSight = NO_SIGHT
    """What can be seen of the index, for the dashboard."""
    splitter: Splitter | None = None
    """Who decides whether a request is split; None: none is."""


def router_name(config: RouterConfig, process: int) -> str:
    """Unique among the routers of a fleet and their processes."""
    name = config.instance or f"{socket.gethostname()}-{os.getpid()}"
    return f"{name}.{process}" if config.workers > 1 else name


@contextlib.asynccontextmanager
async def open_brain(config: RouterConfig, process: int = 0) -> AsyncIterator[Brain]:
    """The brain while entered. An index that is not there yet is waited for a moment only."""
    name = router_name(config, process)
    routing = routing_config(config, name)
    if not config.index.targets:
        yield Brain(Router(routing))
        return
    if config.index_mode is IndexMode.REMOTE:
        async with _remote(config, name, routing) as brain:
            yield brain
        return
    # All of gRPC on one loop, which is not the front's: see LoopThread.
    thread = LoopThread("index replica", uvloop.new_event_loop)
    thread.start()
    client = IndexClient(config.index)
    replica = IndexReplica(config.index, ReplicaConfig(router=name), thread)
    desk = ReserveDesk(thread, client.reservations(name))
    try:
        replica.start()
        desk.open(_DESK_S)
        if not await asyncio.to_thread(replica.wait_complete, _FIRST_PICTURE_S):
            LOG.warning("the index has not been heard yet: serving without it")
        sight = IndexSight(
            config.index_mode.value,
            config.index.targets,
            replica.look,
            lambda: replica.lag,
            replica.census,
        )
        router = Router(routing, replica, desk)
        policy = SplitPolicy(config.split, config.split_tokens_min)
        yield Brain(router, sight=sight, splitter=Splitter(router, policy, time.monotonic))
    finally:
        await asyncio.to_thread(_close, thread, client, replica, desk)


def _close(
    thread: LoopThread, client: IndexClient, replica: IndexReplica, desk: ReserveDesk
) -> None:
    """End what runs on the thread, then the thread. Blocks."""
    desk.close(_DESK_S)
    thread.submit(client.close()).result(_DESK_S)
    replica.close()
    thread.stop()


@contextlib.asynccontextmanager
async def _remote(config: RouterConfig, name: str, routing: RoutingConfig) -> AsyncIterator[Brain]:
    """A brain that asks an index for every match."""
    async with IndexClient(config.index) as client, client.reservations(name) as session:
        fleet = RemoteFleet(time.monotonic)
        following = asyncio.create_task(fleet.follow(client))
        router = Router(routing, fleet, session)
        deadline_s = config.match_ms_max / 1e3
        try:
            sight = IndexSight(config.index_mode.value, config.index.targets, fleet.look)
            yield Brain(router, lambda ask: router.route_remote(ask, client, deadline_s), sight)
        finally:
            await end([following])


def routing_config(config: RouterConfig, name: str) -> RoutingConfig:
    """The brain's own settings. ConfigError for entries that cannot be read."""
    return RoutingConfig(
        router=name,
        policy=config.policy,
        rules=tuple(_rule(left, right) for left, right in pairs(config.names, "names")),
        workers=tuple(
            _worker(left, right) for left, right in pairs(config.static_workers, "static_workers")
        ),
    )


def _worker(name: str, text: str) -> StaticWorker:
    address, *models = text.split()
    if not models:
        raise ConfigError(f"static_workers: {name!r} serves no model: NAME=ADDRESS MODEL ...")
    return static_worker(name, address, models)


def _rule(name: str, text: str) -> NameRule:
    targets = []
    for part in text.split():
        found = _TARGET.fullmatch(part)
        if found is None:
            raise ConfigError(f"names: {part!r} is not TARGET[@@REVISION][*SHARE]")
        share = found["share"]
        try:
            number = None if share is None else float(share)
        except ValueError:
            raise ConfigError(f"names: {share!r} is no share") from None
        targets.append(NameTarget(found["name"], found["revision"], number))
    return NameRule(name, tuple(targets))

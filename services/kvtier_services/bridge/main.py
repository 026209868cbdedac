"""`kvtier bridge`: read configuration, build, follow, drain.

What must not live here: decisions, sockets.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final, TextIO

from kvtier.config import describe, load
from kvtier.core.encoding import Symbol, Value, digest
from kvtier.core.model_card import ModelCard
from kvtier.engines.vllm.namespaces import told_namespace
from kvtier.errors import BackendError
from kvtier.garbage import settle
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.service import Service, open_telemetry
from kvtier.wire.loop_thread import end
from kvtier_services.bridge import metrics as table
from kvtier_services.bridge.config import TOLD, BridgeConfig
from kvtier_services.bridge.follower import Follower, Speaking
from kvtier_services.bridge.load import LoadReader
from kvtier_services.bridge.memory import BridgeMemory, open_memory
from kvtier_services.bridge.publishing import Identity, Speaker

LOG: Final = EventLog("kvtier_services.bridge")
_MEMORY_DOMAIN: Final = "kvtier.bridge-memory.v1"
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RunningBridge:
    """A bridge, for tests that run it inside their own process."""

    follower: Follower
    memory: BridgeMemory
    page_port: int | None


@contextlib.asynccontextmanager
async def serve(
    config: BridgeConfig, log: TextIO, fenced: Callable[[], None] = lambda: None
) -> AsyncIterator[RunningBridge]:
    """Follow the engine while entered; then save, and say goodbye. Needs a running loop.

    `fenced` is called, on any thread, when another bridge speaks for this engine.
    """
    async with contextlib.AsyncExitStack() as stack:
        made: list[Follower] = []
        service = Service("bridge", table.DEFINITIONS, lambda: all(one.is_alive for one in made))
        telemetry = await stack.enter_async_context(open_telemetry(config.telemetry, service, log))
        card = await asyncio.to_thread(config.model.card)
        memory = stack.enter_context(
            open_memory(
                config.memory.data_dir, _identity(config, card), config.memory.file_bytes_max
            )
        )
        speaker = Speaker(Identity(config, card, socket.gethostname()), config.index, fenced)
        speaker.check()
        stack.push_async_callback(asyncio.to_thread, speaker.close)
        speaking = Speaking(speaker.join, speaker.leave)
        follower = await asyncio.to_thread(Follower, config, card, memory, speaking, time.monotonic)
        made.append(follower)
        reader = LoadReader(config.engine, speaker.set_load)
        parts = table.Parts(follower, memory, speaker, reader)
        table.read_from(telemetry.metrics, parts)
        follower.start()
        stack.push_async_callback(asyncio.to_thread, follower.stop)
        if config.engine.load_ms:
            stack.push_async_callback(end, [asyncio.create_task(reader.run())])
        LOG.info("following", engine=config.engine.kind.value, events=config.engine.events)
        yield RunningBridge(follower, memory, telemetry.page_port)


def _identity(config: BridgeConfig, card: ModelCard) -> bytes:
    """What hashes on disk mean: another model, adapter or engine gives them another meaning."""
    fields: dict[int, Value] = {1: card.digest(), 2: Symbol(config.engine.kind.value)}
    return digest(_MEMORY_DOMAIN, fields)


async def run(config: BridgeConfig) -> None:
    """Follow until SIGTERM or SIGINT, or until another bridge speaks for this engine."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def fenced() -> None:
        loop.call_soon_threadsafe(stop.set)

    while not stop.is_set() and not is_told(config):
        await _stopped(stop)
    if stop.is_set():
        return
    async with serve(with_namespace(config), sys.stderr, fenced) as running:
        while not stop.is_set() and running.follower.is_alive:
            await _stopped(stop)
        LOG.info("stopping")
        if not running.follower.is_alive:
            raise BackendError("the thread that follows the engine ended by itself")


async def _stopped(stop: asyncio.Event) -> None:
    """Wait for it, for a moment."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            await stop.wait()


def is_told(config: BridgeConfig) -> bool:
    """Whether the connector has said in what namespace it writes, if it is to: it does so before
    it opens its socket, and not at all where its ranks have several."""
    socket_path = config.engine.feed_path(0)
    return config.model.namespace != TOLD or socket_path is None or socket_path.exists()


def with_namespace(config: BridgeConfig) -> BridgeConfig:
    """The configuration with what the connector has said."""
    folder = config.engine.residents
    if config.model.namespace != TOLD or folder is None:
        return config
    return replace(config, model=replace(config.model, namespace=told_namespace(folder)))


def command(argv: list[str]) -> int:
    """Entry point of `kvtier bridge`."""
    loaded = load(BridgeConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    settle()
    asyncio.run(run(loaded.config))
    return 0

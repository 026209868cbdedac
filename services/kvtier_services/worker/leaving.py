"""How a worker ends so that nobody notices: it hands over what it has before it goes.

    1. the hottest of L1 is written to the store, as far as it is not there; requests are served
    2. the index is told goodbye: routers send nothing more within milliseconds
    3. for a moment requests are still taken, of routers that have not heard yet; then none
    4. what runs goes on to its end, within a bound
    5. what was computed meanwhile is written, and the list of it all is left for the successor

Writing comes before the goodbye: whoever takes over a conversation finds its blocks in the store.
What must not live here: the process's signals and servers (`main`), what is hot (`l2.heat`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.client.store import BlockStoreClient
from kvtier.errors import KvtierError
from kvtier.publisher import Publisher
from kvtier.telemetry.logs import EventLog
from kvtier_services.worker.config import WorkerConfig
from kvtier_services.worker.core import EngineCore
from kvtier_services.worker.engine import WorkerEngine
from kvtier_services.worker.l2.connector import StoreConnector
from kvtier_services.worker.l2.shelf import HotSetShelf

LOG = EventLog("kvtier_services.worker")
_LOOK_S: Final = 0.02
_ANSWER_S: Final = 10.0
"""The engine's thread answers between two steps."""
_LIST_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class HandOver:
    """Between a worker's lives: where its hot set goes, and comes from."""

    connector: StoreConnector
    shelf_of: Callable[[BlockStoreClient], HotSetShelf]
    """Makes a shelf of a client of the store."""


@dataclass(frozen=True, slots=True)
class LeavingParts:
    """What ends."""

    config: WorkerConfig
    engine: WorkerEngine
    core: EngineCore
    publisher: Publisher | None
    hand_over: HandOver | None


class Leaving:
    """Ends a worker once, whoever asks for it and however often. Belongs to the event loop."""

    def __init__(self, parts: LeavingParts) -> None:
        self._parts = parts
        self._task: asyncio.Task[None] | None = None
        self.left_blocks = 0
        """Blocks in the list that was left for the successor."""

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    async def leave(self) -> None:
        """Go through all steps; then the process may end. Later calls wait for the first."""
        if self._task is None:
            self._task = asyncio.create_task(self._leave())
        await asyncio.shield(self._task)

    # ---- parts

    async def _leave(self) -> None:
        parts, config = self._parts, self._parts.config
        LOG.info("draining", requests=parts.engine.live_count)
        writing_s = config.hot_set.write_ms_max / 1000
        spent_s = await self._write(writing_s)
        if parts.publisher is not None:
            await asyncio.to_thread(parts.publisher.close)
            await asyncio.sleep(config.drain_delay_ms / 1000)
        until = time.monotonic() + config.drain_ms_max / 1000
        await parts.engine.drain(config.drain_ms_max / 1000)
        spent_s += await self._write(max(0.0, writing_s - spent_s))
        await self._until_written(max(0.0, until - time.monotonic()))
        if writing_s:
            await self._leave_list()

    async def _write(self, seconds_max: float) -> float:
        """Have what is hot written for so long at most; how long it took."""
        began_s = time.monotonic()
        bytes_max = self._parts.config.hot_set.write_bytes_max
        if seconds_max <= 0 or self._parts.hand_over is None:
            return 0.0
        try:
            async with asyncio.timeout(seconds_max):
                await self._parts.engine.ask(lambda core: core.offer_hot_set(bytes_max))
                await self._until_written(seconds_max)
        except (TimeoutError, KvtierError) as error:
            LOG.warning("hot set not written", reason=type(error).__name__)
        return time.monotonic() - began_s

    async def _until_written(self, seconds_max: float) -> None:
        """Wait until the store has what waits for it, so that whoever comes next can load it."""
        until = time.monotonic() + seconds_max
        await asyncio.to_thread(_written, self._parts.core, until)

    async def _leave_list(self) -> None:
        hand_over = self._parts.hand_over
        if hand_over is None:
            return
        shelf_of = hand_over.shelf_of
        try:
            async with asyncio.timeout(_ANSWER_S):
                hot = await self._parts.engine.ask(lambda core: core.hot_set())
                is_left = bool(hot) and await hand_over.connector.call(
                    lambda client: shelf_of(client).leave(hot, _LIST_S)
                )
        except (TimeoutError, KvtierError) as error:
            LOG.warning("no hot set left", reason=type(error).__name__)
            return
        self.left_blocks = len(hot) if is_left else 0
        LOG.info("hot set left", blocks=self.left_blocks)


async def take_over(parts: LeavingParts) -> None:
    """Bring into L1 what a predecessor left, before the engine runs; bounded, and never fails.

    The events of it are told to the index with the first that is heard of this worker.
    """
    section, hand_over = parts.config.hot_set, parts.hand_over
    if hand_over is None or not section.prefetch_ms_max:
        return
    until = time.monotonic() + section.prefetch_ms_max / 1000
    shelf_of = hand_over.shelf_of
    try:
        async with asyncio.timeout(section.prefetch_ms_max / 1000):
            found = await hand_over.connector.call(
                lambda client: shelf_of(client).find(until - time.monotonic())
            )
    except (TimeoutError, KvtierError) as error:
        LOG.warning("no hot set found", reason=type(error).__name__)
        return
    if found is None:
        return
    owner, hot = found
    began_s = time.monotonic()
    parts.core.prefetch(hot, section.prefetch_share_max, until)
    await asyncio.to_thread(_prefetched, parts.core, until)
    counts = parts.core.prefetched
    seconds = round(time.monotonic() - began_s, 3)
    LOG.info(
        "hot set prefetched", left_by=owner, listed=counts.listed, absent=counts.absent,
        loaded=counts.loaded, seconds=seconds,
    )  # fmt: skip


def _written(core: EngineCore, until: float) -> None:
    while core.is_writing and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _prefetched(core: EngineCore, until: float) -> None:
    """Drive a core whose engine does not run yet. What is late then comes while it serves."""
    while core.is_prefetching and time.monotonic() < until + _LOOK_S:
        core.step()
        time.sleep(_LOOK_S / 10)

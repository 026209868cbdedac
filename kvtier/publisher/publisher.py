"""`Publisher`: what a worker, store or bridge embeds to tell every index what it holds.

    engine threads ── store/remove/clear ──▶ Outbox ──▶ publishing thread ──▶ stream per replica

What must not live here: the state (`Publication`), the queue (`outbox`), one connection (`stream`).
"""

import asyncio
import concurrent.futures
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from kvtier.core.event_columns import NO_PARENT, EventKind, Hashes, as_hashes
from kvtier.core.event_messages import U64_MAX, FenceReason
from kvtier.core.fleet import HolderInfo
from kvtier.core.publication import Publication
from kvtier.core.workers import Load
from kvtier.errors import CallerError, UnavailableError
from kvtier.limits import REPLICAS_COUNT_MAX
from kvtier.publisher import requests
from kvtier.publisher.config import PublisherConfig
from kvtier.publisher.outbox import Outbox
from kvtier.publisher.stats import PublisherStats
from kvtier.publisher.stream import LOG, PublishStream
from kvtier.sections import DialConfig
from kvtier.security import Dialer
from kvtier.types import HOLDER_TIERS, Epoch, Seq, Tier, Trust
from kvtier.wire.loop_thread import LoopThread, end, spawn

_NOTHING = np.empty(0, np.uint64)
_START_S = 10.0
_GOODBYE_S = 0.5
"""How long a replica may take to end its stream after a goodbye."""


class PublisherListener(Protocol):
    """Who is told of what needs a decision. Called on the publishing thread: return at once."""

    def fenced(self, reason: FenceReason) -> None:
        """The epoch is dead and nothing is published any more.

        Another process speaks for this holder now. Ending this one is the usual answer; an owner
        that knows that it is the rightful one calls `Publisher.restart`.
        """

    def refused(self, target: str, reason: str) -> None:
        """A replica does not take this publisher as it describes itself, or not at all."""


class Publisher:
    """Publishes one shard of one holder to every target of `dial`, each independently.

    `store`, `remove`, `clear` and `set_load` may be called from any thread, before `start` too,
    and return within microseconds; changes of one thread are published in its order. An array
    given to them is kept: do not write to it afterwards. Lists of ints are converted first, at
    some 50 ns a block.
    """

    def __init__(
        self,
        info: HolderInfo,
        dial: DialConfig,
        config: PublisherConfig | None = None,
        listener: PublisherListener | None = None,
    ) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        if len(dial.targets) > REPLICAS_COUNT_MAX:
            raise CallerError(f"targets: {len(dial.targets)} exceed {REPLICAS_COUNT_MAX}")
        self.info = info
        self.load: Load | None = None
        self._config = config or PublisherConfig()
        self._listener = listener
        self._dialers = {target: Dialer(dial, target) for target in dial.targets}
        self._thread = LoopThread(f"publisher {info.instance}")
        publication = Publication(_new_epoch(), requests.batch, self._config.publication)
        self._outbox = Outbox(
            publication, self._config.queue_blocks_max, time.monotonic, self._changed
        )
        self._streams: list[PublishStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._due: asyncio.Event | None = None
        self._progress: asyncio.Event | None = None
        self._fence_told: Epoch | None = None
        self._is_closed = False

    # ---- the engine

    def store(self, tier: Tier, parent: int, hashes: Hashes) -> None:
        """Blocks of one chain appeared in a tier, the first under `parent` (0: none or unknown).

        CallerError for a parent or hashes that are not u64.
        """
        if not 0 <= parent <= U64_MAX:
            raise CallerError(f"parent: want 0 .. 2**64 - 1, got {parent}")
        packed = as_hashes(hashes)
        if len(packed):
            self._outbox.put(EventKind.STORE, _tier(tier), packed, parent)

    def remove(self, tier: Tier, hashes: Hashes) -> None:
        """Blocks left a tier, one copy each. CallerError for hashes that are not u64."""
        packed = as_hashes(hashes)
        if len(packed):
            self._outbox.put(EventKind.REMOVE, _tier(tier), packed)

    def clear(self, tier: Tier | None = None) -> None:
        """A tier was emptied; without one, all of them."""
        if tier is None:
            self._outbox.put(EventKind.CLEAR_ALL, Tier.GPU, _NOTHING, NO_PARENT)
        else:
            self._outbox.put(EventKind.CLEAR_TIER, _tier(tier), _NOTHING, NO_PARENT)

    def set_load(self, load: Load) -> None:
        """What the worker is doing; replaces what was said before. The last one counts."""
        self.load = load

    def set_trust(self, trust: Trust) -> None:
        """Whether the engine knows all that it holds; EXACT until this says otherwise.

        DEGRADED shows at every index at once; EXACT once it has been told all changes before this.
        """
        self._outbox.put_trust(trust)

    # ---- the owner

    @property
    def epoch(self) -> Epoch:
        return self._outbox.epoch

    def start(self) -> Self:
        """Start the publishing thread and connect. Idempotent; CallerError after `close`."""
        if self._is_closed:
            raise CallerError("a closed publisher cannot be started again")
        if not self._thread.is_running:
            self._thread.start()
            self._thread.submit(self._open()).result(_START_S)
        return self

    def flush(self, deadline_s: float) -> bool:
        """Wait until every replica has acknowledged all changes put before; False if some have not.

        Blocks the calling thread for at most `deadline_s`. UnavailableError unless started.
        """
        waiting = self._thread.submit(self._flushed(deadline_s, lambda _: True))
        return waiting.result(deadline_s + _START_S)

    def restart(self) -> Epoch:
        """Come back with a new epoch, after a fence or of one's own accord; returns the epoch.

        Every replica drops what it knew of the old one and gets a snapshot.
        """
        return self._thread.submit(self._restart()).result(_START_S)

    def close(self) -> None:
        """Flush to the replicas that are connected, say goodbye, end the thread. Idempotent.

        Takes at most `close_s` and a little; the holder is forgotten by every index that heard it.
        """
        self._is_closed = True
        if self._thread.is_running:
            try:
                self._thread.submit(self._leave()).result(self._config.close_s + _START_S)
            except (UnavailableError, concurrent.futures.TimeoutError) as error:
                LOG.warning("publisher closed without goodbye", reason=str(error))
            self._thread.stop()

    def stats(self) -> PublisherStats:
        """Counters and where everything stands; cheap enough for every scrape."""
        outbox = self._outbox
        seq, copies_count, totals = outbox.totals()
        return PublisherStats(
            epoch=outbox.epoch,
            seq=seq,
            is_fenced=outbox.fenced is not None,
            copies_count=copies_count,
            queued_blocks=outbox.queued_blocks,
            queue_overflows=outbox.queue_overflows,
            engine_waits=outbox.engine_waits,
            changes=outbox.changes,
            batches_sealed=totals.batches_sealed,
            events_coalesced=totals.events_coalesced,
            resends=totals.resends,
            snapshots_begun=totals.snapshots_begun,
            ring_overflows=totals.overflows,
            streams=tuple(stream.stats() for stream in self._streams),
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- called by the streams, on the publishing thread

    def progressed(self) -> None:
        if self._progress is not None:
            self._progress.set()
        reason, epoch = self._outbox.fenced, self._outbox.epoch
        if reason is None or self._fence_told == epoch:
            return
        self._fence_told = epoch
        LOG.error("publisher is fenced", instance=self.info.instance, reason=reason.value)
        for task in self._tasks:
            if task is not asyncio.current_task():  # that one is about to end by itself
                task.cancel()
        if self._listener is not None:
            self._listener.fenced(reason)

    def refused(self, target: str, reason: str) -> None:
        if self._listener is not None:
            self._listener.refused(target, reason)

    # ---- parts, on the publishing thread

    def _changed(self) -> None:
        """The queue stopped being empty (on an engine thread)."""
        if self._due is not None:
            self._thread.soon(self._due.set)

    async def _open(self) -> None:
        self._due, self._progress = asyncio.Event(), asyncio.Event()
        self._due.set()
        self._open_streams()
        self._sealing = spawn(self._seal_when_due(self._due), LOG)

    def _open_streams(self) -> None:
        self._streams = [
            PublishStream(dialer, target, self._outbox, self, self._config, time.monotonic)
            for target, dialer in self._dialers.items()
        ]
        self._tasks = [spawn(stream.run(), LOG) for stream in self._streams]

    async def _seal_when_due(self, due: asyncio.Event) -> None:
        while True:
            await due.wait()
            if self._outbox.queued_blocks < self._config.publication.batch_blocks_max:
                await asyncio.sleep(self._config.coalesce_s)
            due.clear()
            await self._seal()
            if not self._outbox.is_empty:
                due.set()

    async def _seal(self) -> Seq:
        """Make batches of all that was put before, in steps; returns the last one's number."""
        until = self._outbox.changes
        while not self._outbox.move(until):
            self._wake_streams()
            await asyncio.sleep(0)
        seq = self._outbox.seal()
        self._wake_streams()
        return seq

    def _wake_streams(self) -> None:
        for stream in self._streams:
            stream.wake()

    async def _flushed(self, deadline_s: float, counts: Callable[[PublishStream], bool]) -> bool:
        """Seal now and wait until all streams that count have acknowledged it."""
        assert self._progress is not None
        sealed = await self._seal()
        try:
            async with asyncio.timeout(deadline_s):
                while not all(
                    stream.has_acked(sealed) for stream in self._streams if counts(stream)
                ):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return False
        return True

    async def _leave(self) -> None:
        await self._flushed(self._config.close_s, lambda stream: stream.is_open)
        for stream in self._streams:
            stream.say_goodbye("closed")
        tasks = [task for task, stream in zip(self._tasks, self._streams, strict=True)
                 if stream.is_open and not task.done()]  # fmt: skip
        if tasks:
            await asyncio.wait(tasks, timeout=_GOODBYE_S)
        await end([*self._tasks, self._sealing])

    async def _restart(self) -> Epoch:
        await end(self._tasks)
        epoch = _new_epoch()
        self._outbox.succeed(epoch)
        self._open_streams()
        return epoch


def _tier(tier: int) -> Tier:
    if tier not in HOLDER_TIERS:
        raise CallerError(f"tier: nobody holds blocks in {tier!r}")
    return Tier(tier)


def _new_epoch() -> Epoch:
    return Epoch(secrets.randbelow(U64_MAX) + 1)

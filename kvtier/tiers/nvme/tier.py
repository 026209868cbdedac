"""The NVMe tier: `kvtier.ports.LocalTier` over a directory.

What it holds is known in memory, so `contains`, `pin`, `names` and `coldest` never wait for the
disk; reads and writes wait for it until their deadline. Two breakers, one a direction, answer at
once while the disk fails or hangs. Kill the process at any time: the next start finds everything
that was acknowledged `save_s` before, and reads it verified.
What must not live here: how it is done (`reading`, `writing`, `saving`), when to write (the
planner's), several processes on one directory.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.core.eviction import PinToken
from kvtier.core.frame import FrameName
from kvtier.core.health import Breaker, BreakerState, Outcome
from kvtier.errors import DeadlineError, FrameError, OverloadedError, UnavailableError
from kvtier.ports import (
    BlockOwner,
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    RemovalCause,
    Selection,
    TierObserver,
    TierStats,
    require_batch,
)
from kvtier.tiers.nvme import reading
from kvtier.tiers.nvme.archive import Condition, DiskCounters
from kvtier.tiers.nvme.layout import (
    NvmeConfig,
    Place,
    batched,
    pack_name,
    unpack_name,
    unpack_place,
)
from kvtier.tiers.nvme.opening import Opened, open_directory
from kvtier.tiers.nvme.reading import ReaderLane, ReadFailure
from kvtier.tiers.nvme.saving import Saver
from kvtier.tiers.nvme.segments import Found, ShortBufferError, Task
from kvtier.tiers.nvme.writing import Item, Writer
from kvtier.tiers.tally import failed_get, is_selected, payload_view, require_open
from kvtier.types import Tier

CLOSE_S = 5.0
"""How long `close` waits for threads that are in the disk."""
READ_FAILURES_MAX = 3
"""Blocks of one segment that the disk may refuse to read before all of it is given up."""
_STEP_BLOCKS = 2048


@dataclass(frozen=True, slots=True)
class NvmeHealth:
    """What `TierStats` has no place for."""

    condition: Condition
    segments_count: int
    segment_bytes: int
    unsaved_bytes: int
    reads_open: bool
    """Whether the breaker of reads is open: reads are answered with ERROR at once."""
    writes_open: bool
    disk: DiskCounters


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """One block of the tier: what a store takes into its books when it starts."""

    name: FrameName
    payload_bytes: int
    owner: BlockOwner


@dataclass(frozen=True, slots=True)
class Location:
    """Where a frame lies, for inspection and for tests that damage it."""

    path: Path
    offset: int
    frame_bytes: int


class NvmeTier:
    """See the module. Made by `open`; of one event loop."""

    def __init__(self, config: NvmeConfig, opened: Opened, clock: Clock) -> None:
        """For `open`."""
        self._config = config
        self._home = opened.home
        self._archive = opened.archive
        self._clock = clock
        self._reads = Breaker()
        self._writes = Breaker()
        self._readers = ReaderLane(config.readers_count)
        self._saver = Saver(opened.archive, opened.home, opened.catalog, clock)
        self._writer = Writer(config, opened.archive, opened.home, self._saver, clock)
        self._saver.start(config.save_s)
        self._is_open = True

    @classmethod
    async def open(
        cls,
        config: NvmeConfig,
        observer: TierObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> "NvmeTier":
        """Own the directory and load what is in it; the observer is told only of what comes later.

        Raises UnavailableError where another process owns it, ConfigError for sizes that cannot be,
        BackendError where the disk refuses.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(open_directory, config, observer))
        try:
            return cls(config, await asyncio.shield(opening), clock)
        except asyncio.CancelledError:
            opening.add_done_callback(_give_back)
            raise

    @property
    def tier(self) -> Tier:
        return Tier.NVME

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`."""
        require_batch(names, deadline_s)
        require_open(self._is_open)
        self._require_time(deadline_s)
        return [pack_name(name) in self._archive.ledger for name in names]

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. Copies a cached payload once, another one twice."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        if self._clock() >= deadline_s:
            results = [GetResult(GetStatus.TIMEOUT)] * len(requests)
        else:
            results = await self._get(requests, deadline_s)
        self._archive.tally.count_gets(results)
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`. Copies each payload once, into memory that is written."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        items = [
            Item(position, request, payload_view(request.payload), pack_name(request.name))
            for position, request in enumerate(requests)
        ]
        results = await self._put(items, deadline_s)
        self._archive.tally.count_puts(requests, results)
        return results

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`.

        What is dropped by namespace, scope or writer is gone for good when this returns; what is
        dropped by name may be back if the process is killed within `save_s`.
        """
        require_batch((), deadline_s)
        require_open(self._is_open)
        self._require_time(deadline_s)
        archive = self._archive
        if isinstance(selection, ByNames):
            keys = dict.fromkeys(map(pack_name, selection.names))
            count = archive.remove(keys, RemovalCause.DROPPED)
        else:
            count = await self._drop_matching(selection, deadline_s)
        if count:
            self._saver.changed()
            self._writer.sweep()
        if not isinstance(selection, ByNames):
            await self._saver.settle(deadline_s)
        return count

    async def settle(self, deadline_s: float) -> None:
        """Return once a kill would lose nothing of what was put and dropped so far.

        Raises DeadlineError, or BackendError where the disk does not take it now.
        """
        require_open(self._is_open)
        await self._saver.settle(deadline_s)

    def stats(self) -> TierStats:
        """See `BlockTier.stats`."""
        return self._archive.stats()

    def health(self) -> NvmeHealth:
        """See `NvmeHealth`. Does no I/O."""
        now = self._clock()
        archive = self._archive
        return NvmeHealth(
            condition=archive.condition,
            segments_count=len(archive.segments),
            segment_bytes=archive.segment_bytes,
            unsaved_bytes=archive.unsaved_bytes,
            reads_open=self._reads.state(now) is BreakerState.OPEN,
            writes_open=self._writes.state(now) is BreakerState.OPEN,
            disk=replace(archive.disk),
        )

    async def close(self) -> None:
        """Save the index and unlock the directory.

        Where a thread is stuck in the disk it stays locked: that thread may still write.
        """
        if not self._is_open:
            return
        self._is_open = False
        closed = [
            await self._readers.close(CLOSE_S),
            await self._writer.close(CLOSE_S),
            await self._saver.close(CLOSE_S),
        ]
        if all(closed):
            for segment in self._archive.segments.values():
                segment.seal()
                segment.retire()
            self._home.close()

    def names(self) -> list[FrameName]:
        """See `LocalTier.names`."""
        return [unpack_name(key) for key in self._archive.ledger.snapshot()]

    def checksum_of(self, name: FrameName) -> int | None:
        """The checksum of a block's payload, as the index says; None if it is not there."""
        place = self._archive.ledger.place(pack_name(name))
        return None if place is None else place.payload_checksum

    def inventory(self) -> list[HeldBlock]:
        """Every block with what its name does not say, oldest first. O(blocks), no I/O."""
        held = []
        for key, packed in self._archive.ledger.packed().items():
            place = unpack_place(packed)
            owner = BlockOwner(place.writer_id, place.scope)
            held.append(HeldBlock(unpack_name(key), place.payload_bytes, owner))
        return held

    def coldest(self, count: int) -> list[FrameName]:
        """See `LocalTier.coldest`. Segments go as a whole: what is put next may take some more."""
        return [unpack_name(key) for key in self._archive.ledger.coldest(count)]

    def pin(self, name: FrameName) -> PinToken | None:
        """See `LocalTier.pin`."""
        return self._archive.pin(name)

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """See `LocalTier.unpin`."""
        self._archive.unpin(name, token)

    def locate(self, name: FrameName) -> Location | None:
        """Where the frame of a block is; None if it is not there."""
        place = self._archive.ledger.place(pack_name(name))
        if place is None:
            return None
        segment = self._archive.segments[place.segment_id]
        return Location(segment.path, place.offset, place.frame_bytes)

    async def _get(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        archive = self._archive
        keys = [pack_name(request.name) for request in requests]
        places = [archive.ledger.place(key) for key in keys]
        tasks = [
            Task(archive.segments[place.segment_id], place, request)
            for request, place in zip(requests, places, strict=True)
            if place is not None
        ]
        if not tasks:
            return [GetResult(GetStatus.MISS)] * len(requests)
        outcomes = iter(await self._read(tasks, deadline_s))
        results = [
            GetResult(GetStatus.MISS)
            if place is None
            else self._concluded(key, place, next(outcomes))
            for key, place in zip(keys, places, strict=True)
        ]
        archive.ledger.touch([k for k, r in zip(keys, results, strict=True) if r.is_hit])
        return results

    async def _read(
        self, tasks: Sequence[Task], deadline_s: float
    ) -> list[reading.Outcome | GetResult | None]:
        """Outcomes under the breaker; a GetResult where nothing was tried."""
        begun_s = self._clock()
        permit = self._reads.acquire(begun_s)
        if permit is None:
            return [_failed("breaker_open")] * len(tasks)
        verdict = Outcome.CANCELLED
        try:
            outcomes = await self._readers.read(tasks, deadline_s - begun_s)
            verdict = self._verdict(
                begun_s,
                is_late=any(outcome is None for outcome in outcomes),
                is_failed=any(isinstance(outcome, ReadFailure) for outcome in outcomes),
            )
        except (OverloadedError, UnavailableError):
            return [_failed("overloaded")] * len(tasks)
        finally:
            now = self._clock()
            self._reads.report(permit, verdict, now - begun_s, now)
        return list(outcomes)

    def _concluded(
        self, key: bytes, place: Place, outcome: reading.Outcome | GetResult | None
    ) -> GetResult:
        """The result of a read, after what it says of the copy was done."""
        match outcome:
            case GetResult():
                return outcome
            case None:
                return GetResult(GetStatus.TIMEOUT)
            case Found():
                return GetResult(GetStatus.HIT, outcome.payload, outcome.header, place.scope)
            case ShortBufferError():
                return _failed("buffer_short")
            case FrameError():
                if self._remove(key, place, RemovalCause.CORRUPT):
                    self._archive.tally.corrupt[outcome.fault] += 1
                return failed_get(outcome)
            case ReadFailure():
                self._archive.disk.read_failures += 1
                self._remove(key, place, RemovalCause.LOST)
                self._suspect(place)
                return _failed("io")

    def _remove(self, key: bytes, place: Place, cause: RemovalCause) -> bool:
        """Remove a copy that was found bad, unless it is another one by now."""
        if self._archive.ledger.place(key) != place:
            return False
        self._archive.remove([key], cause)
        self._saver.changed()
        return True

    def _suspect(self, place: Place) -> None:
        segment = self._archive.segments.get(place.segment_id)
        if segment is None:
            return
        segment.failures_count += 1
        if segment.failures_count == READ_FAILURES_MAX:
            self._writer.quarantine(segment)

    async def _put(self, items: Sequence[Item], deadline_s: float) -> list[PutResult]:
        begun_s = self._clock()
        if begun_s >= deadline_s:
            return [PutResult(PutStatus.TIMEOUT)] * len(items)
        permit = self._writes.acquire(begun_s)
        if permit is None:
            return [PutResult(PutStatus.ERROR, "breaker_open")] * len(items)
        verdict = Outcome.CANCELLED
        try:
            results = await self._writer.put(items, deadline_s)
            verdict = self._verdict(
                begun_s,
                is_late=any(result is None for result in results),
                is_failed=any(r is not None and r.status is PutStatus.ERROR for r in results),
            )
        finally:
            now = self._clock()
            self._writes.report(permit, verdict, now - begun_s, now)
        return [result or PutResult(PutStatus.TIMEOUT) for result in results]

    def _verdict(self, begun_s: float, *, is_late: bool, is_failed: bool) -> Outcome:
        """A short deadline that is missed says nothing of the disk."""
        if is_failed or (is_late and self._clock() - begun_s >= self._config.stall_s):
            return Outcome.FAILURE
        return Outcome.CANCELLED if is_late else Outcome.SUCCESS

    async def _drop_matching(
        self, selection: ByNamespace | ByScope | ByWriter, deadline_s: float
    ) -> int:
        """Walk all names, in steps between which other calls are served."""
        ledger = self._archive.ledger
        count = 0
        for step in batched(ledger.snapshot(), _STEP_BLOCKS):
            matching = [key for key in step if _is_selected(selection, key, ledger.place(key))]
            count += self._archive.remove(matching, RemovalCause.DROPPED)
            self._saver.changed()
            await asyncio.sleep(0)
            self._require_time(deadline_s)
        return count

    def _require_time(self, deadline_s: float) -> None:
        if self._clock() >= deadline_s:
            raise DeadlineError("the deadline had passed before the call")


def _give_back(opening: asyncio.Future[Opened]) -> None:
    """Unlock a directory that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _is_selected(
    selection: ByNamespace | ByScope | ByWriter, key: bytes, place: Place | None
) -> bool:
    return place is not None and is_selected(
        selection, unpack_name(key), place.writer_id, place.scope
    )


def _failed(reason: str) -> GetResult:
    return GetResult(GetStatus.ERROR, reason=reason)

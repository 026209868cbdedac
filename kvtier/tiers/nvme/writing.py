"""How a batch is written: in runs, one at a time, after room was made for each.

Room is made segment by segment: the oldest goes, and what is kept of it is moved into the segment
that begins. A file is deleted before the next one is made, and one segment's worth of the cap stays
free for moves, so that the cap holds at every moment.
What must not live here: what to write, deadlines of disks (lanes), the index (saving).
"""

import asyncio
import contextlib
import errno
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import BackendError, DeadlineError, OverloadedError, UnavailableError
from kvtier.ports import (
    Clock,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
)
from kvtier.tiers.nvme.archive import Archive, Condition
from kvtier.tiers.nvme.home import Home
from kvtier.tiers.nvme.lanes import Call, Lane
from kvtier.tiers.nvme.layout import (
    PAGE_BYTES,
    NvmeConfig,
    Place,
    aligned_frame,
    aligned_pages,
    batched,
    pack_name,
    unpack_name,
)
from kvtier.tiers.nvme.ledger import Keeping
from kvtier.tiers.nvme.saving import Saver
from kvtier.tiers.nvme.segments import (
    RUN_BYTES,
    Move,
    Payload,
    Segment,
    Stage,
    Written,
    segment_path,
)

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_THREADS: Final = 2
"""One copies and hashes while the other's run is written."""
_SETTLE_S: Final = 5.0
_ATTEMPTS_MAX: Final = 4
"""Times that a run is put together anew because what it was to be compared with had gone."""
_STEP_BLOCKS: Final = 2048


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a put: its position in the batch, its payload as bytes, its packed name."""

    position: int
    request: PutRequest
    view: memoryview
    key: bytes

    @property
    def run_bytes(self) -> int:
        return aligned_frame(self.view.nbytes)


@dataclass(frozen=True, slots=True)
class _Run:
    """Items with different names that are written together; `known` are only compared."""

    items: tuple[Item, ...]
    known: frozenset[bytes]

    @property
    def new_items(self) -> list[Item]:
        return [item for item in self.items if item.key not in self.known]

    @property
    def new_bytes(self) -> int:
        """Whole pages that its new frames take."""
        return aligned_pages(sum(item.run_bytes for item in self.new_items))


@dataclass(frozen=True, slots=True)
class _Flight:
    """A run on its way; `segment` None where nothing of it is new."""

    run: _Run
    segment: Segment | None
    call: Call
    future: "asyncio.Future[list[Written]]"


class FullError(Exception):
    """No room, and nothing that may go."""


class Writer:
    """The only one that appends. Puts take turns; a put has as many runs in flight as threads."""

    def __init__(
        self, config: NvmeConfig, archive: Archive, home: Home, saver: Saver, clock: Clock
    ) -> None:
        self._config = config
        self._archive = archive
        self._home = home
        self._saver = saver
        self._clock = clock
        self._lane = Lane("kvtier-nvme-write", _THREADS)
        self._stages = [Stage() for _ in range(_THREADS)]
        self._turn = asyncio.Lock()
        self._roll: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        saver.free_space = self._free_space

    async def put(self, items: Sequence[Item], deadline_s: float) -> list[PutResult | None]:
        """Write what is new, compare the rest; in order. None: not done in time."""
        results: list[PutResult | None] = [None] * len(items)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                await self._turn.acquire()
        except TimeoutError:
            return results
        try:
            await self._put_in_turn(deque(items), results, deadline_s)
        except DeadlineError:
            pass
        except (OverloadedError, UnavailableError):
            return [result or PutResult(PutStatus.ERROR, "overloaded") for result in results]
        finally:
            self._turn.release()
        return results

    def sweep(self) -> None:
        """Delete segments that have no blocks any more, in the background."""
        archive = self._archive
        if self._roll is not None:
            return
        for segment_id, segment in archive.segments.items():
            if segment is not archive.active and not archive.ledger.live_count(segment_id):
                self._in_background(self._evict(segment_id, RemovalCause.LOST))

    def quarantine(self, segment: Segment) -> None:
        """Give up a segment that the disk does not read, with all its blocks."""
        archive = self._archive
        archive.disk.segments_quarantined += 1
        _LOG.warning("nvme tier: segment %d cannot be read: given up", segment.segment_id)
        if archive.active is segment:
            archive.active = None
            segment.seal()
        self._in_background(self._evict(segment.segment_id, RemovalCause.LOST))

    async def close(self, timeout_s: float) -> bool:
        """See `Lane.close`."""
        if self._roll is not None:
            await asyncio.wait({self._roll}, timeout=timeout_s)
            self._roll.cancel()
            await asyncio.gather(self._roll, return_exceptions=True)
        return await self._lane.close(timeout_s)

    # Runs

    async def _put_in_turn(
        self, queue: deque[Item], results: list[PutResult | None], deadline_s: float
    ) -> None:
        flights: deque[_Flight] = deque()
        try:
            for _ in range(_ATTEMPTS_MAX * len(queue)):
                if not queue and not flights:
                    return
                run = self._next_run(queue, results, flights)
                if run is not None and await self._launch(run, queue, results, flights, deadline_s):
                    continue
                if flights:
                    await self._land(flights.popleft(), queue, results, deadline_s)
        finally:
            self._archive.reserved_count = 0
            for flight in flights:
                await flight.call.abandon()
        _answer(queue, results, PutResult(PutStatus.ERROR, "contended"))

    def _next_run(
        self, queue: deque[Item], results: list[PutResult | None], flights: Sequence[_Flight]
    ) -> _Run | None:
        """Take items off the queue: of different names, none of them in flight, and no more new
        ones than a run and the active segment take. None: something must land first, or nothing is
        left."""
        if len(flights) == _THREADS:
            return None
        taken = {item.key for flight in flights for item in flight.run.items}
        segment_bytes = self._archive.geometry.segment_bytes
        items: list[Item] = []
        known: set[bytes] = set()
        size = first_bytes = 0
        while queue and queue[0].key not in taken:
            item = queue[0]
            if item.key in self._archive.ledger:
                known.add(item.key)
            elif aligned_pages(item.run_bytes) > segment_bytes:
                _answer([queue.popleft()], results, PutResult(PutStatus.REFUSED, Refusal.TOO_LONG))
                continue
            elif size and size + item.run_bytes > self._run_bytes_max(first_bytes):
                break
            else:
                first_bytes = first_bytes or item.run_bytes
                size += item.run_bytes
            taken.add(item.key)
            items.append(queue.popleft())
        return _Run(tuple(items), frozenset(known)) if items else None

    def _run_bytes_max(self, first_bytes: int) -> int:
        """What is left of the active segment, if at least the first frame fits into it."""
        active = self._archive.active
        left = 0 if active is None else active.size - active.tail
        if aligned_pages(first_bytes) > left:
            left = self._archive.geometry.segment_bytes
        return min(RUN_BYTES, left)

    async def _launch(
        self,
        run: _Run,
        queue: deque[Item],
        results: list[PutResult | None],
        flights: deque[_Flight],
        deadline_s: float,
    ) -> bool:
        """Send a run to a thread, or answer its items; False: back in the queue, land first."""
        archive = self._archive
        if self._clock() >= deadline_s:
            raise DeadlineError("the deadline passed between runs")
        if archive.unsaved_bytes >= self._config.unsaved_bytes_max:
            with contextlib.suppress(BackendError):
                await self._saver.settle(deadline_s)
        if archive.condition is not Condition.WRITABLE:
            _answer(run.items, results, PutResult(PutStatus.REFUSED, Refusal.READ_ONLY))
            return True
        segment = archive.active
        if run.new_bytes and not self._has_room(run.new_bytes):
            if flights:
                queue.extendleft(reversed(run.items))
                return False
            try:
                segment = await self._room(run.new_bytes, deadline_s)
            except FullError:
                _answer(run.new_items, results, PutResult(PutStatus.REFUSED, Refusal.FULL))
                queue.extendleft(reversed([i for i in run.items if i.key in run.known]))
                return True
            except OSError as error:
                _answer(run.items, results, self._write_failed(error))
                return True
        if any(key not in archive.ledger for key in run.known):  # it went to make the room
            queue.extendleft(reversed(run.items))
            return True
        flights.append(self._sent(run, segment if run.new_bytes else None))
        return True

    def _sent(self, run: _Run, segment: Segment | None) -> _Flight:
        offset = 0
        if segment is not None:
            offset = segment.tail
            segment.tail += run.new_bytes
        payloads = [_payload_of(item, item.key in run.known) for item in run.items]
        call = Call()
        future = self._on_stage(lambda stage: stage.write_run(segment, offset, payloads, call))
        self._archive.reserved_count += len(run.new_items)
        return _Flight(run, segment, call, future)

    async def _land(
        self,
        flight: _Flight,
        queue: deque[Item],
        results: list[PutResult | None],
        deadline_s: float,
    ) -> None:
        future, run = flight.future, flight.run
        try:
            await asyncio.wait({future}, timeout=max(0.0, deadline_s - self._clock()))
        finally:
            await flight.call.abandon()
        if not future.done():
            raise DeadlineError("the disk did not take a run by the deadline")
        self._archive.reserved_count -= len(run.new_items)
        try:
            written = future.result()
        except OSError as error:
            _answer(run.items, results, self._write_failed(error, flight.segment))
            return
        self._archive.disk.run_bytes_written += run.new_bytes
        self._publish(run, flight.segment, written, queue, results)

    def _on_stage(self, work: Callable[[Stage], T]) -> asyncio.Future[T]:
        """Run on a thread, with a stage that no other thread has."""

        def job() -> T:
            stage = self._stages.pop()
            try:
                return work(stage)
            finally:
                self._stages.append(stage)

        return self._lane.submit(job)

    def _publish(
        self,
        run: _Run,
        segment: Segment | None,
        written: Sequence[Written],
        queue: deque[Item],
        results: list[PutResult | None],
    ) -> None:
        archive = self._archive
        placed: list[tuple[FrameName, Place]] = []
        again: list[Item] = []
        for item, one in zip(run.items, written, strict=True):
            request = item.request
            there = archive.ledger.place(item.key)
            if request.payload_checksum not in {None, one.payload_checksum}:
                results[item.position] = PutResult(PutStatus.CORRUPT)
            elif there is not None:
                first = (there.payload_bytes, there.payload_checksum)
                same = first == (item.view.nbytes, one.payload_checksum)
                status = PutStatus.DUPLICATE if same else PutStatus.DIVERGENT
                results[item.position] = PutResult(status)
            elif (
                segment is None
                or segment.segment_id not in archive.segments
                or (not one.is_written)
            ):
                again.append(item)
            else:
                results[item.position] = PutResult(PutStatus.STORED)
                placed.append((request.name, _place_of(item, segment, one)))
        archive.publish(placed)
        queue.extendleft(reversed(again))
        self._saver.changed()
        if 2 * archive.unsaved_bytes > self._config.unsaved_bytes_max:
            self._saver.hurry()

    def _write_failed(self, error: OSError, segment: Segment | None = None) -> PutResult:
        """What a put is told of a failed write; the segment takes no more."""
        archive = self._archive
        if error.errno in _NO_SPACE:
            self._saver.stop_writes(archive.geometry.segment_bytes)
            return PutResult(PutStatus.REFUSED, Refusal.READ_ONLY)
        archive.disk.write_failures += 1
        _LOG.warning("nvme tier: a write failed: %s", error.strerror)
        if segment is not None and archive.active is segment:
            archive.active = None
            archive.disk.segments_quarantined += 1
            segment.seal()
            if not archive.ledger.live_count(segment.segment_id):
                self._in_background(self._evict(segment.segment_id, RemovalCause.LOST))
        return PutResult(PutStatus.ERROR, "io")

    # Room

    async def _room(self, size: int, deadline_s: float) -> Segment:
        """The segment that takes so many bytes now. Raises FullError, OSError, DeadlineError."""
        while True:
            active = self._archive.active
            if active is not None and self._has_room(size):
                return active
            if self._roll is None:
                self._roll = asyncio.create_task(self._roll_over(size))
            roll = self._roll
            await asyncio.wait({roll}, timeout=max(0.0, deadline_s - self._clock()))
            if not roll.done():
                raise DeadlineError("no room was made by the deadline")
            self._roll = None
            roll.result()

    def _has_room(self, size: int) -> bool:
        active = self._archive.active
        return self._roll is None and active is not None and active.tail + size <= active.size

    async def _roll_over(self, size: int) -> None:
        """Make a new segment the active one, with room for `size` bytes beside what is moved."""
        archive = self._archive
        previous = archive.active
        segment_bytes = archive.geometry.segment_bytes
        moving: Keeping | None = None
        while archive.segment_bytes + 2 * segment_bytes > self._budget_bytes():
            keeping = self._choose(size, previous)
            if keeping.kept and archive.segment_bytes + segment_bytes <= self._budget_bytes():
                moving = keeping
                break
            if keeping.kept:  # no spare: nothing can be moved
                keeping = self._choose(segment_bytes, previous)
            await self._evict(keeping.segment_id, RemovalCause.EVICTED)
        segment = await self._create(previous)
        archive.adopt(segment)
        archive.active = segment
        if moving is not None:
            await self._move(moving, segment, segment.size - size)
        if previous is not None:
            previous.seal()

    def _budget_bytes(self) -> int:
        geometry = self._archive.geometry
        index_bytes = self._archive.overhead_bytes + _pending_bytes(len(self._archive.changes))
        return geometry.segments_max(index_bytes) * geometry.segment_bytes

    def _choose(self, size: int, active: Segment | None) -> Keeping:
        """Raises FullError where too much is pinned."""
        segment_bytes = self._archive.geometry.segment_bytes
        padding = PAGE_BYTES * (4 + 4 * segment_bytes // RUN_BYTES)
        movable = max(0, segment_bytes - size - padding)
        keeping = self._archive.ledger.choose(
            None if active is None else active.segment_id,
            min(movable, segment_bytes // 2),
            min(movable, int(segment_bytes * self._config.kept_share)),
        )
        if keeping is None:
            raise FullError
        return keeping

    async def _create(self, previous: Segment | None) -> Segment:
        """A new file; where the disk has no space for one, the oldest segment gives its own."""
        archive = self._archive
        segment_id = archive.draw_segment_id()
        path = segment_path(self._home.segments, segment_id)
        segment = Segment(segment_id, path, archive.geometry.segment_bytes)
        try:
            await self._lane.submit(segment.create)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            try:
                keeping = self._choose(archive.geometry.segment_bytes, previous)
            except FullError:
                raise error from None
            await self._evict(keeping.segment_id, RemovalCause.EVICTED)
            await self._lane.submit(segment.create)
        return segment

    async def _move(self, keeping: Keeping, target: Segment, end: int) -> None:
        """Copy what is kept, have the index know it, and delete the segment."""
        archive = self._archive
        source = archive.segments.get(keeping.segment_id)
        if source is None:  # given up meanwhile
            return
        source.hold()
        try:
            for group in self._groups(keeping, source):
                size = aligned_pages(sum(aligned_frame(m.place.payload_bytes) for m in group))
                if target.tail + size <= end:
                    await self._move_group(group, target, size)
        except OSError as error:
            archive.disk.write_failures += 1
            _LOG.warning("nvme tier: kept blocks are lost: %s", error.strerror)
        finally:
            source.let_go()
        with contextlib.suppress(BackendError, DeadlineError):
            await self._saver.settle(self._clock() + _SETTLE_S)
        await self._evict(source.segment_id, RemovalCause.EVICTED)

    def _groups(self, keeping: Keeping, source: Segment) -> Iterator[list[Move]]:
        group: list[Move] = []
        size = 0
        for key in keeping.kept:
            place = self._archive.ledger.place(key)
            if place is None or place.segment_id != source.segment_id:
                continue
            if group and size + aligned_frame(place.payload_bytes) > RUN_BYTES:
                yield group
                group, size = [], 0
            group.append(Move(unpack_name(key), source, place))
            size += aligned_frame(place.payload_bytes)
        if group:
            yield group

    async def _move_group(self, group: list[Move], target: Segment, size: int) -> None:
        archive = self._archive
        offset = target.tail
        target.tail += size
        offsets = await self._on_stage(lambda stage: stage.move_run(group, target, offset))
        moved: list[tuple[bytes, Place]] = []
        for move, at in zip(group, offsets, strict=True):
            key = pack_name(move.name)
            if archive.ledger.place(key) != move.place:
                continue  # dropped meanwhile
            if at is None:
                archive.remove([key], RemovalCause.CORRUPT)
            else:
                place = replace(move.place, segment_id=target.segment_id, offset=at)
                moved.append((key, place))
        archive.move(moved)
        archive.disk.run_bytes_written += size
        archive.disk.bytes_moved += sum(place.frame_bytes for _, place in moved)

    async def _free_space(self) -> None:
        """The disk is full: give the oldest segment back."""
        archive = self._archive
        try:
            keeping = self._choose(archive.geometry.segment_bytes, archive.active)
        except FullError:
            return
        await self._evict(keeping.segment_id, RemovalCause.EVICTED)

    async def _evict(self, segment_id: int, cause: RemovalCause) -> None:
        """Remove a segment's blocks, in steps between which other calls are served, and its file.

        Readers that hold the file read on.
        """
        archive = self._archive
        if segment_id not in archive.segments:
            return
        for keys in batched(archive.ledger.blocks(segment_id), _STEP_BLOCKS):
            archive.remove([key for key in keys if self._lies_in(key, segment_id)], cause)
            await asyncio.sleep(0)
        if segment_id not in archive.segments:
            return
        segment = archive.retire(segment_id, cause)
        self._saver.changed()
        segment.retire()
        try:
            await self._lane.submit(segment.path.unlink)
        except FileNotFoundError:
            pass
        except OSError as error:  # it stays, and counts
            _LOG.warning("nvme tier: a segment cannot be deleted: %s", error.strerror)
            return
        archive.forget(segment)

    def _lies_in(self, key: bytes, segment_id: int) -> bool:
        place = self._archive.ledger.place(key)
        return place is not None and place.segment_id == segment_id

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _answer(items: Iterable[Item], results: list[PutResult | None], result: PutResult) -> None:
    for item in items:
        results[item.position] = result


def _payload_of(item: Item, is_known: bool) -> Payload:
    request = item.request
    header = FrameHeader(request.name, request.owner.writer_id, item.view.nbytes, 0)
    return Payload(header, item.view, request.payload_checksum, is_known)


def _place_of(item: Item, segment: Segment, written: Written) -> Place:
    owner = item.request.owner
    return Place(
        segment.segment_id,
        written.offset,
        item.view.nbytes,
        written.payload_checksum,
        owner.writer_id,
        owner.scope,
    )


def _pending_bytes(changes_count: int) -> int:
    """What changes will take in the index, generously."""
    return 256 * changes_count

"""The DRAM tier: verified blocks in shared memory, written here, read by every process of the node.

Implements `kvtier.ports.LocalTier` for the store itself, and `reserve` / `commit` for writers that
fill slots in place (a promotion that reads from disk into the slot). Clients of other processes
come through kvtier.tiers.arena.server and read without any call (kvtier.tiers.arena.client).

Larger copies run on threads of the tier's own with the GIL released; a cancelled call waits for its
copy to end (milliseconds), because until then the buffers are in use.
What must not live here: sockets, sessions, the layout of the directory.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from kvtier.core.block_copy import copy_checksum_pairs
from kvtier.core.checks import require_integer
from kvtier.core.checksum import checksum
from kvtier.core.eviction import LruPolicy, PinToken, Policy
from kvtier.core.frame import HEADER_BYTES, FrameHeader, FrameName
from kvtier.errors import CallerError, DeadlineError
from kvtier.ports import (
    ByNames,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
    Selection,
    TierObserver,
    TierStats,
    require_batch,
)
from kvtier.tiers.arena.answers import Asked, agree, fault_of, length_of, target_of
from kvtier.tiers.arena.directory import (
    ANY_LENGTH,
    NATIVE,
    ArenaOperations,
    DirectoryLayout,
    Read,
    ReadStatus,
    close_directory,
    format_directory,
    frame_header_of,
    packed_name,
    packed_names,
    reads,
)
from kvtier.tiers.arena.holdings import (
    STORED,
    Answer,
    Held,
    Holdings,
    Place,
    Prepared,
    Reservation,
    Trial,
    Wanted,
    require_open_reservations,
)
from kvtier.tiers.arena.memory import Sealing, SharedMemory, create
from kvtier.tiers.arena.slabs import ALIGNMENT_BYTES, SlabAllocator
from kvtier.tiers.residents import Residents
from kvtier.tiers.tally import Holding, failed_get, is_selected, payload_view, require_open
from kvtier.types import Tier

_ARENA_BYTES_MAX = 1 << 46
_BLOCKS_COUNT_MAX = 1 << 24
_INLINE_BYTES = 8 << 20
"""Copies up to this size run on the event loop: handing them to a thread costs as much."""
_THREADS = 2
_TRIED_BLOCKS = 4
"""Read back by a trial before it fails: some may be on their way out."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArenaConfig:
    """Sizes of an arena. A slab holds the slots of one block size; no block is longer than it.

    `bytes_max` is all of the slots' memory, preallocated; the directory takes about 220 bytes a
    block of `blocks_max` more.
    """

    bytes_max: int
    slab_bytes: int = 64 << 20
    blocks_max: int = 1 << 16

    def __post_init__(self) -> None:
        require_integer("slab_bytes", self.slab_bytes, ALIGNMENT_BYTES, _ARENA_BYTES_MAX)
        require_integer("bytes_max", self.bytes_max, self.slab_bytes, _ARENA_BYTES_MAX)
        require_integer("blocks_max", self.blocks_max, 1, _BLOCKS_COUNT_MAX)
        if self.slab_bytes % ALIGNMENT_BYTES or self.bytes_max % self.slab_bytes:
            raise CallerError(
                f"slab_bytes {self.slab_bytes} must be a multiple of {ALIGNMENT_BYTES}, and "
                f"bytes_max {self.bytes_max} a multiple of slab_bytes"
            )


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """What an arena is made of, besides its sizes; the twin `PURE` is for tests."""

    policy: Policy[FrameName] | None = None
    observer: TierObserver | None = None
    clock: Clock = time.monotonic
    operations: ArenaOperations = NATIVE


class ArenaTier:
    """`LocalTier` over shared memory. Must be made and used on one event loop's thread."""

    def __init__(self, config: ArenaConfig, shape: ArenaShape | None = None) -> None:
        """Preallocates all memory: BackendError where there is not that much."""
        shape = ArenaShape() if shape is None else shape
        epoch = int.from_bytes(os.urandom(8), "little") | 1
        self._config = config
        self._clock = shape.clock
        self._operations = shape.operations
        self.layout = DirectoryLayout(epoch, config.blocks_max, config.bytes_max)
        self.slots_memory = create("kvtier-slots", config.bytes_max, Sealing.OWNER_WRITES)
        self.directory_memory = self._new_directory()
        policy: Policy[FrameName] = LruPolicy() if shape.policy is None else shape.policy
        self._residents = Residents(Tier.DRAM, policy, shape.observer, shape.clock)
        slabs = SlabAllocator(config.slab_bytes, config.bytes_max // config.slab_bytes)
        self._holdings = Holdings(
            self.directory_memory.view, self.layout, slabs, self._residents, shape.operations
        )
        self._threads = ThreadPoolExecutor(_THREADS, "kvtier-arena")
        self._echo: asyncio.Future[None] | None = None
        self._is_open = True

    @property
    def tier(self) -> Tier:
        return Tier.DRAM

    @property
    def is_open(self) -> bool:
        return self._is_open

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`."""
        require_batch(names, deadline_s)
        self._require_time(deadline_s)
        return [name in self._holdings.held for name in names]

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. One native call copies and verifies the batch."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        if self._clock() >= deadline_s:
            results = [GetResult(GetStatus.TIMEOUT)] * len(requests)
        else:
            results = await self._read(requests)
        self._holdings.tally.count_gets(results)
        self.touch([r.name for r, result in zip(requests, results, strict=True) if result.is_hit])
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`. One native call copies and hashes the batch."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        payloads = [payload_view(request.payload) for request in requests]
        wanted = [
            Wanted(request.name, payload.nbytes, request.owner, request.retention)
            for request, payload in zip(requests, payloads, strict=True)
        ]
        declared = [request.payload_checksum for request in requests]
        return await self.write_many(wanted, payloads, declared, deadline_s)

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`."""
        require_batch(selection.names if isinstance(selection, ByNames) else (), deadline_s)
        self._require_time(deadline_s)
        held = self._holdings.held
        if isinstance(selection, ByNames):
            names = [name for name in dict.fromkeys(selection.names) if name in held]
        else:
            names = [
                name
                for name, one in held.items()
                if is_selected(selection, name, one.writer_id, one.scope)
            ]
        self._holdings.remove(names, RemovalCause.DROPPED)
        return len(names)

    def stats(self) -> TierStats:
        """See `BlockTier.stats`."""
        holdings = self._holdings
        return holdings.tally.stats(
            Holding(
                len(holdings.held),
                holdings.used_bytes,
                self._config.bytes_max,
                self._residents.pinned_count,
                holdings.reserved_count,
            )
        )

    async def close(self) -> None:
        """Make every reader miss, here and in other processes, and give the memory back.

        Processes that have it mapped keep it until they let go.
        """
        if self._is_open:
            self._is_open = False
            close_directory(self.directory_memory.view)
            self._holdings.held.clear()
            self._threads.shutdown(wait=False)
            self.directory_memory.close()
            self.slots_memory.close()

    def names(self) -> list[FrameName]:
        """See `LocalTier.names`."""
        return list(self._holdings.held)

    def coldest(self, count: int) -> list[FrameName]:
        """See `LocalTier.coldest`."""
        return self._residents.coldest(count)

    def pin(self, name: FrameName) -> PinToken | None:
        """See `LocalTier.pin`."""
        return self._residents.pin(name) if name in self._holdings.held else None

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """See `LocalTier.unpin`."""
        self._residents.unpin(name, token)

    def touch(self, names: Sequence[FrameName]) -> None:
        """Count one use of a chain, of reads that made no call; unknown names are ignored."""
        self._residents.touch(names)

    def touch_entries(self, located: Iterable[tuple[int, int]]) -> None:
        """As `touch`, by (entry, generation); what was replaced meanwhile is ignored."""
        self.touch([name for name in map(self._name_at, located) if name is not None])

    def recheck(self, entry: int, generation: int) -> None:
        """Look at a block that a reader found corrupt, and drop it if it is: nobody is believed."""
        name = self._name_at((entry, generation))
        if name is not None and self._is_open:
            held = self._holdings.held[name]
            request = GetRequest(name)
            target = memoryview(bytearray(held.payload_bytes))
            records = self._operations.read(
                self.directory_memory.view,
                self.slots_memory.view,
                packed_name(name),
                (ANY_LENGTH,),
                (target,),
            )
            asked = Asked(request, held, target)
            self._answer(asked, reads(records)[0], frame_header_of(records, 0))

    async def try_out(self) -> Trial:
        """See whether it takes blocks and gives them back; nobody sees it, nothing is evicted.

        A block of its own, written and read; where all is taken, one that is there, read. Ends only
        when the threads that copy are at work too: give it a deadline. Never NO_ROOM.
        """
        require_open(self._is_open)
        if self._echo is None or self._echo.done():
            loop = asyncio.get_running_loop()
            self._echo = loop.run_in_executor(self._threads, _nothing)
        await asyncio.shield(self._echo)
        if not self._is_open:
            return Trial.FAILED
        trial = self._holdings.try_out(self.slots_memory.view)
        if trial is Trial.NO_ROOM:
            return Trial.PASSED if await self._reads_one_back() else Trial.FAILED
        return trial

    async def _reads_one_back(self) -> bool:
        directory, slots = self.directory_memory.view, self.slots_memory.view
        for name, held in list(itertools.islice(self._holdings.held.items(), _TRIED_BLOCKS)):
            target = memoryview(bytearray(held.payload_bytes))
            read = partial(
                self._operations.read, directory, slots, packed_name(name), (ANY_LENGTH,), (target,)
            )
            records = await self._run(held.payload_bytes, read)
            if reads(records)[0].status is ReadStatus.HIT:
                return True
        return False

    def held(self, name: FrameName) -> Held | None:
        """Where a block is and what its frame says; None if it is not there."""
        return self._holdings.held.get(name)

    @property
    def quarantined_count(self) -> int:
        """Slots whose writers were given up and may still write."""
        return self._holdings.quarantined_count

    def reserve_many(self, wanted: Sequence[Wanted]) -> list[Reservation | Refusal]:
        """Take slots for blocks that will be written in place; evicts to make room.

        Each must end with `commit`, or with `abort` once nobody writes into it; a writer that
        cannot be stopped is given up with `quarantine` until it is proven gone.
        """
        require_open(self._is_open)
        return self._holdings.reserve_many(wanted)

    def writable(self, reservation: Reservation) -> memoryview:
        """The memory of a reserved slot, for the payload."""
        start = reservation.slot.offset
        return self.slots_memory.view[start : start + reservation.wanted.payload_bytes]

    async def commit(
        self, reservations: Sequence[Reservation], checksums: Sequence[int]
    ) -> list[PutResult]:
        """Verify what was written into the slots against the payload checksums, and publish.

        What does not match is CORRUPT and its slot free again. Nobody may write to them any more.
        CallerError for one that is not open: one in quarantine ends with `abort`.
        """
        require_open(self._is_open)
        require_open_reservations(reservations)
        views = [self.writable(reservation) for reservation in reservations]
        try:
            seen = await self._run(
                sum(view.nbytes for view in views), lambda: [checksum(view) for view in views]
            )
        except asyncio.CancelledError:
            self._holdings.abort(reservations)
            raise
        return self._publish(reservations, seen, checksums)

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Free slots that nobody writes any more, quarantined ones too. Idempotent."""
        self._holdings.abort(reservations)

    def quarantine(self, reservation: Reservation) -> None:
        """Give up a reservation whose writer may still write."""
        self._holdings.quarantine(reservation)

    async def write_many(
        self,
        wanted: Sequence[Wanted],
        payloads: Sequence[memoryview],
        declared: Sequence[int | None],
        deadline_s: float,
    ) -> list[PutResult]:
        """`put_many` for blocks whose payloads are flat views of as many bytes as wanted."""
        require_open(self._is_open)
        if self._clock() >= deadline_s:
            results = [PutResult(PutStatus.TIMEOUT)] * len(wanted)
        else:
            results = await self._write(wanted, payloads, declared)
        self._count_puts(wanted, results)
        if any(result.status is not PutStatus.STORED for result in results):
            self.touch([one.name for one in wanted])  # in order again, as one chain
        return results

    async def write_reserved(
        self,
        reservations: Sequence[Reservation],
        payloads: Sequence[memoryview],
        checksums: Sequence[int | None],
    ) -> list[PutResult]:
        """Copy payloads of the reserved lengths into their slots, verify, publish."""
        require_open_reservations(reservations)
        copied = await self._copy(reservations, payloads)
        wanted = [reservation.wanted for reservation in reservations]
        return self.settle(wanted, reservations, copied, checksums)

    def begin(self, wanted: Sequence[Wanted]) -> list[Place]:
        """Take slots for blocks that will be copied into them one after another, then `settle`d."""
        require_open(self._is_open)
        return self._holdings.begin(wanted)

    def settle(
        self,
        wanted: Sequence[Wanted],
        places: Sequence[Place],
        seen: Sequence[int],
        declared: Sequence[int | None],
    ) -> list[PutResult]:
        """Publish what was copied into slots, one chain; CORRUPT if another checksum was declared.

        `seen`: of what stands in a slot, or of what came where a block was there already.
        CallerError for a reservation that is not open.
        """
        taken = [i for i, place in enumerate(places) if isinstance(place, Reservation)]
        published = iter(
            self._publish(
                [place for place in places if isinstance(place, Reservation)],
                [seen[i] for i in taken],
                [declared[i] for i in taken],
            )
        )
        results = []
        for i, place in enumerate(places):
            if isinstance(place, Reservation):
                results.append(next(published))
            elif isinstance(place, Held):
                wrong = declared[i] not in {None, seen[i]}
                compared = place.compared(wanted[i].payload_bytes, seen[i])
                results.append(PutResult(PutStatus.CORRUPT) if wrong else compared)
            elif place is None:
                results.append(PutResult(PutStatus.ERROR, "expired"))
            else:
                results.append(PutResult(PutStatus.REFUSED, place))
        self._count_puts(wanted, results)
        if any(result.status is not PutStatus.STORED for result in results):
            self.touch([one.name for one in wanted])  # in order again, as one chain
        return results

    def prepare(self, wanted: Sequence[Wanted]) -> Prepared | None:
        """Take slots for all of these blocks, none of which is there; None if that cannot be.

        For payloads that are copied by `fill`, and published together by `publish_filled`.
        """
        require_open(self._is_open)
        return self._holdings.prepare(wanted)

    async def fill(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[int]:
        """Copy payloads into the slots among these places; the checksums of what is there, or of
        the payload where there is no slot.

        Cancelled, it has aborted these reservations.
        """
        require_open(self._is_open)
        pairs = list(zip(places, payloads, strict=True))
        slots = [(one, payload) for one, payload in pairs if isinstance(one, Reservation)]
        copied = iter(await self._copy([one for one, _ in slots], [view for _, view in slots]))
        return [
            next(copied) if isinstance(one, Reservation) else checksum(payload)
            for one, payload in pairs
        ]

    def publish_filled(
        self,
        prepared: Prepared,
        seen: Sequence[int],
        declared: Sequence[int | None],
        answer: Answer,
    ) -> None:
        """Publish slots with what was seen in them; CORRUPT where another checksum was declared.

        `answer` gets the results as soon as readers can find the blocks: see
        `Holdings.publish_prepared`. CallerError for a reservation that is not open.
        """
        if self._is_open and (seen == declared or agree(seen, declared)):
            results = self._holdings.publish_prepared(prepared, seen, answer)
        else:
            results = self._publish(prepared.reservations, seen, declared)
            answer(results)
        self._count_puts([one.wanted for one in prepared.reservations], results)

    def frame_memory(self, name: FrameName) -> tuple[memoryview, memoryview] | None:
        """The very memory of a block's header and payload, to damage it in a test."""
        held = self._holdings.held.get(name)
        if held is None:
            return None
        at = self.layout.frame_at(held.entry)
        start = held.slot.offset
        return (
            self.directory_memory.view[at : at + HEADER_BYTES],
            self.slots_memory.view[start : start + held.payload_bytes],
        )

    def _name_at(self, located: tuple[int, int]) -> FrameName | None:
        entry, generation = located
        name = self._holdings.by_entry.get(entry)
        held = None if name is None else self._holdings.held.get(name)
        return name if held is not None and held.generation == generation else None

    def _new_directory(self) -> SharedMemory:
        memory = create("kvtier-directory", self.layout.directory_bytes, Sealing.OWNER_WRITES)
        format_directory(memory.view, self.layout)
        return memory

    async def _run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Run a copy here if it is small, else on a thread; cancelled, it still runs to its end."""
        if size_bytes <= _INLINE_BYTES:
            return work()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise

    async def _read(self, requests: Sequence[GetRequest]) -> list[GetResult]:
        held = self._holdings.held
        asked = [request for request in requests if request.name in held]
        targets = [target_of(request, held[request.name]) for request in asked]
        before = [held[request.name] for request in asked]
        names = packed_names([request.name for request in asked])
        lengths = np.array([length_of(request) for request in asked], np.uint64)
        directory, slots = self.directory_memory.view, self.slots_memory.view
        records = await self._run(
            sum(target.nbytes for target in targets),
            lambda: self._operations.read(directory, slots, names, lengths, targets),
        )
        answers = []
        for i, read in enumerate(reads(records)):
            frame = frame_header_of(records, i)
            answers.append(self._answer(Asked(asked[i], before[i], targets[i]), read, frame))
        given = iter(answers)
        kept = {id(request) for request in asked}
        return [
            next(given) if id(request) in kept else GetResult(GetStatus.MISS)
            for request in requests
        ]

    def _answer(self, asked: Asked, read: Read, frame: bytes) -> GetResult:
        name, held = asked.request.name, asked.held
        match read.status:
            case ReadStatus.HIT:
                header = FrameHeader(
                    name, read.writer_id, read.payload_bytes, read.payload_checksum
                )
                payload = asked.target[: read.payload_bytes]
                return GetResult(GetStatus.HIT, payload, header, held.scope)
            case ReadStatus.BUFFER_SHORT:
                return GetResult(GetStatus.ERROR, reason="buffer_short")
            case ReadStatus.MISS if not self._is_lost(name, held):
                return GetResult(GetStatus.MISS)
        fault = fault_of(asked.request, read, frame)
        if self._is_open and self._holdings.held.get(name) is held:
            self._holdings.tally.corrupt[fault.fault] += 1
            self._holdings.remove([name], RemovalCause.CORRUPT)
        return failed_get(fault)

    def _is_lost(self, name: FrameName, held: Held) -> bool:
        """Whether a held block cannot be found though nothing changed: its entry was damaged."""
        if not self._is_open or self._holdings.held.get(name) is not held:
            return False
        again = self._operations.find(self.directory_memory.view, packed_name(name))
        return again[:8] == b"\xff" * 8

    async def _write(
        self,
        wanted: Sequence[Wanted],
        payloads: Sequence[memoryview],
        declared: Sequence[int | None],
    ) -> list[PutResult]:
        held = self._holdings.held
        if held.keys().isdisjoint([one.name for one in wanted]):
            return await self._write_fresh(wanted, payloads, declared)
        known = [(held[one.name], i) for i, one in enumerate(wanted) if one.name in held]
        fresh = [i for i, one in enumerate(wanted) if one.name not in held]
        written = await self._write_fresh(
            [wanted[i] for i in fresh], [payloads[i] for i in fresh], [declared[i] for i in fresh]
        )
        results = dict(zip(fresh, written, strict=True))
        offered = await self._run(
            sum(payloads[i].nbytes for _, i in known),
            lambda: [checksum(payloads[i]) for _, i in known],
        )
        for (first, i), seen in zip(known, offered, strict=True):
            wrong = declared[i] not in {None, seen}
            compared = first.compared(payloads[i].nbytes, seen)
            results[i] = PutResult(PutStatus.CORRUPT) if wrong else compared
        return [results[i] for i in range(len(wanted))]

    async def _write_fresh(
        self,
        wanted: Sequence[Wanted],
        payloads: Sequence[memoryview],
        declared: Sequence[int | None],
    ) -> list[PutResult]:
        """Reserve, copy and publish blocks of which none was there when this began."""
        answers = self._holdings.reserve_many(wanted)
        reservations = [one for one in answers if isinstance(one, Reservation)]
        if len(reservations) == len(answers):
            copied = await self._copy(reservations, payloads)
            return self._publish(reservations, copied, declared)
        taken = [i for i, one in enumerate(answers) if isinstance(one, Reservation)]
        copied = await self._copy(reservations, [payloads[i] for i in taken])
        published = iter(self._publish(reservations, copied, [declared[i] for i in taken]))
        return [
            PutResult(PutStatus.REFUSED, one) if isinstance(one, Refusal) else next(published)
            for one in answers
        ]

    def _count_puts(self, wanted: Sequence[Wanted], results: Sequence[PutResult]) -> None:
        tally = self._holdings.tally
        if all(result is STORED for result in results):  # nearly always
            tally.puts[PutStatus.STORED] += len(results)
            tally.payload_bytes_written += sum([one.payload_bytes for one in wanted])
            return
        tally.puts.update([result.status for result in results])
        tally.payload_bytes_written += sum(
            [
                one.payload_bytes
                for one, result in zip(wanted, results, strict=True)
                if result.status is PutStatus.STORED
            ]
        )

    async def _copy(
        self, reservations: Sequence[Reservation], payloads: Sequence[memoryview]
    ) -> list[int]:
        """Copy each payload into its slot; the checksums of what was stored."""
        slots = self.slots_memory.view
        sizes = [reservation.wanted.payload_bytes for reservation in reservations]
        starts = [reservation.slot.offset for reservation in reservations]
        views = [slots[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        try:
            copied = await self._run(sum(sizes), lambda: copy_checksum_pairs(views, payloads))
        except (asyncio.CancelledError, CallerError):
            self._holdings.abort(reservations)
            raise
        checksums: list[int] = copied.tolist()
        return checksums

    def _publish(
        self,
        reservations: Sequence[Reservation],
        seen: Sequence[int],
        declared: Sequence[int | None],
    ) -> list[PutResult]:
        if not self._is_open:
            return [PutResult(PutStatus.ERROR, "closed")] * len(reservations)
        if agree(seen, declared):
            return self._holdings.publish(reservations, seen)
        intact = [want is None or want == got for want, got in zip(declared, seen, strict=True)]
        self._holdings.abort(r for r, good in zip(reservations, intact, strict=True) if not good)
        published = iter(
            self._holdings.publish(
                [r for r, good in zip(reservations, intact, strict=True) if good],
                [got for got, good in zip(seen, intact, strict=True) if good],
            )
        )
        return [next(published) if good else PutResult(PutStatus.CORRUPT) for good in intact]

    def _require_time(self, deadline_s: float) -> None:
        require_open(self._is_open)
        if self._clock() >= deadline_s:
            raise DeadlineError("the deadline had passed before the call")


def _nothing() -> None:
    """What a thread does to show that it is there."""

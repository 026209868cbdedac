"""What an arena holds: slots, directory entries, names and their order, kept consistent.

The state of the one process that writes the arena, without I/O. A block's way: reserved (slot and
entry taken, nobody sees them), filled by its writer, published or aborted; a reservation whose
writer may still write is quarantined, and no time frees it. What must not live here: copying
payloads, event loops, sockets, clients.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.checks import DIGEST_BYTES
from kvtier.core.checksum import checksum as checksum_of
from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.slots import SlotAllocator
from kvtier.errors import CallerError
from kvtier.ports import BlockOwner, PutResult, PutStatus, Refusal, RemovalCause
from kvtier.tiers.arena.directory import (
    ArenaOperations,
    Buffer,
    DirectoryLayout,
    ReadStatus,
    packed_block,
    packed_names,
    reads,
)
from kvtier.tiers.arena.slabs import (
    ALIGNMENT_BYTES,
    Lengths,
    SlabAllocator,
    Slot,
    is_close,
    slot_bytes,
)
from kvtier.tiers.minting import minted
from kvtier.tiers.residents import Residents
from kvtier.tiers.tally import Tally
from kvtier.types import Fingerprint, ScopeId

_NOBODYS = Fingerprint(bytes(32))
"""The namespace of blocks that only a trial ever has."""
_LOOKAHEAD_BLOCKS = 16
"""How far down the order of eviction room of the right class is looked for."""

STORED = PutResult(PutStatus.STORED)
"""The one result of all blocks that are stored."""
_DUPLICATE = PutResult(PutStatus.DUPLICATE)
_DIVERGENT = PutResult(PutStatus.DIVERGENT)


class ReservationState(Enum):
    """Where a reservation is on its way."""

    OPEN = "open"
    QUARANTINED = "quarantined"
    """Given up, but its writer may still write: keeps its slot."""
    CLOSED = "closed"
    """Published, aborted or released."""


class Trial(Enum):
    """What came of trying the arena out."""

    PASSED = "passed"
    NO_ROOM = "no_room"
    """Every slot or entry is taken: that says nothing of what is there."""
    FAILED = "failed"


@dataclass(slots=True)
class Wanted:
    """A block that is going to be written. Never changed (not frozen for the reason of `Slot`)."""

    name: FrameName
    payload_bytes: int
    owner: BlockOwner
    retention: Retention = field(default_factory=Retention)


@dataclass(slots=True, eq=False)
class Reservation:
    """A slot and an entry for one block that is being written."""

    wanted: Wanted
    slot: Slot
    entry: int
    state: ReservationState = ReservationState.OPEN


@dataclass(slots=True, eq=False)
class Prepared:
    """Reservations of distinct blocks that were not held, and what publishing them takes."""

    reservations: list[Reservation]
    names: list[FrameName]
    packed: bytes
    """The names."""
    blocks: npt.NDArray[np.uint64]
    """One column each, as `packed_block`; the checksums are still to come."""
    published: int
    """How often anything had been published before."""


@dataclass(slots=True, eq=False)
class Held:
    """One published block. Never changed (not frozen for the reason of `Slot`)."""

    entry: int
    generation: int
    slot: Slot
    writer_id: int
    scope: ScopeId
    payload_bytes: int
    payload_checksum: int

    def compared(self, payload_bytes: int, payload_checksum: int) -> PutResult:
        """The outcome of putting these bytes where this block is."""
        mine = (self.payload_bytes, self.payload_checksum)
        return _DUPLICATE if mine == (payload_bytes, payload_checksum) else _DIVERGENT


Place: TypeAlias = Reservation | Held | Refusal | None
"""Where a block that is put goes: into a slot; nowhere, since it is there or cannot be; None: it
lost its slot while its writer stood still."""


Answer: TypeAlias = Callable[[list[PutResult]], None]


def _unanswered(results: list[PutResult]) -> None:
    """For whoever gets the results as they are returned."""


class Holdings:
    """The directory's writer: every change of what readers can find goes through here."""

    def __init__(
        self,
        directory: Buffer,
        layout: DirectoryLayout,
        slabs: SlabAllocator,
        residents: Residents,
        operations: ArenaOperations,
    ) -> None:
        self.held: dict[FrameName, Held] = {}
        self.by_entry: dict[int, FrameName] = {}
        self.tally = Tally()
        self._directory = directory
        self._operations = operations
        self._slabs = slabs
        self._residents = residents
        self._entries = SlotAllocator(layout.entries_count)
        self._by_slab: dict[int, dict[int, None]] = {}
        """Entries of the blocks in each slab."""
        self._reserved = 0
        self._published = 0

    @property
    def used_bytes(self) -> int:
        """Memory that is given to blocks, reservations and the rounding between them."""
        return self._slabs.given_bytes

    @property
    def reserved_count(self) -> int:
        """Reservations that are open or in quarantine."""
        return self._reserved

    @property
    def quarantined_count(self) -> int:
        return self._slabs.quarantined_count

    def reserve_many(self, wanted: Sequence[Wanted]) -> list[Reservation | Refusal]:
        """Take a slot and an entry each, evicting what is cold and not pinned, or say why not."""
        sizes = _slots_bytes(wanted)
        taken: list[Reservation | Refusal] = []
        for size, group in itertools.groupby(range(len(wanted)), key=sizes.__getitem__):
            positions = list(group)
            if size > self._slabs.slab_bytes:
                taken += [Refusal.TOO_LONG] * len(positions)
                continue
            entries = self._take_entries(len(positions))
            slots = self._take_slots(size, len(entries))
            self._entries.free(entries[len(slots) :])
            self._reserved += len(slots)
            served = [wanted[i] for i in positions[: len(slots)]]
            del entries[len(slots) :]
            open_ = ReservationState.OPEN
            taken += minted(Reservation, (served, slots, entries, open_), len(slots))
            taken += [Refusal.FULL] * (len(positions) - len(slots))
        return taken

    def prepare(self, wanted: Sequence[Wanted]) -> Prepared | None:
        """Take a slot and an entry for each of these blocks; None if one cannot have them, or is
        there already. While payloads are copied a writer waits for nothing else."""
        names = [one.name for one in wanted]
        if not self.held.keys().isdisjoint(names) or len(set(names)) < len(names):
            return None
        answers = self.reserve_many(wanted)
        reservations = [one for one in answers if isinstance(one, Reservation)]
        if len(reservations) < len(answers):
            self.abort(reservations)
            return None
        columns = np.array(
            [
                [one.entry for one in reservations],
                [one.slot.offset for one in reservations],
                [one.owner.writer_id for one in wanted],
                [one.payload_bytes for one in wanted],
                [0] * len(names),
            ],
            np.uint64,
        )
        return Prepared(reservations, names, packed_names(names), columns, self._published)

    def begin(self, wanted: Sequence[Wanted]) -> list[Place]:
        """A slot for each block that is not there; the block that is; or why there is no slot."""
        before = [self.held.get(one.name) for one in wanted]
        fresh = [one for one, first in zip(wanted, before, strict=True) if first is None]
        reserved = iter(self.reserve_many(fresh))
        return [next(reserved) if first is None else first for first in before]

    def publish_prepared(
        self, prepared: Prepared, checksums: Sequence[int], answer: Answer
    ) -> list[PutResult]:
        """`publish`, with what was prepared if nothing has been published since.

        `answer` is called with the results as soon as readers can find the blocks; that all of this
        process knows of them follows. It must not raise, nor ask for anything here.
        """
        if prepared.published != self._published:
            results = self.publish(prepared.reservations, checksums)
            answer(results)
            return results
        require_open_reservations(prepared.reservations)
        prepared.blocks[-1] = checksums
        return self._publish_packed(
            prepared.reservations,
            prepared.names,
            (prepared.packed, prepared.blocks.T.tobytes()),
            checksums,
            answer,
        )

    def publish(
        self, reservations: Sequence[Reservation], checksums: Sequence[int]
    ) -> list[PutResult]:
        """Publish filled slots, one chain, each with the checksum of what is in it.

        Where a block of that name was published meanwhile the first is kept and the slot freed.
        CallerError for a reservation that is not open.
        """
        require_open_reservations(reservations)
        names = [reservation.wanted.name for reservation in reservations]
        if self.held.keys().isdisjoint(names) and len(set(names)) == len(names):
            return self._publish_fresh(reservations, checksums)
        results: list[PutResult | None] = []
        fresh: dict[FrameName, tuple[Reservation, int]] = {}
        for reservation, checksum in zip(reservations, checksums, strict=True):
            wanted = reservation.wanted
            size = wanted.payload_bytes
            first = self.held.get(wanted.name)
            if first is not None:
                results.append(first.compared(size, checksum))
                self.abort([reservation])
            elif wanted.name in fresh:
                other, seen = fresh[wanted.name]
                same = (other.wanted.payload_bytes, seen) == (size, checksum)
                results.append(_DUPLICATE if same else _DIVERGENT)
                self.abort([reservation])
            else:
                fresh[wanted.name] = (reservation, checksum)
                results.append(None)
        first_ones = list(fresh.values())
        published = iter(
            self._publish_fresh([one for one, _ in first_ones], [seen for _, seen in first_ones])
        )
        return [next(published) if result is None else result for result in results]

    def abort(self, reservations: Iterable[Reservation]) -> None:
        """Free the slots of reservations whose writers write no more. Closed ones are ignored."""
        for reservation in reservations:
            if reservation.state is ReservationState.CLOSED:
                continue
            if reservation.state is ReservationState.OPEN:
                self._slabs.free([reservation.slot])
            else:
                self._slabs.release_quarantine(reservation.slot)
            self._entries.free((reservation.entry,))
            self._close(reservation)

    def quarantine(self, reservation: Reservation) -> None:
        """Give up an open reservation whose writer may still write: only `abort` frees it."""
        if reservation.state is ReservationState.OPEN:
            self._slabs.quarantine(reservation.slot)
            reservation.state = ReservationState.QUARANTINED

    def remove(self, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """Make held blocks unfindable and free their slots; readers in the middle of one miss."""
        if names:
            self._slabs.free([held.slot for held in self._withdraw(names, cause)])

    def try_out(self, slots: Buffer) -> Trial:
        """Take a free slot and entry, publish fresh bytes there, read them back, take them away.

        In one go and on nobody's books: no count, policy or observer knows of it, and what it took
        is given back. Mutates nothing else. Microseconds.
        """
        entries: list[int] = self._entries.allocate_up_to(1).tolist()
        slot = self._slabs.allocate_any() if entries else None
        if slot is None:
            self._entries.free(entries)
            return Trial.NO_ROOM
        name = FrameName(KeyKind.PREFIX_KEY, os.urandom(DIGEST_BYTES), _NOBODYS)
        payload = os.urandom(ALIGNMENT_BYTES)
        slots[slot.offset : slot.offset + len(payload)] = payload
        place = packed_block(entries[0], slot.offset, 0, len(payload), checksum_of(payload))
        packed = packed_names([name])
        read_back = bytearray(len(payload))
        try:
            if not any(self._operations.publish(self._directory, packed, place)):
                return Trial.NO_ROOM  # the table has no place near enough
            lengths, targets = (len(payload),), (read_back,)
            records = self._operations.read(self._directory, slots, packed, lengths, targets)
            self._operations.remove(self._directory, entries, packed)
        finally:
            self._slabs.free([slot])
            self._entries.free(entries)
        is_right = reads(records)[0].status is ReadStatus.HIT and read_back == payload
        return Trial.PASSED if is_right else Trial.FAILED

    def _withdraw(self, names: Sequence[FrameName], cause: RemovalCause) -> list[Held]:
        """`remove`, but for the slots, which stay taken."""
        gone = list(map(self.held.pop, names))
        ids = [held.entry for held in gone]
        entries = np.array(ids, np.uint32)
        self._operations.remove(self._directory, entries, packed_names(names))
        for entry, held in zip(ids, gone, strict=True):
            neighbours = self._by_slab[held.slot.slab]
            del neighbours[entry]
            if not neighbours:
                del self._by_slab[held.slot.slab]
            del self.by_entry[entry]
        self._entries.free(entries)
        self.tally.removals[cause] += len(names)
        self._residents.remove(names, cause)
        return gone

    def _publish_fresh(
        self, fresh: Sequence[Reservation], checksums: Sequence[int]
    ) -> list[PutResult]:
        """Publish slots of distinct names that are not held."""
        if not fresh:
            return []
        wanted = [reservation.wanted for reservation in fresh]
        blocks = [
            packed_block(
                reservation.entry,
                reservation.slot.offset,
                one.owner.writer_id,
                one.payload_bytes,
                checksum,
            )
            for reservation, one, checksum in zip(fresh, wanted, checksums, strict=True)
        ]
        names = [one.name for one in wanted]
        packed = packed_names(names), b"".join(blocks)
        return self._publish_packed(fresh, names, packed, checksums)

    def _publish_packed(
        self,
        fresh: Sequence[Reservation],
        names: Sequence[FrameName],
        packed: tuple[bytes, bytes],
        checksums: Sequence[int],
        answer: Answer = _unanswered,
    ) -> list[PutResult]:
        """Publish with packed names and blocks, as `ArenaOperations.publish` takes them."""
        self._published += 1
        wanted = [reservation.wanted for reservation in fresh]
        published = self._operations.publish(self._directory, *packed)
        generations: list[int] = np.frombuffer(published, np.uint64).tolist()
        if all(generations):
            stored = [STORED] * len(fresh)
            answer(stored)
            self._keep(fresh, checksums, generations)
            self._residents.store(names, [one.retention for one in wanted])
            return stored
        placed = [i for i, generation in enumerate(generations) if generation]
        self._keep(
            [fresh[i] for i in placed],
            [checksums[i] for i in placed],
            [generations[i] for i in placed],
        )
        self._residents.store([names[i] for i in placed], [wanted[i].retention for i in placed])
        self.abort(
            [one for one, generation in zip(fresh, generations, strict=True) if not generation]
        )
        full = PutResult(PutStatus.ERROR, "directory_full")
        results = [STORED if generation else full for generation in generations]
        answer(results)
        return results

    def _keep(
        self, published: Sequence[Reservation], checksums: Sequence[int], generations: Sequence[int]
    ) -> None:
        wanted = [one.wanted for one in published]
        entries = [one.entry for one in published]
        slots = [one.slot for one in published]
        owners = [one.owner for one in wanted]
        columns = (
            entries,
            list(generations),
            slots,
            [owner.writer_id for owner in owners],
            [owner.scope for owner in owners],
            [one.payload_bytes for one in wanted],
            list(checksums),
        )
        names = [one.name for one in wanted]
        self.held.update(zip(names, minted(Held, columns, len(names)), strict=True))
        self.by_entry.update(zip(entries, names, strict=True))
        by_slab = self._by_slab
        for slot, entry in zip(slots, entries, strict=True):
            neighbours = by_slab.get(slot.slab)
            if neighbours is None:
                neighbours = by_slab[slot.slab] = {}
            neighbours[entry] = None
        closed = ReservationState.CLOSED
        for one in published:
            one.state = closed
        self._reserved -= len(published)

    def _close(self, reservation: Reservation) -> None:
        reservation.state = ReservationState.CLOSED
        self._reserved -= 1

    def _take_entries(self, count: int) -> list[int]:
        missing = count - self._entries.free_count
        if missing > 0:
            self.remove(self._residents.coldest(missing), RemovalCause.EVICTED)
        entries: list[int] = self._entries.allocate_up_to(count).tolist()
        return entries

    def _take_slots(self, size: int, count: int) -> list[Slot]:
        """As many slots as can be had; evicts only what is needed, several at a time."""
        slots = self._slabs.allocate_up_to(size, count)
        while len(slots) < count:
            close = self._slabs.allocate_close(size)
            if close is not None:
                slots.append(close)
                continue
            victims = self._victims(size, count - len(slots))
            if not victims:
                break
            freed = [held.slot for held in self._withdraw(victims, RemovalCause.EVICTED)]
            fitting = [slot for slot in freed if slot.size == size][: count - len(slots)]
            slots += fitting  # as they are: most blocks are of one size
            if len(fitting) < len(freed):
                kept = {(slot.slab, slot.index) for slot in fitting}
                self._slabs.free([s for s in freed if (s.slab, s.index) not in kept])
                slots += self._slabs.allocate_up_to(size, count - len(slots))
        return slots

    def _victims(self, size: int, count: int) -> list[FrameName]:
        """What to evict for slots of `size`: the coldest blocks that are close, or a whole slab.

        A slab of another class goes when none of the coldest blocks is close, and nothing in it is
        pinned or being written. One slab serves many slots, so this evicts as many bytes as its
        new class then stores, not more.
        """
        coldest = self._residents.coldest(count)
        fitting = 0
        for name in coldest:
            if not is_close(self.held[name].slot.size, size):
                break
            fitting += 1
        if fitting:
            return coldest[:fitting]
        coldest = self._residents.coldest(_LOOKAHEAD_BLOCKS)
        for name in coldest:
            if is_close(self.held[name].slot.size, size):
                return [name]
        for name in coldest:
            slot = self.held[name].slot
            neighbours = [self.by_entry[entry] for entry in self._by_slab[slot.slab]]
            whole = self._slabs.taken_count(slot.slab) == len(neighbours)
            if whole and not any(map(self._residents.is_pinned, neighbours)):
                return neighbours
        return coldest[:1]


def _slots_bytes(wanted: Iterable[Wanted]) -> list[int]:
    """The slot sizes of blocks, most of which have one length."""
    known: dict[tuple[int, bool], int] = {}
    sizes = []
    for one in wanted:
        kind = (one.payload_bytes, one.name.codec_id == 0)
        size = known.get(kind)
        if size is None:
            lengths = Lengths.FIXED if kind[1] else Lengths.VARYING
            size = known[kind] = slot_bytes(one.payload_bytes, lengths)
        sizes.append(size)
    return sizes


def require_open_reservations(reservations: Iterable[Reservation]) -> None:
    """CallerError unless all of them are open."""
    for reservation in reservations:
        if reservation.state is not ReservationState.OPEN:
            raise CallerError(f"the reservation is {reservation.state.value}, not open")

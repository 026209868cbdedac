"""Which part of an arena's memory is whose: slabs given to slot classes, slots within a slab.

A class is one slot size: the payload size of a namespace whose blocks are all of one length, and
steps of an eighth of a power of two where a codec makes the length vary (`slot_bytes`). A slab
belongs to one class while one of its slots is taken, then to nobody. So several block sizes live
in one arena and memory moves between them by emptying a slab; where there are more classes than
slabs could serve, a block takes a slot that is up to a quarter longer (`is_close`), and any longer
one while more than an eighth of the memory is in slabs and unused.

Kept in this process's own memory: no client can damage it. What must not live here: which block
is worth keeping, names, bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtier.core.checks import require_integer
from kvtier.core.slots import SlotAllocator
from kvtier.errors import CallerError
from kvtier.tiers.minting import minted

ALIGNMENT_BYTES: Final = 64
_ROUNDING: Final = 8
_IDLE_SHARE: Final = 8
_ARENA_BYTES_MAX: Final = 1 << 46
_SLABS_COUNT_MAX: Final = 1 << 20


class Lengths(Enum):
    """Whether the payloads of a namespace have one length."""

    FIXED = "fixed"
    VARYING = "varying"


def slot_bytes(payload_bytes: int, lengths: Lengths) -> int:
    """The slot size of a payload's class: at most 63 bytes more, or an eighth and 63."""
    granule = ALIGNMENT_BYTES
    if lengths is Lengths.VARYING:
        granule = max(granule, 1 << max(0, payload_bytes.bit_length() - _ROUNDING.bit_length()))
    return max(-(-payload_bytes // granule) * granule, ALIGNMENT_BYTES)


def is_close(slot_size: int, size: int) -> bool:
    """Whether a slot may be used for one of `size`: not shorter, at most a quarter longer."""
    return size <= slot_size <= size + size // 4


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: where it is, and which of its slab's it is. Never changed.

    Not frozen: there is one for every block that is put, and freezing triples what it costs.
    """

    offset: int
    size: int
    slab: int
    index: int


@dataclass(slots=True)
class _Slab:
    slot_bytes: int
    slots: SlotAllocator


@dataclass(slots=True)
class SlabAllocator:
    """Hands out slots of `slabs_count` slabs of `slab_bytes`. O(1) each."""

    slab_bytes: int
    slabs_count: int
    _free: list[int] = field(init=False)
    _slabs: dict[int, _Slab] = field(init=False, default_factory=dict)
    _open: dict[int, dict[int, None]] = field(init=False, default_factory=dict)
    """Slabs with a free slot, by slot size; the one filled last first to be filled again."""
    _quarantined: int = field(init=False, default=0)
    _taken_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        require_integer("slab_bytes", self.slab_bytes, ALIGNMENT_BYTES, _ARENA_BYTES_MAX)
        require_integer("slabs_count", self.slabs_count, 1, _SLABS_COUNT_MAX)
        if self.slab_bytes % ALIGNMENT_BYTES:
            raise CallerError(f"slab_bytes {self.slab_bytes} is no multiple of {ALIGNMENT_BYTES}")
        self._free = list(range(self.slabs_count))[::-1]

    @property
    def given_bytes(self) -> int:
        """Memory in slabs that are some class's: what counts as used."""
        return self.slab_bytes * len(self._slabs)

    @property
    def quarantined_count(self) -> int:
        return self._quarantined

    def allocate_up_to(self, size: int, count: int) -> list[Slot]:
        """Take `count` slots of `size`, or fewer where there is no slot and no slab free.

        CallerError for what is longer than a slab.
        """
        if not 0 < size <= self.slab_bytes:
            raise CallerError(f"a slot of {size} bytes does not fit a slab of {self.slab_bytes}")
        taken: list[Slot] = []
        candidates = self._open.setdefault(size, {})
        while len(taken) < count:
            if not candidates:
                if not self._free:
                    break
                opened = self._free.pop()
                self._slabs[opened] = _Slab(size, SlotAllocator(self.slab_bytes // size))
                candidates[opened] = None
            slab = next(reversed(candidates))
            slots = self._slabs[slab].slots
            start = slab * self.slab_bytes
            indexes = slots.allocate_up_to(count - len(taken)).tolist()
            offsets = [start + index * size for index in indexes]
            taken += minted(Slot, (offsets, size, slab, indexes), len(indexes))
            if not slots.free_count:
                del candidates[slab]
        if not candidates:
            del self._open[size]
        self._taken_bytes += size * len(taken)
        return taken

    def allocate_close(self, size: int) -> Slot | None:
        """Take a free slot of the closest class that is not much longer; None if there is none.

        For when no slab is free: memory that its own class does not use. O(classes).
        """
        idle_bytes = self.given_bytes - self._taken_bytes
        crowded = idle_bytes * _IDLE_SHARE > self.slab_bytes * self.slabs_count
        close = [
            other for other in self._open if is_close(other, size) or (crowded and other >= size)
        ]
        return self.allocate_up_to(min(close), 1)[0] if close else None

    def allocate_any(self) -> Slot | None:
        """Take a slot of whatever class has a free one, or a free slab whole; None: all is taken.

        Given back at once, everything is as it was. O(1).
        """
        size = next(iter(self._open), self.slab_bytes if self._free else 0)
        return self.allocate_up_to(size, 1)[0] if size else None

    def free(self, slots: Sequence[Slot]) -> None:
        """Give used slots back; a slab without used slots is nobody's again."""
        by_slab: dict[int, list[int]] = {}
        sizes: dict[int, Slot] = {}
        for slot in slots:
            group = by_slab.get(slot.slab)
            if group is None:
                group = by_slab[slot.slab] = []
                sizes[slot.slab] = slot
            group.append(slot.index)
        for slab, group in by_slab.items():
            one = sizes[slab]
            self._slabs[slab].slots.free(group)
            self._taken_bytes -= one.size * len(group)
            self._reopen(one)

    def quarantine(self, slot: Slot) -> None:
        """Keep a used slot from everybody until `release_quarantine`."""
        self._slabs[slot.slab].slots.quarantine((slot.index,))
        self._quarantined += 1

    def release_quarantine(self, slot: Slot) -> None:
        """Free a quarantined slot, after proof that nobody writes it any more."""
        self._slabs[slot.slab].slots.release_quarantine((slot.index,))
        self._quarantined -= 1
        self._taken_bytes -= slot.size
        self._reopen(slot)

    def _reopen(self, slot: Slot) -> None:
        slots = self._slabs[slot.slab].slots
        candidates = self._open.setdefault(slot.size, {})
        candidates[slot.slab] = None
        if slots.free_count == slots.slots_count:
            del candidates[slot.slab]
            del self._slabs[slot.slab]
            self._free.append(slot.slab)
        if not candidates:
            del self._open[slot.size]

    def taken_count(self, slab: int) -> int:
        """How many slots of a slab are not free, the quarantined ones included."""
        held = self._slabs.get(slab)
        return 0 if held is None else held.slots.slots_count - held.slots.free_count

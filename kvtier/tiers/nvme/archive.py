"""All that the tier holds: ledger, segments, counters, and the changes that the index still lacks.

Of the event loop alone; does no I/O. Every change of what can be read goes through `publish`,
`remove` or `retire`, so that ledger, counters, observer and index agree.
What must not live here: threads, deadlines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.eviction import PinToken
from kvtier.core.eviction.policy import PinTable
from kvtier.core.frame import FrameName
from kvtier.ports import RemovalCause, TierObserver, TierStats
from kvtier.tiers.nvme.layout import Geometry, Place, aligned_frame, pack_name, unpack_name
from kvtier.tiers.nvme.ledger import Ledger
from kvtier.tiers.nvme.segments import Segment
from kvtier.tiers.tally import Holding, Tally
from kvtier.types import Tier


class Condition(StrEnum):
    """Whether the tier takes writes; reads are answered in each."""

    WRITABLE = "writable"
    DISK_FULL = "disk_full"
    """Refuses writes and tries again by itself."""
    INDEX_FAILED = "index_failed"
    """The same; a new index is built as soon as the disk takes it."""


@dataclass(slots=True)
class DiskCounters:
    """What the tier did to its disk, for budgets and alarms. Only ever grows."""

    run_bytes_written: int = 0
    """All that was appended to segments: frames, padding, moved blocks."""
    bytes_moved: int = 0
    """Frames that were copied from a segment that went."""
    read_failures: int = 0
    write_failures: int = 0
    segments_quarantined: int = 0
    """Sealed, or given up with all their blocks, because the disk refused them."""
    index_saves: int = 0
    index_failures: int = 0
    index_rebuilds: int = 0


@dataclass(slots=True)
class Archive:
    """The state that reading, writing and saving share."""

    geometry: Geometry
    observer: TierObserver | None = None
    ledger: Ledger = field(default_factory=Ledger)
    segments: dict[int, Segment] = field(default_factory=dict)
    """Oldest first."""
    active: Segment | None = None
    overhead_bytes: int = 0
    """Index and directories, as last counted."""
    condition: Condition = Condition.WRITABLE
    tally: Tally = field(default_factory=Tally)
    disk: DiskCounters = field(default_factory=DiskCounters)
    reserved_count: int = 0
    changes: dict[bytes, bytes | None] = field(default_factory=dict)
    """What the index lacks."""
    changes_count: int = 0
    """Of all time: names a state of the ledger."""
    unsaved_bytes: int = 0
    """Frames among `changes`."""
    _next_id: int = 1
    _pins: PinTable[FrameName] = field(default_factory=PinTable)
    _leaving: dict[int, Segment] = field(default_factory=dict)

    @property
    def segment_bytes(self) -> int:
        """All segments' files, those that are about to be deleted included."""
        held = sum(segment.size for segment in self.segments.values())
        return held + sum(segment.size for segment in self._leaving.values())

    def adopt(self, segment: Segment) -> None:
        """Know a segment that is younger than all others."""
        self.segments[segment.segment_id] = segment
        self.ledger.open_shelf(segment.segment_id)
        self.pass_over(segment.segment_id)

    def pass_over(self, segment_id: int) -> None:
        """Draw no id up to this one: the index speaks of it."""
        self._next_id = max(self._next_id, segment_id + 1)

    def draw_segment_id(self) -> int:
        """An id that no segment has, and none that the index spoke of when the tier was opened."""
        segment_id = self._next_id
        self._next_id += 1
        return segment_id

    def publish(self, placed: Sequence[tuple[FrameName, Place]]) -> None:
        """These blocks can be read from now on."""
        self._place([(pack_name(name), place) for name, place in placed])
        if self.observer is not None and placed:
            self.observer.on_tier_stored(Tier.NVME, [name for name, _ in placed])

    def move(self, placed: Sequence[tuple[bytes, Place]]) -> None:
        """These blocks are read from elsewhere from now on."""
        self._place(placed)

    def remove(self, keys: Iterable[bytes], cause: RemovalCause) -> int:
        """These blocks can no longer be read; returns how many could be."""
        gone: list[FrameName] = []
        for key in keys:
            if self.ledger.remove(key) is None:
                continue
            name = unpack_name(key)
            gone.append(name)
            self._pins.forget(name)
            self.changes[key] = None
        self.changes_count += len(gone)
        self.tally.removals[cause] += len(gone)
        if self.observer is not None and gone:
            self.observer.on_tier_removed(Tier.NVME, gone, cause)
        return len(gone)

    def retire(self, segment_id: int, cause: RemovalCause) -> Segment:
        """Remove a segment with all blocks in it. Its file counts until `forget`."""
        self.remove(self.ledger.blocks(segment_id), cause)
        self.ledger.close_shelf(segment_id)
        segment = self.segments.pop(segment_id)
        self._leaving[segment_id] = segment
        if self.active is segment:
            self.active = None
        return segment

    def forget(self, segment: Segment) -> None:
        """The file of a retired segment is gone."""
        self._leaving.pop(segment.segment_id, None)

    def take_changes(self) -> tuple[dict[bytes, bytes | None], int]:
        """What to save now, and its bytes of frames; `give_back_changes` undoes it."""
        taken = self.changes, self.unsaved_bytes
        self.changes, self.unsaved_bytes = {}, 0
        return taken

    def give_back_changes(self, changes: dict[bytes, bytes | None], unsaved_bytes: int) -> None:
        """They were not saved: later ones win over them."""
        self.changes = {**changes, **self.changes}
        self.unsaved_bytes += unsaved_bytes

    def pin(self, name: FrameName) -> PinToken | None:
        key = pack_name(name)
        if key not in self.ledger:
            return None
        self.ledger.pin(key)
        return self._pins.pin(name)

    def unpin(self, name: FrameName, token: PinToken) -> None:
        if self._pins.unpin(name, token):
            self.ledger.unpin(pack_name(name))

    def stats(self) -> TierStats:
        """See `BlockTier.stats`."""
        return self.tally.stats(
            Holding(
                blocks=len(self.ledger),
                bytes=self.segment_bytes + self.overhead_bytes,
                bytes_max=self.geometry.bytes_max,
                blocks_pinned=self.ledger.pinned_count,
                blocks_reserved=self.reserved_count,
            )
        )

    def _place(self, placed: Sequence[tuple[bytes, Place]]) -> None:
        self.changes.update(self.ledger.add(placed))
        self.changes_count += len(placed)
        self.unsaved_bytes += sum(aligned_frame(place.payload_bytes) for _, place in placed)

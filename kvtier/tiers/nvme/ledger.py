"""What lies where, and what goes next: the whole index in memory. Decides; does no I/O.

About 300 bytes a block, which is a thousandth of a block of 256 KiB. Segments go oldest first, as
whole files; of the one that goes, pinned blocks and, within a share, blocks that were read since
they were written move on. So a byte is written about once, and no block is deleted in place.
What must not live here: files, threads, clocks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvtier.tiers.nvme.layout import Place, aligned_frame, pack_place, unpack_place


@dataclass(slots=True)
class Shelf:
    """The blocks of one segment."""

    keys: list[bytes] = field(default_factory=list)
    """As they would go; also some that are not here any more."""
    live: int = 0
    touched: dict[bytes, None] = field(default_factory=dict)
    """Read since they were written, the last read last."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What to do to make room: this segment goes, these blocks of it move on."""

    segment_id: int
    kept: tuple[bytes, ...]
    kept_bytes: int


class Ledger:
    """Names (packed) to places, segment by segment."""

    def __init__(self) -> None:
        self._places: dict[bytes, bytes] = {}
        self._shelves: dict[int, Shelf] = {}
        self._pinned: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def snapshot(self) -> list[bytes]:
        """All names, in no order."""
        return list(self._places)

    def place(self, key: bytes) -> Place | None:
        packed = self._places.get(key)
        return None if packed is None else unpack_place(packed)

    def packed(self) -> Mapping[bytes, bytes]:
        """All of it as the catalog keeps it; a view."""
        return self._places

    def open_shelf(self, segment_id: int) -> None:
        """Know a new segment, younger than all others."""
        self._shelves[segment_id] = Shelf()

    def close_shelf(self, segment_id: int) -> None:
        """Forget a segment, which must be empty."""
        shelf = self._shelves.pop(segment_id)
        assert not shelf.live, "a segment is forgotten with blocks in it"

    def add(self, placed: Sequence[tuple[bytes, Place]]) -> dict[bytes, bytes]:
        """Put blocks of one segment on its shelf, the chain's head first; returns what to save.

        The tail goes first. A block that was elsewhere is moved.
        """
        saved: dict[bytes, bytes] = {}
        for key, place in reversed(placed):
            self._take_off(key)
            shelf = self._shelves[place.segment_id]
            shelf.keys.append(key)
            shelf.live += 1
            saved[key] = self._places[key] = pack_place(place)
        return saved

    def remove(self, key: bytes) -> Place | None:
        """Forget a block and its pin; returns where it was, None if nowhere."""
        place = self._take_off(key)
        self._places.pop(key, None)
        self._pinned.pop(key, None)
        return place

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of a chain's blocks, head first: the head is the last one to go."""
        for key in reversed(keys):
            place = self.place(key)
            if place is not None:
                touched = self._shelves[place.segment_id].touched
                touched.pop(key, None)
                touched[key] = None

    def pin(self, key: bytes) -> None:
        self._pinned[key] = None

    def unpin(self, key: bytes) -> None:
        self._pinned.pop(key, None)

    @property
    def pinned_count(self) -> int:
        return len(self._pinned)

    def live_count(self, segment_id: int) -> int:
        return self._shelves[segment_id].live

    def blocks(self, segment_id: int) -> list[bytes]:
        """The blocks of a segment, as they would go. O(blocks it ever had)."""
        return list(self._live(segment_id))

    def coldest(self, count: int) -> list[bytes]:
        """What would go next: untouched blocks by age, then the touched ones; pinned ones never."""

        def untouched() -> Iterator[bytes]:
            for segment_id, shelf in self._shelves.items():
                yield from (k for k in self._live(segment_id) if k not in shelf.touched)

        def touched() -> Iterator[bytes]:
            for shelf in self._shelves.values():
                yield from shelf.touched

        def offered(keys: Iterable[bytes]) -> Iterator[bytes]:
            return (key for key in keys if key not in self._pinned)

        cold = list(islice(offered(untouched()), count))
        return cold + list(islice(offered(touched()), count - len(cold)))

    def choose(
        self, active_id: int | None, pinned_bytes_max: int, kept_bytes_max: int
    ) -> Keeping | None:
        """Which segment goes: the oldest whose pinned blocks take at most `pinned_bytes_max`, None
        if there is none. They move on, and as many touched blocks as fit into `kept_bytes_max` with
        them, the last read first."""
        pinned = self._pinned_by_segment()
        for segment_id, shelf in self._shelves.items():
            if segment_id == active_id:
                continue
            kept = dict.fromkeys(pinned.get(segment_id, ()))
            size = sum(self._frame_bytes(key) for key in kept)
            if size > pinned_bytes_max:
                continue
            for key in reversed(shelf.touched):
                frame_bytes = self._frame_bytes(key)
                if key not in kept and size + frame_bytes <= kept_bytes_max:
                    kept[key] = None
                    size += frame_bytes
            return Keeping(segment_id, tuple(kept), size)
        return None

    def _pinned_by_segment(self) -> dict[int, list[bytes]]:
        found: dict[int, list[bytes]] = {}
        for key in self._pinned:
            place = self.place(key)
            assert place is not None, "a pin outlived its block"
            found.setdefault(place.segment_id, []).append(key)
        return found

    def _frame_bytes(self, key: bytes) -> int:
        place = self.place(key)
        assert place is not None
        return aligned_frame(place.payload_bytes)

    def _live(self, segment_id: int) -> Iterator[bytes]:
        """A key that came back to the same segment stands twice: the later one counts."""
        keys = self._shelves[segment_id].keys
        for key in reversed(dict.fromkeys(reversed(keys))):
            place = self.place(key)
            if place is not None and place.segment_id == segment_id:
                yield key

    def _take_off(self, key: bytes) -> Place | None:
        place = self.place(key)
        if place is not None:
            shelf = self._shelves[place.segment_id]
            shelf.live -= 1
            shelf.touched.pop(key, None)
        return place

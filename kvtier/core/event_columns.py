"""What a publisher says about blocks, as columns: no Python object per block.

What must not live here: epochs and sequence numbers (`event_messages`), the wire format
(floor 2), and any opinion on which blocks are held (`residents`, `prefix_index`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import CallerError

U64Array = npt.NDArray[np.uint64]
Hashes = U64Array | Sequence[int]
"""Prefix hashes of a chain, first block first."""

_U32: Final[np.dtype[np.uint32]] = np.dtype("<u4")
_U64: Final[np.dtype[np.uint64]] = np.dtype("<u8")

NO_PARENT: Final = 0
"""Parent of a first block, or of one whose parent the publisher does not know."""


class EventKind(IntEnum):
    """What happened to the blocks of one event."""

    STORE = 0
    REMOVE = 1
    CLEAR_TIER = 2
    CLEAR_ALL = 3


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """Events in the order in which they happened; event `i` owns the next `lengths[i]` hashes.

    A store's hashes are one chain: the first hangs under `parents[i]`, each other under the one
    before it. A remove's hashes are in no order; a clear has none. `parents` and, for
    `CLEAR_ALL`, `tiers` are 0 where they mean nothing. Arrays are not copied and must not be
    written to afterwards.
    """

    kinds: npt.NDArray[np.uint8]
    tiers: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.uint32]
    parents: U64Array
    hashes: U64Array

    @property
    def events_count(self) -> int:
        return len(self.kinds)

    @property
    def blocks_count(self) -> int:
        return len(self.hashes)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all columns, close to what a wire format needs."""
        return 14 * len(self.kinds) + 8 * len(self.hashes)


class PackedBatch(NamedTuple):
    """An `EventBatch` as little-endian bytes, checked like one; a tuple, because it is made often.

    The index takes its columns as they are (`prefix_index.EventColumns`), and they go on to others
    without a copy. `unpacked` is for those who look inside.
    """

    kinds: bytes
    tiers: bytes
    lengths: bytes
    parents: bytes
    hashes: bytes

    @property
    def events_count(self) -> int:
        return len(self.kinds)

    @property
    def blocks_count(self) -> int:
        return len(self.hashes) // 8

    @property
    def payload_bytes(self) -> int:
        """Bytes of all columns."""
        return 14 * len(self.kinds) + len(self.hashes)

    def unpacked(self) -> EventBatch:
        """The same columns as read-only arrays over the same memory."""
        return EventBatch(
            kinds=np.frombuffer(self.kinds, np.uint8),
            tiers=np.frombuffer(self.tiers, np.uint8),
            lengths=np.frombuffer(self.lengths, _U32),
            parents=np.frombuffer(self.parents, _U64),
            hashes=np.frombuffer(self.hashes, _U64),
        )


def as_hashes(hashes: Hashes) -> U64Array:
    """The hashes as a one-dimensional u64 array; an array of that kind is returned as it is.

    Raises CallerError for another dtype or shape, and for values outside u64. O(n) for a
    sequence, O(1) for an array.
    """
    if isinstance(hashes, np.ndarray):
        if hashes.dtype != np.uint64 or hashes.ndim != 1:
            raise CallerError(
                f"hashes: want a one-dimensional uint64 array, got {hashes.ndim} x {hashes.dtype}"
            )
        return hashes
    try:
        # Through object: numpy would quietly read booleans, floats and strings as numbers.
        if not all(type(value) is int or isinstance(value, np.integer) for value in hashes):
            raise CallerError("hashes: want integers")
        return np.array(hashes, dtype=np.uint64)
    except (OverflowError, TypeError) as error:
        raise CallerError("hashes: want integers of 0 .. 2**64 - 1") from error

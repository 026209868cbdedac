"""Token ids of text segments seen before, bounded by bytes, least recently used out first.

What must not live here: where a text may be cut (segments.py).
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.uint32]
"""One-dimensional, C-contiguous, read-only where it comes from a cache."""

_ENTRY_BYTES: Final = 400
"""Of the map's slot, key tuple, text and array objects around the content."""
_SHARE_OF_ONE: Final = 8
"""One segment may fill an eighth of the cache: longer ones are not kept."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache has done since it was made, and what it holds."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int


class SegmentCache:
    """(scope, segment) → token ids. Safe to share between threads; no call waits for long.

    The scope is part of the key because a hit is faster than a miss: without it a tenant could
    find out by time what others have sent.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[str, str], TokenIds] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, scope: str, segments: list[str]) -> list[TokenIds | None]:
        """Return the ids of each segment, None where they are not held; they become the newest."""
        found: list[TokenIds | None] = []
        entries = self._entries
        with self._lock:
            for segment in segments:
                ids = entries.get(key := (scope, segment))
                if ids is not None:
                    entries.move_to_end(key)
                found.append(ids)
            missing = sum(ids is None for ids in found)
            self._misses += missing
            self._hits += len(found) - missing
        return found

    def put(self, scope: str, segment: str, ids: TokenIds) -> None:
        """Keep `ids`, which becomes read-only, and drop the oldest until the rest fits."""
        ids.flags.writeable = False
        size = _size(scope, segment, ids)
        if size * _SHARE_OF_ONE > self._bytes_max:
            return
        with self._lock:
            if (scope, segment) in self._entries:
                return
            self._entries[scope, segment] = ids
            self._bytes += size
            while self._bytes > self._bytes_max:
                (old_scope, old_segment), old_ids = self._entries.popitem(last=False)
                self._bytes -= _size(old_scope, old_segment, old_ids)
                self._evictions += 1

    def stats(self) -> CacheStats:
        """Return a copy of the counters."""
        with self._lock:
            entries = len(self._entries)
            return CacheStats(self._hits, self._misses, self._evictions, entries, self._bytes)


def _size(scope: str, segment: str, ids: TokenIds) -> int:
    """Bytes of an entry; a scope's text is shared by its entries, and counted all the same."""
    segment_bytes = len(segment) * (1 if segment.isascii() else 4)
    return _ENTRY_BYTES + len(scope) + segment_bytes + ids.nbytes

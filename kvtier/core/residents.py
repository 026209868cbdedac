"""What a publisher holds, so that it can always say it anew: a multiset of blocks per tier.

Counts as the index counts: a second store of a block is a second copy, removing one of two copies
hides nothing, removing what is not there does nothing, a clear resets the counts. What must not
live here: sequence numbers, rings, replicas (`publication`), and matching (`prefix_index`).

One dict a tier, worked on with whole-batch operations of the interpreter's C code; Python runs
per block only for blocks with more than one copy. About 100 bytes a block.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice, repeat

import numpy as np

from kvtier import limits
from kvtier.core.event_columns import EventBatch, EventKind, U64Array
from kvtier.core.event_messages import Digest, TierDigest
from kvtier.types import HOLDER_TIERS, Tier


class _TierBlocks:
    __slots__ = ("copies_count", "extra", "hash_xor", "parents")

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}
        """Resident hash -> parent. Insertion order keeps a chain's blocks together."""
        self.extra: dict[int, int] = {}
        """Copies beyond the first, of the few blocks that have them."""
        self.copies_count = 0
        self.hash_xor = 0

    def store(self, parent: int, hashes: U64Array) -> None:
        names = hashes.tolist()
        parents = self.parents
        if parents.keys().isdisjoint(names):
            before = len(parents)
            parents.update(zip(names, chain((parent,), names), strict=False))
            if len(parents) - before == len(names):
                self.copies_count += len(names)
                self.hash_xor ^= int(np.bitwise_xor.reduce(hashes))
                return
            resident: set[int] = set()
        else:
            resident = parents.keys() & names
            parents.update(zip(names, chain((parent,), names), strict=False))
        for name, count in Counter(names).items():
            if name in resident:
                self._add_extra(name, count)
            else:
                self.copies_count += 1
                self.hash_xor ^= name
                if count > 1:
                    self._add_extra(name, count - 1)

    def _add_extra(self, name: int, count: int) -> None:
        before = self.extra.get(name, 0)
        after = min(before + count, limits.COPIES_COUNT_MAX - 1)
        self.extra[name] = after
        self.copies_count += after - before

    def remove(self, hashes: U64Array) -> None:
        names = hashes.tolist()
        if self.extra and not self.extra.keys().isdisjoint(names):
            names = list(self._remove_extra(Counter(names)))
        gone = self.parents.keys() & names
        deque(map(self.parents.pop, gone), maxlen=0)
        self.copies_count -= len(gone)
        packed = hashes if len(gone) == len(hashes) else np.fromiter(gone, np.uint64, len(gone))
        self.hash_xor ^= int(np.bitwise_xor.reduce(packed))

    def _remove_extra(self, counts: Counter[int]) -> Iterator[int]:
        """Take extra copies first; yields the blocks whose last copy must go too."""
        for name, count in counts.items():
            extra = self.extra.get(name, 0)
            if count > extra:
                yield name
            taken = min(count, extra)
            self.copies_count -= taken
            if taken == extra:
                self.extra.pop(name, None)
            else:
                self.extra[name] = extra - taken

    def pieces(self, blocks_max: int) -> Iterator[tuple[U64Array, U64Array]]:
        """Parents and hashes, first copies and then the other ones, a piece at a time.

        Copies the dicts when it is called (some 20 ns a block), and makes arrays of them only as
        they are asked for: who waits for the caller waits for the copy alone.
        """
        return _pieces(self.parents.copy(), self.extra.copy(), blocks_max)


def _pieces(
    parents: dict[int, int], extra: dict[int, int], blocks_max: int
) -> Iterator[tuple[U64Array, U64Array]]:
    names, above = iter(parents.keys()), iter(parents.values())
    for start in range(0, len(parents), blocks_max):
        count = min(blocks_max, len(parents) - start)
        yield (
            np.fromiter(islice(above, count), np.uint64, count),
            np.fromiter(islice(names, count), np.uint64, count),
        )
    copies = chain.from_iterable(repeat(name, count) for name, count in extra.items())
    while more := list(islice(copies, blocks_max)):
        yield (
            np.array([parents[name] for name in more], np.uint64),
            np.array(more, np.uint64),
        )


class Residents:
    """The multiset over all tiers. Not thread-safe."""

    def __init__(self) -> None:
        self._tiers = tuple(_TierBlocks() for _ in HOLDER_TIERS)

    def store(self, tier: Tier, parent: int, hashes: U64Array) -> None:
        """Add one copy of each block of a chain. O(n)."""
        if len(hashes):
            self._tiers[tier].store(parent, hashes)

    def remove(self, tier: Tier, hashes: U64Array) -> None:
        """Take away one copy of each block; blocks that are not there are ignored. O(n)."""
        if len(hashes):
            self._tiers[tier].remove(hashes)

    def clear_tier(self, tier: Tier) -> None:
        """Forget a tier."""
        blocks = self._tiers[tier]
        blocks.parents.clear()
        blocks.extra.clear()
        blocks.copies_count = blocks.hash_xor = 0

    def clear_all(self) -> None:
        """Forget everything."""
        for tier in HOLDER_TIERS:
            self.clear_tier(tier)

    @property
    def copies_count(self) -> int:
        """Copies of blocks in all tiers. O(1)."""
        return sum(blocks.copies_count for blocks in self._tiers)

    def digest(self) -> Digest:
        """Per tier: copies, and xor over the distinct hashes. O(1)."""
        return tuple(TierDigest(blocks.copies_count, blocks.hash_xor) for blocks in self._tiers)

    def snapshot(self, chunk_blocks_max: int) -> Iterator[EventBatch]:
        """All blocks as store events, at most `chunk_blocks_max` a chunk; none when empty.

        What is held is copied before this returns, so that later changes do not show; the chunks
        are made one by one.
        """
        pieces = [(tier, self._tiers[tier].pieces(chunk_blocks_max)) for tier in HOLDER_TIERS]
        return (
            _stores(tier, parents, hashes)
            for tier, of_tier in pieces
            for parents, hashes in of_tier
        )


def _stores(tier: Tier, parents: U64Array, hashes: U64Array) -> EventBatch:
    """Store events for blocks with known parents: neighbours that are a chain become one event."""
    breaks = np.flatnonzero(parents[1:] != hashes[:-1]) + 1
    starts = np.concatenate((np.zeros(1, np.int64), breaks))
    lengths = np.diff(starts, append=len(hashes))
    return EventBatch(
        kinds=np.full(len(starts), EventKind.STORE, np.uint8),
        tiers=np.full(len(starts), tier, np.uint8),
        lengths=lengths.astype(np.uint32),
        parents=parents[starts],
        hashes=hashes,
    )

"""A stream's blocks on their way to what its snapshot says, in slices.

A million blocks at once would keep the event loop, and every match with it, for a fifth of a
second. What must not live here: when a snapshot is whole (the core), who goes on (state.py).
"""

from collections.abc import Iterator, Sequence
from typing import Final

from kvtier.core.event_columns import PackedBatch
from kvtier.core.prefix_index import PrefixIndex
from kvtier.types import HolderId, Tier

SLICE_BLOCKS: Final = 8192
"""One to two milliseconds. What a publisher sends in one piece is not cut further."""


class Replacement:
    """Takes away what a stream holds, then stores what was staged; nothing else may meanwhile.

    Whoever began it puts what the stream says in the meantime into `later`, and applies that last.
    """

    def __init__(
        self,
        index: PrefixIndex,
        stream: tuple[HolderId, int],
        tiers: Sequence[Tier],
        staged: list[PackedBatch],
    ) -> None:
        self._index = index
        self._holder, self._shard = stream
        self._slices = self._run(tiers, staged)
        self.blocks_count = sum(batch.blocks_count for batch in staged) + sum(
            index.digest(self._holder, tier, self._shard).count for tier in tiers
        )
        """How many blocks go and come."""
        self.later: list[PackedBatch] = []
        self.stored_blocks = 0
        self.evicted_blocks = 0

    def go_on(self) -> bool:
        """Do one slice; False when nothing is left to do."""
        return next(self._slices, None) is not None

    def _run(self, tiers: Sequence[Tier], staged: list[PackedBatch]) -> Iterator[int]:
        """Yields after each slice how many blocks it was about."""
        for tier in tiers:
            held = self._index.snapshot(self._holder, tier, self._shard).hashes
            for first in range(0, len(held), SLICE_BLOCKS):
                old = held[first : first + SLICE_BLOCKS]
                self._index.remove(self._holder, tier, self._shard, old)
                yield len(old)
            # Empty already, but only this ends the count of what the byte budget has taken.
            self._index.clear(self._holder, tier, self._shard)
        for batch in staged:
            result = self._index.apply(self._holder, self._shard, batch)
            self.stored_blocks += result.stored
            self.evicted_blocks += result.evicted
            yield batch.blocks_count

"""Whose GPU pool is full, by what the index says that it holds.

Asked rarely: when a promise was not kept, to tell an eviction from blocks that were never there.
What must not live here: choices of a worker.
"""

from typing import Final

from kvtier.types import HolderId, Tier
from kvtier_router.routing.ports import IndexSource
from kvtier_router.routing.roster import Member
from kvtier_router.routing.values import Clock

FULL_SHARE: Final = 0.8
"""Of a full pool some blocks are always taken by requests that have not filled them yet."""
_FRESH_S: Final = 1.0


class Pools:
    """Remembers what the index said for a second. Belongs to one thread."""

    def __init__(self, source: IndexSource | None, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._asked_at = float("-inf")
        self._blocks: dict[HolderId, float] = {}

    def is_full(self, member: Member) -> bool:
        """Whether new blocks displace others there; False where that is not known. O(holders) once
        a second at most, else O(1)."""
        view = member.view
        if view is None or self._source is None:
            return False
        capacities = [one.blocks for one in view.info.capacities if one.tier is Tier.GPU]
        room = sum(capacities) or view.load.total_blocks
        now = self._clock()
        if now - self._asked_at >= _FRESH_S:
            self._asked_at = now
            self._blocks = {
                seen.holder: copies[Tier.GPU] / seen.info.shards_count
                for seen, copies in self._source.census()
            }
        return 0 < FULL_SHARE * room <= self._blocks.get(view.holder, 0.0)

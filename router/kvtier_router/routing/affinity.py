"""How deep to look at a prompt when hashing decides: deep enough to tell conversations apart.

Hashing on a fixed depth sends everything that shares a system prompt to one worker, and bounded
loads then scatter it. Keys that carry more of the requests than a worker's share are *hot*: the
next depth is taken instead. What must not live here: the hashing (kvtier.core.fallback).
"""

from kvtier.types import PrefixHash
from kvtier_router.routing.ports import Hashes

DEPTHS_COUNT_MAX = 12
KEYS_COUNT_MAX = 8192
FADE_REQUESTS = 2048
"""After so many requests all counts are halved."""
CERTAIN_REQUESTS = 32
"""Fewer than this of one key are chance."""


class PrefixHeat:
    """Counts prefixes at depths that double; at most KEYS_COUNT_MAX of them."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._total = 0.0
        self._since_fade = 0

    def key(self, hashes: Hashes, depth_blocks: int, workers_count: int) -> PrefixHash:
        """The hash to stick by, at the least depth at which it is not hot; counts it. O(log n).

        `hashes` must not be empty.
        """
        self._count_request()
        hot = max(CERTAIN_REQUESTS, self._total / (2.0 * max(workers_count, 1)))
        depth = depth_blocks
        for _ in range(DEPTHS_COUNT_MAX):
            key = int(hashes[min(depth, len(hashes)) - 1])
            count = self._counts.get(key, 0.0) + 1.0
            self._counts[key] = count
            if count <= hot or depth >= len(hashes):
                break
            depth *= 2
        return PrefixHash(key)

    def _count_request(self) -> None:
        self._total += 1.0
        self._since_fade += 1
        if self._since_fade >= FADE_REQUESTS or len(self._counts) > KEYS_COUNT_MAX:
            self._since_fade = 0
            self._total /= 2.0
            kept = {key: count / 2.0 for key, count in self._counts.items() if count >= 2.0}
            self._counts = kept if len(kept) <= KEYS_COUNT_MAX // 2 else {}

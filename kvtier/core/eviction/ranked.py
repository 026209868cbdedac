"""Least recently used within a priority, lowest priority first: what tiers of a store use.

Cheaper than `PriorityPolicy`, which knows which block follows which: as long as every key has the
default priority this is one `LruPolicy`, at its cost. What must not live here: chains, pins by
reason, sizes.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, Generic

from kvtier.core.eviction.lru import LruPolicy
from kvtier.core.eviction.policy import K, PinTable, PinToken, Removal, check_count, unknown_key
from kvtier.core.eviction.retention import PRIORITY_DEFAULT, Retention
from kvtier.errors import CallerError

_SLACK: Final = 64
"""Stale deadlines that are always tolerated."""
_LATER_S: Final = 1.0
"""When a pinned key whose priority has run out is looked at again."""


class RankedPolicy(Generic[K]):
    """`Policy` that offers the unpinned key of lowest priority, of equals the one used longest ago.

    Without `retention` a new key has the default priority and a known one keeps its own. A priority
    that has expired falls back to the default in the next `victims`, as if the key were used then;
    a pinned key keeps the one that it was pinned with. O(1) amortised, with deadlines O(log n),
    plus the priorities in use.
    """

    __slots__ = (
        "_expires_at",
        "_expiries",
        "_numbers",
        "_others",
        "_pins",
        "_plain",
        "_ranks",
        "_tracked",
    )  # fmt: skip

    def __init__(self) -> None:
        self._pins: PinTable[K] = PinTable()
        self._plain: LruPolicy[K] = LruPolicy(pins=self._pins)
        self._others: dict[int, LruPolicy[K]] = {}
        """By priority, but for the default's."""
        self._ranks: dict[K, int] = {}
        """Of keys in `_others`."""
        self._tracked: dict[int, int] = {}
        """How many of them there are of each priority."""
        self._expires_at: dict[K, float] = {}
        self._expiries: list[tuple[float, int, K]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._plain) + len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks or key in self._plain

    def priority_of(self, key: K) -> int:
        """The key's priority as of the last `victims`. Raises CallerError if unknown."""
        if key not in self:
            raise unknown_key()
        return self._ranks.get(key, PRIORITY_DEFAULT)

    def on_stored(self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()) -> None:
        """Track and touch the keys of one chain, each with its retention if given."""
        if retention and len(retention) != len(keys):
            raise CallerError(f"{len(retention)} retentions for {len(keys)} keys")
        if not self._ranks and _are_plain(retention):
            self._plain.on_stored(keys, now)
            return
        for i, worth in enumerate(retention):
            self._move(keys[i], worth, now)
        for policy, some in self._by_policy(keys):
            policy.on_stored(some, now)

    def on_touched(
        self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        """Make the tracked keys the most recent, with the new retention if given."""
        if retention and len(retention) != len(keys):
            raise CallerError(f"{len(retention)} retentions for {len(keys)} keys")
        if not self._ranks and _are_plain(retention):
            self._plain.on_touched(keys, now)
            return
        if retention:
            known = [i for i, key in enumerate(keys) if key in self]
            self.on_stored([keys[i] for i in known], now, [retention[i] for i in known])
            return
        for policy, some in self._by_policy(keys):
            policy.on_touched(some, now)

    def on_removed(self, keys: Iterable[K], removal: Removal = Removal.EVICTED) -> None:
        """Forget the keys and their pins."""
        if not self._ranks:
            self._plain.on_removed(keys, removal)
            return
        for policy, some in self._by_policy(list(keys)):
            policy.on_removed(some, removal)
            for key in some:
                self._leave(key)

    def victims(self, count: int, now: float) -> list[K]:
        """Propose the next keys; expires priorities, else mutates nothing."""
        check_count(count)
        self._expire(now)
        if not self._others:
            return self._plain.victims(count, now)
        chosen: list[K] = []
        for rank in sorted({PRIORITY_DEFAULT, *self._others}):
            policy = self._others.get(rank, self._plain)
            if len(chosen) < count:
                chosen += policy.victims(count - len(chosen), now)
        return chosen

    def pin(self, key: K) -> PinToken:
        """Keep the key out of `victims`; its place in the order stays."""
        return self._policy_of(key).pin(key)

    def unpin(self, key: K, token: PinToken) -> None:
        """Undo one pin."""
        self._policy_of(key).unpin(key, token)

    def _policy_of(self, key: K) -> LruPolicy[K]:
        rank = self._ranks.get(key)
        return self._plain if rank is None else self._others[rank]

    def _by_policy(self, keys: Sequence[K]) -> list[tuple[LruPolicy[K], list[K]]]:
        """The keys by where they are tracked, each part in order."""
        parts: dict[int, list[K]] = {}
        for key in keys:
            parts.setdefault(self._ranks.get(key, PRIORITY_DEFAULT), []).append(key)
        return [(self._others.get(rank, self._plain), some) for rank, some in parts.items()]

    def _move(self, key: K, worth: Retention, now: float) -> None:
        """Have the key tracked where its new worth says, unless it is pinned."""
        rank = worth.priority
        if worth.expires_at is not None and worth.expires_at <= now:
            rank = PRIORITY_DEFAULT
        policy = self._policy_of(key)
        if key in self._pins:
            return
        if rank != self._ranks.get(key, PRIORITY_DEFAULT):
            policy.on_removed((key,))
            self._leave(key)
            if rank != PRIORITY_DEFAULT:
                self._ranks[key] = rank
                self._others.setdefault(rank, LruPolicy(pins=self._pins))
                self._tracked[rank] = self._tracked.get(rank, 0) + 1
        self._expires_at.pop(key, None)
        if rank != PRIORITY_DEFAULT and worth.expires_at is not None:
            self._expires_at[key] = worth.expires_at
            heapq.heappush(self._expiries, (worth.expires_at, next(self._numbers), key))
            self._compact()

    def _leave(self, key: K) -> None:
        """Forget a key's priority, and its policy if nothing is left in it."""
        rank = self._ranks.pop(key, None)
        self._expires_at.pop(key, None)
        if rank is not None:
            self._tracked[rank] -= 1
            if not self._tracked[rank]:
                del self._tracked[rank], self._others[rank]

    def _compact(self) -> None:
        """Drop stale deadlines once they outnumber the valid ones. O(1) amortised."""
        if len(self._expiries) > 2 * len(self._expires_at) + _SLACK:
            valid = {
                k: (due, n, k) for due, n, k in self._expiries if self._expires_at.get(k) == due
            }
            self._expiries = list(valid.values())
            heapq.heapify(self._expiries)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            due, _, key = heapq.heappop(self._expiries)
            if self._expires_at.get(key) != due:
                continue  # told otherwise since, or gone
            policy = self._policy_of(key)
            if key in self._pins:
                self._expires_at[key] = now + _LATER_S
                heapq.heappush(self._expiries, (now + _LATER_S, next(self._numbers), key))
                continue
            policy.on_removed((key,))
            self._leave(key)
            self._plain.on_stored((key,), now)


def _are_plain(retention: Sequence[Retention]) -> bool:
    """Whether all of these mean what none at all means."""
    last: Retention | None = None
    for worth in retention:
        if worth is not last and worth.priority != PRIORITY_DEFAULT:
            return False
        last = worth
    return True

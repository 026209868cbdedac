"""Eviction by priority with duration, leaves only: TensorRT-LLM's retention.

What must not live here: the mapping of token ranges to blocks (see `retention`).
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic

from kvtier.core.eviction.policy import (
    K,
    PinTable,
    PinToken,
    Removal,
    check_count,
    check_room,
    unknown_key,
)
from kvtier.core.eviction.retention import PRIORITY_DEFAULT, Retention
from kvtier.errors import CallerError

_SLACK: Final = 64
"""Stale heap entries that are always tolerated."""


@dataclass(slots=True, eq=False)
class _Node(Generic[K]):
    key: K
    parent: "_Node[K] | None"
    children: int = 0
    priority: int = PRIORITY_DEFAULT
    expires_at: float | None = None
    stamp: int = 0
    offer: int = 0
    """Number of this node's valid entry in the heap of candidates; 0: none."""
    alive: bool = True


class PriorityPolicy(Generic[K]):
    """`Policy` that offers the leaf of lowest priority, of equals the one used longest ago.

    A key is a leaf while no tracked key that was stored behind it in a chain is left, so a prefix
    is never evicted before its suffix, whatever their priorities; a key stored behind a parent that
    was dropped and came back is not tied to it again. Without `retention` a new key has priority 35
    and a touched key keeps what it has. Expired priorities fall back to 35 in the next `victims`.
    O(log n); two heaps of at most twice the tracked keys plus 64 entries.
    """

    __slots__ = ("_candidates", "_expiries", "_nodes", "_offers", "_pins", "_stamp")

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._candidates: list[tuple[int, int, int, _Node[K]]] = []  # priority, stamp, offer
        self._expiries: list[tuple[float, int, _Node[K]]] = []  # expires_at, offer number
        self._pins: PinTable[K] = PinTable()
        self._stamp = 0
        self._offers = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def priority_of(self, key: K) -> int:
        """The key's priority as of the last `victims`. Raises CallerError if unknown."""
        node = self._nodes.get(key)
        if node is None:
            raise CallerError("key is not tracked by this policy")
        return node.priority

    def on_stored(self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()) -> None:
        """Track and touch the keys of one chain, each with its retention if given."""
        check_room(len(self), len(keys))
        _check_retention(keys, retention)
        parent: _Node[K] | None = None
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                # Only a new node is tied to a parent: it has no descendants, so no cycle can be.
                node = self._nodes[key] = _Node(key, parent)
                if parent is not None:
                    parent.children += 1
                    parent.offer = 0
            parent = node
        self._use(keys, retention)

    def on_touched(
        self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        """Make the tracked keys the most recent, with the new retention if given."""
        _check_retention(keys, retention)
        self._use(keys, retention)

    def on_removed(self, keys: Iterable[K], removal: Removal = Removal.EVICTED) -> None:
        """Forget the keys and their pins; parents left without children become candidates."""
        for key in keys:
            node = self._nodes.pop(key, None)
            if node is None:
                continue
            node.alive = False
            node.offer = 0
            self._pins.forget(key)
            if node.parent is not None:
                node.parent.children -= 1
                self._offer(node.parent)
                node.parent = None
        self._compact()

    def victims(self, count: int, now: float) -> list[K]:
        """Propose leaves, and what becomes a leaf once those are gone; expires priorities."""
        check_count(count)
        self._expire(now)
        chosen: list[_Node[K]] = []
        while len(chosen) < count and self._candidates:
            _, _, offer, node = heapq.heappop(self._candidates)
            if node.offer != offer:
                continue
            node.offer = 0
            chosen.append(node)
            if node.parent is not None:
                node.parent.children -= 1
                self._offer(node.parent)
        for node in chosen:  # nothing was removed: take the supposition back
            if node.parent is not None:
                node.parent.children += 1
                node.parent.offer = 0
        for node in chosen:
            self._offer(node)
        self._compact()
        return [node.key for node in chosen]

    def pin(self, key: K) -> PinToken:
        """Keep the key, and so all keys before it in its chain, out of `victims`."""
        node = self._nodes.get(key)
        if node is None:
            raise unknown_key()
        node.offer = 0
        return self._pins.pin(key)

    def unpin(self, key: K, token: PinToken) -> None:
        """Undo one pin; the key is where its priority and last use put it."""
        if self._pins.unpin(key, token):
            self._offer(self._nodes[key])
            self._compact()

    def _use(self, keys: Sequence[K], retention: Sequence[Retention]) -> None:
        for i in range(len(keys) - 1, -1, -1):
            node = self._nodes.get(keys[i])
            if node is None:
                continue
            self._stamp += 1
            node.stamp = self._stamp
            if retention:
                node.priority = retention[i].priority
                self._set_expiry(node, retention[i].expires_at)
            self._offer(node)
        self._compact()

    def _offer(self, node: _Node[K]) -> None:
        """Make the node a candidate with its present rank, if it may go at all."""
        if not node.alive or node.children or node.key in self._pins:
            node.offer = 0
            return
        self._offers += 1
        node.offer = self._offers
        heapq.heappush(self._candidates, (node.priority, node.stamp, node.offer, node))

    def _set_expiry(self, node: _Node[K], expires_at: float | None) -> None:
        node.expires_at = expires_at
        if expires_at is not None:
            self._offers += 1
            heapq.heappush(self._expiries, (expires_at, self._offers, node))

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, _, node = heapq.heappop(self._expiries)
            if node.alive and node.expires_at == expires_at:
                node.priority = PRIORITY_DEFAULT
                node.expires_at = None
                self._offer(node)

    def _compact(self) -> None:
        """Drop stale heap entries once they outnumber the tracked keys. O(1) amortised."""
        ceiling = 2 * len(self._nodes) + _SLACK
        if len(self._candidates) > ceiling:
            self._candidates = [e for e in self._candidates if e[3].offer == e[2]]
            heapq.heapify(self._candidates)
        if len(self._expiries) > ceiling:
            valid = {id(e[2]): e for e in self._expiries if e[2].alive and e[2].expires_at == e[0]}
            self._expiries = list(valid.values())
            heapq.heapify(self._expiries)


def _check_retention(keys: Sequence[K], retention: Sequence[Retention]) -> None:
    if retention and len(retention) != len(keys):
        raise CallerError(f"{len(retention)} retentions for {len(keys)} keys")

"""Which blocks of L1 are used most: what a worker that ends writes first, and leaves a list of.

Uses are counted at the end of a chain and fade; a block's heat is the sum of all that lies behind
it, so a prefix is never colder than what follows it. What must not live here: bytes, the store,
clocks (`now` is an argument).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.limits import HOT_SET_NODES_MAX
from kvtier.types import PrefixKey, ScopeId

HALF_LIFE_S: Final = 600.0
"""A use of ten minutes ago counts for half."""
NO_BLOCK_BEFORE: Final = -1


@dataclass(frozen=True, slots=True)
class HotBlock:
    """One block that is worth bringing back."""

    key: PrefixKey
    parent: int
    """Where the block before it stands in the same hot set; NO_BLOCK_BEFORE: it begins a chain."""
    scope: ScopeId
    """On whose behalf it is kept."""
    heat: float


HotSet = tuple[HotBlock, ...]
"""Hottest first, each behind its parent: every first part of one is a hot set."""


@dataclass(slots=True)
class _Node:
    parent: PrefixKey | None
    scope: ScopeId
    weight: float
    at: float
    """When `weight` was what it says."""

    def add(self, weight: float, now: float) -> None:
        self.weight = self.worth(now) + weight
        self.at = now

    def worth(self, now: float) -> float:
        return self.weight * float(0.5 ** ((now - self.at) / HALF_LIFE_S))


class HeatBook:
    """Chains of blocks that requests ended with. Not thread-safe; the engine's thread owns it.

    It knows as many blocks as L1 has, and at most HOT_SET_NODES_MAX: further chains are not noted
    until some go.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[PrefixKey, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def used(self, keys: Sequence[PrefixKey], scope: ScopeId, now: float) -> None:
        """Count one use of a chain whose blocks are all in L1, head first. Mutates. O(keys)."""
        nodes = self._nodes
        parent: PrefixKey | None = None
        for key in keys:
            if key not in nodes:
                if len(nodes) >= HOT_SET_NODES_MAX:
                    break
                nodes[key] = _Node(parent, scope, 0.0, now)
            parent = key
        if parent is not None:
            nodes[parent].add(1.0, now)

    def evicted(self, key: PrefixKey, now: float) -> None:
        """A block left L1: its uses count for the block before it. Mutates; ignores others. O(1)"""
        node = self._nodes.pop(key, None)
        if node is None or node.parent is None:
            return
        before = self._nodes.get(node.parent)
        if before is not None:
            before.add(node.worth(now), now)

    def hottest(self, count_max: int, now: float, is_there: Callable[[PrefixKey], bool]) -> HotSet:
        """The hottest blocks that are there behind all blocks before them. Mutates nothing.

        O(n log n) of the blocks that are known: tens of milliseconds for as many thousands.
        """
        heats, heads_first = self._summed(now)
        depths: dict[PrefixKey, int] = {}
        for key in heads_first:
            before = self._nodes[key].parent
            if is_there(key) and (before is None or before in depths):
                depths[key] = 0 if before is None else depths[before] + 1
        ordered = sorted(depths, key=lambda key: (-heats[key], depths[key]))[:count_max]
        places = {key: at for at, key in enumerate(ordered)}
        hot = []
        for key in ordered:
            node = self._nodes[key]
            parent = NO_BLOCK_BEFORE if node.parent is None else places[node.parent]
            hot.append(HotBlock(key, parent, node.scope, heats[key]))
        return tuple(hot)

    def _summed(self, now: float) -> tuple[dict[PrefixKey, float], list[PrefixKey]]:
        """Heat of each block, and all of them, each behind its parent."""
        nodes = self._nodes
        heats = {key: node.worth(now) for key, node in nodes.items()}
        behind = dict.fromkeys(nodes, 0)
        for node in nodes.values():
            if node.parent is not None and node.parent in behind:
                behind[node.parent] += 1
        tails = [key for key, count in behind.items() if not count]
        tails_first = []
        while tails:
            key = tails.pop()
            tails_first.append(key)
            parent = nodes[key].parent
            if parent is not None and parent in behind:
                heats[parent] += heats[key]
                behind[parent] -= 1
                if not behind[parent]:
                    tails.append(parent)
        return heats, tails_first[::-1]

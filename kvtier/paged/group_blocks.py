"""The blocks of one layer group: who refers to them, which are cached, which go next.

A block is in one of three states:

    free     no references, no key: its bytes mean nothing
    in use   one reference or more (sequences and holds), with a key or without
    idle     no references, but a key: a cached prefix that may be evicted

What must not live here: sequences and tables (blocks.py), bytes, clocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from kvtier.core.eviction import PinToken, Policy, Removal, Retention
from kvtier.types import PrefixKey

BlockId = NewType("BlockId", int)
"""Number of a block in its group's part of the pool."""

NO_BLOCK = BlockId(-1)
"""In a table: no block here (a sliding window has left it, or it was never needed)."""


class ChangeKind(Enum):
    STORED = "stored"
    """A key became resident: its block is sealed."""
    EVICTED = "evicted"
    """A key left: its block holds, or will hold, something else."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to one key of one group. `parent` is the key before it, None at a chain's
    start, where it is not known, and of evictions."""

    kind: ChangeKind
    group: int
    key: PrefixKey
    block: BlockId
    parent: PrefixKey | None = None


class GroupBlocks:
    """References, keys and eviction of one group's blocks. O(1) a block but for the policy's part.

    Keys are told to the policy when they are stored; a key whose block is in use is pinned, so that
    what the policy knows of its history is not lost. Not thread-safe.
    """

    __slots__ = ("_cached", "_changes", "_free", "_group", "_idle", "_keys", "_pins", "_policy",
                 "_refs", "blocks_count")  # fmt: skip

    def __init__(
        self, group: int, blocks_count: int, policy: Policy[PrefixKey], changes: list[Change]
    ) -> None:
        """`changes` is the list that this appends to; its owner drains it."""
        self.blocks_count = blocks_count
        self._group = group
        self._policy = policy
        self._changes = changes
        self._refs = [0] * blocks_count
        self._keys: list[PrefixKey | None] = [None] * blocks_count
        self._pins: dict[BlockId, PinToken] = {}
        self._cached: dict[PrefixKey, BlockId] = {}
        self._free = [BlockId(block) for block in range(blocks_count - 1, -1, -1)]
        self._idle = 0

    @property
    def free_count(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def idle_count(self) -> int:
        """Cached blocks that nobody uses."""
        return self._idle

    @property
    def available_count(self) -> int:
        """Blocks that `take` can give: free ones and idle ones."""
        return len(self._free) + self._idle

    def __contains__(self, key: object) -> bool:
        return key in self._cached

    def find(self, key: PrefixKey) -> BlockId | None:
        """The block that holds a key, None where it is not cached. Mutates nothing."""
        return self._cached.get(key)

    def cached_keys(self) -> list[PrefixKey]:
        """All cached keys, in the order in which they were stored."""
        return list(self._cached)

    def in_use(self, block: int) -> bool:
        """Whether the number is a block with references."""
        return 0 <= block < self.blocks_count and self._refs[block] > 0

    def is_shared(self, block: BlockId) -> bool:
        """Whether writing into the block would be seen by more than one owner, or by the cache."""
        return self._refs[block] > 1 or self._keys[block] is not None

    def take(self, count: int, now: float) -> list[BlockId]:
        """`count` blocks with one reference each; evicts idle ones where too few are free.

        The caller has made sure that `available_count` suffices.
        """
        if count > len(self._free):
            self._evict(count - len(self._free), now)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def ref(self, block: BlockId) -> None:
        """One reference more to a block that is in use or idle."""
        key = self._keys[block]
        if self._refs[block] == 0:
            assert key is not None, "a free block is referred to"
            self._idle -= 1
            self._pins[block] = self._policy.pin(key)
        self._refs[block] += 1

    def unref(self, block: BlockId) -> None:
        """One reference less; the last makes the block idle, or free where it has no key."""
        assert self._refs[block] > 0, "more references dropped than taken"
        self._refs[block] -= 1
        if self._refs[block]:
            return
        key = self._keys[block]
        if key is None:
            self._free.append(block)
            return
        self._policy.unpin(key, self._pins.pop(block))
        self._idle += 1

    def touch(self, keys: Sequence[PrefixKey], now: float, worth: Sequence[Retention]) -> None:
        """Count one use of each cached key of a chain, head first."""
        self._policy.on_touched(keys, now, worth)

    def publish(
        self, chain: Sequence[tuple[PrefixKey, BlockId]], now: float, worth: Sequence[Retention]
    ) -> None:
        """Give consecutive blocks of a chain, which are in use, their keys; `worth` one each or ().

        A first entry that is cached already is the parent of what follows. Others that are cached
        in another block, or whose block has its key, stay as they are: the first copy is kept.
        """
        if not chain:
            return
        self._policy.on_stored([key for key, _ in chain], now, worth)
        parent: PrefixKey | None = None
        for key, block in chain:
            if key not in self._cached and self._keys[block] is None:
                self._cached[key] = block
                self._keys[block] = key
                self._pins[block] = self._policy.pin(key)
                self._changes.append(Change(ChangeKind.STORED, self._group, key, block, parent))
            parent = key

    def forget(self, keys: Iterable[PrefixKey]) -> None:
        """Take keys out of the cache; blocks in use stay with their owners, idle ones are free."""
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                continue
            self._unpublish(key, block, Removal.DROPPED)
            if self._refs[block] == 0:
                self._idle -= 1
                self._free.append(block)

    def coldest(self, count: int, now: float) -> list[tuple[PrefixKey, BlockId]]:
        """Up to `count` idle keys that would go first, with their blocks. Evicts nothing."""
        return [(key, self._cached[key]) for key in self._policy.victims(count, now)]

    def _evict(self, count: int, now: float) -> None:
        while count > 0:
            victims = self._policy.victims(count, now) or self._any_idle(count)
            for key in victims:
                block = self._cached[key]
                self._unpublish(key, block, Removal.EVICTED)
                self._idle -= 1
                self._free.append(block)
            count -= len(victims)

    def _any_idle(self, count: int) -> list[PrefixKey]:
        """For policies that offer only leaves, where a window keeps just the leaf in use."""
        idle = [key for key, block in self._cached.items() if self._refs[block] == 0]
        assert idle, "the caller asked for more blocks than are available"
        return idle[:count]

    def _unpublish(self, key: PrefixKey, block: BlockId, removal: Removal) -> None:
        del self._cached[key]
        self._keys[block] = None
        self._pins.pop(block, None)
        self._policy.on_removed([key], removal)
        self._changes.append(Change(ChangeKind.EVICTED, self._group, key, block))

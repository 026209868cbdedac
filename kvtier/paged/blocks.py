"""Which block holds which tokens of which sequence: tables, prefix cache, copy-on-write.

    admit     a sequence starts with the longest cached prefix
    grow      it gets blocks for the tokens of its next step; copies what it would share and write
    adopt     it gets blocks whose bytes come from elsewhere (L2) instead of a step
    seal      tokens were computed (or loaded): full blocks get their keys, left windows are freed
    fork      another sequence goes on from the same tokens
    release   it is over, or preempted: its sealed blocks stay cached, tail first to go

A request's cycle is admit, [adopt, load, seal], (grow, step, seal)*, release. Ideas: reference
counts and copy-on-write from PagedAttention (arXiv 2309.06180), full blocks only and tail-first
frees from vLLM's block pool, groups of layers with a window each from its hybrid cache manager.

What must not live here: torch, bytes, clocks (`now` is an argument), which request runs next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier.core.eviction import LruPolicy, Policy, Retention
from kvtier.errors import CallerError
from kvtier.limits import SLOTS_COUNT_MAX
from kvtier.paged.geometry import KvGeometry, window_start
from kvtier.paged.group_blocks import NO_BLOCK, BlockId, Change, GroupBlocks
from kvtier.types import PrefixKey

SequenceId: TypeAlias = str

PolicyFactory: TypeAlias = Callable[[], Policy[PrefixKey]]
"""Makes the eviction policy of one group."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Bytes that must be copied inside the pool before the next step writes."""

    group: int
    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class Growth:
    """What `grow` gave. Copies must be made before the step, those of earlier grows first."""

    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Adoption:
    """Blocks to be filled from elsewhere: for each group, (number of the block in the sequence,
    block id), ascending. A group with a window may need fewer than the full ones."""

    blocks: tuple[tuple[tuple[int, BlockId], ...], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """One group's blocks now: blocks_count = free + idle + in_use."""

    blocks_count: int
    free_count: int
    idle_count: int
    in_use_count: int


@dataclass(slots=True)
class _Sequence:
    tables: list[list[BlockId]]
    computed: int
    """Tokens from the start whose KV is in the tables (where a window has not left them)."""
    sealed: int
    """Blocks from the start that `seal` has looked at."""
    left: list[int]
    """For each group: blocks from the start that its window has left."""
    keys: list[PrefixKey] = field(default_factory=list)
    worth: Sequence[Retention] = ()
    holes: bool = False
    """An adoption skipped blocks that a window would need if the load failed."""


_NOTHING = Growth()


class BlockManager:
    """Tables, references and the prefix cache of one pool. Not thread-safe.

    Every call changes all that it names or nothing. CallerError for unknown or known-twice
    sequences and counts that contradict each other. Work is O(blocks touched); a decode step of a
    sequence that needs no new block is O(groups).
    """

    __slots__ = ("_changes", "_geometry", "_groups", "_sequences", "_windows")

    def __init__(
        self,
        geometry: KvGeometry,
        blocks_counts: Sequence[int],
        policy: PolicyFactory = LruPolicy,
    ) -> None:
        """`blocks_counts[g]` is how many blocks group g has in the pool."""
        if len(blocks_counts) != len(geometry.groups):
            raise CallerError(f"{len(blocks_counts)} counts for {len(geometry.groups)} groups")
        for count in blocks_counts:
            if not 1 <= count <= SLOTS_COUNT_MAX:
                raise CallerError(f"a group of {count} blocks, must be 1 to {SLOTS_COUNT_MAX}")
        self._geometry = geometry
        self._windows = [group.window for group in geometry.groups]
        self._changes: list[Change] = []
        self._groups = [
            GroupBlocks(index, count, policy(), self._changes)
            for index, count in enumerate(blocks_counts)
        ]
        self._sequences: dict[SequenceId, _Sequence] = {}

    # ---- looking

    @property
    def geometry(self) -> KvGeometry:
        return self._geometry

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._sequences

    def usage(self, group: int = 0) -> Usage:
        """How one group's blocks are used. O(1)."""
        blocks = self._groups[group]
        idle, free = blocks.idle_count, blocks.free_count
        return Usage(blocks.blocks_count, free, idle, blocks.blocks_count - free - idle)

    def unfilled_tokens(self) -> int:
        """Token places in tables of group 0 that hold nothing yet: the memory that is wasted."""
        block_tokens = self._geometry.block_tokens
        return sum(len(s.tables[0]) * block_tokens - s.computed for s in self._sequences.values())

    def computed_tokens(self, sequence_id: SequenceId) -> int:
        """Tokens of a sequence that have KV."""
        return self._of(sequence_id).computed

    def tables(self, sequence_id: SequenceId) -> list[list[BlockId]]:
        """For each group the sequence's block ids from position 0 on, NO_BLOCK where there is none.

        The manager's own lists: valid until the next call that changes the sequence; not to be
        written.
        """
        return self._of(sequence_id).tables

    def match(self, keys: Sequence[PrefixKey]) -> int:
        """Longest cached prefix of a chain, in blocks. Mutates nothing. O(result).

        Full attention needs each of the blocks, a window only the last that it can still read.
        """
        full = [g for g, window in zip(self._groups, self._windows, strict=True) if window is None]
        limit = len(keys)
        for blocks in full:
            limit = next((i for i in range(limit) if keys[i] not in blocks), limit)
        windowed = [g for g, window in enumerate(self._windows) if window is not None]
        return self._match_windows(keys, limit, windowed) if windowed else limit

    def _match_windows(self, keys: Sequence[PrefixKey], limit: int, groups: list[int]) -> int:
        block_tokens = self._geometry.block_tokens
        best = 0
        runs = [0] * len(groups)  # start of the unbroken run of cached blocks that ends here
        for i in range(limit):
            fits = True
            for at, group in enumerate(groups):
                if keys[i] not in self._groups[group]:
                    runs[at] = i + 1
                start = window_start((i + 1) * block_tokens, self._windows[group], block_tokens)
                fits = fits and runs[at] <= min(start, i + 1)
            if fits:
                best = i + 1
        return best

    def find(self, key: PrefixKey, group: int = 0) -> BlockId | None:
        """The block that holds a key, None where it is not cached."""
        return self._groups[group].find(key)

    def cached_keys(self, group: int = 0) -> list[PrefixKey]:
        """All cached keys of a group, oldest stored first."""
        return self._groups[group].cached_keys()

    # ---- a sequence's life

    def admit(
        self,
        sequence_id: SequenceId,
        keys: Sequence[PrefixKey],
        now: float,
        retention: Sequence[Retention] = (),
    ) -> int:
        """Start a sequence on the longest cached prefix of `keys`; returns its tokens.

        The caller leaves out keys that must be computed all the same: at least that of the prompt's
        last token, whose logits are wanted (`keys[: (prompt_tokens - 1) // block_tokens]`).
        `retention` is empty or one entry for each block that the sequence may ever have; it counts
        for hits and for what is sealed later. Takes no free block: it cannot fail for want of room.
        """
        if sequence_id in self._sequences:
            raise CallerError("sequence is admitted already")
        hit = self.match(keys)
        block_tokens = self._geometry.block_tokens
        computed = hit * block_tokens
        tables: list[list[BlockId]] = []
        left: list[int] = []
        for blocks, window in zip(self._groups, self._windows, strict=True):
            start = window_start(computed, window, block_tokens)
            table = [NO_BLOCK] * start
            for key in keys[start:hit]:
                block = blocks.find(key)
                assert block is not None, "match said that it is cached"
                blocks.ref(block)
                table.append(block)
            blocks.touch(keys[start:hit], now, _part(retention, start, hit))
            tables.append(table)
            left.append(start)
        self._sequences[sequence_id] = _Sequence(
            tables, computed, hit, left, list(keys[:hit]), retention
        )
        return computed

    def grow(self, sequence_id: SequenceId, tokens_count: int, now: float) -> Growth | None:
        """Give the sequence blocks so that tokens [computed, tokens_count) can be written.

        None: the pool has too few blocks even if all idle ones go; nothing has changed, release
        something. Otherwise idle blocks may have been evicted (see `drain_changes`), and blocks
        that would be written but are shared have been replaced by copies to be made.
        """
        sequence = self._of(sequence_id)
        if tokens_count < sequence.computed:
            raise CallerError(f"{tokens_count} tokens, {sequence.computed} are computed already")
        needs = [self._needs(sequence, group, tokens_count) for group in range(len(self._groups))]
        if not self._have(needs):
            return None
        if not any(needs):
            return _NOTHING
        copies: list[BlockCopy] = []
        for group, places in enumerate(needs):
            self._fill(sequence, group, places, now, copies)
        reach = max(len(table) for table in sequence.tables) * self._geometry.block_tokens
        sequence.holes = sequence.holes and tokens_count < reach
        return Growth(tuple(copies)) if copies else _NOTHING

    def adopt(self, sequence_id: SequenceId, blocks_count: int, now: float) -> Adoption | None:
        """Give the sequence blocks for its next `blocks_count` blocks, to be filled from elsewhere.

        The sequence is at a block's border (just admitted). Then load the bytes into the blocks and
        `seal` what arrived as computed; what did not arrive is computed in the same blocks after
        `grow`. Where there are windows, blocks that would have left them by then are not asked
        for: there a load that ended early cannot be sealed in part (`seal` refuses), only computed
        anew. None: too few blocks, nothing has changed.
        """
        sequence = self._of(sequence_id)
        block_tokens = self._geometry.block_tokens
        if sequence.computed % block_tokens or blocks_count < 1:
            raise CallerError(f"{blocks_count} blocks cannot follow {sequence.computed} tokens")
        first = sequence.computed // block_tokens
        stop = first + blocks_count
        places: list[list[int]] = []
        for group, window in enumerate(self._windows):
            start = max(first, window_start(stop * block_tokens, window, block_tokens))
            table = sequence.tables[group]
            places.append([i for i in range(start, stop) if _at(table, i) == NO_BLOCK])
        if not self._have(places):
            return None
        for group, wanted in enumerate(places):
            self._fill(sequence, group, wanted, now, [])
            table = sequence.tables[group]
            table.extend([NO_BLOCK] * (stop - len(table)))
        sequence.holes = any(window is not None for window in self._windows)
        return Adoption(
            tuple(
                tuple((i, block) for i, block in enumerate(table) if i >= first and block >= 0)
                for table in sequence.tables
            )
        )

    def seal(
        self,
        sequence_id: SequenceId,
        computed_tokens: int,
        keys: Sequence[PrefixKey],
        now: float,
    ) -> None:
        """Tokens [0, computed_tokens) have KV now: cache full blocks, free what windows have left.

        `keys` are the sequence's keys from block 0 on; those of blocks that are not full yet are
        ignored, and full blocks without a key are not cached (pass none to keep a request out of
        the cache). A key that is cached in another block keeps that one: this block stays the
        sequence's own and is free after it.
        """
        sequence = self._of(sequence_id)
        block_tokens = self._geometry.block_tokens
        room = len(sequence.tables[0]) * block_tokens
        if not sequence.computed <= computed_tokens <= room:
            raise CallerError(
                f"{computed_tokens} computed tokens, outside {sequence.computed} .. {room}"
            )
        if sequence.holes:
            self._refuse_holes(sequence, computed_tokens)
        sequence.computed = computed_tokens
        stop = min(computed_tokens // block_tokens, len(keys))
        if stop > sequence.sealed:
            start, sequence.sealed = sequence.sealed, stop
            sequence.keys.extend(keys[len(sequence.keys) : stop])
            for group in range(len(self._groups)):
                self._publish(sequence, group, start, now)
        for group, window in enumerate(self._windows):
            if window is not None:
                self._leave(sequence, group, window_start(computed_tokens, window, block_tokens))

    def fork(self, parent_id: SequenceId, child_id: SequenceId) -> None:
        """Start a sequence that shares all tokens of another; either copies before it writes."""
        parent = self._of(parent_id)
        if child_id in self._sequences:
            raise CallerError("sequence is admitted already")
        for blocks, table in zip(self._groups, parent.tables, strict=True):
            for block in table:
                if block != NO_BLOCK:
                    blocks.ref(block)
        self._sequences[child_id] = _Sequence(
            [list(table) for table in parent.tables],
            parent.computed,
            parent.sealed,
            list(parent.left),
            list(parent.keys),
            parent.worth,
            parent.holes,
        )

    def release(self, sequence_id: SequenceId, now: float) -> None:
        """End a sequence: its sealed blocks become idle, tails first to go, the rest is free."""
        sequence = self._of(sequence_id)
        del self._sequences[sequence_id]
        for blocks, table, left in zip(self._groups, sequence.tables, sequence.left, strict=True):
            keys = sequence.keys[left:]
            blocks.touch(keys, now, _part(sequence.worth, left, left + len(keys)))
            for block in reversed(table):
                if block != NO_BLOCK:
                    blocks.unref(block)

    # ---- the cache's other users

    def hold(self, key: PrefixKey, group: int = 0) -> BlockId | None:
        """Keep a cached key's block, e.g. while it is written to L2; None where it is not cached.

        The block is neither evicted nor written until as many `drop`s.
        """
        block = self._groups[group].find(key)
        if block is not None:
            self._groups[group].ref(block)
        return block

    def drop(self, block: BlockId, group: int = 0) -> None:
        """Undo one `hold`. Raises CallerError for what is no block, or not in use."""
        if not self._groups[group].in_use(block):
            raise CallerError(f"block {block} is not held")
        self._groups[group].unref(block)

    def coldest(self, count: int, now: float, group: int = 0) -> list[tuple[PrefixKey, BlockId]]:
        """Up to `count` idle keys that would be evicted next. Evicts nothing.

        For offload before eviction: `hold` them, write them, `drop` them; they stay cached until
        their room is needed.
        """
        return self._groups[group].coldest(count, now)

    def forget(self, keys: Sequence[PrefixKey]) -> None:
        """Take keys out of the cache, e.g. when their bytes are in doubt; ignores unknown ones."""
        for blocks in self._groups:
            blocks.forget(keys)

    def clear(self) -> None:
        """Take all keys out of the cache; running sequences keep their blocks."""
        for blocks in self._groups:
            blocks.forget(blocks.cached_keys())

    def drain_changes(self) -> list[Change]:
        """What was stored and evicted since the last call, in order; for events and offload.

        A block of a STORED change that is wanted later must be held before the next `grow`.
        """
        drained = self._changes[:]
        self._changes.clear()
        return drained

    # ---- parts

    def _of(self, sequence_id: SequenceId) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise CallerError("sequence is not admitted")
        return sequence

    def _needs(self, sequence: _Sequence, group: int, tokens_count: int) -> list[int]:
        """Places of the table that need a block of their own before tokens up to the count."""
        block_tokens = self._geometry.block_tokens
        table = sequence.tables[group]
        stop = -(-tokens_count // block_tokens)
        start = len(table)
        if sequence.holes:
            start = window_start(sequence.computed, self._windows[group], block_tokens)
        needs = [i for i in range(start, stop) if _at(table, i) == NO_BLOCK]
        blocks = self._groups[group]
        written = range(sequence.computed // block_tokens, min(stop, len(table)))
        shared = [i for i in written if table[i] != NO_BLOCK and blocks.is_shared(table[i])]
        return sorted({*needs, *shared}) if shared else needs

    def _have(self, needs: Sequence[Sequence[int]]) -> bool:
        return all(
            len(places) <= blocks.available_count
            for places, blocks in zip(needs, self._groups, strict=True)
        )

    def _fill(
        self,
        sequence: _Sequence,
        group: int,
        places: Sequence[int],
        now: float,
        copies: list[BlockCopy],
    ) -> None:
        """Put fresh blocks at places of a table, extending it; what stood there is to be copied."""
        if not places:
            return
        blocks, table = self._groups[group], sequence.tables[group]
        table.extend([NO_BLOCK] * (places[-1] + 1 - len(table)))
        for place, block in zip(places, blocks.take(len(places), now), strict=True):
            shared, table[place] = table[place], block
            if shared != NO_BLOCK:
                copies.append(BlockCopy(group, shared, block))
                blocks.unref(shared)

    def _publish(self, sequence: _Sequence, group: int, start: int, now: float) -> None:
        blocks, table, keys = self._groups[group], sequence.tables[group], sequence.keys
        while start < sequence.sealed and _at(table, start) == NO_BLOCK:
            start += 1
        if start > 0 and keys[start - 1] in blocks and table[start - 1] != NO_BLOCK:
            start -= 1  # ties the chain for policies that know parents
        chain = [(keys[i], table[i]) for i in range(start, sequence.sealed)]
        blocks.publish(chain, now, _part(sequence.worth, start, sequence.sealed))

    def _refuse_holes(self, sequence: _Sequence, computed_tokens: int) -> None:
        block_tokens = self._geometry.block_tokens
        for table, window in zip(sequence.tables, self._windows, strict=True):
            start = window_start(computed_tokens, window, block_tokens)
            if NO_BLOCK in table[start : -(-computed_tokens // block_tokens)]:
                raise CallerError(f"a window's blocks before {computed_tokens} tokens have no KV")

    def _leave(self, sequence: _Sequence, group: int, start: int) -> None:
        """Free the blocks before `start`: no later query of this sequence reads them."""
        blocks, table = self._groups[group], sequence.tables[group]
        for i in range(sequence.left[group], min(start, len(table))):
            if table[i] != NO_BLOCK:
                blocks.unref(table[i])
                table[i] = NO_BLOCK
        sequence.left[group] = max(sequence.left[group], min(start, len(table)))


def _at(table: Sequence[BlockId], place: int) -> BlockId:
    return table[place] if place < len(table) else NO_BLOCK


def _part(worth: Sequence[Retention], start: int, stop: int) -> Sequence[Retention]:
    """The retention of blocks [start, stop): one each, or none for all."""
    if not worth:
        return ()
    missing = stop - max(start, len(worth))
    return [*worth[start:stop], *[worth[-1]] * missing]

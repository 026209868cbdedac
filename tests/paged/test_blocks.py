"""BlockManager: examples, and random schedules against a naive twin that keeps the tokens."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.eviction import (
    LruPolicy,
    Policy,
    PriorityPolicy,
    Retention,
    S3FifoConfig,
    S3FifoPolicy,
)
from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.blocks import BlockManager, Growth
from kvtier.paged.geometry import KvGeometry, LayerGroup, window_start
from kvtier.paged.group_blocks import NO_BLOCK, BlockId, ChangeKind
from kvtier.types import PrefixKey

BLOCK = 4


def geometry(*windows: int | None) -> KvGeometry:
    groups = tuple(LayerGroup((layer,), window) for layer, window in enumerate(windows))
    return KvGeometry(len(windows), 1, 8, KvDtype.FLOAT32, BLOCK, groups)


def manager(blocks_count: int = 8, *windows: int | None) -> BlockManager:
    shape = geometry(*(windows or (None,)))
    return BlockManager(shape, [blocks_count] * len(shape.groups))


def keys_of(tokens: Sequence[int]) -> list[PrefixKey]:
    return [
        PrefixKey(hashlib.sha256(repr(list(tokens[: end + BLOCK])).encode()).digest())
        for end in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]


def run(blocks: BlockManager, name: str, tokens: Sequence[int], now: float = 0) -> int:
    """Admit, compute all tokens in one step, release; returns the cached tokens."""
    keys = keys_of(tokens)
    hit = blocks.admit(name, keys[: (len(tokens) - 1) // BLOCK], now)
    assert blocks.grow(name, len(tokens), now) is not None
    blocks.seal(name, len(tokens), keys, now)
    blocks.release(name, now)
    return hit


def test_a_second_request_starts_on_the_blocks_of_the_first() -> None:
    blocks = manager()
    assert run(blocks, "a", range(10)) == 0
    assert run(blocks, "b", range(10)) == 8
    assert blocks.match(keys_of(range(10))) == 2
    assert blocks.usage().idle_count == 2


def test_the_block_of_the_last_prompt_token_is_computed_even_where_all_is_cached() -> None:
    blocks = manager()
    run(blocks, "a", range(8))
    assert run(blocks, "b", range(8)) == 4


def test_sharing_sequences_hold_one_copy_of_the_prefix() -> None:
    blocks = manager()
    run(blocks, "a", range(8))
    for name in "bc":
        blocks.admit(name, keys_of(range(8)), 0)
        blocks.grow(name, 9, 0)
    assert blocks.tables("b")[0][:2] == blocks.tables("c")[0][:2]
    assert blocks.usage().in_use_count == 4


def test_of_a_finished_request_the_tail_is_evicted_first() -> None:
    blocks = manager(4)
    run(blocks, "a", range(12))
    run(blocks, "b", range(100, 107))
    assert blocks.match(keys_of(range(12))) == 2


def test_a_full_pool_changes_nothing() -> None:
    blocks = manager(4)
    blocks.admit("a", [], 0)
    assert blocks.grow("a", 12, 0) == Growth()
    blocks.admit("b", [], 0)
    assert blocks.grow("b", 5, 0) is None
    assert blocks.tables("b") == [[]]
    assert blocks.grow("b", 4, 0) == Growth()


def test_a_fork_copies_the_unfinished_block_before_it_writes() -> None:
    blocks = manager()
    blocks.admit("a", [], 0)
    blocks.grow("a", 6, 0)
    blocks.seal("a", 6, keys_of(range(6)), 0)
    blocks.fork("a", "b")
    growth = blocks.grow("b", 7, 0)
    assert growth is not None
    (copy,) = growth.copies
    assert copy.source == blocks.tables("a")[0][1]
    assert copy.target == blocks.tables("b")[0][1]
    assert blocks.grow("a", 7, 0) == Growth()
    assert blocks.tables("a")[0][0] == blocks.tables("b")[0][0]


def test_an_adopted_block_is_published_when_it_is_sealed() -> None:
    blocks = manager()
    keys = keys_of(range(12))
    blocks.admit("a", keys, 0)
    adoption = blocks.adopt("a", 2, 0)
    assert adoption is not None
    assert [place for place, _ in adoption.blocks[0]] == [0, 1]
    assert blocks.match(keys) == 0
    blocks.seal("a", 8, keys, 0)
    assert blocks.match(keys) == 2


def test_adopted_blocks_whose_load_failed_are_computed_in_place() -> None:
    blocks = manager()
    keys = keys_of(range(12))
    blocks.admit("a", keys, 0)
    blocks.adopt("a", 2, 0)
    blocks.seal("a", 4, keys, 0)
    before = list(blocks.tables("a")[0])
    assert blocks.grow("a", 10, 0) == Growth()
    assert blocks.tables("a")[0][:2] == before


def test_a_window_frees_the_blocks_that_it_has_left() -> None:
    blocks = manager(8, 6)
    blocks.admit("a", [], 0)
    blocks.grow("a", 16, 0)
    blocks.seal("a", 16, [], 0)
    assert [block == NO_BLOCK for block in blocks.tables("a")[0]] == [True, True, False, False]
    assert blocks.usage().free_count == 6


def test_a_hit_of_a_window_needs_only_the_last_blocks() -> None:
    blocks = manager(8, None, 6)
    run(blocks, "a", range(16))
    keys = keys_of(range(16))
    windowed = [key for key in keys if blocks.find(key, 1) is not None]
    blocks.forget([])
    assert blocks.match(keys) == 4
    assert len(windowed) == 4
    first, second = blocks.hold(keys[0], 1), blocks.hold(keys[1], 1)
    assert first is not None
    assert second is not None
    blocks.admit("b", keys, 0)
    assert blocks.tables("b")[1][:2] == [NO_BLOCK, NO_BLOCK]


def test_a_window_does_not_adopt_what_it_will_have_left() -> None:
    blocks = manager(8, None, 6)
    keys = keys_of(range(16))
    blocks.admit("a", keys, 0)
    adoption = blocks.adopt("a", 4, 0)
    assert adoption is not None
    assert [[place for place, _ in group] for group in adoption.blocks] == [[0, 1, 2, 3], [2, 3]]
    with pytest.raises(CallerError, match="no KV"):
        blocks.seal("a", 12, keys, 0)
    blocks.seal("a", 16, keys, 0)
    assert blocks.match(keys) == 4


def test_holes_of_a_load_that_failed_are_filled_chunk_by_chunk() -> None:
    blocks = manager(16, None, 5)
    blocks.admit("a", [], 0)
    assert blocks.adopt("a", 6, 0) is not None
    for tokens_count in range(3, 25, 3):
        assert blocks.grow("a", tokens_count, 0) is not None
        stop = -(-tokens_count // BLOCK)
        for table, window in zip(blocks.tables("a"), (None, 5), strict=True):
            start = window_start(tokens_count - 3, window, BLOCK)
            assert NO_BLOCK not in table[start:stop]
        blocks.seal("a", tokens_count, [], 0)


def test_a_held_block_survives_the_pressure_on_the_pool() -> None:
    blocks = manager(4)
    run(blocks, "a", range(12))
    (tail,) = keys_of(range(12))[2:]
    held = blocks.hold(tail)
    assert held is not None
    blocks.admit("b", [], 0)
    assert blocks.grow("b", 12, 0) is not None
    assert blocks.find(tail) == held
    assert held not in blocks.tables("b")[0]
    blocks.drop(held)
    assert blocks.grow("b", 16, 0) is not None
    assert blocks.find(tail) is None
    with pytest.raises(CallerError):
        blocks.drop(BlockId(99))


def test_the_coldest_blocks_are_those_that_go_next() -> None:
    blocks = manager(4)
    run(blocks, "a", range(8))
    run(blocks, "b", range(50, 58))
    expected = [key for key, _ in blocks.coldest(2, 0)]
    blocks.drain_changes()
    blocks.admit("c", [], 0)
    blocks.grow("c", 8, 0)
    evicted = [c.key for c in blocks.drain_changes() if c.kind is ChangeKind.EVICTED]
    assert evicted == expected
    assert evicted == list(reversed(keys_of(range(8))))


def test_changes_name_keys_blocks_and_parents_in_order() -> None:
    blocks = manager()
    run(blocks, "a", range(8))
    first, second = blocks.drain_changes()
    keys = keys_of(range(8))
    assert (first.kind, first.key, first.parent) == (ChangeKind.STORED, keys[0], None)
    assert (second.key, second.parent) == (keys[1], keys[0])
    blocks.forget(keys[1:])
    (gone,) = blocks.drain_changes()
    assert (gone.kind, gone.key, gone.block) == (ChangeKind.EVICTED, keys[1], second.block)
    assert blocks.drain_changes() == []


def test_blocks_sealed_one_after_another_know_their_parents() -> None:
    blocks = manager()
    keys = keys_of(range(8))
    blocks.admit("a", [], 0)
    for count in range(1, 9):
        blocks.grow("a", count, 0)
        blocks.seal("a", count, keys[: count // BLOCK], 0)
    assert [change.parent for change in blocks.drain_changes()] == [None, keys[0]]


def test_retention_decides_who_goes_first() -> None:
    blocks = BlockManager(geometry(None), [4], PriorityPolicy)
    for name, tokens, priority in (("a", range(8), 90), ("b", range(50, 58), 10)):
        keys = keys_of(tokens)
        blocks.admit(name, [], 0, [Retention(priority)] * 2)
        blocks.grow(name, 8, 0)
        blocks.seal(name, 8, keys, 0)
        blocks.release(name, 0)
    blocks.admit("c", [], 0)
    blocks.grow("c", 8, 0)
    assert blocks.match(keys_of(range(8))) == 2
    assert blocks.match(keys_of(range(50, 58))) == 0


def test_a_request_without_keys_leaves_nothing_behind() -> None:
    blocks = manager()
    blocks.admit("a", [], 0)
    blocks.grow("a", 8, 0)
    blocks.seal("a", 8, [], 0)
    blocks.release("a", 0)
    assert blocks.usage().free_count == 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda blocks: blocks.admit("a", [], 0),
        lambda blocks: blocks.grow("x", 1, 0),
        lambda blocks: blocks.grow("a", 2, 0),
        lambda blocks: blocks.seal("a", 99, [], 0),
        lambda blocks: blocks.seal("a", 3, [], 0),
        lambda blocks: blocks.adopt("a", 1, 0),
        lambda blocks: blocks.fork("a", "a"),
        lambda blocks: blocks.release("x", 0),
        lambda blocks: BlockManager(geometry(None), [1, 1]),
        lambda blocks: BlockManager(geometry(None), [0]),
    ],
)
def test_contradictions_are_refused(wrong: Callable[[BlockManager], object]) -> None:
    blocks = manager()
    blocks.admit("a", [], 0)
    blocks.grow("a", 6, 0)
    blocks.seal("a", 6, [], 0)
    with pytest.raises(CallerError):
        wrong(blocks)


# ---- random schedules


@dataclass
class Twin:
    """What each block really holds: (sequence of tokens up to and with its own), by group."""

    blocks: BlockManager
    windows: tuple[int | None, ...]
    contents: list[dict[int, dict[int, tuple[int, ...]]]] = field(default_factory=list)
    running: dict[str, list[int]] = field(default_factory=dict)
    resident: list[dict[PrefixKey, int]] = field(default_factory=list)
    holds: list[tuple[int, BlockId]] = field(default_factory=list)
    drawn: int = 0

    def __post_init__(self) -> None:
        self.contents = [{} for _ in self.windows]
        self.resident = [{} for _ in self.windows]

    def write(self, name: str, start: int, stop: int) -> None:
        """What a model does: KV of a token is a function of all tokens up to it."""
        tokens = self.running[name]
        for group, table in enumerate(self.blocks.tables(name)):
            for at in range(start, stop):
                place = self.contents[group].setdefault(table[at // BLOCK], {})
                place[at % BLOCK] = tuple(tokens[: at + 1])

    def copy(self, growth: Growth) -> None:
        for copy in growth.copies:
            self.contents[copy.group][copy.target] = dict(
                self.contents[copy.group].get(copy.source, {})
            )

    def check(self) -> None:
        for change in self.blocks.drain_changes():
            held = self.resident[change.group]
            if change.kind is ChangeKind.STORED:
                assert change.key not in held
                held[change.key] = change.block
            else:
                assert held.pop(change.key) == change.block
        for group, window in enumerate(self.windows):
            self.check_tables(group, window)
            self.check_counts(group)

    def check_tables(self, group: int, window: int | None) -> None:
        """Whatever a query of a running sequence can read is what it would have computed."""
        for name, tokens in self.running.items():
            computed = self.blocks.computed_tokens(name)
            table = self.blocks.tables(name)[group]
            for at in range(window_start(computed, window, BLOCK) * BLOCK, computed):
                held = self.contents[group][table[at // BLOCK]]
                assert held[at % BLOCK] == tuple(tokens[: at + 1])

    def check_counts(self, group: int) -> None:
        usage = self.blocks.usage(group)
        used = {
            block
            for name in self.running
            for block in self.blocks.tables(name)[group]
            if block != NO_BLOCK
        } | {block for held_group, block in self.holds if held_group == group}
        cached = set(self.resident[group].values())
        assert usage.in_use_count == len(used)
        assert usage.idle_count == len(cached - used)
        assert set(self.blocks.cached_keys(group)) == set(self.resident[group])

    def longest(self, keys: Sequence[PrefixKey]) -> int:
        """`match`, from its definition."""
        for count in range(len(keys), 0, -1):
            if all(
                key in self.resident[group]
                for group, window in enumerate(self.windows)
                for key in keys[window_start(count * BLOCK, window, BLOCK) : count]
            ):
                return count
        return 0


POLICIES: tuple[Callable[[], Policy[PrefixKey]], ...] = (
    LruPolicy,
    PriorityPolicy,
    lambda: S3FifoPolicy(S3FifoConfig(8)),
)
SHAPES: tuple[tuple[int | None, ...], ...] = ((None,), (6,), (None, 5), (9, 1), (None, 4, 13))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    windows=st.sampled_from(SHAPES),
    policy=st.sampled_from(POLICIES),
    blocks_count=st.integers(3, 12),
)
def test_any_schedule_reads_what_was_computed_for_it(
    data: st.DataObject,
    windows: tuple[int | None, ...],
    policy: Callable[[], Policy[PrefixKey]],
    blocks_count: int,
) -> None:
    shape = geometry(*windows)
    twin = Twin(BlockManager(shape, [blocks_count] * len(windows), policy), windows)
    for now in range(data.draw(st.integers(5, 25))):
        act(data, twin, float(now))
        twin.check()


def act(data: st.DataObject, twin: Twin, now: float) -> None:
    actions = ["admit"] + ["step", "step", "fork", "release"] * bool(twin.running)
    actions += ["hold"] + ["drop"] * bool(twin.holds)
    action = data.draw(st.sampled_from(actions))
    if action == "admit":
        admit(data, twin, now)
    elif action == "hold":
        hold(data, twin)
    elif action == "drop":
        group, block = twin.holds.pop()
        twin.blocks.drop(block, group)
    else:
        name = data.draw(st.sampled_from(sorted(twin.running)))
        if action == "step":
            step(data, twin, name, now)
        elif action == "fork":
            twin.drawn += 1
            child = f"s{twin.drawn}"
            twin.blocks.fork(name, child)
            twin.running[child] = list(twin.running[name])
        else:
            twin.blocks.release(name, now)
            del twin.running[name]


def admit(data: st.DataObject, twin: Twin, now: float) -> None:
    tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
    keys = keys_of(tokens)[: (len(tokens) - 1) // BLOCK]
    expected = twin.longest(keys)
    assert twin.blocks.match(keys) == expected
    twin.drawn += 1
    name = f"s{twin.drawn}"
    worth = [Retention(data.draw(st.integers(0, 100)))] * data.draw(st.integers(0, 3))
    assert twin.blocks.admit(name, keys, now, worth) == expected * BLOCK
    twin.running[name] = tokens
    more = data.draw(st.integers(0, len(keys) - expected))
    adopted = more > 0 and twin.blocks.adopt(name, more, now) is not None
    if adopted and data.draw(st.booleans()):  # all bytes arrive
        load(twin, name, expected * BLOCK, (expected + more) * BLOCK)
        twin.blocks.seal(name, (expected + more) * BLOCK, keys, now)


def load(twin: Twin, name: str, start: int, stop: int) -> None:
    tokens = twin.running[name]
    for group, table in enumerate(twin.blocks.tables(name)):
        for at in range(start, stop):
            if table[at // BLOCK] != NO_BLOCK:
                place = twin.contents[group].setdefault(table[at // BLOCK], {})
                place[at % BLOCK] = tuple(tokens[: at + 1])


def step(data: st.DataObject, twin: Twin, name: str, now: float) -> None:
    computed = twin.blocks.computed_tokens(name)
    tokens = twin.running[name]
    count = data.draw(st.integers(1, 9))
    while len(tokens) < computed + count:
        tokens.append(data.draw(st.integers(0, 1)))
    before = [list(table) for table in twin.blocks.tables(name)]
    growth = twin.blocks.grow(name, computed + count, now)
    if growth is None:
        assert twin.blocks.tables(name) == before
        return
    twin.copy(growth)
    twin.write(name, computed, computed + count)
    keys = keys_of(tokens[: computed + count])
    twin.blocks.seal(name, computed + count, keys, now)


def hold(data: st.DataObject, twin: Twin) -> None:
    group = data.draw(st.integers(0, len(twin.windows) - 1))
    if twin.resident[group]:
        key = data.draw(st.sampled_from(sorted(twin.resident[group])))
        block = twin.blocks.hold(key, group)
        assert block == twin.resident[group][key]
        assert block is not None
        twin.holds.append((group, block))

"""What is used most: counted, listed, written, and brought back into another worker's L1."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.planner import WritePolicy
from kvtier.errors import CallerError
from kvtier.paged.geometry import LayerGroup
from kvtier.types import Fingerprint, InstanceId, PrefixKey, ScopeId
from kvtier_services.worker.l2.heat import HALF_LIFE_S, NO_BLOCK_BEFORE, HeatBook, HotBlock, HotSet
from kvtier_services.worker.l2.hot_record import PAGE_BYTES_MIN, decode, encode, joined, page_name
from tests.support.worker_rig import (
    BLOCK_TOKENS,
    FULL,
    MIXED,
    CacheOff,
    LazyCarrier,
    Rig,
    RigTerms,
    Script,
    TierBelow,
    small_fake,
)

NAMESPACE = Fingerprint(bytes(32))
NOBODY = ScopeId("")


def key_of(*path: int) -> PrefixKey:
    """A key that stands for a chain's blocks from the first on."""
    return PrefixKey(bytes(path).ljust(32, b"\xff"))


def chain_of(*path: int) -> list[PrefixKey]:
    return [key_of(*path[: stop + 1]) for stop in range(len(path))]


def everything(key: PrefixKey) -> bool:
    return True


def is_closed(hot: HotSet) -> bool:
    """Whether each block stands behind its parent, and none is hotter than that."""
    return all(
        block.parent == NO_BLOCK_BEFORE
        or (0 <= block.parent < at and hot[block.parent].heat >= block.heat)
        for at, block in enumerate(hot)
    )


# Heat


def test_a_shared_prefix_is_as_hot_as_all_that_follows_it_together() -> None:
    book = HeatBook()
    book.used(chain_of(1, 2), NOBODY, 0.0)
    book.used(chain_of(1, 3), NOBODY, 0.0)
    book.used(chain_of(1, 3), NOBODY, 0.0)
    hot = book.hottest(10, 0.0, everything)
    assert [(block.key, block.heat) for block in hot] == [
        (key_of(1), 3.0), (key_of(1, 3), 2.0), (key_of(1, 2), 1.0),
    ]  # fmt: skip
    assert [block.parent for block in hot] == [NO_BLOCK_BEFORE, 0, 0]


def test_uses_fade_by_half_in_a_half_life() -> None:
    book = HeatBook()
    for _ in range(3):
        book.used(chain_of(1), NOBODY, 0.0)
    book.used(chain_of(2), NOBODY, 2 * HALF_LIFE_S)
    hot = book.hottest(10, 2 * HALF_LIFE_S, everything)
    assert [(block.key, block.heat) for block in hot] == [(key_of(2), 1.0), (key_of(1), 0.75)]


def test_the_uses_of_an_evicted_tail_count_for_what_is_left_of_its_chain() -> None:
    book = HeatBook()
    book.used(chain_of(1, 2, 3), NOBODY, 0.0)
    book.evicted(key_of(1, 2, 3), 0.0)
    book.evicted(key_of(9), 0.0)
    hot = book.hottest(10, 0.0, everything)
    assert [(block.key, block.heat) for block in hot] == [(key_of(1), 1.0), (key_of(1, 2), 1.0)]


def test_what_stands_behind_a_missing_block_is_left_out() -> None:
    book = HeatBook()
    book.used(chain_of(1, 2, 3), NOBODY, 0.0)
    assert [b.key for b in book.hottest(10, 0.0, lambda key: key != key_of(1, 2))] == [key_of(1)]


def test_blocks_keep_the_scope_that_they_were_computed_for() -> None:
    book = HeatBook()
    book.used(chain_of(1), ScopeId("red"), 0.0)
    book.used(chain_of(2), ScopeId("blue"), 0.0)
    scopes = {block.key: block.scope for block in book.hottest(10, 0.0, everything)}
    assert scopes == {key_of(1): "red", key_of(2): "blue"}


def test_a_full_book_notes_no_further_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_services.worker.l2.heat.HOT_SET_NODES_MAX", 3)
    book = HeatBook()
    book.used(chain_of(1, 2), NOBODY, 0.0)
    book.used(chain_of(5, 6, 7), NOBODY, 0.0)
    assert len(book) == 3
    assert is_closed(book.hottest(10, 0.0, everything))
    book.evicted(key_of(1, 2), 0.0)
    book.used(chain_of(5, 6, 7), NOBODY, 0.0)
    assert key_of(5, 6) in {block.key for block in book.hottest(10, 0.0, everything)}


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(PATHS, st.none()), max_size=25), st.integers(0, 12), st.randoms())
def test_heat_equals_a_count_of_all_uses(
    steps: Sequence[list[int] | None], most: int, dice: random.Random
) -> None:
    """The naive twin keeps every use as a path; None evicts some tail."""
    book = HeatBook()
    uses: list[tuple[int, ...]] = []
    known: set[tuple[int, ...]] = set()
    for path in steps:
        if path is not None:
            book.used(chain_of(*path), NOBODY, 0.0)
            uses.append(tuple(path))
            known |= {tuple(path[: stop + 1]) for stop in range(len(path))}
            continue
        tails = sorted(one for one in known if not any(o[:-1] == one for o in known))
        if tails:
            gone = dice.choice(tails)
            book.evicted(key_of(*gone), 0.0)
            known.discard(gone)
            uses = [use[:-1] if use == gone else use for use in uses]
    expected = {key_of(*one): sum(use[: len(one)] == one for use in uses) for one in known}
    hot = book.hottest(most, 0.0, everything)
    assert is_closed(hot)
    assert len(hot) == min(most, len(known))
    assert all(expected[block.key] == block.heat for block in hot)
    left_out = set(expected) - {block.key for block in hot}
    assert all(expected[key] <= hot[-1].heat for key in left_out if hot)


# The list


@st.composite
def hot_sets(draw: st.DrawFn) -> HotSet:
    count = draw(st.integers(0, 300))
    dice = random.Random(draw(st.integers(0, 1 << 30)))
    scopes = [ScopeId(text) for text in draw(st.lists(st.text(max_size=9), min_size=1, max_size=9))]
    return tuple(
        HotBlock(
            PrefixKey(dice.randbytes(32)), dice.randrange(-1, at), dice.choice(scopes), float(at)
        )
        for at in range(count)
    )


@settings(max_examples=60, deadline=None)
@given(hot_sets(), st.integers(PAGE_BYTES_MIN, 3 * PAGE_BYTES_MIN), st.text(max_size=30))
def test_a_list_that_is_read_back_is_the_same(hot: HotSet, size: int, instance: str) -> None:
    pages = encode(InstanceId(instance), hot, size, 7)
    read = [decode(page) for page in pages]
    assert {len(page) for page in pages} == {size}
    assert {page.instance for page in read} == {instance}
    assert joined(read) == hot


@settings(max_examples=200, deadline=None)
@given(hot_sets(), st.randoms())
def test_a_damaged_page_is_refused_or_still_a_page(hot: HotSet, dice: random.Random) -> None:
    """The frame's checksum finds accidents; this is for what somebody wrote on purpose."""
    page = bytearray(encode(InstanceId("w0"), hot, PAGE_BYTES_MIN, 7)[0])
    for _ in range(dice.randrange(1, 6)):
        page[dice.randrange(dice.choice((40, 200, len(page))))] = dice.randrange(256)
    del page[dice.choice((len(page), dice.randrange(len(page)))) :]
    try:
        read = decode(bytes(page))
    except CallerError:
        return
    for at, block in enumerate(read.blocks, read.first):
        assert NO_BLOCK_BEFORE <= block.parent < at
        assert math.isfinite(block.heat)


@pytest.mark.parametrize("page", [b"", b"KVTHOT\x00\x01", bytes(4096), b"\xff" * 4096])
def test_what_is_no_page_is_refused(page: bytes) -> None:
    with pytest.raises(CallerError):
        decode(page)


def test_pages_of_two_lists_are_not_mixed() -> None:
    hot = tuple(HotBlock(key_of(n), -1, NOBODY, 1.0) for n in range(200))
    old = [decode(page) for page in encode(InstanceId("w0"), hot, PAGE_BYTES_MIN, 1)]
    new = [decode(page) for page in encode(InstanceId("w0"), hot[::-1], PAGE_BYTES_MIN, 2)]
    assert len(old) > 1
    assert joined([new[0], *old[1:]]) == new[0].blocks


def test_a_list_too_long_keeps_its_hottest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_services.worker.l2.hot_record.HOT_SET_BYTES_MAX", 2 * 4096)
    hot = tuple(HotBlock(PrefixKey(n.to_bytes(32)), -1, NOBODY, 1.0) for n in range(1000))
    pages = encode(InstanceId("w0"), hot, 4096, 1)
    assert len(pages) == 2
    kept = joined([decode(page) for page in pages])
    assert 0 < len(kept) < 1000
    assert kept == hot[: len(kept)]


def test_pages_have_names_of_their_own_in_each_namespace() -> None:
    other = Fingerprint(b"\x01" * 32)
    names = {page_name(ns, place, page) for ns in (NAMESPACE, other)
             for place in range(3) for page in range(3)}  # fmt: skip
    assert len(names) == 18


# From one worker to another


def prompts_of(count: int) -> list[list[int]]:
    """Some begin alike."""
    dice = random.Random(count)
    shared = [dice.randrange(200) for _ in range(3 * BLOCK_TOKENS)]
    return [shared + [dice.randrange(200) for _ in range(9 + 5 * n)] for n in range(count)]


def left_by(rig: Rig, prompts: Sequence[Sequence[int]]) -> HotSet:
    """What a worker leaves that served some prompts and kept it all to itself."""
    for prompt in prompts:
        rig.generate(prompt, 2)
    rig.core.offer_hot_set(1 << 30)
    rig.settle()
    return rig.core.hot_set()


def brought_in(rig: Rig, hot: HotSet, share: float = 1.0) -> None:
    rig.core.prefetch(hot, share, rig.clock.now + 60.0)
    for _ in range(500):
        if not rig.core.is_prefetching:
            return
        rig.step()
    raise AssertionError("the prefetch does not end")


QUIET = RigTerms(write_policy=WritePolicy.ON_EVICT)


@pytest.mark.parametrize("groups", [FULL, MIXED])
@pytest.mark.parametrize("is_staged", [False, True])
def test_a_successor_begins_with_what_its_predecessor_had(
    groups: tuple[LayerGroup, ...], is_staged: bool
) -> None:
    """Conversations go on where they stood: of windows only that is there, not what was before."""
    below, prompts, truth = TierBelow(), prompts_of(4), CacheOff(groups)
    hot = left_by(Rig(small_fake(groups=groups), QUIET, below), prompts)
    assert hot
    assert is_closed(hot)
    carrier = LazyCarrier(random.Random(1)) if is_staged else None
    rig = Rig(small_fake(groups=groups), QUIET, below, carrier)
    brought_in(rig, hot)
    counts = rig.core.prefetched
    assert counts.listed == len(hot)
    assert counts.loaded > 0
    for prompt in prompts:
        further = [*prompt, *truth.tokens(prompt, 2), 1, 2, 3, 4, 5]
        told = rig.generate(further, 2)
        assert told.tokens == truth.tokens(further, 2)
        assert told.cached is not None
        assert told.cached.gpu >= (len(prompt) + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    rig.settle()
    assert len(rig.events.hashes) == len(rig.blocks.cached_keys())


def test_nothing_is_written_twice_and_what_the_store_lost_is_written_again() -> None:
    below = TierBelow()
    rig = Rig(small_fake(), RigTerms(), below)  # on_seal
    for prompt in prompts_of(3):
        rig.generate(prompt, 2)
    rig.settle()
    rig.core.offer_hot_set(1 << 30)
    rig.settle()
    assert rig.core.offload is not None
    assert rig.core.offload.hot.counts.held == len(below.held) > 4
    assert rig.core.offload.hot.counts.offered == 0
    lost = dict(list(below.held.items())[:4])
    for name in lost:
        del below.held[name]
    rig.core.offer_hot_set(1 << 30)
    rig.settle()
    assert lost.items() <= below.held.items()
    assert rig.core.offload.hot.counts.offered == len(lost)


def test_the_budget_of_writes_goes_to_the_hottest() -> None:
    below, prompts = TierBelow(), prompts_of(4)
    rig = Rig(small_fake(), QUIET, below)
    for prompt in prompts:
        rig.generate(prompt, 2)
    block_bytes = rig.pool.geometry.block_bytes(0)
    rig.core.offer_hot_set(5 * block_bytes)
    rig.settle()
    assert len(below.held) == 5
    heats = [block.heat for block in rig.core.hot_set()]
    assert heats[:3] == pytest.approx([4.0, 4.0, 4.0], rel=0.05)  # what all begin with
    assert len(heats) == 5


def test_a_prefetch_takes_no_more_than_its_share_of_the_pool() -> None:
    below = TierBelow()
    hot = left_by(Rig(small_fake(), QUIET, below), prompts_of(4))
    rig = Rig(small_fake(), replace(QUIET, blocks=40), below)
    brought_in(rig, hot, share=0.25)
    assert rig.core.prefetched.loaded == 10
    assert {block.key for block in hot[:10]} == set(rig.blocks.cached_keys())


def test_after_its_time_a_prefetch_begins_nothing_more() -> None:
    below = TierBelow()
    hot = left_by(Rig(small_fake(), QUIET, below), prompts_of(4))
    rig = Rig(small_fake(), QUIET, below)
    rig.core.prefetch(hot, 1.0, rig.clock.now)
    rig.step()
    assert not rig.core.is_prefetching
    assert rig.core.prefetched.loaded == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_on_the_way_answers_stay_right(seed: int) -> None:
    dice = random.Random(seed)
    below, prompts, truth = TierBelow(), prompts_of(5), CacheOff()
    hot = left_by(Rig(small_fake(), QUIET, below), prompts)
    for name in dice.sample(sorted(below.held, key=lambda one: one.key), 5):
        del below.held[name]
    below.script = Script(dice, late_max=4, fails=0.2, loses=0.2)
    order = list(hot)
    dice.shuffle(order)
    forged = tuple(
        replace(block, parent=min(at - 1, dice.randrange(-1, 5))) for at, block in enumerate(order)
    )
    rig = Rig(small_fake(), replace(QUIET, blocks=dice.choice((24, 64))), below)
    brought_in(rig, dice.choice((hot, forged)))
    for prompt in prompts:
        assert rig.generate(prompt, 2).tokens == truth.tokens(prompt, 2)
    rig.settle()
    held = rig.blocks.usage().in_use_count
    assert held == 0
    assert len(rig.events.hashes) == len(rig.blocks.cached_keys())


def test_a_request_that_runs_when_the_worker_is_to_end_counts_too() -> None:
    below = TierBelow()
    rig = Rig(small_fake(), QUIET, below)
    rig.submit(prompts_of(1)[0], 1000)
    for _ in range(5):
        rig.step()
    rig.core.offer_hot_set(1 << 30)
    for _ in range(20):
        rig.step(0.05)
    assert rig.core.hot_set()


def test_a_worker_without_tiers_below_leaves_and_takes_nothing() -> None:
    rig = Rig()
    calls: list[Callable[[], object]] = [
        lambda: rig.core.offer_hot_set(1 << 30),
        lambda: rig.core.prefetch((), 1.0, rig.clock.now + 1.0),
    ]
    assert [call() for call in calls] == [None, None]
    assert rig.core.hot_set() == ()
    assert not rig.core.is_prefetching

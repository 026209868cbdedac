"""What only the native index has: memory that comes back, a byte budget, threads."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.event_columns import EventKind
from kvtier.core.prefix_index import NativePrefixIndex, Snapshot
from kvtier.errors import CallerError
from kvtier.types import HolderId, Tier
from tests.support.index_pair import batch, worker

BUDGET = 4 << 20
Blocks = npt.NDArray[np.uint64]


def random_blocks(seed: int, *shape: int) -> Blocks:
    return np.random.default_rng(seed).integers(0, 2**64, size=shape, dtype=np.uint64)


def filled(index: NativePrefixIndex, holder: int, chains: Blocks) -> None:
    for chain in chains:
        index.store(HolderId(holder), Tier.GPU, 0, chain)


def xor(blocks: Blocks) -> int:
    return int(np.bitwise_xor.reduce(blocks.reshape(-1)))


@pytest.fixture
def index() -> NativePrefixIndex:
    made = NativePrefixIndex()
    for holder in range(4):
        made.add_holder(HolderId(holder), worker())
    return made


def test_blocks_in_long_chains_cost_less_than_24_bytes(index: NativePrefixIndex) -> None:
    empty = index.stats().bytes
    filled(index, 0, random_blocks(1, 4000, 64))
    stats = index.stats()
    assert stats.blocks == 256_000
    assert (stats.bytes - empty) / stats.blocks < 24


def test_memory_returns_to_its_baseline_after_churn_by_chains(index: NativePrefixIndex) -> None:
    empty = index.stats().bytes
    chains = random_blocks(2, 2000, 64)
    filled(index, 0, chains)
    baseline = index.stats().bytes
    for turn in range(3):
        fresh = random_blocks(10 + turn, 2000, 64)
        filled(index, 1 + turn % 3, fresh)
        for chain in fresh[np.random.default_rng(turn).permutation(2000)]:
            index.remove(HolderId(1 + turn % 3), Tier.GPU, 0, chain[::-1].copy())
    stats = index.stats()
    assert stats.blocks == 128_000
    assert stats.bytes < baseline * 1.1
    assert index.digest(HolderId(0), Tier.GPU, 0).xor == xor(chains)
    index.clear(HolderId(0))
    assert index.stats().bytes < empty + (64 << 10)
    assert index.stats().pages == 0


def test_blocks_that_go_in_any_order_leave_no_page_behind(index: NativePrefixIndex) -> None:
    chains = random_blocks(3, 1000, 64)
    filled(index, 0, chains)
    filled(index, 1, chains[::2])
    rng = np.random.default_rng(3)
    order = rng.permutation(chains.reshape(-1))
    for start in range(0, 60_000, 1000):
        assert index.remove(HolderId(0), Tier.GPU, 0, order[start : start + 1000]).unknown == 0
    left = order[60_000:]
    assert index.digest(HolderId(0), Tier.GPU, 0).xor == xor(left)
    snapshot = index.snapshot(HolderId(0), Tier.GPU, 0)
    assert set(snapshot.hashes.tolist()) == set(left.tolist())
    assert index.digest(HolderId(1), Tier.GPU, 0).xor == xor(chains[::2])
    result = index.match(chains[4])
    assert int(result.tokens[list(result.workers).index(1)]) == 64 * 16
    index.remove(HolderId(0), Tier.GPU, 0, left)
    index.clear(HolderId(1))
    stats = index.stats()
    assert (stats.blocks, stats.pages, stats.holdings) == (0, 0, 0)


def test_one_block_chains_and_forks_at_every_block_are_found(index: NativePrefixIndex) -> None:
    blocks = random_blocks(4, 20_000)
    for block in blocks[:10_000]:
        index.store(HolderId(0), Tier.GPU, 0, [int(block)])
    trunk = blocks[:64]
    for block in blocks[10_000:]:
        index.store(HolderId(0), Tier.GPU, 0, [int(block)], int(trunk[int(block) % 64]))
    assert index.stats().blocks == 20_000
    query = np.concatenate([trunk, blocks[10_000:10_001]])
    assert index.match(query).tokens.tolist() == [65 * 16]
    assert index.remove(HolderId(0), Tier.GPU, 0, blocks).removed == 20_000
    assert index.stats().pages == 0


def test_a_page_may_be_held_by_thousands(index: NativePrefixIndex) -> None:
    prompt = random_blocks(5, 10)
    for holder in range(4, 5000):
        index.add_holder(HolderId(holder), worker())
        index.store(HolderId(holder), Tier.GPU, 0, prompt[: 1 + holder % 10])
    result = index.match(prompt)
    assert len(result) == 4996
    assert result.tokens.tolist() == [16 * (1 + int(holder) % 10) for holder in result.workers]
    for holder in range(4, 5000, 2):
        index.remove_holder(HolderId(holder))
    assert index.match(prompt).workers.tolist() == list(range(5, 5000, 2))


@pytest.fixture
def small() -> NativePrefixIndex:
    made = NativePrefixIndex(BUDGET)
    for holder in range(4):
        made.add_holder(HolderId(holder), worker())
    return made


def test_over_budget_the_least_recently_stored_blocks_go_and_holders_are_told(
    small: NativePrefixIndex,
) -> None:
    chains = random_blocks(6, 8000, 64)
    evicted = 0
    for number, chain in enumerate(chains):
        evicted += small.store(HolderId(0 if number < 100 else 1), Tier.GPU, 0, chain).evicted
        assert small.stats().bytes <= BUDGET
    stats = small.stats()
    assert evicted == stats.evicted > 0
    assert stats.holdings + evicted == 8000 * 64
    truncated = {row.holder: row.truncated for row in stats.holders}
    assert truncated == {0: 6400, 1: evicted - 6400, 2: 0, 3: 0}
    assert len(small.match(chains[0])) == 0
    assert small.match(chains[-1]).tokens.tolist() == [1024]
    held = small.snapshot(HolderId(1), Tier.GPU, 0)
    assert small.digest(HolderId(1), Tier.GPU, 0).xor == xor(held.hashes)
    small.clear(HolderId(1))
    assert small.stats().holders[1].truncated == 0


def test_a_block_stored_again_is_recent_again(small: NativePrefixIndex) -> None:
    kept = random_blocks(7, 64)
    for chain in random_blocks(8, 8000, 64):
        small.store(HolderId(0), Tier.GPU, 0, kept)
        small.store(HolderId(1), Tier.GPU, 0, chain)
    assert small.match(kept).tokens.tolist() == [1024]
    assert small.stats().holders[0].truncated == 0
    assert small.stats().evicted > 0


def test_a_block_that_queries_ask_for_is_spared(small: NativePrefixIndex) -> None:
    asked, silent = random_blocks(14, 64), random_blocks(15, 64)
    small.store(HolderId(0), Tier.GPU, 0, asked)
    small.store(HolderId(0), Tier.GPU, 0, silent)
    for chain in random_blocks(16, 16_000, 64):
        small.store(HolderId(1), Tier.GPU, 0, chain)
        small.match(asked)
    assert small.match(asked).tokens.tolist() == [1024]
    assert len(small.match(silent)) == 0
    assert small.stats().holders[0].truncated == 64


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_a_budget_holds_for_chains_of_any_length_and_predictions(
    small: NativePrefixIndex, piece: int
) -> None:
    blocks = random_blocks(9, 150_000 if piece > 1 else 90_000)
    pieces = blocks.reshape(-1, 50, piece) if piece < 64 else blocks[: 64 * 2343].reshape(-1, 1, 64)
    for ticket, many in enumerate(pieces):
        for chain in many:
            small.store(HolderId(ticket % 4), Tier.GPU, 0, chain)
        small.predict(HolderId(0), many[0], ticket % 100, float(ticket))
        assert small.stats().bytes <= BUDGET
    assert small.match(pieces[-1][-1]).tokens.max() == 16 * piece
    small.expire(1e9)
    for holder in range(4):
        small.remove_holder(HolderId(holder))
    assert small.stats().blocks == 0


def test_predictions_take_a_quarter_of_the_budget_and_drive_out_nothing_that_is_held(
    small: NativePrefixIndex,
) -> None:
    held = random_blocks(12, 640)
    small.store(HolderId(1), Tier.GPU, 0, held)
    expected = random_blocks(13, BUDGET // 64)
    made = [small.predict(HolderId(0), expected, ticket, 1.0) for ticket in range(5)]
    assert made == [True, False, False, False, False]
    assert small.match(held).tokens.tolist() == [16 * 640]
    assert small.match(expected).blocks_found == len(expected)
    assert not small.release(4)
    assert small.release(0)
    assert small.predict(HolderId(0), expected, 4, 1.0)


def test_a_snapshot_larger_than_the_budget_loads_in_part_and_says_so(
    small: NativePrefixIndex,
) -> None:
    blocks = random_blocks(11, 500_000)
    result = small.load(
        HolderId(0), Tier.GPU, 0, Snapshot(blocks, np.array([len(blocks)], np.uint32))
    )
    assert result.stored == 500_000
    stats = small.stats()
    assert stats.bytes <= BUDGET
    assert stats.holders[0].truncated == result.evicted == 500_000 - stats.holdings > 0


def test_matches_run_while_other_threads_change_everything(index: NativePrefixIndex) -> None:
    steady = random_blocks(12, 500)
    index.store(HolderId(0), Tier.GPU, 0, steady)
    done = threading.Event()

    def change(holder: int) -> None:
        chains = random_blocks(holder, 60, 200)
        for turn in range(6):
            filled(index, holder, chains)
            index.store(HolderId(holder), Tier.GPU, 0, steady[: 100 * holder])
            short, long = chains[0][:60].tolist(), steady.tolist()
            for blocks in (short, long):  # with and without the GIL
                index.apply(HolderId(holder), 0, batch((EventKind.STORE, Tier.GPU, 0, blocks)))
                index.apply(HolderId(holder), 0, batch((EventKind.REMOVE, Tier.GPU, 0, blocks)))
            snapshot = index.snapshot(HolderId(holder), Tier.GPU, 0)
            for chain in chains:
                index.remove(HolderId(holder), Tier.GPU, 0, chain)
            index.load(HolderId(holder), Tier.GPU, 0, snapshot)
            index.predict(HolderId(holder), chains[0], holder, float(turn))
            index.expire(float(turn))
            index.remove_holder(HolderId(holder))
            index.add_holder(HolderId(holder), worker())

    def match() -> int:
        asked = 0
        while not done.is_set():
            for query in (steady, steady[:40]):
                result = index.match(query)
                assert result.tokens[0] == 16 * len(query)
                assert result.workers[0] == 0
                asked += 1
            index.stats()
        return asked

    with ThreadPoolExecutor(5) as threads:
        readers = [threads.submit(match) for _ in range(2)]
        writers = [threads.submit(change, holder) for holder in (1, 2, 3)]
        wait(writers)
        done.set()
        assert all(reader.result() > 0 for reader in readers)
        for writer in writers:
            writer.result()
    assert index.digest(HolderId(0), Tier.GPU, 0).xor == xor(steady)
    assert index.stats().holdings == 500


def test_a_result_outlives_the_index_and_later_changes(index: NativePrefixIndex) -> None:
    blocks = random_blocks(13, 100)
    index.store(HolderId(0), Tier.GPU, 0, blocks)
    result = index.match(blocks)
    tokens = result.tokens
    index.remove_holder(HolderId(0))
    del index, result
    assert tokens.tolist() == [1600]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


odd = st.one_of(
    st.integers(-3, 9),
    st.integers(),
    st.floats(),
    st.none(),
    st.text(max_size=3),
    st.binary(max_size=24),
    st.lists(st.integers(-1, 5), max_size=4),
    st.lists(st.lists(st.integers(0, 5), max_size=2), max_size=2),
    st.sampled_from(["u1", "u4", "u8", "i8", "f8", ">u8"]).map(lambda kind: np.ones(3, kind)),
    st.just(np.ones((2, 2), np.uint64)),
    st.just(np.ones(6, np.uint64)[::2]),
)
METHODS = sorted(name for name in vars(_native.PrefixIndex) if not name.startswith("_"))


@settings(max_examples=400, deadline=None)
@given(calls=st.lists(st.tuples(st.sampled_from(METHODS), st.lists(odd, max_size=7)), max_size=5))
def test_any_arguments_are_answered_or_refused(calls: list[tuple[str, list[object]]]) -> None:
    index = NativePrefixIndex()
    for holder in range(3):
        index.add_holder(HolderId(holder), worker(namespaces=(0, 1)))
    index.store(HolderId(0), Tier.GPU, 0, [1, 2, 3])
    for method, arguments in calls:
        with contextlib.suppress(ValueError, TypeError):
            getattr(index._native, method)(*arguments)
    assert index.match([1, 2, 3]).blocks_queried == 3
    assert index.stats().holdings >= 0


def test_a_refusal_names_the_argument_and_its_value() -> None:
    index = NativePrefixIndex()
    with pytest.raises(CallerError, match="unknown holder 5"):
        index.hide(HolderId(5))
    with pytest.raises(CallerError, match="hashes: items must be of type uint64"):
        index.match(np.zeros(3, np.int64))

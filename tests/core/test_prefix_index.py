"""What the prefix index promises, by example; each runs on the native index and its oracle."""

import pytest

from kvtier.core.event_columns import EventKind
from kvtier.core.prefix_index import HolderSpec, LocateTerms
from kvtier.types import HolderId, HolderKind, Source, Tier
from tests.support.index_pair import IndexPair, batch, per_block, shared, store, worker

CHAIN = [101, 102, 103, 104, 105, 106]
GPU, DRAM, NVME, REDIS = Tier.GPU, Tier.DRAM, Tier.NVME, Tier.REDIS


def put(pair: IndexPair, holder: int, tier: Tier, blocks: list[int], shard: int = 0) -> None:
    pair.both(lambda index: index.store(HolderId(holder), tier, shard, blocks))


def take(pair: IndexPair, holder: int, tier: Tier, blocks: list[int], shard: int = 0) -> None:
    pair.both(lambda index: index.remove(HolderId(holder), tier, shard, blocks))


@pytest.fixture
def pair() -> IndexPair:
    return IndexPair()


def test_a_prefix_is_told_in_tokens_of_the_worker(pair: IndexPair) -> None:
    pair.add(3, HolderSpec(HolderKind.WORKER, 0, (0,), 0, 32))
    put(pair, 3, GPU, CHAIN[:4])
    assert pair.match(CHAIN) == {3: (128, [(Source.GPU, 4)])}


def test_an_empty_query_and_an_empty_index_match_nothing(pair: IndexPair) -> None:
    assert pair.match([]) == {}
    assert pair.match(CHAIN) == {}
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN)
    assert pair.match([]) == {}


def test_a_prefix_starts_at_block_0_and_ends_at_the_first_gap(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.add(1, worker())
    put(pair, 0, GPU, CHAIN[1:])
    put(pair, 1, GPU, CHAIN)
    take(pair, 1, GPU, [CHAIN[2]])
    assert pair.match(CHAIN) == {1: (32, [(Source.GPU, 2)])}


def test_tiers_are_joined_into_runs_at_the_cheapest_source(pair: IndexPair) -> None:
    pair.add(0, worker(node=1))
    pair.add(1, store(node=1))
    pair.add(2, store(node=2))
    pair.add(3, shared())
    put(pair, 0, GPU, CHAIN[:1])
    put(pair, 1, DRAM, CHAIN[:3])
    put(pair, 1, NVME, CHAIN[2:4])
    put(pair, 2, NVME, CHAIN[3:5])
    put(pair, 3, REDIS, CHAIN)
    runs = [(s, n) for s, n in zip(Source, (1, 0, 2, 1, 1, 1), strict=True) if n]
    assert pair.match(CHAIN) == {0: (96, runs)}


def test_a_worker_that_holds_nothing_matches_what_its_store_holds(pair: IndexPair) -> None:
    pair.add(0, worker(node=1))
    pair.add(1, worker(node=2))
    pair.add(2, store(node=1))
    put(pair, 2, DRAM, CHAIN[:2])
    assert pair.match(CHAIN) == {0: (32, [(Source.DRAM, 2)]), 1: (32, [(Source.PEER, 2)])}


def test_l2_of_another_namespace_does_not_count(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(7,)))
    pair.add(1, store(namespace=8))
    pair.add(2, shared(namespace=8))
    put(pair, 1, DRAM, CHAIN)
    put(pair, 2, REDIS, CHAIN)
    assert pair.match(CHAIN) == {}


def test_a_block_counts_only_when_all_shards_hold_it(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(1, 2)))
    put(pair, 0, GPU, CHAIN, shard=0)
    assert pair.match(CHAIN) == {}
    put(pair, 0, GPU, CHAIN[:3], shard=1)
    assert pair.match(CHAIN) == {0: (48, [(Source.GPU, 3)])}


def test_shards_are_covered_in_l2_one_by_one_at_the_dearest_source(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(1, 2)))
    pair.add(1, store(namespace=1))
    pair.add(2, store(namespace=2))
    put(pair, 1, DRAM, CHAIN[:3])
    assert pair.match(CHAIN) == {}
    put(pair, 2, NVME, CHAIN[:2])
    assert pair.match(CHAIN) == {0: (32, [(Source.NVME, 2)])}


def test_one_shard_on_the_gpu_does_not_stand_in_for_l2(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(1, 2)))
    pair.add(1, store(namespace=2))
    put(pair, 0, GPU, CHAIN, shard=0)
    put(pair, 1, DRAM, CHAIN)
    assert pair.match(CHAIN) == {}


def test_of_two_copies_one_removed_hides_nothing(pair: IndexPair) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN)
    put(pair, 0, GPU, CHAIN[:2])
    assert pair.native.digest(HolderId(0), GPU, 0).count == 8
    take(pair, 0, GPU, CHAIN)
    assert pair.match(CHAIN) == {0: (32, [(Source.GPU, 2)])}
    take(pair, 0, GPU, CHAIN[:2])
    assert pair.match(CHAIN) == {}


def test_removing_what_is_not_held_is_counted_and_harmless(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.add(1, worker())
    put(pair, 0, GPU, CHAIN[:2])
    result = pair.both(lambda index: index.remove(HolderId(0), GPU, 0, [CHAIN[0], CHAIN[5], 9]))
    assert result is not None
    assert (result.removed, result.unknown) == (1, 2)
    result = pair.both(lambda index: index.remove(HolderId(1), GPU, 0, CHAIN))
    assert result is not None
    assert (result.removed, result.unknown) == (0, 6)
    pair.check()


def test_children_stored_before_their_parents_match_once_the_chain_is_whole(
    pair: IndexPair,
) -> None:
    pair.add(0, worker())
    pair.both(lambda index: index.store(HolderId(0), GPU, 0, CHAIN[3:], CHAIN[2]))
    assert pair.match(CHAIN) == {}
    put(pair, 0, GPU, CHAIN[:3])
    assert pair.match(CHAIN) == {0: (96, [(Source.GPU, 6)])}


def test_a_parent_that_went_and_came_back_restores_the_prefix(pair: IndexPair) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN)
    take(pair, 0, GPU, CHAIN[:1])
    assert pair.match(CHAIN) == {}
    put(pair, 0, GPU, CHAIN[:1])
    assert pair.match(CHAIN) == {0: (96, [(Source.GPU, 6)])}


def test_a_hidden_holder_is_invisible_and_keeps_what_it_holds(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.add(1, store())
    put(pair, 0, GPU, CHAIN[:2])
    put(pair, 1, DRAM, CHAIN)
    pair.both(lambda index: index.hide(HolderId(1)))
    assert pair.match(CHAIN) == {0: (32, [(Source.GPU, 2)])}
    take(pair, 1, DRAM, CHAIN[4:])
    pair.both(lambda index: index.resume(HolderId(1)))
    assert pair.match(CHAIN) == {0: (64, [(Source.GPU, 2), (Source.DRAM, 2)])}
    pair.both(lambda index: index.hide(HolderId(0)))
    assert pair.match(CHAIN) == {}


def test_a_match_may_ask_for_one_pool_only(pair: IndexPair) -> None:
    pair.add(0, worker(pool=4))
    pair.add(1, worker(pool=5))
    pair.add(2, shared())
    put(pair, 0, GPU, CHAIN)
    put(pair, 2, REDIS, CHAIN)
    assert list(pair.match(CHAIN)) == [0, 1]
    assert pair.match(CHAIN, pool=5) == {1: (96, [(Source.REDIS, 6)])}
    assert pair.match(CHAIN, pool=6) == {}


def test_predicted_blocks_match_and_are_in_no_snapshot_digest_or_count(pair: IndexPair) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN[:1])
    pair.both(lambda index: index.predict(HolderId(0), CHAIN[:4], 1, 10.0))
    assert pair.match(CHAIN) == {0: (64, [(Source.GPU, 1), (Source.PREDICTED, 3)])}
    assert pair.native.snapshot(HolderId(0), GPU, 0).hashes.tolist() == CHAIN[:1]
    assert pair.native.digest(HolderId(0), GPU, 0).count == 1
    assert pair.native.stats().holdings == 1
    assert pair.native.stats().predicted == 4
    pair.check()


def test_a_prediction_ends_when_released_or_expired_and_not_before(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.both(lambda index: index.predict(HolderId(0), CHAIN[:2], 1, 10.0))
    pair.both(lambda index: index.predict(HolderId(0), CHAIN[:4], 2, 20.0))
    assert pair.both(lambda index: index.expire(9.9)) == 0
    assert pair.both(lambda index: index.release(2)) is True
    assert pair.match(CHAIN) == {0: (32, [(Source.PREDICTED, 2)])}
    assert pair.both(lambda index: index.release(2)) is False
    assert pair.both(lambda index: index.expire(10.0)) == 1
    assert pair.match(CHAIN) == {}
    assert pair.native.stats().blocks == 0


def test_a_ticket_that_predicts_again_replaces_its_prediction(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.add(1, worker())
    pair.both(lambda index: index.predict(HolderId(0), CHAIN, 1, 10.0))
    pair.both(lambda index: index.predict(HolderId(1), CHAIN[:1], 1, 10.0))
    assert pair.match(CHAIN) == {1: (16, [(Source.PREDICTED, 1)])}


def test_events_of_a_batch_apply_in_order(pair: IndexPair) -> None:
    pair.add(0, worker())
    events = batch(
        (EventKind.STORE, GPU, 0, CHAIN[:3]),
        (EventKind.CLEAR_TIER, GPU, 0, []),
        (EventKind.STORE, GPU, 0, CHAIN),
        (EventKind.REMOVE, GPU, 0, CHAIN[4:]),
    )
    result = pair.both(lambda index: index.apply(HolderId(0), 0, events))
    assert result is not None
    assert (result.stored, result.removed) == (9, 5)
    assert pair.match(CHAIN) == {0: (64, [(Source.GPU, 4)])}


def test_a_clear_drops_one_tier_or_one_shard_or_all(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(0, 1)))
    pair.add(1, store())
    put(pair, 1, DRAM, CHAIN)
    put(pair, 1, NVME, CHAIN[:2])
    assert pair.both(lambda index: index.clear(HolderId(1), DRAM)) == 6
    assert pair.both(lambda index: index.clear(HolderId(1))) == 2
    put(pair, 0, GPU, CHAIN, shard=0)
    put(pair, 0, GPU, CHAIN, shard=1)
    assert pair.both(lambda index: index.clear(HolderId(0), None, 1)) == 6
    assert pair.native.digest(HolderId(0), GPU, 0).count == 6
    pair.check()


def test_a_clear_all_event_clears_the_shard_it_came_from(pair: IndexPair) -> None:
    pair.add(0, worker(namespaces=(0, 1)))
    put(pair, 0, GPU, CHAIN, shard=0)
    put(pair, 0, GPU, CHAIN, shard=1)
    everything = batch((EventKind.CLEAR_ALL, REDIS, 0, []))
    pair.both(lambda index: index.apply(HolderId(0), 1, everything))
    assert pair.native.digest(HolderId(0), GPU, 0).count == 6
    assert pair.native.digest(HolderId(0), GPU, 1).count == 0


def test_a_removed_holder_leaves_nothing_and_its_number_can_come_back(pair: IndexPair) -> None:
    pair.add(0, worker())
    pair.add(1, worker())
    put(pair, 0, GPU, CHAIN + CHAIN)
    put(pair, 1, GPU, CHAIN[:1])
    pair.both(lambda index: index.predict(HolderId(0), CHAIN, 1, 10.0))
    pair.remove_holder(0)
    assert pair.match(CHAIN) == {1: (16, [(Source.GPU, 1)])}
    assert pair.native.stats().blocks == 1
    assert pair.native.stats().tickets == 0
    pair.add(0, worker(pool=9))
    assert pair.match(CHAIN, pool=9) == {}
    pair.check()


def test_a_snapshot_is_in_chain_order_and_loads_into_the_same_holding(pair: IndexPair) -> None:
    chain = [7919 * block for block in range(1, 500)]
    pair.add(0, worker())
    put(pair, 0, GPU, chain)
    put(pair, 0, GPU, chain[:1])
    snapshot = pair.native.snapshot(HolderId(0), GPU, 0)
    assert snapshot.hashes.tolist() == [chain[0], *chain]
    put(pair, 0, GPU, [1, 2, 3])
    before = pair.native.digest(HolderId(0), GPU, 0)
    pair.both(lambda index: index.load(HolderId(0), GPU, 0, snapshot))
    assert pair.native.digest(HolderId(0), GPU, 0) != before
    pair.check()
    assert pair.match(chain) == {0: (499 * 16, [(Source.GPU, 499)])}


def test_a_snapshot_of_two_chains_has_a_run_for_each(pair: IndexPair) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN)
    put(pair, 0, GPU, [11, 12])
    snapshot = pair.native.snapshot(HolderId(0), GPU, 0)
    assert snapshot.run_lengths.tolist() == [6, 2]
    assert snapshot.hashes.tolist() == [*CHAIN, 11, 12]


def test_many_queries_in_one_call_answer_one_by_one(pair: IndexPair) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN)
    for index in (pair.native, pair.naive):
        results = index.match_many([CHAIN, [], CHAIN[:2]])
        assert [result.tokens.tolist() for result in results] == [[96], [], [32]]
        assert [len(result) for result in results] == [1, 0, 1]


def test_the_index_counts_what_a_router_needs_to_tell_routing_loss_from_eviction(
    pair: IndexPair,
) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, CHAIN[:4])
    pair.match(CHAIN)
    pair.match([1, 2])
    stats = pair.native.stats()
    assert (stats.matches, stats.blocks_queried, stats.blocks_found) == (2, 8, 4)


@pytest.mark.parametrize("edge", [0, 2**64 - 1])
def test_no_hash_value_is_special(pair: IndexPair, edge: int) -> None:
    pair.add(0, worker())
    put(pair, 0, GPU, [edge, 5])
    assert pair.match([edge, 5]) == {0: (32, [(Source.GPU, 2)])}
    take(pair, 0, GPU, [edge])
    assert pair.match([edge, 5]) == {}


def test_a_block_stored_many_times_is_counted_up_to_the_ceiling(pair: IndexPair) -> None:
    pair.add(0, worker())
    for _ in range(2):
        put(pair, 0, GPU, [5] * 32768)
    assert pair.native.digest(HolderId(0), GPU, 0).count == 65535
    result = pair.both(lambda index: index.store(HolderId(0), GPU, 0, [5, 6]))
    assert result is not None
    assert (result.stored, result.refused) == (1, 1)


def test_the_visible_stores_of_a_namespace_are_located_block_by_block() -> None:
    pair = IndexPair()
    for holder in range(3):
        pair.add(holder, store(node=holder, namespace=5))
    pair.add(3, store(node=3, namespace=6))
    pair.add(4, worker(namespaces=(5,)))
    pair.store((HolderId(0), DRAM, 0), [1, 2, 3])
    pair.store((HolderId(1), NVME, 0), [2, 3])
    pair.store((HolderId(1), DRAM, 0), [2])
    pair.store((HolderId(2), DRAM, 0), [3])
    pair.store((HolderId(3), DRAM, 0), [1, 4])
    pair.store((HolderId(4), GPU, 0), [4])
    pair.both(lambda index: index.hide(HolderId(2)))
    found = pair.native.locate([1, 2, 3, 4], 5, LocateTerms(8))
    assert [set(some) for some in per_block(found)] == [{0}, {0, 1}, {0, 1}, set()]
    first = [per_block(pair.native.locate([2], 5, LocateTerms(1, turn)))[0] for turn in range(4)]
    assert {tuple(one) for one in first} == {(0,), (1,)}
    pair.locate([1, 2, 3, 4], 5, LocateTerms(1, 3))

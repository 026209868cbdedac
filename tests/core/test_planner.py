"""The planner by example: puts, reads, write policies, budgets, quotas, pins, drops."""

from collections.abc import Sequence

import pytest

from kvtier import limits
from kvtier.core.eviction import LruPolicy, Policy, PriorityPolicy, Retention
from kvtier.core.planner import (
    Action,
    Block,
    BlockKey,
    ByteBudget,
    Cancel,
    Demote,
    Drop,
    Fetch,
    Join,
    Outcome,
    Planner,
    PlannerConfig,
    Promote,
    Reason,
    Reuse,
    ScopeQuota,
    Selection,
    Serve,
    Skip,
    TierConfig,
    TouchCounts,
    Verdict,
    Wanted,
    Write,
    WritePolicy,
)
from kvtier.errors import CallerError, LimitError, OverloadedError
from kvtier.types import Fingerprint, InstanceId, ScopeId, Tier

DRAM, NVME, REDIS = Tier.DRAM, Tier.NVME, Tier.REDIS
NAMESPACE = Fingerprint(b"n" * 32)


def key(i: int) -> BlockKey:
    return BlockKey(NAMESPACE, bytes([i]) * 32)


def block(
    i: int,
    scope: str = "s",
    *,
    size_bytes: int = 10,
    writer: str = "w",
    reuse: Reuse = Reuse.UNKNOWN,
    retention: Retention | None = None,
) -> Block:
    return Block(key(i), size_bytes, ScopeId(scope), InstanceId(writer), reuse, retention)


def lru(tier: Tier, capacity_bytes: int) -> Policy[BlockKey]:
    return LruPolicy()


def dram(capacity_bytes: int = 40) -> TierConfig:
    return TierConfig(DRAM, capacity_bytes, high_share=1.0, low_share=1.0)


def nvme(policy: WritePolicy = WritePolicy.ON_EVICT, capacity_bytes: int = 1000) -> TierConfig:
    return TierConfig(NVME, capacity_bytes, write_policy=policy)


def planner(*tiers: TierConfig, quotas: tuple[ScopeQuota, ...] = ()) -> Planner:
    return Planner(PlannerConfig(tiers, quotas), lru, 0.0)


def store(p: Planner, blocks: Sequence[Block], now: float = 0.0) -> list[Action]:
    """Put blocks, write each at once; the actions that are neither a write nor its report."""
    others: list[Action] = []
    for action in p.put(blocks, now):
        if isinstance(action, Write):
            others += p.report(action.transfer_id, Outcome.DONE, now)
        else:
            others.append(action)
    return others


def want(i: int, *hinted: Tier, reuse: Reuse = Reuse.UNKNOWN) -> Wanted:
    return Wanted(block(i, reuse=reuse), frozenset(hinted))


# Puts


def test_put_is_readable_only_after_its_write_was_reported() -> None:
    p = planner(dram())
    (write,) = p.put([block(1)], 0.0)
    assert isinstance(write, Write)
    assert p.read([want(1)], 0.0) == [Join(key(1))]
    assert p.usage(DRAM).reserved_bytes == 10
    assert p.report(write.transfer_id, Outcome.DONE, 0.0) == []
    assert p.read([want(1)], 0.0) == [Serve(key(1))]
    assert p.usage(DRAM).resident_bytes == 10


def test_failed_put_leaves_a_miss_and_no_bytes() -> None:
    p = planner(dram())
    (write,) = p.put([block(1)], 0.0)
    assert isinstance(write, Write)
    p.report(write.transfer_id, Outcome.FAILED, 0.0)
    assert p.read([want(1)], 0.0) == [Skip(key(1), Reason.MISS)]
    assert (p.usage(DRAM).reserved_bytes, p.blocks_count, p.transfers_count) == (0, 0, 0)


def test_second_writer_is_refused_and_the_first_is_kept() -> None:
    p = planner(dram())
    (write,) = p.put([block(1)], 0.0)
    assert isinstance(write, Write)
    assert p.put([block(1, writer="other")], 0.0) == [Skip(key(1), Reason.IN_FLIGHT)]
    p.report(write.transfer_id, Outcome.DONE, 0.0)
    assert p.put([block(1)], 0.0) == [Skip(key(1), Reason.RESIDENT)]
    assert p.put([block(1, size_bytes=9)], 0.0) == [Skip(key(1), Reason.CONFLICT)]
    assert p.put([block(1, "another scope")], 0.0) == [Skip(key(1), Reason.CONFLICT)]


def test_full_tier_drops_the_tail_that_was_used_longest_ago() -> None:
    p = planner(dram())
    store(p, [block(1), block(2)])
    store(p, [block(3), block(4)])
    assert store(p, [block(5)]) == [Drop(key(2), DRAM, Reason.NO_TIER_BELOW)]
    assert p.usage(DRAM).resident_bytes == 40


def test_chain_is_in_order_even_if_its_blocks_were_written_out_of_order() -> None:
    p = planner(dram())
    writes = p.put([block(1), block(2), block(3), block(4)], 0.0)
    for write in reversed(writes):
        assert isinstance(write, Write)
        p.report(write.transfer_id, Outcome.DONE, 0.0)
    assert store(p, [block(5)]) == [Drop(key(4), DRAM, Reason.NO_TIER_BELOW)]


def test_block_that_can_never_fit_is_refused_without_dropping_anything() -> None:
    p = planner(dram())
    store(p, [block(1)])
    assert p.put([block(2, size_bytes=41)], 0.0) == [Skip(key(2), Reason.TOO_LARGE)]
    assert p.tiers_of(key(1)) == {DRAM}


def test_put_is_refused_while_dram_cannot_be_written() -> None:
    p = planner(dram())
    p.set_verdict(DRAM, Verdict.READ_ONLY)
    assert p.put([block(1)], 0.0) == [Skip(key(1), Reason.TIER_DOWN)]


def test_flights_beyond_the_ceiling_are_refused() -> None:
    p = Planner(PlannerConfig((dram(),), flights_max=1), lru, 0.0)
    _, second = p.put([block(1), block(2)], 0.0)
    assert second == Skip(key(2), Reason.BUSY)


def test_retention_of_a_block_reaches_the_policy() -> None:
    p = Planner(PlannerConfig((dram(20),)), lambda tier, size: PriorityPolicy(), 0.0)
    store(p, [block(1, retention=Retention(90))])
    store(p, [block(2)])
    assert store(p, [block(3)]) == [Drop(key(2), DRAM, Reason.NO_TIER_BELOW)]


# Write policies, admission, budgets


def test_on_seal_copies_down_at_once_and_the_copy_above_stays() -> None:
    p = planner(dram(), nvme(WritePolicy.ON_SEAL))
    (demote,) = store(p, [block(1)])
    assert isinstance(demote, Demote)
    assert (demote.key, demote.source, demote.target) == (key(1), DRAM, NVME)
    p.report(demote.transfer_id, Outcome.DONE, 0.0)
    assert p.tiers_of(key(1)) == {DRAM, NVME}


def test_on_reuse_copies_down_at_the_second_touch() -> None:
    p = planner(dram(), nvme(WritePolicy.ON_REUSE))
    assert store(p, [block(1)]) == []
    serve, demote = p.read([want(1)], 1.0)
    assert serve == Serve(key(1))
    assert isinstance(demote, Demote)
    assert p.touch([key(1)], 1.0) == []  # one demotion of a block at a time


def test_touches_in_place_count_as_reads_do() -> None:
    p = planner(dram(), nvme(WritePolicy.ON_REUSE))
    store(p, [block(1)])
    (demote,) = p.touch([key(1), key(9)], 1.0)
    assert isinstance(demote, Demote)


def test_block_touched_once_is_dropped_and_not_written_to_disk() -> None:
    p = planner(dram(10), nvme())
    store(p, [block(1)])
    assert store(p, [block(2)]) == [Drop(key(1), DRAM, Reason.NOT_ADMITTED)]


def test_predicted_reuse_admits_a_block_that_was_touched_once() -> None:
    p = planner(dram(10), nvme())
    store(p, [block(1, reuse=Reuse.PREDICTED)])
    demote, skip = p.put([block(2)], 0.0)
    assert isinstance(demote, Demote)
    assert skip == Skip(key(2), Reason.NO_ROOM)


def test_evicted_block_stays_until_it_is_written_below() -> None:
    p = planner(dram(10), nvme())
    store(p, [block(1)])
    p.read([want(1)], 0.0)
    demote, skip = p.put([block(2)], 0.0)
    assert isinstance(demote, Demote)
    assert skip == Skip(key(2), Reason.NO_ROOM)
    p.started(demote.transfer_id)
    assert p.put([block(2)], 0.0) == [Skip(key(2), Reason.NO_ROOM)]
    assert p.read([want(1)], 0.0) == [Serve(key(1))]
    assert p.usage(DRAM).leaving_bytes == 10
    p.report(demote.transfer_id, Outcome.DONE, 0.0)
    drop, write = p.put([block(2)], 0.0)
    assert drop == Drop(key(1), DRAM, Reason.COPY_ELSEWHERE)
    assert isinstance(write, Write)
    assert p.tiers_of(key(1)) == {NVME}


def test_watermark_lets_blocks_go_down_to_the_low_mark() -> None:
    p = planner(TierConfig(DRAM, 100, high_share=0.8, low_share=0.5), nvme())
    blocks = [block(i, reuse=Reuse.PREDICTED) for i in range(1, 9)]
    assert store(p, blocks) == []
    demotes = store(p, [block(9)])
    assert [d.key for d in demotes if isinstance(d, Demote)] == [key(i) for i in (8, 7, 6, 5)]
    for d in demotes:
        assert isinstance(d, Demote)
        (drop,) = p.report(d.transfer_id, Outcome.DONE, 0.0)
        assert drop == Drop(d.key, DRAM, Reason.COPY_ELSEWHERE)
    assert p.usage(DRAM).resident_bytes == 50


def test_block_whose_demotion_keeps_failing_is_given_up() -> None:
    p = planner(dram(10), nvme())
    store(p, [block(1, reuse=Reuse.PREDICTED)])
    for _ in range(2):
        demote = p.put([block(2)], 0.0)[0]
        assert isinstance(demote, Demote)
        p.report(demote.transfer_id, Outcome.FAILED, 0.0)
        assert p.tiers_of(key(1)) == {DRAM}
    assert p.put([block(2)], 0.0)[0] == Drop(key(1), DRAM, Reason.DEMOTION_FAILED)


def test_a_demotion_that_fails_under_pressure_costs_no_copy() -> None:
    p = planner(TierConfig(DRAM, 100, high_share=0.8, low_share=0.5), nvme())
    store(p, [block(i, reuse=Reuse.PREDICTED) for i in range(1, 9)])
    demotes = [d for d in store(p, [block(9)]) if isinstance(d, Demote)]
    for outcome, demote in zip((Outcome.FAILED, Outcome.TIMED_OUT), demotes, strict=False):
        dropped = [a for a in p.report(demote.transfer_id, outcome, 0.0) if isinstance(a, Drop)]
        assert dropped == []
        assert p.tiers_of(demote.key) == {DRAM}


def test_a_copy_in_a_tier_that_is_down_does_not_count_as_one() -> None:
    p = planner(dram(10), nvme(WritePolicy.ON_SEAL), TierConfig(REDIS, 100))
    (sealed,) = store(p, [block(1, reuse=Reuse.PREDICTED)])
    assert isinstance(sealed, Demote)
    p.report(sealed.transfer_id, Outcome.DONE, 0.0)
    p.set_verdict(NVME, Verdict.DOWN)
    rescue = p.put([block(2)], 0.0)[0]
    assert isinstance(rescue, Demote)
    assert (rescue.key, rescue.source, rescue.target) == (key(1), DRAM, REDIS)


def test_day_budget_of_disk_writes_holds_and_refills() -> None:
    disk = TierConfig(NVME, 1000, write_policy=WritePolicy.ON_SEAL, write_bytes_per_day=20.0)
    p = planner(dram(100), disk)
    queued = store(p, [block(i) for i in range(1, 6)])
    assert [d.key for d in queued if isinstance(d, Demote)] == [key(1), key(2)]
    assert len(store(p, [block(6)], now=86_400 / 2)) == 1
    assert len(store(p, [block(7)], now=86_400 / 2)) == 0


def test_cancelled_demotion_gives_its_budget_back_unless_writing_began() -> None:
    disk = TierConfig(NVME, 1000, write_policy=WritePolicy.ON_SEAL, write_bytes_per_day=10.0)
    p = planner(dram(100), disk)
    (first,) = store(p, [block(1)])
    assert isinstance(first, Demote)
    p.report(first.transfer_id, Outcome.CANCELLED, 0.0)
    (second,) = store(p, [block(2)])
    assert isinstance(second, Demote)
    p.started(second.transfer_id)
    p.report(second.transfer_id, Outcome.CANCELLED, 0.0)
    assert store(p, [block(3)]) == []


def test_queue_of_demotions_is_bounded_in_bytes_and_empties() -> None:
    disk = TierConfig(NVME, 1000, write_policy=WritePolicy.ON_SEAL, queued_bytes_max=25)
    p = planner(dram(100), disk)
    queued = store(p, [block(i) for i in range(1, 6)])
    assert len(queued) == 2
    for demote in queued:
        assert isinstance(demote, Demote)
        p.report(demote.transfer_id, Outcome.DONE, 0.0)
    assert len(store(p, [block(i) for i in range(6, 9)])) == 2


def test_number_of_demotions_is_bounded_even_where_one_makes_room_by_another() -> None:
    tiers = (
        dram(10),
        TierConfig(NVME, 30, high_share=1.0, low_share=1.0),
        TierConfig(REDIS, 100),
    )
    p = Planner(PlannerConfig(tiers, demotions_max=1), lru, 0.0)
    p.restored([block(1, size_bytes=5, reuse=Reuse.PREDICTED)], NVME, 0.0)
    p.restored([block(2, size_bytes=25)], NVME, 0.0)
    store(p, [block(3, reuse=Reuse.PREDICTED)])
    to_redis, dropped, crowded_out, write = p.put([block(4)], 0.0)
    assert isinstance(to_redis, Demote)
    assert dropped == Drop(key(2), NVME, Reason.QUEUE_FULL)
    assert crowded_out == Drop(key(3), DRAM, Reason.QUEUE_FULL)
    assert isinstance(write, Write)
    assert p.transfers_count == 2


def test_block_goes_from_dram_to_nvme_to_redis() -> None:
    p = planner(
        dram(10),
        TierConfig(NVME, 10, high_share=1.0, low_share=1.0),
        TierConfig(REDIS, 100),
    )
    hot = [block(i, reuse=Reuse.PREDICTED) for i in (1, 2, 3)]
    store(p, [hot[0]])
    down = p.put([hot[1]], 0.0)[0]
    assert isinstance(down, Demote)
    p.report(down.transfer_id, Outcome.DONE, 0.0)
    store(p, [hot[1]])
    assert p.tiers_of(key(1)) == {NVME}
    # NVMe is full: its block is written to Redis before anything comes down.
    actions = p.put([hot[2]], 0.0)
    to_redis = actions[0]
    assert isinstance(to_redis, Demote)
    assert (to_redis.key, to_redis.source, to_redis.target) == (key(1), NVME, REDIS)
    p.report(to_redis.transfer_id, Outcome.DONE, 0.0)
    assert REDIS in p.tiers_of(key(1))


def test_nothing_is_written_to_a_tier_that_is_down_or_read_only() -> None:
    for verdict in (Verdict.DOWN, Verdict.READ_ONLY):
        p = planner(dram(10), nvme())
        p.set_verdict(NVME, verdict)
        store(p, [block(1, reuse=Reuse.PREDICTED)])
        assert store(p, [block(2)]) == [Drop(key(1), DRAM, Reason.TIER_DOWN)]


# Reads


def on_disk(*tiers: TierConfig) -> Planner:
    """A planner with block 1 on NVMe only."""
    p = planner(*(tiers or (dram(), nvme())))
    p.restored([block(1)], NVME, 0.0)
    return p


def test_first_hit_below_is_passed_through_and_the_second_is_promoted() -> None:
    p = on_disk()
    (fetch,) = p.read([want(1)], 1.0)
    assert isinstance(fetch, Fetch)
    assert fetch == Fetch(fetch.transfer_id, key(1), NVME, 1.5)
    p.report(fetch.transfer_id, Outcome.DONE, 1.1)
    assert p.tiers_of(key(1)) == {NVME}
    (promote,) = p.read([want(1)], 2.0)
    assert isinstance(promote, Promote)
    assert p.usage(DRAM).reserved_bytes == 10
    p.report(promote.transfer_id, Outcome.DONE, 2.1)
    assert p.read([want(1)], 3.0) == [Serve(key(1))]


def test_predicted_reuse_promotes_at_the_first_hit() -> None:
    (promote,) = on_disk().read([want(1, reuse=Reuse.PREDICTED)], 1.0)
    assert isinstance(promote, Promote)


def test_prefetch_promotes_and_says_so_when_there_is_no_room() -> None:
    (promote,) = on_disk().prefetch([want(1)], 1.0)
    assert isinstance(promote, Promote)
    p = on_disk(dram(10), nvme())
    p.put([block(2)], 0.0)
    assert p.prefetch([want(1)], 1.0) == [Skip(key(1), Reason.NO_ROOM)]
    assert p.prefetch([want(2)], 1.0) == [Join(key(2))]


def test_many_readers_of_one_key_cause_one_fetch() -> None:
    p = on_disk()
    fetches = [action for _ in range(200) for action in p.read([want(1)], 1.0)]
    assert sum(isinstance(a, Fetch | Promote) for a in fetches) == 1
    assert fetches.count(Join(key(1))) == 199


def test_failed_fetch_goes_on_to_the_next_tier_and_ends_with_a_miss() -> None:
    p = on_disk(dram(), nvme(), TierConfig(REDIS, 100))
    (first,) = p.read([want(1, REDIS)], 1.0)
    assert isinstance(first, Fetch)
    (second,) = p.report(first.transfer_id, Outcome.TIMED_OUT, 1.5)
    assert isinstance(second, Fetch)
    assert second.source is REDIS
    assert p.read([want(1)], 1.6)[0] == Join(key(1))
    assert p.report(second.transfer_id, Outcome.MISSING, 2.0) == [Skip(key(1), Reason.MISS)]
    assert p.tiers_of(key(1)) == {NVME}  # it timed out, it is not gone


def test_corrupt_copy_is_dropped_and_the_next_tier_is_tried() -> None:
    p = on_disk(dram(), nvme(), TierConfig(REDIS, 100))
    p.restored([block(1)], REDIS, 0.0)
    (fetch,) = p.read([want(1)], 1.0)
    assert isinstance(fetch, Fetch)
    drop, again = p.report(fetch.transfer_id, Outcome.CORRUPT, 1.1)
    assert drop == Drop(key(1), NVME, Reason.CORRUPT)
    assert isinstance(again, Fetch)
    assert again.source is REDIS


def test_cancelled_fetch_is_not_tried_elsewhere() -> None:
    p = on_disk(dram(), nvme(), TierConfig(REDIS, 100))
    (fetch,) = p.read([want(1, REDIS)], 1.0)
    assert isinstance(fetch, Fetch)
    assert p.report(fetch.transfer_id, Outcome.CANCELLED, 1.1) == []


def test_tier_that_is_down_is_skipped_and_what_it_holds_is_remembered() -> None:
    p = on_disk()
    p.set_verdict(NVME, Verdict.DOWN)
    assert p.read([want(1)], 1.0) == [Skip(key(1), Reason.TIER_DOWN)]
    p.set_verdict(NVME, Verdict.OPEN)
    assert isinstance(p.read([want(1)], 1.0)[0], Fetch | Promote)


def test_block_of_another_node_is_read_from_the_hinted_redis() -> None:
    p = planner(dram(), TierConfig(REDIS, 100))
    assert p.read([want(1)], 1.0) == [Skip(key(1), Reason.MISS)]
    (promote,) = p.read([want(1, REDIS)], 1.0)
    assert isinstance(promote, Promote)
    p.report(promote.transfer_id, Outcome.DONE, 1.0)
    assert p.tiers_of(key(1)) == {DRAM}
    assert p.read([want(2, NVME)], 1.0) == [Skip(key(2), Reason.MISS)]  # no such tier here


def test_copy_that_vanished_is_a_miss() -> None:
    p = on_disk()
    p.vanished([key(1), key(7)], NVME)
    assert p.read([want(1)], 1.0) == [Skip(key(1), Reason.MISS)]
    assert p.blocks_count == 0


def test_write_into_a_tier_that_was_lost_since_does_not_count() -> None:
    p = planner(dram())
    (write,) = p.put([block(1)], 0.0)
    assert isinstance(write, Write)
    p.tier_lost(DRAM)
    assert p.report(write.transfer_id, Outcome.DONE, 0.0) == [Drop(key(1), DRAM, Reason.TIER_LOST)]
    assert p.read([want(1)], 0.0) == [Skip(key(1), Reason.MISS)]


def test_restored_blocks_beyond_the_capacity_are_dropped() -> None:
    p = planner(dram(), nvme(capacity_bytes=20))
    assert p.restored([block(1), block(2), block(3)], NVME, 0.0) == [
        Drop(key(3), NVME, Reason.NO_ROOM)
    ]
    assert p.restored([block(1), block(2, size_bytes=5)], NVME, 0.0) == []
    assert p.restored([block(1, size_bytes=5)], DRAM, 0.0) == [Drop(key(1), DRAM, Reason.CONFLICT)]


# Quotas


def test_scope_over_its_quota_pays_with_its_own_blocks() -> None:
    p = planner(dram(100), quotas=(ScopeQuota(ScopeId("a"), DRAM, 20),))
    store(p, [block(9, "b")])
    store(p, [block(1, "a"), block(2, "a")])
    assert store(p, [block(3, "a")]) == [Drop(key(2), DRAM, Reason.NO_TIER_BELOW)]
    assert p.quota_used_bytes(ScopeId("a"), DRAM) == 20
    assert p.tiers_of(key(9)) == {DRAM}


def test_load_of_others_does_not_push_a_scope_below_its_quota() -> None:
    p = planner(
        TierConfig(DRAM, 100, high_share=0.9, low_share=0.8),
        quotas=(ScopeQuota(ScopeId("a"), DRAM, 80),),
    )
    mine = [block(i, "a") for i in range(1, 8)]
    store(p, mine[:4])
    for i in range(100, 140):
        store(p, [block(i, "b")])
    assert p.usage(DRAM).resident_bytes > 70
    store(p, mine[4:])  # room that others used comes back on demand
    assert all(p.tiers_of(b.key) == {DRAM} for b in mine)


# Pins


def test_pinned_block_is_not_evicted_until_its_time_is_over() -> None:
    p = planner(dram(20))
    store(p, [block(1)])
    store(p, [block(2)])
    pinned = p.pin([key(1), key(7)], 50, 10.0, 0.0)
    assert pinned.keys == (key(1),)
    assert store(p, [block(3)]) == [Drop(key(2), DRAM, Reason.NO_TIER_BELOW)]
    assert p.pinned_bytes == 10
    p.tick(10.0)
    assert p.pinned_bytes == 0
    assert store(p, [block(4)]) == [Drop(key(1), DRAM, Reason.NO_TIER_BELOW)]


def test_unpin_is_idempotent_and_pins_are_counted_apart() -> None:
    p = planner(dram(20))
    store(p, [block(1)])
    one, two = p.pin([key(1)], 50, 10.0, 0.0), p.pin([key(1)], 50, 10.0, 0.0)
    p.unpin(one.pin_id)
    p.unpin(one.pin_id)
    assert p.pinned_bytes == 10
    p.unpin(two.pin_id)
    assert p.pinned_bytes == 0


def test_pin_of_higher_priority_displaces_the_weakest_when_the_budget_is_full() -> None:
    p = planner(dram(40))
    store(p, [block(i) for i in (1, 2, 3)])
    p.pin([key(1)], 10, 100.0, 0.0)
    p.pin([key(2)], 20, 100.0, 0.0)
    assert p.pin([key(3)], 10, 100.0, 0.0).keys == ()
    assert p.pin([key(3)], 30, 100.0, 0.0).keys == (key(3),)
    assert p.pinned_bytes == 20
    store(p, [block(4)])
    assert store(p, [block(5)]) == [Drop(key(1), DRAM, Reason.NO_TIER_BELOW)]


def test_pin_of_a_dropped_block_does_not_hold_its_successor() -> None:
    p = planner(dram(20))
    store(p, [block(1)])
    pinned = p.pin([key(1)], 50, 10.0, 0.0)
    p.drop(Selection(keys=frozenset({key(1)})))
    assert p.pinned_bytes == 0
    store(p, [block(1)])
    other = p.pin([key(1)], 50, 10.0, 0.0)
    p.unpin(pinned.pin_id)
    assert p.pinned_bytes == 10
    p.unpin(other.pin_id)
    assert p.pinned_bytes == 0


def test_pins_are_bounded() -> None:
    p = planner(dram(20))
    for _ in range(limits.PINS_COUNT_MAX):
        p.pin([], 50, 10.0, 0.0)
    with pytest.raises(OverloadedError):
        p.pin([], 50, 10.0, 0.0)
    assert p.pin([], 51, 10.0, 0.0).keys == ()
    assert p.pin([], 50, 10.0, 10.0).keys == ()  # the others have expired


# Drops


def test_drop_by_namespace_scope_and_writer() -> None:
    p = planner(dram(100))
    other = Block(BlockKey(Fingerprint(b"m" * 32), b"x"), 10, ScopeId("s"), InstanceId("w"))
    store(p, [block(1), block(2, "t"), block(3, writer="bad"), other])
    assert p.drop(Selection(scope_id=ScopeId("t"))) == [Drop(key(2), DRAM, Reason.SELECTED)]
    assert p.drop(Selection(writer_id=InstanceId("bad"))) == [Drop(key(3), DRAM, Reason.SELECTED)]
    assert p.drop(Selection(namespace=NAMESPACE, keys=frozenset({key(1), other.key}))) == [
        Drop(key(1), DRAM, Reason.SELECTED)
    ]
    assert p.blocks_count == 1


def test_block_that_is_being_written_down_is_dropped_after_the_report() -> None:
    p = planner(dram(), nvme(WritePolicy.ON_SEAL))
    (demote,) = store(p, [block(1)])
    assert isinstance(demote, Demote)
    selection = Selection(keys=frozenset({key(1)}))
    assert p.drop(selection) == [Cancel(demote.transfer_id, key(1))]
    assert p.drop(selection) == []
    assert p.tiers_of(key(1)) == frozenset()
    assert p.read([want(1)], 0.0) == [Skip(key(1), Reason.SELECTED)]
    assert p.put([block(1)], 0.0) == [Skip(key(1), Reason.SELECTED)]
    assert p.report(demote.transfer_id, Outcome.DONE, 0.0) == [
        Drop(key(1), DRAM, Reason.SELECTED),
        Drop(key(1), NVME, Reason.SELECTED),
    ]
    assert p.blocks_count == 0


def test_report_of_an_unknown_transfer_changes_nothing() -> None:
    p = planner(dram())
    (write,) = p.put([block(1)], 0.0)
    assert isinstance(write, Write)
    p.report(write.transfer_id, Outcome.DONE, 0.0)
    before = p.usage(DRAM)
    assert p.report(write.transfer_id, Outcome.FAILED, 0.0) == []
    assert p.usage(DRAM) == before


# Bad input


def test_configurations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CallerError, match="nearest first"):
        PlannerConfig((nvme(), dram()))
    with pytest.raises(CallerError, match="nearest first"):
        PlannerConfig((nvme(),))
    with pytest.raises(CallerError, match="nearest first"):
        PlannerConfig((dram(), dram()))
    with pytest.raises(CallerError, match="low_share"):
        PlannerConfig((dram(100),), (ScopeQuota(ScopeId("a"), DRAM, 101),))
    with pytest.raises(CallerError, match="two quotas"):
        PlannerConfig((dram(),), (ScopeQuota(ScopeId("a"), DRAM, 1),) * 2)
    with pytest.raises(CallerError, match="no tier"):
        PlannerConfig((dram(),), (ScopeQuota(ScopeId("a"), NVME, 1),))
    with pytest.raises(CallerError, match="flights_max"):
        PlannerConfig((dram(),), flights_max=0)
    with pytest.raises(CallerError, match="worker"):
        TierConfig(Tier.GPU, 10)
    with pytest.raises(CallerError, match="low_share"):
        TierConfig(DRAM, 10, high_share=0.5, low_share=0.6)
    with pytest.raises(CallerError, match="deadline_s"):
        TierConfig(DRAM, 10, deadline_s=float("inf"))
    with pytest.raises(CallerError, match="budgets"):
        TierConfig(DRAM, 10, write_bytes_per_day=0.0)
    with pytest.raises(CallerError, match="positive"):
        TierConfig(DRAM, 0)


def test_calls_that_make_no_sense_are_refused() -> None:
    p = planner(dram())
    with pytest.raises(CallerError, match="size_bytes is 0"):
        block(1, size_bytes=0)
    with pytest.raises(CallerError, match="everything"):
        Selection()
    with pytest.raises(CallerError, match="not configured"):
        p.usage(REDIS)
    with pytest.raises(CallerError, match="priority is 101"):
        p.pin([], 101, 1.0, 0.0)
    with pytest.raises(CallerError, match="ttl_s"):
        p.pin([], 1, float("nan"), 0.0)
    with pytest.raises(LimitError, match="PIN_KEYS_MAX"):
        p.pin([key(1)] * (limits.PIN_KEYS_MAX + 1), 1, 1.0, 0.0)
    with pytest.raises(LimitError, match="MATCH_BLOCKS_MAX"):
        p.touch([key(1)] * (limits.MATCH_BLOCKS_MAX + 1), 0.0)


# Budgets and touch counts


def test_byte_budget_earns_nothing_from_a_clock_that_steps_back() -> None:
    budget = ByteBudget(86_400.0, 10.0, 100.0)
    assert budget.can_take(10, 100.0)
    budget.take(10)
    assert not budget.can_take(1, 50.0)
    assert not budget.can_take(1, 100.5)
    assert budget.can_take(5, 105.0)
    budget.give_back(1000)
    assert not budget.can_take(11, 105.0)
    with pytest.raises(CallerError):
        ByteBudget(0.0, 1.0, 0.0)


def test_touch_counts_halve_with_time_and_forget_the_oldest_key() -> None:
    counts = TouchCounts(2, half_life_s=10.0)
    assert [counts.touch(key(1), t) for t in (0.0, 1.0, 2.0, 3.0)] == [1, 2, 3, 4]
    assert counts.count(key(1), 12.9) == 4
    assert counts.count(key(1), 13.0) == 2
    assert counts.count(key(1), 1e12) == 0
    counts.touch(key(2), 13.0)
    counts.touch(key(3), 13.0)
    assert len(counts) == 2
    assert counts.count(key(1), 3.0) == 0
    with pytest.raises(CallerError):
        TouchCounts(0, 1.0)

"""`Planner.adopted`: blocks that a writer put into a tier by itself are booked like ended puts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.eviction import LruPolicy, Policy
from kvtier.core.planner import (
    Block,
    BlockKey,
    Demote,
    Drop,
    Outcome,
    Planner,
    PlannerConfig,
    Reason,
    ScopeQuota,
    Selection,
    TierConfig,
    WritePolicy,
)
from kvtier.types import Fingerprint, InstanceId, ScopeId, Tier

SIZE = 100


def new_planner(blocks: int = 4, policy: WritePolicy = WritePolicy.ON_EVICT) -> Planner:
    def lru(_: Tier, __: int) -> Policy[BlockKey]:
        return LruPolicy()

    tiers = (
        TierConfig(Tier.DRAM, blocks * SIZE, 1.0, 1.0),
        TierConfig(Tier.NVME, 100 * SIZE, 1.0, 1.0, write_policy=policy, touches_min=1),
    )
    quotas = (ScopeQuota(ScopeId("q"), Tier.DRAM, 2 * SIZE),)
    return Planner(PlannerConfig(tiers=tiers, quotas=quotas), lru, 0.0)


def block(n: int, size: int = SIZE, scope: str = "") -> Block:
    key = BlockKey(Fingerprint(bytes(32)), bytes([n]))
    return Block(key, size, ScopeId(scope), InstanceId("w"))


def test_an_adopted_block_is_resident_and_known_a_second_time() -> None:
    planner = new_planner()
    assert planner.adopted([block(1), block(2)], Tier.DRAM, 1.0) == []
    assert planner.adopted([block(1)], Tier.DRAM, 2.0) == []
    assert planner.usage(Tier.DRAM).blocks_count == 2
    assert planner.tiers_of(block(1).key) == {Tier.DRAM}
    assert planner.block(block(1).key) == block(1)
    assert planner.block(block(9).key) is None


def test_an_adopted_block_goes_down_when_the_policy_says_so() -> None:
    planner = new_planner(policy=WritePolicy.ON_SEAL)
    [action] = planner.adopted([block(1)], Tier.DRAM, 1.0)
    assert isinstance(action, Demote)


def test_what_has_no_place_is_dropped_and_says_why() -> None:
    planner = new_planner()
    planner.adopted([block(1)], Tier.DRAM, 1.0)
    planner.tier_lost(Tier.DRAM)
    planner.restored([block(1)], Tier.NVME, 1.0)
    [wrong] = planner.adopted([block(1, size=SIZE + 1)], Tier.DRAM, 2.0)
    assert wrong == Drop(block(1).key, Tier.DRAM, Reason.CONFLICT)
    [large] = planner.adopted([block(2, size=9 * SIZE)], Tier.DRAM, 2.0)
    assert large == Drop(block(2).key, Tier.DRAM, Reason.TOO_LARGE)
    planner.adopted([block(n) for n in range(10, 14)], Tier.DRAM, 3.0)
    planner.pin([block(n).key for n in range(10, 12)], 50, 60.0, 3.0)
    actions = planner.adopted([block(20)], Tier.DRAM, 4.0)
    assert Drop(block(20).key, Tier.DRAM, Reason.NO_ROOM) in actions


def test_a_block_that_is_being_dropped_is_not_adopted() -> None:
    planner = new_planner(policy=WritePolicy.ON_SEAL)
    [demotion] = planner.adopted([block(1)], Tier.DRAM, 1.0)
    assert isinstance(demotion, Demote)
    planner.drop(Selection(keys=frozenset({block(1).key})))
    planner.vanished([block(1).key], Tier.DRAM)
    [drop] = planner.adopted([block(1)], Tier.DRAM, 2.0)
    assert drop == Drop(block(1).key, Tier.DRAM, Reason.SELECTED)
    planner.report(demotion.transfer_id, Outcome.CANCELLED, 3.0)
    assert planner.tiers_of(block(1).key) == frozenset()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["", "q"])), max_size=6), max_size=12
    )
)
def test_no_capacity_and_no_quota_is_passed(batches: list[list[tuple[int, str]]]) -> None:
    planner = new_planner()
    held: set[BlockKey] = set()
    for now, batch in enumerate(batches):
        blocks = [block(n if scope else n + 100, scope=scope) for n, scope in batch]
        actions = planner.adopted(blocks, Tier.DRAM, float(now))
        held |= {one.key for one in blocks}
        for action in actions:
            if isinstance(action, Drop) and action.tier is Tier.DRAM:
                held.discard(action.key)
        for action in actions:
            if isinstance(action, Demote):
                for after in planner.report(action.transfer_id, Outcome.DONE, float(now)):
                    if isinstance(after, Drop) and after.tier is Tier.DRAM:
                        held.discard(after.key)
        usage = planner.usage(Tier.DRAM)
        assert usage.resident_bytes + usage.reserved_bytes <= 4 * SIZE
        assert planner.quota_used_bytes(ScopeId("q"), Tier.DRAM) <= 2 * SIZE
        assert {k for k in held if Tier.DRAM in planner.tiers_of(k)} == held
        assert usage.blocks_count == len(held)

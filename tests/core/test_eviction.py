"""Eviction policies: examples, differential tests against the naive twins, bounded work."""

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core.eviction import (
    LruPolicy,
    PinToken,
    Policy,
    PriorityPolicy,
    RankedPolicy,
    Removal,
    Retention,
    S3FifoConfig,
    S3FifoPolicy,
    TouchOrder,
)
from kvtier.errors import CallerError, LimitError
from tests.support.naive_eviction import NaiveLru, NaivePriority, NaiveRanked, NaiveS3Fifo

SMALL_S3FIFO = S3FifoConfig(capacity_blocks=10, small_ratio=0.3, ghost_ratio=0.5)

MAKERS: list[tuple[str, Callable[[], Policy[int]], Callable[[], Policy[int]]]] = [
    ("lru", LruPolicy, NaiveLru),
    (
        "lru_head_first",
        lambda: LruPolicy(TouchOrder.HEAD_FIRST),
        lambda: NaiveLru(TouchOrder.HEAD_FIRST),
    ),
    ("s3fifo", lambda: S3FifoPolicy(SMALL_S3FIFO), lambda: NaiveS3Fifo(SMALL_S3FIFO)),
    ("priority", PriorityPolicy, NaivePriority),
    ("ranked", RankedPolicy, NaiveRanked),
]
EVERY_POLICY = pytest.mark.parametrize(
    "make", [m for _, m, _ in MAKERS], ids=[m[0] for m in MAKERS]
)

CHAINS = st.lists(st.integers(0, 12), max_size=6)
RETENTIONS = st.lists(
    st.builds(
        Retention, st.sampled_from([0, 10, 35, 80, 100]), st.none() | st.integers(0, 30).map(float)
    ),
    min_size=6,
    max_size=6,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), CHAINS, st.just([]) | RETENTIONS),
        st.tuples(st.just("touch"), CHAINS, st.just([]) | RETENTIONS),
        st.tuples(st.just("remove"), CHAINS, st.sampled_from(Removal)),
        st.tuples(st.sampled_from(["victims", "evict"]), st.integers(0, 14), st.none()),
        st.tuples(st.just("pin"), st.integers(0, 12), st.none()),
        st.tuples(st.just("unpin"), st.integers(0, 40), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 10), st.none()),
    ),
    max_size=60,
)


@pytest.mark.parametrize(("fast", "slow"), [m[1:] for m in MAKERS], ids=[m[0] for m in MAKERS])
@settings(max_examples=250, deadline=None)
@given(steps=STEPS)
def test_policy_decides_as_its_naive_twin(
    fast: Callable[[], Policy[int]],
    slow: Callable[[], Policy[int]],
    steps: list[tuple[str, int | list[int], list[Retention] | Removal | None]],
) -> None:
    policy, twin = fast(), slow()
    now = 0.0
    pins: list[tuple[int, PinToken]] = []
    for name, subject, extra in steps:
        if isinstance(subject, list):
            if isinstance(extra, Removal):
                policy.on_removed(subject, extra)
                twin.on_removed(subject, extra)
            else:
                retention = (extra or [])[: len(subject)]
                for p in (policy, twin):
                    told = p.on_stored if name == "store" else p.on_touched
                    told(subject, now, retention)
        elif name in ("victims", "evict"):
            offered = policy.victims(subject, now)
            assert offered == twin.victims(subject, now)
            assert len(offered) == len(set(offered)) <= subject
            if name == "evict":
                policy.on_removed(offered)
                twin.on_removed(offered)
        elif name == "pin" and subject in policy:
            pins.append((subject, policy.pin(subject)))
            assert twin.pin(subject) == pins[-1][1]
        elif name == "unpin" and pins:
            key, token = pins.pop(subject % len(pins))
            policy.unpin(key, token)
            twin.unpin(key, token)
        elif name == "wait":
            now += subject
        assert len(policy) == len(twin)
        assert [k in policy for k in range(13)] == [k in twin for k in range(13)]
    assert policy.victims(13, now) == twin.victims(13, now)


def test_tail_of_a_request_goes_before_its_head() -> None:
    policy: LruPolicy[int] = LruPolicy()
    policy.on_stored([1, 2, 3], 0.0)
    policy.on_stored([1, 2, 4], 0.0)
    assert policy.victims(4, 0.0) == [3, 4, 2, 1]


def test_plain_lru_offers_the_head_first() -> None:
    policy: LruPolicy[int] = LruPolicy(TouchOrder.HEAD_FIRST)
    policy.on_stored([1, 2, 3], 0.0)
    assert policy.victims(2, 0.0) == [1, 2]


def test_chain_stored_in_pieces_is_in_order_after_one_touch_of_the_whole() -> None:
    policy: LruPolicy[int] = LruPolicy()
    policy.on_stored([1], 0.0)
    policy.on_stored([2], 0.0)
    assert policy.victims(1, 0.0) == [1]
    policy.on_touched([1, 2], 0.0)
    assert policy.victims(1, 0.0) == [2]


def test_pin_that_came_and_went_does_not_change_the_order() -> None:
    policy: LruPolicy[int] = LruPolicy()
    for key in (1, 2, 3, 4):
        policy.on_stored([key], 0.0)
    pins = [(key, policy.pin(key)) for key in (3, 2)]
    assert policy.victims(2, 0.0) == [1, 4]
    for key, token in pins:
        policy.unpin(key, token)
    assert policy.victims(4, 0.0) == [1, 2, 3, 4]


def test_pins_that_ended_together_return_each_to_its_own_place() -> None:
    policy: LruPolicy[int] = LruPolicy()
    for one in (1, 2, 3, 4):
        policy.on_stored([one], 0.0)
    tokens = {one: policy.pin(one) for one in (1, 3)}
    assert policy.victims(4, 0.0) == [2, 4]
    for one, token in tokens.items():
        policy.unpin(one, token)
    assert policy.victims(4, 0.0) == [1, 2, 3, 4]


def test_keys_may_be_bytes() -> None:
    policy: PriorityPolicy[bytes] = PriorityPolicy()
    policy.on_stored([b"a", b"b"], 0.0)
    assert policy.victims(2, 0.0) == [b"b", b"a"]


@EVERY_POLICY
def test_victims_removes_nothing(make: Callable[[], Policy[int]]) -> None:
    policy = make()
    policy.on_stored([1, 2, 3], 0.0)
    assert len(policy.victims(2, 0.0)) == 2
    assert len(policy) == 3
    assert all(key in policy for key in (1, 2, 3))


@EVERY_POLICY
def test_pinned_key_is_not_offered_until_its_last_unpin(make: Callable[[], Policy[int]]) -> None:
    policy = make()
    policy.on_stored([1], 0.0)
    first, second = policy.pin(1), policy.pin(1)
    policy.unpin(1, first)
    assert policy.victims(1, 0.0) == []
    policy.unpin(1, second)
    assert policy.victims(1, 0.0) == [1]


@EVERY_POLICY
def test_token_of_a_removed_key_does_not_release_its_successor(
    make: Callable[[], Policy[int]],
) -> None:
    policy = make()
    policy.on_stored([1], 0.0)
    stale = policy.pin(1)
    policy.on_removed([1], Removal.DROPPED)
    policy.unpin(1, stale)
    policy.on_stored([1], 0.0)
    policy.pin(1)
    policy.unpin(1, stale)
    assert policy.victims(1, 0.0) == []


@EVERY_POLICY
def test_bad_arguments_are_refused(make: Callable[[], Policy[int]]) -> None:
    policy = make()
    with pytest.raises(CallerError, match="not tracked"):
        policy.pin(1)
    with pytest.raises(CallerError, match="-1"):
        policy.victims(-1, 0.0)
    assert policy.victims(5, 0.0) == []


@EVERY_POLICY
def test_more_keys_than_the_ceiling_are_refused_and_nothing_is_stored(
    make: Callable[[], Policy[int]],
) -> None:
    policy = make()
    with pytest.raises(LimitError, match="EVICTION_KEYS_MAX"):
        policy.on_stored(range(limits.EVICTION_KEYS_MAX + 1), 0.0)
    assert len(policy) == 0


class Counted:
    """A key that counts how often anyone looked it up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return id(self)


@pytest.mark.parametrize("name", ["lru", "s3fifo", "priority"])
def test_pinned_keys_are_stepped_over_once_and_not_at_each_call(name: str) -> None:
    policies: dict[str, Policy[Counted]] = {
        "lru": LruPolicy(),
        "s3fifo": S3FifoPolicy(S3FifoConfig(capacity_blocks=4000)),
        "priority": PriorityPolicy(),
    }
    policy = policies[name]
    keys = [Counted() for _ in range(2000)]
    for key in keys:
        policy.on_stored([key], 0.0)
    for key in keys[:1900]:
        policy.pin(key)
    Counted.looked_up = 0
    for _ in range(50):
        assert len(policy.victims(2, 0.0)) == 2
    assert Counted.looked_up < 10 * 2000  # stepping over at each call would cost 50 * 1900


@EVERY_POLICY
def test_memory_does_not_grow_with_touches_and_pins(make: Callable[[], Policy[int]]) -> None:
    policy = make()
    chain = list(range(8))
    soon = [Retention(80, 1e9)] * len(chain)

    def churn(rounds: int) -> None:
        for _ in range(rounds):
            policy.on_stored(chain, 0.0, soon)
            token = policy.pin(7)
            policy.victims(3, 0.0)
            policy.unpin(7, token)

    churn(100)
    tracemalloc.start()
    churn(2000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 32_000


def test_s3fifo_lets_what_is_used_once_go_before_what_was_used_again() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity_blocks=4, small_ratio=0.5))
    policy.on_stored([1], 0.0)
    policy.on_stored([2], 0.0)
    policy.on_touched([1], 0.0)
    policy.on_touched([1], 0.0)
    policy.on_stored([3], 0.0)
    assert policy.victims(1, 0.0) == [2]


def test_s3fifo_lets_a_key_of_the_main_queue_stay_once_for_each_use() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity_blocks=4, small_ratio=0.25))
    for one in (1, 2, 3, 4):
        policy.on_stored([one], 0.0)
    for one in (2, 2, 3):
        policy.on_touched([one], 0.0)
    evicted = []
    while len(policy):
        evicted += (victims := policy.victims(1, 0.0))
        policy.on_removed(victims)
    assert evicted == [1, 4, 3, 2]


def test_s3fifo_takes_a_ghost_back_into_the_main_queue() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity_blocks=10))
    policy.on_stored([1], 0.0)
    policy.on_removed([1])
    assert policy.ghosts_count == 1
    policy.on_stored([1], 0.0)
    policy.on_stored([2], 0.0)
    assert policy.ghosts_count == 0
    assert policy.victims(2, 0.0) == [2, 1]


def test_s3fifo_does_not_remember_what_was_dropped() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity_blocks=10))
    policy.on_stored([1], 0.0)
    policy.on_removed([1], Removal.DROPPED)
    assert policy.ghosts_count == 0


def test_s3fifo_remembers_a_bounded_number_of_ghosts() -> None:
    policy: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity_blocks=10, ghost_ratio=0.5))
    for key in range(100):
        policy.on_stored([key], 0.0)
        policy.on_removed([key])
        assert policy.ghosts_count <= 5 + 1


@pytest.mark.parametrize(
    "broken",
    [
        {"capacity_blocks": 0},
        {"capacity_blocks": limits.EVICTION_KEYS_MAX + 1},
        {"capacity_blocks": 8, "small_ratio": 0.0},
        {"capacity_blocks": 8, "small_ratio": float("nan")},
        {"capacity_blocks": 8, "ghost_ratio": -1.0},
        {"capacity_blocks": 8, "promote_uses": 0},
        {"capacity_blocks": 8, "promote_uses": 4},
    ],
)
def test_s3fifo_refuses_shares_that_make_no_sense(broken: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        S3FifoConfig(**broken)  # type: ignore[arg-type]  # each case is one bad field


def test_lowest_priority_goes_first_and_equal_ones_by_last_use() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1], 0.0, [Retention(80)])
    policy.on_stored([2], 0.0)
    policy.on_stored([3], 0.0, [Retention(10)])
    policy.on_stored([4], 0.0)
    assert policy.victims(4, 0.0) == [3, 2, 4, 1]


def test_priority_falls_back_to_the_default_after_its_duration() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1], 0.0, [Retention(80, expires_at=5.0)])
    policy.on_stored([2], 0.0)
    assert policy.victims(1, 4.9) == [2]
    assert policy.victims(1, 5.0) == [1]
    assert policy.priority_of(1) == 35


def test_longer_duration_given_later_replaces_the_first() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1], 0.0, [Retention(80, expires_at=5.0)])
    policy.on_touched([1], 1.0, [Retention(80, expires_at=9.0)])
    policy.victims(0, 6.0)
    assert policy.priority_of(1) == 80
    policy.victims(0, 9.0)
    assert policy.priority_of(1) == 35


def test_low_priority_rises_to_the_default_after_its_duration() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1], 0.0)
    policy.on_stored([2], 0.0, [Retention(0, expires_at=5.0)])
    assert policy.victims(1, 0.0) == [2]
    assert policy.victims(1, 6.0) == [1]


def test_touch_without_retention_keeps_the_priority() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1], 0.0, [Retention(80)])
    policy.on_touched([1], 0.0)
    assert policy.priority_of(1) == 80


def test_prefix_outlives_its_suffix_even_at_a_lower_priority() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1, 2], 0.0, [Retention(0), Retention(100)])
    policy.on_stored([3], 0.0)
    assert policy.victims(3, 0.0) == [3, 2, 1]


def test_chains_that_contradict_each_other_can_still_be_evicted() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    policy.on_stored([1, 2, 1], 0.0)
    policy.on_stored([2, 1], 0.0)
    policy.on_stored([3, 3], 0.0)
    assert sorted(policy.victims(9, 0.0)) == [1, 2, 3]


def test_retention_must_name_every_key_or_none() -> None:
    policy: PriorityPolicy[int] = PriorityPolicy()
    with pytest.raises(CallerError, match="1 retentions for 2 keys"):
        policy.on_stored([1, 2], 0.0, [Retention(80)])
    assert len(policy) == 0
    with pytest.raises(CallerError, match="not tracked"):
        policy.priority_of(1)

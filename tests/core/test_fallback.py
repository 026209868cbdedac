"""Without an index prompts stick to workers by hash, with bounded loads and minimal movement."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.fallback import BoundedHash, Member, affinity_key, member_seed
from kvtier.errors import CallerError, UnavailableError
from kvtier.types import InstanceId, PrefixHash

KEYS = [PrefixHash(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(2000)]


def members(count: int) -> list[Member]:
    return [Member(member_seed(InstanceId(f"worker-{number}"), 0)) for number in range(count)]


def place(fleet: list[Member], keys: list[PrefixHash]) -> list[int]:
    """Seeds that the keys go to when nothing is in flight."""
    hashing, idle = BoundedHash(fleet), np.zeros(len(fleet))
    return [fleet[hashing.choose(key, idle)].seed for key in keys]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.data())
def test_a_leaving_worker_moves_its_own_keys_only(count: int, data: st.DataObject) -> None:
    fleet = members(count + 1)
    gone = data.draw(st.integers(0, count))
    left = [member for row, member in enumerate(fleet) if row != gone]
    keys = KEYS[:300]
    for before, after in zip(place(fleet, keys), place(left, keys), strict=True):
        assert before == after or before == fleet[gone].seed


def test_a_joining_worker_takes_its_share_and_moves_nothing_else() -> None:
    before, after = place(members(9), KEYS), place(members(10), KEYS)
    joined = members(10)[9].seed
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {joined}
    assert len(moved) == pytest.approx(len(KEYS) / 10, rel=0.2)


def test_order_of_the_members_does_not_matter() -> None:
    fleet = members(7)
    assert place(fleet, KEYS[:200]) == place(fleet[::-1], KEYS[:200])


def test_keys_spread_evenly() -> None:
    counts = Counter(place(members(8), KEYS))
    assert max(counts.values()) / min(counts.values()) < 1.4


def test_weights_are_shares() -> None:
    fleet = members(4)
    fleet[2] = Member(fleet[2].seed, weight=3.0)
    counts = Counter(place(fleet, KEYS))
    assert counts[fleet[2].seed] / len(KEYS) == pytest.approx(0.5, abs=0.05)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from([1.0, 1.25, 2.0]),
    st.lists(st.integers(0, 5), min_size=1, max_size=120),
)
def test_no_worker_exceeds_its_bound(count: int, bound: float, picks: list[int]) -> None:
    """Few distinct keys, so that without the bound all would go to a few workers."""
    hashing, loads = BoundedHash(members(count), bound), np.zeros(count)
    for total, pick in enumerate(picks, start=1):
        row = hashing.choose(KEYS[pick], loads)
        loads[row] += 1
        assert loads[row] <= hashing.load_max(total, row)
    assert loads.sum() == len(picks)


def test_a_hot_key_overflows_to_several_workers_and_comes_back() -> None:
    hashing, loads = BoundedHash(members(8)), np.zeros(8)
    home = hashing.choose(KEYS[0], loads)
    for _ in range(80):
        loads[hashing.choose(KEYS[0], loads)] += 1
    assert loads.max() <= 13
    assert np.count_nonzero(loads) >= 7
    assert hashing.choose(KEYS[0], np.zeros(8)) == home


def test_an_ineligible_worker_is_passed_over_and_others_keep_their_keys() -> None:
    fleet, idle = members(5), np.zeros(5)
    hashing, eligible = BoundedHash(fleet), np.array([True, False, True, True, True])
    for key in KEYS[:200]:
        before, after = hashing.choose(key, idle), hashing.choose(key, idle, eligible)
        assert after != 1
        assert before in (1, after)


def test_fractional_loads_that_leave_nobody_under_the_bound_go_to_the_least() -> None:
    hashing = BoundedHash(members(3), 1.0)
    assert hashing.choose(KEYS[0], np.array([0.6, 0.3, 0.6])) == 1


def test_without_eligible_workers_it_is_unavailable() -> None:
    with pytest.raises(UnavailableError):
        BoundedHash(members(2)).choose(KEYS[0], np.zeros(2), np.zeros(2, dtype=np.bool_))


def test_the_affinity_key_is_the_prefix_at_the_depth_or_at_the_end() -> None:
    hashes = np.array([5, 6, 7], dtype=np.uint64)
    assert [affinity_key(hashes, depth) for depth in (1, 2, 3, 9)] == [5, 6, 7, 7]


def test_seeds_tell_ranks_and_names_apart() -> None:
    names = [("a", 0), ("a", 1), ("b", 0), ("a\0001", 0)]
    assert len({member_seed(InstanceId(name), rank) for name, rank in names}) == 4


def test_bad_input_is_refused() -> None:
    for bad in (
        lambda: BoundedHash([]),
        lambda: BoundedHash(members(2), 0.9),
        lambda: BoundedHash([Member(-1)]),
        lambda: BoundedHash([Member(1, 0.0)]),
        lambda: BoundedHash(members(2)).choose(KEYS[0], np.zeros(3)),
        lambda: BoundedHash(members(2)).choose(PrefixHash(2**64), np.zeros(2)),
        lambda: affinity_key(np.array([], dtype=np.uint64)),
        lambda: affinity_key(np.array([1], dtype=np.uint64), 0),
        lambda: member_seed(InstanceId(""), 0),
        lambda: member_seed(InstanceId("a"), -1),
    ):
        with pytest.raises(CallerError):
            bad()

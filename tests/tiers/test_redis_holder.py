"""The belief and the shared holder: pure, against a set and by hand."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.tiers.redis.belief import Belief
from kvtier.tiers.redis.holder import (
    Began,
    Completed,
    Ended,
    HolderPolicy,
    Removed,
    SharedHolder,
    Standing,
    Stored,
    prefix_hash,
)
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "clear", "begin", "seen", "end", "abandon"]),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_belief_is_the_set_that_a_naive_twin_keeps(calls: list[tuple[str, int, int]]) -> None:
    belief, twin, doubted = Belief(8), dict[int, int](), None
    belief.record_changes()
    reported: set[FrameName] = set()
    for call, number, size in calls:
        name = name_of(number)
        if call in {"add", "seen"}:
            is_new = number not in twin and len(twin) < 8
            found = belief.add(name, size) if call == "add" else bool(belief.seen([name]))
            assert found == is_new
            if is_new:
                twin[number] = size if call == "add" else 0
            elif call == "add" and number in twin:
                twin[number] = size or twin[number]
            doubted = None if doubted is None else doubted - {number}
        elif call == "remove":
            assert belief.remove(name) == (number in twin)
            twin.pop(number, None)
            doubted = None if doubted is None else doubted - {number}
        elif call == "clear":
            assert set(belief.clear()) == {name_of(n) for n in twin}
            twin.clear()
            doubted = None if doubted is None else set()
        elif call == "begin":
            belief.begin_census()
            doubted = set(twin)
        elif call == "end":
            lost = set(belief.end_census())
            assert lost == {name_of(n) for n in doubted or ()}
            for n in doubted or ():
                del twin[n]
            doubted = None
        else:
            belief.abandon_census()
            doubted = None
        assert len(belief) == len(twin)
        assert belief.bytes == sum(twin.values())
        assert set(belief.names()) == {name_of(n) for n in twin}
        for changed in belief.take_changes():
            (reported.add if changed in belief else reported.discard)(changed)
        assert reported == set(belief.names())
    assert set(belief.sample(99, random.Random(1))) == set(belief.names())


def test_a_sample_is_of_all_names_alike() -> None:
    belief = Belief(1000)
    for number in range(100):
        belief.add(name_of(number))
    dice = random.Random(3)
    counts = dict.fromkeys(belief.names(), 0)
    for _ in range(1000):
        sample = belief.sample(10, dice)
        assert len(set(sample)) == 10
        for name in sample:
            counts[name] += 1
    assert min(counts.values()) > 50
    assert max(counts.values()) < 200


def test_the_belief_is_bounded_and_says_so() -> None:
    belief = Belief(2)
    assert [belief.add(name_of(n)) for n in range(3)] == [True, True, False]
    assert belief.overflows_count == 1
    assert name_of(2) not in belief


def test_what_is_put_during_a_census_is_not_lost_by_it() -> None:
    belief = Belief(100)
    belief.add(name_of(1))
    belief.add(name_of(2))
    belief.begin_census()
    belief.add(name_of(3))
    belief.remove(name_of(1))
    belief.add(name_of(1))
    assert belief.end_census() == [name_of(2)]


POLICY = HolderPolicy()


def holder() -> tuple[Belief, SharedHolder]:
    belief = Belief(1000)
    return belief, SharedHolder(belief, POLICY)


def test_the_announcer_says_everything_it_believes_and_then_the_changes() -> None:
    belief, shared = holder()
    other = name_of(2, OTHER_NAMESPACE)
    belief.add(name_of(1))
    belief.add(other)
    shared.on_lock("id", asked_s=0.0, is_ours=True)
    assert shared.standing() is Standing.CANDIDATE
    began, *stored = shared.poll()
    assert began == Began("id")
    assert {event.namespace for event in stored if isinstance(event, Stored)} == {
        NAMESPACE,
        OTHER_NAMESPACE,
    }
    shared.begin_census(1.0)
    belief.seen([name_of(1), name_of(3)])
    assert shared.end_census() == [other]
    assert shared.standing() is Standing.ANNOUNCER
    assert shared.poll() == [
        Removed(OTHER_NAMESPACE, (prefix_hash(other),)),
        Stored(NAMESPACE, (prefix_hash(name_of(3)),)),
        Completed(),
    ]
    belief.add(name_of(4))
    belief.remove(name_of(4))
    assert shared.poll() == []


def test_a_successor_says_nothing_before_it_can_say_everything() -> None:
    """Until then an index shows what the one before said; then the truth, in one go."""
    belief, shared = holder()
    belief.add(name_of(1))
    left = [OTHER_NAMESPACE, NAMESPACE]
    shared.on_lock("id", asked_s=0.0, is_ours=True, inherited=left)
    shared.begin_census(0.0)
    belief.seen([name_of(2)])
    assert shared.standing() is Standing.CANDIDATE
    assert shared.poll() == []
    belief.seen([name_of(3)])
    assert shared.end_census() == [name_of(1)]
    began, stored, completed = shared.poll()
    assert (began, completed) == (Began("id"), Completed((OTHER_NAMESPACE,)))
    assert isinstance(stored, Stored)
    assert set(stored.hashes) == {prefix_hash(name_of(2)), prefix_hash(name_of(3))}


def test_a_census_that_takes_too_long_is_not_waited_for() -> None:
    belief, shared = holder()
    belief.add(name_of(1))
    shared.on_lock("id", asked_s=0.0, is_ours=True, inherited=[NAMESPACE, OTHER_NAMESPACE])
    shared.begin_census(0.0)
    for now in range(1, 10):
        shared.on_lock("id", asked_s=now, is_ours=True)
        shared.on_time(now)
        assert shared.poll() == []
    shared.on_time(HolderPolicy().patience_s)
    assert shared.poll() == [Began("id"), Stored(NAMESPACE, (prefix_hash(name_of(1)),))]
    belief.seen([name_of(1)])
    shared.end_census()
    assert shared.poll() == [Completed((OTHER_NAMESPACE,))]


def test_a_successor_whose_term_ends_before_it_spoke_takes_nothing_back() -> None:
    belief, shared = holder()
    belief.add(name_of(1))
    shared.on_lock("id", asked_s=0.0, is_ours=True, inherited=[NAMESPACE])
    shared.on_lock("id", asked_s=1.0, is_ours=False)
    assert shared.standing() is Standing.BYSTANDER
    assert shared.poll() == []


def test_a_block_named_by_an_engines_digest_is_not_announced() -> None:
    belief, shared = holder()
    belief.add(FrameName(KeyKind.ENGINE_DIGEST, b"\1" * 32, NAMESPACE))
    shared.on_lock("id", asked_s=0.0, is_ours=True)
    assert shared.poll() == [Began("id")]


def test_a_term_that_was_not_prolonged_ends_by_itself() -> None:
    belief, shared = holder()
    shared.on_lock("id", asked_s=10.0, is_ours=True)
    shared.poll()
    shared.on_time(10.0 + POLICY.lock_ttl_s - 0.001)
    assert shared.standing() is Standing.CANDIDATE
    belief.add(name_of(1))
    shared.on_time(10.0 + POLICY.lock_ttl_s)
    assert shared.standing() is Standing.BYSTANDER
    assert shared.poll() == [Ended()]
    assert shared.poll() == []
    shared.on_lock("id", asked_s=20.0, is_ours=True)
    assert shared.poll() == [Began("id"), Stored(NAMESPACE, (prefix_hash(name_of(1)),))]


def test_an_end_and_a_beginning_that_nobody_saw_leave_what_is_needed() -> None:
    _, shared = holder()
    shared.on_lock("id", asked_s=0.0, is_ours=True)
    shared.on_lock("id", asked_s=1.0, is_ours=False)
    assert shared.poll() == []
    shared.on_lock("id", asked_s=2.0, is_ours=True)
    assert shared.poll() == [Began("id")]
    shared.on_lock("id", asked_s=3.0, is_ours=False)
    shared.on_lock("id", asked_s=4.0, is_ours=True)
    shared.on_lock("id", asked_s=5.0, is_ours=False)
    assert shared.poll() == [Ended()]


def test_another_id_is_another_holder() -> None:
    _, shared = holder()
    shared.on_lock("one", asked_s=0.0, is_ours=True)
    shared.poll()
    shared.on_lock("two", asked_s=1.0, is_ours=True)
    assert shared.poll() == [Ended(), Began("two")]


def test_a_bystander_announces_and_counts_nothing() -> None:
    belief, shared = holder()
    shared.on_lock("id", asked_s=0.0, is_ours=False)
    belief.add(name_of(1))
    assert shared.poll() == []
    assert not shared.is_census_due(1e9)


def counted() -> tuple[Belief, SharedHolder]:
    """An announcer with a census behind it, at 0 s, of 1,000 names."""
    belief, shared = holder()
    shared.on_lock("id", asked_s=0.0, is_ours=True)
    shared.on_server("run", 1000, 50)
    assert shared.is_census_due(0.0)
    shared.begin_census(0.0)
    belief.seen(map(name_of, range(1000)))
    shared.end_census()
    assert not shared.is_census_due(1.0)
    return belief, shared


def test_a_census_is_due_after_a_while_and_sooner_where_counters_give_reason() -> None:
    assert counted()[1].is_census_due(POLICY.census_s)
    _, shared = counted()
    shared.on_server("run", 1000, 54)
    assert not shared.is_census_due(1.0)
    shared.on_server("run", 1000, 56)
    assert shared.is_census_due(1.0)
    _, shared = counted()
    shared.on_sampled(64, 1)
    assert shared.is_census_due(1.0)
    _, shared = counted()
    shared.on_server("run", 990, 50)
    assert shared.is_census_due(1.0)


def test_another_server_process_or_an_empty_one_clears_the_belief() -> None:
    for run_id, keys in (("other", 1000), ("run", 0)):
        belief, shared = counted()
        assert len(shared.on_server(run_id, keys, 0)) == 1000
        assert len(belief) == 0
        assert shared.is_census_due(1.0)


def test_an_abandoned_census_loses_nothing_and_is_due_again() -> None:
    belief, shared = counted()
    shared.begin_census(1.0)
    shared.abandon_census()
    assert len(belief) == 1000
    assert shared.is_census_due(1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"look_s": 0.0},
        {"look_s": 3.0},
        {"sample_count": 0},
        {"drift_max": 1.0},
        {"census_s": float("inf")},
        {"lock_ttl_s": float("inf")},
    ],
)
def test_a_policy_that_cannot_work_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        HolderPolicy(**changes)  # type: ignore[arg-type]

"""Breakers open and close by the table, ejection never empties a fleet, retries stay in budget."""

from itertools import product
from math import floor, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.health import (
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerPolicy,
    BreakerState,
    Outcome,
    OutlierPolicy,
    Outliers,
    RetryBudget,
    ramp,
)
from kvtier.errors import CallerError
from kvtier.types import HolderId

OK, BAD, GONE = Outcome.SUCCESS, Outcome.FAILURE, Outcome.CANCELLED
POLICY = BreakerPolicy(failures_max=3, slow_s=1.0, slow_max=3, open_s=1.0, open_s_max=8.0)


def call(breaker: Breaker, outcome: Outcome, now: float, elapsed_s: float = 0.1) -> bool:
    """One call if the breaker lets it through; says whether it did."""
    permit = breaker.acquire(now)
    if permit is not None:
        breaker.report(permit, outcome, elapsed_s, now)
    return permit is not None


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(POLICY)
    for _ in range(3):
        call(breaker, BAD, now)
    assert breaker.state(now) is BreakerState.OPEN
    return breaker


# Breaker


def test_consecutive_failures_open_it_and_a_success_between_does_not_let_them_add_up() -> None:
    breaker = Breaker(POLICY)
    for outcome in (BAD, BAD, OK, BAD, BAD):
        assert call(breaker, outcome, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    call(breaker, BAD, 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not call(breaker, OK, 0.5)
    assert breaker.tripped_count == 1


def test_consecutive_slow_successes_open_it() -> None:
    breaker = Breaker(POLICY)
    for _ in range(3):
        call(breaker, OK, 0.0, elapsed_s=2.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_cancelled_calls_count_for_nothing() -> None:
    breaker = Breaker(POLICY)
    for outcome in (BAD, BAD, GONE, GONE, GONE):
        call(breaker, outcome, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    call(breaker, BAD, 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_after_its_time_it_lets_one_probe_through_at_a_time() -> None:
    breaker = opened()
    assert breaker.acquire(0.9) is None
    probe = breaker.acquire(1.0)
    assert probe is not None
    assert breaker.acquire(1.0) is None
    breaker.report(probe, OK, 0.1, 1.1)
    assert breaker.state(1.1) is BreakerState.HALF_OPEN
    assert call(breaker, OK, 1.1)
    assert breaker.state(1.1) is BreakerState.CLOSED


def test_a_failed_probe_opens_it_again_for_twice_as_long_up_to_the_most() -> None:
    breaker, now = opened(), 0.0
    for wait in (1.0, 2.0, 4.0, 8.0, 8.0):
        assert not call(breaker, BAD, now + wait - 0.01)
        now += wait
        assert call(breaker, BAD, now)
        assert breaker.state(now) is BreakerState.OPEN


def test_a_breaker_that_had_closed_opens_again_for_its_first_time_only() -> None:
    breaker = opened()
    call(breaker, BAD, 1.0)
    for _ in range(POLICY.probes_to_close):
        assert call(breaker, OK, 3.0)
    assert breaker.state(3.0) is BreakerState.CLOSED
    for _ in range(POLICY.failures_max):
        call(breaker, BAD, 10.0)
    assert breaker.state(10.9) is BreakerState.OPEN
    assert breaker.state(11.0) is BreakerState.HALF_OPEN


def test_a_slow_probe_is_a_failed_probe() -> None:
    breaker = opened()
    assert call(breaker, OK, 1.0, elapsed_s=5.0)
    assert breaker.state(1.0) is BreakerState.OPEN


def test_a_cancelled_probe_is_given_back() -> None:
    breaker = opened()
    assert call(breaker, GONE, 1.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    assert call(breaker, OK, 1.0)


def test_a_probe_that_never_ends_does_not_block_the_breaker_for_ever() -> None:
    breaker = opened()
    assert breaker.acquire(1.0) is not None
    assert breaker.state(31.0) is BreakerState.OPEN
    assert breaker.acquire(33.0) is not None


def test_outcomes_from_before_a_change_of_state_are_ignored() -> None:
    breaker = Breaker(POLICY)
    early = [breaker.acquire(0.0) for _ in range(4)]
    for _ in range(3):
        call(breaker, BAD, 0.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    for permit in early:
        assert permit is not None
        breaker.report(permit, OK, 0.1, 1.0)
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    for _ in range(2):
        call(breaker, OK, 1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED
    for permit in early:
        assert permit is not None
        breaker.report(permit, BAD, 0.1, 1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_the_transition_table_names_every_change_of_state() -> None:
    changes = {pair: TRANSITIONS.get(pair) for pair in product(BreakerState, BreakerEvent)}
    assert {pair for pair, target in changes.items() if target} == {
        (BreakerState.CLOSED, BreakerEvent.TRIPPED),
        (BreakerState.OPEN, BreakerEvent.COOLED),
        (BreakerState.HALF_OPEN, BreakerEvent.PROBE_FAILED),
        (BreakerState.HALF_OPEN, BreakerEvent.PROBES_PASSED),
    }


STEPS = st.lists(
    st.tuples(st.sampled_from([OK, BAD, GONE]), st.floats(0, 5), st.floats(0, 2)), max_size=80
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_happened_a_breaker_closes_again_once_calls_succeed(
    steps: list[tuple[Outcome, float, float]],
) -> None:
    breaker, now = Breaker(POLICY), 0.0
    for outcome, passed, elapsed_s in steps:
        now += passed
        state = breaker.state(now)
        assert call(breaker, outcome, now, elapsed_s) == (state is not BreakerState.OPEN)
    now += POLICY.open_s_max + 1.0  # (now + 8.0) - now may be less than 8.0
    for _ in range(POLICY.probes_to_close):
        call(breaker, OK, now)
    assert breaker.state(now) is BreakerState.CLOSED
    assert call(breaker, OK, now)


# Outliers


def fleet(count: int, policy: OutlierPolicy | None = None) -> tuple[Outliers, list[HolderId]]:
    outliers, workers = Outliers(policy), [HolderId(number) for number in range(count)]
    for worker in workers:
        outliers.join(worker, 0.0)
    return outliers, workers


def fail(outliers: Outliers, worker: HolderId, now: float, times: int = 5) -> bool:
    return [outliers.report(worker, BAD, now) for _ in range(times)][-1]


def test_consecutive_errors_eject_a_worker_for_a_while() -> None:
    outliers, workers = fleet(4)
    assert fail(outliers, workers[2], 0.0)
    assert outliers.eligible(workers, (), 9.9) == (0, 1, 3)
    assert outliers.eligible(workers, (), 10.0) == (0, 1, 2, 3)


def test_each_further_ejection_lasts_longer_and_good_service_is_forgiven() -> None:
    outliers, workers = fleet(4)
    fail(outliers, workers[0], 0.0)
    fail(outliers, workers[0], 10.0)
    assert workers[0] in outliers.ejected(29.9)
    assert workers[0] not in outliers.ejected(30.0)
    fail(outliers, workers[0], 30.0 + 150.0)  # Two and a half forgiving times in service
    assert workers[0] not in outliers.ejected(190.1)


def test_a_success_between_errors_keeps_a_worker_in() -> None:
    outliers, workers = fleet(4)
    fail(outliers, workers[0], 0.0, times=4)
    outliers.report(workers[0], OK, 0.0)
    assert not fail(outliers, workers[0], 0.0, times=4)


def test_a_single_worker_is_never_ejected() -> None:
    outliers, workers = fleet(1)
    assert not fail(outliers, workers[0], 0.0, times=50)
    assert outliers.eligible(workers, (), 0.0) == (0,)


def test_in_panic_ejected_workers_are_used_but_not_unavailable_ones() -> None:
    outliers, workers = fleet(4, OutlierPolicy(panic_share=0.5))
    fail(outliers, workers[0], 0.0)
    assert outliers.eligible(workers, {workers[1]}, 0.0) == (2, 3)
    assert outliers.eligible(workers, {workers[1], workers[2]}, 0.0) == (0, 3)


def test_late_outcomes_of_a_worker_that_left_are_ignored() -> None:
    outliers, workers = fleet(4)
    outliers.leave(workers[0])
    assert not fail(outliers, workers[0], 0.0)
    assert outliers.ejected(0.0) == frozenset()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1, 0.34, 0.5, 1.0]),
    st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from([OK, BAD, BAD, GONE]), st.floats(0, 30)),
        max_size=150,
    ),
)
def test_ejection_never_exceeds_its_share_and_ends(
    count: int, share: float, reports: list[tuple[int, Outcome, float]]
) -> None:
    policy = OutlierPolicy(errors_max=2, ejected_share_max=share, ejection_s_max=60.0)
    outliers, workers = fleet(count, policy)
    now = 0.0
    for number, outcome, passed in reports:
        now += passed
        outliers.report(HolderId(number % count), outcome, now)
        assert len(outliers.ejected(now)) <= floor(share * count + 1e-9)
        assert outliers.eligible(workers, (), now)
    assert outliers.eligible(workers, (), now + 60.0) == tuple(workers)


# Retry budget, slow start


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_retries_stay_within_their_share_of_any_window(
    steps: list[tuple[float, int, int]],
) -> None:
    budget, now = RetryBudget(ratio=0.1, floor_per_s=0.5, burst=10.0), 0.0
    marks = [(0.0, 0, 0)]
    for passed, requests, attempts in steps:
        now += passed
        for _ in range(requests):
            budget.request(now)
        granted = sum(budget.take(now) for _ in range(attempts))
        marks.append((now, marks[-1][1] + requests, marks[-1][2] + granted))
        for then, asked, given_ in marks:
            allowed = 10 + 0.1 * (marks[-1][1] - asked) + 0.5 * (now - then)
            assert marks[-1][2] - given_ <= allowed + 1e-6


def test_an_exhausted_budget_refuses_until_requests_or_time_refill_it() -> None:
    budget = RetryBudget(ratio=0.1, floor_per_s=0.5, burst=2.0)
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.request(0.0)
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert budget.take(2.0)


def test_slow_start_grows_to_full_part() -> None:
    assert [ramp(age) for age in (0.0, 15.0, 30.0, 99.0)] == [0.1, 0.5, 1.0, 1.0]
    assert ramp(0.0, window_s=0.0) == 1.0


def test_senseless_policies_are_refused() -> None:
    for bad in (
        lambda: BreakerPolicy(failures_max=0),
        lambda: BreakerPolicy(open_s=0.0),
        lambda: BreakerPolicy(open_s=2.0, open_s_max=1.0),
        lambda: BreakerPolicy(open_s_max=inf),
        lambda: BreakerPolicy(slow_s=0.0),
        lambda: OutlierPolicy(errors_max=0),
        lambda: OutlierPolicy(ejected_share_max=1.5),
        lambda: OutlierPolicy(forgive_s=0.0),
        lambda: RetryBudget(ratio=2.0),
        lambda: RetryBudget(burst=0.0),
        lambda: ramp(1.0, start=0.0),
        lambda: ramp(1.0, window_s=-1.0),
    ):
        with pytest.raises(CallerError):
            bad()

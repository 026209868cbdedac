"""Quotas grant at most burst plus rate times seconds, and say when to come back."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.quotas import Quota, QuotaAnswer, Quotas, QuotaVerdict
from kvtier.errors import CallerError
from kvtier.types import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
QUOTA = Quota(requests_per_s=2.0, requests_burst=5.0, tokens_per_s=100.0, tokens_burst=1000.0)
GRANTED = QuotaVerdict(QuotaAnswer.GRANTED)


def test_a_burst_is_granted_and_then_the_rate() -> None:
    quotas = Quotas()
    answers = [quotas.take(A, QUOTA, 1, 0.0).answer for _ in range(6)]
    assert answers == [QuotaAnswer.GRANTED] * 5 + [QuotaAnswer.LATER]
    assert quotas.take(A, QUOTA, 1, 0.0).retry_after_s == pytest.approx(0.5)
    assert quotas.take(A, QUOTA, 1, 0.5) == GRANTED


def test_tokens_limit_as_well_as_requests() -> None:
    quotas = Quotas()
    assert quotas.take(A, QUOTA, 900, 0.0) == GRANTED
    verdict = quotas.take(A, QUOTA, 300, 0.0)
    assert verdict.answer is QuotaAnswer.LATER
    assert verdict.retry_after_s == pytest.approx(2.0)
    assert quotas.take(A, QUOTA, 300, 2.0) == GRANTED


def test_a_refusal_takes_nothing() -> None:
    quotas = Quotas()
    for _ in range(50):
        quotas.take(A, QUOTA, 999.0, 0.0)
    assert quotas.take(A, QUOTA, 1.0, 0.0) == GRANTED


def test_a_request_over_the_burst_is_never_granted() -> None:
    assert Quotas().take(A, QUOTA, 1001, 0.0).answer is QuotaAnswer.NEVER


def test_tenants_do_not_touch_each_other() -> None:
    quotas = Quotas()
    quotas.take(A, QUOTA, 1000, 0.0)
    assert quotas.take(B, QUOTA, 1000, 0.0) == GRANTED


def test_settling_charges_and_refunds() -> None:
    quotas = Quotas()
    quotas.take(A, QUOTA, 500, 0.0)
    quotas.settle(A, 700, 0.0)
    assert quotas.take(A, QUOTA, 100, 0.0).retry_after_s == pytest.approx(3.0)
    quotas.settle(A, -300, 0.0)
    assert quotas.take(A, QUOTA, 100, 0.0) == GRANTED
    quotas.settle(A, -1e9, 0.0)
    assert quotas.take(A, QUOTA, 1000, 0.0) == GRANTED


def test_a_changed_quota_holds_at_once() -> None:
    quotas = Quotas()
    quotas.take(A, QUOTA, 1, 0.0)
    small = Quota(tokens_per_s=1.0, tokens_burst=10.0)
    assert quotas.take(A, small, 11, 0.0).answer is QuotaAnswer.NEVER
    assert quotas.take(A, small, 10, 0.0) == GRANTED
    assert quotas.take(A, small, 10, 1.0).retry_after_s == pytest.approx(9.0)


def test_a_lowered_burst_of_requests_holds_at_once() -> None:
    quotas = Quotas()
    quotas.take(A, QUOTA, 1, 0.0)
    small = Quota(requests_per_s=2.0, requests_burst=1.0)
    assert quotas.take(A, small, 1, 0.0) == GRANTED
    assert quotas.take(A, small, 1, 0.0).retry_after_s == pytest.approx(0.5)


def test_what_is_given_back_never_fills_a_bucket_beyond_its_burst() -> None:
    quotas = Quotas()
    quotas.take(A, QUOTA, 1, 0.0)
    quotas.settle(A, -500.0, 0.0)
    assert quotas.take(A, QUOTA, 1000, 0.0) == GRANTED
    assert quotas.take(A, QUOTA, 1, 0.0).answer is QuotaAnswer.LATER


def test_no_limits_grant_everything() -> None:
    quotas = Quotas()
    assert all(quotas.take(A, Quota(), 1e9, 0.0) == GRANTED for _ in range(100))


def test_routers_that_share_a_quota_grant_it_once_together() -> None:
    routers, granted = [Quotas() for _ in range(4)], 0
    share = Quota(requests_per_s=40.0, requests_burst=40.0).scaled(0.25)
    for step in range(1000):
        for router in routers:
            granted += router.take(A, share, 1, step * 0.01) == GRANTED
    assert granted == pytest.approx(40 + 40 * 9.99, rel=0.02)


def test_full_buckets_are_forgotten_when_room_is_needed_and_others_are_not() -> None:
    quotas = Quotas(tenants_max=2)
    quotas.take(A, QUOTA, 1, 0.0)
    quotas.take(B, QUOTA, 1000, 0.0)
    assert quotas.take(C, QUOTA, 1, 0.0).answer is QuotaAnswer.TENANTS_FULL
    assert quotas.take(C, QUOTA, 1, 1.0) == GRANTED
    assert len(quotas) == 2
    assert quotas.take(B, QUOTA, 1000, 1.0).answer is QuotaAnswer.LATER


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1000)), max_size=60))
def test_no_window_sees_more_than_burst_and_rate(steps: list[tuple[float, float]]) -> None:
    quotas, now = Quotas(), 0.0
    marks = [(0.0, 0, 0.0)]
    for passed, tokens in steps:
        now += passed
        granted = quotas.take(A, QUOTA, tokens, now) == GRANTED
        marks.append((now, marks[-1][1] + granted, marks[-1][2] + tokens * granted))
        for then, requests, used in marks:
            assert marks[-1][1] - requests <= 5 + 2 * (now - then) + 1e-6
            assert marks[-1][2] - used <= 1000 + 100 * (now - then) + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 1000), min_size=1, max_size=20))
def test_waiting_as_told_is_enough(sizes: list[float]) -> None:
    quotas, now = Quotas(), 0.0
    for tokens in sizes:
        verdict = quotas.take(A, QUOTA, tokens, now)
        if verdict.answer is QuotaAnswer.LATER:
            now += verdict.retry_after_s + 1e-6
            assert quotas.take(A, QUOTA, tokens, now) == GRANTED


def test_senseless_input_is_refused() -> None:
    for bad in (
        lambda: Quota(requests_per_s=0.0),
        lambda: Quota(requests_burst=0.5),
        lambda: Quota(tokens_burst=float("nan")),
        lambda: QUOTA.scaled(0.0),
        lambda: QUOTA.scaled(1.1),
        lambda: Quotas(0),
        lambda: Quotas().take(A, QUOTA, -1, 0.0),
        lambda: Quotas().take(A, QUOTA, inf, 0.0),
        lambda: Quotas().settle(A, inf, 0.0),
    ):
        with pytest.raises(CallerError):
            bad()

"""Queues are bounded, fair by tenant in tokens, ordered by class without starvation."""

from collections import Counter
from math import inf

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.core.admission import (
    Admission,
    AdmissionPolicy,
    ClassPolicy,
    OfferAnswer,
    Ticket,
    TicketId,
)
from kvtier.errors import CallerError
from kvtier.types import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def ticket(
    number: int,
    tenant_id: TenantId = A,
    tokens: int = 100,
    priority: int = 0,
    deadline_s: float = inf,
    weight: float = 1.0,
) -> Ticket:
    return Ticket(TicketId(number), tenant_id, priority, tokens, deadline_s, weight)


def drain(admission: Admission, count: int = 10_000, now: float = 0.0) -> list[Ticket]:
    """Take turns, each released at once."""
    taken: list[Ticket] = []
    while len(taken) < count:
        turn = admission.take(now)
        if turn.ticket is None:
            break
        admission.release(turn.ticket.number)
        taken.append(turn.ticket)
    return taken


# Fairness


def test_one_tenant_is_served_in_the_order_of_its_requests() -> None:
    admission = Admission()
    for number in range(20):
        admission.offer(ticket(number), 0.0)
    assert [t.number for t in drain(admission)] == list(range(20))


def test_a_tenant_with_a_flood_does_not_hold_up_another() -> None:
    admission = Admission()
    for number in range(200):
        admission.offer(ticket(number, A), 0.0)
    drain(admission, 50)
    admission.offer(ticket(1000, B), 0.0)
    assert B in [t.tenant_id for t in drain(admission, 2)]


def test_a_tenant_that_was_idle_has_saved_up_nothing() -> None:
    admission = Admission()
    admission.offer(ticket(1, B), 0.0)
    admission.offer(ticket(2, C), 0.0)
    for number in range(10, 150):
        admission.offer(ticket(number, A), 0.0)
    drain(admission, 60)
    for number in range(1000, 1100):  # B was here before, D is new: both join as equals
        admission.offer(ticket(number, B), 0.0)
        admission.offer(ticket(1000 + number, TenantId("d")), 0.0)
    counts = Counter(t.tenant_id for t in drain(admission, 60))
    assert [counts[t] for t in (A, B, TenantId("d"))] == pytest.approx([20, 20, 20], abs=1)


def test_fairness_is_in_tokens_not_in_requests() -> None:
    admission = Admission()
    for number in range(100):
        admission.offer(ticket(number, A, tokens=1000), 0.0)
        admission.offer(ticket(1000 + number, B, tokens=100), 0.0)
    counts = Counter(t.tenant_id for t in drain(admission, 55))
    assert counts[A] == pytest.approx(5, abs=1)
    assert counts[B] == pytest.approx(50, abs=1)


def test_a_heavier_tenant_gets_its_multiple() -> None:
    admission = Admission()
    for number in range(100):
        admission.offer(ticket(number, A, weight=3.0), 0.0)
        admission.offer(ticket(1000 + number, B), 0.0)
    assert Counter(t.tenant_id for t in drain(admission, 80))[A] == pytest.approx(60, abs=2)


def test_tokens_used_beyond_the_estimate_are_charged_at_the_next_turn() -> None:
    admission = Admission()
    for number in range(100):
        admission.offer(ticket(number, A), 0.0)
        admission.offer(ticket(1000 + number, B), 0.0)
    counts: Counter[TenantId] = Counter()
    for _ in range(80):
        taken = admission.take(0.0).ticket
        assert taken is not None
        counts[taken.tenant_id] += 1
        admission.release(taken.number, tokens_used=300 if taken.tenant_id == A else 100)
    assert counts[B] / counts[A] == pytest.approx(3, rel=0.15)


SIZES = st.lists(st.integers(1, 5000), min_size=60, max_size=60)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(1, 60))
def test_backlogged_tenants_get_equal_tokens_up_to_one_request_each(
    ours: list[int], theirs: list[int], turns: int
) -> None:
    admission = Admission()
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        admission.offer(ticket(number, A, tokens=one), 0.0)
        admission.offer(ticket(1000 + number, B, tokens=other), 0.0)
    served: Counter[TenantId] = Counter()
    for taken in drain(admission, turns):
        served[taken.tenant_id] += taken.tokens_count
    assert abs(served[A] - served[B]) <= max(ours) + max(theirs)


# Classes


def test_a_higher_class_goes_first() -> None:
    admission = Admission()
    admission.offer(ticket(1, priority=2), 0.0)
    admission.offer(ticket(2, priority=1), 0.0)
    admission.offer(ticket(3, priority=0), 0.0)
    assert [t.number for t in drain(admission)] == [3, 2, 1]


@settings(max_examples=150, deadline=None)
@example([1, 0], [1] * 6)
@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
)
def test_a_waiting_class_gets_a_turn_within_its_patience_and_one_for_each_other_class(
    patience: list[int], arrivals: list[int]
) -> None:
    classes = tuple(ClassPolicy(passed_over_max=turns) for turns in patience)
    admission = Admission(AdmissionPolicy(classes, tenant_queued_requests_max=1000))
    waited = [0] * len(classes)
    number = 0
    for arrival in arrivals:
        for priority in {arrival % len(classes), 0}:  # The highest class is always backlogged
            admission.offer(ticket(number, priority=priority), 0.0)
            number += 1
        before = [admission.load(p).queued_requests for p in range(len(classes))]
        (taken,) = drain(admission, 1)
        for priority, queued in enumerate(before):
            passed_over = queued > 0 and taken.priority != priority
            waited[priority] = waited[priority] + 1 if passed_over else 0
            assert waited[priority] <= patience[priority] + len(classes)


def test_a_class_at_its_running_ceiling_lets_the_others_go() -> None:
    classes = (ClassPolicy(running_requests_max=1), ClassPolicy())
    admission = Admission(AdmissionPolicy(classes))
    for number in range(3):
        admission.offer(ticket(number), 0.0)
        admission.offer(ticket(10 + number, priority=1), 0.0)
    taken = [admission.take(0.0).ticket for _ in range(4)]
    assert [t.priority for t in taken if t] == [0, 1, 1, 1]
    assert admission.take(0.0).ticket is None
    assert admission.release(TicketId(0))
    following = admission.take(0.0).ticket
    assert following is not None
    assert following.number == 1


# Bounds


def test_a_full_class_refuses_with_the_time_it_needs_to_drain() -> None:
    admission = Admission(AdmissionPolicy((ClassPolicy(queued_requests_max=10),)))
    for step in range(100):
        admission.offer(ticket(step), step * 0.1)
        drain(admission, 1, now=step * 0.1)  # About 1,000 tokens a second
    for number in range(10):
        assert admission.offer(ticket(100 + number), 10.0).answer is OfferAnswer.QUEUED
    offer = admission.offer(ticket(999), 10.0)
    assert offer.answer is OfferAnswer.CLASS_FULL
    assert 1.0 <= offer.retry_after_s < 3.0
    assert admission.offer(ticket(999), 1e6).retry_after_s == 30.0


def test_tokens_are_bounded_as_well() -> None:
    admission = Admission(AdmissionPolicy((ClassPolicy(queued_tokens_max=250),)))
    answers = [admission.offer(ticket(number), 0.0).answer for number in range(3)]
    assert answers == [OfferAnswer.QUEUED, OfferAnswer.QUEUED, OfferAnswer.CLASS_FULL]


def test_one_tenant_cannot_fill_the_queue() -> None:
    admission = Admission(AdmissionPolicy(tenant_queued_requests_max=2))
    answers = [admission.offer(ticket(number), 0.0).answer for number in range(3)]
    assert answers[-1] is OfferAnswer.TENANT_FULL
    assert admission.offer(ticket(9, B), 0.0).answer is OfferAnswer.QUEUED


def test_running_tokens_are_bounded() -> None:
    admission = Admission(AdmissionPolicy(running_tokens_max=150))
    for number in range(3):
        admission.offer(ticket(number), 0.0)
    assert admission.take(0.0).ticket
    assert admission.take(0.0).ticket
    assert admission.take(0.0).ticket is None


# Deadlines and cancelling


def test_a_ticket_past_its_deadline_is_dropped_and_told() -> None:
    admission = Admission()
    admission.offer(ticket(1, deadline_s=5.0), 0.0)
    admission.offer(ticket(2, deadline_s=3.0), 0.0)
    admission.offer(ticket(3), 0.0)
    assert admission.next_deadline_s() == 3.0
    turn = admission.take(5.0)
    assert [t.number for t in turn.expired] == [2, 1]
    assert turn.ticket is not None
    assert turn.ticket.number == 3
    assert admission.load(0).queued_requests == 0


def test_a_ticket_that_comes_late_is_not_queued() -> None:
    assert Admission().offer(ticket(1, deadline_s=1.0), 1.0).answer is OfferAnswer.LATE


def test_a_cancelled_ticket_is_not_served_and_costs_nothing() -> None:
    admission = Admission()
    for number in range(4):
        admission.offer(ticket(number, A if number % 2 else B), 0.0)
    assert admission.cancel(TicketId(0))
    assert not admission.cancel(TicketId(0))
    assert sorted(t.number for t in drain(admission)) == [1, 2, 3]
    assert not admission.cancel(TicketId(1))
    assert not admission.release(TicketId(1))


def test_a_tenant_that_cancels_and_comes_back_is_served_once() -> None:
    admission = Admission()
    admission.offer(ticket(1, B), 0.0)
    for number in range(10, 60):
        admission.offer(ticket(number, A), 0.0)
        admission.cancel(TicketId(number))
    admission.offer(ticket(99, A), 0.0)
    assert sorted(t.number for t in drain(admission)) == [1, 99]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "take", "cancel", "release", "wait"]),
        st.integers(0, 40),
        st.integers(1, 300),
    ),
    max_size=120,
)


@settings(max_examples=100, deadline=None)
@given(ACTIONS)
def test_the_queue_agrees_with_a_plain_list_and_keeps_its_bounds(
    actions: list[tuple[str, int, int]],
) -> None:
    classes = (
        ClassPolicy(queued_requests_max=6, queued_tokens_max=900, running_requests_max=3),
        ClassPolicy(queued_requests_max=6, passed_over_max=2),
    )
    policy = AdmissionPolicy(classes, tenant_queued_requests_max=4, running_requests_max=5)
    admission, waiting, running, now = Admission(policy), dict[int, Ticket](), set[int](), 0.0
    per_class = Counter[int]()
    for action, pick, tokens in actions:
        if action == "offer" and pick not in waiting and pick not in running:
            new = ticket(
                pick, TenantId(str(pick % 3)), tokens, pick % 2, now + tokens if pick % 4 else inf
            )
            if admission.offer(new, now).answer is OfferAnswer.QUEUED:
                waiting[pick] = new
        elif action == "take":
            turn = admission.take(now)
            gone = {number for number, t in waiting.items() if t.deadline_s <= now}
            assert {t.number for t in turn.expired} == gone
            for number in gone:
                del waiting[number]
            may_run = [
                t
                for t in waiting.values()
                if len(running) < 5
                and per_class[t.priority] < classes[t.priority].running_requests_max
            ]
            assert (turn.ticket is not None) == bool(may_run)  # Work conserving
            if turn.ticket is not None:
                assert waiting.pop(turn.ticket.number) == turn.ticket
                running.add(turn.ticket.number)
                per_class[turn.ticket.priority] += 1
        elif action == "cancel":
            assert admission.cancel(TicketId(pick)) == (waiting.pop(pick, None) is not None)
        elif action == "release":
            assert admission.release(TicketId(pick), tokens) == (pick in running)
            if pick in running:
                running.remove(pick)
                per_class[pick % 2] -= 1
        elif action == "wait":
            now += tokens / 4
        for priority, limits in enumerate(classes):
            load = admission.load(priority)
            mine = [t for t in waiting.values() if t.priority == priority]
            assert (load.queued_requests, load.running_requests) == (len(mine), per_class[priority])
            assert load.queued_tokens == sum(t.tokens_count for t in mine)
            assert load.queued_requests <= limits.queued_requests_max
            assert load.queued_tokens <= limits.queued_tokens_max


def test_senseless_input_is_refused() -> None:
    admission = Admission()
    admission.offer(ticket(1), 0.0)
    for bad in (
        lambda: admission.offer(ticket(1), 0.0),
        lambda: admission.offer(ticket(2, priority=3), 0.0),
        lambda: admission.offer(ticket(2, priority=-1), 0.0),
        lambda: ticket(2, tokens=0),
        lambda: ticket(2, tokens=1 << 40),
        lambda: ticket(2, weight=0.0),
        lambda: ticket(2, weight=inf),
        lambda: ticket(2, deadline_s=float("nan")),
        lambda: admission.load(7),
        lambda: ClassPolicy(queued_requests_max=0),
        lambda: ClassPolicy(running_requests_max=0),
        lambda: ClassPolicy(passed_over_max=-1),
        lambda: AdmissionPolicy(()),
        lambda: AdmissionPolicy(retry_after_s_max=0.0),
    ):
        with pytest.raises(CallerError):
            bad()

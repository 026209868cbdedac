"""Reservations: granted once, counted, and gone by release, time, router or epoch."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier import limits
from kvtier.core.reservations import (
    Reservation,
    ReservationConfig,
    Reservations,
    ReserveVerdict,
    RouterLife,
    WorkerTotals,
)
from kvtier.errors import CallerError, LimitError
from kvtier.types import Epoch, HolderId, PrefixHash

R1 = RouterLife("r", Epoch(1))
R2 = RouterLife("r", Epoch(2))
W, V = HolderId(7), HolderId(8)
NOTHING = WorkerTotals()


def wanted(
    key: str, router: RouterLife = R1, worker: HolderId = W, tokens: int = 100, ttl_ms: int = 1000
) -> Reservation:
    return Reservation(router, key, worker, tokens, ttl_ms, (PrefixHash(1), PrefixHash(2)))


def test_a_reservation_counts_for_its_worker_until_it_is_released() -> None:
    book = Reservations()
    assert book.reserve(wanted("a"), 0.0).verdict is ReserveVerdict.GRANTED
    assert book.reserve(wanted("b", tokens=50), 0.0).verdict is ReserveVerdict.GRANTED
    assert book.totals(W) == WorkerTotals(2, 150, 4)
    assert book.totals(V) == NOTHING
    assert book.release(R1, "a") == wanted("a")
    assert book.release(R1, "a") is None
    assert book.totals(W) == WorkerTotals(1, 50, 2)


def test_a_repeated_call_counts_once_and_does_not_live_longer() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    assert book.reserve(wanted("a"), 0.9).verdict is ReserveVerdict.REPEATED
    assert book.totals(W) == WorkerTotals(1, 100, 2)
    assert book.tick(1.0) == (wanted("a"),)


def test_one_key_cannot_mean_two_things() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    assert book.reserve(wanted("a", tokens=7), 0.0).verdict is ReserveVerdict.CONFLICT
    assert book.totals(W) == WorkerTotals(1, 100, 2)


def test_a_reservation_ends_with_its_ttl() -> None:
    book = Reservations()
    book.reserve(wanted("late", ttl_ms=2000), 0.0)
    book.reserve(wanted("early", ttl_ms=500), 0.0)
    assert book.next_deadline() == 0.5
    assert book.tick(0.49) == ()
    assert book.tick(9.0) == (wanted("early", ttl_ms=500), wanted("late", ttl_ms=2000))
    assert book.totals(W) == NOTHING
    assert book.next_deadline() is None


def test_a_key_can_be_used_again_when_it_is_over() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    book.release(R1, "a")
    book.reserve(wanted("a"), 0.8)
    assert book.tick(1.0) == (), "the expiry of the first use must not end the second"
    assert book.tick(1.8) == (wanted("a"),)


def test_reservations_die_with_the_stream_of_their_router() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    book.reserve(wanted("b", router=RouterLife("other", Epoch(1))), 0.0)
    assert book.router_gone(R2) == ()
    assert book.router_gone(R1) == (wanted("a"),)
    assert len(book) == 1
    assert book.reserve(wanted("a"), 0.1).verdict is ReserveVerdict.GRANTED


def test_a_new_epoch_of_a_router_ends_the_old_and_fences_it() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    outcome = book.reserve(wanted("b", router=R2), 0.0)
    assert outcome.verdict is ReserveVerdict.GRANTED
    assert outcome.ended == (wanted("a"),)
    assert book.reserve(wanted("c"), 0.0).verdict is ReserveVerdict.FENCED
    assert book.release(R1, "b") is None
    assert len(book) == 1


def test_a_forgotten_worker_takes_its_reservations_along() -> None:
    book = Reservations()
    book.reserve(wanted("a"), 0.0)
    book.reserve(wanted("b", worker=V), 0.0)
    assert book.worker_gone(W) == (wanted("a"),)
    assert book.worker_gone(W) == ()
    assert book.totals(V) == WorkerTotals(1, 100, 2)


def test_a_router_that_reserves_without_end_is_stopped() -> None:
    book = Reservations(ReservationConfig(per_router_max=2))
    verdicts = [book.reserve(wanted(str(n)), 0.0).verdict for n in range(3)]
    assert verdicts[2] is ReserveVerdict.ROUTER_FULL
    other = wanted("x", router=RouterLife("other", Epoch(1)))
    assert book.reserve(other, 0.0).verdict is ReserveVerdict.GRANTED


def test_a_worker_takes_no_more_than_its_cap() -> None:
    book = Reservations(ReservationConfig(per_worker_max=2))
    verdicts = [book.reserve(wanted(str(n)), 0.0).verdict for n in range(3)]
    assert verdicts[2] is ReserveVerdict.WORKER_FULL
    assert book.reserve(wanted("v", worker=V), 0.0).verdict is ReserveVerdict.GRANTED


def test_routers_are_bounded_and_an_idle_one_makes_room() -> None:
    book = Reservations()
    for number in range(limits.ROUTERS_COUNT_MAX):
        router = RouterLife(f"r{number}", Epoch(1))
        assert book.reserve(wanted("a", router=router), 0.0).verdict is ReserveVerdict.GRANTED
    extra = wanted("a", router=RouterLife("extra", Epoch(1)))
    assert book.reserve(extra, 0.0).verdict is ReserveVerdict.ROUTERS_FULL
    book.release(RouterLife("r3", Epoch(1)), "a")
    assert book.reserve(extra, 0.0).verdict is ReserveVerdict.GRANTED


def test_all_routers_together_predict_no_more_blocks_than_the_cap() -> None:
    book = Reservations(ReservationConfig(blocks_max=5))
    routers = [RouterLife(f"r{n}", Epoch(1)) for n in range(3)]
    verdicts = [book.reserve(wanted("a", router=one), 0.0).verdict for one in routers]
    assert verdicts == [ReserveVerdict.GRANTED, ReserveVerdict.GRANTED, ReserveVerdict.ROUTERS_FULL]
    book.release(routers[0], "a")
    assert book.reserve(wanted("a", router=routers[2]), 0.0).verdict is ReserveVerdict.GRANTED


def test_bad_reservations_are_refused() -> None:
    with pytest.raises(LimitError, match="ttl_ms"):
        wanted("a", ttl_ms=limits.RESERVATION_TTL_MS_MAX + 1)
    with pytest.raises(CallerError, match="ttl_ms"):
        wanted("a", ttl_ms=0)
    with pytest.raises(CallerError, match="prefill_tokens"):
        wanted("a", tokens=-1)
    with pytest.raises(CallerError, match="key"):
        wanted("")
    with pytest.raises(CallerError, match="router_id"):
        wanted("a", router=RouterLife("", Epoch(1)))
    with pytest.raises(CallerError, match="epoch"):
        wanted("a", router=RouterLife("r", Epoch(0)))
    with pytest.raises(CallerError, match="worker"):
        wanted("a", worker=HolderId(-1))
    with pytest.raises(LimitError, match="blocks"):
        Reservation(R1, "a", W, 1, 1, (PrefixHash(1),) * (limits.BATCH_BLOCKS_MAX + 1))
    with pytest.raises(CallerError):
        ReservationConfig(per_router_max=0)
    with pytest.raises(CallerError):
        ReservationConfig(per_worker_max=limits.RESERVATIONS_PER_WORKER_MAX + 1)


class ReservationsAgainstAList(RuleBasedStateMachine):
    """Totals and expiry against a plain list that is scanned each time."""

    keys = st.sampled_from("abc")
    workers = st.sampled_from([W, V])
    routers = st.sampled_from([RouterLife("p", Epoch(1)), RouterLife("q", Epoch(1))])

    def __init__(self) -> None:
        super().__init__()
        self.book = Reservations(ReservationConfig(per_router_max=2, per_worker_max=3))
        self.now = 0.0
        self.held: list[tuple[Reservation, float]] = []

    def _drop(self, gone: list[Reservation]) -> None:
        self.held = [(one, end) for one, end in self.held if one not in gone]

    @rule(key=keys, router=routers, worker=workers, ttl_ms=st.integers(1, 3000))
    def reserve(self, key: str, router: RouterLife, worker: HolderId, ttl_ms: int) -> None:
        new = wanted(key, router, worker, 10, ttl_ms)
        same = [one for one, _ in self.held if one.router == router and one.key == key]
        if same:
            expected = ReserveVerdict.REPEATED if same == [new] else ReserveVerdict.CONFLICT
        elif sum(one.router == router for one, _ in self.held) >= 2:
            expected = ReserveVerdict.ROUTER_FULL
        elif sum(one.worker == worker for one, _ in self.held) >= 3:
            expected = ReserveVerdict.WORKER_FULL
        else:
            expected = ReserveVerdict.GRANTED
            self.held.append((new, self.now + ttl_ms / 1000))
        assert self.book.reserve(new, self.now).verdict is expected

    @rule(key=keys, router=routers)
    def release(self, key: str, router: RouterLife) -> None:
        same = [one for one, _ in self.held if one.router == router and one.key == key]
        assert self.book.release(router, key) == (same[0] if same else None)
        self._drop(same)

    @rule(router=routers)
    def router_gone(self, router: RouterLife) -> None:
        mine = [one for one, _ in self.held if one.router == router]
        assert set(self.book.router_gone(router)) == set(mine)
        self._drop(mine)

    @rule(millis=st.integers(0, 2000))
    def tick(self, millis: int) -> None:
        self.now += millis / 1000
        over = [one for one, end in self.held if end <= self.now]
        assert set(self.book.tick(self.now)) == set(over)
        self._drop(over)

    @invariant()
    def totals_agree(self) -> None:
        assert len(self.book) == len(self.held)
        for worker in (W, V):
            count = sum(one.worker == worker for one, _ in self.held)
            assert self.book.totals(worker) == WorkerTotals(count, 10 * count, 2 * count)


ReservationsAgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestReservationsAgainstAList = ReservationsAgainstAList.TestCase

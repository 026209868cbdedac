"""Points over time against a naive count, and what the watcher notices."""

from contextlib import suppress
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.workers import HolderView
from kvtier.errors import UnavailableError
from kvtier.limits import HISTORY_EVENTS_COUNT_MAX, HISTORY_POINTS_COUNT_MAX
from kvtier.openai.usage import Usage
from kvtier.replica import ReplicaLag
from kvtier.types import HolderKind, InstanceId, Trust
from kvtier_router.front.history import History
from kvtier_router.routing.values import FailureKind
from kvtier_router.ui.journal import Journal, Level
from kvtier_router.ui.series import POINT_S, Series, quantiles
from kvtier_router.ui.watching import IndexSight, Watcher
from tests.router.routing.bench import Bench, name
from tests.router.ui.jobs import Ended
from tests.support.virtual_fleet import info_of, view_of

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([200, 302, 400, 404, 429, 500, 503, 0]), st.integers(0, 100)),
        st.floats(0.1, 7.0),
    ),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=80)
def test_points_and_totals_add_up_to_every_request_once(
    steps: list[tuple[int, int] | float],
) -> None:
    history, now = History(), 0.0
    series = Series(history, now)
    statuses, cached = [], 0
    for step in steps:
        if isinstance(step, float):
            now += step
            series.take(now, 0, 0)
            continue
        status, tokens = step
        statuses.append(status)
        cached += tokens
        history.add(Ended(status=status, usage=Usage(100, 1, tokens)).job(), now, 0.1)
    series.take(now + 2 * POINT_S, 3, 4)
    points = list(series.after(0))
    total = series.total
    assert total.requests == len(statuses) == sum(one.counts.requests for one in points)
    assert total.answered == sum(200 <= status < 400 for status in statuses)
    assert total.refused == sum(400 <= s < 500 and s != 429 for s in statuses)
    assert total.limited == statuses.count(429)
    assert total.failed == sum(status >= 500 for status in statuses)
    assert total.left == statuses.count(0)
    assert total.cached_tokens == cached == sum(one.counts.cached_tokens for one in points)
    assert total.told_tokens == 100 * len(statuses)
    assert [one.number for one in points] == list(range(1, len(points) + 1))
    assert (points[-1].running, points[-1].queued) == (3, 4)


def test_an_hour_of_points_is_kept_and_no_more() -> None:
    series = Series(History(), 0.0)
    for number in range(1, HISTORY_POINTS_COUNT_MAX + 10):
        series.take(number * POINT_S, 0, 0)
    points = list(series.after(0))
    assert len(points) == HISTORY_POINTS_COUNT_MAX
    assert [one.number for one in series.after(points[-3].number)] == [
        points[-2].number,
        points[-1].number,
    ]


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([]) is None
    assert quantiles([0.3]) == (0.3, 0.3, 0.3)
    assert quantiles([float(n) for n in range(100, -1, -1)]) == (50.0, 95.0, 99.0)


class Watched:
    """A watcher over the virtual fleet."""

    def __init__(self, workers_count: int = 2) -> None:
        self.bench = Bench(workers_count)
        self.journal = Journal()
        self.epoch = 7
        self.sight = IndexSight("embedded", (), self.bench.replica.look, self.lag)
        self.watcher = Watcher(self.bench.router, self.sight, self.journal)
        self.seen = 0
        self.tick()

    def lag(self) -> ReplicaLag:
        return ReplicaLag(self.bench.replica.trust, 0.0, 1, self.epoch, "index:1")

    def tick(self) -> list[tuple[Level, str, str]]:
        """What is new after a second."""
        self.bench.advance(1.0)
        self.watcher.tick(self.bench.clock.now)
        fresh = [(e.level, e.kind, e.subject) for e in self.journal.after(self.seen)][::-1]
        self.seen = self.journal.count
        return fresh

    def tell(self, view: HolderView) -> None:
        self.bench.replica.tell(view)


def test_nothing_is_told_where_nothing_happens() -> None:
    watched = Watched()
    assert [watched.tick() for _ in range(8)] == [[]] * 8


def test_workers_and_stores_that_come_fall_silent_return_and_leave_are_told() -> None:
    watched = Watched()
    watched.tell(view_of(5, info_of(5)))
    assert watched.tick() == [(Level.GOOD, "worker joined", "w5")]
    store = replace(info_of(6), kind=HolderKind.STORE, instance=InstanceId("s1"), card=None)
    watched.tell(view_of(6, store))
    assert watched.tick() == [(Level.GOOD, "store joined", "s1")]
    watched.tell(view_of(5, info_of(5), is_hidden=True))
    assert watched.tick() == [(Level.BAD, "worker fell silent", "w5")]
    watched.tell(view_of(5, info_of(5)))
    assert watched.tick() == [(Level.GOOD, "worker was heard again", "w5")]
    watched.bench.replica.remove(5)
    assert watched.tick() == [(Level.BAD, "worker left", "w5")]


def test_a_restart_is_seen_by_a_new_description_of_the_same_holder() -> None:
    watched = Watched()
    watched.tell(view_of(0, replace(info_of(0))))
    assert watched.tick() == [(Level.WARNING, "worker restarted", "w0")]


def test_degraded_holders_are_told_with_their_reason() -> None:
    watched = Watched()
    view = replace(view_of(1, info_of(1), trust=Trust.DEGRADED), degraded_reason="a gap")
    watched.tell(view)
    assert watched.tick() == [(Level.WARNING, "worker is DEGRADED", "w1")]
    assert next(iter(watched.journal.after(0))).detail == "a gap"
    watched.tell(view_of(1, info_of(1)))
    assert watched.tick() == [(Level.GOOD, "worker is EXACT again", "w1")]


def test_an_index_that_is_lost_returns_or_is_another_is_told() -> None:
    watched = Watched()
    watched.bench.replica.lose()
    assert watched.tick() == [(Level.BAD, "index lost", "index:1")]
    assert watched.tick() == []
    watched.bench.replica.find()
    assert watched.tick() == [(Level.GOOD, "index returned", "index:1")]
    watched.epoch = 8
    watched.bench.replica.holders = dict(watched.bench.replica.holders)  # another picture
    assert watched.tick() == [(Level.WARNING, "index replaced", "index:1")]


def test_drains_and_ejections_of_this_router_are_told_and_taken_back() -> None:
    watched = Watched()
    watched.bench.router.drain(name(0))
    assert watched.tick() == [(Level.INFO, "worker drains", "w0")]
    watched.bench.router.undrain(name(0))
    assert watched.tick() == [(Level.GOOD, "worker takes requests again", "w0")]
    with suppress(UnavailableError):
        for _ in range(40):
            watched.bench.route().placement.failed(FailureKind.CONNECT)
    troubles = watched.tick()
    assert {level for level, _, _ in troubles} == {Level.BAD}
    assert {kind for _, kind, _ in troubles} <= {"breaker opened", "worker ejected"}
    assert {subject for _, _, subject in troubles} <= {"w0", "w1"}


def test_many_that_were_there_before_are_one_event() -> None:
    bench, journal = Bench(50), Journal()
    watcher = Watcher(bench.router, IndexSight("embedded", (), bench.replica.look), journal)
    watcher.tick(bench.clock.now)
    assert [(event.kind, event.subject) for event in journal.after(0)] == [
        ("holders found", "50 holders"),
        ("index followed", ""),
    ]


def test_only_the_last_events_are_kept() -> None:
    journal = Journal()
    for number in range(HISTORY_EVENTS_COUNT_MAX + 5):
        journal.note(float(number), Level.INFO, "kind", str(number))
    kept = list(journal.after(0))
    assert len(kept) == HISTORY_EVENTS_COUNT_MAX
    assert kept[0].subject == str(HISTORY_EVENTS_COUNT_MAX + 4)
    assert [event.number for event in journal.after(journal.count - 2)] == [
        journal.count,
        journal.count - 1,
    ]

"""The history of requests: bounded, cheap, and true to the decisions of their time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.limits import (
    HISTORY_BASES_COUNT_MAX,
    HISTORY_REQUESTS_COUNT_MAX,
    HISTORY_ROWS_COUNT_MAX,
)
from kvtier_router.front.calls import Api
from kvtier_router.front.history import NAME_CHARS_MAX, History
from kvtier_router.routing.values import Candidate
from tests.router.routing.bench import PROMPT, Bench, chain, name
from tests.router.ui.jobs import Ended, EndedCall
from tests.support.virtual_fleet import BLOCK_TOKENS, words


@given(st.lists(st.sampled_from([200, 404, 429, 503, 0]), max_size=40), st.integers(1, 12))
@settings(max_examples=60)
def test_it_keeps_exactly_the_newest_in_order(statuses: list[int], most: int) -> None:
    history = History(most)
    for number, status in enumerate(statuses, 1):
        history.add(Ended(request_id=f"r{number}", status=status).job(), float(number), 0.1)
    expected = list(enumerate(statuses, 1))[-most:][::-1]
    assert [(seen.number, seen.status) for seen in history.below()] == expected
    assert [seen.number for seen in history.newest(3)] == [number for number, _ in expected[:3]]
    assert history.count == len(statuses)
    kept = dict(expected)
    for number in range(1, len(statuses) + 2):
        found = history.find(number)
        assert (found is not None) == (number in kept)
        assert found is None or (found.number, found.status) == (number, kept[number])
        below = [seen.number for seen in history.below(number)]
        assert below == [one for one, _ in expected if one < number]


def test_what_was_refused_before_admission_is_kept_without_a_decision() -> None:
    history = History()
    history.refused(Api.CHAT, "r1", 401, "UnauthenticatedError", 5.0)
    (seen,) = history.below()
    assert (seen.status, seen.error, seen.told, seen.total_s) == (
        401,
        "UnauthenticatedError",
        None,
        0,
    )


def test_a_model_name_of_any_length_costs_a_bounded_piece_of_memory() -> None:
    history = History()
    history.add(Ended(call=EndedCall(model="m" * 100_000)).job(), 1.0, 0.1)
    assert len(next(history.below()).model) == NAME_CHARS_MAX


def test_the_reasons_of_a_request_stay_those_of_its_time() -> None:
    bench, history = Bench(), History()
    bench.replica.store(2, chain(PROMPT)[:30])
    first = bench.serve()
    history.add(Ended(decision=first).job(), 1.0, 0.1)
    basis = history.basis(1)
    assert basis is not None
    before = basis.rows(10)
    for number in range(20):  # other prompts, other holders, other loads
        bench.replica.store(number % 4, chain(words(f"other{number}", 20 * BLOCK_TOKENS)))
        bench.route(words(f"other{number}", 20 * BLOCK_TOKENS))
    bench.route()
    assert basis.rows(10) == before
    chosen = next(row for row in before if row.chosen)
    assert chosen.worker == name(2)
    assert chosen.matched_tokens["gpu"] == 30 * BLOCK_TOKENS
    assert {row.worker for row in before} == {name(number) for number in range(4)}
    assert [row.total_s for row in before] == sorted(row.total_s for row in before)


def test_only_the_best_rows_are_told_and_always_the_chosen_one() -> None:
    bench = Bench(workers_count=8)
    decision = bench.route()
    assert decision.basis is not None
    rows = decision.basis.rows(2)
    assert decision.basis.rows_count == 8
    assert 2 <= len(rows) <= 3
    assert decision.worker in [row.worker for row in rows if row.chosen]


class _Rows:
    """A basis of many rows."""

    def __init__(self, rows_count: int) -> None:
        self.rows_count = rows_count

    def rows(self, most: int) -> tuple[Candidate, ...]:
        return ()


@pytest.fixture
def decided() -> Ended:
    return Ended(decision=Bench().route())


@pytest.mark.parametrize("rows_count", [1, 1000, HISTORY_ROWS_COUNT_MAX + 1])
def test_what_is_kept_of_decisions_is_bounded_in_rows(decided: Ended, rows_count: int) -> None:
    history = History()
    assert decided.decision is not None
    object.__setattr__(decided.decision, "basis", _Rows(rows_count))
    for _ in range(HISTORY_BASES_COUNT_MAX + 50):
        history.add(decided.job(), 1.0, 0.1)
    kept = [n for n in range(1, history.count + 1) if history.basis(n) is not None]
    assert kept[-1] == history.count
    assert len(kept) <= HISTORY_BASES_COUNT_MAX
    assert len(kept) == 1 or len(kept) * rows_count <= HISTORY_ROWS_COUNT_MAX
    assert len(history) == min(history.count, HISTORY_REQUESTS_COUNT_MAX)

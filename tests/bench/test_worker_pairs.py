"""What the worker bench makes of its measurements: ratios of neighbours and how sure they are."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_pairs import Pairs, interval, quantile

SECONDS = st.floats(1e-4, 1e3)


def test_a_pair_is_compared_with_its_own_neighbour_only() -> None:
    pairs = Pairs()
    for slow in (1.0, 10.0, 100.0):  # the machine slows down; the ratio stays
        pairs.add(2.0 * slow, 4.0 * slow)
    result = pairs.result("half", 0.6, Bar.AT_MOST)
    assert result == Result("half", 0.5, "ratio", 0.6, Bar.AT_MOST, (0.5, 0.5))
    assert result.ok


@settings(max_examples=20)
@given(st.lists(SECONDS, min_size=1, max_size=12))
def test_an_interval_lies_within_the_values_and_holds_their_median(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) <= low <= quantile(values, 0.5) <= high <= max(values)
    assert interval(values) == (low, high)


def test_values_that_scatter_have_a_wide_interval() -> None:
    low, high = interval([1.0, 1.0, 1.0, 1.0, 1.0])
    wide_low, wide_high = interval([0.5, 0.9, 1.0, 1.1, 1.5])
    assert low == high
    assert wide_high - wide_low > 0.1


def test_an_interval_may_be_of_another_statistic() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0], of=max)
    assert high == 4.0
    assert low >= 1.0


@pytest.mark.parametrize(("at", "value"), [(0.0, 1.0), (0.5, 3.0), (1.0, 5.0)])
def test_a_quantile_is_of_the_sorted_values(at: float, value: float) -> None:
    assert math.isclose(quantile([5.0, 1.0, 3.0, 2.0, 4.0], at), value)


def test_an_interval_is_told_in_json_and_only_where_there_is_one() -> None:
    told = Result("a", 1.0, "ratio", interval=(0.5, 2.0)).as_json()
    assert told["interval"] == [0.5, 2.0]
    assert "interval" not in Result("a", 1.0, "ratio").as_json()

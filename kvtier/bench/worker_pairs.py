"""Pairs of neighbouring measurements, and how sure their ratio is.

The two things that are compared take turns, so that whatever else the machine does falls on both; a
figure is the median of the ratios of neighbours, and its interval comes from drawing the pairs
again (bootstrap, percentiles). What must not live here: what is measured.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtier.bench.report import Bar, Result

_DRAWS: Final = 2000
_CONFIDENCE: Final = 0.95


@dataclass(slots=True)
class Pairs:
    """Measurements of two things, made in turns."""

    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)

    def add(self, first: float, second: float) -> None:
        """Take in neighbours; mutates."""
        self.first.append(first)
        self.second.append(second)

    def ratios(self) -> list[float]:
        """First against second, pair by pair."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    def result(self, name: str, bar: float | None, kind: Bar) -> Result:
        """The median ratio, with its interval."""
        ratios = self.ratios()
        low, high = interval(ratios)
        return Result(name, statistics.median(ratios), "ratio", bar, kind, (low, high))


def interval(
    values: Sequence[float], of: Callable[[Sequence[float]], float] = statistics.median
) -> tuple[float, float]:
    """Where 95 % of a statistic's values lie when `values` are drawn again. Pure: fixed seed."""
    rng = np.random.default_rng(0)
    drawn = [of(rng.choice(values, len(values)).tolist()) for _ in range(_DRAWS)]
    rest = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(drawn, (rest, 1 - rest)).tolist()
    return low, high


def quantile(values: Sequence[float], at: float) -> float:
    """The value below which a part `at` of the values lies."""
    return float(np.quantile(np.asarray(values), at))

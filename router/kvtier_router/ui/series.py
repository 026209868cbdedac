"""What became of requests over time: a point each 5 s for an hour, made of the history.

What must not live here: counting while a request is under way.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvtier.limits import HISTORY_POINTS_COUNT_MAX
from kvtier_router.front.history import History, Seen

POINT_S: Final = 5.0
_TTFTS_COUNT_MAX: Final = 4_096
"""Of one point; beyond it the quantiles are those of the first ones."""
_TOO_MANY: Final = 429


@dataclass(slots=True)
class Counts:
    """Requests by what became of them, and tokens of those that were routed."""

    requests: int = 0
    answered: int = 0
    """2xx and 3xx."""
    refused: int = 0
    """4xx but 429."""
    limited: int = 0
    """429."""
    failed: int = 0
    """5xx."""
    left: int = 0
    """The client went before the answer had begun."""
    retried: int = 0
    """Sent to more than one worker."""
    prompt_tokens: int = 0
    matched_tokens: int = 0
    """Of them, those that the chosen workers were expected to have."""
    told_tokens: int = 0
    """Prompt tokens of answers that told how much was cached."""
    cached_tokens: int = 0
    """Of them, those that were."""

    def take(self, seen: Seen) -> None:
        """Count one request."""
        self.requests += 1
        status = seen.status
        if 200 <= status < 400:
            self.answered += 1
        elif status >= 500:
            self.failed += 1
        elif status == _TOO_MANY:
            self.limited += 1
        elif status:
            self.refused += 1
        else:
            self.left += 1
        if seen.attempts > 1:
            self.retried += 1
        if seen.told is not None:
            self.prompt_tokens += seen.prompt_tokens
            self.matched_tokens += seen.matched_tokens
        usage = seen.usage
        if usage is not None and usage.cached_tokens is not None:
            self.told_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens


class Point(NamedTuple):
    """One interval that is over."""

    number: int
    """From 1."""
    ended_at: float
    """Monotonic seconds."""
    counts: Counts
    ttft_s: tuple[float, float, float] | None
    """Quantiles 0.5, 0.95, 0.99; None where nothing was answered."""
    running: int
    """Requests under way at its end."""
    queued: int


@dataclass(slots=True)
class _Open:
    """The interval that is under way."""

    ends_at: float
    counts: Counts = field(default_factory=Counts)
    ttfts: list[float] = field(default_factory=list)


class Series:
    """See the module. Belongs to one event loop."""

    def __init__(self, history: History, now: float) -> None:
        self._history = history
        self._taken = 0
        self._open = _Open(now + POINT_S)
        self._points: deque[Point] = deque(maxlen=HISTORY_POINTS_COUNT_MAX)
        self.count = 0
        self.total = Counts()
        """Since the start."""

    def take(self, now: float, running: int, queued: int) -> None:
        """Take in what has ended since the last call; call it about once a second. O(new)."""
        history = self._history
        for seen in history.newest(history.count - self._taken):
            self.total.take(seen)
            self._open.counts.take(seen)
            if seen.ttft_s is not None and len(self._open.ttfts) < _TTFTS_COUNT_MAX:
                self._open.ttfts.append(seen.ttft_s)
        self._taken = history.count
        if now >= self._open.ends_at:
            self._close(now, running, queued)

    def after(self, number: int) -> Iterator[Point]:
        """Points numbered above `number`, the oldest first. O(points)."""
        return (point for point in self._points if point.number > number)

    def _close(self, now: float, running: int, queued: int) -> None:
        self.count += 1
        over = self._open
        self._points.append(
            Point(self.count, now, over.counts, quantiles(over.ttfts), running, queued)
        )
        self._open = _Open(max(over.ends_at + POINT_S, now))


def quantiles(values: list[float]) -> tuple[float, float, float] | None:
    """The values at 0.5, 0.95 and 0.99 by nearest rank; None of nothing. Sorts in place."""
    if not values:
        return None
    values.sort()
    last = len(values) - 1
    return values[round(0.5 * last)], values[round(0.95 * last)], values[round(0.99 * last)]

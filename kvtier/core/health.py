"""Whom to call: circuit breaker per backend, outlier ejection per fleet, retry budget, slow start.

State machines with written-out transitions; every method takes `now` and nothing waits. They answer
"may I", the shell calls and reports what came of it.

What must not live here: probing itself, timers, jitter (a shell adds its own), and load (scoring).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import floor, inf, isfinite
from typing import Final

from kvtier.errors import CallerError
from kvtier.limits import HOLDERS_COUNT_MAX
from kvtier.types import HolderId

# Circuit breaker


class BreakerState(Enum):
    """CLOSED lets all through, OPEN none, HALF_OPEN a few probes."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class BreakerEvent(Enum):
    """What moves a breaker."""

    TRIPPED = auto()
    """Enough consecutive failures or slow successes."""
    COOLED = auto()
    """The open time is over."""
    PROBE_FAILED = auto()
    PROBES_PASSED = auto()


TRANSITIONS: Final[Mapping[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.COOLED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBES_PASSED): BreakerState.CLOSED,
}
"""All of them; any other (state, event) changes nothing."""


class Outcome(Enum):
    """What came of a call."""

    SUCCESS = auto()
    FAILURE = auto()
    CANCELLED = auto()
    """Says nothing about the backend: gives a probe back, counts for neither."""


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens and how it closes."""

    failures_max: int = 5
    """Consecutive failures that open it."""
    slow_s: float = inf
    """A success that takes longer is slow; inf switches this off."""
    slow_max: int = 5
    """Consecutive slow successes that open it."""
    open_s: float = 1.0
    """First open time; doubles with each failed probe, up to open_s_max."""
    open_s_max: float = 30.0
    probes_max: int = 1
    """Probes under way at once in HALF_OPEN."""
    probes_to_close: int = 2
    """Consecutive good probes that close it."""
    probe_timeout_s: float = 30.0
    """A probe whose outcome was never reported counts as failed after this."""

    def __post_init__(self) -> None:
        counts = (self.failures_max, self.slow_max, self.probes_max, self.probes_to_close)
        if min(counts) < 1:
            raise CallerError("the counts of a BreakerPolicy must be at least 1")
        if not (0 < self.open_s <= self.open_s_max < inf and 0 < self.probe_timeout_s < inf):
            raise CallerError("a BreakerPolicy needs 0 < open_s <= open_s_max and a probe timeout")
        if not self.slow_s > 0:
            raise CallerError(f"slow_s must be positive, got {self.slow_s!r}")


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one call; hand it back with the outcome."""

    life: int
    """Which life of the breaker's state it was given in: outcomes of earlier lives are ignored."""


class Breaker:
    """Circuit breaker of one backend. Constant size. Starts CLOSED."""

    __slots__ = (
        "_failures",
        "_life",
        "_open_s",
        "_passed",
        "_policy",
        "_probes",
        "_since_s",
        "_slow",
        "_state",
        "_tripped_count",
    )

    def __init__(self, policy: BreakerPolicy | None = None) -> None:
        self._policy = policy or BreakerPolicy()
        self._state = BreakerState.CLOSED
        self._since_s = -inf
        self._life = 0
        self._failures = self._slow = self._probes = self._passed = 0
        self._open_s = self._policy.open_s
        self._tripped_count = 0

    @property
    def tripped_count(self) -> int:
        """How often it opened, for metrics."""
        return self._tripped_count

    def state(self, now: float) -> BreakerState:
        """Its state at `now`; mutates only by the passing of time. O(1)."""
        if self._state is BreakerState.OPEN and now - self._since_s >= self._open_s:
            self._move(BreakerEvent.COOLED, now)
        elif (
            self._state is BreakerState.HALF_OPEN
            and self._probes > 0
            and now - self._since_s >= self._policy.probe_timeout_s
        ):
            self._move(BreakerEvent.PROBE_FAILED, now)
        return self._state

    def acquire(self, now: float) -> Permit | None:
        """A permit to call now, or None: do not call. Mutates in HALF_OPEN. O(1)."""
        state = self.state(now)
        if state is BreakerState.OPEN:
            return None
        if state is BreakerState.HALF_OPEN:
            if self._probes >= self._policy.probes_max:
                return None
            self._probes += 1
            self._since_s = now
        return Permit(self._life)

    def report(self, permit: Permit, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """Tell what came of a permitted call, once a permit; mutates. O(1).

        An outcome from before the last change of state is ignored: a late success does not close a
        breaker, nor a late failure reopen one.
        """
        state = self.state(now)
        if permit.life != self._life or state is BreakerState.OPEN:
            return
        slow = elapsed_s > self._policy.slow_s
        if state is BreakerState.HALF_OPEN:
            self._probe_ended(outcome, slow, now)
        elif outcome is not Outcome.CANCELLED:
            self._failures = self._failures + 1 if outcome is Outcome.FAILURE else 0
            self._slow = self._slow + 1 if slow else 0
            if self._failures >= self._policy.failures_max or self._slow >= self._policy.slow_max:
                self._move(BreakerEvent.TRIPPED, now)

    def _probe_ended(self, outcome: Outcome, slow: bool, now: float) -> None:
        self._probes = max(0, self._probes - 1)
        if outcome is Outcome.CANCELLED:
            return
        if outcome is Outcome.FAILURE or slow:
            self._move(BreakerEvent.PROBE_FAILED, now)
            return
        self._passed += 1
        if self._passed >= self._policy.probes_to_close:
            self._move(BreakerEvent.PROBES_PASSED, now)

    def _move(self, event: BreakerEvent, now: float) -> None:
        target = TRANSITIONS.get((self._state, event))
        if target is None:
            return
        policy = self._policy
        if event is BreakerEvent.TRIPPED:
            self._open_s = policy.open_s
        elif event is BreakerEvent.PROBE_FAILED:
            self._open_s = min(policy.open_s_max, 2.0 * self._open_s)
        self._tripped_count += target is BreakerState.OPEN
        self._state, self._since_s = target, now
        self._life += 1
        self._failures = self._slow = self._probes = self._passed = 0


# Outlier ejection


@dataclass(frozen=True, slots=True)
class OutlierPolicy:
    """When a worker is taken out of the choice (as Envoy's outlier detection)."""

    errors_max: int = 5
    """Consecutive errors that eject."""
    base_s: float = 10.0
    """Ejected for base_s times the number of recent ejections ..."""
    ejection_s_max: float = 300.0
    """... up to this."""
    forgive_s: float = 60.0
    """Each such time in service takes one from that number."""
    ejected_share_max: float = 0.5
    """Of the fleet; more are never ejected at once."""
    panic_share: float = 0.3
    """Where fewer than this share would be left in all (breakers, drains and ejections), ejections
    are ignored: better a doubtful worker than all load on a few."""

    def __post_init__(self) -> None:
        if self.errors_max < 1 or not 0 < self.base_s <= self.ejection_s_max < inf:
            raise CallerError("an OutlierPolicy needs errors_max >= 1 and 0 < base_s <= max")
        if not 0 <= self.ejected_share_max <= 1 or not 0 <= self.panic_share <= 1:
            raise CallerError("the shares of an OutlierPolicy must be in [0, 1]")
        if not 0 < self.forgive_s < inf:
            raise CallerError(f"forgive_s must be positive, got {self.forgive_s!r}")


@dataclass(slots=True)
class _Standing:
    errors_count: int = 0
    ejections_count: int = 0
    ejected_until_s: float = -inf
    credited_s: float = 0.0
    """Since when service counts towards forgiveness."""


class Outliers:
    """Which workers of one fleet are ejected. One small record a member."""

    def __init__(self, policy: OutlierPolicy | None = None) -> None:
        self._policy = policy or OutlierPolicy()
        self._standing: dict[HolderId, _Standing] = {}

    def join(self, worker: HolderId, now: float) -> None:
        """Add a member in good standing; mutates. A known one keeps its standing."""
        if worker not in self._standing and len(self._standing) >= HOLDERS_COUNT_MAX:
            raise CallerError("too many workers")
        self._standing.setdefault(worker, _Standing(credited_s=now))

    def leave(self, worker: HolderId) -> None:
        """Forget a member; mutates."""
        self._standing.pop(worker, None)

    def report(self, worker: HolderId, outcome: Outcome, now: float) -> bool:
        """Count an outcome; mutates. True if this ejected the worker. O(members) on an ejection.

        Outcomes of non-members are ignored: they come late.
        """
        standing = self._standing.get(worker)
        if standing is None or outcome is Outcome.CANCELLED or now < standing.ejected_until_s:
            return False
        if outcome is Outcome.SUCCESS:
            standing.errors_count = 0
            return False
        standing.errors_count += 1
        if standing.errors_count < self._policy.errors_max or not self._room(now):
            return False
        self._eject(standing, now)
        return True

    def ejected(self, now: float) -> frozenset[HolderId]:
        """The members that are ejected at `now`; does not mutate. O(members)."""
        return frozenset(w for w, s in self._standing.items() if now < s.ejected_until_s)

    def eligible(
        self, workers: Sequence[HolderId], unavailable: Collection[HolderId], now: float
    ) -> tuple[HolderId, ...]:
        """Of `workers`, those neither unavailable (breaker open, draining) nor ejected; in panic
        the ejected ones count as well. Does not mutate. O(workers)."""
        available = tuple(w for w in workers if w not in unavailable)
        out = self.ejected(now)
        kept = tuple(w for w in available if w not in out)
        panic = len(kept) < self._policy.panic_share * len(workers)
        return available if panic or not kept else kept

    def _room(self, now: float) -> bool:
        most = floor(self._policy.ejected_share_max * len(self._standing) + 1e-9)
        return len(self.ejected(now)) + 1 <= most

    def _eject(self, standing: _Standing, now: float) -> None:
        policy = self._policy
        served_s = max(0.0, now - max(standing.credited_s, standing.ejected_until_s))
        forgiven = int(min(served_s / policy.forgive_s, standing.ejections_count))
        standing.ejections_count += 1 - forgiven
        ejection_s = min(policy.ejection_s_max, policy.base_s * standing.ejections_count)
        standing.ejected_until_s = standing.credited_s = now + ejection_s
        standing.errors_count = 0


# Retry budget and slow start


class RetryBudget:
    """Retries (or hedges) may be `ratio` of the requests, plus a floor for quiet times. O(1) size.

    Over any stretch of time the retries granted are at most
    `burst + ratio * requests + floor_per_s * seconds`.
    """

    __slots__ = ("_burst", "_floor_per_s", "_ratio", "_tokens", "_updated_s")

    def __init__(self, ratio: float = 0.1, floor_per_s: float = 0.5, burst: float = 10.0) -> None:
        if not (0 <= ratio <= 1 and 0 <= floor_per_s < inf and 1 <= burst < inf):
            raise CallerError("a retry budget needs ratio in [0, 1], floor >= 0, burst >= 1")
        self._ratio, self._floor_per_s, self._burst = ratio, floor_per_s, burst
        self._tokens = burst
        self._updated_s = -inf

    def request(self, now: float) -> None:
        """Count a first attempt; mutates."""
        self._refill(now)
        self._tokens = min(self._burst, self._tokens + self._ratio)

    def take(self, now: float) -> bool:
        """Whether one retry may be made now; mutates if so."""
        self._refill(now)
        if self._tokens < 1.0 - 1e-9:  # Ten tenths are one
            return False
        self._tokens = max(0.0, self._tokens - 1.0)
        return True

    def _refill(self, now: float) -> None:
        if isfinite(self._updated_s) and now > self._updated_s:
            earned = (now - self._updated_s) * self._floor_per_s
            self._tokens = min(self._burst, self._tokens + earned)
        self._updated_s = max(self._updated_s, now)


def ramp(age_s: float, window_s: float = 30.0, start: float = 0.1) -> float:
    """Slow start: the part of decisions a worker of this age takes part in (scoring.Fleet.ramp).

    Linear from `start` to 1 over `window_s`; a window of 0 switches it off.
    """
    if not 0 < start <= 1 or not window_s >= 0:
        raise CallerError("slow start needs start in (0, 1] and window_s >= 0")
    if age_s >= window_s:
        return 1.0
    return max(start, age_s / window_s)

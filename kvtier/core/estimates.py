"""One online estimator for "seconds = first * x + second * y", used for prefill and for transfers.

The two coefficients are filtered in the log domain (an extended Kalman filter over two states), so
both stay positive and a wrong prior of any size is left within a few observations. Between
observations the state reverts to a target (a stated prior, or what the fleet does) and its
uncertainty grows back: knowledge that is not renewed fades, so whoever was slow is tried again. An
observation counts for at most `clip_sd` standard deviations: one outlier moves little, a lasting
change is followed within a handful.

`RecentRatio` is for what one of many like machines does in terms of the others: a median of the
last few observations, so that one held-up answer says nothing at all and a few in a row say all.

What must not live here: what the two terms mean (costs.py), and any clock.
"""

from collections import deque
from dataclasses import dataclass
from math import exp, inf, isfinite, log, sqrt

from kvtier.errors import CallerError

_SECONDS_MIN = 1e-9
_PREDICTED_MIN_S = 1e-300
"""Predictions may underflow to nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of the model `seconds = first_s * x + second_s * y`; both are positive."""

    first_s: float
    second_s: float

    def __post_init__(self) -> None:
        for name, value in (("first_s", self.first_s), ("second_s", self.second_s)):
            if not (isfinite(value) and value > 0):
                raise CallerError(f"{name} must be positive and finite, got {value!r}")

    def seconds(self, x: float, y: float) -> float:
        """Predict without mutation."""
        return self.first_s * x + self.second_s * y


@dataclass(frozen=True, slots=True)
class Tuning:
    """How fast an estimate learns and forgets. Standard deviations are of natural logarithms."""

    half_life_s: float = 20.0
    """Unrenewed knowledge loses half of its distance to the target in this time; inf keeps it."""
    prior_log_sd: float = 2.0
    """Uncertainty of a prior: within a factor of e**2 = 7.4 two times out of three."""
    noise_log_sd: float = 0.25
    """Spread of a single observation."""
    step_log_sd: float = 0.08
    """How far the truth may move between two observations."""
    clip_sd: float = 3.0

    def __post_init__(self) -> None:
        if not self.half_life_s > 0:
            raise CallerError(f"half_life_s must be positive, got {self.half_life_s!r}")
        for name in ("prior_log_sd", "noise_log_sd", "step_log_sd", "clip_sd"):
            value = float(getattr(self, name))
            if not (isfinite(value) and value > 0):
                raise CallerError(f"{name} must be positive and finite, got {value!r}")


class TwoTermEstimate:
    """Estimate of two positive coefficients from (x, y, seconds) observations; constant size."""

    __slots__ = ("_first", "_p11", "_p12", "_p22", "_second", "_tuning", "_updated_s")

    def __init__(self, start: Terms, tuning: Tuning, now: float) -> None:
        self._tuning = tuning
        self._first = log(start.first_s)
        self._second = log(start.second_s)
        self._p11 = self._p22 = tuning.prior_log_sd**2
        self._p12 = 0.0
        self._updated_s = now

    def terms(self, target: Terms, now: float) -> Terms:
        """Estimate at `now`, reverting to `target` as knowledge ages; does not mutate. O(1)."""
        keep = self._keep(now)
        first, second = log(target.first_s), log(target.second_s)
        return Terms(
            exp(first + (self._first - first) * keep), exp(second + (self._second - second) * keep)
        )

    def observe(self, at: tuple[float, float], seconds: float, target: Terms, now: float) -> None:
        """Learn that (x, y) = `at` took `seconds`; mutates. O(1).

        Raises CallerError where a number is not finite, negative, or both of x and y are zero.
        """
        x, y = at
        if not (isfinite(x) and isfinite(y) and x >= 0 and y >= 0 and x + y > 0):
            raise CallerError(f"x and y must be finite, not negative, not both zero: {x!r}, {y!r}")
        if not (isfinite(seconds) and seconds >= 0):
            raise CallerError(f"seconds must be finite and not negative, got {seconds!r}")
        self._revert(target, now)
        self._update(x, y, max(seconds, _SECONDS_MIN))

    def _keep(self, now: float) -> float:
        """Part of the distance to the target that is left at `now`; time never runs backwards."""
        half_life_s = self._tuning.half_life_s
        if half_life_s == inf:
            return 1.0
        return float(0.5 ** (max(0.0, now - self._updated_s) / half_life_s))

    def _revert(self, target: Terms, now: float) -> None:
        keep, prior = self._keep(now), self._tuning.prior_log_sd**2
        first, second = log(target.first_s), log(target.second_s)
        self._first = first + (self._first - first) * keep
        self._second = second + (self._second - second) * keep
        self._p11 = prior + (self._p11 - prior) * keep * keep
        self._p22 = prior + (self._p22 - prior) * keep * keep
        self._p12 *= keep * keep
        self._updated_s = max(self._updated_s, now)

    def _update(self, x: float, y: float, seconds: float) -> None:
        tuning = self._tuning
        prior, step = tuning.prior_log_sd**2, tuning.step_log_sd**2
        self._p11 = min(prior, self._p11 + step)
        self._p22 = min(prior, self._p22 + step)
        part = exp(self._first) * x
        predicted = max(part + exp(self._second) * y, _PREDICTED_MIN_S)
        share = part / predicted
        rest = 1.0 - share
        gain_first = self._p11 * share + self._p12 * rest
        gain_second = self._p12 * share + self._p22 * rest
        variance = gain_first * share + gain_second * rest + tuning.noise_log_sd**2
        limit = tuning.clip_sd * sqrt(variance)
        surprise = log(seconds) - log(predicted)
        clipped = max(-limit, min(limit, surprise))
        self._first += gain_first / variance * clipped
        self._second += gain_second / variance * clipped
        self._p11 -= gain_first * gain_first / variance
        self._p22 -= gain_second * gain_second / variance
        self._p12 -= gain_first * gain_second / variance
        if clipped != surprise:  # An outlier or a change: the next observation may tell, believe it
            self._p11 = min(prior, 2.0 * self._p11)
            self._p22 = min(prior, 2.0 * self._p22)


@dataclass(frozen=True, slots=True)
class RatioTuning:
    """How a `RecentRatio` weighs observations."""

    kept_count: int = 5
    """The last so many are looked at."""
    half_life_s: float = 20.0
    """An observation weighs half when the newest is so much younger."""
    silent_half_life_s: float = 5.0
    """All weigh half when the newest is so old: without news a worker is like the others after
    about 10 s, and news brings back what the older ones said."""
    doubt: float = 1.5
    """Weight, in observations, of the belief that this one is like the others."""
    noise_log_sd: float = 0.2
    """Observations are believed to scatter at least so much."""

    def __post_init__(self) -> None:
        if self.kept_count < 1:
            raise CallerError(f"kept_count must be positive, got {self.kept_count!r}")
        for name in ("half_life_s", "silent_half_life_s", "doubt", "noise_log_sd"):
            value = float(getattr(self, name))
            if not (isfinite(value) and value > 0):
                raise CallerError(f"{name} must be positive and finite, got {value!r}")


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much longer one takes than the others."""

    log: float
    """Natural logarithm of the factor; 0: the same."""
    log_sd: float
    """Standard error of `log`."""


LIKE_THE_OTHERS = Ratio(0.0, 0.0)


class RecentRatio:
    """Robust factor by which (x, y, seconds) observations exceed a base; constant size."""

    __slots__ = ("_seen", "_tuning")

    def __init__(self, tuning: RatioTuning) -> None:
        self._tuning = tuning
        self._seen: deque[tuple[float, float, float, float]] = deque(maxlen=tuning.kept_count)

    def observe(self, at: tuple[float, float], seconds: float, now: float) -> None:
        """Remember that (x, y) = `at` took `seconds`; mutates. O(1)."""
        self._seen.append((now, at[0], at[1], max(seconds, _SECONDS_MIN)))

    def ratio(self, base: Terms, now: float) -> Ratio:
        """The factor over what `base` predicts; does not mutate. O(kept log kept).

        A weighted median (half-way cases go to the side of no difference) of the observations and
        of `doubt` at no difference, shrunk by the weight of the doubt.
        """
        seen, tuning = self._seen, self._tuning
        if not seen:
            return LIKE_THE_OTHERS
        newest = max(entry[0] for entry in seen)
        fresh = 0.5 ** (max(0.0, now - newest) / tuning.silent_half_life_s)
        doubt = tuning.doubt
        if fresh * len(seen) <= doubt:
            return LIKE_THE_OTHERS  # the doubt alone is half of the weight
        logs = [
            (
                log(seconds / base.seconds(x, y)),
                fresh * 0.5 ** ((newest - when) / tuning.half_life_s),
            )
            for when, x, y, seconds in seen
        ]
        weight = sum(part for _, part in logs)
        middle = _median([*logs, (0.0, doubt)])
        scatter = _median([(abs(value - middle), part) for value, part in logs])
        log_sd = 1.25 * max(tuning.noise_log_sd, 1.48 * scatter) / sqrt(weight)
        return Ratio(middle * weight / (weight + doubt / 4), log_sd)


def _median(weighted: list[tuple[float, float]]) -> float:
    """Weighted median of (value, weight) pairs; of the two of a tie, the one nearer to zero."""
    weighted.sort()
    half, below = sum(weight for _, weight in weighted) / 2.0, 0.0
    for number, (value, weight) in enumerate(weighted):
        below += weight
        if below >= half * (1 - 1e-12):
            if below <= half * (1 + 1e-12) and number + 1 < len(weighted):
                return min(value, weighted[number + 1][0], key=abs)
            return value
    return weighted[-1][0]

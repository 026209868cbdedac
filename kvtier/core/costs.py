"""What time costs: measured prefill and transfer speeds, and how much of a prefix to load.

`CostBook` learns, of a fleet, seconds a token of prefill (with a term for attention over the
context), by what factor a worker differs from it, and, per (worker, source), a fixed latency and
seconds a byte. `split` turns a match into a
plan: load the first m blocks, recompute the rest (KVPR, arXiv 2411.17089, applied to a prefix cut).

What must not live here: which worker to choose (scoring.py), and any I/O or clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.estimates import (
    LIKE_THE_OTHERS,
    Ratio,
    RatioTuning,
    RecentRatio,
    Terms,
    Tuning,
    TwoTermEstimate,
)
from kvtier.errors import CallerError
from kvtier.limits import BLOCK_TOKENS_MAX, HOLDERS_COUNT_MAX, MATCH_BLOCKS_MAX, PROMPT_TOKENS_MAX
from kvtier.types import HolderId, Source

FloatArray = NDArray[np.float64]

SOURCES_COUNT: Final = len(Source)
FREE_SOURCES: Final = frozenset({Source.GPU, Source.PREDICTED})
"""Sources whose blocks are in the worker's own L1: nothing to transfer."""

_TIE_S: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Priors:
    """Stated beliefs before anything was measured; the fleet's own measurements replace them."""

    prefill_tokens_per_s: float = 10_000.0
    crossover_tokens: float = 32_768.0
    """Context at which attention costs as much per token as everything else (an 8B model: 30k)."""
    latency_s: Mapping[Source, float] = field(
        default_factory=lambda: {
            Source.DRAM: 0.5e-3,
            Source.NVME: 1e-3,
            Source.PEER: 2e-3,
            Source.REDIS: 2e-3,
        }
    )
    bytes_per_s: Mapping[Source, float] = field(
        default_factory=lambda: {
            Source.DRAM: 5e9,
            Source.NVME: 1.5e9,
            Source.PEER: 1e9,
            Source.REDIS: 0.3e9,
        }
    )

    def prefill(self) -> Terms:
        """Seconds a token, seconds a (token, earlier token) pair."""
        token_s = 1.0 / self.prefill_tokens_per_s
        return Terms(token_s, token_s / self.crossover_tokens)

    def load(self, source: Source) -> Terms:
        """Seconds a transfer, seconds a byte."""
        return Terms(self.latency_s[source], 1.0 / self.bytes_per_s[source])


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured stretch of prefill: `tokens_count` computed after `context_tokens`."""

    tokens_count: int
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One measured transfer into a worker."""

    bytes_count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one worker is believed to do now."""

    prefill: Terms
    """Seconds a token; seconds a (token, earlier token) pair."""
    loads: Mapping[Source, Terms]
    """Seconds a transfer; seconds a byte. Sources of FREE_SOURCES are absent."""

    def predict_prefill_s(self, tokens_count: float, context_tokens: float = 0.0) -> float:
        """Seconds to compute `tokens_count` tokens after `context_tokens` others."""
        pairs = tokens_count * (context_tokens + tokens_count / 2.0)
        return self.prefill.seconds(tokens_count, pairs)

    def predict_load_s(self, bytes_by_source: Mapping[Source, float]) -> float:
        """Seconds to bring these bytes in, one source after the other: they share a copy path."""
        return sum(
            self.loads[source].seconds(1.0, count)
            for source, count in bytes_by_source.items()
            if count > 0 and source not in FREE_SOURCES
        )


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """`Speeds` of many workers as columns: row i belongs to the i-th worker asked for."""

    prefill_token_s: FloatArray
    """(workers,)"""
    prefill_pair_s: FloatArray
    """(workers,)"""
    load_latency_s: FloatArray
    """(workers, sources); zero for FREE_SOURCES."""
    load_byte_s: FloatArray
    """(workers, sources); zero for FREE_SOURCES."""

    def speeds(self, row: int) -> Speeds:
        """One worker's row as `Speeds`; does not mutate."""
        loads = {
            source: Terms(
                float(self.load_latency_s[row, source]), float(self.load_byte_s[row, source])
            )
            for source in Source
            if source not in FREE_SOURCES
        }
        prefill = Terms(float(self.prefill_token_s[row]), float(self.prefill_pair_s[row]))
        return Speeds(prefill, loads)


@dataclass(frozen=True, slots=True)
class BookPolicy:
    """How a CostBook learns."""

    priors: Priors = field(default_factory=Priors)
    worker: Tuning = field(default_factory=Tuning)
    """A worker's transfers revert to the fleet's."""
    prefill: RatioTuning = field(default_factory=RatioTuning)
    """A worker's prefill in terms of the fleet's."""
    fleet: Tuning = field(default_factory=lambda: Tuning(half_life_s=3600.0, step_log_sd=0.03))
    """The fleet's prefill reverts to the priors."""
    transfers: Tuning = field(default_factory=lambda: Tuning(half_life_s=3600.0, step_log_sd=0.03))
    """The fleet's transfers revert to the priors. In a fleet of one, nobody else finds out that a
    source is well again: what is known of it must fade in seconds, or it is never tried again."""
    deadband_log: float = 0.15
    """A worker within e**0.15 (16 %) of the fleet is taken to be as fast as the fleet, and what is
    beyond counts only beyond: so measuring noise does not decide between equal workers."""
    deadband_sds: float = 2.0
    """The same within so many standard errors of its prefill, where that is more."""
    refresh_s: float = 0.1
    """`table` may answer with what it computed up to this long ago."""


class CostBook:
    """Measured speeds of a fleet of comparable workers; a worker's own process uses it for one.

    Holds one small estimate per (worker, kind), for at most limits.HOLDERS_COUNT_MAX workers.
    """

    def __init__(self, policy: BookPolicy | None = None) -> None:
        self._policy = policy or BookPolicy()
        priors = self._policy.priors
        self._priors: dict[Source | None, Terms] = {None: priors.prefill()}
        self._priors.update((s, priors.load(s)) for s in Source if s not in FREE_SOURCES)
        self._fleet: dict[Source | None, TwoTermEstimate] = {}
        self._workers: dict[HolderId, dict[Source, TwoTermEstimate]] = {}
        self._ratios: dict[HolderId, RecentRatio] = {}
        self._table: tuple[tuple[HolderId, ...], float, SpeedTable] | None = None

    def observe_prefill(self, worker: HolderId, sample: PrefillSample, now: float) -> None:
        """Learn from a measured prefill; mutates. Raises CallerError on a senseless sample."""
        tokens, context = sample.tokens_count, sample.context_tokens
        if not 0 < tokens <= PROMPT_TOKENS_MAX or not 0 <= context <= PROMPT_TOKENS_MAX:
            raise CallerError(f"tokens_count {tokens!r} or context_tokens {context!r} out of range")
        at = (float(tokens), tokens * (context + tokens / 2.0))
        self._observe_fleet(worker, None, at, sample.seconds, now)
        ratio = self._ratios.get(worker)
        if ratio is None:
            ratio = self._ratios[worker] = RecentRatio(self._policy.prefill)
        ratio.observe(at, sample.seconds, now)

    def observe_load(
        self, worker: HolderId, source: Source, sample: LoadSample, now: float
    ) -> None:
        """Learn from a measured transfer; mutates. A load that reached its deadline is a
        sample too, with the deadline as its time. Raises CallerError for FREE_SOURCES."""
        if source in FREE_SOURCES:
            raise CallerError(f"{source.name} blocks are not transferred")
        if sample.bytes_count < 0:
            raise CallerError(f"bytes_count must not be negative, got {sample.bytes_count!r}")
        at = (1.0, float(sample.bytes_count))
        target = self._fleet_terms(source, now)
        self._observe_fleet(worker, source, at, sample.seconds, now)
        estimates = self._workers.setdefault(worker, {})
        own = estimates.get(source)
        if own is None:
            own = estimates[source] = TwoTermEstimate(target, self._policy.worker, now)
        own.observe(at, sample.seconds, target, now)

    def forget(self, worker: HolderId) -> None:
        """Drop what is known of a worker that left; mutates."""
        self._workers.pop(worker, None)
        self._ratios.pop(worker, None)
        self._table = None

    def speeds(self, worker: HolderId, now: float) -> Speeds:
        """What `worker` is believed to do now; an unknown worker does what the fleet does."""
        loads = {s: self._load_terms(worker, s, now) for s in self._priors if s is not None}
        return Speeds(self.prefill(worker, now), loads)

    def prefill(self, worker: HolderId, now: float) -> Terms:
        """The part of `speeds` that is prefill, for little. O(1)."""
        fleet = self._fleet_terms(None, now)
        factor = exp(self._ratio(worker, fleet, now).log)
        return Terms(fleet.first_s * factor, fleet.second_s * factor)

    def table(self, workers: Sequence[HolderId], now: float) -> SpeedTable:
        """Speeds of `workers` as columns, at most `refresh_s` old. O(workers) if stale, else O(1).

        The arrays are shared with later callers: do not write to them.
        """
        key = tuple(workers)
        cached = self._table
        if cached and cached[0] == key and 0 <= now - cached[1] <= self._policy.refresh_s:
            return cached[2]
        table = self._build(key, now)
        self._table = (key, now, table)
        return table

    def _observe_fleet(
        self,
        worker: HolderId,
        kind: Source | None,
        at: tuple[float, float],
        seconds: float,
        now: float,
    ) -> None:
        if not 0 <= worker < HOLDERS_COUNT_MAX:
            raise CallerError(f"holder {worker!r} out of range")
        if kind not in self._fleet:
            tuning = self._policy.fleet if kind is None else self._policy.transfers
            self._fleet[kind] = TwoTermEstimate(self._priors[kind], tuning, now)
        self._fleet[kind].observe(at, seconds, self._priors[kind], now)

    def _fleet_terms(self, kind: Source | None, now: float) -> Terms:
        estimate = self._fleet.get(kind)
        prior = self._priors[kind]
        return estimate.terms(prior, now) if estimate else prior

    def _ratio(self, worker: HolderId, fleet: Terms, now: float) -> Ratio:
        seen = self._ratios.get(worker)
        return LIKE_THE_OTHERS if seen is None else seen.ratio(fleet, now)

    def _load_terms(self, worker: HolderId, source: Source, now: float) -> Terms:
        fleet = self._fleet_terms(source, now)
        estimate = self._workers.get(worker, {}).get(source)
        return estimate.terms(fleet, now) if estimate else fleet

    def _build(self, workers: tuple[HolderId, ...], now: float) -> SpeedTable:
        count = len(workers)
        fleet = {kind: self._fleet_terms(kind, now) for kind in self._priors}
        prefill = fleet[None]
        token_s = np.full(count, prefill.first_s)
        pair_s = np.full(count, prefill.second_s)
        latency_s, byte_s = np.zeros((count, SOURCES_COUNT)), np.zeros((count, SOURCES_COUNT))
        for kind, terms in fleet.items():
            if kind is not None:
                latency_s[:, kind], byte_s[:, kind] = terms.first_s, terms.second_s
        for row, worker in enumerate(workers):
            ratio = self._ratio(worker, prefill, now)
            band = max(self._policy.deadband_log, self._policy.deadband_sds * ratio.log_sd)
            factor = exp(_beyond(ratio.log, band))
            token_s[row] *= factor
            pair_s[row] *= factor
            for kind, estimate in self._workers.get(worker, {}).items():
                terms = _soft(estimate.terms(fleet[kind], now), fleet[kind], self._policy)
                latency_s[row, kind], byte_s[row, kind] = terms.first_s, terms.second_s
        return SpeedTable(token_s, pair_s, latency_s, byte_s)


def _beyond(distance: float, band: float) -> float:
    """Soft threshold: what of a distance is beyond a band about zero."""
    return max(0.0, distance - band) if distance > 0 else min(0.0, distance + band)


def _soft(own: Terms, fleet: Terms, policy: BookPolicy) -> Terms:
    """`own`, brought nearer to `fleet` by the dead band of the log ratio."""

    def near(value: float, centre: float) -> float:
        return centre * exp(_beyond(log(value / centre), policy.deadband_log))

    return Terms(near(own.first_s, fleet.first_s), near(own.second_s, fleet.second_s))


# Compute or load


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a prefix that come from one source."""

    source: Source
    blocks_count: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is known of one prompt's prefix on one worker: the input of `split`."""

    runs: tuple[Run, ...]
    """From block 0 on, without a gap."""
    prompt_tokens: int
    block_tokens: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.block_tokens <= BLOCK_TOKENS_MAX:
            raise CallerError(f"block_tokens {self.block_tokens!r} out of range")
        if not 0 < self.prompt_tokens <= PROMPT_TOKENS_MAX:
            raise CallerError(f"prompt_tokens {self.prompt_tokens!r} out of range")
        if self.block_bytes < 0:
            raise CallerError(f"block_bytes must not be negative, got {self.block_bytes!r}")
        if any(run.blocks_count < 0 for run in self.runs):
            raise CallerError("a run has a negative blocks_count")
        blocks = self.blocks_count()
        if blocks > MATCH_BLOCKS_MAX or blocks * self.block_tokens > self.prompt_tokens:
            raise CallerError(
                f"runs hold {blocks} blocks of {self.block_tokens} tokens, "
                f"more than the {self.prompt_tokens} tokens of the prompt"
            )

    def blocks_count(self) -> int:
        """Blocks of all runs."""
        return sum(run.blocks_count for run in self.runs)


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """How loads are weighed and when they are given up."""

    overlap: float = 1.0
    """Part of the shorter of (load, compute) that hides behind the longer: 1 where layers are
    loaded while others compute, 0 where compute waits for the whole load."""
    deadline_multiple: float = 3.0
    deadline_floor_s: float = 0.005
    deadline_ceiling_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.overlap <= 1.0:
            raise CallerError(f"overlap must be in [0, 1], got {self.overlap!r}")
        if not self.deadline_multiple >= 1.0:
            raise CallerError(f"deadline_multiple must be >= 1, got {self.deadline_multiple!r}")
        if not 0.0 < self.deadline_floor_s <= self.deadline_ceiling_s < inf:
            raise CallerError("deadlines need 0 < floor <= ceiling < infinity")

    def deadline_s(self, predicted_s: float, recompute_s: float) -> float:
        """When to give a load up: a multiple of its prediction, but not past the time in which
        recomputing would have been done (a wrong guess costs at most twice: ski rental)."""
        wished = min(self.deadline_multiple * predicted_s, max(predicted_s, recompute_s))
        return min(max(wished, self.deadline_floor_s), self.deadline_ceiling_s)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One transfer of a plan."""

    source: Source
    first_block: int
    blocks_count: int
    predicted_s: float
    deadline_s: float
    """Counted from the start of this transfer; past it the worker recomputes from first_block."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Reuse the first `blocks_count` blocks, recompute the rest of the prompt."""

    blocks_count: int
    loads: tuple[PlannedLoad, ...]
    """In block order, without the runs that are in L1 already."""
    compute_tokens: int
    """Tokens to compute; at least one, since the last token's logits are needed."""
    load_s: float
    compute_s: float
    ttft_s: float
    """Predicted time to first token of this request alone."""
    cold_s: float
    """The same with nothing reused."""


def split(prefix: Prefix, speeds: Speeds, policy: LoadPolicy | None = None) -> LoadPlan:
    """Decide how many of the held blocks to load; does not mutate. O(blocks), vectorised.

    Among the cuts at which no shorter cut has less total work (so nothing is loaded that
    recomputing does faster, not even where it would hide behind compute) takes the one with the
    least time to first token; equal times go to the least work, then to the shorter load.
    """
    policy = policy or LoadPolicy()
    load_s = _cumulative_load_s(prefix, speeds)
    held = np.minimum(
        np.arange(len(load_s), dtype=np.float64) * prefix.block_tokens, prefix.prompt_tokens - 1
    )
    rest = prefix.prompt_tokens - held
    token_s, pair_s = speeds.prefill.first_s, speeds.prefill.second_s
    compute_s = token_s * rest + pair_s * rest * (held + rest / 2.0)
    work_s = load_s + compute_s
    total_s = work_s - policy.overlap * np.minimum(load_s, compute_s)
    total_s[work_s > np.minimum.accumulate(work_s) + _TIE_S] = inf
    best = np.flatnonzero(total_s <= total_s.min() + _TIE_S)
    cut = int(best[np.argmin(work_s[best])])
    return LoadPlan(
        blocks_count=cut,
        loads=_planned_loads(prefix, speeds, policy, cut),
        compute_tokens=int(rest[cut]),
        load_s=float(load_s[cut]),
        compute_s=float(compute_s[cut]),
        ttft_s=float(total_s[cut]),
        cold_s=float(compute_s[0]),
    )


def head_to_compute(prefix: Prefix, speeds: Speeds, plan: LoadPlan, gain_min: float) -> int:
    """How many blocks to compute before those of a plan's loads arrive; does not mutate. O(blocks).

    Blocks of L1 stand first. A worker can compute the next ones while it loads the rest (both at
    once, from either end of the gap, as in arXiv 2410.03065): the head takes as long to compute as
    the tail to load. 0 where that saves less than `gain_min` of the loads' time, which is so
    wherever loading is much faster than computing.
    """
    first = next((f for f, run in _with_first_block(prefix.runs) if _is_loaded(run)), 0)
    cut = plan.blocks_count
    if not plan.loads or cut <= first:
        return 0
    load_s = _cumulative_load_s(prefix, speeds)
    heads = np.arange(cut - first + 1, dtype=np.float64) * prefix.block_tokens
    held = first * prefix.block_tokens
    compute_s = speeds.prefill.first_s * heads
    compute_s += speeds.prefill.second_s * heads * (held + heads / 2.0)
    # The latency of a source is paid however few of its blocks are left.
    rest_s = load_s[cut] - load_s[first : cut + 1]
    rest_s[1:-1] += speeds.loads[plan.loads[0].source].first_s
    total_s = np.maximum(compute_s, rest_s)
    best = int(np.argmin(total_s))
    return best if total_s[0] - total_s[best] >= gain_min * total_s[0] else 0


def planned_loads(prefix: Prefix, speeds: Speeds, policy: LoadPolicy) -> tuple[PlannedLoad, ...]:
    """The loads that bring in all of a prefix, with their deadlines; does not mutate."""
    return _planned_loads(prefix, speeds, policy, prefix.blocks_count())


def predict_ttft_s(plan: LoadPlan, queued_tokens: float, speeds: Speeds) -> float:
    """Time to first token behind `queued_tokens` of prefill; loading overlaps the wait."""
    queue_s = speeds.predict_prefill_s(queued_tokens)
    return queue_s + max(plan.ttft_s - min(queue_s, plan.load_s), plan.compute_s)


def _cumulative_load_s(prefix: Prefix, speeds: Speeds) -> FloatArray:
    """Seconds to load the first m blocks, for m = 0 .. blocks_count. A source pays its latency
    with its first block."""
    steps = [np.zeros(1)]
    met: set[Source] = set()
    for run in prefix.runs:
        if run.blocks_count == 0:
            continue
        step = np.zeros(run.blocks_count)
        if run.source not in FREE_SOURCES:
            terms = speeds.loads[run.source]
            step += terms.second_s * prefix.block_bytes
            if run.source not in met:
                step[0] += terms.first_s
            met.add(run.source)
        steps.append(step)
    return np.cumsum(np.concatenate(steps))


def _planned_loads(
    prefix: Prefix, speeds: Speeds, policy: LoadPolicy, cut: int
) -> tuple[PlannedLoad, ...]:
    loads: list[PlannedLoad] = []
    met: set[Source] = set()
    for first, run in _with_first_block(prefix.runs):
        count = min(run.blocks_count, cut - first)
        if count <= 0 or run.source in FREE_SOURCES:
            continue
        terms = speeds.loads[run.source]
        predicted_s = terms.second_s * count * prefix.block_bytes
        if run.source not in met:
            predicted_s += terms.first_s
        met.add(run.source)
        recompute_s = speeds.predict_prefill_s(
            count * prefix.block_tokens, first * prefix.block_tokens
        )
        deadline_s = policy.deadline_s(predicted_s, recompute_s)
        loads.append(PlannedLoad(run.source, first, count, predicted_s, deadline_s))
    return tuple(loads)


def _is_loaded(run: Run) -> bool:
    return run.blocks_count > 0 and run.source not in FREE_SOURCES


def _with_first_block(runs: Iterable[Run]) -> Iterable[tuple[int, Run]]:
    first = 0
    for run in runs:
        yield first, run
        first += run.blocks_count

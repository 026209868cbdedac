"""Which worker should serve a request: one continuous cost in seconds, for all workers at once.

cost = queued prefill ahead + load what the tiers hold + recompute the rest + decode pressure
       (+ adapter load) + a weight on the work itself, which others will wait for.

There are no modes and no thresholds between "affinity" and "balance": a hot prefix spreads when the
queue at its holder costs more than recomputing elsewhere. Rows are workers (one per dp_rank), and
everything is in tokens, so pools of different block sizes compare.

What must not live here: measuring speeds (costs.py), who is healthy (health.py), randomness (the
caller draws `u`), and what to do when there is no index replica at all (fallback.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.core.costs import SOURCES_COUNT, FloatArray, SpeedTable
from kvtier.errors import CallerError, UnavailableError
from kvtier.limits import HOLDERS_COUNT_MAX, PROMPT_TOKENS_MAX
from kvtier.types import Role, Source

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


SLACK_RELATIVE: Final = 1.1
REUSE_TIE: Final = 1 / 16
"""Rows that reuse less than the most by this part of the prompt reuse as much."""


@dataclass(slots=True)
class Fleet:
    """What is known of the candidates, as columns that the caller updates in place.

    Row i is the same worker in every column and in the SpeedTable. All arrays are (workers,), but
    `held_tokens` is (workers, sources).
    """

    held_tokens: FloatArray
    """Tokens of the longest unbroken prefix of *this request*, by Source."""
    queued_tokens: FloatArray
    """Prefill tokens waiting or running there, as the worker last reported."""
    reserved_tokens: FloatArray
    """Prefill tokens routed there that its report cannot know yet, of all routers."""
    decoding_count: FloatArray
    """Sequences that decode there."""
    pinned_tokens: FloatArray
    """KV tokens of running requests: what cannot be evicted."""
    capacity_tokens: FloatArray
    """KV tokens its pool holds; inf where unknown."""
    kv_bytes_per_token: FloatArray
    age_s: FloatArray
    """Seconds since the index was last known to be true for it; 0 while its stream lives."""
    ramp: FloatArray
    """Slow start, in (0, 1]: the part of decisions it takes part in."""
    adapter_loaded: BoolArray
    """Whether the request's adapter, if any, is loaded there."""
    eligible: BoolArray
    """Healthy, not draining, serving the model in the wanted role."""
    pool: IntArray
    """Which pool (revision, block size, adapter digest) of the served name it belongs to."""
    recent_tokens: FloatArray
    """Decayed count of tokens this router sent there lately; see RecentTokens."""
    ranks: Callable[[float], FloatArray] | None = None
    """The order of near-ties for this request that reuse about so many tokens: (workers,), least
    first, alike for every router (see `fallback.BoundedHash.ranks`). Siblings whose common prefix
    none of the tied holds then meet on one worker, whatever router they come through. None:
    near-ties are drawn."""

    @classmethod
    def idle(cls, workers_count: int) -> Self:
        """Columns of `workers_count` idle, healthy, empty, equal workers in pool 0."""
        if not 0 < workers_count <= HOLDERS_COUNT_MAX:
            raise CallerError(f"workers_count {workers_count!r} out of range")
        return cls(
            held_tokens=np.zeros((workers_count, SOURCES_COUNT)),
            queued_tokens=np.zeros(workers_count),
            reserved_tokens=np.zeros(workers_count),
            decoding_count=np.zeros(workers_count),
            pinned_tokens=np.zeros(workers_count),
            capacity_tokens=np.full(workers_count, inf),
            kv_bytes_per_token=np.zeros(workers_count),
            age_s=np.zeros(workers_count),
            ramp=np.ones(workers_count),
            adapter_loaded=np.ones(workers_count, dtype=np.bool_),
            eligible=np.ones(workers_count, dtype=np.bool_),
            pool=np.zeros(workers_count, dtype=np.int64),
            recent_tokens=np.zeros(workers_count),
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """The request to place."""

    prompt_tokens: int
    stage: Role = Role.BOTH
    """BOTH and PREFILL place a prefill; DECODE places the second half of a split request, whose KV
    is fetched from the prefill worker as far as the candidate does not hold it."""
    pool_shares: Mapping[int, float] = field(default_factory=dict)
    """Canary weights by pool; empty means that all pools compete on cost."""

    def __post_init__(self) -> None:
        if not 0 < self.prompt_tokens <= PROMPT_TOKENS_MAX:
            raise CallerError(f"prompt_tokens {self.prompt_tokens!r} out of range")
        shares = self.pool_shares.values()
        if shares and not (all(isfinite(s) and s >= 0 for s in shares) and sum(shares) > 0):
            raise CallerError("pool_shares must be finite, not negative and not all zero")


@dataclass(frozen=True, slots=True)
class Weights:
    """How the cost is put together. Times are seconds; the defaults suit an 8B model on one GPU."""

    work: float = 3.0
    """Seconds of cost for each second that this request's compute would take the fastest worker:
    what is computed twice delays later requests and evicts what they would have hit. In the routing
    simulation 0 loses up to a tenth of the hits under load; on a trace whose working set is three
    times the caches (`kvtier bench router`) 3 hits a tenth more than 1, with the same times."""
    overlap: float = 1.0
    """As LoadPolicy.overlap."""
    decode_step_s: float = 1e-4
    """How much longer a step takes for each sequence that decodes in it."""
    chunk_tokens: float = 2048.0
    """Prefill tokens of one step."""
    adapter_load_s: float = 0.2
    credit_half_life_s: float = 60.0
    """Credit for held tokens halves with each such age of the index's knowledge."""
    tie_relative: float = 0.03
    tie_absolute_s: float = 0.001
    """Costs within max(absolute, relative x best) of the best are near-ties."""

    slack: float = 2.0
    """Among ranked near-ties the first is passed over once it was sent this many times the request
    more than the second, beyond SLACK_RELATIVE of it."""

    def __post_init__(self) -> None:
        names = ("work", "decode_step_s", "adapter_load_s", "tie_relative", "tie_absolute_s")
        for name in (*names, "slack"):
            value = float(getattr(self, name))
            if not (isfinite(value) and value >= 0):
                raise CallerError(f"{name} must be finite and not negative, got {value!r}")
        if not (0 <= self.overlap <= 1 and self.chunk_tokens > 0 and self.credit_half_life_s > 0):
            raise CallerError("overlap must be in [0, 1], chunk_tokens and half-life positive")


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of each worker's cost, seconds, (workers,) each."""

    queue_s: FloatArray
    load_s: FloatArray
    compute_s: FloatArray
    decode_s: FloatArray
    adapter_s: FloatArray
    ttft_s: FloatArray
    """Predicted time to first token: the parts above, less what loading hides."""
    total_s: FloatArray
    """What is compared: ttft_s plus the weighted work; inf where not a candidate."""
    reused_tokens: FloatArray
    """Tokens expected to be reused, after credit and compute-or-load."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One worker's row of a decision, for people and for `POST /route`."""

    row: int
    candidate: bool
    tied: bool
    queue_s: float
    load_s: float
    compute_s: float
    decode_s: float
    adapter_s: float
    ttft_s: float
    total_s: float
    reused_tokens: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to send the request and why."""

    chosen: int
    """Row."""
    runner_up: int | None
    """The best row but the chosen; None if there was one candidate only."""
    tied: tuple[int, ...]
    """Rows among which the draw decided; contains `chosen`."""
    pool: int
    costs: Components

    def reasons(self) -> tuple[Reason, ...]:
        """Every worker's parts, in row order. O(workers) Python: for explanations only."""
        costs, tied = self.costs, frozenset(self.tied)
        return tuple(
            Reason(
                row=row,
                candidate=bool(np.isfinite(costs.total_s[row])),
                tied=row in tied,
                queue_s=float(costs.queue_s[row]),
                load_s=float(costs.load_s[row]),
                compute_s=float(costs.compute_s[row]),
                decode_s=float(costs.decode_s[row]),
                adapter_s=float(costs.adapter_s[row]),
                ttft_s=float(costs.ttft_s[row]),
                total_s=float(costs.total_s[row]),
                reused_tokens=float(costs.reused_tokens[row]),
            )
            for row in range(len(costs.total_s))
        )


class RecentTokens:
    """Decayed count of tokens sent to each row: what breaks near-ties apart. Fixed size."""

    __slots__ = ("_half_life_s", "_tokens", "_updated_s")

    def __init__(self, workers_count: int, half_life_s: float = 60.0) -> None:
        if not (0 < workers_count <= HOLDERS_COUNT_MAX and half_life_s > 0):
            raise CallerError("workers_count or half_life_s out of range")
        self._half_life_s = half_life_s
        self._tokens = np.zeros(workers_count)
        self._updated_s = 0.0

    def add(self, row: int, tokens_count: float, now: float) -> None:
        """Count tokens sent to `row`; mutates."""
        self.column(now)[row] += tokens_count

    def column(self, now: float) -> FloatArray:
        """The decayed counts at `now`, (workers,): the live array, not a copy. Mutates by decay."""
        if now > self._updated_s:
            self._tokens *= 0.5 ** ((now - self._updated_s) / self._half_life_s)
            self._updated_s = now
        return self._tokens


_DEFAULT_WEIGHTS = Weights()


def decide(
    ask: Ask, fleet: Fleet, speeds: SpeedTable, u: float, weights: Weights = _DEFAULT_WEIGHTS
) -> Decision:
    """Choose the worker with the least cost; near-ties are drawn with `u`, uniform in [0, 1).

    Does not mutate. O(workers), vectorised. Among near-ties two are drawn and the one that was sent
    less lately is taken (two choices: the spread stays even at any concurrency). Where the fleet
    has `ranks`, the two of least rank are taken in place of a draw, and the first of them unless it
    was sent clearly more. Raises UnavailableError where no worker is eligible, CallerError on
    columns that do not fit or a NaN.
    """
    if not 0.0 <= u < 1.0:
        raise CallerError(f"u must be in [0, 1), got {u!r}")
    _check(fleet, speeds)
    costs = _costs(ask, fleet, speeds, weights)
    mask, u = candidates(ask, fleet, u)
    total_s = costs.total_s
    total_s[~mask] = inf
    best_s = float(total_s.min())
    if not best_s < inf:
        raise CallerError("a column or a speed is not a number")
    band_s = max(weights.tie_absolute_s, weights.tie_relative * best_s)
    tied = np.flatnonzero(total_s <= best_s + band_s)
    if fleet.ranks is None:
        chosen = _draw(tied, fleet.recent_tokens, u)
    else:
        chosen = _first(ask, fleet, tied, costs.reused_tokens, weights)
    return Decision(
        chosen=chosen,
        runner_up=_runner_up(total_s, chosen),
        tied=tuple(tied.tolist()),
        pool=int(fleet.pool[chosen]),
        costs=costs,
    )


def _check(fleet: Fleet, speeds: SpeedTable) -> None:
    workers_count = len(fleet.eligible)
    if fleet.held_tokens.shape != (workers_count, SOURCES_COUNT):
        raise CallerError(f"held_tokens must be ({workers_count}, {SOURCES_COUNT})")
    columns: Sequence[NDArray[np.generic]] = (
        fleet.queued_tokens,
        fleet.reserved_tokens,
        fleet.decoding_count,
        fleet.pinned_tokens,
        fleet.capacity_tokens,
        fleet.kv_bytes_per_token,
        fleet.age_s,
        fleet.ramp,
        fleet.adapter_loaded,
        fleet.pool,
        fleet.recent_tokens,
        speeds.prefill_token_s,
    )
    if any(len(column) != workers_count for column in columns):
        raise CallerError("the fleet's columns differ in length")


def _costs(ask: Ask, fleet: Fleet, speeds: SpeedTable, weights: Weights) -> Components:
    """Every worker's cost; `total_s` is not yet masked."""
    token_s = speeds.prefill_token_s
    reach = _reach(ask, fleet, weights)
    if ask.stage is Role.DECODE:
        load_s, compute_s, reused = _fetch(ask, reach, fleet, speeds)
        queue_s = np.zeros_like(token_s)
    else:
        load_s, compute_s, reused = _reuse(ask, reach, fleet, speeds, weights.overlap)
        queue_s = token_s * (fleet.queued_tokens + fleet.reserved_tokens)
    wait_s = queue_s + compute_s
    steps = 1.0 + wait_s / (token_s * weights.chunk_tokens)
    short = np.maximum(0.0, fleet.pinned_tokens + ask.prompt_tokens - fleet.capacity_tokens)
    decode_s = fleet.decoding_count * weights.decode_step_s * steps + short * token_s
    adapter_s = np.where(fleet.adapter_loaded, 0.0, weights.adapter_load_s)
    # Loading runs while the request waits in the queue, and while other layers compute.
    visible_s = np.maximum(load_s - queue_s, 0.0)
    hidden_s = weights.overlap * np.minimum(visible_s, compute_s)
    ttft_s = wait_s + visible_s - hidden_s + decode_s + adapter_s
    # In the time of the fastest: a worker that is slow, or seems so, already pays in its own wait.
    total_s = ttft_s + weights.work * (compute_s * (token_s.min() / token_s))
    return Components(queue_s, load_s, compute_s, decode_s, adapter_s, ttft_s, total_s, reused)


def _reach(ask: Ask, fleet: Fleet, weights: Weights) -> FloatArray:
    """Prefix tokens held up to and with each source, (workers, sources), after the age credit."""
    credit = np.exp2(fleet.age_s / -weights.credit_half_life_s)
    reach = np.add.accumulate(fleet.held_tokens, axis=1)
    reach *= credit[:, None]
    np.minimum(reach, ask.prompt_tokens - 1, out=reach)
    return reach


def _steps(reach: FloatArray) -> FloatArray:
    """Tokens that each source adds: the inverse of the running sum over sources."""
    steps = reach.copy()
    steps[:, 1:] -= reach[:, :-1]
    return steps


def _reuse(
    ask: Ask, reach: FloatArray, fleet: Fleet, speeds: SpeedTable, overlap: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Load, compute and reused tokens at the best cut between sources: `costs.split` at the grain
    of a source, taking a worker's runs in order of nearness."""
    steps = _steps(reach)
    loads = speeds.load_byte_s * steps
    loads *= fleet.kv_bytes_per_token[:, None]
    loads += speeds.load_latency_s * (steps > 0)
    load_s = np.add.accumulate(loads, axis=1)
    rest = ask.prompt_tokens - reach
    context = (ask.prompt_tokens + reach) / 2.0
    compute_s = rest * (speeds.prefill_token_s[:, None] + speeds.prefill_pair_s[:, None] * context)
    work_s = load_s + compute_s
    total_s = work_s - overlap * np.minimum(load_s, compute_s)
    total_s[work_s > np.minimum.accumulate(work_s, axis=1)] = inf
    cut = total_s.argmin(axis=1)
    rows = np.arange(len(cut))
    return load_s[rows, cut], compute_s[rows, cut], reach[rows, cut]


def _fetch(
    ask: Ask, reach: FloatArray, fleet: Fleet, speeds: SpeedTable
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Load, compute and reused tokens of a decode worker: what its node has not comes from
    the prefill worker, one token is computed."""
    near = int(Source.NVME)
    steps = _steps(reach[:, : near + 1])
    missing = ask.prompt_tokens - reach[:, near]
    width_bytes = fleet.kv_bytes_per_token
    load_s = (speeds.load_byte_s[:, : near + 1] * steps).sum(axis=1) * width_bytes
    load_s += (speeds.load_latency_s[:, : near + 1] * (steps > 0)).sum(axis=1)
    load_s += speeds.load_byte_s[:, Source.PEER] * missing * width_bytes
    load_s += speeds.load_latency_s[:, Source.PEER]
    return load_s, speeds.prefill_token_s.copy(), reach[:, near]


def candidates(ask: Ask, fleet: Fleet, u: float) -> tuple[BoolArray, float]:
    """Who takes part after canary shares and slow start, and a fresh uniform draw for what follows.

    For policies that choose without a cost as well. Does not mutate; the mask may be the column
    itself. UnavailableError where nobody is eligible.
    """
    mask = fleet.eligible
    if not mask.any():
        raise UnavailableError("no worker is eligible")
    if ask.pool_shares:
        mask, u = _canary(ask.pool_shares, fleet.pool, mask, u)
    if fleet.ramp.min() < 1.0:
        # A ramping worker takes part in that part of the decisions; low bits of u decide which.
        draws = (u * 2.0**20 + np.arange(len(mask)) * 0.6180339887498949) % 1.0
        thinned = mask & (draws < fleet.ramp)
        mask = thinned if thinned.any() else mask
    return mask, u


def _canary(
    shares: Mapping[int, float], pool: IntArray, mask: BoolArray, u: float
) -> tuple[BoolArray, float]:
    """Restrict `mask` to a pool drawn by share among those that have a candidate; u is renewed from
    its place in the drawn interval. Without any such pool, all candidates stay."""
    present = frozenset(pool[mask].tolist())
    weighed = [(p, share) for p, share in sorted(shares.items()) if share > 0 and p in present]
    left = u * sum(share for _, share in weighed)
    for number, share in weighed:
        if left < share:
            return mask & (pool == number), min(left / share, 1.0 - 2.0**-53)
        left -= share
    if weighed:  # Rounding at the upper end
        return mask & (pool == weighed[-1][0]), 1.0 - 2.0**-53
    return mask, u


def _draw(tied: NDArray[np.intp], recent_tokens: FloatArray, u: float) -> int:
    """Two of the tied rows by `u`; the one that was sent less lately."""
    count = len(tied)
    if count == 1:
        return int(tied[0])
    pair = int(u * count * (count - 1))
    first, second = divmod(pair, count - 1)
    second += second >= first
    one, other = int(tied[first]), int(tied[second])
    return one if recent_tokens[one] <= recent_tokens[other] else other


def _first(
    ask: Ask, fleet: Fleet, tied: NDArray[np.intp], reused: FloatArray, weights: Weights
) -> int:
    """Of the tied rows that reuse most the first by rank, unless it was sent clearly more lately
    than the second."""
    if len(tied) == 1 or fleet.ranks is None:
        return int(tied[0])
    reusing = reused[tied]
    most = float(reusing.max())
    tied = tied[reusing >= most - REUSE_TIE * ask.prompt_tokens]
    if len(tied) == 1:
        return int(tied[0])
    order = fleet.ranks(most)[tied].argsort()
    one, other = int(tied[order[0]]), int(tied[order[1]])
    recent = fleet.recent_tokens
    bound = SLACK_RELATIVE * recent[other] + weights.slack * ask.prompt_tokens
    return one if recent[one] <= bound else other


def _runner_up(total_s: FloatArray, chosen: int) -> int | None:
    if len(total_s) == 1:
        return None
    kept, total_s[chosen] = float(total_s[chosen]), inf
    second = int(total_s.argmin())
    found = float(total_s[second]) < inf
    total_s[chosen] = kept
    return second if found else None

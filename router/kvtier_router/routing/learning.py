"""What answers teach: prefill speed of each worker, bandwidth of each tier, and whether the
router's tokens are the workers' tokens.

A router sees times to first token, not prefills. Workers prefill about in order, so the work of a
request began when it was sent or when the answer before it began, whichever was later; first tokens
that come at once were computed together. Work of other routers may have been in between: then a
time teaches only what lies outside of what that work explains. Fixed costs of a request (network,
tokenising, the first step) are taken off by what the best answers of late took beyond their work.

What must not live here: the estimators themselves (kvtier.core.costs), any choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from kvtier.core.costs import BookPolicy, CostBook, LoadSample, PrefillSample, SpeedTable
from kvtier.core.identity import Pool
from kvtier.types import HolderId, Source
from kvtier_router.routing.fleet import Table
from kvtier_router.routing.roster import Member
from kvtier_router.routing.values import Usage

FLOOR_S_MAX = 0.02
"""Fixed costs of a request are believed to be no more than this."""
FLOOR_WINDOW_S = 60.0
REUSED_TOKEN_S_MAX = 2e-5
"""What handling one reused token (hashing it, its part of a block table) is believed to cost at
most."""
LONG_TOKENS = 4096
"""Of reused prompts of at least so many tokens that is measured."""
SLOW_FACTOR = 4.0
"""A request with less work than fixed costs teaches nothing unless it took this many times both."""
TOGETHER_S = 0.01
"""First tokens that come within so long of each other were computed in one step."""
DOUBT = 1.5
"""What others have on their way may be this many times what is known of it."""
SAMPLE_TOKENS_MIN = 32
REPORTED_TOKENS = 1024
"""A worker's own word on its speed counts as a prefill of so many tokens."""
SAME_WORD = 0.01
"""Words that differ by no more than this part are one word repeated."""
LOAD_SHARE_MIN = 0.5
"""A time to first token teaches a tier's bandwidth where loading is this part of it."""
WINDOW_S = 60.0
EVICTED_SHARE_MAX = 0.5
"""Pools that are far too small lose a quarter of what was promised between choice and prefill; more
than this is no eviction any more."""
RESPONSES_MIN = 50
"""Fewer comparable responses than this say nothing of a model."""


@dataclass(slots=True, eq=False)
class Expectation:
    """What a decision predicted for the worker that it chose, once a request: not frozen, which
    would cost a call a field."""

    member: Member
    model_id: str
    tokens: int
    """To be computed by this request."""
    context_tokens: int
    """Reused before them."""
    queue_s: float
    others_s: float
    """The part of queue_s that is not this router's own."""
    compute_s: float
    load_s: float
    """Of loading that the request must wait for."""
    load_source: Source | None
    """The only source it loads from; None for none or several."""
    load_bytes: int
    is_hit_certain: bool
    """Nothing of the reused tokens is only predicted, or from an index that may be wrong."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A measured time to first token."""

    ttft_s: float
    cached_tokens: int | None
    others_tokens: float
    """What other routers have on their way to the worker at that moment."""


@dataclass(slots=True)
class _Lane:
    """One worker's prefills in order, as far as this router sees them."""

    mark: float = -inf
    """When the last first token came."""
    pending: "_Sample | None" = None
    """The last one, for as long as another may turn out to have been computed with it."""


@dataclass(slots=True)
class _Sample:
    expected: Expectation
    took_s: float
    ended_at: float
    others_s: float
    was_idle: bool
    """Nothing of this router was ahead of it: fixed costs are part of its time."""
    cached_tokens: int | None
    together_s: float = 0.0
    """Work of requests that were computed in the same step."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a request turned out to have to compute."""

    tokens: int
    context_tokens: int
    compute_s: float


class _Floor:
    """The least of a stream of times, over the last one to two windows."""

    def __init__(self, most: float, unknown: float) -> None:
        """`unknown` is believed before anything was seen, and no more than `most` ever."""
        self._most = most
        self._unknown = unknown
        self._now = self._before = inf
        self._turned_at = -inf

    def see(self, seconds: float, now: float) -> None:
        if now - self._turned_at >= FLOOR_WINDOW_S:
            self._before = self._now if now - self._turned_at < 2 * FLOOR_WINDOW_S else inf
            self._now, self._turned_at = inf, now
        self._now = min(self._now, seconds)

    @property
    def seconds(self) -> float:
        least = min(self._now, self._before)
        return self._unknown if least == inf else min(max(least, 0.0), self._most)


class _Fixed:
    """What a request costs beside its work: something always, and something a reused token."""

    def __init__(self) -> None:
        self._always = _Floor(FLOOR_S_MAX, FLOOR_S_MAX)
        self._token = _Floor(REUSED_TOKEN_S_MAX, 0.0)

    def see(self, did: "_Work", beyond_s: float, now: float) -> None:
        """Take in what an answer took beyond its work. Only one that had next to no work tells of
        what its length costs: in others a wrong speed would look like it."""
        self._always.see(beyond_s, now)
        if did.context_tokens >= LONG_TOKENS and did.tokens <= 2 * SAMPLE_TOKENS_MIN:
            self._token.see((beyond_s - self._always.seconds) / did.context_tokens, now)

    def seconds(self, did: "_Work") -> float:
        return self._always.seconds + self._token.seconds * did.context_tokens


class SpeedBooks:
    """A book of speeds for each model: workers of different models do not compare.

    A FleetListener. Holds as many books as the fleet has models.
    """

    def __init__(self, policy: BookPolicy) -> None:
        self._policy = policy
        self._books: dict[str, CostBook] = {}
        self._floors: dict[str, _Fixed] = {}
        self._lanes: dict[int, _Lane] = {}
        self._users: dict[int, str] = {}
        self._words: dict[int, float] = {}
        """What each worker last said of its own speed."""
        self._token_s: dict[str, float] = {}
        """By model, seconds between tokens of answers that come in one piece."""

    def joined(self, member: Member, now: float, is_new: bool) -> None:
        """Nothing is known of it yet."""

    def left(self, member: Member) -> None:
        self._lanes.pop(member.slot, None)
        self._words.pop(member.slot, None)
        model_id = self._users.pop(member.slot, None)
        if model_id is not None:
            self._books[model_id].forget(HolderId(member.slot))
            if model_id not in self._users.values():
                for kept in (self._books, self._floors, self._token_s):
                    kept.pop(model_id, None)

    def table(self, table: Table, now: float) -> SpeedTable:
        """Speeds of a table's rows. O(1) unless older than the policy's refresh."""
        if len(table.models) == 1:
            return self._book(table.models[0][0]).table(table.ids, now)
        parts = [
            self._book(model_id).table(table.ids[start:end], now)
            for model_id, start, end in table.models
        ]
        return SpeedTable(
            np.concatenate([part.prefill_token_s for part in parts]),
            np.concatenate([part.prefill_pair_s for part in parts]),
            np.concatenate([part.load_latency_s for part in parts]),
            np.concatenate([part.load_byte_s for part in parts]),
        )

    def tokens_per_s(self, member: Member, now: float) -> float:
        """Prefill speed of one worker as it is believed to be."""
        book = self._books.get(self._users.get(member.slot, ""))
        if book is None:
            return 0.0
        return 1.0 / book.prefill(HolderId(member.slot), now).first_s

    def reported(self, member: Member, tokens_per_s: float, now: float) -> None:
        """Take a worker's own word on its prefill speed; every router hears the same. A word that
        is only repeated is no news: a worker that nobody asks repeats what it was."""
        before = self._words.get(member.slot, 0.0)
        if 1.0 < tokens_per_s < 1e9 and abs(tokens_per_s - before) > SAME_WORD * before:
            self._words[member.slot] = tokens_per_s
            self._users[member.slot] = model_id = member.card.model_id
            sample = PrefillSample(REPORTED_TOKENS, 0, REPORTED_TOKENS / tokens_per_s)
            self._book(model_id).observe_prefill(HolderId(member.slot), sample, now)

    def first_token(self, expected: Expectation, seen: FirstToken, now: float) -> None:
        """Learn from a measured time to first token, now or as soon as it is known with whom its
        prefill was shared."""
        if not 0 < seen.ttft_s < inf or expected.member.is_gone:
            return
        lane = self._lanes.setdefault(expected.member.slot, _Lane())
        sent_at = now - seen.ttft_s
        before, lane.mark = lane.mark, now
        pending = lane.pending
        if pending is not None and now - pending.ended_at < TOGETHER_S and sent_at < before:
            pending.together_s += expected.compute_s
            return
        self._settle(lane, now)
        book = self._book(expected.model_id)
        token_s = book.prefill(HolderId(expected.member.slot), now).first_s
        lane.pending = _Sample(
            expected=expected,
            took_s=now - max(sent_at, before),
            ended_at=now,
            others_s=expected.others_s + seen.others_tokens * token_s,
            was_idle=before <= sent_at,
            cached_tokens=seen.cached_tokens,
        )

    def tick(self, now: float) -> None:
        """Learn from what nobody else was computed with. O(workers)."""
        for lane in self._lanes.values():
            if lane.pending is not None and now - lane.pending.ended_at >= TOGETHER_S:
                self._settle(lane, now)

    def whole_answer(self, expected: Expectation, usage: Usage, now: float) -> None:
        """Learn from an answer that came in one piece: by how much it took longer than such an
        answer does elsewhere."""
        total_s, tokens = usage.total_s, usage.completion_tokens
        if total_s is None or not 0 < total_s < inf or not tokens or tokens < 0:
            return
        did = self._work(expected, usage.cached_tokens, now)
        work_s = expected.queue_s + did.compute_s + expected.load_s
        seen_s = max(total_s - work_s, 1e-6) / tokens
        token_s = self._token_s.get(expected.model_id, seen_s)
        self._token_s[expected.model_id] = token_s + 0.05 * (seen_s - token_s)
        whole_s = work_s + token_s * tokens
        doubt = 1.0 + (DOUBT - 1.0) * (expected.queue_s + expected.others_s) / max(whole_s, 1e-9)
        surprise = total_s / max(whole_s, 1e-9)
        surprise = max(surprise / doubt, min(surprise * doubt, 1.0))
        self._learn(expected, did, surprise, now)

    # ---- parts

    def _book(self, model_id: str) -> CostBook:
        book = self._books.get(model_id)
        if book is None:
            book = self._books[model_id] = CostBook(self._policy)
        return book

    def _settle(self, lane: _Lane, now: float) -> None:
        """Learn from the pending sample of a lane, and forget it."""
        sample, lane.pending = lane.pending, None
        if sample is None or sample.expected.member.is_gone:
            return
        expected = sample.expected
        did = self._work(expected, sample.cached_tokens, now)
        least_s = did.compute_s + sample.together_s
        most_s = least_s + DOUBT * sample.others_s
        # What turned out to be cached may have been computed while this request waited.
        most_s += max(0.0, DOUBT * (expected.compute_s - did.compute_s))
        if sample.cached_tokens is None and not expected.is_hit_certain:
            cold = self._work(expected, 0, now)
            most_s = max(most_s, most_s - did.compute_s + cold.compute_s)
        fixed = self._floors.setdefault(expected.model_id, _Fixed())
        fixed_s = 0.0
        if sample.was_idle:
            if most_s == least_s:
                fixed.see(did, sample.took_s - least_s - expected.load_s, now)
            fixed_s = fixed.seconds(did)
        took_s = max(sample.took_s - fixed_s, 1e-6)
        if expected.load_source is not None and expected.load_s > LOAD_SHARE_MIN * took_s:
            self._learn_load(expected, took_s, sample.cached_tokens, now)
            return
        took_s = max(took_s - expected.load_s, 1e-6)
        known_s = fixed.seconds(did)
        if least_s < known_s and took_s < SLOW_FACTOR * (least_s + known_s):
            return
        if most_s == least_s or not least_s <= took_s <= most_s:
            explained_s = most_s if took_s > most_s else least_s
            self._learn(expected, did, took_s / max(explained_s, 1e-9), now)

    def _work(self, expected: Expectation, cached_tokens: int | None, now: float) -> "_Work":
        """What a request had to compute, in seconds of its worker as it is believed to be."""
        context = expected.context_tokens
        if cached_tokens is None or abs(cached_tokens - context) <= SAMPLE_TOKENS_MIN:
            return _Work(expected.tokens, expected.context_tokens, expected.compute_s)
        context = max(cached_tokens, 0)
        tokens = max(expected.tokens + expected.context_tokens - context, 1)
        speeds = self._book(expected.model_id).speeds(HolderId(expected.member.slot), now)
        return _Work(tokens, context, speeds.predict_prefill_s(tokens, context))

    def _learn(self, expected: Expectation, did: "_Work", surprise: float, now: float) -> None:
        """Take in that some work took `surprise` times what it should have."""
        if expected.member.is_gone:
            return
        book, worker = self._book(expected.model_id), HolderId(expected.member.slot)
        tokens, compute_s = did.tokens, did.compute_s
        if tokens < SAMPLE_TOKENS_MIN:
            tokens = SAMPLE_TOKENS_MIN
            compute_s = book.speeds(worker, now).predict_prefill_s(tokens, did.context_tokens)
        self._users[worker] = expected.model_id
        sample = PrefillSample(tokens, did.context_tokens, compute_s * surprise)
        book.observe_prefill(worker, sample, now)

    def _learn_load(
        self, expected: Expectation, took_s: float, cached_tokens: int | None, now: float
    ) -> None:
        """The time that is left when queue and compute are taken off was loading, if the worker
        did load."""
        source = expected.load_source
        loaded = cached_tokens is None or cached_tokens >= expected.context_tokens
        if source is None or expected.member.is_gone or not loaded:
            return
        left_s = took_s - expected.compute_s
        if left_s > 0:
            worker = HolderId(expected.member.slot)
            self._users[worker] = expected.model_id
            sample = LoadSample(expected.load_bytes, left_s)
            self._book(expected.model_id).observe_load(worker, source, sample, now)


# The router's tokens against the workers'


@dataclass(slots=True)
class Audit:
    """What responses of one pool said; counts fade, totals do not."""

    responses: float = 0.0
    token_misses: float = 0.0
    promises: float = 0.0
    hit_misses: float = 0.0
    evictions: float = 0.0
    faded_at: float = -inf
    responses_total: int = 0
    token_misses_total: int = 0
    hit_misses_total: int = 0
    evictions_total: int = 0
    example: str = ""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a decision expected of one response."""

    pool: Pool
    prompt_tokens: int | None
    """Own exact count, None where there is none."""
    promised_tokens: int
    """What a fresh index said was in the worker's own cache."""
    is_pool_full: Callable[[], bool]
    """Asked where a promise was not kept."""


@dataclass(slots=True)
class TokenAudits:
    """Compares own counts with usage, by pool. Constant size a pool."""

    mismatch_share_max: float
    hit_mismatch_share_max: float
    _audits: dict[Pool, Audit] = field(default_factory=dict)

    def see(self, promise: Promise, usage: Usage, now: float) -> None:
        """Take in one response."""
        pool, prompt_tokens = promise.pool, promise.prompt_tokens
        audit = self._audits.setdefault(pool, Audit())
        self._fade(audit, now)
        if prompt_tokens is not None and usage.prompt_tokens is not None:
            audit.responses += 1
            audit.responses_total += 1
            if usage.prompt_tokens != prompt_tokens:
                audit.token_misses += 1
                audit.token_misses_total += 1
                audit.example = f"{prompt_tokens} tokens here, {usage.prompt_tokens} there"
        if promise.promised_tokens < 2 * pool.block_tokens or usage.cached_tokens is None:
            return
        audit.promises += 1
        if usage.cached_tokens:
            return
        if promise.is_pool_full():
            audit.evictions += 1
            audit.evictions_total += 1
        else:
            audit.hit_misses += 1
            audit.hit_misses_total += 1

    def audit(self, pool: Pool) -> Audit:
        return self._audits.get(pool) or Audit()

    def cause(self, pool: Pool, now: float) -> str:
        """Why the routing of a pool is degraded; empty where it is not. O(1)."""
        audit = self._audits.get(pool)
        if audit is None:
            return ""
        self._fade(audit, now)
        if audit.responses >= RESPONSES_MIN:
            share = audit.token_misses / audit.responses
            if share > self.mismatch_share_max:
                return f"{share:.1%} of prompts are tokenised differently ({audit.example})"
        if audit.promises >= RESPONSES_MIN:
            share = audit.hit_misses / audit.promises
            if share > self.hit_mismatch_share_max:
                return f"{share:.1%} of promised prefixes were not cached at all"
            share = audit.evictions / audit.promises
            if share > EVICTED_SHARE_MAX:
                return f"{share:.1%} of promised prefixes were not cached at all in full pools"
        return ""

    def is_tokens_suspect(self, pool: Pool) -> bool:
        """Whether matches of the index cannot be believed: its tokens are not ours."""
        audit = self._audits.get(pool)
        if audit is None or audit.responses < RESPONSES_MIN:
            return False
        return audit.token_misses > self.mismatch_share_max * audit.responses

    @staticmethod
    def _fade(audit: Audit, now: float) -> None:
        if audit.faded_at == -inf:
            audit.faded_at = now
        if now - audit.faded_at < WINDOW_S / 8:
            return
        keep = 0.5 ** ((now - audit.faded_at) / (5 * WINDOW_S))
        audit.responses *= keep
        audit.token_misses *= keep
        audit.promises *= keep
        audit.hit_misses *= keep
        audit.evictions *= keep
        audit.faded_at = now

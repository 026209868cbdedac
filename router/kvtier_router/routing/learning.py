"""What answers teach: prefill speed of each worker, bandwidth of each tier, and whether the
router's tokens are the workers' tokens.

A router sees times to first token, not prefills. What of such a time was waiting and what was this
request's own work is split as it was predicted when the request was placed: with that, a sample
says by what factor the worker was slower or faster than believed, at any depth of its queue. Fixed
costs of a request (network, tokenising, the first step) are taken off by what the best answers of
late took beyond their work.

What must not live here: the estimators themselves (kvtier.core.costs), any choice.
"""

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
SLOW_FACTOR = 4.0
"""A short request teaches nothing unless it took this many times what it should have."""
QUEUE_DOUBT = 0.5
"""A time that was all waiting tells nothing within this part of what was predicted."""
SAMPLE_TOKENS_MIN = 32
LOAD_SHARE_MIN = 0.5
"""A time to first token teaches a tier's bandwidth where loading is this part of it."""
WINDOW_S = 60.0
RESPONSES_MIN = 50
"""Fewer comparable responses than this say nothing of a model."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a decision predicted for the worker that it chose."""

    member: Member
    model_id: str
    tokens: int
    """To be computed by this request."""
    context_tokens: int
    """Reused before them."""
    queue_s: float
    compute_s: float
    load_s: float
    """Of loading that the request must wait for."""
    load_source: Source | None
    """The only source it loads from; None for none or several."""
    load_bytes: int


class _Floor:
    """The least of a stream of times, over the last one to two windows."""

    def __init__(self) -> None:
        self._now = self._before = inf
        self._turned_at = -inf

    def see(self, seconds: float, now: float) -> None:
        if now - self._turned_at >= FLOOR_WINDOW_S:
            self._before = self._now if now - self._turned_at < 2 * FLOOR_WINDOW_S else inf
            self._now, self._turned_at = inf, now
        self._now = min(self._now, seconds)

    @property
    def seconds(self) -> float:
        return min(max(min(self._now, self._before), 0.0), FLOOR_S_MAX)


class SpeedBooks:
    """A book of speeds for each model: workers of different models do not compare.

    A FleetListener. Holds as many books as the fleet has models.
    """

    def __init__(self, policy: BookPolicy) -> None:
        self._policy = policy
        self._books: dict[str, CostBook] = {}
        self._floors: dict[str, _Floor] = {}
        self._users: dict[int, str] = {}
        self._token_s: dict[str, float] = {}
        """By model, seconds between tokens of answers that come in one piece."""

    def joined(self, member: Member, now: float, is_new: bool) -> None:
        """Nothing is known of it yet."""

    def left(self, member: Member) -> None:
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
        return 1.0 / book.speeds(HolderId(member.slot), now).prefill.first_s

    def first_token(
        self, expected: Expectation, ttft_s: float, cached_tokens: int | None, now: float
    ) -> None:
        """Learn from a measured time to first token."""
        if not 0 < ttft_s < inf:
            return
        floor = self._floors.setdefault(expected.model_id, _Floor())
        floor.see(ttft_s - expected.queue_s - expected.compute_s - expected.load_s, now)
        took_s = max(ttft_s - floor.seconds, 1e-6)
        if expected.load_s > LOAD_SHARE_MIN * took_s or (
            expected.load_source is not None and expected.load_s > expected.compute_s
        ):
            self._learn_load(expected, took_s, cached_tokens, now)
            return
        work_s = expected.queue_s + expected.compute_s
        surprise = took_s / max(work_s, 1e-9)
        if work_s < floor.seconds and surprise < SLOW_FACTOR:
            return
        # How much of the queue had been done already when this request joined it is not known.
        doubt = 1.0 + QUEUE_DOUBT * expected.queue_s / max(work_s, 1e-9)
        surprise = max(surprise / doubt, min(surprise * doubt, 1.0))
        self._learn_prefill(expected, surprise, cached_tokens, now)

    def whole_answer(self, expected: Expectation, usage: Usage, now: float) -> None:
        """Learn from an answer that came in one piece: by how much it took longer than such an
        answer does elsewhere."""
        total_s, tokens = usage.total_s, usage.completion_tokens
        if total_s is None or not 0 < total_s < inf or not tokens or tokens < 0:
            return
        work_s = expected.queue_s + expected.compute_s + expected.load_s
        seen_s = max(total_s - work_s, 1e-6) / tokens
        token_s = self._token_s.get(expected.model_id, seen_s)
        self._token_s[expected.model_id] = token_s + 0.05 * (seen_s - token_s)
        surprise = total_s / max(work_s + token_s * tokens, 1e-9)
        self._learn_prefill(expected, surprise, usage.cached_tokens, now)

    # ---- parts

    def _book(self, model_id: str) -> CostBook:
        book = self._books.get(model_id)
        if book is None:
            book = self._books[model_id] = CostBook(self._policy)
        return book

    def _learn_prefill(
        self, expected: Expectation, surprise: float, cached_tokens: int | None, now: float
    ) -> None:
        tokens, context, compute_s = (
            expected.tokens,
            expected.context_tokens,
            expected.compute_s,
        )
        book = self._book(expected.model_id)
        worker = HolderId(expected.member.slot)
        if cached_tokens is not None and abs(cached_tokens - context) > SAMPLE_TOKENS_MIN:
            # It reused something else than was thought: what it then had to do, at its old speed.
            tokens = max(tokens + context - cached_tokens, 1)
            context = max(cached_tokens, 0)
            believed_s = book.speeds(worker, now).predict_prefill_s(tokens, context)
            work_s = expected.queue_s + compute_s
            surprise *= work_s / max(expected.queue_s + believed_s, 1e-9)
            compute_s = believed_s
        if tokens < SAMPLE_TOKENS_MIN:
            tokens = SAMPLE_TOKENS_MIN
            compute_s = book.speeds(worker, now).predict_prefill_s(tokens, context)
        if not expected.member.is_gone:
            self._users[worker] = expected.model_id
            sample = PrefillSample(tokens, context, compute_s * surprise)
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
        left_s = took_s - expected.queue_s - expected.compute_s
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
    faded_at: float = -inf
    responses_total: int = 0
    token_misses_total: int = 0
    hit_misses_total: int = 0
    example: str = ""


@dataclass(slots=True)
class TokenAudits:
    """Compares own counts with usage, by pool. Constant size a pool."""

    mismatch_share_max: float
    hit_mismatch_share_max: float
    _audits: dict[Pool, Audit] = field(default_factory=dict)

    def see(
        self, pool: Pool, prompt_tokens: int | None, promised_tokens: int, usage: Usage, now: float
    ) -> None:
        """Take in one response. `prompt_tokens`: own exact count, None where there is none.
        `promised_tokens`: what a fresh index said was in the worker's own cache."""
        audit = self._audits.setdefault(pool, Audit())
        self._fade(audit, now)
        if prompt_tokens is not None and usage.prompt_tokens is not None:
            audit.responses += 1
            audit.responses_total += 1
            if usage.prompt_tokens != prompt_tokens:
                audit.token_misses += 1
                audit.token_misses_total += 1
                audit.example = f"{prompt_tokens} tokens here, {usage.prompt_tokens} there"
        if promised_tokens >= 2 * pool.block_tokens and usage.cached_tokens is not None:
            audit.promises += 1
            if usage.cached_tokens == 0:
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
        audit.faded_at = now

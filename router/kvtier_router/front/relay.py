"""From an admitted request to its answer: choose, send, relay, and try again where that is right.

Retries happen before the client has seen a byte, within a budget; afterwards a stream of text goes
on elsewhere, and anything else ends with an error that says so. What must not live here: what comes
before (app.py), the choice itself, sockets.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Final

import numpy as np

from kvtier.core.health import RetryBudget
from kvtier.core.workers import WorkerName
from kvtier.errors import CallerError, KvtierError, UnavailableError
from kvtier.openai import usage as openai_usage
from kvtier.types import Role
from kvtier_router.front.answers import error_answer, error_event, translated
from kvtier_router.front.attempt import Attempt, AttemptPlan, Broken, Held, Outcome, Streamed
from kvtier_router.front.calls import Amendment, Api, Call, upstream_body
from kvtier_router.front.contexts import ContextLengths
from kvtier_router.front.credentials import Credentials
from kvtier_router.front.prompts import PromptTokens
from kvtier_router.front.resume import (
    ResumedFilter,
    Resumption,
    StreamBudget,
    last_events,
    may_resume,
    resumption,
)
from kvtier_router.front.splitting import PREFILLED, WORKER_HEADER, Half, Splits
from kvtier_router.front.stickiness import Stickiness
from kvtier_router.front.streams import PlainFilter, StreamFilter
from kvtier_router.front.tenants import Tenant
from kvtier_router.routing.values import (
    Delivery,
    FailureKind,
    PromptKind,
    RouteAsk,
    RouteDecision,
    RoutingBrain,
    Usage,
    printable,
)
from kvtier_router.web.server import Exchange
from kvtier_router.web.upstream import Loss, Upstream, UpstreamError, request_bytes
from kvtier_router.web.values import Headers, Reply

_TOKENS_PATH: Final = "/v1/completions"
_RANK: Final = "x-data-parallel-rank"
"""How vLLM (0.18 and later) and SGLang (0.5.10 and later) are told a rank."""


class Retried(StrEnum):
    """What became of a wish to try again."""

    GRANTED = "granted"
    BUDGET = "budget"
    ATTEMPTS = "attempts"


class Resumed(StrEnum):
    """What became of a stream whose worker died."""

    GRANTED = "granted"
    COMPLETED = "completed"
    """Only its last events were missing."""
    REFUSED = "refused"
    """Not text, not one choice, or not to be continued faithfully."""
    FAILED = "failed"
    """No worker, no attempt or no budget left."""


EXPLAIN: Final = ("x-kvtier-explain", "1")
"""Header of a client that wants to know, in `usage.kvtier`, what came from which tier."""


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """How often one request is tried, and what clients are told."""

    attempts_max: int = 3
    shows_decision: bool = True


@dataclass(slots=True)
class Job:
    """One admitted request on its way."""

    exchange: Exchange
    call: Call
    tenant: Tenant
    salt: str | None
    prompt: PromptTokens
    request_id: str
    session_id: str | None
    traceparent: str | None
    arrived_at: float
    explained: bool = False
    """The client asked the worker to say from which tiers its prompt came."""
    # What came of it, for the log line and the metrics
    status: int = 0
    error: str = ""
    attempts: int = 0
    decision: RouteDecision | None = None
    is_whole: bool = False
    """Whether the client had everything when it left."""
    is_stream: bool = False
    """Whether the client reads events."""
    ttft_s: float | None = None
    usage: openai_usage.Usage | None = None
    resumed: int = 0
    excluded: set[WorkerName] = field(default_factory=set)
    half: Half | None = None
    """What another worker did of its prompt before."""
    was_planned: bool = False
    """Whether it was decided to split it or not."""
    shown: list[tuple[str, str]] | None = None
    """Response headers of `shown_for`."""
    shown_for: RouteDecision | None = None
    sent_before: bytes = b""
    """What the client has from workers that died."""


@dataclass(frozen=True, slots=True)
class _Try:
    """One thing to send: the request as it came, or what goes on with it."""

    call: Call
    prompt: PromptTokens
    resumption: Resumption | None = None


@dataclass(frozen=True, slots=True)
class RelayParts:
    """What a relay works with."""

    brain: RoutingBrain
    route_later: Callable[[RouteAsk], Awaitable[RouteDecision]] | None
    """How to route where an index elsewhere is asked first; None: `brain.route`."""
    upstream: Upstream
    credentials: Credentials
    stickiness: Stickiness
    splits: Splits | None
    """None: no request is split."""
    budget: RetryBudget
    policy: RelayPolicy
    clock: Callable[[], float]


class Relay:
    """Carries requests to workers. One event loop uses it."""

    def __init__(self, parts: RelayParts) -> None:
        self._parts = parts
        self._contexts = ContextLengths(parts.upstream)
        self._streams = StreamBudget()
        self.retries: Counter[Retried] = Counter()
        self.resumptions: Counter[Resumed] = Counter()
        self.losses: Counter[Loss] = Counter()

    async def run(self, job: Job) -> None:
        """Answer the job's exchange, whatever happens to workers. Raises KvtierError only while
        the client has seen nothing."""
        self._parts.budget.request(self._parts.clock())
        if not job.call.stream:
            await self._try(job)
            return
        self._streams.began()
        try:
            await self._try(job)
        finally:
            self._streams.ended()

    async def _try(self, job: Job) -> None:
        wanted = _Try(job.call, job.prompt)
        while True:
            decision = await self._decide(job, wanted)
            job.decision = decision
            job.attempts += 1
            outcome, sent = await self._attempt(job, wanted, decision)
            if isinstance(outcome, Broken):
                follow = self._after_loss(job, wanted, outcome, sent)
                if follow is None:
                    return
                wanted = follow
            elif isinstance(outcome, Held) and self._passes(job, outcome):
                job.excluded.add(decision.worker)
            else:
                self._complete(job, decision, outcome)
                return

    # Choosing

    async def _decide(self, job: Job, wanted: _Try) -> RouteDecision:
        call = wanted.call
        ask = RouteAsk(
            served_name=call.model,
            tokens=wanted.prompt.tokens,
            scope_salt=job.salt,
            tenant_id=job.tenant.tenant_id,
            priority=job.tenant.priority,
            session_id=job.session_id,
            output_tokens=call.output_tokens,
            excluded=self._excluded(job),
            kind=wanted.prompt.kind,
            delivery=Delivery.STREAM if call.stream else Delivery.WHOLE,
        )
        if self._parts.splits is not None and not job.was_planned:
            job.was_planned = True
            send = partial(self._request, job, wanted)
            job.half = await self._parts.splits.first_half(job, ask, send)
            ask.excluded = self._excluded(job)
        if job.half is not None and wanted.resumption is None:
            ask.stage, ask.prefilled = Role.DECODE, job.half.prefilled
        try:
            if self._parts.route_later is not None:
                return await self._parts.route_later(ask)
            return self._parts.brain.route(ask)
        except KvtierError as error:
            if ask.prefilled is not None and isinstance(error, UnavailableError):
                job.half = None
                return await self._decide(job, wanted)
            if job.attempts and not isinstance(error, CallerError):
                raise UnavailableError(f"{error} (after a worker failed: {job.error})") from error
            raise translated(error, call.model) from None

    def _excluded(self, job: Job) -> frozenset[WorkerName]:
        """Workers that failed this request; for one that goes on from an answer, all others than
        the one that gave it, while that one has not failed."""
        previous = job.call.previous_response_id
        home = None
        if previous is not None:
            home = self._parts.stickiness.find(job.tenant.scope_id, previous)
        if home is None or home in job.excluded:
            return frozenset(job.excluded)
        others = {report.worker for report in self._parts.brain.workers()} - {home}
        return frozenset(others | job.excluded)

    # One attempt

    async def _attempt(
        self, job: Job, wanted: _Try, decision: RouteDecision
    ) -> tuple[Outcome, bytes | None]:
        """Send, relay and report to the brain. The bytes are what the client has of a stream that
        broke, where they were kept."""
        parts, placement = self._parts, decision.placement

        def first_byte(ttft_s: float) -> None:
            placement.first_token(ttft_s)
            if job.ttft_s is None:
                job.ttft_s = parts.clock() - job.arrived_at

        plan = AttemptPlan(
            make_filter=partial(_new_filter, wanted),
            ends_with_done=wanted.call.speaks_tokens,
            headers=self._shown(job, decision),
            first_byte=first_byte,
        )
        attempt = Attempt(job.exchange, plan, parts.clock)
        sent_at = parts.clock()
        half = job.half if wanted.resumption is None else None
        settled = False
        try:
            more = () if half is None else ((PREFILLED, str(half.computed_tokens)),)
            request = self._request(job, await self._bounded(wanted, decision), decision, more)
            outcome = await self._send(attempt, decision, request)
            if isinstance(outcome, Broken) and outcome.error.loss is Loss.REUSED:
                attempt = Attempt(job.exchange, plan, parts.clock)
                outcome = await self._send(attempt, decision, request, fresh=True)
            settled = True
        finally:
            job.is_stream = job.is_stream or attempt.filter is not None
            if not settled:
                whole = attempt.whole  # before it is given up, with what it knows
                attempt.abort()
                if whole is None:
                    placement.failed(FailureKind.CANCELLED)
                else:  # a client that closes at [DONE] has its answer
                    self._report(job, decision, whole, parts.clock() - sent_at, half)
                    job.status, job.is_whole = 200, True
        self._report(job, decision, outcome, parts.clock() - sent_at, half)
        filtered = attempt.filter
        kept = filtered.kept if isinstance(filtered, PlainFilter | ResumedFilter) else None
        if job.call.api is Api.RESPONSES and isinstance(filtered, PlainFilter):
            scope_id = job.tenant.scope_id
            parts.stickiness.learn_stream(scope_id, filtered.start, decision.worker)
        return outcome, kept

    async def _send(
        self, attempt: Attempt, decision: RouteDecision, request: bytes, *, fresh: bool = False
    ) -> Outcome:
        upstream = self._parts.upstream
        try:
            origin = upstream.origin(decision.target.address)
            connection = await upstream.connection(origin, fresh=fresh)
        except UpstreamError as error:
            return Broken(error, was_heard=False)
        attempt.attach(connection)
        connection.send(request, attempt)
        return await attempt.outcome

    async def _bounded(self, wanted: _Try, decision: RouteDecision) -> _Try:
        """What is to be sent, with the worker's context as the ceiling of an answer that goes on
        without one. UnavailableError where that is not known."""
        resumed = wanted.resumption
        if resumed is None or not resumed.needs_ceiling:
            return wanted
        target = decision.target
        origin = self._parts.upstream.origin(target.address)
        token = self._parts.credentials.find(decision.worker, target.address)
        context = await self._contexts.find(origin, target.model, token)
        left = 0 if context is None else context - len(resumed.tokens)
        if left < 1:
            raise UnavailableError("the worker does not say how much context is left")
        body = {**resumed.body, "max_tokens": left}
        return replace(wanted, resumption=replace(resumed, body=body))

    def _request(
        self, job: Job, wanted: _Try, decision: RouteDecision, more: Headers = ()
    ) -> bytes:
        target, call = decision.target, wanted.call
        origin = self._parts.upstream.origin(target.address)
        headers = [("host", origin.authority), ("x-request-id", job.request_id), *more]
        token = self._parts.credentials.find(decision.worker, target.address)
        if token is not None:
            headers.append(("authorization", f"Bearer {token}"))
        if job.traceparent is not None:
            headers.append(("traceparent", job.traceparent))
        if job.explained:
            headers.append(EXPLAIN)
        if target.rank is not None:
            headers.append((_RANK, str(target.rank)))
        resumed = wanted.resumption
        if resumed is not None:
            fields = {"model": target.model, **resumed.body}
            if job.salt is not None:
                fields["cache_salt"] = job.salt
            headers.append(("content-type", "application/json"))
            body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
            return request_bytes("POST", origin.prefix + _TOKENS_PATH, headers, body)
        if call.content_type:
            headers.append(("content-type", call.content_type))
        body = upstream_body(call, Amendment(target.model, job.salt))
        return request_bytes(call.method, origin.prefix + call.path, headers, body)

    def _shown(self, job: Job, decision: RouteDecision) -> list[tuple[str, str]]:
        if job.shown is None or job.shown_for is not decision:
            job.shown = [("x-request-id", job.request_id)]
            job.shown_for = decision
            if self._parts.policy.shows_decision:
                job.shown += decision.headers().items()
                if job.half is not None:
                    job.shown.append((WORKER_HEADER, printable(job.half.decision.worker.instance)))
        return job.shown

    def _report(
        self,
        job: Job,
        decision: RouteDecision,
        outcome: Outcome,
        total_s: float,
        half: Half | None,
    ) -> None:
        """Tell the brain how the attempt went."""
        placement = decision.placement
        match outcome:
            case Broken():
                self.losses[outcome.error.loss] += 1
                job.error = outcome.error.loss.value
                placement.failed(_failure(outcome))
            case Held() if outcome.status >= 400:
                job.error = f"status {outcome.status}"
                placement.failed(_rejection(outcome), outcome.retry_after_s)
            case Held():
                found = openai_usage.usage_of(outcome.body)
                job.usage = found
                placement.finished(self._usage(job, decision, total_s, half))
            case Streamed():
                job.usage = outcome.usage
                placement.finished(self._usage(job, decision, total_s, half))

    def _usage(self, job: Job, decision: RouteDecision, total_s: float, half: Half | None) -> Usage:
        """What the brain may compare with its own counts: not the sums over several prompts. What
        a first half computed was cached for the second."""
        found = job.usage
        if found is None or not job.prompt.is_whole:
            return Usage(total_s=total_s)
        cached = found.cached_tokens
        if half is not None and self._parts.splits is not None:
            cached = cached if found.reused_tokens is None else found.reused_tokens
            self._parts.splits.second_half_ended(half, decision, cached)
        return Usage(found.prompt_tokens, found.completion_tokens, cached, total_s)

    # What follows

    def _passes(self, job: Job, held: Held) -> bool:
        """Whether an answer that says the worker cannot is kept from the client, to try another."""
        if _rejection(held) is FailureKind.REJECTED or held.status < 400:
            return False
        return self._may_try(job)

    def _may_try(self, job: Job) -> bool:
        if job.attempts >= self._parts.policy.attempts_max:
            self.retries[Retried.ATTEMPTS] += 1
            return False
        granted = self._parts.budget.take(self._parts.clock())
        self.retries[Retried.GRANTED if granted else Retried.BUDGET] += 1
        return granted

    def _after_loss(
        self, job: Job, wanted: _Try, broken: Broken, sent: bytes | None
    ) -> _Try | None:
        """What to try after a worker was lost; None where the client has its answer (or its error).

        Raises the error to answer with where the client has seen nothing.
        """
        assert job.decision is not None
        self._exclude(job, job.decision, broken.error)
        if not job.exchange.started:
            if self._may_try(job):
                return wanted
            if broken.error.loss is Loss.CONNECT:
                raise UnavailableError("no worker could be reached") from broken.error
            raise broken.error
        resumed = None
        if sent is not None:
            job.sent_before += sent
            resumed = resumption(job.call, job.prompt, job.sent_before)
        if resumed is None:
            self.resumptions[Resumed.REFUSED] += 1
            self._end_broken(job, broken)
            return None
        if resumed.finished:
            self.resumptions[Resumed.COMPLETED] += 1
            job.exchange.send(last_events(resumed))
            job.exchange.finish()
            job.status = 200
            return None
        if job.attempts >= self._parts.policy.attempts_max or not self._streams.take():
            self.resumptions[Resumed.FAILED] += 1
            self._end_broken(job, broken)
            return None
        self.resumptions[Resumed.GRANTED] += 1
        job.resumed += 1
        tokens = np.array(resumed.tokens, dtype=np.uint32)
        prompt = PromptTokens(tokens, PromptKind.TOKENS, job.prompt.model)
        return _Try(replace(wanted.call, api=Api.COMPLETIONS), prompt, resumed)

    def _exclude(self, job: Job, decision: RouteDecision, error: UpstreamError) -> None:
        """Who failed is not asked again, nor are the other ranks behind an address that does not
        answer."""
        job.excluded.add(decision.worker)
        target = decision.target
        if target.rank is not None and error.loss is Loss.CONNECT:
            reports = self._parts.brain.workers()
            job.excluded |= {one.worker for one in reports if one.address == target.address}

    def _end_broken(self, job: Job, broken: Broken) -> None:
        """The client has a part of the answer and cannot get the rest."""
        job.status = 200
        if not job.is_stream:
            job.exchange.abort()
            return
        job.exchange.send(error_event(broken.error))
        job.exchange.finish()

    def _complete(self, job: Job, decision: RouteDecision, outcome: Outcome) -> None:
        exchange = job.exchange
        if isinstance(outcome, Held):
            if exchange.started:  # a stream that was to go on, and the worker would not
                self._end_broken(job, Broken(UpstreamError(Loss.RESET), was_heard=True))
                return
            job.status = outcome.status
            headers = [*outcome.headers, *self._shown(job, decision)]
            exchange.reply(Reply(outcome.status, outcome.body, headers))
            self._remember(job, decision, outcome)
        else:
            job.status = 200
            exchange.finish()

    def _remember(self, job: Job, decision: RouteDecision, held: Held) -> None:
        """Where an answer of `/v1/responses` lives, for the requests that go on from it."""
        if job.call.api is Api.RESPONSES and held.status == 200:
            self._parts.stickiness.learn(job.tenant.scope_id, held.body, decision.worker)

    def fail(self, job: Job, error: KvtierError) -> None:
        """Answer with an error, as far as the client can still be told."""
        job.error = job.error or type(error).__name__
        if job.exchange.started:
            if job.is_whole:
                job.exchange.finish()
            elif not job.exchange.finished:
                self._end_broken(job, Broken(UpstreamError(Loss.RESET), was_heard=True))
            return
        job.status = error.http_status
        job.exchange.reply(error_answer(error, (("x-request-id", job.request_id),)))


def _new_filter(wanted: _Try) -> StreamFilter:
    if wanted.resumption is not None:
        return ResumedFilter(wanted.resumption.shape)
    keeps = may_resume(wanted.call, wanted.prompt)
    return PlainFilter(wants_usage=wanted.call.wants_usage, keeps=keeps)


def _failure(broken: Broken) -> FailureKind:
    match broken.error.loss:
        case Loss.CONNECT:
            return FailureKind.CONNECT
        case Loss.TIMEOUT:
            return FailureKind.TIMEOUT
        case Loss.MALFORMED:
            return FailureKind.SERVER_ERROR
        case _:
            return FailureKind.BROKEN if broken.was_heard else FailureKind.CONNECT


def _rejection(held: Held) -> FailureKind:
    if held.status == 429 or (held.status == 503 and held.retry_after_s is not None):
        return FailureKind.OVERLOADED
    return FailureKind.SERVER_ERROR if held.status >= 500 else FailureKind.REJECTED

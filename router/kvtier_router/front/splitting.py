"""Split requests: their prompt is computed by one worker before another one answers them.

The first half is a request of its own whose answer no client sees: it says how much of the prompt
lies in a store now. Whatever comes of it, the second half is the whole request, sent to a worker
that loads what it can and computes the rest, so nothing here can make an answer wrong; a first half
that fails costs its time, up to a deadline, and a piece of the budget of retries. What must not
live here: when splitting is worth it (routing/splitting.py), relaying (relay.py).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from kvtier.core.health import RetryBudget
from kvtier.core.workers import WorkerName
from kvtier.errors import KvtierError
from kvtier.openai import usage as openai_usage
from kvtier.openai.requests import ChatRequest, CompletionRequest
from kvtier.types import Role
from kvtier_router.front.calls import Call
from kvtier_router.front.prompts import PromptTokens
from kvtier_router.routing.splitting import SplitPlan, SplitReason, Splitter
from kvtier_router.routing.values import (
    Delivery,
    FailureKind,
    Prefilled,
    RouteAsk,
    RouteDecision,
    RoutingBrain,
    Usage,
)
from kvtier_router.web.upstream import Loss, ResponseHead, Upstream, UpstreamError
from kvtier_router.web.values import Headers

PREFILL: Final = ("x-kvtier-prefill", "1")
"""Makes a request the first half of itself; see docs/openai_endpoint.md."""
PREFILLED: Final = "x-kvtier-prefilled"
"""Tells the second half's worker how many prompt tokens the first one computed."""
WORKER_HEADER: Final = "x-kvtier-prefill-worker"
"""Tells the client who computed its prompt."""
_ANSWER_BYTES_MAX: Final = 1 << 20
_WAIT_S_MIN, _WAIT_S_MAX = 2.0, 120.0
_WAIT_FACTOR: Final = 4.0
"""A first half may take so many times what was predicted."""
_KNOWN_S_MAX: Final = 0.25
_LOOK_S: Final = 0.003
_PAUSE_S: Final = 1.0
"""Nothing is split for so long after a failure that the budget of retries did not cover."""

Send = Callable[[RouteDecision, Headers], bytes]
"""The request for a worker, with headers more."""


class SplitOutcome(StrEnum):
    """What became of a request that could be split."""

    SPLIT = "split"
    WHOLE = "whole"
    FAILED = "failed"
    """Its first half; it was served whole."""


class SplitTrouble(StrEnum):
    """Why a request was not split, or its first half failed, beside what the choice says."""

    SEVERAL = "several"
    """Several prompts or choices, or a path whose prompt is not read."""
    BUDGET = "budget"
    """First halves failed of late, and the budget of retries is used up."""
    NOT_STORED = "not_stored"
    """The prompt was computed and the store did not take it."""


REASONS: Final = tuple(
    dict.fromkeys(
        [*map(str, SplitReason), *map(str, SplitTrouble), *(kind.value for kind in FailureKind)]
    )
)


@dataclass(frozen=True, slots=True)
class Half:
    """A first half that was done."""

    decision: RouteDecision
    prefilled: Prefilled
    computed_tokens: int
    """Of the prompt, that its worker had to compute."""


class SplitJob(Protocol):
    """What is read of a job."""

    @property
    def call(self) -> Call: ...

    @property
    def prompt(self) -> PromptTokens: ...

    @property
    def excluded(self) -> set[WorkerName]: ...


@dataclass(frozen=True, slots=True)
class SplitParts:
    """What splitting works with."""

    brain: RoutingBrain
    splitter: Splitter
    upstream: Upstream
    budget: RetryBudget
    clock: Callable[[], float]


class _Broken(Exception):
    """A first half failed."""

    def __init__(self, kind: FailureKind, retry_after_s: float | None = None) -> None:
        super().__init__(kind.value)
        self.kind = kind
        self.retry_after_s = retry_after_s


class Splits:
    """First halves of this process. One event loop uses it."""

    def __init__(self, parts: SplitParts) -> None:
        self._parts = parts
        self._paused_until = 0.0
        self.counts: Counter[tuple[str, str]] = Counter()
        """By outcome and reason."""

    def plan(self, call: Call, prompt: PromptTokens, ask: RouteAsk) -> SplitPlan | None:
        """What would be done with a request that nobody has tried; None where splitting is off,
        or it is of a form that is not split. Sends nothing."""
        return self._parts.splitter.plan(ask) if _is_single(call, prompt) else None

    async def first_half(self, job: SplitJob, ask: RouteAsk, send: Send) -> Half | None:
        """Have the prompt computed elsewhere, if that is worth it. None: the request is to be
        served whole; a worker that failed is excluded from the job then."""
        verdict = self._verdict(job, ask)
        if verdict is None:
            return None
        if not isinstance(verdict, SplitPlan):
            self.counts[SplitOutcome.WHOLE.value, verdict.value] += 1
            return None
        try:
            half_ask = replace(ask, stage=Role.PREFILL, output_tokens=0, delivery=Delivery.STREAM)
            decision = self._parts.brain.route(half_ask)
        except KvtierError:
            self.counts[SplitOutcome.WHOLE.value, SplitReason.NO_WORKER.value] += 1
            return None
        try:
            half, wait_s = await self._done(decision, send(decision, (PREFILL,)))
        except _Broken as broken:
            decision.placement.failed(broken.kind, broken.retry_after_s)
            self._failed(broken.kind)
            job.excluded.add(decision.worker)
            return None
        except BaseException:
            decision.placement.failed(FailureKind.CANCELLED)
            raise
        if half.prefilled.tokens:
            wait_s += await self._until_known(half, verdict, ask)
        if verdict.decode is not None:
            self._parts.splitter.stored(half.prefilled, verdict.decode, wait_s)
        if not half.prefilled.tokens:
            self._failed(SplitTrouble.NOT_STORED)
            return None
        self.counts[SplitOutcome.SPLIT.value, verdict.reason.value] += 1
        return half

    def second_half_ended(
        self, half: Half, decision: RouteDecision, cached_tokens: int | None
    ) -> None:
        """Learn how much of its prompt the answering worker had from the tiers."""
        if cached_tokens is not None:
            self._parts.splitter.used(half.prefilled, decision, cached_tokens)

    # ---- parts

    def _verdict(
        self, job: SplitJob, ask: RouteAsk
    ) -> SplitPlan | SplitReason | SplitTrouble | None:
        """How to split it, or why not; None where nobody asks."""
        splitter = self._parts.splitter
        try:
            if not splitter.is_on(ask.served_name):
                return None
            if not _is_single(job.call, job.prompt):
                return SplitTrouble.SEVERAL
            plan = splitter.plan(ask)
        except KvtierError:
            return None  # the choice of a worker says what is wrong
        if plan is None:
            return None
        if plan.is_split and self._parts.clock() < self._paused_until:
            return SplitTrouble.BUDGET
        return plan if plan.is_split else plan.reason

    def _failed(self, reason: FailureKind | SplitTrouble) -> None:
        self.counts[SplitOutcome.FAILED.value, reason.value] += 1
        now = self._parts.clock()
        if not self._parts.budget.take(now):
            self._paused_until = now + _PAUSE_S

    async def _until_known(self, half: Half, plan: SplitPlan, ask: RouteAsk) -> float:
        """Wait, for a moment, until the second worker can find what the first one left; how long
        that took. Who asks an index too early hears that nobody has it."""
        began = self._parts.clock()
        until = began + _KNOWN_S_MAX
        splitter = self._parts.splitter
        while plan.decode is not None and (now := self._parts.clock()) < until:
            if splitter.is_known(ask, half.prefilled, plan.decode):
                return now - began
            await asyncio.sleep(_LOOK_S)
        return self._parts.clock() - began

    async def _done(self, decision: RouteDecision, request: bytes) -> tuple[Half, float]:
        """Send it and take its answer, with the seconds that its blocks took beyond computing;
        tells the placement of all but a failure."""
        parts, placement = self._parts, decision.placement
        most_s = _WAIT_FACTOR * decision.predicted_ttft_s + _WAIT_S_MIN
        began = parts.clock()
        try:
            async with asyncio.timeout(min(most_s, _WAIT_S_MAX)):
                status, body = await self._answer(decision, request)
        except TimeoutError:
            raise _Broken(FailureKind.TIMEOUT) from None
        took_s = parts.clock() - began
        told = _told(body) if status == 200 else None
        if told is None:
            raise _Broken(_kind(status))
        usage = openai_usage.usage_of(body)
        prompt = decision.prompt_tokens if usage is None else usage.prompt_tokens
        cached = 0 if usage is None else usage.cached_tokens or 0
        stored_tokens, wait_s = told
        placement.first_token(max(took_s - wait_s, 1e-6), cached)
        placement.finished(Usage(prompt, 0, cached, took_s))
        prefilled = parts.splitter.prefilled(decision, min(stored_tokens, prompt))
        return Half(decision, prefilled, max(prompt - cached, 0)), wait_s

    async def _answer(self, decision: RouteDecision, request: bytes) -> tuple[int, bytes]:
        """Status and body; what runs there is given up when this is cancelled."""
        upstream = self._parts.upstream
        for is_fresh in (False, True):
            sink = _Answer()
            connection = None
            try:
                origin = upstream.origin(decision.target.address)
                connection = await upstream.connection(origin, fresh=is_fresh)
                connection.send(request, sink)
                return await sink.answer
            except UpstreamError as error:
                if error.loss is not Loss.REUSED or is_fresh:
                    raise _Broken(_failure(error)) from error
            finally:
                if connection is not None:
                    connection.abandon(sink)
        raise AssertionError("a fresh connection was used before")


class _Answer:
    """A sink that collects one answer."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._status = 0
        self._parts = bytearray()

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        if len(self._parts) <= _ANSWER_BYTES_MAX:
            self._parts += data

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result((self._status, bytes(self._parts)))

    def on_lost(self, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def _is_single(call: Call, prompt: PromptTokens) -> bool:
    view = call.view
    if not isinstance(view, ChatRequest | CompletionRequest) or not prompt.is_whole:
        return False
    return view.choices_count == 1


def _told(body: bytes) -> tuple[int, float] | None:
    """Tokens that are stored, and what storing them took beyond computing; None for what is no
    answer to a first half."""
    try:
        read = json.loads(body)
        told = read["kvtier"]
        tokens, wait_s = told["stored_tokens"], told["store_wait_s"]
        is_one = read["object"] == "kvtier.prefill"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not is_one or type(tokens) is not int or not isinstance(wait_s, int | float):
        return None
    return (tokens, float(wait_s)) if tokens >= 0 and 0 <= wait_s < 1e9 else None


def _kind(status: int) -> FailureKind:
    if status in (429, 503):
        return FailureKind.OVERLOADED
    return FailureKind.REJECTED if 400 <= status < 500 else FailureKind.SERVER_ERROR


def _failure(error: UpstreamError) -> FailureKind:
    match error.loss:
        case Loss.CONNECT:
            return FailureKind.CONNECT
        case Loss.TIMEOUT:
            return FailureKind.TIMEOUT
        case Loss.MALFORMED:
            return FailureKind.SERVER_ERROR
    return FailureKind.BROKEN

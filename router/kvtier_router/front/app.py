"""The public face: from a request's header to its answer.

Who asks, what they ask, whether they may, then the queue and the relay. What must not live here:
sockets, the admin's pages (admin.py), the choice of workers.
"""

import asyncio
import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvtier.errors import (
    DeadlineError,
    KvtierError,
    NotFoundError,
    OverloadedError,
)
from kvtier.openai.errors import Fault, ParameterError
from kvtier.telemetry.metrics import CONTENT_TYPE, Metrics
from kvtier.telemetry.tracing import Tracer
from kvtier_router.front import answers
from kvtier_router.front.access_log import AccessLog, quoted
from kvtier_router.front.calls import PATHS, Api, Call, read_call, require_json
from kvtier_router.front.history import History
from kvtier_router.front.prompts import PromptReader
from kvtier_router.front.queue import RequestQueue
from kvtier_router.front.quota import QuotaDesk
from kvtier_router.front.relay import EXPLAIN, Job, Relay
from kvtier_router.front.tenants import Tenant, TenantBook
from kvtier_router.metrics import FrontMetrics
from kvtier_router.openapi import document
from kvtier_router.routing.values import RoutingBrain
from kvtier_router.web.server import Exchange
from kvtier_router.web.values import Head, Refused, Reply

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_READ_METHODS: Final = frozenset({"GET", "DELETE"})
_PLAIN: Final = ("content-type", CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class FrontPolicy:
    """What the front allows."""

    prompt_tokens_max: int
    request_s_max: float
    session_header: str
    shows_metrics: bool
    """Whether `/metrics` is on the public listener as well."""
    started: int
    """Seconds since 1970, for model objects."""


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What the front works with."""

    brain: RoutingBrain
    relay: Relay
    queue: RequestQueue
    quotas: QuotaDesk
    tenants: TenantBook
    prompts: PromptReader
    front_metrics: FrontMetrics
    metrics: Metrics
    tracer: Tracer
    access: AccessLog
    history: History
    clock: Callable[[], float]


class Front:
    """The application of the public listener. One event loop uses it."""

    def __init__(self, parts: FrontParts, policy: FrontPolicy) -> None:
        self._parts = parts
        self._policy = policy
        self._life = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self.draining = False
        self._openapi = answers.json_reply(200, document())

    # What the server asks

    def admit(self, head: Head) -> Reply | None:
        """Turn away who is nobody before reading what they send."""
        if not head.path.startswith("/v1/"):
            return None
        try:
            self._parts.tenants.find(head.headers.get("authorization"))
        except KvtierError as error:
            return answers.error_answer(error)
        return None

    def refusal(self, status: int, reason: Refused) -> Reply:
        return answers.refusal(status, reason)

    async def handle(self, exchange: Exchange) -> None:
        path, method = exchange.head.path, exchange.head.method
        api = PATHS.get(path)
        if api is not None and (method == "POST"):
            await self._infer(exchange, api)
        elif path.startswith("/v1/"):
            await self._other(exchange, api)
        else:
            exchange.reply(self._page(path, method))

    # Pages

    def _page(self, path: str, method: str) -> Reply:
        match path:
            case "/health" | "/ready" | "/openapi.json" | "/metrics" if method not in (
                "GET",
                "HEAD",
            ):
                return answers.method_error("GET")
            case "/health":
                return answers.json_reply(200, {"status": "ok"})
            case "/ready":
                reason = self.unready()
                shown = {"status": "ready" if not reason else "not ready", "reason": reason}
                return answers.json_reply(503 if reason else 200, shown)
            case "/openapi.json":
                return self._openapi
            case "/metrics" if self._policy.shows_metrics:
                return Reply(200, self._parts.metrics.render(), (_PLAIN,))
        return answers.not_found(path)

    def unready(self) -> str:
        """Why no request should be sent here; empty where they may."""
        if self.draining:
            return "draining"
        if not any(report.eligible_count for report in self._parts.brain.models()):
            return "no worker"
        return ""

    async def _other(self, exchange: Exchange, api: Api | None) -> None:
        path = exchange.head.path
        if path == "/v1/models" or path.startswith("/v1/models/"):
            try:
                exchange.reply(self._models(exchange.head))
            except KvtierError as error:
                exchange.reply(answers.error_answer(error))
        elif api is not None and api is not Api.RESPONSES:
            exchange.reply(answers.method_error("POST"))
        else:
            await self._infer(exchange, Api.OTHER)

    def _models(self, head: Head) -> Reply:
        if head.method not in ("GET", "HEAD"):
            return answers.method_error("GET")
        tenant = self._parts.tenants.find(head.headers.get("authorization"))
        names = [r.name for r in self._parts.brain.models() if _may_use(tenant, r.name)]
        wanted = head.path.removeprefix("/v1/models").removeprefix("/")
        if not wanted:
            return answers.json_reply(200, answers.model_list(names, self._policy.started))
        if wanted in names:
            return answers.json_reply(200, answers.model_object(wanted, self._policy.started))
        return answers.error_answer(_unknown_model(wanted))

    # Requests

    async def _infer(self, exchange: Exchange, api: Api) -> None:
        parts, head = self._parts, exchange.head
        arrived_at = parts.clock()
        request_id = self._request_id(head)
        job: Job | None = None
        status = 0
        try:
            tenant = parts.tenants.find(head.headers.get("authorization"))
            call = self._read(exchange, api, tenant)
            salt = parts.tenants.salt(tenant, call.client_salt)
            prompt = await parts.prompts.read(call, salt or "")
            if prompt.longest_count > self._policy.prompt_tokens_max:
                most = self._policy.prompt_tokens_max
                raise ParameterError(
                    Fault.CONTEXT,
                    "messages" if api is Api.CHAT else "prompt",
                    f"the prompt has {prompt.longest_count} tokens, at most {most} are relayed",
                )
            parts.front_metrics.prepared.observe(parts.clock() - arrived_at)
            job = Job(
                exchange=exchange,
                call=call,
                tenant=tenant,
                salt=salt,
                prompt=prompt,
                request_id=request_id,
                session_id=head.headers.get(self._policy.session_header) or None,
                traceparent=_traceparent(head),
                arrived_at=arrived_at,
                explained=head.headers.get(EXPLAIN[0]) == EXPLAIN[1],
            )
            await self._admitted(job)
            status = job.status
        except KvtierError as error:
            if job is not None:
                parts.relay.fail(job, error)
                status = job.status
            else:
                status = error.http_status
                exchange.reply(answers.error_answer(error, (("x-request-id", request_id),)))
                name = type(error).__name__
                parts.access.add(f"id={request_id} api={api.value} status={status} error={name}")
                parts.history.refused(api, request_id, status, name, parts.clock())
        except asyncio.CancelledError:
            status = _cut(job, exchange, "left")
            raise
        except Exception as error:  # a bug: the server logs it, and answers 500 where it still can
            status = _cut(job, exchange, type(error).__name__) or 500
            if job is not None:
                job.status = status
            raise
        finally:
            parts.front_metrics.answered(api, status)
            if job is not None:
                self._log(job)

    def _read(self, exchange: Exchange, api: Api, tenant: Tenant) -> Call:
        head = exchange.head
        path = f"{head.path}?{head.query}" if head.query else head.path
        content_type = head.headers.get("content-type", "")
        if api is not Api.OTHER:
            require_json(content_type)
        call = read_call(api, head.method, path, content_type, exchange.body)
        if not call.model:
            call = self._with_only_model(call, tenant)
        if not _may_use(tenant, call.model):
            raise _unknown_model(call.model)
        return call

    def _with_only_model(self, call: Call, tenant: Tenant) -> Call:
        """A call that names no model means the one that there is."""
        names = [r.name for r in self._parts.brain.models() if _may_use(tenant, r.name)]
        if len(names) != 1:
            raise ParameterError(Fault.MISSING, "model", "you must provide a model parameter")
        return replace(call, model=names[0])

    async def _admitted(self, job: Job) -> None:
        """Quota, queue, relay. What is charged is put right as soon as it is known."""
        parts, tenant = self._parts, job.tenant
        expected = job.prompt.total_count + job.call.output_tokens * job.prompt.prompts_count
        if parts.tenants.is_open:
            await self._queued(job, expected)
            return
        self._take_quota(tenant, expected)
        try:
            await self._queued(job, expected)
        except KvtierError:
            if job.usage is None and not job.exchange.started:  # it brought nothing
                parts.quotas.settle(tenant, -expected)
            raise
        finally:
            used = _tokens_used(job)
            if used is not None:
                parts.quotas.settle(tenant, used - expected)

    async def _queued(self, job: Job, expected: int) -> None:
        """Queue, relay."""
        parts = self._parts
        slot = await parts.queue.enter(job.tenant, expected)
        try:
            async with asyncio.timeout(self._policy.request_s_max):
                attributes = {"kvtier.model": job.call.model, "kvtier.api": job.call.api.value}
                with parts.tracer.span("router.request", attributes, job.traceparent) as span:
                    job.traceparent = span.traceparent() or job.traceparent
                    await parts.relay.run(job)
                    if job.decision is not None:
                        span.set("kvtier.worker", job.decision.worker.instance)
                    if job.half is not None:
                        span.set("kvtier.prefill_worker", job.half.decision.worker.instance)
                    span.set("kvtier.attempts", job.attempts)
        except TimeoutError:
            raise DeadlineError("the request took too long") from None
        finally:
            slot.tokens_used = _tokens_used(job)
            parts.queue.leave(slot)

    def _take_quota(self, tenant: Tenant, tokens_count: int) -> None:
        try:
            self._parts.quotas.take(tenant, tokens_count)
        except OverloadedError:
            self._parts.front_metrics.quota_refused.at(tenant.tenant_id).inc()
            raise

    # What is told

    def _request_id(self, head: Head) -> str:
        given = head.headers.get("x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            return given
        return f"{self._life}-{next(self._numbers):x}"

    def _log(self, job: Job) -> None:
        """One line a request, without anything of its text."""
        parts, decision = self._parts, job.decision
        now = parts.clock()
        total_s = now - job.arrived_at
        parts.history.add(job, now, total_s)
        parts.front_metrics.seconds.observe(total_s)
        if job.ttft_s is not None:
            parts.front_metrics.first_byte.observe(job.ttft_s)
        matched = 0
        if decision is not None:
            matched = sum(decision.matched_tokens.values())
            parts.front_metrics.decision.observe(decision.decided_in_s)
            model = decision.target.model
            parts.front_metrics.routed(model, decision.prompt_tokens, matched)
        ttft = "null" if job.ttft_s is None else f"{job.ttft_s * 1e3:.2f}"
        worker = "" if decision is None else decision.worker.instance
        parts.access.add(
            f"id={job.request_id} api={job.call.api.value} model={quoted(job.call.model)}"
            f" tenant={quoted(job.tenant.tenant_id)} status={job.status}"
            f" worker={quoted(worker)} prompt_count={job.prompt.count} matched_count={matched}"
            f" attempts={job.attempts} resumed={job.resumed} ttft_ms={ttft}"
            f" total_ms={total_s * 1e3:.2f} error={quoted(job.error)}"
        )


def _cut(job: Job | None, exchange: Exchange, why: str) -> int:
    """The status that a client has seen of an answer that nobody will end; 0: none."""
    if job is None:
        return 0
    if job.is_whole:
        return job.status
    job.error = job.error or why
    if not job.status and exchange.started:
        job.status = 200
    return job.status


def _tokens_used(job: Job) -> int | None:
    """What a request has cost as far as it is known: nothing where a worker refused it."""
    if job.usage is not None:
        return job.usage.prompt_tokens + job.usage.completion_tokens
    return 0 if job.status >= 400 else None


def _may_use(tenant: Tenant, model: str) -> bool:
    return tenant.models is None or model in tenant.models


def _unknown_model(name: str) -> KvtierError:
    return answers.translated(NotFoundError(name), name)


def _traceparent(head: Head) -> str | None:
    given = head.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else None

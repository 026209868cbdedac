"""The operator's pages on a loopback listener: the fleet, draining, and why a request goes where.

What must not live here: anything that clients may see.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from urllib.parse import unquote

from kvtier.core.workers import WorkerName
from kvtier.errors import CallerError, ForbiddenError, KvtierError
from kvtier.openai.strict_json import parse_object
from kvtier.telemetry.metrics import CONTENT_TYPE, Metrics
from kvtier.types import InstanceId
from kvtier_router.front import answers
from kvtier_router.front.calls import PATHS, Api, read_call
from kvtier_router.front.prompts import PromptReader
from kvtier_router.front.splitting import Splits
from kvtier_router.routing.values import RouteAsk, RoutingBrain, WorkerReport
from kvtier_router.web.server import Exchange
from kvtier_router.web.values import Head, Refused, Reply

_PLAIN = ("content-type", CONTENT_TYPE)


@dataclass(frozen=True, slots=True)
class AdminParts:
    """What the pages show."""

    brain: RoutingBrain
    prompts: PromptReader
    metrics: Metrics
    unready: Callable[[], str]
    on_drain: Callable[[WorkerName, bool], None]
    """Told of every drain (True) and undrain, for the other processes."""
    dashboard: Callable[[str, str], Awaitable[Reply]]
    """Answers a GET below `/ui/` by its path and query."""
    splits: Splits | None = None
    """None: no request is split."""


class Admin:
    """The application of the admin listener."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts

    def admit(self, head: Head) -> Reply | None:
        """A page from elsewhere must not make a browser post here, nor read under a name of its
        own that it lets point to this machine."""
        if not _is_local(head):
            return answers.error_answer(ForbiddenError("not by this name"))
        if head.method != "GET" and "origin" in head.headers:
            return answers.error_answer(CallerError("not from a browser"))
        return None

    def refusal(self, status: int, reason: Refused) -> Reply:
        return answers.refusal(status, reason)

    async def handle(self, exchange: Exchange) -> None:
        try:
            reply = await self._answer(exchange)
        except KvtierError as error:
            reply = answers.error_answer(error)
        exchange.reply(reply)

    async def _answer(self, exchange: Exchange) -> Reply:
        head = exchange.head
        parts = [unquote(part) for part in head.path.split("/")[1:]]
        match head.method, parts:
            case "GET", ["health"]:
                return answers.json_reply(200, {"status": "ok"})
            case "GET", ["ready"]:
                reason = self._parts.unready()
                return answers.json_reply(503 if reason else 200, {"reason": reason})
            case "GET", ["metrics"]:
                return Reply(200, self._parts.metrics.render(), (_PLAIN,))
            case "GET", ["ui", *rest] if len(rest) < 2:
                return await self._parts.dashboard("".join(rest), head.query)
            case "GET", ["fleet"]:
                return answers.json_reply(200, self._fleet())
            case "POST", ["workers", instance, rank, "drain" | "undrain" as verb] if (
                rank.isdigit() and len(rank) < 7
            ):
                return self._drain(WorkerName(InstanceId(instance), int(rank)), verb == "drain")
            case "POST", ["workers", instance, "drain" | "undrain" as verb]:
                return self._drain(WorkerName(InstanceId(instance)), verb == "drain")
            case "POST", ["route"]:
                return await self._route(exchange.body)
        return answers.not_found(head.path)

    def _fleet(self) -> dict[str, object]:
        brain = self._parts.brain
        models = [asdict(report) for report in brain.models()]
        return {"models": models, "workers": [_worker(report) for report in brain.workers()]}

    def _drain(self, worker: WorkerName, drains: bool) -> Reply:
        if drains:
            self._parts.brain.drain(worker)
        else:
            self._parts.brain.undrain(worker)
        self._parts.on_drain(worker, drains)
        return answers.json_reply(200, {"worker": worker.instance, "draining": drains})

    async def _route(self, body: bytes) -> Reply:
        """The decision for a request, with its reasons; nothing is sent and nothing reserved.

        The body is that of the request; `kvtier` in it may hold `path`, `salt` and `session`.
        """
        options = parse_object(body).get("kvtier")
        told = options if isinstance(options, dict) else {}
        path = told.get("path", "/v1/chat/completions")
        call = read_call(PATHS.get(str(path), Api.OTHER), "POST", str(path), "", body)
        salt, session = told.get("salt"), told.get("session")
        prompt = await self._parts.prompts.read(call, "")
        ask = RouteAsk(
            served_name=call.model,
            tokens=prompt.tokens,
            scope_salt=salt if isinstance(salt, str) else None,
            session_id=session if isinstance(session, str) else None,
            output_tokens=call.output_tokens,
            kind=prompt.kind,
        )
        shown = self._parts.brain.explain(ask).as_json()
        splits = self._parts.splits
        plan = None if splits is None else splits.plan(call, prompt, ask)
        if plan is not None:
            shown["split"] = plan.as_json()
        return answers.json_reply(200, shown)


def _is_local(head: Head) -> bool:
    """Whether a request names this machine as such: every browser says which name it followed, and
    a foreign one that resolves to loopback is an attack (DNS rebinding). A Unix socket has none."""
    host = head.headers.get("host")
    if host is None or not head.client:
        return True
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() in ("localhost", "[::1]"):
        return True
    parts = name.split(".")
    return (
        len(parts) == 4
        and parts[0] == "127"
        and all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts)
    )


def _worker(report: WorkerReport) -> dict[str, object]:
    shown = asdict(report)
    shown["worker"] = report.worker.instance
    shown["dp_rank"] = report.worker.dp_rank
    return shown

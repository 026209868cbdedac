"""The endpoint as an aiohttp application: routes, admission of bodies, errors.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /v1/models/{name}
    GET /health (computes a token)                 GET /live, /metrics

What must not live here: what requests mean (preparing.py), how they are answered (answers.py).
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, cast

from aiohttp import hdrs, web

from kvtier.errors import KvtierError, LimitError, OverloadedError
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.metrics import CONTENT_TYPE, Metrics
from kvtier_services.worker.http.access import Admit, admit_anyone, bearer
from kvtier_services.worker.http.answers import Answerer, Answering, BrokenStreamError, choices_text
from kvtier_services.worker.http.connections import Gate
from kvtier_services.worker.http.errors import (
    BodyTimeoutError,
    MediaTypeError,
    MethodError,
    PathError,
    error_response,
)
from kvtier_services.worker.http.health import HealthGate
from kvtier_services.worker.http.metrics import TABLE, EndpointMetrics
from kvtier_services.worker.http.prefilling import (
    PREFILL_HEADER,
    PREFILLED_HEADER,
    Prefiller,
    prefilled_tokens,
)
from kvtier_services.worker.http.preparing import (
    Limits,
    Prepare,
    Prepared,
    prepare_chat,
    prepare_completion,
    require_model,
)
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.http.shapes import Envelope, encoded, fingerprint_of, model_object
from kvtier_services.worker.http.texts import Texts
from kvtier_services.worker.requests import Engine

EXPLAIN_HEADER: Final = "x-kvtier-explain"
REQUEST_ID_HEADER: Final = "x-request-id"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_INLINE_BYTES_MAX: Final = 8 << 10
"""Shorter bodies are prepared on the event loop: a thread would take longer than they do."""
DRAIN_PATH: Final = "/drain"
_OPEN_PATHS: Final = frozenset({"/live", "/health"})
_log = EventLog(__name__)
_GATE: Final = web.AppKey("gate", Gate)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the worker shares with the endpoint; all of it optional."""

    metrics: Metrics | None = None
    """A table that contains `metrics.TABLE`; not set: one of the endpoint alone."""
    admit: Admit = admit_anyone
    """Who may ask for answers."""
    control: Admit = admit_anyone
    """Who may have the worker leave its fleet."""
    leave: Callable[[], Awaitable[None]] | None = None
    """Has the worker leave its fleet, and returns when it may be ended; not set: it cannot."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970: answers say when they were created."""


def create_app(
    engine: Engine,
    texts: Texts,
    settings: EndpointSettings | None = None,
    surroundings: Surroundings | None = None,
) -> web.Application:
    """Return the endpoint of `engine` as an application; serve it by `create_runner`.

    Called on the event loop that the engine's generations belong to.
    """
    endpoint = _Endpoint(
        engine, texts, settings or EndpointSettings(), surroundings or Surroundings()
    )
    app = web.Application(
        middlewares=[endpoint.edge], client_max_size=endpoint.settings.body_bytes_max
    )
    app[_GATE] = endpoint.gate
    app.router.add_post("/v1/completions", endpoint.completions)
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    app.router.add_get("/v1/models", endpoint.models)
    app.router.add_get("/v1/models/{name:.+}", endpoint.model)
    app.router.add_get("/health", endpoint.health)
    app.router.add_get("/live", endpoint.live)
    if endpoint.can_leave:
        app.router.add_post(DRAIN_PATH, endpoint.drain)
    app.router.add_get("/metrics", endpoint.metrics_page)
    return app


class EndpointRunner(web.AppRunner):
    """Runner whose connections pass the application's gate, wherever it is served."""

    @property
    def server(self) -> web.Server | None:
        """What sites make protocols with."""
        if self._server is None:
            return None
        return cast(web.Server, self.app[_GATE].factory(self._server))

    @property
    def head_s(self) -> float:
        """How long a connection may take to say what it wants."""
        return self.app[_GATE].head_s


def create_runner(app: web.Application, drain_s: float = 30.0) -> EndpointRunner:
    """Return the runner of an application of `create_app`.

    A handler is cancelled when its client goes, which is what gives up its generation at once;
    bodies are never unpacked, so that none grows while it is read. `cleanup` lets answers that are
    under way go on for `drain_s` seconds, then cancels them.
    """
    return EndpointRunner(
        app,
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        keepalive_timeout=75.0,
        lingering_time=2.0,
        shutdown_timeout=drain_s,
    )


class _Endpoint:
    def __init__(
        self, engine: Engine, texts: Texts, settings: EndpointSettings, around: Surroundings
    ) -> None:
        self.settings = settings
        self._engine = engine
        self._texts = texts
        self._admit = around.admit
        self._control = around.control
        self._leave = around.leave
        self._wall = around.wall
        page = around.metrics if around.metrics is not None else Metrics(TABLE)
        self._metrics = EndpointMetrics(page)
        self.gate = Gate(settings, self._metrics)
        self._answerer = Answerer(engine, settings, self._metrics)
        self._prefiller = Prefiller(engine, settings, self._metrics)
        self._gate = HealthGate(engine, settings)
        self._limits = Limits(engine.card, engine.context_tokens, engine.vocab_size)
        self._fingerprint = fingerprint_of(engine.card)
        self._created = int(around.wall())
        self._requests_count = 0
        self._bodies_bytes = 0

    @property
    def can_leave(self) -> bool:
        return self._leave is not None

    # The edge

    @web.middleware
    async def edge(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit, count, and make an OpenAI error of everything that is raised."""
        request_id = _request_id(request, secrets.token_hex(12))
        outcome = "disconnected"
        self.gate.began(request)
        try:
            with self._running(request):
                response = await handler(request)
            outcome = "ok"
        except BrokenStreamError as broken:
            response, outcome = broken.response, "failed"
        except KvtierError as error:
            response, outcome = error_response(error), _outcome(error)
        except web.HTTPException as error:
            refusal = _refusal(request, error)
            response, outcome = error_response(refusal), _outcome(refusal)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001  (outermost edge: a bug answers 500)
            _log.exception("a request failed", error, request_id=request_id)
            response, outcome = error_response(KvtierError()), "failed"
        finally:
            self.gate.ended(request)
            self._metrics.requests.at(_call(request), outcome).inc()
        if not response.prepared:
            response.headers.setdefault(REQUEST_ID_HEADER, request_id)
        return response

    @contextlib.contextmanager
    def _running(self, request: web.Request) -> Iterator[None]:
        if request.path not in _OPEN_PATHS:
            admit = self._control if request.path == DRAIN_PATH else self._admit
            admit(bearer(request.headers.get(hdrs.AUTHORIZATION)))
            if self._requests_count >= self.settings.requests_max:
                raise OverloadedError(f"{self._requests_count} requests are being answered")
        self._requests_count += 1
        self._metrics.running.inc()
        try:
            yield
        finally:
            self._requests_count -= 1
            self._metrics.running.dec()

    # Generation

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, prepare_completion)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, prepare_chat)

    async def _generate(self, request: web.Request, prepare: Prepare) -> web.StreamResponse:
        answer_id = secrets.token_hex(12)
        prepared = await self._prepared(request, prepare, answer_id)
        envelope = Envelope(
            id=prepared.shape.id_prefix + answer_id,
            created=int(self._wall()),
            model=prepared.terms.model,
            fingerprint=self._fingerprint,
        )
        if request.headers.get(PREFILL_HEADER) == "1":
            return await self._prefiller.answer(prepared, envelope)
        explained = request.headers.get(EXPLAIN_HEADER) == "1"
        elsewhere = prefilled_tokens(request.headers.get(PREFILLED_HEADER))
        request_id = _request_id(request, answer_id)
        headers = {REQUEST_ID_HEADER: request_id}
        job = Answering(prepared, envelope, explained, headers, elsewhere)
        response = await self._answerer.answer(request, job)
        _log.debug(
            "answered",
            request_id=request_id,
            answer_id=envelope.id,
            user=prepared.terms.user,
            finish=choices_text(prepared.choices),
        )
        return response

    async def _prepared(self, request: web.Request, prepare: Prepare, answer_id: str) -> Prepared:
        with self._body_room(request):
            body = await self._body(request)
            if len(body) <= _INLINE_BYTES_MAX:
                return prepare(body, answer_id, self._texts, self._limits)
            return await asyncio.to_thread(prepare, body, answer_id, self._texts, self._limits)

    @contextlib.contextmanager
    def _body_room(self, request: web.Request) -> Iterator[None]:
        """Bound the bytes of all bodies together, by what each says or else may have."""
        if request.content_type != "application/json":
            raise MediaTypeError("Content-Type must be application/json")
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
            raise MediaTypeError("compressed bodies are not taken")
        length = request.content_length
        bytes_max = self.settings.body_bytes_max
        if length is not None and length > bytes_max:
            raise LimitError(f"the body of {length} bytes exceeds {bytes_max}")
        wanted = bytes_max if length is None else length
        if self._bodies_bytes + wanted > self.settings.bodies_bytes_max:
            raise OverloadedError("too many bytes of requests are being read")
        self._bodies_bytes += wanted
        try:
            yield
        finally:
            self._bodies_bytes -= wanted

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.settings.body_ms_max / 1e3):
                return await request.read()
        except TimeoutError:
            raise BodyTimeoutError("the body did not arrive in time") from None

    # The rest

    async def models(self, request: web.Request) -> web.Response:
        names = self._engine.card.served_names
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        require_model(self._engine.card, name)
        return _json(self._model(name))

    def _model(self, name: str) -> object:
        engine = self._engine
        return model_object(engine.card, name, engine.context_tokens, self._created)

    async def drain(self, request: web.Request) -> web.Response:
        """Answers when the worker has handed over what it has; it serves nobody any more then."""
        assert self._leave is not None
        await self._leave()
        return _json({"status": "drained"})

    async def health(self, request: web.Request) -> web.Response:
        try:
            await self._gate.check()
        except KvtierError as error:
            _log.warning("the engine is not healthy", error=type(error).__name__)
            return _json({"status": "failing", "reason": type(error).__name__}, status=503)
        return _json({"status": "ok"})

    async def live(self, request: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def metrics_page(self, request: web.Request) -> web.Response:
        page = self._metrics.page.render()
        return web.Response(body=page, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})


def _request_id(request: web.Request, otherwise: str) -> str:
    """The id that the caller gave, if it is one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else otherwise


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=encoded(value), status=status, content_type="application/json")


def _call(request: web.Request) -> str:
    if request.path.startswith("/v1/models"):
        return "models"
    named = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
    return named.get(request.path, "other")


def _outcome(error: KvtierError) -> str:
    if isinstance(error, OverloadedError):
        return "overloaded"
    return "refused" if error.http_status < 500 else "failed"


def _refusal(request: web.Request, error: web.HTTPException) -> KvtierError:
    """What aiohttp itself refuses, as an error of ours."""
    match error:
        case web.HTTPNotFound():
            return PathError(f"there is no {request.path[:128]}")
        case web.HTTPMethodNotAllowed():
            return MethodError(f"{request.path} takes {', '.join(sorted(error.allowed_methods))}")
        case web.HTTPRequestEntityTooLarge():
            return LimitError("the body is too large")
    return KvtierError()

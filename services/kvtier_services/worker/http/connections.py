"""How many connections the endpoint has, and how long one may take to say what it wants.

aiohttp bounds neither: a silent connection lives as long as a kept-alive one. A `Gate` makes the
protocol of each connection, counts them, and closes those whose request's head does not come. What
must not live here: requests, bodies (app.py), sockets.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from kvtier.errors import KvtierError, OverloadedError
from kvtier.openai.errors import error_reply
from kvtier_services.worker.http.errors import RETRY_AFTER_S, HeadTimeoutError
from kvtier_services.worker.http.metrics import EndpointMetrics
from kvtier_services.worker.http.settings import EndpointSettings


class Gate:
    """Connections of one endpoint. Belongs to its event loop."""

    def __init__(self, settings: EndpointSettings, metrics: EndpointMetrics) -> None:
        self._connections_max = settings.connections_max
        self.head_s = settings.head_ms_max / 1e3
        self._metrics = metrics
        self._guarded: dict[asyncio.BaseProtocol, _Guarded] = {}

    def factory(self, make: Callable[[], web.RequestHandler]) -> Callable[[], asyncio.Protocol]:
        """Return what makes the protocol of a new connection: aiohttp's, watched."""
        return lambda: _Guarded(self, make())

    def began(self, request: web.BaseRequest) -> None:
        """A request's head has come: its connection is no longer waited for."""
        guarded = self._guarded.get(request.protocol)
        if guarded is not None:
            guarded.began()

    def ended(self, request: web.BaseRequest) -> None:
        """A request was answered: the next head is waited for from its first byte on."""
        guarded = self._guarded.get(request.protocol)
        if guarded is not None:
            guarded.ended()

    def admit(self, guarded: "_Guarded", inner: asyncio.BaseProtocol) -> bool:
        """Count a connection that was made; False where there are too many."""
        if len(self._guarded) >= self._connections_max:
            self._metrics.connections_refused.at("too_many").inc()
            return False
        self._guarded[inner] = guarded
        self._metrics.connections.inc()
        return True

    def late(self) -> None:
        """A connection is closed for its silence."""
        self._metrics.connections_refused.at("head_late").inc()

    def forget(self, inner: asyncio.BaseProtocol) -> None:
        """A connection that was admitted is lost."""
        if self._guarded.pop(inner, None) is not None:
            self._metrics.connections.dec()


class _Guarded(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and watches the clock."""

    def __init__(self, gate: Gate, inner: web.RequestHandler) -> None:
        self._gate = gate
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._requests = 0
        """Requests whose head came and that are not answered yet."""
        self._is_admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._is_admitted = self._gate.admit(self, self._inner)
        if not self._is_admitted:
            self._refuse(OverloadedError("too many connections"))
            return
        self._inner.connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        if not self._requests and self._timer is None:
            self._arm()
        self._inner.data_received(data)

    def eof_received(self) -> None:
        if self._is_admitted:
            self._inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._disarm()
        if self._is_admitted:
            self._gate.forget(self._inner)
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def began(self) -> None:
        self._requests += 1
        self._disarm()

    def ended(self) -> None:
        self._requests -= 1

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._gate.head_s, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self._gate.late()
        self._refuse(HeadTimeoutError("the head of a request did not arrive in time"))

    def _refuse(self, error: KvtierError) -> None:
        assert self._transport is not None
        reply = error_reply(error)
        head = (
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\n"
            "Content-Type: application/json\r\nConnection: close\r\n"
            f"Retry-After: {RETRY_AFTER_S}\r\nContent-Length: {len(reply.body)}\r\n\r\n"
        )
        self._transport.write(head.encode() + reply.body)
        self._transport.close()

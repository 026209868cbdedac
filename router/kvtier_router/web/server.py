"""A HTTP/1.1 server whose every wait and buffer has a ceiling.

One `ServerConnection` a client; a request is handed to the application when its body is complete,
in a task of its own, which is cancelled the moment the client leaves. Deadlines are looked at by
`HttpServer.sweep`, not by a timer a request. What must not live here: what paths mean.
"""

import asyncio
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol, cast

import httptools

from kvtier.errors import CallerError
from kvtier.telemetry.logs import EventLog
from kvtier_router.web.closing import SETTLE_S, begin_no_more
from kvtier_router.web.values import (
    JSON,
    Head,
    Headers,
    HttpLimits,
    Refused,
    Reply,
    response_head,
)

LOG = EventLog("kvtier_router.web")

_BACKLOG_CONNECTIONS: Final = 1024
_DRAIN_LOOK_S: Final = 0.02
_DRAIN_CUT_S: Final = 2.0
_BACKLOG_BYTES_MAX: Final = 64 << 10
_PIPELINED_MAX: Final = 16
_WRITE_HIGH: Final = 256 << 10
_SINGLE: Final = frozenset({"authorization", "content-type", "host", "content-length"})
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Application(Protocol):
    """What the server serves."""

    def admit(self, head: Head) -> Reply | None:
        """Refuse a request by its header alone, before its body is read; None lets it in."""
        ...

    async def handle(self, exchange: "Exchange") -> None:
        """Answer one request; cancelled when the client leaves."""
        ...

    def refusal(self, status: int, reason: Refused) -> Reply:
        """The answer to what the server refuses by itself."""
        ...


class Exchange:
    """One request and its answer: exactly one `reply`, or `start`, `send`s and `finish`."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head_bytes",
        "_keeps_alive",
        "body",
        "finished",
        "head",
        "started",
    )

    def __init__(self, connection: "ServerConnection", request: "_Request") -> None:
        self._connection = connection
        head, body = request.head, request.body
        self._keeps_alive = request.keeps_alive
        self._chunked = request.speaks_chunks
        self._head_bytes = b""
        self.head = head
        self.body = body
        self.started = False
        """Whether the status has been decided: nothing can be retried any more."""
        self.finished = False

    @property
    def connection(self) -> "ServerConnection":
        return self._connection

    def reply(self, reply: Reply) -> None:
        """Send a whole answer. Does nothing where the client is gone."""
        self.started = True
        close = reply.close or self._must_close
        headers = [*reply.headers, ("content-length", str(len(reply.body)))]
        if close:
            headers.append(("connection", "close"))
        body = b"" if self.head.method == "HEAD" else reply.body
        self._connection.write(response_head(reply.status, headers) + body)
        self._end(close)

    def start(self, status: int, headers: Headers) -> None:
        """Decide status and header of a streamed answer; they leave with the first bytes."""
        self.started = True
        framing = ("transfer-encoding", "chunked") if self._chunked else ("connection", "close")
        extra = [framing]
        if self._chunked and self._must_close:
            extra.append(("connection", "close"))
        self._head_bytes = response_head(status, [*headers, *extra])

    def send(self, data: bytes) -> None:
        """Send bytes of a started answer; never blocks, see `ServerConnection.on_pressure`."""
        if not data:
            return
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head_bytes, len(data), data)
        elif self._head_bytes:
            data = self._head_bytes + data
        self._head_bytes = b""
        self._connection.write(data)

    def finish(self) -> None:
        """End a started answer."""
        if self._chunked:
            self._connection.write(self._head_bytes + _LAST_CHUNK)
        elif self._head_bytes:
            self._connection.write(self._head_bytes)
        self._head_bytes = b""
        self._end(not self._chunked or self._must_close)

    def abort(self) -> None:
        """Cut the connection: the client must see that the answer is not whole."""
        self.finished = True
        self._connection.abort()

    @property
    def _must_close(self) -> bool:
        """Whether the connection ends with this answer."""
        return not self._keeps_alive or self._connection.is_draining

    def _end(self, close: bool) -> None:
        self.finished = True
        self._connection.exchange_ended(self, close)


class _Request(NamedTuple):
    """A request that is complete."""

    head: Head
    body: bytes
    keeps_alive: bool
    speaks_chunks: bool


class _Phase(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    BUSY = auto()
    LINGER = auto()


class ServerConnection(asyncio.Protocol):
    """One client's connection. Callbacks of the transport and of the parser."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._client = ""
        self._phase = _Phase.HEAD
        self._since = server.clock()
        self._head_bytes = 0
        self._parsed_bytes = 0
        self._target = b""
        self._headers: dict[str, str] = {}
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._held_bytes = 0
        """Of bodies, those of answers under way too: this connection's part of the server's."""
        self._ready: deque[_Request] = deque()
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._last_word: Reply | None = None
        """The answer to what could not be read, after those to what was read before it."""
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._stalled_since: float | None = None
        self.on_pressure: Callable[[bool], None] | None = None
        """Called with True when the client reads too slowly, with False when it has caught up."""

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        refused = self._server.joined(self, self._client)
        if refused is not None:
            self._refuse(503 if refused is Refused.CONNECTIONS else 429, refused)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.LINGER:
            return
        if self._exchange is not None:
            self._keep_for_later(data)
            return
        self._feed(data)

    def eof_received(self) -> bool:
        return False  # a client that ends its side has left

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self, self._client)
        self._count_held(-self._held_bytes)
        self._transport = None
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._stalled_since = self._server.clock()
        if self.on_pressure is not None:
            self.on_pressure(True)

    def resume_writing(self) -> None:
        self._stalled_since = None
        if self.on_pressure is not None:
            self.on_pressure(False)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._phase = _Phase.HEAD
        self._since = self._server.clock()
        self._target = b""
        self._parsed_bytes = 0
        self._headers = {}
        self._head = None
        self._parts = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        if key in self._headers:
            if key in _SINGLE:
                raise CallerError(f"header {key} is given twice")
            text = f"{self._headers[key]}, {text}"
        self._headers[key] = text

    def on_headers_complete(self) -> None:
        parser = self._parser
        method = parser.get_method().decode("latin-1")
        head = self._head = Head(method, self._target, self._headers, self._client)
        self._head_bytes = 0
        self._phase = _Phase.BODY
        length = self._headers.get("content-length")
        if parser.should_upgrade():
            raise CallerError("no protocol to upgrade to")
        if length is not None and int(length) > self._limits.body_bytes_max:
            raise _RefusedError(413, Refused.BODY_BYTES)
        refusal = self._server.application.admit(head)
        if refusal is not None:
            raise _AnsweredError(refusal)
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._count_held(len(body))
        if self._server.bodies_bytes > self._limits.bodies_bytes_max:
            raise _RefusedError(503, Refused.BODIES_BYTES)
        if self._body_bytes > self._limits.body_bytes_max:
            raise _RefusedError(413, Refused.BODY_BYTES)
        self._parts.append(body)

    def on_message_complete(self) -> None:
        assert self._head is not None
        if len(self._ready) >= _PIPELINED_MAX:
            raise _RefusedError(400, Refused.PIPELINE)
        parser, parts = self._parser, self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        keeps_alive, version = parser.should_keep_alive(), parser.get_http_version()
        self._ready.append(_Request(self._head, body, keeps_alive, version == "1.1"))
        self._parts = []
        self._head = None
        self._phase = _Phase.BUSY

    def _count_held(self, count: int) -> None:
        self._held_bytes += count
        self._server.bodies_bytes += count

    def _count_head(self, count: int) -> None:
        self._parsed_bytes += count
        if self._parsed_bytes > self._limits.header_bytes_max:
            raise _RefusedError(431, Refused.HEADER_BYTES)

    # What exchanges ask for

    @property
    def is_draining(self) -> bool:
        """Whether the server wants to end its connections."""
        return self._server.draining

    @property
    def is_gone(self) -> bool:
        return self._transport is None

    @property
    def under_pressure(self) -> bool:
        """Whether the client reads too slowly just now."""
        return self._stalled_since is not None

    def write(self, data: bytes) -> None:
        """Queue bytes for the client; nothing happens where it is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close once everything is written; idempotent."""
        if self._transport is not None:
            self._transport.close()

    def exchange_ended(self, exchange: Exchange, close: bool) -> None:
        """The answer is written: the next request, or the end."""
        if exchange is not self._exchange:
            return
        self._count_held(-min(len(exchange.body), self._held_bytes))
        self._exchange = None
        self._task = None
        self.on_pressure = None
        if close:
            self.close()
            return
        self._phase = _Phase.IDLE
        self._since = self._server.clock()
        if self._ready:
            self._begin_next()
        elif self._last_word is not None:
            self._answer_and_linger(self._last_word)
        elif self._backlog:
            self._take_backlog()

    # Deadlines

    def check(self, now: float) -> None:
        """Enforce what is due at `now`."""
        limits = self._limits
        waited_ms = (now - self._since) * 1e3
        if self._stalled_since is not None:
            if (now - self._stalled_since) * 1e3 > limits.reader_stall_ms_max:
                self._server.refused[Refused.STALLED_READER] += 1
                self.abort()
            return
        match self._phase:
            case _Phase.IDLE:
                if waited_ms > limits.idle_ms_max or self._server.closes_idle:
                    self.close()
            case _Phase.HEAD:
                if waited_ms > limits.header_ms_max:
                    self._refuse(408, Refused.HEADER_TIME)
            case _Phase.BODY:
                late_ms = waited_ms - limits.body_grace_ms
                wanted = late_ms / 1e3 * limits.body_bytes_per_s_min
                if waited_ms > limits.body_ms_max:
                    self._refuse(408, Refused.BODY_TIME)
                elif late_ms > 0 and self._body_bytes < wanted:
                    self._refuse(408, Refused.UPLOAD_RATE)
            case _Phase.LINGER:
                if waited_ms > limits.linger_ms:
                    self.abort()
            case _Phase.BUSY:
                pass

    # Inside

    def _feed(self, data: bytes) -> None:
        if self._phase is _Phase.IDLE:
            self._phase = _Phase.HEAD
            self._since = self._server.clock()
        if self._head is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(None)
            return
        if self._head is None and self._head_bytes > self._limits.header_bytes_max:
            if self._ready:
                self._head_bytes = 0
            else:
                self._refuse(431, Refused.HEADER_BYTES)
                return
        if self._ready:
            self._head_bytes = 0
            self._begin_next()

    def _fail(self, cause: BaseException | None) -> None:
        """End what cannot be parsed or is refused while it is parsed."""
        match cause:
            case _AnsweredError():
                self._answer_and_linger(cause.reply)
            case _RefusedError():
                self._refuse(cause.status, cause.reason)
            case None | CallerError() | ValueError():
                self._refuse(400, Refused.MALFORMED)
            case _:
                LOG.exception("parser callback failed", cause)
                self.abort()

    def _refuse(self, status: int, reason: Refused) -> None:
        self._server.refused[reason] += 1
        self._answer_and_linger(self._server.application.refusal(status, reason))

    def _answer_and_linger(self, reply: Reply) -> None:
        """Answer, then read on for a moment: an abort would take the answer away. What came before
        on this connection is answered before."""
        if self._ready:
            self._last_word = reply
            self._begin_next()
            return
        length = ("content-length", str(len(reply.body)))
        headers = [*reply.headers, length, ("connection", "close")]
        self.write(response_head(reply.status, headers) + reply.body)
        self._phase = _Phase.LINGER
        self._since = self._server.clock()
        self._parts = []
        self._count_held(-self._held_bytes)
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _begin_next(self) -> None:
        request = self._ready.popleft()
        self._phase = _Phase.BUSY
        exchange = self._exchange = Exchange(self, request)
        task = self._task = asyncio.get_running_loop().create_task(
            self._server.application.handle(exchange)
        )
        self._server.tasks.add(task)
        task.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        """A handler's end; one that failed or left its exchange open is a bug that is answered."""
        self._server.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            LOG.exception("request handler failed", error)
        exchange = self._exchange
        if task is not self._task or exchange is None or exchange.finished:
            return
        if exchange.started or self._transport is None:
            exchange.abort()
        else:
            exchange.reply(Reply(500, _INTERNAL, (JSON,), close=True))

    def _keep_for_later(self, data: bytes) -> None:
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > _BACKLOG_BYTES_MAX and self._transport is not None:
            self._transport.pause_reading()

    def _take_backlog(self) -> None:
        data, self._backlog, self._backlog_bytes = b"".join(self._backlog), [], 0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            self._feed(data)


_INTERNAL: Final = (
    b'{"error":{"message":"The server had an error.","type":"server_error",'
    b'"param":null,"code":null}}'
)


class _RefusedError(Exception):
    def __init__(self, status: int, reason: Refused) -> None:
        super().__init__(reason.value)
        self.status = status
        self.reason = reason


class _AnsweredError(Exception):
    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply.status))
        self.reply = reply


class HttpServer:
    """All connections of one application; counts what it turns away."""

    def __init__(
        self, application: Application, limits: HttpLimits, clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self.application = application
        self.limits = limits
        self.clock = clock
        self.refused: Counter[Refused] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self.closes_idle = False
        self.bodies_bytes = 0
        """Of all bodies that are held now."""
        self._connections: set[ServerConnection] = set()
        self._by_client: Counter[str] = Counter()
        self._listeners: list[asyncio.Server] = []
        self._bound: list[socket.socket] = []

    @property
    def connections_count(self) -> int:
        return len(self._connections)

    async def listen(self, bound: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on a bound socket, which the server then owns."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: ServerConnection(self),
            sock=bound,
            backlog=_BACKLOG_CONNECTIONS,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limits.header_ms_max / 1e3,
        )
        self._listeners.append(listener)
        self._bound.append(bound)

    async def drain(self, grace_s: float) -> None:
        """Accept nothing new, end idle connections, let answers end; cut what is left after
        `grace_s`. Requests that arrive meanwhile on open connections are still answered."""
        self.draining = True
        for bound in self._bound:
            begin_no_more(bound)
        await asyncio.sleep(min(SETTLE_S, grace_s))
        for listener in self._listeners:
            listener.close()
        deadline = self.clock() + grace_s
        self.closes_idle = True
        while self._connections and self.clock() < deadline:
            self.sweep()
            await asyncio.sleep(_DRAIN_LOOK_S)
        for connection in tuple(self._connections):
            connection.abort()
        if self.tasks:
            await asyncio.wait(tuple(self.tasks), timeout=_DRAIN_CUT_S)

    def joined(self, connection: ServerConnection, client: str) -> Refused | None:
        """Count a new connection; say why it is one too many."""
        self._connections.add(connection)
        self._by_client[client] += 1
        if len(self._connections) > self.limits.connections_max:
            return Refused.CONNECTIONS
        if self._by_client[client] > self.limits.client_connections_max:
            return Refused.CLIENT_CONNECTIONS
        return None

    def left(self, connection: ServerConnection, client: str) -> None:
        self._connections.discard(connection)
        self._by_client[client] -= 1
        if self._by_client[client] <= 0:
            del self._by_client[client]

    def sweep(self) -> None:
        """Enforce deadlines of all connections; O(connections), a few times a second."""
        now = self.clock()
        for connection in tuple(self._connections):
            connection.check(now)

"""A HTTP/1.1 client that relays: kept-alive connections a worker, callbacks instead of streams.

A `Sink` hears head, body pieces and the end of one answer on the event loop, as they arrive.
Nothing is retried here. What must not live here: which worker, what an answer means.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

from kvtier.errors import CallerError, ConfigError, KvtierError
from kvtier.telemetry.logs import EventLog
from kvtier_router.web.values import Headers

LOG = EventLog("kvtier_router.web")

_IDLE_PER_ORIGIN_MAX: Final = 256
_ORIGINS_MAX: Final = 4096
_HEAD_BYTES_MAX: Final = 64 << 10
_NO_BODY: Final = frozenset({204, 304})


class Loss(StrEnum):
    """How an exchange with a worker failed."""

    CONNECT = "connect"
    """No connection."""
    RESET = "reset"
    """The connection ended before the answer did."""
    REUSED = "reused"
    """A kept-alive connection turned out to be dead before a byte came: try a new one."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"


class UpstreamError(KvtierError):
    """An exchange with a worker failed before or during its answer."""

    http_status = 502

    def __init__(self, loss: Loss, detail: str = "") -> None:
        super().__init__(f"{loss.value} {detail}".strip())
        self.loss = loss


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """How long a worker may take."""

    connect_ms_max: int = 2_000
    """To a connection, with its TLS."""
    first_byte_ms_max: int = 300_000
    """From sending the request to the first byte of the answer's body."""
    silence_ms_max: int = 120_000
    """Between bytes of an answer."""
    idle_ms_max: int = 20_000
    """A kept-alive connection is not used again after this."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 1 <= getattr(self, name) <= 1 << 31:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a worker listens."""

    host: str
    port: int
    is_tls: bool
    prefix: str
    """Path before `/v1`; mostly empty."""
    authority: str
    """Value of the Host header."""


def parse_origin(address: str) -> Origin:
    """Read `host:port`, `http://host:port[/base]` or `https://…`. CallerError for others."""
    text = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise CallerError("worker address is no URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise CallerError("worker address is no http(s) URL")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise CallerError("worker address is not of printable ASCII")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, parts.netloc)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and header of a worker's answer; names are lower-case."""

    status: int
    headers: Mapping[str, str]


class Sink(Protocol):
    """Hears one answer. Called on the event loop; nothing here may block or raise."""

    def on_head(self, head: ResponseHead) -> None: ...
    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None:
        """The answer is complete."""
        ...

    def on_lost(self, error: UpstreamError) -> None:
        """The answer ends here, incomplete."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to a worker; carries one exchange at a time."""

    def __init__(self, upstream: "Upstream", origin: Origin) -> None:
        self._upstream = upstream
        self.origin = origin
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._heard = False
        self._until_eof = False
        self._informational = False
        self.uses = 0
        self.deadline = 0.0
        self.idle_since = 0.0
        self.heard_at = 0.0
        """When the worker said something last, or was asked; inf while the client is too slow."""

    def send(self, request: bytes, sink: Sink) -> None:
        """Begin an exchange. The connection must be idle and open."""
        assert self._transport is not None
        assert self._sink is None
        self._sink = sink
        self._heard = False
        self._until_eof = False
        self._head_bytes = 0
        self.uses += 1
        self.heard_at = self._upstream.clock()
        self.deadline = self.heard_at + self._upstream.limits.first_byte_ms_max / 1e3
        self._upstream.busy.add(self)
        self._transport.write(request)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def pause(self, paused: bool) -> None:
        """Take nothing more from the worker, or go on."""
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
            self.deadline = self.heard_at = inf
        else:
            self._transport.resume_reading()
            self._extend()

    def abandon(self, sink: Sink) -> None:
        """Give an exchange up: the worker sees the connection end at once. Does nothing where it
        is over, and the connection perhaps another's."""
        if self._sink is sink:
            self.abort()

    def abort(self) -> None:
        """End the connection at once, telling nobody. Idempotent."""
        self._sink = None
        self._upstream.busy.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float) -> None:
        if now > self.deadline:
            self.lose()

    def lose(self) -> None:
        """Give up an exchange that takes too long; its sink is told."""
        if self._sink is not None:
            self._lose(Loss.TIMEOUT)

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            self.abort()  # a worker that speaks unasked
            return
        if not self._heard:
            self._head_bytes += len(data)
        else:
            self._extend()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                LOG.exception("answer could not be taken", error.__context__ or error)
            self._lose(Loss.MALFORMED)
            return
        if not self._heard and self._head_bytes > _HEAD_BYTES_MAX:
            self._lose(Loss.MALFORMED)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._upstream.forget(self)
        if self._sink is None:
            return
        if self._until_eof and error is None:
            self._complete()
        elif not self._heard and self.uses > 1 and self._head_bytes == 0:
            self._lose(Loss.REUSED)
        else:
            self._lose(Loss.RESET)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._informational = status < 200
        if self._informational or self._sink is None:
            return
        self._heard = True
        headers = self._headers
        bounded = "content-length" in headers or "transfer-encoding" in headers
        self._until_eof = not bounded and status not in _NO_BODY
        self._sink.on_head(ResponseHead(status, headers))

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.on_body(body)

    def on_message_complete(self) -> None:
        if not self._informational and self._sink is not None:
            self._complete()

    # Inside

    def _extend(self) -> None:
        self.heard_at = self._upstream.clock()
        self.deadline = self.heard_at + self._upstream.limits.silence_ms_max / 1e3

    def _complete(self) -> None:
        sink, self._sink = self._sink, None
        self._upstream.busy.discard(self)
        if self._transport is not None:
            if not self._until_eof and self._parser.should_keep_alive():
                self._upstream.rest(self)
            else:
                self._transport.close()
        if sink is not None:
            sink.on_end()

    def _lose(self, loss: Loss) -> None:
        sink, self._sink = self._sink, None
        self.abort()
        if sink is not None:
            sink.on_lost(UpstreamError(loss))


class Upstream:
    """Connections to all workers: idle ones are kept, a few hundred a worker."""

    def __init__(
        self,
        limits: UpstreamLimits,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is for `https` workers; None trusts the system's authorities."""
        self.limits = limits
        self.clock = clock
        self.busy: set[UpstreamConnection] = set()
        self._idle: dict[Origin, deque[UpstreamConnection]] = {}
        self._tls = tls
        self._origins: dict[str, Origin] = {}

    def origin(self, address: str) -> Origin:
        """The parsed address; CallerError for one that is no HTTP address."""
        found = self._origins.get(address)
        if found is None:
            if len(self._origins) >= _ORIGINS_MAX:
                self._origins.clear()
            found = self._origins[address] = parse_origin(address)
        return found

    async def connection(self, origin: Origin, *, fresh: bool = False) -> UpstreamConnection:
        """An open connection without an exchange, kept-alive unless `fresh`. UpstreamError."""
        if not fresh:
            kept = self._kept(origin)
            if kept is not None:
                return kept
        loop = asyncio.get_running_loop()
        tls = self._context() if origin.is_tls else None
        try:
            async with asyncio.timeout(self.limits.connect_ms_max / 1e3):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self, origin), origin.host, origin.port, ssl=tls
                )
        except TimeoutError:
            raise UpstreamError(Loss.CONNECT, "timed out") from None
        except (OSError, ssl.SSLError) as error:
            raise UpstreamError(Loss.CONNECT, type(error).__name__) from error
        return connection

    def rest(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose exchange is complete."""
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = deque()
        if len(idle) >= _IDLE_PER_ORIGIN_MAX:
            connection.abort()
            return
        connection.idle_since = self.clock()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Its transport is gone."""
        self.busy.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]

    def lose_silent(self, origin: Origin, before: float) -> int:
        """Give up exchanges that have heard nothing since `before`, and resting connections too;
        how many exchanges there were."""
        silent = [one for one in self.busy if one.origin == origin and one.heard_at < before]
        for connection in silent:
            connection.lose()
        for connection in tuple(self._idle.get(origin, ())):
            connection.abort()
        return len(silent)

    def sweep(self) -> None:
        """End exchanges past their deadline and connections idle for too long."""
        now = self.clock()
        for connection in tuple(self.busy):
            connection.check(now)
        oldest = now - self.limits.idle_ms_max / 1e3
        for idle in tuple(self._idle.values()):
            while idle and idle[0].idle_since < oldest:
                idle.popleft().abort()

    def close(self) -> None:
        """End everything at once."""
        for connection in tuple(self.busy):
            connection.abort()
        for idle in tuple(self._idle.values()):
            for connection in tuple(idle):
                connection.abort()

    def _kept(self, origin: Origin) -> UpstreamConnection | None:
        idle = self._idle.get(origin)
        oldest = self.clock() - self.limits.idle_ms_max / 1e3
        while idle:
            connection = idle.pop()  # the one used last: the others may rest and end
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def request_bytes(method: str, path: str, headers: Headers, body: bytes) -> bytes:
    """A whole request. CallerError for a header value that would end its line."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    text = f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n"
    if text.count("\n") != len(headers) + 3 or text.count("\r") != len(headers) + 3:
        raise CallerError("a header value has a line end")
    return text.encode("latin-1", "replace") + body

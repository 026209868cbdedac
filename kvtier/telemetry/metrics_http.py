"""The page that Prometheus scrapes: GET /metrics and GET /live on a listener of its own.

Speaks the least of HTTP/1.1 that a scraper needs, one request a connection, everything bounded:
header bytes, time, connections. It has no authentication, so it stays on loopback unless the
operator says otherwise. What must not live here: readiness (the gRPC health service tells it),
admin pages, request bodies.
"""

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from kvtier.errors import ConfigError
from kvtier.limits import (
    METRICS_CONNECTIONS_COUNT_MAX,
    METRICS_HEADER_BYTES_MAX,
    METRICS_REQUEST_MS_MAX,
)
from kvtier.sections import Reach, parse_address
from kvtier.telemetry.metrics import CONTENT_TYPE, Metrics

_PLAIN: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Exposure(enum.Enum):
    """Who may reach the page."""

    LOCAL = "local"
    NETWORK = "network"
    """Anyone who can connect: the operator has said so (`metrics_insecure`)."""


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    content_type: str = _PLAIN

    def encode(self) -> bytes:
        allow = "Allow: GET\r\n" if self.status == 405 else ""
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            f"{allow}"
            "Cache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + self.body


class MetricsServer:
    """Serves the page while it is entered (`async with`)."""

    def __init__(
        self,
        metrics: Metrics,
        live: Callable[[], bool],
        bind: str = "127.0.0.1:0",
        exposure: Exposure = Exposure.LOCAL,
    ) -> None:
        """`live` tells, without blocking, whether the process is worth keeping.

        `bind` is an address of `kvtier.sections`. Raises ConfigError for one that other machines
        reach, unless the exposure allows it.
        """
        address = parse_address(bind)
        if address.reach is Reach.NETWORK and exposure is Exposure.LOCAL:
            raise ConfigError(f"the metrics page on {bind} would be open to the network")
        self.refused_count = 0
        """Connections beyond the ceiling, closed without an answer."""
        self._metrics = metrics
        self._live = live
        self._bind = bind
        self._address = address
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port it listens on; 0 for a Unix socket."""
        if self._server is None:
            raise RuntimeError("the metrics page is not served")
        name = self._server.sockets[0].getsockname()
        return name[1] if isinstance(name, tuple) else 0

    async def __aenter__(self) -> Self:
        address, limit = self._address, METRICS_HEADER_BYTES_MAX
        try:
            if self._bind.startswith("unix:"):
                self._server = await asyncio.start_unix_server(
                    self._serve, address.host, limit=limit
                )
            else:
                self._server = await asyncio.start_server(
                    self._serve, address.host, address.port, limit=limit
                )
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {self._bind}: {error.strerror}") from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= METRICS_CONNECTIONS_COUNT_MAX:
            self.refused_count += 1
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            await self._exchange(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return  # a peer that does not take its answer gets none
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Mark 0: drain returns when everything is with the kernel, so that its time is bounded too.
        writer.transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(METRICS_REQUEST_MS_MAX / 1e3):
                response = self._answer(await reader.readuntil(b"\r\n\r\n"))
        except TimeoutError:
            response = _Response(408, b"")
        except asyncio.LimitOverrunError:
            response = _Response(431, b"")
        async with asyncio.timeout(METRICS_REQUEST_MS_MAX / 1e3):
            writer.write(response.encode())
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            # Until the peer closes: an abort with bytes of it unread would take the answer away.
            while await reader.read(METRICS_HEADER_BYTES_MAX):
                pass

    def _answer(self, head: bytes) -> _Response:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or parts[2] not in (b"HTTP/1.0", b"HTTP/1.1"):
            return _Response(400, b"")
        method, target, _ = parts
        path = target.split(b"?", 1)[0]
        if path not in (b"/metrics", b"/live"):
            return _Response(404, b"")
        if method != b"GET":
            return _Response(405, b"")
        if path == b"/metrics":
            return _Response(200, self._metrics.render(), CONTENT_TYPE)
        return _Response(200, b"live\n") if self._live() else _Response(503, b"not live\n")

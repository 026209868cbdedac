"""What the HTTP server and its application exchange: heads, replies, limits.

What must not live here: sockets, and what paths mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from kvtier.errors import CallerError, ConfigError

Headers = Sequence[tuple[str, str]]
JSON: Final = ("content-type", "application/json")
TEXT: Final = ("content-type", "text/plain; charset=utf-8")


class Refused(StrEnum):
    """Why the server turned a connection or request away by itself."""

    CONNECTIONS = "connections"
    CLIENT_CONNECTIONS = "client_connections"
    MALFORMED = "malformed"
    HEADER_BYTES = "header_bytes"
    HEADER_TIME = "header_time"
    BODY_BYTES = "body_bytes"
    BODIES_BYTES = "bodies_bytes"
    BODY_TIME = "body_time"
    UPLOAD_RATE = "upload_rate"
    STALLED_READER = "stalled_reader"
    PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may cost the server, whatever it sends."""

    header_bytes_max: int = 32 << 10
    """Request line and header; more is answered 431."""
    header_ms_max: int = 10_000
    """From the first byte of a request (or the connection) to the end of its header."""
    body_bytes_max: int = 32 << 20
    """More is answered 413."""
    bodies_bytes_max: int = 1 << 30
    """Bodies of all clients together, from their first byte to the end of their answer; what is
    beyond is turned away with 503."""
    body_ms_max: int = 120_000
    """From the end of the header to the end of the body."""
    body_grace_ms: int = 5_000
    """After this a body must have come at `body_bytes_per_s_min` on average."""
    body_bytes_per_s_min: int = 1024
    """A slower upload is cut off."""
    idle_ms_max: int = 75_000
    """A connection between requests."""
    reader_stall_ms_max: int = 60_000
    """A client that takes nothing of a waiting answer for so long is cut off."""
    connections_max: int = 8192
    """Of all clients; more are turned away."""
    client_connections_max: int = 2048
    """Of one address; behind a proxy all clients have one."""
    linger_ms: int = 1_000
    """A refused body is read and thrown away for so long, so that the client sees the answer."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 1 <= getattr(self, name) <= 1 << 31:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")


class Head:
    """Request line and header of one request. Names are lower-case."""

    __slots__ = ("client", "headers", "method", "path", "query")

    def __init__(self, method: str, target: bytes, headers: dict[str, str], client: str) -> None:
        """`target` is origin-form; CallerError for another or one that is not ASCII."""
        if not target.startswith(b"/") or not target.isascii():
            raise CallerError("request target is not an absolute path of ASCII")
        path, _, query = target.decode("ascii").partition("?")
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.client = client
        """Address of the peer; empty for a Unix socket."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `close` ends the connection after it."""

    status: int
    body: bytes = b""
    headers: Headers = (JSON,)
    close: bool = False


_STATUS: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


def response_head(status: int, headers: Headers) -> bytes:
    """Status line and header. CallerError for a value that would end its line."""
    line = _STATUS.get(status) or f"HTTP/1.1 {status} Status\r\n"
    text = line + "".join([f"{name}: {value}\r\n" for name, value in headers]) + "\r\n"
    if text.count("\n") != len(headers) + 2 or text.count("\r") != len(headers) + 2:
        raise CallerError("a header value has a line end")
    return text.encode("latin-1", "replace")

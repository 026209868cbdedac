"""A lean HTTP/1.1 server end for the mock workers of the router bench.

What must not live here: what is answered.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class MockRequest:
    """One request as it came."""

    method: str
    path: str
    body: bytes

    def json(self) -> dict[str, object]:
        """The body as an object; empty for anything else."""
        try:
            parsed = json.loads(self.body)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


class Answer:
    """Where the answer to one request goes. Does nothing once the caller has left."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_gone = False
        self.is_complete = False
        self.on_gone: Callable[[], object] | None = None

    def whole(self, status: int, body: object) -> None:
        """Answer with JSON."""
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\n"
        self._write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        self.is_complete = True

    def start(self) -> None:
        """Begin a stream of events."""
        self._write(_STREAM_HEAD)

    def event(self, data: str) -> None:
        self._write(f"{len(data) + 8:x}\r\ndata: {data}\n\n\r\n".encode())

    def end(self) -> None:
        """[DONE], and the end of the answer."""
        self._write(_STREAM_END)
        self.is_complete = True

    def leave(self) -> None:
        """The caller has gone."""
        self.is_gone = True
        if self.on_gone is not None:
            self.on_gone()

    def _write(self, data: bytes) -> None:
        if not self.is_gone:
            self._transport.write(data)


class MockConnection(asyncio.Protocol):
    """One connection of a worker's port; one request at a time."""

    def __init__(self, handler: Callable[[MockRequest, Answer], None]) -> None:
        self._handler = handler
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.is_complete:
            self._answer.leave()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"\r\ncontent-length:")
        length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        line = bytes(self._buffer[:end]).split(b"\r\n", 1)[0].decode("latin-1")
        method, path = line.split(" ")[:2]
        request = MockRequest(method, path, bytes(self._buffer[end + 4 : end + 4 + length]))
        del self._buffer[: end + 4 + length]
        self._answer = Answer(self._transport)
        self._handler(request, self._answer)

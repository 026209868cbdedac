"""A lean HTTP/1.1 client for the router bench: one request at a time on a kept-alive connection.

Its cost is part of what two cores have to carry, so it understands no more than the answers of the
router and of the mock workers. What must not live here: what is asked.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from kvtier.bench.index_service_processes import BenchError

REPLY_S_MAX: Final = 300.0
_LAST_CHUNK: Final = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and when: seconds since the request was written."""

    status: int
    head: bytes
    body: bytes
    """With chunk framing, if it came in chunks."""
    first_s: float
    total_s: float

    def header(self, name: bytes) -> str:
        """A header's value; empty where it is not there."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.lower() == name:
                return value.strip().decode()
        return ""


class Connection(asyncio.Protocol):
    """One connection; opens itself again after the other side closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._listener: Callable[[bytes], None] | None = None
        self._forget()

    def _forget(self) -> None:
        self._buffer = bytearray()
        self._body_at = 0
        self._length = -1
        self._closes = False
        self._sent_at = self._first_at = 0.0

    async def request(self, raw: bytes, listener: Callable[[bytes], None] | None = None) -> Reply:
        """Send raw bytes and wait for the whole answer; `listener` hears pieces of its body.

        BenchError where the connection is refused or ends too early.
        """
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            try:
                await loop.create_connection(lambda: self, "127.0.0.1", self._port)
            except OSError as error:
                raise BenchError(f"no connection to port {self._port}: {error}") from error
        assert self._transport is not None
        self._forget()
        self._reply = loop.create_future()
        self._listener = listener
        self._sent_at = time.perf_counter()
        self._transport.write(raw)
        try:
            async with asyncio.timeout(REPLY_S_MAX):
                return await self._reply
        except BaseException:
            self.close()
            raise
        finally:
            self._reply = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reply is None or self._reply.done():
            return
        if self._closes and self._body_at:
            self._finish()
        else:
            self._reply.set_exception(BenchError(f"the answer broke off: {exc}"))

    def data_received(self, data: bytes) -> None:
        if self._reply is None or self._reply.done():
            return
        self._buffer += data
        if self._body_at == 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(end)
            data = bytes(self._buffer[self._body_at :])
        if data and not self._first_at:
            self._first_at = time.perf_counter()
        if self._listener is not None and data:
            self._listener(data)
        if self._length >= 0:
            if len(self._buffer) - self._body_at >= self._length:
                self._finish()
        elif not self._closes and self._buffer.endswith(_LAST_CHUNK):
            self._finish()

    def _read_head(self, end: int) -> None:
        head = bytes(self._buffer[:end]).lower()
        self._body_at = end + 4
        at = head.find(b"\r\ncontent-length:")
        if at >= 0:
            self._length = int(head[at + 17 :].split(b"\r\n", 1)[0])
        elif b"\r\ntransfer-encoding:" not in head:
            self._closes = True

    def _finish(self) -> None:
        now = time.perf_counter()
        head = bytes(self._buffer[: self._body_at])
        reply = Reply(
            status=int(head[9:12]),
            head=head,
            body=bytes(self._buffer[self._body_at :]),
            first_s=(self._first_at or now) - self._sent_at,
            total_s=now - self._sent_at,
        )
        assert self._reply is not None
        self._reply.set_result(reply)


def post(path: str, body: bytes, headers: str = "") -> bytes:
    """The bytes of a POST of JSON."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()

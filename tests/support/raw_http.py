"""HTTP spoken by hand, for what a client library would not send."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

_DEADLINE_S = 45.0


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One answer, its body without the framing of chunks."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, object]:
        value = self.json["error"]
        assert isinstance(value, dict)
        return value


class RawConnection:
    """One TCP connection to a server of this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def open(port: int, read_bytes_max: int = 1 << 16) -> "RawConnection":
        return RawConnection(
            *await asyncio.open_connection("127.0.0.1", port, limit=read_bytes_max)
        )

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """Read up to and with `mark`."""
        async with asyncio.timeout(_DEADLINE_S):
            return await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Read until the server closes."""
        async with asyncio.timeout(_DEADLINE_S):
            return await self._reader.read(-1)

    async def answer(self) -> RawAnswer:
        """Read one whole answer."""
        head = (await self.until(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int((await self.until(b"\r\n")).strip(), 16):
                body += (await self._reader.readexactly(size + 2))[:-2]
            await self.until(b"\r\n")
        else:
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return RawAnswer(int(first.split(" ")[1]), headers, body)

    def reset(self) -> None:
        """Close without ceremony: what is unread or unsent is lost."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()


def post(path: str, body: bytes, **headers: str) -> bytes:
    """A POST of JSON; `headers` (with _ for -) replace the usual ones, an empty one drops it."""
    lines = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


async def ask(port: int, request: bytes) -> RawAnswer:
    """Send `request` on a connection of its own; return the answer."""
    connection = await RawConnection.open(port)
    try:
        await connection.send(request)
        return await connection.answer()
    finally:
        await connection.close()

"""One connection of the data path: pipelines commands, with a bound on what is under way.

Not shared: one call at a time. A call that fails or is cancelled ends the connection, so that no
reply of one call can be taken for another's and no byte of it arrives in memory that was given up.
No retries. What must not live here: which server, how many connections, meaning of replies.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias, cast

from kvtier.tiers.redis.config import Login, Place, UnixPath
from kvtier.tiers.redis.replies import (
    ErrorReply,
    Reply,
    ReplyFormatError,
    ReplyReader,
    Sink,
)
from kvtier.tiers.redis.troubles import RedisTroubleError, Trouble, classify, code_of
from kvtier.types import BytesLike

CLIENT_NAME: Final = b"kvtier"
_WRITE_BYTES: Final = 256 << 10
"""Of a payload handed to the transport at once: what the socket does not take is copied."""
_CLOSE_S: Final = 1.0

Argument: TypeAlias = bytes | tuple[BytesLike, ...]
"""One argument of a command; of a tuple, the pieces that make it up."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `cost_bytes` is what counts against the bound: the longer of its two ways."""

    arguments: tuple[Argument, ...]
    sink: Sink | None = None
    cost_bytes: int = 256


@dataclass(frozen=True, slots=True)
class Link:
    """Where one connection goes and how it begins."""

    place: Place
    login: Login
    database: int
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    reply_timeout_s: float
    in_flight_bytes_max: int


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server said of itself when the connection began; empty where it would not."""

    run_id: str = ""
    """Another one: another process, which perhaps holds nothing of what the last one held."""
    role: str = ""


class RedisConnection(asyncio.BufferedProtocol):
    """See the module's docstring. `open` makes one."""

    facts = ServerFacts()

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reader = ReplyReader()
        self._transport: asyncio.Transport | None = None
        self._replies: list[Reply] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._lost: RedisTroubleError | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_dropped = False

    @classmethod
    async def open(cls, link: Link) -> Self:
        """Connect, log in and ask who is there. Raises RedisTroubleError."""
        loop = asyncio.get_running_loop()
        place = link.place
        try:
            async with asyncio.timeout(link.connect_timeout_s):
                if isinstance(place, UnixPath):
                    _, made = await loop.create_unix_connection(lambda: cls(link), place.path)
                else:
                    _, made = await loop.create_connection(
                        lambda: cls(link), place.host, place.port, ssl=link.tls
                    )
        except TimeoutError as error:
            raise RedisTroubleError(Trouble.UNREACHABLE, "no connection in time") from error
        except OSError as error:
            raise RedisTroubleError(Trouble.UNREACHABLE, type(error).__name__) from error
        try:
            async with asyncio.timeout(link.connect_timeout_s):
                await made._begin()
        except TimeoutError as error:
            made.drop()
            raise RedisTroubleError(Trouble.SILENT, "no answer to the login") from error
        except BaseException:
            made.drop()
            raise
        return made

    @property
    def is_usable(self) -> bool:
        """Whether another call may be made: it is open, and nothing is left of the last one."""
        return self._lost is None and not self._is_dropped and self._reader.is_idle

    async def exchange(self, commands: Sequence[Command], replies: list[Reply]) -> None:
        """Send commands and append their replies, in order, as they come.

        Raises RedisTroubleError when the connection fails; then, as after a cancellation,
        `replies` has those that came, and the connection is gone.
        """
        assert not replies
        self._replies = replies
        try:
            await self._send(commands, replies)
            while len(replies) < len(commands):
                await self._wait()
        except BaseException:
            self.drop()
            raise
        finally:
            self._replies = []

    async def ask(self, *arguments: bytes) -> Reply:
        """One command, one reply. Raises RedisTroubleError, also for an error reply."""
        replies: list[Reply] = []
        await self.exchange([Command(arguments)], replies)
        reply = replies[0]
        if isinstance(reply, ErrorReply):
            raise RedisTroubleError(classify(reply), code_of(reply))
        return reply

    def drop(self) -> None:
        """End it at once, sending nothing more. Idempotent."""
        self._is_dropped = True
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    async def closed(self) -> None:
        """Return when the socket of a dropped connection is closed."""
        await asyncio.wait([self._closed], timeout=_CLOSE_S)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        detail = "closed by the server" if exc is None else type(exc).__name__
        self._lost = self._lost or RedisTroubleError(Trouble.UNREACHABLE, detail)
        if not self._closed.done():
            self._closed.set_result(None)
        self._wake()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._is_dropped:  # whatever still comes must not reach a caller's memory
            return memoryview(bytearray(1024))
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_dropped:
            return
        try:
            self._replies.extend(self._reader.received(nbytes))
        except ReplyFormatError as error:
            self._lost = RedisTroubleError(Trouble.PROTOCOL, str(error))
            self.drop()
        self._wake()

    # parts

    async def _begin(self) -> None:
        login = self._link.login
        if login.password is not None:
            password = login.password.reveal().encode()
            user = (login.username.encode(),) if login.username else ()
            await self.ask(b"AUTH", *user, password)
        if self._link.database:
            await self.ask(b"SELECT", b"%d" % self._link.database)
        try:
            server = await self.ask(b"INFO", b"server")
            replication = await self.ask(b"INFO", b"replication")
        except RedisTroubleError as error:
            if error.trouble is not Trouble.FORBIDDEN:
                raise
            return
        self.facts = ServerFacts(_field(server, b"run_id"), _field(replication, b"role"))

    async def _send(self, commands: Sequence[Command], replies: list[Reply]) -> None:
        costs: deque[int] = deque()
        answered = in_flight_bytes = 0
        small: list[bytes | memoryview] = []
        for command in commands:
            while costs and in_flight_bytes + command.cost_bytes > self._link.in_flight_bytes_max:
                self._write(small)
                if len(replies) == answered:
                    await self._wait()
                while answered < len(replies):
                    in_flight_bytes -= costs.popleft()
                    answered += 1
            costs.append(command.cost_bytes)
            in_flight_bytes += command.cost_bytes
            self._reader.expect([command.sink])
            await self._pack(command, small)
        self._write(small)

    async def _pack(self, command: Command, small: list[bytes | memoryview]) -> None:
        """Append a command to `small`, which is written together; long pieces are written alone."""
        small.append(b"*%d\r\n" % len(command.arguments))
        for argument in command.arguments:
            pieces = argument if isinstance(argument, tuple) else (argument,)
            views = [memoryview(piece) for piece in pieces]  # type: ignore[arg-type]
            small.append(b"$%d\r\n" % sum(view.nbytes for view in views))
            for view in views:
                if view.nbytes < 4096:
                    small.append(view)
                    continue
                self._write(small)
                for begin in range(0, view.nbytes, _WRITE_BYTES):
                    await self._drained()
                    self._write([view[begin : begin + _WRITE_BYTES]])
            small.append(b"\r\n")

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        if self._lost is not None:
            raise self._lost
        assert self._transport is not None
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif buffers:
            self._transport.write(b"".join(buffers))
        buffers.clear()

    async def _drained(self) -> None:
        while self._is_paused:
            await self._wait()

    async def _wait(self) -> None:
        """Wait for anything to happen. Raises RedisTroubleError for silence and a lost link."""
        if self._lost is None and not self._is_dropped:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._link.reply_timeout_s):
                    await self._waiter
            except TimeoutError as error:
                raise RedisTroubleError(Trouble.SILENT) from error
            finally:
                self._waiter = None
        if self._lost is not None:
            raise self._lost
        if self._is_dropped:
            raise RedisTroubleError(Trouble.UNREACHABLE, "closed here")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _field(info: Reply, name: bytes) -> str:
    """One field of an INFO reply, or an empty string."""
    if isinstance(info, bytes):
        for line in info.splitlines():
            key, _, value = line.partition(b":")
            if key == name:
                return value.decode("ascii", "replace")
    return ""

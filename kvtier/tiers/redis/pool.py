"""A bounded set of data connections to whichever server is the master now.

What must not live here: retries, breakers, meaning of replies.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from kvtier.tiers.redis.config import Place, RedisConfig
from kvtier.tiers.redis.connection import Link, RedisConnection, ServerFacts
from kvtier.tiers.redis.troubles import RedisTroubleError, Trouble

Locate: TypeAlias = Callable[[], Awaitable[Place]]
"""Finds the server; raises RedisTroubleError."""


class RedisPool:
    """At most `connections_max` connections, made when needed and kept while they work."""

    def __init__(
        self,
        config: RedisConfig,
        locate: Locate,
        on_connected: Callable[[ServerFacts], Awaitable[None]],
    ) -> None:
        self._config = config
        self._locate = locate
        self._on_connected = on_connected
        self._idle: list[RedisConnection] = []
        self._busy: set[RedisConnection] = set()
        self._slots = asyncio.Semaphore(config.connections_max)
        self._context: ssl.SSLContext | None = None
        self._is_closed = False
        self.opened_count = 0
        """Connections attempted since the start."""
        server = config.server
        if server.tls is not None:
            self._context = server.tls.context()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[RedisConnection]:
        """A connection for one call, waited for; it goes back if it can be used again.

        Raises RedisTroubleError where none can be made.
        """
        async with self._slots:
            if self._is_closed:
                raise RedisTroubleError(Trouble.UNREACHABLE, "closed here")
            connection = self._take_idle() or await self._open()
            self._busy.add(connection)
            try:
                yield connection
            finally:
                if connection in self._busy and connection.is_usable and not self._is_closed:
                    self._idle.append(connection)
                else:
                    connection.drop()
                self._busy.discard(connection)

    def forget_all(self) -> None:
        """Give up every connection: the idle ones now, the others after their call."""
        for connection in self._idle:
            connection.drop()
        self._idle.clear()
        self._busy.clear()

    async def close(self) -> None:
        """End every connection; calls that use one fail. Idempotent."""
        self._is_closed = True
        ended = [*self._idle, *self._busy]
        self._idle.clear()
        for connection in ended:
            connection.drop()
        for connection in ended:
            await connection.closed()

    def _take_idle(self) -> RedisConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.drop()
        return None

    async def _open(self) -> RedisConnection:
        self.opened_count += 1
        server, config = self._config.server, self._config
        link = Link(
            await self._locate(),
            server.login,
            server.database,
            self._context,
            config.connect_timeout_s,
            config.reply_timeout_s,
            config.in_flight_bytes_max,
        )
        connection = await RedisConnection.open(link)
        try:
            await self._on_connected(connection.facts)
        except BaseException:
            connection.drop()
            raise
        return connection

"""What is asked of the server off the data path, through redis-py: rare calls, all under a timeout.

The one place where exceptions of redis-py are known. Its retries are off: with them one GET of a
stopped server was measured to take 7.6 s. What must not live here: the data path, decisions.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import redis.exceptions
from redis.asyncio import Redis, Sentinel, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import Connection, ConnectionPool

from kvtier.limits import STORE_NAMESPACES_MAX
from kvtier.tiers.redis.config import (
    HostPort,
    Login,
    Place,
    RedisConfig,
    RedisTls,
    SentinelGroup,
    SingleServer,
    UnixPath,
)
from kvtier.tiers.redis.naming import META_PREFIX
from kvtier.tiers.redis.troubles import RedisTroubleError, Trouble, classify
from kvtier.types import Fingerprint

ID_KEY: Final = META_PREFIX + b"id"
LOCK_KEY: Final = META_PREFIX + b"announcer"
ANNOUNCED_KEY: Final = META_PREFIX + b"announced"
_ID_BYTES_MAX: Final = 64
_FINGERPRINT_BYTES: Final = 32
_ANNOUNCED_BYTES_MAX: Final = _FINGERPRINT_BYTES * STORE_NAMESPACES_MAX


@dataclass(frozen=True, slots=True)
class ServerState:
    """Counters of the server: what a sudden emptiness or an eviction is noticed by."""

    run_id: str
    keys_count: int
    """Of everybody, in our database."""
    evicted_count: int
    """Since it started, of everybody."""


class RedisControl:
    """A small client for everything but payloads. Methods raise RedisTroubleError."""

    def __init__(self, config: RedisConfig) -> None:
        self._config = config
        self._client: Redis | None = None
        self._place: Place | None = None
        server = config.server
        self._sentinel: Sentinel | None = None
        if isinstance(server, SentinelGroup):
            self._sentinel = Sentinel(
                [(place.host, place.port) for place in server.sentinels],
                sentinel_kwargs={
                    **self._timeouts(),
                    **_login_arguments(server.sentinel_login),
                    **_sentinel_tls(server.tls),
                },
            )

    async def locate(self) -> Place:
        """Where the master is now: known, or asked of the Sentinels."""
        server = self._config.server
        if isinstance(server, SingleServer):
            return server.place
        assert self._sentinel is not None
        with _translated():
            async with asyncio.timeout(self._config.connect_timeout_s * len(server.sentinels)):
                host, port = await self._sentinel.discover_master(server.service)
        return HostPort(str(host), int(port))

    async def value_bytes_max(self) -> int | None:
        """The longest value that the server takes; None where it does not say."""
        try:
            async with self._call() as client:
                answer = await client.config_get("proto-max-bulk-len")
        except RedisTroubleError as error:
            if error.trouble in {Trouble.FORBIDDEN, Trouble.REFUSED}:
                return None
            raise
        for value in cast(dict[object, object], answer).values():
            with contextlib.suppress(ValueError, TypeError):
                return int(cast(bytes, value))
        return None

    async def state(self) -> ServerState:
        """Ask for the counters of `ServerState`."""
        async with self._call() as client:
            server = cast(dict[str, object], await client.info("server"))
            stats = cast(dict[str, object], await client.info("stats"))
            keys = await client.dbsize()
        evicted = stats.get("evicted_keys", 0)
        return ServerState(
            str(server.get("run_id", "")),
            int(keys),
            evicted if isinstance(evicted, int) else 0,
        )

    async def scan(self, cursor: int, match: bytes, count: int) -> tuple[int, list[bytes]]:
        """One page of SCAN: the next cursor (0: done) and keys, perhaps some twice."""
        async with self._call() as client:
            following, keys = await client.scan(cursor, match=match, count=count)
        return int(following), [bytes(key) for key in cast(Sequence[bytes], keys)]

    @contextlib.asynccontextmanager
    async def recheck(self, key: bytes) -> AsyncIterator["Recheck"]:
        """Look at a value again and delete it only if it is still that very value (WATCH)."""
        async with self._call() as client, client.pipeline(transaction=True) as pipeline:
            await pipeline.watch(key)
            try:
                value = cast("bytes | None", await pipeline.get(key))
                recheck = Recheck(value, is_value=True)
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                recheck = Recheck(None, is_value=False)
            yield recheck
            if recheck.is_condemned:
                pipeline.multi()
                pipeline.unlink(key)
                try:
                    recheck.is_deleted = bool((await pipeline.execute())[0])
                except redis.exceptions.WatchError:
                    recheck.is_deleted = False

    async def identify(self, proposal: str) -> str:
        """The id of this Redis: the one that is stored there, or `proposal`, stored now."""
        async with self._call() as client:
            await client.set(ID_KEY, proposal, nx=True)
            stored = cast("bytes | None", await client.get(ID_KEY))
        text = (stored or b"").decode("ascii", "replace")
        if not text.isalnum() or len(text) > _ID_BYTES_MAX:
            raise RedisTroubleError(Trouble.PROTOCOL, "the id of the server is none of ours")
        return text

    async def hold_lock(self, token: str, ttl_s: float) -> bool:
        """Take the announcer's lock, or prolong it if it is ours; whether it is ours now."""
        ttl_ms = max(1, int(ttl_s * 1000))
        async with self._call() as client:
            if await client.set(LOCK_KEY, token, nx=True, px=ttl_ms):
                return True
            async with client.pipeline(transaction=True) as pipeline:
                await pipeline.watch(LOCK_KEY)
                if await pipeline.get(LOCK_KEY) != token.encode():
                    return False
                pipeline.multi()
                pipeline.pexpire(LOCK_KEY, ttl_ms)
                try:
                    return bool((await pipeline.execute())[0])
                except redis.exceptions.WatchError:
                    return False

    async def release_lock(self, token: str) -> None:
        """Give the lock back if it is ours."""
        async with self.recheck(LOCK_KEY) as lock:
            if lock.value == token.encode():
                lock.condemn()

    async def announced(self) -> list[Fingerprint]:
        """The namespaces that an announcer left there; none where something else stands there."""
        async with self._call() as client:
            try:
                packed = cast("bytes | None", await client.get(ANNOUNCED_KEY)) or b""
            except redis.exceptions.ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                return []
        if len(packed) % _FINGERPRINT_BYTES or len(packed) > _ANNOUNCED_BYTES_MAX:
            return []
        starts = range(0, len(packed), _FINGERPRINT_BYTES)
        return [Fingerprint(packed[at : at + _FINGERPRINT_BYTES]) for at in starts]

    async def remember_announced(self, namespaces: Iterable[Fingerprint], ttl_s: float) -> None:
        """Leave for a successor which namespaces are announced; at most STORE_NAMESPACES_MAX."""
        packed = b"".join(sorted(namespaces)[:STORE_NAMESPACES_MAX])
        async with self._call() as client:
            await client.set(ANNOUNCED_KEY, packed, px=max(1, int(ttl_s * 1000)))

    async def forget_announced(self) -> None:
        """Leave nothing: what was announced has been taken back."""
        async with self._call() as client:
            await client.unlink(ANNOUNCED_KEY)

    async def forget(self) -> None:
        """Give up the connections: the next call asks where the master is."""
        client, self._client, self._place = self._client, None, None
        if client is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await client.aclose(close_connection_pool=True)

    async def close(self) -> None:
        """End every connection."""
        await self.forget()
        if self._sentinel is not None:
            with contextlib.suppress(redis.exceptions.RedisError, OSError):
                await self._sentinel.aclose()

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[Redis]:
        """The client, for a few commands; translates what redis-py raises."""
        place = self._place or await self.locate()
        try:
            with _translated():
                if self._client is None:
                    self._place, self._client = place, self._new_client(place)
                yield self._client
        except RedisTroubleError:
            await self.forget()  # the next call looks for the master again
            raise

    def _new_client(self, place: Place) -> Redis:
        server = self._config.server
        arguments: dict[str, object] = {
            **self._timeouts(),
            **_login_arguments(server.login),
            "db": server.database,
        }
        kind: type[Connection] | type[UnixDomainSocketConnection] = Connection
        if isinstance(place, UnixPath):
            kind = UnixDomainSocketConnection
            arguments["path"] = place.path
        else:
            arguments |= {"host": place.host, "port": place.port}
            if server.tls is not None:
                kind = SSLConnection
                arguments |= _tls_arguments(server.tls)
        pool = ConnectionPool(connection_class=kind, max_connections=4, **arguments)  # type: ignore[arg-type]
        return Redis.from_pool(pool)

    def _timeouts(self) -> dict[str, object]:
        return {
            "socket_timeout": self._config.reply_timeout_s,
            "socket_connect_timeout": self._config.connect_timeout_s,
            "retry": None,
            "protocol": 2,
            "driver_info": None,
        }


class Recheck:
    """What `RedisControl.recheck` found under a key, and what the caller decides about it."""

    def __init__(self, value: bytes | None, *, is_value: bool) -> None:
        self.value = value
        self.is_value = is_value
        """False: something there is no string."""
        self.is_condemned = False
        self.is_deleted = False
        """Known after the context has ended."""

    def condemn(self) -> None:
        """Delete it, unless it was changed meanwhile."""
        self.is_condemned = True


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise RedisTroubleError for what redis-py, sockets and timeouts raise."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        trouble = classify(str(error))
        if trouble is Trouble.REFUSED:
            trouble = Trouble.WRONG_PASSWORD
        raise RedisTroubleError(trouble) from error
    except redis.exceptions.OutOfMemoryError as error:
        raise RedisTroubleError(Trouble.OUT_OF_MEMORY) from error
    except redis.exceptions.ReadOnlyError as error:
        raise RedisTroubleError(Trouble.READ_ONLY) from error
    except redis.exceptions.NoPermissionError as error:
        raise RedisTroubleError(Trouble.FORBIDDEN) from error
    except redis.exceptions.BusyLoadingError as error:
        raise RedisTroubleError(Trouble.LOADING) from error
    except (redis.exceptions.TimeoutError, TimeoutError) as error:
        raise RedisTroubleError(Trouble.SILENT) from error
    except (redis.exceptions.ConnectionError, OSError) as error:
        raise RedisTroubleError(Trouble.UNREACHABLE, type(error).__name__) from error
    except redis.exceptions.ResponseError as error:
        raise RedisTroubleError(classify(str(error))) from error
    except redis.exceptions.RedisError as error:
        raise RedisTroubleError(Trouble.PROTOCOL, type(error).__name__) from error


def _login_arguments(login: Login) -> dict[str, object]:
    if login.password is None:
        return {}
    return {"username": login.username or None, "password": login.password.reveal()}


def _tls_arguments(tls: RedisTls) -> dict[str, object]:
    files = {"ca_certs": tls.ca_file, "certfile": tls.cert_file, "keyfile": tls.key_file}
    named = {f"ssl_{name}": str(path) for name, path in files.items() if path is not None}
    return {**named, "ssl_check_hostname": True, "ssl_cert_reqs": "required"}


def _sentinel_tls(tls: RedisTls | None) -> dict[str, object]:
    return {} if tls is None else {"ssl": True, **_tls_arguments(tls)}

"""Where the shared Redis is, how it is spoken to, and every bound on that.

What must not live here: sockets, reading of files other than certificates.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit

from kvtier.config import Secret
from kvtier.core.checks import require_integer
from kvtier.core.health import BreakerPolicy
from kvtier.errors import CallerError
from kvtier.limits import PAYLOAD_BYTES_MAX

PORT: Final = 6379
_SECONDS_MAX: Final = 3600.0
_TTL_S_MAX: Final = 10.0 * 365 * 86400
_BYTES_MAX: Final = 1 << 50
_SCHEMES: Final = {"redis", "rediss", "unix"}


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are to the server; an empty username is Redis's `default` user."""

    username: str = ""
    password: Secret | None = None


@dataclass(frozen=True, slots=True)
class RedisTls:
    """TLS to the server. Without `ca_file` the system's authorities count."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A context that verifies chain and host name. Reads the files; raises CallerError."""
        try:
            made = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                made.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise CallerError(f"the TLS files of Redis cannot be used: {error}") from error
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        return made


@dataclass(frozen=True, slots=True)
class HostPort:
    """A server on TCP."""

    host: str
    port: int

    def __post_init__(self) -> None:
        require_integer("port", self.port, 1, 65_535)


@dataclass(frozen=True, slots=True)
class UnixPath:
    """A server on a Unix socket."""

    path: str


Place: TypeAlias = HostPort | UnixPath


@dataclass(frozen=True, slots=True)
class SingleServer:
    """One server that is where it is."""

    place: Place
    login: Login = field(default_factory=Login)
    database: int = 0
    tls: RedisTls | None = None

    def __post_init__(self) -> None:
        require_integer("database", self.database, 0, 1 << 16)


@dataclass(frozen=True, slots=True)
class SentinelGroup:
    """A service whose master is found by asking Sentinels, in this order, at each connect."""

    service: str
    sentinels: tuple[HostPort, ...]
    login: Login = field(default_factory=Login)
    sentinel_login: Login = field(default_factory=Login)
    database: int = 0
    tls: RedisTls | None = None
    """For the servers and the Sentinels alike."""

    def __post_init__(self) -> None:
        require_integer("database", self.database, 0, 1 << 16)
        if not self.service or not self.sentinels:
            raise CallerError("a SentinelGroup needs a service and at least one Sentinel")


Server: TypeAlias = SingleServer | SentinelGroup


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """The shared Redis and all bounds of speaking to it. No wait is without one."""

    server: Server
    bytes_max: int = _BYTES_MAX
    """What the server is allowed to hold; told in `TierStats`, enforced by its own `maxmemory`."""
    value_bytes_max: int = 64 << 20
    """Longest value that is sent; the server's `proto-max-bulk-len` lowers it where it can be read:
    a longer one would cost the connection."""
    ttl_s: float | None = None
    """Values expire this long after they were written; reads do not prolong it. None: never."""
    connections_max: int = 4
    in_flight_bytes_max: int = 8 << 20
    """Of one call, in either direction, not yet answered; one value always may."""
    connect_timeout_s: float = 1.0
    reply_timeout_s: float = 5.0
    """Silence of the server this long ends a call, whatever its deadline."""
    names_max: int = 1 << 19
    """Blocks that are believed to be there; more are used, but neither counted nor announced."""
    breaker: BreakerPolicy = field(
        default_factory=lambda: BreakerPolicy(
            failures_max=3, open_s=0.5, open_s_max=10.0, probe_timeout_s=5.0
        )
    )

    def __post_init__(self) -> None:
        require_integer("bytes_max", self.bytes_max, 0, _BYTES_MAX)
        require_integer("value_bytes_max", self.value_bytes_max, 1, PAYLOAD_BYTES_MAX)
        require_integer("connections_max", self.connections_max, 1, 1024)
        require_integer("in_flight_bytes_max", self.in_flight_bytes_max, 1, 1 << 40)
        require_integer("names_max", self.names_max, 1, 1 << 26)
        for name in ("connect_timeout_s", "reply_timeout_s"):
            if not 0 < getattr(self, name) <= _SECONDS_MAX:
                raise CallerError(f"{name} is {getattr(self, name)}, not in (0, {_SECONDS_MAX:g}]")
        # The server counts milliseconds.
        if self.ttl_s is not None and not 0.001 <= self.ttl_s <= _TTL_S_MAX:
            raise CallerError(f"ttl_s is {self.ttl_s}, not in [0.001, {_TTL_S_MAX:g}]")


def parse_url(url: str, tls: RedisTls | None = None) -> SingleServer:
    """Return the server of `redis://[user[:password]@]host[:port][/db]`, `rediss://...` or
    `unix:///path[?db=n]`. Raises CallerError, whose message does not repeat the URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise CallerError("the Redis URL cannot be parsed") from error
    if parts.scheme not in _SCHEMES or parts.fragment:
        raise CallerError("a Redis URL begins with redis://, rediss:// or unix://")
    password = Secret(unquote(parts.password)) if parts.password else None
    login = Login(unquote(parts.username or ""), password)
    if parts.scheme == "unix":
        if not parts.path or parts.hostname:
            raise CallerError("a unix:// Redis URL is unix:///absolute/path")
        if tls is not None:
            raise CallerError("a unix:// Redis URL has no TLS")
        text = parts.query.removeprefix("db=") if parts.query else "0"
        return SingleServer(UnixPath(unquote(parts.path)), login, _database(text))
    if not parts.hostname or parts.query:
        raise CallerError("a Redis URL needs a host, and options are not in it")
    if tls is not None and parts.scheme != "rediss":
        raise CallerError("TLS files are given, but the Redis URL is not rediss://")
    if parts.scheme == "rediss" and tls is None:
        tls = RedisTls()
    place = HostPort(parts.hostname, PORT if port is None else port)
    return SingleServer(place, login, _database(parts.path.strip("/") or "0"), tls)


def _database(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise CallerError("the database of a Redis URL is not a small number")
    return int(text)

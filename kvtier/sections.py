"""Sections that several services share: where to listen, whom to dial, what to tell operators.

What must not live here: settings of one service, and the checks that need a file's content or a
network (`kvtier.security`).
"""

import dataclasses
import enum
import ipaddress
import re
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_PORT_MAX: Final = 65_535
_UNIX_BYTES_MAX: Final = 107


class Reach(enum.StrEnum):
    """Who can connect to an address."""

    LOCAL = "local"
    """Only processes of this machine."""
    NETWORK = "network"
    """Perhaps others; also whenever a name does not say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: host and port, or a Unix socket (then `host` is its path and `port` 0)."""

    host: str
    port: int
    reach: Reach


def parse_address(text: str) -> Address:
    """Read `host:port`, `[v6]:port` or `unix:/path`. Pure; resolves nothing.

    Only loopback literals, `localhost` and Unix sockets count as local: a name is never looked up,
    for what it resolves to can change. Raises ConfigError for anything else.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path or len(path.encode()) > _UNIX_BYTES_MAX:
            raise ConfigError(f"{text!r} is no absolute path of a Unix socket")
        return Address(host=path, port=0, reach=Reach.LOCAL)
    host, colon, port_text = text.rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()):
        raise ConfigError(f"{text!r} is not host:port, [address]:port or unix:/path")
    port = int(port_text[:6])
    if port > _PORT_MAX:
        raise ConfigError(f"{text!r} has a port above {_PORT_MAX}")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        if bracketed or not _HOST.fullmatch(host):
            raise ConfigError(f"{text!r} has no host name or address") from None
        reach = Reach.LOCAL if host.lower() == "localhost" else Reach.NETWORK
        return Address(host=host, port=port, reach=reach)
    if bracketed != (literal.version == 6):
        raise ConfigError(f"{text!r}: exactly an IPv6 address stands in brackets")
    mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
    local = (mapped or literal).is_loopback
    return Address(host=host, port=port, reach=Reach.LOCAL if local else Reach.NETWORK)


def _address(setting: str, text: str) -> Address:
    """`parse_address`, whose error names the setting."""
    try:
        return parse_address(text)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files of one end of a connection. All are read again when they change."""

    cert_file: Path | None = None
    """Own certificate with its chain; a listener needs one."""
    key_file: Path | None = None
    """Private key of that certificate."""
    ca_file: Path | None = None
    """Authorities: a client trusts these; a listener then demands a certificate of them."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("cert_file and key_file are given together or not at all")


@dataclasses.dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where a service accepts gRPC, and what it asks of callers."""

    bind: str = "127.0.0.1:0"
    """host:port, [address]:port or unix:/path; port 0 takes a free one."""
    tls: TlsConfig | None = None
    """Certificate of the service and the authorities of its clients."""
    tokens_file: Path | None = None
    """Hashes of the tokens that may call (`kvtier certs token`); read again when it changes."""
    insecure: bool = False
    """Accept callers from other machines without TLS or without credentials."""
    reflection: bool = False
    """Serve gRPC reflection to operators."""

    def __post_init__(self) -> None:
        _address("bind", self.bind)
        if self.tls is not None and self.tls.cert_file is None:
            raise ConfigError("tls.cert_file is required to listen with TLS")


@dataclasses.dataclass(frozen=True, slots=True)
class DialConfig:
    """Whom a client calls, and how it identifies itself."""

    targets: tuple[str, ...] = ()
    """host:port, [address]:port or unix:/path of each replica."""
    tls: TlsConfig | None = None
    """Authorities to trust and the own certificate, if the service asks for one."""
    token_file: Path | None = None
    """File with the bearer token; read again when it changes."""
    insecure: bool = False
    """Send the token to other machines without TLS."""

    def __post_init__(self) -> None:
        for target in self.targets:
            _address("targets", target)
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"targets: {', '.join(self.targets)} names one twice")


class LogLevel(enum.StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What a service tells operators."""

    log_level: LogLevel = LogLevel.INFO
    """debug, info, warning or error."""
    metrics_bind: str | None = None
    """Address of the Prometheus page; off where it is not set."""
    metrics_insecure: bool = False
    """Show the page, which has no authentication, to other machines."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector for traces; none are made where it is not set."""

    def __post_init__(self) -> None:
        if self.metrics_bind is None:
            return
        if (
            _address("metrics_bind", self.metrics_bind).reach is Reach.NETWORK
            and not self.metrics_insecure
        ):
            raise ConfigError(
                f"metrics_bind {self.metrics_bind} is reachable from other machines and the page "
                "has no authentication: bind a loopback address or set metrics_insecure"
            )

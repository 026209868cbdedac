"""`kvtier health KIND`: whether a service does its work, for container engines.

    kvtier health worker --config /etc/kvtier/worker.toml

The configuration is read as the service itself reads it (file, environment, flags), so that the
probe finds the address and the certificate by itself. What is asked costs the service some work: a
worker computes a token, a router looks for a worker that takes requests, an index and a store
answer a call on the loop that serves everybody. Exit status 0: it works, 1: it does not.

What must not live here: what being healthy means (each service knows), waiting, restarting.
"""

import http.client
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.sections import Address, TelemetryConfig, TlsConfig, parse_address

DEADLINE_S: Final = 4.0
"""Of one look: less than what container engines wait for a probe."""
UNHEALTHY: Final = 1
USAGE_STATUS: Final = 2
_OK: Final = 200
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (compared, not bound)


@dataclass(frozen=True, slots=True)
class Look:
    """One question to a service; `answer` is empty where all is well, else what is not."""

    asked: str
    answer: Callable[[], str]


def command(argv: list[str]) -> int:
    """Entry point of `kvtier health`."""
    looks = _KINDS.get(argv[0]) if argv else None
    if looks is None:
        kinds = "|".join(_KINDS)
        sys.stderr.write(f"usage: kvtier health {kinds} [FLAGS OF THAT SERVICE]\n")
        return 0 if argv[:1] in (["-h"], ["--help"]) else USAGE_STATUS
    for look in looks(argv[1:]):
        fault = look.answer()
        if fault:
            sys.stderr.write(f"kvtier health {argv[0]}: {look.asked}: {fault}\n")
            return UNHEALTHY
    sys.stdout.write("ok\n")
    return 0


# What is asked of each kind


def _index(argv: Sequence[str]) -> list[Look]:
    from kvtier_services.index.config import IndexConfig

    config = load(IndexConfig, argv).config
    looks = [_serving(config.listen.bind, config.listen.tls)]
    return looks + _alive(config.telemetry)


def _store(argv: Sequence[str]) -> list[Look]:
    """Over its Unix socket: that is where the workers of its node call, without certificates."""
    from kvtier_services.store.config import StoreConfig

    config = load(StoreConfig, argv).config
    run_dir = config.run_dir or config.data_dir / "run"
    looks = [_serving(f"unix:{run_dir.absolute() / 'store.sock'}", None)]
    return looks + _alive(config.telemetry)


def _router(argv: Sequence[str]) -> list[Look]:
    from kvtier_router.config import RouterConfig

    listen = load(RouterConfig, argv).config.listen
    return [_page(listen.bind, "/ready", None if listen.tls is None else listen.tls.files())]


def _worker(argv: Sequence[str]) -> list[Look]:
    from kvtier_services.worker.config import WorkerConfig

    listen = load(WorkerConfig, argv).config.listen
    return [_page(listen.bind, "/health", listen.tls)]


def _bridge(argv: Sequence[str]) -> list[Look]:
    from kvtier_services.bridge.config import BridgeConfig

    looks = _alive(load(BridgeConfig, argv).config.telemetry)
    if not looks:
        raise ConfigError("a bridge is seen by its page only: set telemetry.metrics_bind")
    return looks


_KINDS: Final[dict[str, Callable[[Sequence[str]], list[Look]]]] = {
    "index": _index,
    "store": _store,
    "router": _router,
    "worker": _worker,
    "bridge": _bridge,
}


# How


def _alive(telemetry: TelemetryConfig) -> list[Look]:
    """The page of metrics says whether the service's own tasks still run."""
    return [] if not telemetry.metrics_bind else [_page(telemetry.metrics_bind, "/live", None)]


def _page(bind: str, path: str, tls: TlsConfig | None) -> Look:
    place = _place(bind)
    return Look(f"{bind} {path}", lambda: _get(place, path, tls))


def _get(place: Address, path: str, tls: TlsConfig | None) -> str:
    connection = _Connection(place, None if tls is None else _context(tls))
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(256).decode("utf-8", "replace")
        return "" if answer.status == _OK else f"{answer.status} {body.strip()}"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error or type(error).__name__}"
    finally:
        connection.close()


class _Connection(http.client.HTTPConnection):
    """To an address of this machine: a port, with TLS or without, or a Unix socket."""

    def __init__(self, place: Address, context: ssl.SSLContext | None) -> None:
        super().__init__("localhost" if not place.port else place.host, timeout=DEADLINE_S)
        self._place = place
        self._context = context

    def connect(self) -> None:
        place = self._place
        if place.port:
            self.sock = socket.create_connection((place.host, place.port), timeout=self.timeout)
        else:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(place.host)
        if self._context is not None:
            self.sock = self._context.wrap_socket(self.sock)


def _context(tls: TlsConfig) -> ssl.SSLContext:
    """Trusts the service's own certificate and nothing else, and shows it where one is wanted.

    The name in it is that by which others call, which this machine need not even know.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if tls.cert_file is None or tls.key_file is None:
        raise ConfigError("a listener needs cert_file and key_file")
    try:
        context.load_verify_locations(tls.cert_file)
        context.load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{tls.cert_file}: {error}") from error
    return context


def _serving(bind: str, tls: TlsConfig | None) -> Look:
    _place(bind)
    return Look(bind, lambda: _check(bind, tls))


def _check(bind: str, tls: TlsConfig | None) -> str:
    """The standard health service of gRPC, which answers without a token."""
    from kvtier.local.probes import grpc_fault
    from kvtier.security.tls import to_itself

    place = _place(bind)
    host = f"[{place.host}]" if ":" in place.host else place.host
    target = f"{host}:{place.port}" if place.port else bind
    return grpc_fault(target, DEADLINE_S, None if tls is None else to_itself(tls))


def _place(bind: str) -> Address:
    """Where a service that binds so can be called from its own machine. ConfigError for port 0."""
    place = parse_address(bind)
    if not place.port and not bind.startswith("unix:"):
        raise ConfigError(f"{bind} is a port that the system chooses: it cannot be looked at")
    return Address(_ANY.get(place.host, place.host), place.port, place.reach)

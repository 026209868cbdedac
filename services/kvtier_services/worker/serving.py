"""Serves an aiohttp application where a section says, with TLS that follows its files.

What must not live here: routes, who may call (`http`).
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.sections import ListenConfig, TlsConfig, parse_address
from kvtier.security.endpoints import check_listen
from kvtier.security.tls import watch
from kvtier.wire.loop_thread import end
from kvtier_services.worker.http.app import EndpointRunner

_LOOK_S: Final = 10.0
_BACKLOG: Final = 1024


@contextlib.contextmanager
def bound(listen: ListenConfig) -> Iterator[socket.socket]:
    """A socket of the section's address, not listening yet: its port is known before any answer.

    ConfigError for an address that is unsafe or taken.
    """
    check_listen(listen)
    address = parse_address(listen.bind)
    is_unix = listen.bind.startswith("unix:")
    family = (
        socket.AF_UNIX if is_unix else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    )
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as made:
        try:
            if is_unix:
                Path(address.host).unlink(missing_ok=True)
                made.bind(address.host)
            else:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind((address.host, address.port))
        except OSError as error:
            raise ConfigError(f"bind {listen.bind}: {error.strerror or error}") from error
        yield made


@contextlib.asynccontextmanager
async def served(
    runner: EndpointRunner, made: socket.socket, tls: TlsConfig | None
) -> AsyncIterator[None]:
    """Serve on a bound socket while entered. ConfigError for unusable certificate files."""
    async with contextlib.AsyncExitStack() as stack:
        context = None
        if tls is not None:
            context = _context(tls)
            following = asyncio.create_task(_follow(context, tls))
            stack.push_async_callback(end, [following])
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        server = await asyncio.get_running_loop().create_server(
            runner.server,
            sock=made,
            ssl=context,
            backlog=_BACKLOG,
            ssl_handshake_timeout=None if context is None else runner.head_s,
        )
        stack.callback(server.close)
        yield


def port_of(made: socket.socket) -> int:
    """The port of a bound socket, 0 for a Unix socket."""
    name = made.getsockname()
    return int(name[1]) if isinstance(name, tuple) else 0


def _context(tls: TlsConfig) -> ssl.SSLContext:
    """A server's context; demands certificates of clients where there are authorities for them."""
    watch(tls)  # checks the files, with reasons
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, tls)
    if tls.ca_file is not None:
        context.load_verify_locations(tls.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load(context: ssl.SSLContext, tls: TlsConfig) -> None:
    if tls.cert_file is None or tls.key_file is None:
        raise ConfigError("a listener needs cert_file and key_file")
    context.load_cert_chain(tls.cert_file, tls.key_file)


async def _follow(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Show a renewed certificate to new connections."""
    source = watch(tls)
    shown = source.get()
    while True:
        await asyncio.sleep(_LOOK_S)
        newest = source.get()
        if newest is not shown:
            with contextlib.suppress(OSError, ssl.SSLError):
                _load(context, tls)
                shown = newest


def reachable(listen: ListenConfig, port: int) -> str:
    """The address to tell others, a URL where they must use TLS; empty where they cannot reach it.

    Pure, but for the host's name.
    """
    if listen.bind.startswith("unix:"):
        return ""
    host = listen.bind.rpartition(":")[0]
    if host in {"0.0.0.0", "[::]"}:  # noqa: S104 (compared, not bound)
        host = socket.gethostname()
    return f"{'' if listen.tls is None else 'https://'}{host}:{port}"

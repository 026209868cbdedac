"""Servers and channels with their credentials, from configuration; unsafe ones are refused.

What must not live here: a service's handlers, calls, and the transport's own options.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.errors import ConfigError
from kvtier.limits import GRPC_CONNECTION_GRACE_MS_MAX
from kvtier.sections import DialConfig, ListenConfig, Reach, parse_address
from kvtier.security import tls
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.files import Watched
from kvtier.security.guard import Guard
from kvtier.security.roles import Policy
from kvtier.security.tokens import TokenBook, TokenSource
from kvtier.wire import transport
from kvtier.wire.loop_thread import end

_DRAIN_S: Final = GRPC_CONNECTION_GRACE_MS_MAX / 1000


def check_listen(listen: ListenConfig) -> None:
    """Refuse an address that others can reach without TLS and credentials. Pure.

    Credentials are tokens, certificates of clients (`tls.ca_file`), or both. ConfigError says what
    is missing; `insecure = true` accepts it.
    """
    if listen.insecure or parse_address(listen.bind).reach is Reach.LOCAL:
        return
    missing = []
    if listen.tls is None:
        missing.append("tls.cert_file and tls.key_file")
    if listen.tokens_file is None and (listen.tls is None or listen.tls.ca_file is None):
        missing.append("tokens_file or tls.ca_file")
    if missing:
        raise ConfigError(
            f"bind {listen.bind} is reachable from other machines without {' and '.join(missing)}: "
            "set them, bind a loopback address, or set insecure"
        )


def check_dial(dial: DialConfig) -> None:
    """Refuse to show a token to another machine in plain text. Pure; ConfigError."""
    if dial.insecure or dial.tls is not None or dial.token_file is None:
        return
    for target in dial.targets:
        if parse_address(target).reach is Reach.NETWORK:
            raise ConfigError(
                f"target {target} is another machine and tls is not set: the token of "
                f"{dial.token_file} would travel in plain text; set tls or insecure"
            )


@dataclass(frozen=True, slots=True)
class SecureServer:
    """A bound server, not started: add handlers, then start it. The caller stops it."""

    server: grpc.aio.Server
    port: int
    """0 for a Unix socket."""
    guard: Guard
    pem: Watched[tls.Pem] | None
    """The followed certificate files, for their expiry and reload errors."""
    tokens: TokenBook | None


def new_server(listen: ListenConfig, policy: Policy, clock: Clock = SYSTEM) -> SecureServer:
    """Bind a server that asks of callers what the section says. Needs a running event loop.

    ConfigError for an unsafe address, unusable credential files, or a taken port.
    """
    check_listen(listen)
    pem = tls.watch(listen.tls, clock) if listen.tls is not None else None
    book = TokenBook(listen.tokens_file, clock) if listen.tokens_file is not None else None
    demands_certificates = listen.tls is not None and listen.tls.ca_file is not None
    guard = Guard(policy, book, certificates=demands_certificates)
    server = transport.new_server([guard])
    credentials = tls.server_credentials(pem) if pem is not None else None
    port = transport.open_port(server, listen.bind, credentials)
    is_socket = listen.bind.startswith("unix:")
    return SecureServer(server, 0 if is_socket else port, guard, pem, book)


class Dialer:
    """The channel to one target of a section, renewed when its certificate files change.

    Tokens follow their file without a new channel. One event loop uses it.
    """

    def __init__(self, dial: DialConfig, target: str, clock: Clock = SYSTEM) -> None:
        """Read the credential files; connects nothing. ConfigError for unsafe or unusable ones."""
        check_dial(dial)
        if target not in dial.targets:
            raise ConfigError(f"{target} is none of the targets {', '.join(dial.targets)}")
        self._target = target
        self._pem = tls.watch(dial.tls, clock) if dial.tls is not None else None
        self._token = TokenSource(dial.token_file, clock) if dial.token_file is not None else None
        self._made_from: tls.Pem | None = None
        self._channel: grpc.aio.Channel | None = None
        self._draining: set[asyncio.Task[None]] = set()

    def channel(self) -> grpc.aio.Channel:
        """The channel for calls that begin now: ask again for every stream and every retry.

        A replaced channel finishes its calls within GRPC_CONNECTION_GRACE_MS_MAX.
        """
        pem = self._pem.get() if self._pem is not None else None
        if self._channel is not None and pem is self._made_from:
            return self._channel
        if self._channel is not None:
            task = asyncio.get_running_loop().create_task(self._channel.close(_DRAIN_S))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
        self._made_from = pem
        self._channel = self._new_channel(pem)
        return self._channel

    def _new_channel(self, pem: tls.Pem | None) -> grpc.aio.Channel:
        credentials = tls.channel_credentials(pem) if pem is not None else None
        shown = _show_token(self._token) if self._token is not None else ()
        return transport.new_channel(self._target, credentials, shown)

    async def close(self) -> None:
        """End all calls and connections at once."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        await end(self._draining)


class _ShowToken:
    """Shows the newest token in the metadata of every call.

    gRPC's own call credentials do the same only under TLS, and through a thread of their own: 150
    microseconds a call more than this. `check_dial` keeps the token off plain networks instead.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    async def _call(
        self,
        continuation: Callable[..., Any],
        details: grpc.aio.ClientCallDetails,
        requests: Any,
    ) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._source.metadata())
        shown = grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
        return await continuation(shown, requests)


# grpc.aio files an interceptor under the first kind of call that it knows, hence one class a kind.


class _ShowUnaryUnary(_ShowToken, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await self._call(continuation, client_call_details, request)


class _ShowUnaryStream(_ShowToken, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await self._call(continuation, client_call_details, request)


class _ShowStreamUnary(_ShowToken, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return await self._call(continuation, client_call_details, request_iterator)


class _ShowStreamStream(_ShowToken, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: Any,
    ) -> Any:
        return await self._call(continuation, client_call_details, request_iterator)


def _show_token(source: TokenSource) -> tuple[grpc.aio.ClientInterceptor, ...]:
    return (
        _ShowUnaryUnary(source),
        _ShowUnaryStream(source),
        _ShowStreamUnary(source),
        _ShowStreamStream(source),
    )

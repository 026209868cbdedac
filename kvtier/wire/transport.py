"""grpc.aio servers and channels with every limit stated and every hidden behaviour off.

Both ends read one set of numbers, so a server never punishes the keepalive that its clients send.
Retries, proxies from the environment, resolver service configs, shared subchannels and port sharing
are off: one place of ours retries, and a taken port is an error.

What must not live here: credentials and tokens (`kvtier.security`), and calls.
"""

from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio

from kvtier import limits
from kvtier.errors import ConfigError

Options = tuple[tuple[str, int], ...]

_SHARED: Final[Options] = (
    ("grpc.max_receive_message_length", limits.GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.GRPC_MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", limits.GRPC_METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", limits.GRPC_METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", limits.GRPC_KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", limits.GRPC_KEEPALIVE_TIMEOUT_MS),
    # Without it the timeout above means nothing: a ping is waited for a minute.
    ("grpc.http2.ping_timeout_ms", limits.GRPC_KEEPALIVE_TIMEOUT_MS),
    # Pings on an idle connection too: a dead peer is noticed before the next call needs it.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Final[Options] = (
    *_SHARED,
    ("grpc.http2.min_ping_interval_without_data_ms", limits.GRPC_PING_INTERVAL_MS_MIN),
    ("grpc.max_concurrent_streams", limits.GRPC_STREAMS_PER_CONNECTION_MAX),
    ("grpc.max_allowed_incoming_connections", limits.GRPC_CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", limits.GRPC_HANDSHAKE_MS_MAX),
    ("grpc.max_connection_idle_ms", limits.GRPC_CONNECTION_IDLE_MS_MAX),
    ("grpc.max_connection_age_ms", limits.GRPC_CONNECTION_AGE_MS_MAX),
    ("grpc.max_connection_age_grace_ms", limits.GRPC_CONNECTION_GRACE_MS_MAX),
    # grpc's default lets two processes listen on one port and share its callers.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: Final[Options] = (
    *_SHARED,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", limits.GRPC_RECONNECT_MS_MIN),
    # This one is also the deadline of an attempt to connect; grpc's default is 20 s.
    ("grpc.min_reconnect_backoff_ms", limits.GRPC_CONNECT_MS_MAX),
    ("grpc.max_reconnect_backoff_ms", limits.GRPC_RECONNECT_MS_MAX),
)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server without ports or handlers; add both, then start it. Needs a running event loop."""
    return grpc.aio.server(
        interceptors=list(interceptors),
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=limits.GRPC_CONCURRENT_CALLS_MAX,
    )


def open_port(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None
) -> int:
    """Bind an address, in plain text where there are no credentials; returns the port.

    Mutates the server. Raises ConfigError where the address is taken or not ours.
    """
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is it taken?") from error


def new_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to one target, in plain text where there are no credentials. Connects lazily.

    It has a connection of its own, shared with no other channel. Needs a running event loop; the
    caller closes it.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS, interceptors=interceptors)
    return grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS, interceptors=interceptors)

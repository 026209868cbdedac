"""Probes that tell whether a server is ready to serve.

A probe is a callable without arguments: True when ready, False when not yet. One call takes at most
`PROBE_TIMEOUT_S`. What must not live here: deadlines and retries (they are the process runner's).
"""

import http.client
import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ReadyProbe = Callable[[], bool]

PROBE_TIMEOUT_S = 1.0
_HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class GrpcTarget:
    """A gRPC server: `address` is host:port or unix:path; without credentials in the clear."""

    address: str
    credentials: grpc.ChannelCredentials | None = None
    metadata: tuple[tuple[str, str], ...] = ()


def grpc_ready(target: GrpcTarget | str, service: str = "") -> ReadyProbe:
    """Probe by the standard gRPC health service: ready when it answers SERVING for `service`."""
    goal = GrpcTarget(target) if isinstance(target, str) else target

    def probe() -> bool:
        with _channel(goal) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(
                    health_pb2.HealthCheckRequest(service=service),
                    timeout=PROBE_TIMEOUT_S,
                    metadata=goal.metadata,
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


def http_ready(url: str) -> ReadyProbe:
    """Probe by GET of a plain http URL: ready when the status is 200."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"url must be http://host[:port]/path, got {url!r}")
    host, port = parts.hostname, parts.port

    def probe() -> bool:
        connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", parts.path or "/")
            return connection.getresponse().status == _HTTP_OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return probe


def tcp_ready(port: int, host: str = "127.0.0.1") -> ReadyProbe:
    """Probe by connecting: ready when something accepts. Says nothing about what it serves."""

    def probe() -> bool:
        try:
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    return probe


def _channel(target: GrpcTarget) -> grpc.Channel:
    # A pool of its own: a shared subchannel in backoff would hide a server that has come back.
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    if target.credentials is None:
        return grpc.insecure_channel(target.address, options=options)
    return grpc.secure_channel(target.address, target.credentials, options=options)

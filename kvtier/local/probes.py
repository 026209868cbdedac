"""Whether a service serves: one short call each, True or False.

What must not live here: deadlines of a start, retries.
"""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.sections import parse_address
from kvtier.security.tls import Itself

Probe = Callable[[], bool]

_PROBE_S: Final = 2.0
_OK: Final = 200
_BODY_BYTES_MAX: Final = 1 << 20
_PAGE_S: Final = 10.0
_SAMPLE: Final = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


def http_answer(address: str, path: str, timeout_s: float = _PROBE_S) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    place = parse_address(address)
    connection = http.client.HTTPConnection(place.host, place.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(_BODY_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def http_ok(address: str, path: str) -> Probe:
    """Ready when GET says 200."""
    return lambda: http_answer(address, path)[0] == _OK


def http_json(address: str, path: str) -> object:
    """The parsed body of a GET; None where there is none."""
    status, body = http_answer(address, path)
    if status != _OK:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return None


def samples(address: str, name: str) -> dict[str, float]:
    """The samples of one metric on a page, by their labels as they stand; empty where untold."""
    _, page = http_answer(address, "/metrics", timeout_s=_PAGE_S)
    found = {}
    for line in page.decode("utf-8", "replace").splitlines():
        matched = _SAMPLE.fullmatch(line)
        if matched is not None and matched["name"] == name:
            with contextlib.suppress(ValueError):
                found[matched["labels"] or ""] = float(matched["value"])
    return found


def grpc_serving(address: str) -> Probe:
    """Ready when the gRPC health service says SERVING. In plain text."""
    return lambda: not grpc_fault(address)


def grpc_fault(address: str, timeout_s: float = _PROBE_S, itself: Itself | None = None) -> str:
    """What the gRPC health service says, or that it does not; empty where it is SERVING."""
    # A pool of its own: a shared subchannel in backoff would hide a server that has come back.
    options: list[tuple[str, int | str]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if itself is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        options.append(("grpc.ssl_target_name_override", itself.name))
        channel = grpc.secure_channel(address, itself.credentials, options=options)
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def accepts(address: str) -> Probe:
    """Ready when something listens: all that can be seen of a service that asks for credentials."""
    place = parse_address(address)

    def probe() -> bool:
        try:
            socket.create_connection((place.host, place.port), timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    return probe


def redis_answers(path: Path) -> Probe:
    """Ready when PING over a Unix socket brings PONG."""

    def probe() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PROBE_S)
            try:
                connection.connect(str(path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    return probe

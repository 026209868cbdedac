"""Ports of loopback for servers that are about to be started.

A port is chosen below the range that the kernel gives to outgoing connections, and leased until
this process ends: an abstract Unix socket of the port's number is bound, so that nobody else who
chooses in this way (another cluster that starts, a bench) gets the same one before its server
listens. What must not live here: servers, which port was whose.
"""

import os
import secrets
import socket
from collections.abc import Collection
from typing import Final

from kvtier.errors import UnavailableError

LOOPBACK: Final = "127.0.0.1"
_FIRST_PORT: Final = 15_000
_LAST_PORT: Final = 31_999
_TRIES_MAX: Final = 1_000
_leases: Final[dict[int, int]] = {}
"""Descriptors that hold the leases, by port."""


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError):
            return False
    return True


def lease(port: int) -> bool:
    """Take a port until this process ends, or have it already; False where another has it."""
    if port in _leases:
        return True
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0kvtier-port-{port}")
    except OSError:
        held.close()
        return False
    _leases[port] = held.detach()
    return True


def free_port(taken: Collection[int] = ()) -> int:
    """A port that nobody listens on and nobody has leased, leased; none of `taken`.

    Raises UnavailableError where a thousand tries find none.
    """
    for _ in range(_TRIES_MAX):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT + 1)
        if port not in taken and port not in _leases and lease(port):
            if is_free(port):
                return port
            os.close(_leases.pop(port))
    raise UnavailableError("this machine has no free port")

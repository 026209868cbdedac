"""Loopback ports for servers under test, free of races between test processes.

A port below the kernel's ephemeral range is leased by binding an abstract Unix socket of the same
number, as `kvtier.local.loopback` does it: neither parallel test workers nor a `kvtier up` of one
get the same one, and no outgoing connection takes it while its server restarts. The lease ends with
this process. What must not live here: addresses other than loopback.
"""

import random
import socket
from collections import OrderedDict
from pathlib import Path

_FIRST_PORT = 15_000
_LAST_PORT = 31_999
_LEASES_COUNT_MAX = 256
_TRIES_COUNT_MAX = 1000

_leases: OrderedDict[int, socket.socket] = OrderedDict()


def free_port(count: int = 1) -> int:
    """Lease TCP ports that nothing on 127.0.0.1 listens on: `count` in a row; the first of them.

    The 256 last leases of this process are kept, older ones are given up. Raises RuntimeError when
    a thousand tries find none.
    """
    last = min(_LAST_PORT, _ephemeral_first() - 1)
    for _ in range(_TRIES_COUNT_MAX):
        first = random.randint(_FIRST_PORT, last - count + 1)
        if all(_is_taken_up(port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no free port between {_FIRST_PORT} and {last}")


def _is_taken_up(port: int) -> bool:
    """Whether the port was free, and is leased now."""
    lease = _lease(port)
    if lease is None:
        return False
    if not _bindable(port):
        lease.close()
        return False
    _leases[port] = lease
    if len(_leases) > _LEASES_COUNT_MAX:
        _leases.popitem(last=False)[1].close()
    return True


def _ephemeral_first() -> int:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    return max(int(text.split()[0]), _FIRST_PORT + 1000)


def _lease(port: int) -> socket.socket | None:
    lease = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lease.bind(f"\0kvtier-port-{port}")
    except OSError:
        lease.close()
        return None
    return lease


def _bindable(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

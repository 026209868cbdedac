"""One of several vLLM servers on one machine: its part of memory and processors. Pure.

What must not live here: what else a server is told.
"""

from collections.abc import Sequence
from typing import Final

CPU_KV_BYTES: Final = 512 << 20
"""Of each server that computes on CPUs and was told nothing."""


def cpus_of(number: int, servers: int, cpus: Sequence[int]) -> str:
    """Processors of server `number` (from 0) of several, as vLLM wants them; empty: its choice.

    vLLM binds its threads, all servers to the same processors unless told otherwise. One server
    alone is left to vLLM, which knows cores from threads of cores; with more servers than
    processors binding would only harm.
    """
    if servers < 2:
        return ""
    if len(cpus) < servers:
        return _UNBOUND
    first = number * len(cpus) // servers
    last = (number + 1) * len(cpus) // servers
    return ",".join(map(str, cpus[first:last]))


_UNBOUND: Final = "nobind"

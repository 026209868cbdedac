"""A thousand streams at once: whether every chunk goes through, and how late.

Chunks carry their number and the moment they left, by the clock that all processes of a machine
share; the client's own delays are in the figure. The same streams without a router in between show
what client, workers and machine alone take. What must not live here: routing.
"""

import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.router_cost import CHAT, body_of, percentile, user
from kvtier.bench.router_fleet import FleetSpec, running
from kvtier.bench.router_http import Connection, post

DELAY_MS_MAX: Final = 250.0
_STAMP: Final = re.compile(rb"n=(\d+) t=(\d+) ")


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """How much is measured."""

    streams: int = 1000
    chunks: int = 200
    every_ms: int = 50
    start_s: float = 4.0
    """Over which the streams begin."""


QUICK: Final = StreamSizes(streams=10, chunks=10, start_s=0.2)


@dataclass(slots=True)
class Seen:
    """What came of all streams."""

    delays_ms: list[float]
    lost: int = 0
    refused: int = 0
    """Streams that were answered with an error."""


async def streams(sizes: StreamSizes) -> list[Result]:
    """Delay and loss of chunks, through the router and beside it."""
    async with running(FleetSpec()) as fleet:
        workers = [state["port"] for state in (await fleet.states()).values()]
        beside = await _all(workers, sizes)
        before = fleet.routers[0].cpu_s()
        through = await _all(fleet.ports, sizes)
        cpu_us = (fleet.routers[0].cpu_s() - before) / (sizes.streams * sizes.chunks) * 1e6
    return [
        Result("chunk delay without router, worst", max(beside.delays_ms), "ms"),
        Result("chunk delay p99", percentile(through.delays_ms, 0.99), "ms"),
        Result("chunk delay, worst", max(through.delays_ms), "ms", DELAY_MS_MAX, Bar.AT_MOST),
        Result("chunks lost or out of order", through.lost, "chunks", 0, Bar.AT_MOST),
        Result("streams refused", through.refused, "streams", 0, Bar.AT_MOST),
        Result("CPU of a chunk", cpu_us, "us"),
    ]


async def _all(ports: Sequence[int], sizes: StreamSizes) -> Seen:
    seen = Seen([])
    async with asyncio.TaskGroup() as group:
        for number in range(sizes.streams):
            group.create_task(_one(ports[number % len(ports)], sizes, seen))
            await asyncio.sleep(sizes.start_s / sizes.streams)
    return seen


async def _one(port: int, sizes: StreamSizes, seen: Seen) -> None:
    connection = Connection(port)
    hint = f"chunks={sizes.chunks} every_ms={sizes.every_ms}"
    raw = post(CHAT, body_of([user("go on")], stream=True, user=hint))

    def hear(data: bytes) -> None:
        now = time.monotonic_ns()
        for _, left_at in _STAMP.findall(data):
            seen.delays_ms.append((now - int(left_at)) / 1e6)

    reply = await connection.request(raw, hear)
    connection.close()
    if reply.status != 200:
        seen.refused += 1
        sys.stderr.write(f"a stream got {reply.status}: {reply.body[:200]!r}\n")
        return
    numbers = [int(number) for number, _ in _STAMP.findall(reply.body)]
    if numbers != list(range(sizes.chunks)) or b"data: [DONE]" not in reply.body:
        seen.lost += max(1, sizes.chunks - len(numbers))
        sys.stderr.write(f"a stream ended in {reply.body[-200:]!r}\n")

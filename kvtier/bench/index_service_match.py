"""Match over loopback and from a replica, while many workers hold what is asked for.

Remote matches are measured as pairs: an empty call, then a match, on one connection, and the median
of the differences counts, so that what gRPC and the machine cost at that moment drops out.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.bench.index_service_processes import BenchError, index_arguments, running
from kvtier.bench.index_service_streams import (
    CHAIN,
    Blocks,
    beating,
    random_blocks,
    raw_streams,
)
from kvtier.bench.report import Bar, Result
from kvtier.replica import IndexReplica
from kvtier.sections import DialConfig
from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport

SHORT, LONG = 64, 512
BAR_SHORT_US = 100.0
BAR_LONG_US = 200.0
BAR_REPLICA_US = 30.0
REPLICA_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class MatchSizes:
    holders: int = 32
    pairs: int = 1500
    replica_calls: int = 10_000


QUICK = MatchSizes(holders=4, pairs=50, replica_calls=100)


async def run(sizes: MatchSizes) -> list[Result]:
    prompt = random_blocks(np.random.default_rng(2), LONG)
    held = [list(prompt.reshape(-1, CHAIN))] * sizes.holders
    async with (
        running(index_arguments()) as index,
        raw_streams(await index.port(), sizes.holders, held) as streams,
        beating(streams),
    ):
        port = await index.port()
        return [
            *await remote(port, prompt, sizes),
            await asyncio.to_thread(embedded, port, prompt, sizes),
        ]


async def remote(port: int, prompt: Blocks, sizes: MatchSizes) -> list[Result]:
    """Differences to an empty call of the same method."""
    channel = transport.new_channel(f"127.0.0.1:{port}")
    match = rpc.call(channel, rpc.INDEX, "Match")
    empty = pb.MatchRequest()
    queries = {
        count: pb.MatchRequest(queries=[pb.MatchQuery(hashes=prompt[:count].tobytes())])
        for count in (SHORT, LONG)
    }
    differences: dict[int, list[float]] = {count: [] for count in queries}
    bare = []
    try:
        for request in queries.values():
            check(await match(request), sizes.holders)
        for _ in range(sizes.pairs):
            for count, request in queries.items():
                without_us = await call_us(match, empty)
                differences[count].append(await call_us(match, request) - without_us)
                bare.append(without_us)
    finally:
        await channel.close()
    medians = {count: statistics.median(found) for count, found in differences.items()}
    return [
        Result(
            "Match of 64 blocks above an empty call",
            medians[SHORT],
            "us",
            BAR_SHORT_US,
            Bar.AT_MOST,
        ),
        Result(
            "Match of 512 blocks above an empty call", medians[LONG], "us", BAR_LONG_US, Bar.AT_MOST
        ),
        Result("an empty call", statistics.median(bare), "us"),
    ]


def check(response: pb.MatchResponse, holders: int) -> None:
    found = len(response.results[0].workers) // 4
    if found != holders:
        raise BenchError(f"{found} of {holders} workers were matched")


async def call_us(match: Callable[[pb.MatchRequest], Any], request: pb.MatchRequest) -> float:
    start = time.perf_counter()
    await match(request)
    return (time.perf_counter() - start) * 1e6


def embedded(port: int, prompt: Blocks, sizes: MatchSizes) -> Result:
    """Median of matches of a replica that follows the index meanwhile."""
    with IndexReplica(DialConfig(targets=(f"127.0.0.1:{port}",))) as replica:
        if not replica.wait_complete(REPLICA_S_MAX):
            raise BenchError("the replica was never complete")
        found = len(replica.match(prompt).result)
        if found != sizes.holders:
            raise BenchError(f"the replica matched {found} of {sizes.holders} workers")
        took_us = []
        for _ in range(sizes.replica_calls):
            start = time.perf_counter()
            replica.match(prompt)
            took_us.append((time.perf_counter() - start) * 1e6)
    p50 = statistics.median(took_us)
    name = "match of 512 blocks from an embedded replica, p50"
    return Result(name, p50, "us", BAR_REPLICA_US, Bar.AT_MOST)

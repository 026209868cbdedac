"""Events applied per second of the server's CPU time: coalesced, and one chain a message.

The server is a process of its own and only its CPU time counts, as the kernel tells it, so neither
clients nor neighbours on a busy machine do. Three kinds of round take turns: coalesced messages,
single chains, and the same single chains to a server that does nothing with them; figures are
medians over the rounds, the ratio is formed within a round.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.bench.index_service_processes import (
    Program,
    index_arguments,
    module_arguments,
    running,
)
from kvtier.bench.index_service_streams import (
    CHAIN,
    RawStream,
    Row,
    random_blocks,
    raw_streams,
)
from kvtier.bench.report import Result
from kvtier.core.event_columns import EventKind

COALESCED_CHAINS = 128
"""8,192 blocks: what a publisher under load puts into one message."""
BAR_COALESCED = 4.0
BAR_RATIO = 0.6


@dataclass(frozen=True, slots=True)
class ApplySizes:
    publishers: int = 8
    resident_chains: int = 2048
    """Of each publisher: about 1 M blocks in all."""
    coalesced_messages: int = 24
    """Of each publisher in one round."""
    single_messages: int = 1200
    rounds: int = 9


QUICK = ApplySizes(resident_chains=64, coalesced_messages=2, single_messages=50, rounds=3)


async def run(sizes: ApplySizes) -> list[Result]:
    rng = np.random.default_rng(1)
    held = [list(random_blocks(rng, sizes.resident_chains, CHAIN)) for _ in range(sizes.publishers)]
    coalesced, single, nothing = [], [], []
    async with (
        running(index_arguments()) as index,
        running(module_arguments("index_service_floor")) as floor,
        raw_streams(await index.port(), sizes.publishers, held) as streams,
        raw_streams(await floor.port(), sizes.publishers) as empty,
    ):
        for stream, chains in zip(empty, held, strict=True):
            stream.resident.extend(chains)
        many = Load(sizes.coalesced_messages, COALESCED_CHAINS)
        few = Load(sizes.single_messages, 1)
        for _ in range(sizes.rounds):
            coalesced.append(await cpu_us_a_block(index, streams, many, rng))
            single.append(await cpu_us_a_block(index, streams, few, rng))
            nothing.append(await cpu_us_a_block(floor, empty, few, rng))
    ratios = [without / applied for without, applied in zip(nothing, single, strict=True)]
    return [
        Result(
            "events applied, 8 publishers, 8,192 blocks a message",
            1 / statistics.median(coalesced),
            "M blocks/CPU-s",
            BAR_COALESCED,
        ),
        Result(
            "events applied, one 64-block chain a message / empty stream",
            statistics.median(ratios),
            "x",
            BAR_RATIO,
        ),
        Result(
            "events applied, one 64-block chain a message",
            1 / statistics.median(single),
            "M blocks/CPU-s",
        ),
        Result(
            "empty stream of the same messages", 1 / statistics.median(nothing), "M blocks/CPU-s"
        ),
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """What each publisher sends in one round."""

    messages: int
    chains: int
    """Of 64 blocks, in each message."""


def churn(stream: RawStream, load: Load, rng: np.random.Generator) -> list[bytes]:
    """Packed messages: every second chain is new, the others are the oldest that are held."""
    count = load.messages * load.chains
    rows: list[Row] = []
    for chain in random_blocks(rng, (count + 1) // 2, CHAIN):
        stream.resident.append(chain)
        rows += [(EventKind.STORE, chain), (EventKind.REMOVE, stream.resident.popleft())]
    return [stream.pack(rows[at : at + load.chains]) for at in range(0, count, load.chains)]


async def cpu_us_a_block(
    program: Program, streams: Sequence[RawStream], load: Load, rng: np.random.Generator
) -> float:
    """Server CPU time of one round, until everything is acknowledged."""
    messages = [churn(stream, load, rng) for stream in streams]
    before = program.cpu_s()
    await asyncio.gather(*map(RawStream.send, streams, messages))
    spent_s = program.cpu_s() - before
    return spent_s * 1e6 / (len(streams) * load.messages * load.chains * CHAIN)

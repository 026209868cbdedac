"""Does the index's memory grow under churn? 20 M blocks through gRPC, half of them removals.

Each publisher keeps as much as before: every chain that comes lets the oldest one go. Resident
memory is read after every round; the second half must be as flat as the first one ended.
"""

import asyncio
from dataclasses import dataclass

import numpy as np

from kvtier.bench.index_service_apply import Load, churn
from kvtier.bench.index_service_processes import index_arguments, running
from kvtier.bench.index_service_streams import CHAIN, RawStream, random_blocks, raw_streams
from kvtier.bench.report import Bar, Result

BAR_GROWTH = 1.05
MEGA = 1e6
ROUND = Load(messages=40, chains=16)
"""1,024 blocks a message."""


@dataclass(frozen=True, slots=True)
class SoakSizes:
    blocks: int = 20_000_000
    publishers: int = 8
    resident_chains: int = 2048
    round: Load = ROUND


QUICK = SoakSizes(blocks=1_000_000, resident_chains=64)


async def run(sizes: SoakSizes) -> list[Result]:
    rng = np.random.default_rng(3)
    held = [list(random_blocks(rng, sizes.resident_chains, CHAIN)) for _ in range(sizes.publishers)]
    a_round = sizes.publishers * sizes.round.messages * sizes.round.chains * CHAIN
    rss_mib = []
    async with (
        running(index_arguments()) as index,
        raw_streams(await index.port(), sizes.publishers, held) as streams,
    ):
        for _ in range(-(-sizes.blocks // a_round)):
            messages = [churn(stream, sizes.round, rng) for stream in streams]
            await asyncio.gather(*map(RawStream.send, streams, messages))
            rss_mib.append(index.rss_mib())
    half = rss_mib[len(rss_mib) // 2 :]
    slope = float(np.polyfit(np.arange(len(half)) * a_round / MEGA, half, 1)[0])
    churned = len(rss_mib) * a_round / MEGA
    return [
        Result(
            f"soak of {churned:.0f} M blocks: RSS at the end / at half",
            half[-1] / half[0],
            "x",
            BAR_GROWTH,
            Bar.AT_MOST,
        ),
        Result("... slope in the second half", slope, "MiB/M blocks"),
        Result("... RSS at the end", half[-1], "MiB"),
    ]

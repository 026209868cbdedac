"""What a tier that is down costs a reader of the whole store: rows of `kvtier bench store`.

A store over DRAM and a lower tier that holds the blocks and then answers nothing any more. Reads
wait for its deadline until its breaker opens; from then on a batch of 32 blocks that only the dead
tier has is paired with one of 32 blocks that nobody has. The figure is the median of the
differences, while the store goes on to probe the dead tier as often as it does.
"""

import argparse
import asyncio
import statistics
import time

from kvtier.bench.report import Bar, Result
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.planner import PlannerConfig, TierConfig, Verdict
from kvtier.errors import UnavailableError
from kvtier.ports import BlockOwner, GetRequest, PutRequest
from kvtier.store import (
    StoreTier,
    TieredStore,
    TieredStoreConfig,
    TierWatch,
    held_block,
    open_store,
)
from kvtier.tiers.faulty import FaultyTier, Hang, Operation, Rule
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.types import Fingerprint, Tier

BLOCKS = 32
BLOCK_BYTES = 64 << 10
TIER_BYTES = 64 << 20
DEADLINE_S = 0.1
ADDED_MS_MAX = 1.0
LONG_S = 60.0
PERCENTILES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--down-pairs", type=int, default=1000, help="pairs of reads")


def rows(arguments: argparse.Namespace) -> list[Result]:
    opened_s, added_s = asyncio.run(_measured(arguments.down_pairs))
    what = f"get {BLOCKS} with a tier down"
    tail = statistics.quantiles(added_s, n=PERCENTILES)[-1]
    return [
        Result(f"{what}, added", 1e3 * statistics.median(added_s), "ms", ADDED_MS_MAX, Bar.AT_MOST),
        Result(f"{what}, added, 99th percentile", 1e3 * tail, "ms"),
        Result(f"{what}, until its breaker opens", opened_s, "s"),
    ]


async def _measured(pairs: int) -> tuple[float, list[float]]:
    """Seconds until the breaker opened, and by how much each read was longer after that."""
    watch = TierWatch()
    dram = MemoryTier(MemoryConfig(TIER_BYTES, Tier.DRAM), observer=watch)
    below = MemoryTier(MemoryConfig(TIER_BYTES, Tier.NVME), observer=watch)
    faulty = FaultyTier(below, time.monotonic)
    plan = PlannerConfig(
        (
            TierConfig(Tier.DRAM, TIER_BYTES),
            TierConfig(Tier.NVME, TIER_BYTES, deadline_s=DEADLINE_S),
        )
    )
    tiers = [StoreTier(dram, dram), StoreTier(faulty, below)]
    async with open_store(TieredStoreConfig(plan), tiers, watch) as store:
        there, nowhere = _names(0), _names(1)
        owner = BlockOwner(1)
        puts = [PutRequest(name, bytes(BLOCK_BYTES), owner) for name in there]
        await below.put_many(puts, time.monotonic() + LONG_S)
        store.restore(Tier.NVME, [held_block(n, BLOCK_BYTES, owner) for n in there])
        faulty.add(Rule(Operation.GET, Hang()))
        began = time.monotonic()
        while store.stats().tiers[Tier.NVME].verdict is not Verdict.DOWN:
            if time.monotonic() > began + LONG_S:
                raise UnavailableError("the breaker of a tier that hangs does not open")
            await _took(store, there)
        opened_s = time.monotonic() - began
        added = [await _took(store, there) - await _took(store, nowhere) for _ in range(pairs)]
        if store.stats().tiers[Tier.NVME].verdict is not Verdict.DOWN:
            raise UnavailableError("a tier that hangs is believed to be back")
    return opened_s, added


async def _took(store: TieredStore, names: list[FrameName]) -> float:
    """Seconds of one read, all of whose blocks must be missed."""
    requests = [GetRequest(name, None, BLOCK_BYTES) for name in names]
    began = time.perf_counter()
    results = await store.get_many(requests, time.monotonic() + LONG_S)
    took = time.perf_counter() - began
    if any(result.is_hit for result in results):
        raise UnavailableError("a tier that is down gave a block")
    return took


def _names(kind: int) -> list[FrameName]:
    namespace = Fingerprint(b"bench namespace".ljust(32))
    return [
        FrameName(KeyKind.PREFIX_KEY, bytes([kind, i]).ljust(32), namespace) for i in range(BLOCKS)
    ]

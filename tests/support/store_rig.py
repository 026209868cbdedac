"""A tiered store over memory tiers that fail on demand, with a journal of what it announces."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from kvtier.core.frame import HEADER_BYTES, FrameName, parse_header
from kvtier.core.health import BreakerPolicy
from kvtier.core.planner import PlannerConfig, ScopeQuota, TierConfig, WritePolicy
from kvtier.ports import (
    BlockOwner,
    GetRequest,
    GetResult,
    PutRequest,
    PutStatus,
    RemovalCause,
)
from kvtier.store import StoreTier, TieredStore, TieredStoreConfig, TierWatch, open_store
from kvtier.tiers.faulty import FaultyTier
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.types import ScopeId, Tier
from tests.harness.waiting import eventually_async
from tests.tiers.contract import BLOCK_BYTES, name_of, payload_of, soon

FRAME_BYTES = HEADER_BYTES + BLOCK_BYTES
QUICK = BreakerPolicy(failures_max=2, open_s=0.05, open_s_max=0.1, probes_to_close=1)


@dataclass
class Announced:
    """A `StoreListener` that keeps what it was told, tier by tier."""

    held: dict[Tier, set[FrameName]] = field(default_factory=dict)
    removed: list[tuple[Tier, FrameName, RemovalCause]] = field(default_factory=list)

    def on_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        self.held.setdefault(tier, set()).update(names)

    def on_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        self.held.setdefault(tier, set()).difference_update(names)
        self.removed += [(tier, name, cause) for name in names]


@dataclass(frozen=True)
class Shape:
    """What a rig is made of; capacities in blocks of BLOCK_BYTES, 0: no such tier."""

    dram_blocks: int = 8
    nvme_blocks: int = 64
    redis_blocks: int = 0
    nvme_policy: WritePolicy = WritePolicy.ON_EVICT
    redis_policy: WritePolicy = WritePolicy.ON_EVICT
    touches_min: int = 1
    deadline_s: float = 1.0
    high_share: float = 1.0
    low_share: float = 1.0
    quotas: tuple[ScopeQuota, ...] = ()
    config: dict[str, float] = field(default_factory=dict)
    planner: dict[str, float] = field(default_factory=dict)


@dataclass
class Rig:
    """An open store, its tiers, and what it announced."""

    store: TieredStore
    dram: FaultyTier
    nvme: FaultyTier
    redis: FaultyTier
    said: Announced
    memory: dict[Tier, MemoryTier]

    async def put(self, *numbers: int, scope: str = "", version: int = 0) -> list[PutStatus]:
        owner = BlockOwner(7, ScopeId(scope))
        requests = [PutRequest(name_of(n), payload_of(n, version=version), owner) for n in numbers]
        return [result.status for result in await self.store.put_many(requests, soon())]

    async def get(self, *numbers: int, wait_s: float = 10.0) -> list[GetResult]:
        requests = [GetRequest(name_of(n), None, BLOCK_BYTES) for n in numbers]
        return await self.store.get_many(requests, time.monotonic() + wait_s)

    async def right(self, *numbers: int) -> list[bool]:
        """Which blocks are there; a hit with other bytes fails."""
        results = await self.get(*numbers)
        for n, result in zip(numbers, results, strict=True):
            if result.is_hit:
                assert result.payload is not None
                assert bytes(result.payload) == payload_of(n)
        return [result.is_hit for result in results]

    async def where(self, number: int) -> frozenset[Tier]:
        return (await self.store.contains([name_of(number)], soon()))[0]

    async def settled(self) -> None:
        assert await self.store.settled(soon())

    async def quiet(self) -> None:
        """Wait until no transfer is under way."""

        async def is_quiet() -> bool:
            return self.store.stats().transfers == 0

        await eventually_async(is_quiet, 30, "no transfers under way")


def checksum_in(memory: MemoryTier, name: FrameName) -> int | None:
    frame = memory.frame_memory(name)
    return None if frame is None else parse_header(frame).payload_checksum


@asynccontextmanager
async def a_rig(shape: Shape | None = None, said: Announced | None = None) -> AsyncIterator[Rig]:
    """A store as `shape` says, closed at the end."""
    shape = Shape() if shape is None else shape
    said = Announced() if said is None else said
    watch = TierWatch(said)
    blocks = {
        Tier.DRAM: shape.dram_blocks, Tier.NVME: shape.nvme_blocks, Tier.REDIS: shape.redis_blocks
    }  # fmt: skip
    memory = {
        tier: MemoryTier(
            MemoryConfig(max(1, 2 * count) * FRAME_BYTES, tier),
            observer=None if tier is Tier.REDIS else watch,
        )
        for tier, count in blocks.items()
    }
    faulty = {tier: FaultyTier(one, time.monotonic) for tier, one in memory.items()}
    config = store_config(shape, blocks)
    tiers = [
        StoreTier(faulty[tier])
        if tier is Tier.REDIS
        else StoreTier(faulty[tier], memory[tier], partial(checksum_in, memory[tier]))
        for tier in memory
        if blocks[tier]
    ]
    async with open_store(config, tiers, watch) as store:
        dram, nvme, redis = (faulty[tier] for tier in memory)
        yield Rig(store, dram, nvme, redis, said, memory)


def store_config(shape: Shape, blocks: dict[Tier, int]) -> TieredStoreConfig:
    policies = {Tier.NVME: shape.nvme_policy, Tier.REDIS: shape.redis_policy}
    tiers = tuple(
        TierConfig(
            tier,
            count * FRAME_BYTES,
            high_share=shape.high_share,
            low_share=shape.low_share,
            deadline_s=shape.deadline_s,
            write_policy=policies.get(tier, WritePolicy.ON_EVICT),
            touches_min=shape.touches_min,
        )
        for tier, count in blocks.items()
        if count
    )
    planner = replace(PlannerConfig(tiers=tiers, quotas=shape.quotas), **shape.planner)  # type: ignore[arg-type]
    config = TieredStoreConfig(planner=planner, tick_s=0.02, drain_s=2.0, breaker=QUICK)
    return replace(config, **shape.config)  # type: ignore[arg-type]

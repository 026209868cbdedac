"""What comes up is read straight into slots of the arena: nothing half-read is ever found."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvtier.core.planner import WritePolicy
from kvtier.ports import (
    BlockOwner,
    ByNames,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutStatus,
)
from kvtier.store import Presence, StoreTier, TieredStore, TierWatch, held_block, open_store
from kvtier.tiers.arena.landing import ArenaLanding
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape, ArenaTier
from kvtier.tiers.faulty import Fail, FaultyTier, FlipBit, Hang, Misplace, Operation, Rule
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.types import ScopeId, Tier
from tests.harness.waiting import eventually_async
from tests.support.store_rig import FRAME_BYTES, Announced, Shape, store_config
from tests.tiers.contract import BLOCK_BYTES, bytes_of, name_of, payload_of, soon

NUMBERS = (1, 2, 3)
SCOPE = ScopeId("tenant")


class Watched(FaultyTier):
    """Remembers what memory reads went into."""

    def __init__(self, blocks: MemoryTier) -> None:
        super().__init__(blocks, time.monotonic)
        self.into: list[memoryview | None] = []

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        self.into += [request.into for request in requests]
        return await super().get_many(requests, deadline_s)


@dataclass
class Landed:
    """A store whose DRAM is an arena, with three blocks below."""

    store: TieredStore
    arena: ArenaTier
    nvme: Watched
    below: MemoryTier

    async def bring_up(self, *numbers: int) -> list[Presence]:
        names = [(name_of(n), BLOCK_BYTES) for n in numbers]
        return [one async for known in self.store.bring_up(names, soon()) for one in known]

    async def get(self, number: int) -> GetResult:
        request = GetRequest(name_of(number), memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES)
        return (await self.store.get_many([request], soon()))[0]

    def is_clean(self) -> bool:
        """Whether no slot is taken by what is not held."""
        return self.arena.stats().blocks_reserved == 0


@asynccontextmanager
async def landed(numbers: Sequence[int] = NUMBERS) -> AsyncIterator[Landed]:
    watch = TierWatch(Announced())
    arena = ArenaTier(ArenaConfig(1 << 20, 64 << 10), ArenaShape(observer=watch))
    below = MemoryTier(MemoryConfig(256 * FRAME_BYTES, Tier.NVME), observer=watch)
    nvme = Watched(below)
    shape = Shape(dram_blocks=64, nvme_policy=WritePolicy.ON_SEAL, deadline_s=5.0)
    config = store_config(shape, {Tier.DRAM: 64, Tier.NVME: 128})
    tiers = [StoreTier(arena, arena, landing=ArenaLanding(arena)), StoreTier(nvme, below)]
    owner = BlockOwner(77, SCOPE)
    async with open_store(config, tiers, watch) as store:
        puts = [PutRequest(name_of(n), payload_of(n), owner) for n in numbers]
        assert {r.status for r in await below.put_many(puts, soon())} == {PutStatus.STORED}
        blocks = [held_block(name_of(n), BLOCK_BYTES, owner) for n in numbers]
        assert store.restore(Tier.NVME, blocks) == len(numbers)
        yield Landed(store, arena, nvme, below)


async def test_what_is_brought_up_is_read_into_its_slot_and_keeps_its_owner() -> None:
    async with landed() as rig:
        assert await rig.bring_up(*NUMBERS) == [Presence.RESIDENT] * 3
        assert all(into is not None for into in rig.nvme.into)
        assert len(rig.nvme.into) == 3
        for n in NUMBERS:
            held = rig.arena.held(name_of(n))
            assert held is not None
            assert (held.writer_id, held.scope) == (77, SCOPE)
            assert bytes_of((await rig.arena.get_many([GetRequest(name_of(n))], soon()))[0]) == (
                payload_of(n)
            )
        assert rig.store.stats().counts.promoted == {Tier.NVME: 3}
        assert rig.arena.stats().puts == {PutStatus.STORED: 3}
        assert rig.is_clean()


@pytest.mark.parametrize(
    "fault", [Fail(), FlipBit(5000), FlipBit(100), Misplace(name_of(9))], ids=lambda f: str(f)
)
async def test_a_slot_whose_read_failed_is_given_back_and_never_found(
    fault: Fail | FlipBit | Misplace,
) -> None:
    async with landed() as rig:
        rig.nvme.add(Rule(Operation.GET, fault, name_of(2)))
        found = await rig.bring_up(*NUMBERS)
        assert found[0] is found[2] is Presence.RESIDENT
        assert found[1] in {Presence.MISS, Presence.ERROR}
        assert rig.arena.held(name_of(2)) is None
        assert sorted(n.key for n in rig.arena.names()) == sorted(
            n.key for n in map(name_of, (1, 3))
        )
        assert rig.is_clean()


async def test_a_block_that_is_dropped_while_it_is_read_is_not_published() -> None:
    async with landed() as rig:
        rig.nvme.add(Rule(Operation.GET, Hang()))
        coming = asyncio.create_task(rig.bring_up(1))
        await rig.nvme.wait_hanging()
        assert rig.arena.stats().blocks_reserved == 1
        await rig.store.drop(ByNames((name_of(1),)), soon())
        rig.nvme.heal()
        assert await coming == [Presence.MISS]

        async def is_over() -> bool:
            return rig.store.stats().transfers == 0 and rig.is_clean()

        await eventually_async(is_over, 30.0, "the slot to come back")
        assert rig.arena.names() == []


async def test_who_wants_the_bytes_of_a_block_that_is_landing_gets_them_from_dram() -> None:
    async with landed() as rig:
        rig.nvme.add(Rule(Operation.GET, Hang()))
        coming = asyncio.create_task(rig.bring_up(1))
        await rig.nvme.wait_hanging()
        readers = [asyncio.create_task(rig.get(1)) for _ in range(20)]
        await asyncio.sleep(0)
        rig.nvme.heal()
        for result in await asyncio.gather(*readers):
            assert bytes_of(result) == payload_of(1)
        assert await coming == [Presence.RESIDENT]
        assert rig.store.stats().counts.fetched == {Tier.NVME: 1}
        assert rig.is_clean()


async def test_whose_bytes_are_waited_for_comes_in_memory_of_its_own() -> None:
    """A slot may be another block's as soon as it is published: it is nobody's to keep."""
    async with landed() as rig:
        for _ in range(2):  # the second touch promotes
            assert bytes_of(await rig.get(1)) == payload_of(1)
        assert rig.nvme.into == [None] * len(rig.nvme.into)
        assert rig.is_clean()


async def test_a_name_that_was_put_while_it_was_read_keeps_its_first_bytes() -> None:
    async with landed() as rig:
        rig.nvme.add(Rule(Operation.GET, Hang()))
        coming = asyncio.create_task(rig.bring_up(1))
        await rig.nvme.wait_hanging()
        put = PutRequest(name_of(1), payload_of(1), BlockOwner(5))
        assert (await rig.arena.put_many([put], soon()))[0].status is PutStatus.STORED
        rig.nvme.heal()
        assert await coming == [Presence.RESIDENT]
        held = rig.arena.held(name_of(1))
        assert held is not None
        assert held.writer_id == 5

        async def is_over() -> bool:
            return rig.store.stats().transfers == 0 and rig.is_clean()

        await eventually_async(is_over, 30.0, "the slot to come back")


async def test_a_full_arena_that_may_evict_nothing_is_no_error() -> None:
    async with landed() as rig:
        others = [PutRequest(name_of(n), payload_of(n), BlockOwner(1)) for n in range(100, 400)]
        await rig.arena.put_many(others, soon())
        for name in rig.arena.names():
            rig.arena.pin(name)
        before = rig.arena.names()
        assert (await rig.bring_up(1))[0] in {Presence.NO_ROOM, Presence.MISS}
        assert set(rig.arena.names()) == set(before)
        assert rig.is_clean()
        assert bytes_of(await rig.get(1)) == payload_of(1)


async def test_a_store_that_ends_in_the_middle_of_a_read_leaves_no_slot_taken() -> None:
    async with landed() as rig:
        rig.nvme.add(Rule(Operation.GET, Hang()))
        coming = asyncio.create_task(rig.bring_up(*NUMBERS))
        await rig.nvme.wait_hanging()
        assert rig.arena.stats().blocks_reserved == 3
        await rig.store.drain()
        assert rig.is_clean()
        assert rig.arena.names() == []
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
    assert GetStatus.HIT not in rig.arena.stats().gets


async def test_every_await_of_a_landing_may_be_cancelled() -> None:
    """The caller goes at its k-th step; the flight is the store's and ends by itself."""
    for steps in range(12):
        async with landed() as rig:
            coming = asyncio.create_task(rig.bring_up(*NUMBERS))
            for _ in range(steps):
                await asyncio.sleep(0)
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

            async def is_over(rig: Landed = rig) -> bool:
                return rig.store.stats().transfers == 0 and rig.is_clean()

            await eventually_async(is_over, 30.0, "no transfer under way")
            for n in NUMBERS:
                assert bytes_of(await rig.get(n)) == payload_of(n)

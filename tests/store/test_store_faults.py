"""The tiered store while its lower tiers are slow, failing, damaged, full, hanging or gone."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import pytest

from kvtier.core.planner import Verdict, WritePolicy
from kvtier.errors import BackendError
from kvtier.ports import ByNames, GetRequest, GetStatus, PutStatus
from kvtier.store import SharedTier
from kvtier.tiers.faulty import (
    Fail,
    Fault,
    FlipBit,
    Full,
    Hang,
    Misplace,
    Operation,
    Rule,
    Truncate,
)
from kvtier.types import Tier
from tests.harness.waiting import eventually_async
from tests.support.store_rig import Rig, Shape, a_rig
from tests.tiers.contract import BLOCK_BYTES, name_of, payload_of, put_of, soon

SMALL_DRAM = Shape(
    dram_blocks=4, high_share=0.75, low_share=0.5, nvme_policy=WritePolicy.ON_SEAL, deadline_s=0.2
)
BOTH = replace(SMALL_DRAM, redis_blocks=32, redis_policy=WritePolicy.ON_SEAL)


async def fill(rig: Rig, count: int = 8) -> None:
    """Put blocks until the first of them are only below DRAM."""
    for n in range(count):
        assert await rig.put(n) == [PutStatus.STORED]
        await rig.settled()
        await rig.settled()
    assert Tier.DRAM not in await rig.where(0)


async def is_back(rig: Rig, tier: Tier = Tier.NVME) -> None:
    async def is_open() -> bool:
        return rig.store.stats().tiers[tier].verdict is Verdict.OPEN

    await eventually_async(is_open, 30, "the tier is called again")


async def dropped(rig: Rig, number: int) -> bool:
    """Drop a block, to put it anew; False."""
    await rig.store.drop(ByNames((name_of(number),)), soon())
    return False


@pytest.mark.parametrize("damage", [FlipBit(3), FlipBit(2000), Truncate(), Misplace(name_of(99))])
async def test_a_damaged_copy_is_a_miss_and_gone(damage: Fault) -> None:
    async with a_rig(SMALL_DRAM) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.GET, damage, name_of(0), times=1))
        assert await rig.right(0) == [False]
        assert rig.nvme.applied[Operation.GET, type(damage)] == 1
        assert await rig.where(0) == frozenset()
        assert name_of(0) not in rig.memory[Tier.NVME].names()
        assert await rig.right(1, 2, 3) == [True] * 3


async def test_where_one_copy_is_damaged_the_next_tier_is_asked() -> None:
    async with a_rig(BOTH) as rig:
        await fill(rig)
        assert await rig.where(0) == {Tier.NVME, Tier.REDIS}
        rig.nvme.add(Rule(Operation.GET, FlipBit(2000), name_of(0), times=1))
        assert await rig.right(0) == [True]
        assert Tier.NVME not in await rig.where(0)
        assert rig.store.stats().counts.fetched[Tier.REDIS] == 1


async def test_where_one_tier_fails_the_next_is_asked() -> None:
    async with a_rig(BOTH) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.GET, Fail()))
        assert await rig.right(0, 1) == [True, True]


async def test_a_tier_that_fails_is_skipped_and_asked_again_when_it_is_back() -> None:
    async with a_rig(SMALL_DRAM) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.GET, Fail()))
        held = set(rig.said.held[Tier.NVME])
        for _ in range(2):
            assert await rig.right(0) == [False]
        assert rig.store.stats().tiers[Tier.NVME].verdict is Verdict.DOWN
        assert rig.said.held[Tier.NVME] == set()
        failed = rig.nvme.applied[Operation.GET, Fail]
        results = await rig.get(0)
        assert results[0].status in {GetStatus.ERROR, GetStatus.MISS}
        assert rig.nvme.applied[Operation.GET, Fail] <= failed + 1  # a probe at most
        rig.nvme.heal()
        await is_back(rig)
        assert await rig.right(0) == [True]
        assert rig.said.held[Tier.NVME] == held
        assert rig.store.stats().tiers[Tier.NVME].tripped_count >= 1


async def test_a_tier_that_hangs_costs_its_deadline_until_its_breaker_opens() -> None:
    async with a_rig(SMALL_DRAM) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.GET, Hang()))
        for n in (0, 1):
            [result] = await rig.get(n)
            assert result.status in {GetStatus.TIMEOUT, GetStatus.MISS}
        assert rig.store.stats().tiers[Tier.NVME].verdict is Verdict.DOWN
        hung = rig.nvme.applied[Operation.GET, Hang]
        assert await rig.right(*range(8)) == [False] * 6 + [True] * 2
        assert rig.nvme.applied[Operation.GET, Hang] <= hung + 1
        rig.nvme.heal()
        await is_back(rig)
        assert await rig.right(2) == [True]


async def test_a_reader_past_its_deadline_gets_a_timeout_and_its_buffer_back() -> None:
    async with a_rig(replace(SMALL_DRAM, deadline_s=5.0)) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.GET, Hang()))
        into = bytearray(BLOCK_BYTES)
        asked = [GetRequest(name_of(0), memoryview(into), BLOCK_BYTES)]
        [result] = await rig.store.get_many(asked, time.monotonic() + 0.05)
        assert result.status is GetStatus.TIMEOUT
        rig.nvme.heal()
        await rig.quiet()
        assert into == bytearray(BLOCK_BYTES)


async def test_a_full_tier_refuses_and_everything_else_goes_on() -> None:
    async with a_rig(SMALL_DRAM) as rig:
        rig.nvme.add(Rule(Operation.PUT, Full()))
        for n in range(8):
            assert await rig.put(n) == [PutStatus.STORED]
            await rig.settled()
        stats = rig.store.stats()
        assert stats.counts.demotions_failed[Tier.NVME] >= 8
        assert stats.tiers[Tier.NVME].verdict is Verdict.OPEN
        assert await rig.right(7) == [True]
        rig.nvme.heal()
        await rig.put(9)
        await rig.settled()
        assert Tier.NVME in await rig.where(9)


async def test_failing_writes_leave_reads_and_come_back() -> None:
    async with a_rig(SMALL_DRAM) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.PUT, Fail()))
        for n in range(20, 24):
            await rig.put(n)
            await rig.settled()
        assert rig.store.stats().tiers[Tier.NVME].verdict is Verdict.READ_ONLY
        assert await rig.right(0) == [True]
        rig.nvme.heal()

        async def is_written() -> bool:
            await rig.put(30)
            await rig.settled()
            return Tier.NVME in await rig.where(30) or await dropped(rig, 30)

        assert await eventually_async(is_written, 30, "written again")
        assert rig.store.stats().tiers[Tier.NVME].verdict is Verdict.OPEN


async def test_a_drop_that_a_tier_cannot_do_is_owed_and_its_block_not_read() -> None:
    async with a_rig(SMALL_DRAM) as rig:
        await fill(rig)
        rig.nvme.add(Rule(Operation.DROP, Fail()))
        with pytest.raises(BackendError):
            await rig.store.drop(ByNames((name_of(0),)), soon())
        await rig.settled()
        assert await rig.right(0) == [False]
        assert name_of(0) in rig.memory[Tier.NVME].names()
        assert rig.store.stats().tiers[Tier.NVME].drops_pending == 1
        assert await rig.put(0, version=1) == [PutStatus.STORED]
        await rig.settled()
        assert Tier.NVME not in await rig.where(0)
        rig.nvme.heal()

        async def is_paid() -> bool:
            return rig.store.stats().tiers[Tier.NVME].drops_pending == 0

        await eventually_async(is_paid, 30, "the drop that was owed")
        assert name_of(0) not in rig.memory[Tier.NVME].names()
        [result] = await rig.get(0)
        assert result.payload is not None
        assert bytes(result.payload) == payload_of(0, version=1)


async def test_an_owed_drop_hides_the_copy_in_the_shared_tier() -> None:
    async with a_rig(Shape(redis_blocks=8)) as rig:
        await rig.memory[Tier.REDIS].put_many([put_of(1)], soon())
        rig.redis.add(Rule(Operation.DROP, Fail()))
        with pytest.raises(BackendError):
            await rig.store.drop(ByNames((name_of(1),)), soon())
        assert await rig.right(1) == [False]
        assert await rig.store.contains([name_of(1)], soon(), SharedTier.ASK) == [frozenset()]


async def test_dram_that_is_full_or_failing_gives_puts_back() -> None:
    async with a_rig() as rig:
        rig.dram.add(Rule(Operation.PUT, Fail(), times=1), Rule(Operation.PUT, Full(), times=1))
        assert await rig.put(1) == [PutStatus.ERROR]
        assert await rig.put(1) == [PutStatus.REFUSED]
        assert await rig.put(1) == [PutStatus.STORED]
        assert rig.store.stats().transfers == 0


async def test_dram_that_hangs_costs_no_more_than_the_deadline() -> None:
    async with a_rig() as rig:
        await rig.put(1)
        rig.dram.add(Rule(Operation.GET, Hang()), Rule(Operation.PUT, Hang()))
        [result] = await rig.get(1, wait_s=0.05)
        assert result.status is GetStatus.TIMEOUT
        results = await rig.store.put_many([put_of(2)], time.monotonic() + 0.05)
        assert results[0].status is PutStatus.TIMEOUT
        rig.dram.heal()
        assert await rig.right(1) == [True]
        assert rig.store.stats().transfers == 0


async def test_a_store_closes_in_time_while_a_tier_hangs() -> None:
    shape = replace(SMALL_DRAM, deadline_s=30.0, config={"drain_s": 0.1})
    before = asyncio.all_tasks()
    async with a_rig(shape) as rig:
        rig.nvme.add(Rule(Operation.PUT, Hang()), Rule(Operation.GET, Hang()))
        await rig.put(1, 2)
        await rig.nvme.wait_hanging()
    assert asyncio.all_tasks() == before
    assert rig.memory[Tier.DRAM].stats().blocks_pinned == 0


Call = Callable[[Rig], Coroutine[None, None, object]]


async def reading(rig: Rig) -> object:
    return await rig.right(0, 1, 8, 9)


async def writing(rig: Rig) -> object:
    return await rig.put(8, 20, 21)


async def bringing(rig: Rig) -> object:
    names = [(name_of(n), BLOCK_BYTES) for n in (0, 1, 2)]
    return [one async for known in rig.store.bring_up(names, soon()) for one in known]


async def dropping(rig: Rig) -> object:
    return await rig.store.drop(ByNames((name_of(0), name_of(8))), soon())


@pytest.mark.parametrize("call", [reading, writing, bringing, dropping])
async def test_a_call_that_is_cancelled_at_any_await_leaves_nothing_open(call: Call) -> None:
    """The k-th step of the loop cancels, for every k until the call is faster than that."""
    async with a_rig(replace(BOTH, config={"group_blocks": 1})) as rig:
        await fill(rig)
        for steps in range(60):
            await rig.put(8, 9)
            task = asyncio.ensure_future(call(rig))
            for _ in range(steps):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rig.settled()
            await rig.quiet()
            if was_done:
                break
        else:
            raise AssertionError("the call never ended")
        assert steps > 0
        await rig.right(*range(10))
        usage = rig.store.stats().tiers[Tier.DRAM].usage
        held = rig.memory[Tier.DRAM].names()
        assert usage.blocks_count == len(held)
        assert usage.reserved_bytes == 0
        assert rig.memory[Tier.DRAM].stats().blocks_pinned == 0
        assert rig.store.stats().in_flight_bytes == 0

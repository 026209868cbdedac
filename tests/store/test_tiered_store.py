"""The tiered store over memory tiers: what moves where, single flight, pins, quotas, drops."""

import asyncio
from dataclasses import replace

import pytest

from kvtier.core.checksum import checksum
from kvtier.core.planner import Reason, Reuse, ScopeQuota, WritePolicy
from kvtier.errors import CallerError, UnavailableError
from kvtier.ports import (
    BlockOwner,
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    GetRequest,
    GetStatus,
    PutRequest,
    PutStatus,
    Refusal,
    Selection,
)
from kvtier.store import PinTerms, Presence, ReadOptions, SharedTier, held_block
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.faulty import Hang, Operation, Rule
from kvtier.types import ScopeId, Tier
from tests.harness.waiting import eventually_async
from tests.support.store_rig import FRAME_BYTES, Announced, Rig, Shape, a_rig
from tests.tiers.contract import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    name_of,
    payload_of,
    put_of,
    soon,
)

ROOMY = Shape(dram_blocks=4, high_share=0.75, low_share=0.5)
"""Blocks leave DRAM before it is full, as in a store that serves."""
TO_NVME = Shape(nvme_policy=WritePolicy.ON_SEAL)


async def brought_up(rig: Rig, *numbers: int) -> list[Presence]:
    names = [(name_of(n), BLOCK_BYTES) for n in numbers]
    return [one async for known in rig.store.bring_up(names, soon()) for one in known]


async def test_what_was_put_is_read_into_the_callers_buffer() -> None:
    async with a_rig() as rig:
        assert await rig.put(1, 2) == [PutStatus.STORED] * 2
        into = memoryview(bytearray(BLOCK_BYTES))
        [hit, miss] = await rig.store.get_many(
            [GetRequest(name_of(2), into, BLOCK_BYTES), GetRequest(name_of(3))], soon()
        )
        assert hit.is_hit
        assert bytes(into) == payload_of(2)
        assert miss.status is GetStatus.MISS


async def test_the_first_writer_of_a_name_is_kept() -> None:
    async with a_rig() as rig:
        assert await rig.put(1) == [PutStatus.STORED]
        assert await rig.put(1) == [PutStatus.DUPLICATE]
        assert await rig.put(1, version=1) == [PutStatus.DIVERGENT]
        longer = PutRequest(name_of(1), bytes(BLOCK_BYTES + 1), BlockOwner(7))
        assert (await rig.store.put_many([longer], soon()))[0].status is PutStatus.DIVERGENT
        assert await rig.right(1) == [True]
        assert rig.store.stats().counts.divergent_puts == 2


async def test_a_name_twice_in_one_put_is_stored_once() -> None:
    async with a_rig() as rig:
        requests = [put_of(1), put_of(1), put_of(1, version=1)]
        results = await rig.store.put_many(requests, soon())
        assert [r.status for r in results] == [
            PutStatus.STORED, PutStatus.DUPLICATE, PutStatus.DIVERGENT,
        ]  # fmt: skip
        assert await rig.right(1, 1) == [True, True]


async def test_a_copy_below_came_first_and_the_other_one_above_goes() -> None:
    async with a_rig(TO_NVME) as rig:
        await rig.memory[Tier.NVME].put_many([put_of(1)], soon())
        assert await rig.put(1, version=1) == [PutStatus.STORED]
        await rig.settled()
        assert rig.store.stats().counts.divergent_copies == 1
        assert await rig.where(1) == {Tier.NVME}
        assert await rig.right(1) == [True]


async def test_what_dram_gives_up_is_read_from_below() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(12):
            await rig.put(n)
            await rig.settled()
        assert await rig.right(*range(12)) == [True] * 12
        counts = rig.store.stats().counts
        assert counts.demoted[Tier.NVME] >= 8
        assert counts.fetched[Tier.NVME] >= 8
        assert rig.store.stats().tiers[Tier.DRAM].usage.resident_bytes <= 4 * FRAME_BYTES


async def test_a_sealed_block_is_written_through_to_every_tier_that_asks_for_it() -> None:
    shape = Shape(redis_blocks=8, nvme_policy=WritePolicy.ON_SEAL, redis_policy=WritePolicy.ON_SEAL)
    async with a_rig(shape) as rig:
        await rig.put(1)
        await rig.settled()
        await rig.settled()
        assert await rig.where(1) == {Tier.DRAM, Tier.NVME, Tier.REDIS}


async def test_a_block_is_copied_down_at_the_touch_that_shows_its_use() -> None:
    shape = Shape(nvme_policy=WritePolicy.ON_REUSE, touches_min=3)
    async with a_rig(shape) as rig:
        await rig.put(1)
        assert await rig.where(1) == {Tier.DRAM}
        rig.store.touch([name_of(1)])
        rig.store.touch([name_of(1)])
        await rig.settled()
        assert await rig.where(1) == {Tier.DRAM, Tier.NVME}


async def test_a_second_touch_brings_a_block_up() -> None:
    async with a_rig(replace(ROOMY, planner={"promote_touches_min": 3})) as rig:
        for n in range(6):
            await rig.put(n)
            await rig.settled()
        assert await rig.where(0) == {Tier.NVME}
        assert await rig.right(0) == [True]
        assert await rig.where(0) == {Tier.NVME}
        assert await rig.right(0) == [True]
        assert await rig.where(0) == {Tier.DRAM, Tier.NVME}
        assert rig.store.stats().counts.promoted == {Tier.NVME: 1}


async def test_a_predicted_reuse_brings_a_block_up_at_once() -> None:
    async with a_rig(replace(ROOMY, planner={"promote_touches_min": 9})) as rig:
        for n in range(6):
            await rig.put(n)
            await rig.settled()
        options = ReadOptions(reuse=Reuse.PREDICTED)
        [hit] = await rig.store.get_many([GetRequest(name_of(0))], soon(), options)
        assert hit.is_hit
        assert Tier.DRAM in await rig.where(0)


async def test_what_another_node_wrote_into_the_shared_tier_is_found_by_its_length() -> None:
    async with a_rig(Shape(redis_blocks=8)) as rig:
        await rig.memory[Tier.REDIS].put_many([put_of(1)], soon())
        assert (await rig.store.get_many([GetRequest(name_of(1))], soon()))[0].status is (
            GetStatus.MISS
        )
        skip = ReadOptions(shared=SharedTier.SKIP)
        asked = [GetRequest(name_of(1), None, BLOCK_BYTES)]
        assert not (await rig.store.get_many(asked, soon(), skip))[0].is_hit
        assert await rig.right(1) == [True]
        found = await rig.store.contains([name_of(1), name_of(2)], soon(), SharedTier.ASK)
        assert found == [{Tier.REDIS}, frozenset()]


async def test_a_wrong_length_is_an_error_and_costs_no_block() -> None:
    async with a_rig() as rig:
        await rig.put(1)
        asked = [GetRequest(name_of(1), None, BLOCK_BYTES - 1)]
        [result] = await rig.store.get_many(asked, soon())
        assert (result.status, result.reason) == (GetStatus.ERROR, "length")
        assert await rig.right(1) == [True]


async def test_blocks_come_up_in_order_and_stay_in_dram() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(6):
            await rig.put(n)
            await rig.settled()
        assert await brought_up(rig, 0, 1, 99) == [
            Presence.RESIDENT, Presence.RESIDENT, Presence.MISS,
        ]  # fmt: skip
        assert Tier.DRAM in await rig.where(0)
        more_than_fits = await brought_up(rig, *range(6))
        assert set(more_than_fits) <= {Presence.RESIDENT, Presence.NO_ROOM}
        assert await rig.right(*range(6)) == [True] * 6


async def test_a_prefetch_brings_up_what_is_read_later() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(5):
            await rig.put(n)
            await rig.settled()
        assert rig.store.prefetch([(name_of(0), BLOCK_BYTES), (name_of(77), BLOCK_BYTES)]) == 1
        await rig.quiet()
        assert Tier.DRAM in await rig.where(0)


async def test_two_hundred_misses_of_one_block_are_one_read_below() -> None:
    async with a_rig(Shape(dram_blocks=2, nvme_policy=WritePolicy.ON_SEAL)) as rig:
        for n in range(4):
            await rig.put(n)
            await rig.settled()
        rig.nvme.add(Rule(Operation.GET, Hang()))
        readers = [asyncio.create_task(rig.right(0)) for _ in range(200)]
        await rig.nvme.wait_hanging()
        rig.nvme.heal()
        assert await asyncio.gather(*readers) == [[True]] * 200
        assert rig.nvme.applied[Operation.GET, Hang] == 1
        assert rig.store.stats().counts.fetched == {Tier.NVME: 1}


async def test_a_reader_that_gives_up_takes_nothing_from_the_others() -> None:
    async with a_rig(Shape(dram_blocks=2, nvme_policy=WritePolicy.ON_SEAL)) as rig:
        for n in range(4):
            await rig.put(n)
            await rig.settled()
        rig.nvme.add(Rule(Operation.GET, Hang()))
        first = asyncio.create_task(rig.right(0))
        await rig.nvme.wait_hanging()
        second = asyncio.create_task(rig.right(0))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        rig.nvme.heal()
        assert await second == [True]


async def test_a_block_whose_demotion_waits_stays_readable_until_it_is_written() -> None:
    async with a_rig(Shape(dram_blocks=4, deadline_s=5.0)) as rig:
        rig.nvme.add(Rule(Operation.PUT, Hang()))
        await rig.put(0, 1, 2, 3)
        assert await rig.put(4) == [PutStatus.REFUSED]
        await rig.nvme.wait_hanging()
        assert await rig.right(0, 1, 2, 3) == [True] * 4
        rig.nvme.heal()
        await rig.settled()
        assert await rig.put(4) == [PutStatus.STORED]
        await rig.settled()
        assert await rig.right(0, 1, 2, 3, 4) == [True] * 5


async def test_a_scope_over_its_quota_pays_with_its_own_blocks() -> None:
    quota = ScopeQuota(ScopeId("small"), Tier.DRAM, 2 * FRAME_BYTES)
    async with a_rig(Shape(dram_blocks=8, nvme_blocks=0, quotas=(quota,))) as rig:
        await rig.put(*range(4))
        for n in range(10, 16):
            assert await rig.put(n, scope="small") == [PutStatus.STORED]
        assert await rig.right(0, 1, 2, 3) == [True] * 4
        assert sum(await rig.right(*range(10, 16))) == 2
        used = rig.store.stats().quota_used_bytes
        assert used == {(ScopeId("small"), Tier.DRAM): 2 * FRAME_BYTES}


async def test_a_block_that_never_fits_is_refused_as_too_long() -> None:
    async with a_rig(Shape(dram_blocks=1, nvme_blocks=0)) as rig:
        request = PutRequest(name_of(1), bytes(4 * FRAME_BYTES), BlockOwner(1))
        [result] = await rig.store.put_many([request], soon())
        assert (result.status, result.reason) == (PutStatus.REFUSED, Refusal.TOO_LONG)


async def test_pinned_blocks_stay_until_they_are_unpinned() -> None:
    async with a_rig(Shape(dram_blocks=4, nvme_blocks=0)) as rig:
        await rig.put(0, 1)
        pinned = rig.store.pin([name_of(0), name_of(50)], PinTerms(60.0))
        assert pinned.names == (name_of(0),)
        for n in range(10, 20):
            await rig.put(n)
        assert await rig.right(0, 1) == [True, False]
        assert rig.memory[Tier.DRAM].stats().blocks_pinned == 1
        rig.store.unpin(pinned.pin_id)
        rig.store.unpin(pinned.pin_id)
        assert rig.memory[Tier.DRAM].stats().blocks_pinned == 0
        for n in range(20, 30):
            await rig.put(n)
        assert await rig.right(0) == [False]


async def test_a_pin_ends_with_its_time_in_the_tier_too() -> None:
    async with a_rig() as rig:
        await rig.put(0)
        rig.store.pin([name_of(0)], PinTerms(0.05))
        assert rig.memory[Tier.DRAM].stats().blocks_pinned == 1

        async def is_unpinned() -> bool:
            return rig.memory[Tier.DRAM].stats().blocks_pinned == 0

        await eventually_async(is_unpinned, 30, "no pin")
        assert rig.store.stats().pins == 0


@pytest.mark.parametrize(
    "selection",
    [ByNames((name_of(1),)), ByNamespace(NAMESPACE), ByWriter(7), ByScope(ScopeId("t"))],
)
async def test_a_drop_empties_every_tier_of_what_is_selected(selection: Selection) -> None:
    shape = Shape(redis_blocks=8, nvme_policy=WritePolicy.ON_SEAL, redis_policy=WritePolicy.ON_SEAL)
    async with a_rig(shape) as rig:
        other = PutRequest(name_of(1, OTHER_NAMESPACE), payload_of(9), BlockOwner(8))
        await rig.put(1, scope="t")
        await rig.store.put_many([other], soon())
        await rig.settled()
        await rig.settled()
        assert await rig.where(1) == {Tier.DRAM, Tier.NVME, Tier.REDIS}
        assert await rig.store.drop(selection, soon()) == 1
        assert await rig.right(1) == [False]
        kept = await rig.store.get_many([GetRequest(other.name)], soon())
        assert kept[0].is_hit
        for memory in rig.memory.values():
            assert name_of(1) not in memory.names()


async def test_a_drop_reaches_copies_of_others_in_the_shared_tier() -> None:
    async with a_rig(Shape(redis_blocks=8)) as rig:
        await rig.memory[Tier.REDIS].put_many([put_of(1)], soon())
        assert await rig.store.drop(ByNames((name_of(1),)), soon()) == 0
        assert await rig.right(1) == [False]
        assert rig.memory[Tier.REDIS].names() == []


async def test_a_drop_during_a_demotion_leaves_no_copy() -> None:
    async with a_rig(Shape(nvme_policy=WritePolicy.ON_SEAL, deadline_s=5.0)) as rig:
        rig.nvme.add(Rule(Operation.PUT, Hang()))
        await rig.put(1)
        await rig.nvme.wait_hanging()
        dropping = asyncio.create_task(rig.store.drop(ByNames((name_of(1),)), soon()))
        await asyncio.sleep(0)
        assert await rig.right(1) == [False]
        rig.nvme.heal()
        assert await dropping == 1
        await rig.settled()
        assert await rig.right(1) == [False]
        assert rig.memory[Tier.NVME].names() == []
        assert rig.memory[Tier.DRAM].names() == []


async def test_the_listener_hears_what_tiers_hold_and_nothing_else() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(9):
            await rig.put(n)
            await rig.settled()
        await rig.right(*range(9))
        await rig.right(*range(9))
        await rig.quiet()
        assert rig.said.held[Tier.DRAM] == set(rig.memory[Tier.DRAM].names())
        assert rig.said.held[Tier.NVME] == set(rig.memory[Tier.NVME].names())
        assert len(rig.said.held[Tier.NVME]) >= 6


async def test_what_a_tier_evicts_by_itself_is_no_longer_believed() -> None:
    async with a_rig(Shape(nvme_policy=WritePolicy.ON_SEAL)) as rig:
        await rig.put(1)
        await rig.settled()
        await rig.memory[Tier.NVME].drop(ByNames((name_of(1),)), soon())
        assert await rig.where(1) == {Tier.DRAM}
        await rig.memory[Tier.DRAM].drop(ByNames((name_of(1),)), soon())
        assert await rig.right(1) == [False]


async def test_blocks_that_a_tier_found_at_start_are_served() -> None:
    said = Announced()
    async with a_rig(said=said) as rig:
        await rig.memory[Tier.NVME].put_many([put_of(1), put_of(2)], soon())
        blocks = [held_block(name_of(n), BLOCK_BYTES, BlockOwner(7)) for n in (1, 2)]
        assert rig.store.restore(Tier.NVME, blocks) == 2
        assert await rig.right(1, 2) == [True, True]


async def adopt(rig: Rig, *numbers: int, version: int = 0) -> None:
    """Put blocks into DRAM past the store, and have it take them into its books."""
    requests = [put_of(n, version=version) for n in numbers]
    await rig.memory[Tier.DRAM].put_many(requests, soon())
    written = [Wanted(r.name, BLOCK_BYTES, r.owner) for r in requests]
    rig.store.adopt(written, [checksum(r.payload) for r in requests])
    await rig.store.caught_up()


async def test_what_a_writer_put_into_dram_by_itself_is_like_any_other_block() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(12):
            await adopt(rig, n)
            await rig.settled()
        assert await rig.right(*range(12)) == [True] * 12
        usage = rig.store.stats().tiers[Tier.DRAM].usage
        assert usage.blocks_count == len(rig.memory[Tier.DRAM].names()) <= 4
        assert rig.store.stats().counts.demoted[Tier.NVME] >= 8


async def test_whoever_asks_next_knows_what_a_writer_put_by_itself() -> None:
    async with a_rig(ROOMY) as rig:
        request = put_of(1)
        await rig.memory[Tier.DRAM].put_many([request], soon())
        written = [Wanted(request.name, BLOCK_BYTES, request.owner)]
        rig.store.adopt(written, [checksum(request.payload)])
        assert await rig.store.contains([request.name], soon()) == [{Tier.DRAM}]
        assert rig.store.stats().tiers[Tier.DRAM].usage.blocks_count == 1


async def test_what_went_before_it_was_booked_is_not_booked() -> None:
    async with a_rig(ROOMY) as rig:
        request = put_of(1)
        await rig.memory[Tier.DRAM].put_many([request], soon())
        written = [Wanted(request.name, BLOCK_BYTES, request.owner)]
        rig.store.adopt(written, [checksum(request.payload)])
        await rig.memory[Tier.DRAM].drop(ByNames((request.name,)), soon())
        assert rig.store.stats().tiers[Tier.DRAM].usage.blocks_count == 0


async def test_what_cannot_be_adopted_leaves_dram() -> None:
    async with a_rig(Shape(dram_blocks=1, nvme_blocks=0)) as rig:
        await adopt(rig, 1)
        rig.store.pin([name_of(1)], PinTerms(60.0))
        await adopt(rig, 2)
        names = rig.memory[Tier.DRAM].names()
        assert len(names) == rig.store.stats().tiers[Tier.DRAM].usage.blocks_count == 1
        await rig.store.drop(ByNames((name_of(1), name_of(2))), soon())
        assert rig.memory[Tier.DRAM].names() == []


async def test_the_first_bytes_are_kept_where_they_are_only_below() -> None:
    async with a_rig(ROOMY) as rig:
        for n in range(8):
            await rig.put(n)
            await rig.settled()
        assert await rig.where(0) == {Tier.NVME}
        assert await rig.put(0, version=1) == [PutStatus.DIVERGENT]
        await adopt(rig, 0, version=1)
        assert await rig.where(0) == {Tier.NVME}
        assert name_of(0) not in rig.memory[Tier.DRAM].names()
        assert rig.store.stats().counts.divergent_puts == 2
        assert await rig.put(0) == [PutStatus.STORED]
        assert await rig.right(0) == [True]


async def test_a_tier_that_was_lost_is_empty_in_the_books() -> None:
    async with a_rig(TO_NVME) as rig:
        await rig.put(1)
        await rig.settled()
        rig.store.tier_lost(Tier.NVME)
        assert await rig.where(1) == {Tier.DRAM}


async def test_after_the_end_every_call_is_refused_and_nothing_runs() -> None:
    before = asyncio.all_tasks()
    async with a_rig() as rig:
        await rig.put(1)
        store = rig.store
    with pytest.raises(UnavailableError):
        await store.get_many([GetRequest(name_of(1))], soon())
    assert asyncio.all_tasks() == before


async def test_tiers_that_the_planner_does_not_know_are_refused() -> None:
    with pytest.raises(CallerError):
        async with a_rig(Shape(nvme_blocks=0, planner={"promote_touches_min": 0})):
            pass


async def test_reasons_of_drops_and_refusals_are_counted() -> None:
    async with a_rig(Shape(dram_blocks=2, nvme_blocks=0)) as rig:
        for n in range(5):
            await rig.put(n)
        counts = rig.store.stats().counts
        assert counts.dropped[Tier.DRAM, Reason.NO_TIER_BELOW] == 3
        rig.store.pin([name_of(3)], PinTerms(60.0))

"""Trying an arena out: it takes a block and gives it back, and nobody sees that it did."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvtier.errors import UnavailableError
from kvtier.ports import BlockOwner, Refusal
from kvtier.tiers.arena.directory import NATIVE, PURE, ArenaOperations, Buffer
from kvtier.tiers.arena.holdings import Reservation, Trial, Wanted
from kvtier.tiers.arena.slabs import Lengths, SlabAllocator, slot_bytes
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape, ArenaTier
from kvtier.types import BytesLike, Integers
from tests.harness.waiting import eventually_async
from tests.tiers.contract import Journal, get, get_bytes, name_of, payload_of, put, put_of

SLAB_BYTES = 16 << 10
SLABS = 4
BLOCK = 4 << 10
MIB = 1 << 20

both = pytest.mark.parametrize("operations", [NATIVE, PURE], ids=["native", "pure"])


def small(operations: ArenaOperations = NATIVE, blocks_max: int = 64) -> tuple[ArenaTier, Journal]:
    journal = Journal()
    config = ArenaConfig(SLABS * SLAB_BYTES, SLAB_BYTES, blocks_max)
    return ArenaTier(config, ArenaShape(observer=journal, operations=operations)), journal


def reserved(tier: ArenaTier, count: int, size: int = SLAB_BYTES) -> list[Reservation]:
    wanted = [Wanted(name_of(1000 + n), size, BlockOwner(1)) for n in range(count)]
    return [one for one in tier.reserve_many(wanted) if isinstance(one, Reservation)]


@both
async def test_a_trial_passes_and_leaves_no_trace(operations: ArenaOperations) -> None:
    tier, journal = small(operations)
    assert await put(tier, put_of(1), put_of(2))
    before = (tier.stats(), tier.names(), tier.coldest(9), set(journal.held))
    for _ in range(3 * tier.layout.entries_count):
        assert await tier.try_out() is Trial.PASSED
    assert (tier.stats(), tier.names(), tier.coldest(9), journal.held) == before
    assert not journal.removed
    assert await get_bytes(tier, name_of(1)) == payload_of(1)
    assert await put(tier, *[put_of(n) for n in range(3, 12)])
    assert await get_bytes(tier, name_of(11)) == payload_of(11)
    await tier.close()


async def test_a_trial_of_a_full_arena_evicts_nothing_and_reads_what_is_there() -> None:
    tier, journal = small()
    numbers = range(SLABS * SLAB_BYTES // BLOCK)
    await put(tier, *[put_of(n, BLOCK) for n in numbers])
    assert tier.stats().blocks == len(numbers)
    assert await tier.try_out() is Trial.PASSED
    for n in numbers:
        tier.pin(name_of(n))  # as leases do: nothing can leave any more
    assert await put(tier, put_of(500, BLOCK)) == ["refused"]
    assert await tier.try_out() is Trial.PASSED
    assert journal.held == {name_of(n) for n in numbers}
    await tier.close()


async def test_a_trial_without_a_free_entry_reads_what_is_there() -> None:
    tier, journal = small(blocks_max=2)
    await put(tier, put_of(1), put_of(2))
    assert await tier.try_out() is Trial.PASSED
    assert len(journal.held) == 2
    await tier.close()


async def test_an_arena_that_neither_takes_nor_gives_fails_until_it_does_again() -> None:
    tier, _ = small()
    held = reserved(tier, SLABS)
    assert tier.reserve_many([Wanted(name_of(1), BLOCK, BlockOwner(1))]) == [Refusal.FULL]
    assert await tier.try_out() is Trial.FAILED
    tier.quarantine(held[0])  # its writer may still write: that gives nothing back
    tier.abort(held[1:2])
    assert await tier.try_out() is Trial.PASSED
    tier.abort(held)
    assert await tier.try_out() is Trial.PASSED
    assert tier.stats().blocks_reserved == 0
    await tier.close()


async def test_a_full_arena_whose_blocks_are_all_damaged_fails() -> None:
    tier, _ = small()
    await put(tier, put_of(1, SLAB_BYTES))
    held = reserved(tier, SLABS - 1)
    assert len(held) == SLABS - 1
    assert await tier.try_out() is Trial.PASSED
    memory = tier.frame_memory(name_of(1))
    assert memory is not None
    memory[1][100] ^= 1
    assert await tier.try_out() is Trial.FAILED
    assert not (await get(tier, name_of(1))).is_hit  # the reader finds it and drops it
    assert await tier.try_out() is Trial.PASSED
    await tier.close()


class Held:
    """`ArenaOperations` whose reads wait for leave when they are long enough for a thread."""

    publish = staticmethod(NATIVE.publish)
    remove = staticmethod(NATIVE.remove)
    find = staticmethod(NATIVE.find)
    unchanged = staticmethod(NATIVE.unchanged)
    offsets = staticmethod(NATIVE.offsets)

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.waiting = 0

    def read(
        self,
        directory: Buffer,
        slots: Buffer,
        names: bytes,
        lengths: Integers,
        destinations: Sequence[BytesLike],
    ) -> bytes:
        if sum(len(one) for one in destinations) > MIB:
            self.waiting += 1
            self.leave.wait(60)
        return NATIVE.read(directory, slots, names, lengths, destinations)


async def test_a_trial_does_not_end_while_the_threads_that_copy_are_stuck() -> None:
    operations = Held()
    config = ArenaConfig(48 * MIB, 16 * MIB, 64)
    tier = ArenaTier(config, ArenaShape(operations=operations))
    for n in range(2):
        await put(tier, put_of(n, 9 * MIB))
    stuck = [asyncio.create_task(get(tier, name_of(n))) for n in range(2)]

    async def both_wait() -> bool:
        return operations.waiting == 2

    await eventually_async(both_wait, 30, "both threads are stuck")
    for _ in range(3):  # a hanging trial is given up, and the next one waits for the same answer
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await tier.try_out()
    operations.leave.set()
    assert await tier.try_out() is Trial.PASSED
    assert all(result.is_hit for result in await asyncio.gather(*stuck))
    await tier.close()
    with pytest.raises(UnavailableError):
        await tier.try_out()


def test_any_slot_is_one_of_a_class_in_use_before_a_new_slab() -> None:
    slabs = SlabAllocator(SLAB_BYTES, 2)
    first = slabs.allocate_any()
    assert first is not None
    assert first.size == SLAB_BYTES
    slabs.free([first])
    assert slabs.given_bytes == 0
    small_ones = slabs.allocate_up_to(slot_bytes(BLOCK, Lengths.FIXED), 3)
    fourth = slabs.allocate_any()
    assert fourth is not None
    assert (fourth.size, fourth.slab) == (BLOCK, small_ones[0].slab)
    whole = slabs.allocate_any()
    assert whole is not None
    assert whole.size == SLAB_BYTES
    assert slabs.allocate_any() is None
    slabs.free([*small_ones, fourth, whole])
    assert slabs.given_bytes == 0

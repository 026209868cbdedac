"""The arena under the planner: holds, leases and the policy that does not offer what is held."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.eviction import Retention
from kvtier.core.planner import PlannerConfig, TierConfig
from kvtier.ports import BlockOwner, ByNames, PutRequest, PutStatus
from kvtier.store import StoreTier, TieredStore, TieredStoreConfig, TierWatch, open_store
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape
from kvtier.types import Tier
from kvtier_services.store.arena import GovernedArena, HeldPolicy, RawPins
from kvtier_services.store.leases import LeaseBook, LeaseStream
from tests.tiers.contract import name_of, payload_of, soon

SIZE = 64 << 10
SLOTS = 16


@asynccontextmanager
async def governed(planned: int = SLOTS) -> AsyncIterator[tuple[GovernedArena, TieredStore]]:
    """An arena of 16 slots whose planner plans with `planned` of them."""
    watch = TierWatch()
    config = ArenaConfig(SLOTS * SIZE, 4 * SIZE, 64)
    arena = GovernedArena(config, ArenaShape(observer=watch))
    dram = TierConfig(Tier.DRAM, planned * (SIZE + 128), 1.0, 1.0)
    plan = TieredStoreConfig(planner=PlannerConfig(tiers=(dram,)), tick_s=0.01)
    async with open_store(plan, [StoreTier(arena, RawPins(arena))], watch) as store:
        arena.govern(store)
        yield arena, store


async def put(arena: GovernedArena, *numbers: int) -> list[PutStatus]:
    """As a client of shared memory does."""
    wanted = [Wanted(name_of(n), SIZE, BlockOwner(1)) for n in numbers]
    payloads = [memoryview(payload_of(n, SIZE)) for n in numbers]
    results = await arena.write_many(wanted, payloads, [None] * len(numbers), soon())
    if arena.store is not None:
        await arena.store.caught_up()
    return [result.status for result in results]


async def test_what_clients_put_past_the_planners_room_evicts_by_its_order() -> None:
    async with governed(planned=4) as (arena, store):
        for n in range(8):
            assert await put(arena, n) == [PutStatus.STORED]
        assert {n for n in range(8) if arena.held(name_of(n))} == {4, 5, 6, 7}
        assert store.stats().tiers[Tier.DRAM].usage.blocks_count == 4


@pytest.mark.parametrize("planned", [4, 2 * SLOTS], ids=["planner", "arena"])
async def test_what_was_put_with_a_higher_priority_goes_last(planned: int) -> None:
    async with governed(planned) as (arena, store):
        dear = [Wanted(name_of(n), SIZE, BlockOwner(1), Retention(80)) for n in (0, 1)]
        cheap = [Wanted(name_of(2), SIZE, BlockOwner(1), Retention(10))]
        for wanted in (dear, cheap):
            payloads = [memoryview(bytes(SIZE))] * len(wanted)
            await arena.write_many(wanted, payloads, [None] * len(wanted), soon())
        await store.caught_up()
        room = min(planned, SLOTS) - 3
        for n in range(10, 10 + room):
            await put(arena, n)
        assert arena.held(name_of(2)) is not None
        await put(arena, 50)
        assert arena.held(name_of(2)) is None
        for n in range(60, 60 + 3 * SLOTS):
            await put(arena, n)
        assert arena.held(name_of(0)) is not None
        assert arena.held(name_of(1)) is not None


async def test_a_lease_outlasts_the_planners_wish_and_no_longer() -> None:
    async with governed(planned=4) as (arena, _):
        book, stream = LeaseBook(arena), LeaseStream()
        await put(arena, 0, 1)
        leased = book.take(stream, [name_of(0), name_of(9)])
        assert [one is not None for one in leased] == [True, False]
        for n in range(10, 40):
            await put(arena, n)
        assert arena.held(name_of(0)) is not None
        assert arena.held(name_of(1)) is None
        book.close(stream)
        assert stream.ended.is_set()
        assert (book.count, book.leased_bytes) == (0, 0)
        await put(arena, 50)
        assert arena.held(name_of(0)) is None


async def test_a_drop_does_not_wait_for_a_lease() -> None:
    async with governed() as (arena, store):
        book, stream = LeaseBook(arena), LeaseStream()
        await put(arena, 0)
        book.take(stream, [name_of(0)])
        assert await store.drop(ByNames((name_of(0),)), soon()) == 1
        assert arena.held(name_of(0)) is None
        book.close(stream)
        assert await put(arena, 0) == [PutStatus.STORED]


async def test_leases_take_no_more_than_their_share() -> None:
    async with governed() as (arena, _):
        book, stream = LeaseBook(arena), LeaseStream()
        await put(arena, *range(12))
        leased = book.take(stream, [name_of(n) for n in range(12)])
        assert sum(one is not None for one in leased) == SLOTS // 2
        book.release([one.lease_id for one in leased if one is not None][:1])
        assert book.take(stream, [name_of(11)])[0] is not None
        assert book.take(stream, [name_of(10)])[0] is None


async def test_a_pin_of_the_arenas_server_holds_against_the_planner() -> None:
    async with governed(planned=4) as (arena, _):
        await put(arena, 0)
        first, second = arena.pin(name_of(0)), arena.pin(name_of(0))
        assert first is not None
        assert second is not None
        for n in range(10, 40):
            await put(arena, n)
        arena.unpin(name_of(0), first)
        await put(arena, 50)
        assert arena.held(name_of(0)) is not None
        arena.unpin(name_of(0), second)
        arena.unpin(name_of(0), second)
        await put(arena, 51)
        assert arena.held(name_of(0)) is None
        assert arena.pin(name_of(0)) is None


async def test_after_release_clients_put_nothing() -> None:
    async with governed() as (arena, store):
        arena.release()
        assert await put(arena, 1) == [PutStatus.ERROR]
        assert arena.pin(name_of(1)) is None
        request = PutRequest(name_of(2), payload_of(2, SIZE), BlockOwner(1))
        assert (await store.put_many([request], soon()))[0].status is PutStatus.STORED


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "touch", "hold", "let_go", "evict", "drop"]),
            st.integers(0, 7),
        ),
        max_size=60,
    )
)
def test_what_is_held_is_never_offered_and_what_is_not_always_is(
    steps: list[tuple[str, int]],
) -> None:
    policy = HeldPolicy()
    there: set[int] = set()
    held: dict[int, int] = {}
    for now, (step, n) in enumerate(steps):
        name = name_of(n)
        if step == "store":
            policy.on_stored([name], float(now))
            there.add(n)
        elif step == "touch":
            policy.on_touched([name], float(now))
        elif step == "hold":
            policy.hold([name])
            held[n] = held.get(n, 0) + 1
        elif step == "let_go" and held.get(n):
            policy.let_go([name])
            held[n] -= 1
        elif step == "evict":
            for victim in policy.victims(1, float(now)):
                policy.on_removed([victim])
                there.discard(int.from_bytes(victim.key, "little"))
        elif step == "drop":
            policy.on_removed([name])
            there.discard(n)
        free = {name_of(i) for i in there if not held.get(i)}
        assert set(policy.victims(8, float(now))) == free

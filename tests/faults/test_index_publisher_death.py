"""A publisher dies, is frozen, or is forgotten; or the index itself is frozen for a while."""

import asyncio

import grpc.aio

from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import Corpus, worker
from tests.support.index_cluster import (
    LEASE_MS,
    PublisherSpec,
    channel_to,
    converged,
    counts_of,
    fleet_view,
    match,
    start_index,
    start_publishers,
)
from tests.support.raw_publisher import RawPublisher, stored, unary

CHAIN = Corpus().hashes(0, 64)


async def test_a_killed_publisher_is_hidden_for_good_and_its_next_life_brings_only_its_own(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    victim, other = await start_publishers(
        processes,
        PublisherSpec("victim", [index.address]),
        PublisherSpec("other", [index.address]),
    )
    await victim.ask("fill", chains=50, blocks=64)
    await other.ask("fill", chains=50, blocks=32)
    await converged(index, [victim, other])
    async with channel_to(index.address) as channel:
        assert await match(channel, CHAIN) == {"victim": 64 * 16, "other": 32 * 16}
        first = (await fleet_view(channel))["victim"]
        await asyncio.to_thread(victim.process.kill)

        async def is_hidden() -> bool:
            return "victim" not in await match(channel, CHAIN)

        await eventually_async(is_hidden, LEASE_MS / 1000 + 30, "the lease ends")
        for _ in range(200):
            assert await match(channel, CHAIN) == {"other": 32 * 16}, "no stale answer after that"
        await converged(index, [other])
        assert (await fleet_view(channel))["victim"].hidden, "its blocks wait out the grace period"

        await asyncio.to_thread(victim.process.restart)
        await victim.ask("store", chain=0, begin=0, end=3)
        await converged(index, [victim, other])
        assert await match(channel, CHAIN) == {"victim": 3 * 16, "other": 32 * 16}
        second = (await fleet_view(channel))["victim"]
        assert first.epoch != second.epoch
    index.clean_log()


async def test_a_publisher_frozen_for_two_leases_comes_back_without_a_snapshot_or_a_storm(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    (publisher,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
    await publisher.ask("fill", chains=50, blocks=64)
    await converged(index, [publisher])
    before = await publisher.ask("stats")
    async with channel_to(index.address) as channel:
        counts_before = await counts_of(channel)
        await asyncio.to_thread(publisher.process.freeze)

        async def is_stalled() -> bool:
            view = (await fleet_view(channel))["w"]
            return view.hidden and view.age_ms >= 2 * LEASE_MS

        await eventually_async(is_stalled, 30, "two leases of silence")
        assert await match(channel, CHAIN) == {}
        publisher.process.thaw()
        await publisher.ask("store", chain=90, begin=0, end=8)
        await converged(index, [publisher])

        after, counts_after = await publisher.ask("stats"), await counts_of(channel)
        assert after["epoch"] == before["epoch"]
        assert after["snapshots_begun"] == before["snapshots_begun"]
        assert after["streams"][0]["opened"] - before["streams"][0]["opened"] <= 1
        for name in ("need_snapshot", "replaced", "staged", "drift"):
            assert counts_after[name] == counts_before[name], name
        assert counts_after["blocks_stored"] - counts_before["blocks_stored"] == 8, "only the news"
    index.clean_log()


async def test_a_publisher_frozen_until_it_is_forgotten_is_back_as_soon_as_it_runs(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, grace_ms=200)
    (publisher,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
    await publisher.ask("fill", chains=5, blocks=64)
    await converged(index, [publisher])
    await asyncio.to_thread(publisher.process.freeze)
    await converged(index, [])
    async with channel_to(index.address) as channel:

        async def is_forgotten() -> bool:
            return not await fleet_view(channel)

        await eventually_async(is_forgotten, 30, "lease and grace end")
    publisher.process.thaw()
    await converged(index, [publisher])
    stats = await publisher.ask("stats")
    assert stats["refusals"] == []
    assert stats["snapshots_begun"] == 2
    index.clean_log()


async def test_an_index_frozen_for_two_leases_hides_nobody(processes: ProcessRunner) -> None:
    index = await start_index(processes)
    (publisher,) = await start_publishers(processes, PublisherSpec("real", [index.address]))
    await publisher.ask("fill", chains=5, blocks=64)
    await converged(index, [publisher])
    async with channel_to(index.address) as channel:
        crowd = [RawPublisher(channel, worker(f"w{n}"), epoch=7 + n) for n in range(20)]
        for one in crowd:
            await one.join([stored(CHAIN[:8])])
        beating = asyncio.create_task(_beat(crowd))
        hidden: list[str] = []
        watching = asyncio.create_task(_note_hidden(channel, hidden))
        everybody = {"real": 64 * 16} | {f"w{n}": 8 * 16 for n in range(20)}

        async def is_complete() -> bool:
            return await match(channel, CHAIN) == everybody

        await eventually_async(is_complete, 30, "all are there")
        await asyncio.to_thread(index.process.freeze)
        await asyncio.sleep(2 * LEASE_MS / 1000)  # the fault itself
        index.process.thaw()
        # Two leases of the time after: nobody may be missing from a single answer.
        end = asyncio.get_running_loop().time() + 2 * LEASE_MS / 1000
        answers = 0
        while asyncio.get_running_loop().time() < end:
            assert await match(channel, CHAIN) == everybody
            answers += 1
        assert answers > 10
        assert hidden == []
        for task in (beating, watching):
            task.cancel()
        await asyncio.gather(beating, watching, return_exceptions=True)
        for one in crowd:
            one.cancel()
    index.clean_log()


async def _beat(crowd: list[RawPublisher]) -> None:
    while True:
        for one in crowd:
            await one.heartbeat(0)
        await asyncio.sleep(LEASE_MS / 4000)


async def _note_hidden(channel: grpc.aio.Channel, hidden: list[str]) -> None:
    async for event in unary(channel, "WatchFleet")(pb.WatchFleetRequest()):
        if event.kind == pb.FleetEvent.KIND_HIDDEN:
            hidden.append(event.holder.hello.instance)

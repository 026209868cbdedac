"""The index dies by SIGKILL and comes back empty: its publishers fill it again, by themselves."""

import asyncio
import contextlib

import grpc.aio

from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.proxy import Direction, Faults, TcpProxy
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import (
    PublisherSpec,
    channel_to,
    converged,
    fleet_view,
    match,
    start_index,
    start_publishers,
    stats_of,
)

TENANTS = (("alice", 16), ("bob", 16), ("carol", 32))
APART = 1000
"""A chain that churn leaves alone."""


async def test_an_index_killed_under_load_is_filled_again_by_three_tenants_on_two_models(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    specs = [
        PublisherSpec(name, [index.address], block_tokens=size, salt=f"salt-{name}", seed=number)
        for number, (name, size) in enumerate(TENANTS)
    ]
    publishers = await start_publishers(processes, *specs)
    for publisher in publishers:
        await publisher.ask("fill", chains=20, blocks=40)
        await publisher.ask("store", chain=APART, begin=0, end=40)
        await publisher.ask("churn", pause_s=0.002)
        await publisher.flushed()
    async with channel_to(index.address) as channel:
        before = await stats_of(channel)
    await asyncio.to_thread(index.process.kill)
    # Children of blocks that only the dead index was told of.
    for publisher in publishers:
        await publisher.ask("store", chain=APART, begin=40, end=64)
    await asyncio.to_thread(index.process.restart)
    steps = [await publisher.ask("quiet") for publisher in publishers]
    await converged(index, publishers)

    async with channel_to(index.address) as channel:
        after = await stats_of(channel)
        assert before.index_epoch != after.index_epoch, "it is another process"
        assert len(before.holders) == len(after.holders) == 3
        assert min(steps) > 20, "there was load"
        for publisher in publishers:
            chain, size = publisher.spec.corpus.hashes(APART, 64), publisher.spec.block_tokens
            assert await match(channel, chain, size) == {publisher.spec.name: 64 * size}
            stats = await publisher.ask("stats")
            assert stats["streams"][0]["index_epoch"] == after.index_epoch
    index.clean_log()


async def test_a_large_holder_that_resyncs_slowly_keeps_nobody_else_waiting(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    with TcpProxy(("127.0.0.1", index.port)) as slow:
        small, large = await start_publishers(
            processes,
            PublisherSpec("small", [index.address], seed=1),
            PublisherSpec("large", [slow.address], seed=2, config={"silence_s": 1.5}),
        )
        await small.ask("fill", chains=5, blocks=40)
        await large.ask("fill", chains=3200, blocks=64)
        await converged(index, [small, large])

        await asyncio.to_thread(index.process.kill)
        slow.set(Direction.TO_SERVER, Faults(bytes_per_s=500_000))
        await asyncio.to_thread(index.process.restart)
        corpus = small.spec.corpus
        async with channel_to(index.address) as channel:

            async def is_back() -> bool:
                return await match(channel, corpus.hashes(0, 64)) == {"small": 40 * 16}

            await eventually_async(is_back, 30, "the small holder is matched again")

            async def is_resyncing() -> bool:
                view = await fleet_view(channel)
                return "large" in view and "snapshot_pending" in view["large"].reason

            await eventually_async(is_resyncing, 30, "the large holder has said Hello")
            view = await fleet_view(channel)
            assert view["small"].trust == pb.TRUST_EXACT
            # While the large one's snapshot is on its way the small one's news pass it.
            for length in range(41, 51):
                await small.ask("store", chain=0, begin=length - 1, end=length)
                await small.flushed()
                assert await match(channel, corpus.hashes(0, 64)) == {"small": length * 16}
            assert "snapshot_pending" in (await fleet_view(channel))["large"].reason
            assert slow.counters(Direction.TO_SERVER).bytes_throttled > 0
            await converged(index, [small, large])
            # It took longer than the publisher bears silence, and was not begun again and again.
            stats = await large.ask("stats")
            assert 2 <= stats["snapshots_begun"] <= 3
    index.clean_log()


async def test_an_index_that_dies_again_and_again_ends_up_right(processes: ProcessRunner) -> None:
    index = await start_index(processes)
    (publisher,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
    await publisher.ask("fill", chains=200, blocks=64)
    await publisher.ask("churn", pause_s=0.002)
    for _ in range(3):
        async with channel_to(index.address) as channel:

            async def is_known() -> bool:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return "w" in await fleet_view(channel)
                return False

            # Killed as soon as it has heard of the publisher: as a rule in the snapshot.
            await eventually_async(is_known, 30, "the publisher is back")
        await asyncio.to_thread(index.process.kill)
        await asyncio.to_thread(index.process.restart)
    await publisher.ask("quiet")
    await converged(index, [publisher])
    assert index.process.starts_count == 4
    index.clean_log()

"""Messages between publishers and the index get lost, doubled, swapped or changed on the way."""

import asyncio

import numpy as np

from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import Corpus, worker
from tests.support.index_cluster import (
    PublisherSpec,
    channel_to,
    converged,
    counts_of,
    fleet_view,
    match,
    start_index,
    start_publishers,
)
from tests.support.publish_proxy import Mischief, honest, publish_proxy
from tests.support.raw_publisher import RawPublisher, removed, stored

CHAIN = Corpus().hashes(0, 64)
CHATTY = {"coalesce_s": 0.0, "digest_interval_s": 0.3}
"""Many small batches, digests with every other heartbeat."""


async def test_lost_doubled_and_swapped_batches_are_made_good_under_load(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    async with publish_proxy(index.address) as proxy:
        publishers = await start_publishers(
            processes,
            PublisherSpec("a", [proxy.address], seed=1, salt="a", config=CHATTY),
            PublisherSpec("b", [proxy.address], seed=2, salt="b", block_tokens=32, config=CHATTY),
        )
        proxy.rule = mischief = Mischief(seed=7, drop=0.15, double=0.15, swap=0.15)
        for publisher in publishers:
            await publisher.ask("fill", chains=50, blocks=64)
            await publisher.ask("churn", pause_s=0.002)

        async def is_enough() -> bool:
            return min(mischief.counts[f"{what}_batch"] for what in KINDS) >= 20

        await eventually_async(is_enough, 30, "twenty faults of each kind")
        for publisher in publishers:
            await publisher.ask("quiet")
        # The faults go on while the last changes are on their way, and end only then.
        await asyncio.sleep(0.5)
        proxy.rule = honest
        await converged(index, publishers)
    async with channel_to(index.address) as channel:
        counts = await counts_of(channel)
        assert counts["gap"] > 0
        assert counts["duplicate"] > 0
    index.clean_log()


KINDS = ("dropped", "doubled", "swapped")


async def test_a_snapshot_with_holes_is_never_taken_for_the_whole(processes: ProcessRunner) -> None:
    index = await start_index(processes)
    async with publish_proxy(index.address) as proxy:
        spec = PublisherSpec("w", [proxy.address], config=CHATTY)
        (publisher,) = await start_publishers(processes, spec)
        lost = 0

        def lose_second_chunk(
            _: int, kind: str, request: pb.PublishRequest
        ) -> list[pb.PublishRequest]:
            nonlocal lost
            if kind == "snapshot" and request.snapshot.number == 1 and lost < 3:
                lost += 1
                return []
            return [request]

        await publisher.ask("fill", chains=1000, blocks=64)
        await publisher.flushed()
        proxy.rule = lose_second_chunk
        await asyncio.to_thread(index.process.kill)
        await asyncio.to_thread(index.process.restart)
        await converged(index, [publisher])
    async with channel_to(index.address) as channel:
        counts = await counts_of(channel)
        assert lost == 3
        assert counts["aborted"] >= 3
        assert counts["replaced"] == 1
    index.clean_log()


async def test_a_lost_last_batch_is_noticed_though_nothing_follows_it(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    async with publish_proxy(index.address) as proxy:
        (publisher,) = await start_publishers(processes, PublisherSpec("w", [proxy.address]))
        await publisher.ask("fill", chains=1, blocks=8)
        await publisher.flushed()
        lost: list[int] = []

        def lose_one(_: int, kind: str, request: pb.PublishRequest) -> list[pb.PublishRequest]:
            if kind == "batch" and not lost:
                lost.append(request.batch.seq)
                return []
            return [request]

        proxy.rule = lose_one
        await publisher.ask("store", chain=0, begin=8, end=12)
        await converged(index, [publisher])
        assert len(lost) == 1
        stats = await publisher.ask("stats")
        assert stats["seq"] == lost[0], "it was the last one"
        assert (stats["resends"], stats["snapshots_begun"]) == (1, 1)
    index.clean_log()


async def test_a_batch_that_was_changed_on_its_way_is_found_by_its_digest(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    async with publish_proxy(index.address) as proxy:
        spec = PublisherSpec("w", [proxy.address], config=CHATTY)
        (publisher,) = await start_publishers(processes, spec)
        await publisher.ask("fill", chains=1, blocks=8)
        await publisher.flushed()
        forged: list[int] = []

        def forge_one(_: int, kind: str, request: pb.PublishRequest) -> list[pb.PublishRequest]:
            if kind == "batch" and not forged:
                forged.append(request.batch.seq)
                hashes = np.frombuffer(request.batch.hashes, "<u8").copy()
                hashes[0] ^= np.uint64(1)
                request.batch.hashes = hashes.tobytes()
            return [request]

        proxy.rule = forge_one
        await publisher.ask("store", chain=0, begin=8, end=12)
        await converged(index, [publisher])
        assert len(forged) == 1
        assert (await publisher.ask("stats"))["snapshots_begun"] == 2
    async with channel_to(index.address) as channel:
        assert (await counts_of(channel))["drift"] == 1
    index.clean_log()


async def test_batches_in_any_order_and_twice_are_applied_once_and_in_order(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=20_000)
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("raw"), epoch=7)
        await publisher.join([])
        batches = {seq: stored(CHAIN[seq - 1 : seq]) for seq in range(1, 33)}
        batches[33] = removed(CHAIN[0:1])
        batches[34] = stored(CHAIN[0:1])
        order = np.random.default_rng(3).permutation(np.repeat(np.arange(1, 35), 2)).tolist()
        for seq in order:
            await publisher.batch(seq, batches[seq])
        await publisher.acked(34)
        assert await match(channel, CHAIN) == {"raw": 32 * 16}
        view = (await fleet_view(channel))["raw"]
        assert view.trust == pb.TRUST_EXACT
        counts = await counts_of(channel)
        assert counts["applied"] == 34
        assert counts["gap"] > 0
        assert counts["duplicate"] + counts["gap"] + counts["apply"] >= len(order)
        publisher.cancel()
    index.clean_log()


async def test_a_sequence_that_runs_backwards_is_told_apart_from_a_duplicate(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=20_000)
    async with channel_to(index.address) as channel:
        first = RawPublisher(channel, worker("raw"), epoch=7)
        await first.join([])
        for seq in range(1, 6):
            await first.batch(seq, stored(CHAIN[seq - 1 : seq]))
        await first.acked(5)
        first.cancel()
        # The same epoch again, but it claims to have said less: never a silent reset.
        second = RawPublisher(channel, worker("raw"), epoch=7)
        answer = await second.hello(seq=2)
        assert answer.welcome.resume_after_seq == 5, "told how far the index is"
        await second.batch(1, removed(CHAIN[:5]))
        await second.acked(5)
        assert await match(channel, CHAIN) == {"raw": 5 * 16}
        view = (await fleet_view(channel))["raw"]
        assert (view.trust, view.reason) == (pb.TRUST_DEGRADED, "regressed")
        assert (await counts_of(channel))["protocol_error"] == 2
        second.cancel()
    index.clean_log()

"""Publishers, routers and followers that take more than their share: memory stays bounded."""

import asyncio

import grpc
import grpc.aio
import numpy as np

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.limits import (
    BATCH_BLOCKS_MAX,
    BATCH_EVENTS_MAX,
    RESERVATIONS_PER_ROUTER_MAX,
    RESERVED_BLOCKS_PER_ROUTER_MAX,
)
from kvtier.types import Tier
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import Corpus, worker
from tests.support.index_cluster import (
    IndexProcess,
    PublisherSpec,
    channel_to,
    converged,
    counts_of,
    fleet_view,
    match,
    start_index,
    start_publishers,
    stats_of,
)
from tests.support.raw_publisher import RawPublisher, events, stored, unary

CHAIN = Corpus().hashes(0, 64)
LARGE = np.arange(1, BATCH_BLOCKS_MAX + 1, dtype=np.uint64)
MIB = 1 << 20
LONG_MS = 60_000


def rss_of(index: IndexProcess) -> int:
    return index.process.usage().rss_bytes


async def is_cut_off(publisher: RawPublisher, pieces: list[EventBatch]) -> bool:
    """Send all but the last chunk of a snapshot; whether the index ends the stream, then or later.

    It may have read few of them by the time that all were said.
    """
    try:
        for number in range(len(pieces) - 1):
            await publisher.chunk(0, pieces, number)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # a write into a stream that has ended
    # grpc says INTERNAL where a write was under way when the index ended the call.
    codes = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL}
    return await asyncio.wait_for(publisher.ended(), 60) in codes


# ---- publishers


async def test_a_publisher_over_its_limit_is_cut_off_told_and_taken_back_when_it_fits(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, holder_blocks_max=10_000)
    greedy, modest = await start_publishers(
        processes,
        PublisherSpec("greedy", [index.address], seed=1, config={"refused_retry_s": 0.3}),
        PublisherSpec("modest", [index.address], seed=2),
    )
    await modest.ask("fill", chains=100, blocks=64)
    await converged(index, [modest, greedy])
    await greedy.ask("fill", chains=400, blocks=64)

    async def is_told() -> bool:
        told = (await greedy.ask("stats"))["refusals"]
        return bool(told) and "RESOURCE_EXHAUSTED" in told[-1]

    await eventually_async(is_told, 30, "the greedy one is told")
    async with channel_to(index.address) as channel:
        assert (await counts_of(channel))["refused_holder_full"] > 0
        held = (await fleet_view(channel))["greedy"].shards.get(0, {}).get(Tier.GPU, CHAIN[:0])
        assert len(held) <= 10_000 + BATCH_BLOCKS_MAX
        assert (await match(channel, modest.spec.corpus.hashes(0, 64)))["modest"] == 64 * 16
    await greedy.ask("clear")
    await greedy.ask("fill", chains=50, blocks=64)
    await converged(index, [modest, greedy])
    index.clean_log()


async def test_a_snapshot_without_an_end_is_not_collected_for_ever(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS, holder_blocks_max=200_000)
    async with channel_to(index.address) as channel:
        for name, piece, most in (("full", LARGE, 400), ("empty", LARGE[:0], 20_000)):
            publisher = RawPublisher(channel, worker(name), epoch=7)
            await publisher.hello()
            before = rss_of(index)
            pieces = [stored(piece) if len(piece) else events([])] * (most + 1)

            assert await is_cut_off(publisher, pieces), name
            assert rss_of(index) - before < 96 * MIB, name
        assert await match(channel, LARGE[:8]) == {}
        assert (await counts_of(channel))["refused_holder_full"] == 2
    index.clean_log()


async def test_batches_behind_a_gap_that_never_closes_are_kept_within_bounds(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("gap"), epoch=7)
        await publisher.join([])
        await publisher.answer("ack")
        before = rss_of(index)
        piece = stored(LARGE[:16_384])
        for seq in range(2, 1_202):  # 150 MiB
            await publisher.batch(seq, piece)
        await publisher.heartbeat(1_201)
        while (await publisher.answer("resend")).resend.from_seq != 1:
            pass

        async def are_read() -> bool:
            return (await counts_of(channel))["gap"] >= 1_200

        await eventually_async(are_read, 30, "all are read")
        assert rss_of(index) - before < 128 * MIB
        # What there was no room for is a gap like any other.
        await publisher.batch(1, piece)
        await publisher.heartbeat(1_201)
        while (asked := (await publisher.answer("resend")).resend.from_seq) == 1:
            pass  # asked again before it came
        assert 2 < asked < 1_201
        publisher.cancel()
    index.clean_log()


async def test_hundreds_of_publishers_that_come_and_go_leave_nothing(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:

        async def pass_by(names: range) -> None:
            for number in names:
                one = RawPublisher(channel, worker(f"w{number}"), epoch=number + 1)
                await one.join([stored(CHAIN + np.uint64(number))])
                await one.answer("ack")
                await one.goodbye()
                assert await one.ended() is grpc.StatusCode.OK

        await pass_by(range(50))
        before = rss_of(index)
        await asyncio.gather(*(pass_by(range(100 * n, 100 * n + 50)) for n in range(1, 11)))
        stats = await stats_of(channel)
        assert (stats.blocks, stats.holdings, len(stats.holders)) == (0, 0, 0)
        assert rss_of(index) - before < 24 * MIB
    index.clean_log()


# ---- routers


async def reserving(
    channel: grpc.aio.Channel, router: str, wanted: list[pb.Reservation]
) -> tuple[list[pb.ReserveResponse], grpc.aio.StreamStreamCall[object, object]]:
    """A router's open stream and the answers to all that it wanted."""
    call = rpc.call(channel, rpc.INDEX, "Reserve")()
    await call.write(pb.ReserveRequest(hello=pb.RouterHello(router=router, epoch=7)))
    answers = []
    for reservation in wanted:
        await call.write(pb.ReserveRequest(reserve=reservation))
        answers.append(await call.read())
    return answers, call


def reservation(key: object, hashes: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> pb.Reservation:
    return pb.Reservation(
        key=str(key),
        instance="w",
        ttl_ms=60_000,
        prefill_tokens=1,
        predicted_hashes=hashes.tobytes(),
    )


async def test_a_router_that_reserves_without_end_meets_its_caps_and_takes_all_along_when_it_goes(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("w"), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        await publisher.answer("ack")
        before = rss_of(index)
        many = [reservation(n, CHAIN[:16]) for n in range(RESERVATIONS_PER_ROUTER_MAX + 50)]
        answers, greedy = await reserving(channel, "greedy", many)
        granted = [answer.granted for answer in answers]
        assert granted == [True] * RESERVATIONS_PER_ROUTER_MAX + [False] * 50
        assert {answer.reason for answer in answers[-50:]} <= {"router_full", "worker_full"}
        assert await match(channel, CHAIN) == {"w": 16 * 16}

        wide = [reservation(n, LARGE + np.uint64(n << 20)) for n in range(40)]
        answers, broad = await reserving(channel, "broad", wide)
        blocks = sum(BATCH_BLOCKS_MAX for answer in answers if answer.granted)
        assert blocks <= RESERVED_BLOCKS_PER_ROUTER_MAX
        assert not answers[-1].granted
        assert rss_of(index) - before < 256 * MIB

        for call in (greedy, broad):
            call.cancel()

        async def is_over() -> bool:
            (holder,) = (await stats_of(channel)).holders
            return holder.holder.reserved_requests == 0

        await eventually_async(is_over, 30, "all ends with the streams")
        assert await match(channel, CHAIN) == {"w": 8 * 16}
        answers, honest = await reserving(channel, "honest", many[:1])
        assert answers[0].granted
        honest.cancel()
        publisher.cancel()
    index.clean_log()


async def test_the_end_of_a_routers_old_stream_leaves_what_its_new_one_reserved(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("w"), epoch=7)
        await publisher.join([])
        await publisher.answer("ack")
        _, old = await reserving(channel, "r", [reservation("a", CHAIN[:4])])
        answers, new = await reserving(channel, "r", [reservation("b", CHAIN[:6])])
        assert answers[0].granted
        old.cancel()
        # Something that happens after the end of the old stream, on the same connection.
        for _ in range(20):
            assert await match(channel, CHAIN) == {"w": 6 * 16}
        new.cancel()

        async def is_over() -> bool:
            return await match(channel, CHAIN) == {}

        await eventually_async(is_over, 30, "with the last stream all is over")
        publisher.cancel()
    index.clean_log()


# ---- followers


async def test_a_follower_that_stops_reading_is_cut_off_and_costs_bounded_memory(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel, channel_to(index.address) as lazy:
        publisher = RawPublisher(channel, worker("w"), epoch=7)
        await publisher.join([])
        await publisher.answer("ack")
        sleeper = unary(lazy, "Snapshot")(pb.SnapshotRequest(follow=True))
        while not (await sleeper.read()).complete:
            pass
        assert (await stats_of(channel)).followers == 1
        before = peak = rss_of(index)
        clears = [(EventKind.CLEAR_TIER, Tier.GPU, LARGE[:0])] * BATCH_EVENTS_MAX
        batch = convert.batch_to(events(clears), 0)  # long messages, and little work
        sent = 0
        for seq in range(1, 2_401):  # half a GiB, of which half may wait
            batch.seq = seq
            await publisher.raw(pb.PublishRequest(batch=batch))
            sent += batch.ByteSize()
            if seq % 100 == 0:
                await publisher.acked(seq)
                peak = max(peak, rss_of(index))
                if peak - before > 200 * MIB and rss_of(index) < peak - 100 * MIB:
                    break  # its queue was dropped
        assert sent > 256 * MIB
        assert peak - before < 400 * MIB
        assert rss_of(index) - before < 150 * MIB
        code = grpc.StatusCode.OK
        try:
            while await sleeper.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            code = error.code()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

        async def is_gone() -> bool:
            return (await stats_of(channel)).followers == 0

        await eventually_async(is_gone, 30, "it is let go")
        publisher.cancel()
    index.clean_log()

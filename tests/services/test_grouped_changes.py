"""Changes in groups: reservations on their way to an index, and what an index tells replicas."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import pytest

from kvtier.client import IndexClient, ReserveSession
from kvtier.client.reservations import ReserveDesk
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.core.workers import OwnReservation, WorkerName
from kvtier.errors import CallerError, OverloadedError
from kvtier.replica.picture import Picture
from kvtier.replica.predictions import OwnReservations
from kvtier.sections import DialConfig, ListenConfig
from kvtier.types import InstanceId
from kvtier.wire import convert, rpc, transport
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import LoopThread
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.feed import Receiver
from kvtier_services.index.main import RunningIndex, serve
from tests.harness.waiting import eventually_async
from tests.support.raw_publisher import RawPublisher, unary, worker_info

CHAIN = np.arange(1, 65, dtype=np.uint64)
WORKER = WorkerName(InstanceId("w1"), 0)


@asynccontextmanager
async def an_index() -> AsyncIterator[tuple[RunningIndex, grpc.aio.Channel]]:
    config = IndexConfig(listen=ListenConfig(bind="127.0.0.1:0"), lease_ms=60_000)
    async with serve(config, io.StringIO()) as running:
        channel = transport.new_channel(f"127.0.0.1:{running.port}")
        try:
            await RawPublisher(channel, worker_info("w1"), epoch=7).join([])
            yield running, channel
        finally:
            await channel.close()


@asynccontextmanager
async def a_session(running: RunningIndex, router: str) -> AsyncIterator[ReserveSession]:
    dial = DialConfig(targets=(f"127.0.0.1:{running.port}",))
    async with IndexClient(dial) as client, client.reservations(router) as session:
        yield session


def wanted(number: int, tokens: int = 10) -> OwnReservation:
    return OwnReservation(f"k{number}", WORKER, tokens, 60_000, CHAIN[:2])


def reserved(running: RunningIndex) -> int:
    holder = running.state.fleet.find_worker(WORKER.instance, WORKER.dp_rank)
    return 0 if holder is None else running.state.routers.reserved(holder).prefill_tokens


async def until_reserved(running: RunningIndex, tokens: int) -> None:
    await eventually_async(lambda: _is(running, tokens), 30, f"{tokens} tokens are reserved")


async def _is(running: RunningIndex, tokens: int) -> bool:
    return reserved(running) == tokens


async def test_many_reservations_told_at_once_all_arrive_and_are_all_given_back() -> None:
    async with an_index() as (running, _), a_session(running, "r1") as session:
        for number in range(1000):
            session.tell(wanted(number))
        await until_reserved(running, 10_000)
        for number in range(1, 1000):
            session.release(f"k{number}")
        await until_reserved(running, 10)
        assert session.live_count == 1


async def test_a_key_that_is_given_back_and_reserved_again_at_once_is_reserved() -> None:
    async with an_index() as (running, _), a_session(running, "r1") as session:
        session.tell(wanted(0))
        session.tell(wanted(1))
        await until_reserved(running, 20)
        for _ in range(3):
            session.release("k1")
            session.tell(wanted(1, tokens=70))
        session.tell(wanted(2))
        session.release("k2")
        await until_reserved(running, 80)


async def test_whoever_waits_is_answered_amid_many_that_do_not() -> None:
    async with an_index() as (running, _), a_session(running, "r1") as session:
        for number in range(100):
            session.tell(wanted(number))
        answers = await asyncio.gather(*(session.reserve(wanted(n)) for n in range(200, 210)))
        assert all(answer.is_granted for answer in answers)
        await until_reserved(running, 1100)


async def test_what_another_thread_tells_a_desk_is_reserved_until_given_back_or_closed() -> None:
    async with an_index() as (running, _):
        thread = LoopThread("desk")
        thread.start()
        client = IndexClient(DialConfig(targets=(f"127.0.0.1:{running.port}",)))
        desk = ReserveDesk(thread, client.reservations("r1"))
        await asyncio.to_thread(desk.open, 10.0)
        for number in range(300):
            desk.tell(wanted(number))
        await until_reserved(running, 3000)
        for number in range(299):
            desk.release(f"k{number}")
        await until_reserved(running, 10)
        await asyncio.to_thread(desk.close, 10.0)
        await until_reserved(running, 0)
        await asyncio.wrap_future(thread.submit(client.close()))
        await asyncio.to_thread(thread.stop)
        desk.tell(wanted(1000))  # nobody listens any more, which is no error
        assert reserved(running) == 0


async def test_an_index_that_takes_no_groups_is_told_one_by_one() -> None:
    """An index of an earlier version does not answer the question whether it takes groups."""
    heard: list[str] = []

    async def reserve(_: AsyncIterator[pb.ReserveRequest], context: object) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            heard.append(request.WhichOneof("message"))

    async def other(_: object, context: object) -> None:
        raise AssertionError

    server = transport.new_server()
    port = transport.open_port(server, "127.0.0.1:0", None)
    names = {**dict.fromkeys(rpc.methods(rpc.INDEX), other), "Reserve": reserve}
    server.add_generic_rpc_handlers((rpc.service_handler(rpc.INDEX, names),))
    await server.start()
    try:
        dial = DialConfig(targets=(f"127.0.0.1:{port}",))
        async with IndexClient(dial) as client, client.reservations("r1") as session:
            for number in range(3):
                session.tell(wanted(number))
            session.release("k1")

            async def all_heard() -> bool:
                return len(heard) >= 3

            await eventually_async(all_heard, 30, "all is told")
            session.release("k0")
            session.release("k2")

            async def all_released() -> bool:
                return heard.count("release_key") >= 2

            await eventually_async(all_released, 30, "all is given back")
    finally:
        await server.stop(0)
    assert "group" not in heard


async def test_a_follower_that_takes_groups_gets_everything_and_not_its_own_reservations() -> None:
    async with an_index() as (running, channel):
        asked = pb.SnapshotRequest(follow=True, groups=True, router="r1")
        feed = unary(channel, "Snapshot")(asked)
        got: list[pb.SnapshotResponse] = []

        async def read_until(done: str, count: int) -> None:
            while sum(one.WhichOneof("message") == done for one in got) < count:
                response: pb.SnapshotResponse = await feed.read()
                if response.WhichOneof("message") == "group":
                    parts = [pb.SnapshotResponse.FromString(p) for p in response.group.messages]
                    assert len(parts) > 1
                    got.extend(parts)
                else:
                    got.append(response)

        await read_until("complete", 1)
        async with a_session(running, "r1") as own, a_session(running, "r2") as others:
            for number in range(100):
                own.tell(wanted(number))
                others.tell(wanted(number))
            await read_until("prediction", 100)
            await until_reserved(running, 2000)
        predictions = [one.prediction for one in got if one.WhichOneof("message") == "prediction"]
        assert {one.router for one in predictions} == {"r2"}
        positions = [one.position for one in got]
        assert positions == sorted(positions)
        feed.cancel()


def new_picture() -> Picture:
    return Picture(NativePrefixIndex(), OwnReservations("me"))


def holder(number: int) -> pb.SnapshotResponse:
    hello = convert.hello_to(worker_info(f"w{number}"), 7, 0)
    return pb.SnapshotResponse(
        holder=pb.Holder(holder=number, hello=hello, namespaces=[b""]), position=number
    )


def group_of(*parts: bytes) -> pb.SnapshotResponse:
    return pb.SnapshotResponse(group=pb.SnapshotGroup(messages=parts))


def test_a_picture_takes_the_parts_of_a_group_in_order() -> None:
    picture = new_picture()
    complete = pb.SnapshotResponse(complete=True, position=3).SerializeToString()
    picture.take(
        group_of(holder(1).SerializeToString(), holder(2).SerializeToString(), complete), 5.0
    )
    assert sorted(picture.holders) == [1, 2]
    assert (picture.is_complete, picture.position, picture.heard_at) == (True, 3, 5.0)


@pytest.mark.parametrize(
    "part", [b"\xff\xff", group_of(b"").SerializeToString(), group_of().SerializeToString(), b""]
)
def test_a_group_with_a_part_that_makes_no_sense_is_a_caller_error(part: bytes) -> None:
    with pytest.raises(CallerError):
        new_picture().take(group_of(holder(1).SerializeToString(), part), 0.0)


async def test_a_receiver_gives_what_is_queued_in_groups_within_the_bound() -> None:
    receiver = Receiver(1 << 20)
    for number in range(10):
        receiver.offer(bytes([number]) * 10)
    receiver.offer(b"x" * 1000)
    receiver.finish()
    groups = [group async for group in receiver.groups(1.0, 0.0, 50)]
    assert [len(group) for group in groups] == [5, 5, 1]
    assert [part[:1] for group in groups[:2] for part in group] == [bytes([n]) for n in range(10)]
    assert receiver.queued_bytes == 0


async def test_a_receiver_that_lags_while_it_gathers_is_told_so() -> None:
    receiver = Receiver(100)
    receiver.offer(b"1")
    groups = receiver.groups(1.0, 0.001, 50)
    assert await anext(groups) == [b"1"]
    for _ in range(20):
        receiver.offer(b"0123456789")
    with pytest.raises(OverloadedError):
        await anext(groups)

"""Malformed, oversized and foreign bytes: each is an error of its sender and of nobody else.

All tests of this file meet one index process, which has to outlive them all.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvtier.limits import (
    BATCH_BLOCKS_MAX,
    BATCH_EVENTS_MAX,
    GRPC_HANDSHAKE_MS_MAX,
    GRPC_MESSAGE_BYTES_MAX,
    MATCH_QUERIES_MAX,
    RESERVATION_TTL_MS_MAX,
)
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import Corpus, card, worker
from tests.support.index_cluster import (
    IndexProcess,
    channel_to,
    counts_of,
    fleet_view,
    index_launch,
    match,
)
from tests.support.raw_publisher import RawPublisher, stored, unary

CHAIN = Corpus().hashes(0, 64)
MIB = 1 << 20


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexProcess]:
    with ProcessRunner("index_bad_input", tmp_path_factory.mktemp("index")) as runner:
        launch, port = index_launch(runner, lease_ms=120_000)
        yield IndexProcess(runner.start(launch), port)


@pytest.fixture(autouse=True)
async def unharmed(index: IndexProcess) -> Any:
    """A good publisher and a good query go on before, during and after every test."""
    async with channel_to(index.address) as channel:
        good = RawPublisher(channel, worker("good"), epoch=random.getrandbits(63) + 1)
        await good.join([stored(CHAIN[:32])])
        await good.answer("ack")
        yield
        await good.batch(1, stored(CHAIN[32:]))
        await good.acked(1)
        assert (await match(channel, CHAIN))["good"] == 64 * 16
        assert (await fleet_view(channel))["good"].trust == pb.TRUST_EXACT
        good.cancel()
    assert index.process.alive
    index.clean_log()


async def ends_with(publisher: RawPublisher, *codes: grpc.StatusCode) -> None:
    # grpc says INTERNAL where a write was under way when the index ended the call.
    assert await publisher.ended() in {*codes, grpc.StatusCode.INTERNAL}


def batch(seq: int = 1, **columns: Any) -> pb.Batch:
    """A batch of one stored block, with some columns replaced."""
    good: dict[str, Any] = {
        "kinds": b"\0",
        "tiers": b"\0",
        "lengths": b"\1\0\0\0",
        "parents": bytes(8),
        "hashes": bytes(range(8)),
    }
    return pb.Batch(seq=seq, **(good | columns))


WRONG_COLUMNS = {
    "kinds short": batch(kinds=b""),
    "tiers long": batch(tiers=b"\0\0"),
    "lengths odd": batch(lengths=b"\1\0\0"),
    "lengths huge": batch(lengths=b"\xff\xff\xff\xff"),
    "lengths overflow": batch(
        kinds=b"\0\0", tiers=b"\0\0", lengths=b"\xff" * 8, parents=bytes(16), hashes=b""
    ),
    "parents missing": batch(parents=b""),
    "hashes odd": batch(hashes=b"\0" * 7),
    "hashes too few": batch(hashes=b""),
    "hashes too many": batch(hashes=bytes(16)),
    "hashes without events": batch(kinds=b"", tiers=b"", lengths=b"", parents=b""),
    "kind unknown": batch(kinds=b"\x04"),
    "tier unknown": batch(tiers=b"\x04"),
    "tier of a store": batch(tiers=b"\x01"),
    "clear with a block": batch(kinds=b"\x03", lengths=b"\1\0\0\0"),
    "events too many": batch(
        kinds=bytes(BATCH_EVENTS_MAX + 1),
        tiers=bytes(BATCH_EVENTS_MAX + 1),
        lengths=bytes(4 * BATCH_EVENTS_MAX + 4),
        parents=bytes(8 * BATCH_EVENTS_MAX + 8),
        hashes=b"",
    ),
    "blocks too many": batch(
        lengths=(BATCH_BLOCKS_MAX + 1).to_bytes(4, "little"), hashes=bytes(8 * BATCH_BLOCKS_MAX + 8)
    ),
}


@pytest.mark.parametrize("wrong", WRONG_COLUMNS.values(), ids=WRONG_COLUMNS.keys())
@pytest.mark.parametrize("how", ["batch", "snapshot"])
async def test_wrong_columns_change_nothing_and_are_repaired(
    index: IndexProcess, wrong: pb.Batch, how: str
) -> None:
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("bad"), epoch=random.getrandbits(63) + 1)
        await publisher.join([stored(CHAIN[:8])])
        await publisher.answer("ack")
        before = await counts_of(channel)
        if how == "batch":
            await publisher.raw(pb.PublishRequest(batch=wrong))
        else:
            mark = pb.SnapshotMark(snapshot_id=2, at_seq=0)
            chunk = pb.SnapshotChunk(mark=mark, number=0, last=True, batch=wrong)
            await publisher.raw(pb.PublishRequest(snapshot=chunk))
        assert (await publisher.answer("snapshot_needed")).snapshot_needed.reason == "undecodable"
        assert (await match(channel, CHAIN))["bad"] == 8 * 16, "what was right stands"
        assert (await fleet_view(channel))["bad"].trust == pb.TRUST_DEGRADED
        assert (await counts_of(channel))["undecodable"] == before["undecodable"] + 1
        await publisher.snapshot(1, [stored(CHAIN[:9])], snapshot_id=3)
        await publisher.acked(1)
        assert (await match(channel, CHAIN))["bad"] == 9 * 16
        assert (await fleet_view(channel))["bad"].trust == pb.TRUST_EXACT
        await publisher.goodbye()
        await publisher.ended()


def hello(**changes: Any) -> pb.PublishRequest:
    message = convert.hello_to(worker("bad"), 7, 0)
    for name, value in changes.items():
        field = getattr(message, name)
        if hasattr(field, "CopyFrom"):
            field.CopyFrom(value)
        else:
            setattr(message, name, value)
    return pb.PublishRequest(hello=message)


WRONG_HELLOS = {
    "epoch 0": hello(epoch=0),
    "no name": hello(instance=""),
    "long name": hello(instance="x" * 5000),
    "no kind": hello(kind=0),
    "unknown kind": hello(kind=77),
    "unknown role": hello(role=77),
    "short namespace": hello(namespace_fingerprint=b"short"),
    "no shards": hello(shard=pb.Shard(index=0, count=0)),
    "shard beyond count": hello(shard=pb.Shard(index=2, count=2)),
    "too many shards": hello(shard=pb.Shard(index=0, count=100_000)),
    "rank too high": hello(dp_rank=2**32 - 1),
    "no block size": hello(card=convert.card_to(card(16)).__class__(served_names=["x"])),
    "no card": pb.PublishRequest(
        hello=pb.Hello(
            epoch=7,
            kind=pb.HOLDER_KIND_WORKER,
            instance="bad",
            node="n",
            namespace_fingerprint=b"n" * 32,
        )
    ),
    "block too large": hello(block_bytes=2**63),
}


@pytest.mark.parametrize("wrong", WRONG_HELLOS.values(), ids=WRONG_HELLOS.keys())
async def test_a_wrong_hello_ends_its_stream_and_leaves_no_holder(
    index: IndexProcess, wrong: pb.PublishRequest
) -> None:
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("bad"), epoch=7)
        await publisher.raw(wrong)
        await ends_with(
            publisher, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )  # fmt: skip
        assert set(await fleet_view(channel)) == {"good"}


@pytest.mark.parametrize(
    "first",
    [
        pb.PublishRequest(),
        pb.PublishRequest(batch=batch()),
        pb.PublishRequest(heartbeat=pb.Heartbeat(seq=1)),
        pb.PublishRequest(goodbye=pb.Goodbye()),
        pb.PublishRequest(snapshot=pb.SnapshotChunk()),
    ],
    ids=["empty", "batch", "heartbeat", "goodbye", "chunk"],
)
async def test_a_stream_that_does_not_begin_with_hello_ends(
    index: IndexProcess, first: pb.PublishRequest
) -> None:
    async with channel_to(index.address) as channel:
        publisher = RawPublisher(channel, worker("bad"), epoch=7)
        await publisher.raw(first)
        await ends_with(publisher, grpc.StatusCode.INVALID_ARGUMENT)


async def test_bytes_that_are_no_message_end_the_call_whatever_the_method(
    index: IndexProcess,
) -> None:
    dice = random.Random(5)
    async with channel_to(index.address) as channel:
        for name, method in rpc.methods(rpc.INDEX).items():
            for _ in range(20):
                noise = b"\xff" + dice.randbytes(dice.randint(1, 400))
                code = await _code_of_raw(channel, method, noise)
                assert code not in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, name


async def _code_of_raw(
    channel: grpc.aio.Channel, method: rpc.Method, message: bytes
) -> grpc.StatusCode:
    """Send bytes as they are to a method of any kind; how the call ends."""
    make: Any = channel.stream_stream if method.client_streams else channel.unary_stream
    try:
        call = make(method.path)(iter([message]) if method.client_streams else message, timeout=10)
        async for _ in call:
            pass
        code: grpc.StatusCode = await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return code


async def test_a_message_over_the_limit_is_refused_without_being_kept(index: IndexProcess) -> None:
    before = index.process.usage().rss_bytes
    async with channel_to(index.address) as channel:
        too_long = pb.PublishRequest(batch=pb.Batch(seq=1, hashes=bytes(GRPC_MESSAGE_BYTES_MAX)))
        for method in ("Publish", "Match"):
            info = rpc.methods(rpc.INDEX)[method]
            data = too_long.SerializeToString()
            # The sender's own limit is lifted: the index has to refuse by itself.
            async with grpc.aio.insecure_channel(
                index.address, options=[("grpc.max_send_message_length", -1)]
            ) as rude:
                code = await _code_of_raw(rude, info, data)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, method
        assert (await match(channel, CHAIN))["good"] == 32 * 16
    assert index.process.usage().rss_bytes - before < 64 * MIB


async def test_a_declared_length_beyond_all_bounds_allocates_nothing(index: IndexProcess) -> None:
    before = index.process.usage().rss_bytes
    async with channel_to(index.address) as channel:
        # Field 2 (batch), declared as 2**31 - 1 bytes of which none follow.
        code = await _code_of_raw(
            channel, rpc.methods(rpc.INDEX)["Publish"], b"\x12\xff\xff\xff\xff\x07"
        )
        assert code not in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert index.process.usage().rss_bytes - before < 32 * MIB


WRONG_QUERIES = {
    "odd hashes": pb.MatchRequest(queries=[pb.MatchQuery(hashes=b"123")]),
    "odd tokens": pb.MatchRequest(queries=[pb.MatchQuery(tokens=b"123", served_name="chat")]),
    "unknown pool": pb.MatchRequest(queries=[pb.MatchQuery(hashes=bytes(8), pool=b"nobody's")]),
    "salt too long": pb.MatchRequest(
        queries=[pb.MatchQuery(tokens=bytes(64), served_name="chat", scope_salt="x" * 10_000)]
    ),
    "too many queries": pb.MatchRequest(queries=[pb.MatchQuery()] * (MATCH_QUERIES_MAX + 1)),
}


@pytest.mark.parametrize("wrong", WRONG_QUERIES.values(), ids=WRONG_QUERIES.keys())
async def test_a_wrong_query_is_its_callers_error(
    index: IndexProcess, wrong: pb.MatchRequest
) -> None:
    async with channel_to(index.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Match")(wrong, timeout=10)
        assert error.value.code() in {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.OUT_OF_RANGE,
        }


WRONG_RESERVATIONS = {
    "no hello": [pb.ReserveRequest(reserve=pb.Reservation(key="k"))],
    "empty": [pb.ReserveRequest()],
    "two hellos": [
        pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=1)),
        pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=2)),
    ],
    "epoch 0": [
        pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=0)),
        pb.ReserveRequest(reserve=pb.Reservation(key="k", instance="good", ttl_ms=1000)),
    ],
    "no name": [
        pb.ReserveRequest(hello=pb.RouterHello(router="", epoch=1)),
        pb.ReserveRequest(reserve=pb.Reservation(key="k", instance="good", ttl_ms=1000)),
    ],
    **{
        name: [
            pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=1)),
            pb.ReserveRequest(reserve=reservation),
        ]
        for name, reservation in {
            "no key": pb.Reservation(instance="good", ttl_ms=1000),
            "no time": pb.Reservation(key="k", instance="good"),
            "too long a time": pb.Reservation(
                key="k", instance="good", ttl_ms=RESERVATION_TTL_MS_MAX + 1
            ),
            "odd hashes": pb.Reservation(
                key="k", instance="good", ttl_ms=1000, predicted_hashes=b"123"
            ),
            "too many hashes": pb.Reservation(
                key="k",
                instance="good",
                ttl_ms=1000,
                predicted_hashes=np.arange(1, BATCH_BLOCKS_MAX + 2, dtype="<u8").tobytes(),
            ),
        }.items()
    },
}


@pytest.mark.parametrize("wrong", WRONG_RESERVATIONS.values(), ids=WRONG_RESERVATIONS.keys())
async def test_a_wrong_reservation_reserves_nothing(
    index: IndexProcess, wrong: list[pb.ReserveRequest]
) -> None:
    async with channel_to(index.address) as channel:
        call = rpc.call(channel, rpc.INDEX, "Reserve")(iter(wrong), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            assert [answer async for answer in call] == []
        assert error.value.code() in {
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.OUT_OF_RANGE,
        }
        assert (await match(channel, CHAIN)) == {"good": 32 * 16}


async def test_garbage_on_the_port_is_dropped(index: IndexProcess) -> None:
    dice = random.Random(11)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    openings = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of a TLS handshake
        b"\x80\x04\x95" + b"cposix\nsystem\n(S'true'\ntR.",  # a pickle
        preface + b"\xff" * 64,
        preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + dice.randbytes(4096),
        *(dice.randbytes(dice.randint(1, 4096)) for _ in range(40)),
    ]
    for opening in openings:
        connection = socket.create_connection(("127.0.0.1", index.port), timeout=10)
        with connection, contextlib.suppress(OSError):
            connection.sendall(opening)
            connection.shutdown(socket.SHUT_WR)
            while await asyncio.to_thread(connection.recv, 4096):
                pass


async def test_200_half_open_connections_keep_nobody_waiting_and_are_closed(
    index: IndexProcess,
) -> None:
    fds_before = index.process.usage().fds_count
    halves = [socket.create_connection(("127.0.0.1", index.port), timeout=5) for _ in range(200)]
    try:
        for number, half in enumerate(halves):
            half.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: number % 25])

        async def are_open() -> bool:
            return index.process.usage().fds_count >= fds_before + 150

        await eventually_async(are_open, 30, "the connections are accepted")
        async with channel_to(index.address) as channel:
            for _ in range(50):
                assert await asyncio.wait_for(match(channel, CHAIN), 40) == {"good": 32 * 16}

            async def are_closed() -> bool:
                assert await asyncio.wait_for(match(channel, CHAIN), 40) == {"good": 32 * 16}
                return index.process.usage().fds_count <= fds_before + 20

            await eventually_async(
                are_closed, GRPC_HANDSHAKE_MS_MAX / 1000 + 15, "the halves are closed"
            )
    finally:
        for half in halves:
            half.close()


def test_the_log_of_all_this_is_short(index: IndexProcess) -> None:
    size = Path(index.process.log_path).stat().st_size
    assert size < MIB, "bad input does not fill the disk"

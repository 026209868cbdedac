"""Messages to values and back; what is malformed is a CallerError and nothing else."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.event_columns import EventBatch
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.errors import CallerError, LimitError
from kvtier.limits import BATCH_BLOCKS_MAX, BATCH_EVENTS_MAX
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Role, Tier
from kvtier.wire import convert
from kvtier.wire import messages as pb

CARD = ModelCard(
    served_names=("chat", "chat-alias"),
    model_id="org/model",
    revision="rev-1",
    tokenizer_digest=b"t" * 32,
    chat_template_digest=None,
    block_tokens=16,
    adapters=(Adapter("lora-a", b"a" * 32, 3), Adapter("lora-b", None)),
)
INFO = HolderInfo(
    kind=HolderKind.WORKER,
    instance=InstanceId("worker-1"),
    node=NodeId("node-1"),
    namespace=Fingerprint(b"n" * 32),
    card=CARD,
    dp_rank=2,
    shard_index=1,
    shards_count=2,
    zone="z",
    store="store-1",
    addresses=Addresses(http="127.0.0.1:1", grpc="127.0.0.1:2", bulk="127.0.0.1:3"),
    role=Role.DECODE,
    engine="vllm",
    engine_version="0.33",
    capacities=(TierCapacity(Tier.GPU, 100, 2000),),
    block_bytes=20,
)


def a_batch(lengths: list[int]) -> EventBatch:
    count = len(lengths)
    return EventBatch(
        kinds=np.zeros(count, np.uint8),
        tiers=np.zeros(count, np.uint8),
        lengths=np.array(lengths, np.uint32),
        parents=np.arange(count, dtype=np.uint64),
        hashes=np.arange(1, sum(lengths) + 1, dtype=np.uint64),
    )


def test_a_hello_says_all_of_a_holder_and_is_read_back_equal() -> None:
    message = pb.Hello.FromString(convert.hello_to(INFO, epoch=7, seq=9).SerializeToString())
    assert (message.epoch, message.seq) == (7, 9)
    assert convert.info_from(message) == INFO


def test_a_shared_redis_needs_no_card_and_no_shard() -> None:
    info = HolderInfo(HolderKind.SHARED, InstanceId("redis:1"), NodeId("n"), Fingerprint(b"x" * 32))
    assert convert.info_from(convert.hello_to(info, 1, 0)) == info


@pytest.mark.parametrize(
    "change",
    [
        {"instance": ""},
        {"instance": "x" * 2000},
        {"namespace_fingerprint": b"short"},
        {"kind": pb.HOLDER_KIND_UNSPECIFIED},
        {"kind": 77},
        {"role": 77},
        {"dp_rank": 2**31},
        {"shard": pb.Shard(index=3, count=2)},
        {"shard": pb.Shard(index=0, count=1000)},
        {"capacities": [pb.TierCapacity(tier=9)]},
        {"card": pb.ModelCard()},
    ],
    ids=str,
)
def test_a_broken_hello_is_the_callers_error(change: dict[str, object]) -> None:
    message = convert.hello_to(INFO, 1, 0)
    for name, value in change.items():
        message.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(pb.Hello(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(CallerError):
        convert.info_from(message)


@given(st.lists(st.integers(0, 40), max_size=30))
def test_a_batch_is_read_back_equal(lengths: list[int]) -> None:
    batch = a_batch(lengths)
    message = pb.Batch.FromString(convert.batch_to(batch, 5).SerializeToString())
    again = convert.batch_from(message)
    assert message.seq == 5
    for column in ("kinds", "tiers", "lengths", "parents", "hashes"):
        assert np.array_equal(getattr(again, column), getattr(batch, column)), column


@given(st.lists(st.integers(0, 3), max_size=200))
def test_packed_columns_are_the_same_batch_and_go_on_as_they_came(lengths: list[int]) -> None:
    message = convert.batch_to(a_batch(lengths), 5)
    packed = convert.packed_from(message)
    assert convert.packed_to(packed, 5) == message
    unpacked = convert.batch_from(message)
    assert (packed.events_count, packed.blocks_count) == (len(lengths), sum(lengths))
    assert packed.payload_bytes == unpacked.payload_bytes
    for column in ("kinds", "tiers", "lengths", "parents", "hashes"):
        assert getattr(unpacked, column).tobytes() == getattr(packed, column), column


@pytest.mark.parametrize(
    "change",
    [
        {"kinds": b"\x00"},
        {"kinds": b"\x00\x09"},
        {"tiers": b"\x00\x04"},
        {"tiers": b""},
        {"lengths": b"\x01"},
        {"lengths": b"\x02\x00\x00\x00" * 2},
        {"lengths": b"\xff\xff\xff\xff" * 2},
        {"parents": b"\x00" * 8},
        {"hashes": b"\x00" * 7},
        {"hashes": b"\x00" * 8 * 100},
    ],
    ids=str,
)
def test_columns_that_do_not_agree_are_the_callers_error(change: dict[str, bytes]) -> None:
    message = convert.batch_to(a_batch([1, 2]), 1)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(CallerError):
        convert.batch_from(message)


def test_a_batch_over_the_limits_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(LimitError):
        convert.batch_from(pb.Batch(kinds=bytes(BATCH_EVENTS_MAX + 1)))
    with pytest.raises(LimitError):
        convert.batch_from(pb.Batch(hashes=bytes(8 * (BATCH_BLOCKS_MAX + 1))))


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_callers_error(data: bytes) -> None:
    try:
        message = pb.PublishRequest.FromString(data)
    except DecodeError:
        return
    for read in (
        lambda: convert.batch_from(message.batch),
        lambda: convert.batch_from(message.snapshot.batch),
        lambda: convert.info_from(message.hello),
    ):
        try:
            read()
        except CallerError:
            continue


def test_equal_pools_have_equal_names_on_the_wire() -> None:
    assert convert.pool_name(CARD.pool) == convert.pool_name(CARD.pool)
    other = ModelCard(("x",), "org/model", "rev-1", b"t" * 32, None, 32)
    assert convert.pool_name(CARD.pool) != convert.pool_name(other.pool)

"""The reader of plain batches knows nothing that protobuf does not know, and all that is plain."""

from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.core.batch_message import read_batch_message
from kvtier.core.event_columns import PackedBatch
from kvtier.wire import messages as pb

COLUMN = st.binary(max_size=40) | st.integers(120, 300).map(bytes)
BATCHES = st.builds(
    pb.Batch,
    seq=st.integers(0, 2**64 - 1),
    kinds=COLUMN,
    tiers=COLUMN,
    lengths=COLUMN,
    parents=COLUMN,
    hashes=COLUMN,
)


def columns(batch: pb.Batch) -> PackedBatch:
    return PackedBatch(batch.kinds, batch.tiers, batch.lengths, batch.parents, batch.hashes)


@given(BATCHES)
def test_what_a_publisher_serializes_is_plain(batch: pb.Batch) -> None:
    message = read_batch_message(pb.PublishRequest(batch=batch).SerializeToString())
    assert message == (batch.seq, columns(batch))


@given(st.data())
@example(None)
def test_what_is_read_is_what_protobuf_reads(data: st.DataObject | None) -> None:
    if data is None:
        broken = b"\x12\x03\x08\x80\x00"  # a number in more bytes than it needs
    else:
        whole = pb.PublishRequest(batch=data.draw(BATCHES)).SerializeToString()
        at = data.draw(st.integers(0, len(whole)))
        cut = data.draw(st.integers(0, 3))
        broken = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + cut :]
    message = read_batch_message(broken)
    try:
        request = pb.PublishRequest.FromString(broken)
    except DecodeError:
        assert message is None
        return
    if message is not None:
        assert request.WhichOneof("message") == "batch"
        assert message == (request.batch.seq, columns(request.batch))


def test_what_is_not_plain_is_left_to_the_general_parser() -> None:
    plain = pb.Batch(seq=1, kinds=b"\0").SerializeToString()
    batch = bytes([0x12, len(plain)]) + plain
    assert read_batch_message(batch) is not None
    seq, kinds = plain[:2], plain[2:]
    odd = {
        "nothing": b"",
        "another message": pb.PublishRequest(heartbeat=pb.Heartbeat(seq=1)).SerializeToString(),
        "two messages": batch + batch,
        "a later field": batch + b"\x52\x00",
        "a later field of the batch": bytes([0x12, len(plain) + 2]) + plain + b"\x52\x00",
        "fields in another order": bytes([0x12, len(plain)]) + kinds + seq,
        "a field twice": bytes([0x12, len(plain) + 2]) + seq + seq + kinds,
        "cut short": batch[:-1],
        "a length without an end": b"\x12\x80",
        "a length of six bytes": b"\x12\x80\x80\x80\x80\x80\x00",
        "a number of eleven bytes": b"\x12\x0c\x08" + b"\x80" * 10 + b"\x00",
        "a number beyond 64 bits": b"\x12\x0b\x08" + b"\xff" * 9 + b"\x02",
    }
    assert {name: read_batch_message(data) for name, data in odd.items()} == dict.fromkeys(odd)

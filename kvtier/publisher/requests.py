"""Between the core's event messages and the bytes of a Publish stream.

Every request is made as bytes: a batch is serialized once for all replicas when it is sealed. What
must not live here: decisions (kvtier.core.publication), connections (stream).
"""

from kvtier.core.event_columns import EventBatch
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Fence,
    FenceReason,
    Heartbeat,
    Hello,
    Reply,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotReason,
)
from kvtier.core.fleet import HolderInfo
from kvtier.core.publication import Message
from kvtier.core.workers import Load
from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb


def batch(_: Epoch, seq: Seq, events: EventBatch) -> bytes:
    """A sealed batch as a whole request: what `Publication` is given as its encoder."""
    return pb.PublishRequest(batch=convert.batch_to(events, seq)).SerializeToString()


def request(message: Message, info: HolderInfo, load: Load | None) -> bytes:
    """Any message of a publication as a request; `info` goes into a Hello, `load` into a beat."""
    match message:
        case Batch():
            return message.payload
        case Hello():
            hello = convert.hello_to(info, message.epoch, message.seq, message.trust)
            return pb.PublishRequest(hello=hello).SerializeToString()
        case Heartbeat():
            return pb.PublishRequest(heartbeat=_heartbeat(message, load)).SerializeToString()
        case SnapshotChunk():
            mark = pb.SnapshotMark(snapshot_id=message.mark.snapshot_id, at_seq=message.mark.at_seq)
            chunk = pb.SnapshotChunk(
                mark=mark,
                number=message.number,
                last=message.last,
                batch=convert.batch_to(message.payload, 0),
            )
            return pb.PublishRequest(snapshot=chunk).SerializeToString()


def _heartbeat(message: Heartbeat, load: Load | None) -> pb.Heartbeat:
    digests = [
        pb.Digest(tier=tier, count=digest.copies_count, xor=digest.hash_xor)
        for tier, digest in enumerate(message.digest or ())
    ]
    said = holders.load_to(load) if load is not None else None
    trust = convert.trust_to(message.trust)
    return pb.Heartbeat(seq=message.seq, load=said, digests=digests, trust=trust)


def goodbye(reason: str) -> bytes:
    return pb.PublishRequest(goodbye=pb.Goodbye(reason=reason)).SerializeToString()


def reply(response: pb.PublishResponse, epoch: Epoch) -> Reply | None:
    """What an index said, as an answer to `epoch`; None for a refusal, which is no reply.

    CallerError for an empty message or one that this version does not know.
    """
    match response.WhichOneof("message"):
        case "welcome" if response.welcome.need_snapshot:
            return RequestSnapshot(epoch, SnapshotReason.NEW_EPOCH)
        case "welcome":
            return Resume(epoch, Seq(response.welcome.resume_after_seq))
        case "ack":
            return AckUpTo(epoch, Seq(response.ack.seq))
        case "resend":
            return RequestResend(epoch, Seq(max(1, response.resend.from_seq)))
        case "snapshot_needed":
            return RequestSnapshot(epoch, _snapshot_reason(response.snapshot_needed.reason))
        case "hello_needed":
            return RequestHello(epoch)
        case "fenced":
            return Fence(epoch, FenceReason.DEAD_EPOCH)
        case "refused":
            return None
        case kind:
            raise CallerError(f"the index said {kind}, which this version does not know")


def _snapshot_reason(text: str) -> SnapshotReason:
    try:
        return SnapshotReason(text)
    except ValueError:
        return SnapshotReason.OPERATOR

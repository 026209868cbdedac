"""The words that a publisher and an index exchange over one event stream, as values.

A stream is one (holder, shard) of one publisher. What must not live here: decisions
(`events`, `publication`), the wire format (floor 2), connections.

    publisher -> index   Hello, Batch, Heartbeat, SnapshotChunk
    index -> publisher   Resume, RequestSnapshot, RequestResend, RequestHello, AckUpTo, Fence

Messages of one connection travel in order. Neither side relies on that for correctness, only
for speed: lost, repeated, late and swapped messages cost a resend or a snapshot, never a wrong
state.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq, Trust

Payload_co = TypeVar("Payload_co", covariant=True)
"""What a batch or chunk carries: opaque to the state machines (columns, encoded bytes)."""

U64_MAX = 2**64 - 1


class TierDigest(NamedTuple):
    """What one tier of a stream holds, in O(1) space."""

    copies_count: int
    hash_xor: int
    """Over the distinct hashes: a second copy of a block does not cancel it."""


Digest = tuple[TierDigest, ...]
"""One entry a tier, in the order of `types.Tier`. Compared for equality only."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a stream. `seq` is the last batch sealed in `epoch`, 0 before the first.

    May be repeated on an open stream: an index that has lost its memory asks for it. `trust` is
    what the publisher thinks of its own knowledge.
    """

    epoch: Epoch
    seq: Seq
    trust: Trust = Trust.EXACT


@dataclass(frozen=True, slots=True)
class Batch(Generic[Payload_co]):
    """Events number `seq` of `epoch`; numbers start at 1 and have no holes."""

    epoch: Epoch
    seq: Seq
    payload: Payload_co
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Renews the lease, and makes a lost last batch visible.

    `seq` is the last batch that has been sent on this stream (so it never runs ahead of the
    batches in front of it); `digest` describes the state after that batch, None while batches
    wait to be sent. `trust` is what the publisher thinks of its own knowledge after that batch.
    """

    epoch: Epoch
    seq: Seq
    digest: Digest | None = None
    trust: Trust = Trust.EXACT


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    """Names one snapshot: the state after batch `at_seq`. Ids grow within an epoch."""

    epoch: Epoch
    snapshot_id: int
    at_seq: Seq


@dataclass(frozen=True, slots=True)
class SnapshotChunk(Generic[Payload_co]):
    """Stores only. Number 0 opens the snapshot, `last` ends it; an empty one is one empty chunk."""

    mark: SnapshotMark
    number: int
    last: bool
    payload: Payload_co


class FenceReason(StrEnum):
    """Why an epoch may not speak any more."""

    DEAD_EPOCH = "dead_epoch"
    """Another epoch of the same stream replaced it."""
    REGRESSED = "regressed"
    """The index knows later batches of this epoch than the publisher has sealed: a restored image
    or two processes with one epoch. Found by the publisher itself."""


class SnapshotReason(StrEnum):
    """Why an index wants a snapshot."""

    NEW_EPOCH = "new_epoch"
    DRIFT = "drift"
    UNDECODABLE = "undecodable"
    INCOMPLETE = "incomplete"
    """A snapshot arrived with a hole or did not end."""
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Resume:
    """Answer to a Hello: continue with `after_seq + 1`."""

    epoch: Epoch
    after_seq: Seq


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    epoch: Epoch
    reason: SnapshotReason


@dataclass(frozen=True, slots=True)
class RequestResend:
    """Send `from_seq` and all after it; a snapshot if the ring has forgotten it."""

    epoch: Epoch
    from_seq: Seq


@dataclass(frozen=True, slots=True)
class RequestHello:
    """Somebody spoke in an epoch that this index has never been introduced to."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class AckUpTo:
    """All batches up to `seq` are in the index."""

    epoch: Epoch
    seq: Seq


@dataclass(frozen=True, slots=True)
class Fence:
    """Terminal for `epoch`."""

    epoch: Epoch
    reason: FenceReason


Reply = Resume | RequestSnapshot | RequestResend | RequestHello | AckUpTo | Fence


def check_epoch(epoch: int) -> None:
    """Raise CallerError unless it is a non-zero u64."""
    if not 0 < epoch <= U64_MAX:
        raise CallerError(f"epoch: want 1 .. 2**64 - 1, got {epoch}")


def check_seq(seq: int) -> None:
    """Raise CallerError unless it is a u64."""
    if not 0 <= seq <= U64_MAX:
        raise CallerError(f"seq: want 0 .. 2**64 - 1, got {seq}")

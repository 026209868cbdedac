"""What a publisher counts: values of one moment, for metrics and tests.

What must not live here: the counting (outbox, stream), metric names (kvtier.telemetry).
"""

from dataclasses import dataclass
from enum import StrEnum

from kvtier.types import Epoch, Seq


class StreamState(StrEnum):
    """Where the stream to one index replica stands."""

    IDLE = "idle"
    """Not started, or waiting before the next attempt."""
    GREETING = "greeting"
    """Hello is on its way."""
    LIVE = "live"
    REFUSED = "refused"
    """The index contradicts our Hello, or our credentials; tried again slowly."""
    FENCED = "fenced"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StreamStats:
    """The stream to one replica."""

    target: str
    state: StreamState
    lag_batches: int
    """Sealed batches that it has not acknowledged."""
    index_epoch: int
    """Of the index process that answered last; 0 before the first."""
    opened: int
    """Streams that were begun."""
    welcomed: int
    """Streams on which the index answered."""
    failures: int
    """Streams that ended by an error or by silence."""
    refusals: int
    messages_sent: int
    heartbeats_sent: int
    last_error: str


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counters since the publisher was made, over all its epochs, and where it stands now."""

    epoch: Epoch
    seq: Seq
    is_fenced: bool
    copies_count: int
    """Copies of blocks in the resident set, without what is still queued."""
    queued_blocks: int
    queue_overflows: int
    """Engine calls that did the publishing thread's work because the queue was full."""
    engine_waits: int
    """... and had to wait for the publishing thread's current step first."""
    changes: int
    batches_sealed: int
    events_coalesced: int
    resends: int
    snapshots_begun: int
    ring_overflows: int
    """Times a replica fell behind the ring and was marked for a snapshot."""
    streams: tuple[StreamStats, ...]

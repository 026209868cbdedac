"""The publisher's side of an event stream: what is held, what was said, and who has heard it.

One `Publication` per (holder, shard) and epoch. It never blocks and never drops silently: changes
go into the resident set at once, so a replica that cannot follow the ring of recent batches gets a
snapshot instead. What must not live here: connections, threads, clocks, the drawing of epochs, the
wire format (given as `encode`).

    engine ── store/remove/clear ──▶ pending ── seal ──▶ ring ── poll ──▶ each replica
                     └──▶ residents ── snapshot ─────────────────▲
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from kvtier import limits
from kvtier.core.event_columns import NO_PARENT, EventBatch, EventKind, Hashes, U64Array, as_hashes
from kvtier.core.event_messages import (
    U64_MAX,
    AckUpTo,
    Batch,
    Digest,
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
    SnapshotMark,
    check_epoch,
)
from kvtier.core.residents import Residents
from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq, Tier, Trust

Message = Hello | Batch[bytes] | Heartbeat | SnapshotChunk[EventBatch]
"""What a publisher sends. Batches are encoded once for all replicas, chunks when they are sent."""

Encoder = Callable[[Epoch, Seq, EventBatch], bytes]


@dataclass(frozen=True, slots=True)
class PublicationConfig:
    """Bounds of one publication. A message under load carries up to `batch_blocks_max` blocks."""

    batch_blocks_max: int = 4096
    batch_events_max: int = 4096
    coalesce_s: float = 0.002
    """How long the first change may wait for company."""
    ring_batches_max: int = 4096
    ring_bytes_max: int = 64 << 20
    window_batches_max: int = 1024
    """Batches on the way to one replica and not yet acknowledged."""
    chunk_blocks_max: int = limits.BATCH_EVENTS_MAX
    """At worst each block of a chunk is an event."""

    def __post_init__(self) -> None:
        for name, value, ceiling in (
            ("batch_blocks_max", self.batch_blocks_max, limits.BATCH_BLOCKS_MAX),
            ("batch_events_max", self.batch_events_max, limits.BATCH_EVENTS_MAX),
            ("ring_batches_max", self.ring_batches_max, limits.RING_BATCHES_MAX),
            ("window_batches_max", self.window_batches_max, limits.RING_BATCHES_MAX),
            ("chunk_blocks_max", self.chunk_blocks_max, limits.BATCH_EVENTS_MAX),
        ):
            if not 1 <= value <= ceiling:
                raise CallerError(f"{name}: want 1 .. {ceiling}, got {value}")
        if self.ring_bytes_max < 1 or self.coalesce_s < 0:
            raise CallerError("ring_bytes_max, coalesce_s: want positive values")


@dataclass(slots=True)
class PublicationStats:
    """Counters of one publication."""

    batches_sealed: int = 0
    events_coalesced: int = 0
    """Changes that were merged into the event before them."""
    resends: int = 0
    snapshots_begun: int = 0
    overflows: int = 0
    """Times a replica fell behind the ring and was marked for a snapshot."""


class _Phase(Enum):
    GREETING = auto()
    """Hello sent or to be sent, no answer yet."""
    LIVE = auto()
    RESYNC = auto()
    """Marked for a snapshot; the next poll begins it."""


@dataclass(slots=True)
class _Snapshot:
    mark: SnapshotMark
    chunks: Iterator[EventBatch]
    upcoming: EventBatch
    """The next chunk: only who knows the one after it can tell whether it is the last."""
    sent_count: int = 0


@dataclass(slots=True)
class _Replica:
    phase: _Phase = _Phase.GREETING
    hello_due: bool = True
    next_seq: int = 1
    sent_seq: int = 0
    """Highest batch ever sent or contained in a begun snapshot; a heartbeat speaks of it."""
    acked_seq: int = 0
    window_from: int = 0
    """Batches up to here are not in flight although not acknowledged: contained or given up."""
    snapshot: _Snapshot | None = None


@dataclass(slots=True)
class _PendingEvent:
    kind: EventKind
    tier: int
    parent: int
    last_hash: int = NO_PARENT
    pieces: list[U64Array] = field(default_factory=list)

    def is_continued_by(self, kind: EventKind, tier: int, parent: int) -> bool:
        """Whether a change right behind this one can be said in the same event."""
        if kind is not self.kind or tier != self.tier:
            return False
        return kind is not EventKind.STORE or parent == self.last_hash


class Publication:
    """What one publisher says of one (holder, shard) in one epoch. Not thread-safe.

    Cost of a change is a few microseconds plus C work per block. The first replica that answers
    with a fence ends the publication for all of them: changes still enter the residents, nothing
    is sent any more, and `successor` carries the residents into a new epoch.
    """

    def __init__(
        self,
        epoch: Epoch,
        encode: Encoder,
        config: PublicationConfig | None = None,
        residents: Residents | None = None,
    ) -> None:
        check_epoch(epoch)
        self._epoch = epoch
        self._encode = encode
        self._config = config or PublicationConfig()
        self._residents = residents if residents is not None else Residents()
        self._pending: list[_PendingEvent] = []
        self._pending_blocks = 0
        self._pending_since = 0.0
        self._seq = 0
        self._sealed_digest = self._residents.digest()
        self._ring: deque[Batch[bytes]] = deque()
        self._ring_bytes = 0
        self._replicas: dict[str, _Replica] = {}
        self._snapshot_ids = 0
        self._fence: FenceReason | None = None
        self._exact_from: int | None = 0
        """From which batch on the owner vouches for what was said; None: it does not."""
        self.stats = PublicationStats()

    # ---- reading

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def seq(self) -> Seq:
        """Last sealed batch; 0 before the first."""
        return Seq(self._seq)

    @property
    def fenced(self) -> FenceReason | None:
        """Why this publication is over; None while it lives."""
        return self._fence

    @property
    def copies_count(self) -> int:
        """Copies of blocks held, including changes that are not sealed yet."""
        return self._residents.copies_count

    def digest(self) -> Digest:
        """Digest of the state after batch `seq`."""
        return self._sealed_digest

    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def lag_batches(self, replica: str) -> int:
        """Sealed batches that the replica has not acknowledged."""
        return self._seq - self._replica(replica).acked_seq

    def deadline(self) -> float | None:
        """When pending changes must be sealed (call `poll` or `flush`); None if there are none."""
        return self._pending_since + self._config.coalesce_s if self._pending else None

    def trust(self, replica: str) -> Trust:
        """What the owner thinks of its knowledge as far as this replica has been told of it."""
        is_exact = self._exact_from is not None
        is_told = is_exact and self._replica(replica).sent_seq >= (self._exact_from or 0)
        return Trust.EXACT if is_told else Trust.DEGRADED

    # ---- changes

    def set_trust(self, trust: Trust) -> None:
        """Whether the owner knows all that it holds; EXACT until this says otherwise.

        EXACT speaks of the state with all changes before this call, which are sealed.
        """
        self.flush()
        if trust is Trust.DEGRADED:
            self._exact_from = None
        elif self._exact_from is None:
            self._exact_from = self._seq

    def store(self, tier: Tier, parent: int, hashes: Hashes, now: float) -> None:
        """Blocks of one chain appeared in a tier, the first under `parent` (0: none or unknown).

        An array is kept, not copied: do not write to it afterwards.
        """
        if not 0 <= parent <= U64_MAX:
            raise CallerError(f"parent: want 0 .. 2**64 - 1, got {parent}")
        packed = as_hashes(hashes)
        while len(packed):
            piece = packed[: self._make_room(EventKind.STORE, tier, parent)]
            self._residents.store(Tier(tier), parent, piece)
            self._add(_PendingEvent(EventKind.STORE, tier, parent), piece, now)
            parent = int(piece[-1])
            packed = packed[len(piece) :]

    def remove(self, tier: Tier, hashes: Hashes, now: float) -> None:
        """Blocks left a tier: one copy each. Blocks that are not there are ignored."""
        packed = as_hashes(hashes)
        while len(packed):
            piece = packed[: self._make_room(EventKind.REMOVE, tier, NO_PARENT)]
            self._residents.remove(Tier(tier), piece)
            self._add(_PendingEvent(EventKind.REMOVE, tier, NO_PARENT), piece, now)
            packed = packed[len(piece) :]

    def clear_tier(self, tier: Tier, now: float) -> None:
        """A tier was emptied."""
        self._make_room(EventKind.CLEAR_TIER, tier, NO_PARENT)
        self._residents.clear_tier(Tier(tier))
        self._add(_PendingEvent(EventKind.CLEAR_TIER, tier, NO_PARENT), _NOTHING, now)

    def clear_all(self, now: float) -> None:
        """All tiers were emptied."""
        self._make_room(EventKind.CLEAR_ALL, 0, NO_PARENT)
        self._residents.clear_all()
        self._add(_PendingEvent(EventKind.CLEAR_ALL, 0, NO_PARENT), _NOTHING, now)

    def flush(self) -> None:
        """Seal what is pending into one batch now. Does nothing if nothing is pending."""
        if not self._pending or self._fence is not None:
            return
        events = _columns(self._pending)
        self._pending = []
        self._pending_blocks = 0
        self._seq += 1
        self._sealed_digest = self._residents.digest()
        payload = self._encode(self._epoch, Seq(self._seq), events)
        self._ring.append(Batch(self._epoch, Seq(self._seq), payload, len(payload)))
        self._ring_bytes += len(payload)
        self.stats.batches_sealed += 1
        self._trim()

    # ---- replicas

    def attach(self, replica: str) -> None:
        """A connection to this replica was opened: the next poll begins with a Hello.

        Raises CallerError above `limits.REPLICAS_COUNT_MAX`.
        """
        known = self._replicas.get(replica)
        if known is None and len(self._replicas) >= limits.REPLICAS_COUNT_MAX:
            raise CallerError(f"replica: more than {limits.REPLICAS_COUNT_MAX} index replicas")
        acked = known.acked_seq if known is not None else 0
        self._replicas[replica] = _Replica(acked_seq=acked)

    def detach(self, replica: str) -> None:
        """This replica will not be fed any more; the ring need not wait for it."""
        self._replicas.pop(replica, None)
        self._trim()

    def receive(self, replica: str, reply: Reply) -> None:
        """Take in what a replica answered. Answers to another epoch are ignored."""
        cursor = self._replica(replica)
        if reply.epoch != self._epoch or self._fence is not None:
            return
        match reply:
            case AckUpTo(_, seq):
                if self._is_possible(seq):
                    cursor.acked_seq = max(cursor.acked_seq, seq)
                    self._trim()
            case Resume(_, seq):
                if self._is_possible(seq):
                    self._rewind(cursor, seq + 1)
            case RequestResend(_, seq):
                # Only of a stream that is open: a late request must not skip the greeting.
                if self._is_possible(seq - 1) and cursor.phase is _Phase.LIVE:
                    self._resend(cursor, seq)
            case RequestSnapshot():
                cursor.phase = _Phase.RESYNC
                cursor.snapshot = None
            case RequestHello():
                cursor.phase = _Phase.GREETING
                cursor.hello_due = True
                cursor.snapshot = None
            case Fence(_, reason):
                self._end(reason)

    def poll(self, replica: str, now: float, messages_max: int = 64) -> list[Message]:
        """What to send to a replica next, in order; empty when there is nothing or no room.

        Seals pending changes whose time has come. Chunks of a snapshot and live batches take
        turns, so that a long snapshot does not outrun the ring.
        """
        cursor = self._replica(replica)
        deadline = self.deadline()
        if deadline is not None and now >= deadline:
            self.flush()
        messages: list[Message] = []
        while len(messages) < messages_max and self._fence is None:
            before = len(messages)
            if cursor.phase is _Phase.GREETING:
                if cursor.hello_due:
                    cursor.hello_due = False
                    messages.append(self._hello())
                break
            if cursor.phase is _Phase.RESYNC:
                self._begin_snapshot(cursor)
            if cursor.snapshot is not None:
                messages.append(self._next_chunk(cursor, cursor.snapshot))
            batch = self._next_batch(cursor)
            if batch is not None:
                messages.append(batch)
            if len(messages) == before and cursor.phase is not _Phase.RESYNC:
                break
        return messages

    def heartbeat(self, replica: str) -> Heartbeat | Hello | None:
        """What to send once a heartbeat interval, behind the messages already sent.

        A Hello again while the first is unanswered, None once fenced.
        """
        cursor = self._replica(replica)
        if self._fence is not None:
            return None
        if cursor.phase is _Phase.GREETING:
            return self._hello()
        digest = self._sealed_digest if cursor.sent_seq == self._seq else None
        return Heartbeat(self._epoch, Seq(cursor.sent_seq), digest, self.trust(replica))

    def successor(self, epoch: Epoch) -> "Publication":
        """A publication of the same residents in a new epoch; this one is over.

        The residents move, they are not copied. Replicas have to be attached again.
        """
        if epoch == self._epoch:
            raise CallerError("epoch: a successor needs another epoch")
        heir = Publication(epoch, self._encode, self._config, self._residents)
        heir._exact_from = None if self._exact_from is None else 0
        self._end(FenceReason.DEAD_EPOCH)
        self._residents = Residents()
        return heir

    # ---- parts

    def _hello(self) -> Hello:
        """Speaks of batch `seq`, which an index waits for before it believes anything."""
        trust = Trust.DEGRADED if self._exact_from is None else Trust.EXACT
        return Hello(self._epoch, Seq(self._seq), trust)

    def _replica(self, replica: str) -> _Replica:
        try:
            return self._replicas[replica]
        except KeyError:
            raise CallerError(f"replica: {replica!r} is not attached") from None

    def _make_room(self, kind: EventKind, tier: int, parent: int) -> int:
        """Seal if the change does not fit, before anything of it is done. How many blocks fit."""
        full = self._pending_blocks >= self._config.batch_blocks_max
        if not full and len(self._pending) >= self._config.batch_events_max:
            full = not self._pending[-1].is_continued_by(kind, tier, parent)
        if full:
            self.flush()
        return self._config.batch_blocks_max - self._pending_blocks

    def _add(self, event: "_PendingEvent", hashes: U64Array, now: float) -> None:
        if self._fence is not None:
            return
        if not self._pending:
            self._pending_since = now
        if self._pending and self._pending[-1].is_continued_by(
            event.kind, event.tier, event.parent
        ):
            event = self._pending[-1]
            self.stats.events_coalesced += 1
        else:
            self._pending.append(event)
        if len(hashes):
            event.pieces.append(hashes)
            event.last_hash = int(hashes[-1])
            self._pending_blocks += len(hashes)

    def _is_possible(self, seq: int) -> bool:
        """Ends the publication if an index knows batches that were never sealed here."""
        if seq > self._seq:
            self._end(FenceReason.REGRESSED)
            return False
        return True

    def _end(self, reason: FenceReason) -> None:
        self._fence = self._fence or reason
        self._pending = []
        self._pending_blocks = 0
        self._ring.clear()
        self._ring_bytes = 0

    def _first_in_ring(self) -> int:
        return self._ring[0].seq if self._ring else self._seq + 1

    def _trim(self) -> None:
        """Drop what everybody has, and what the bounds of the ring do not allow to keep."""
        heard = min((r.acked_seq for r in self._replicas.values()), default=0)
        while self._ring and (
            self._ring[0].seq <= heard
            or len(self._ring) > self._config.ring_batches_max
            or self._ring_bytes > self._config.ring_bytes_max
        ):
            self._ring_bytes -= self._ring.popleft().payload_bytes

    def _rewind(self, cursor: _Replica, from_seq: int) -> None:
        cursor.phase = _Phase.LIVE
        cursor.snapshot = None
        cursor.next_seq = from_seq
        cursor.window_from = from_seq - 1
        cursor.sent_seq = max(cursor.sent_seq, from_seq - 1)

    def _resend(self, cursor: _Replica, from_seq: int) -> None:
        snapshot = cursor.snapshot
        if snapshot is not None and from_seq <= snapshot.mark.at_seq:
            return  # what is asked for is in the snapshot that is on its way
        self.stats.resends += 1
        self._rewind(cursor, from_seq)
        cursor.snapshot = snapshot

    def _next_batch(self, cursor: _Replica) -> Batch[bytes] | None:
        seq = cursor.next_seq
        in_flight = seq - 1 - max(cursor.acked_seq, cursor.window_from)
        if seq > self._seq or in_flight >= self._config.window_batches_max:
            return None
        first = self._first_in_ring()
        if seq < first:
            # Never skip: what the ring has forgotten is in the next snapshot. One that is being
            # sent is finished first, or a slow replica would never get any.
            if cursor.snapshot is None:
                cursor.phase = _Phase.RESYNC
                self.stats.overflows += 1
            return None
        cursor.next_seq = seq + 1
        cursor.sent_seq = max(cursor.sent_seq, seq)
        return self._ring[seq - first]

    def _begin_snapshot(self, cursor: _Replica) -> None:
        self.flush()
        self._snapshot_ids += 1
        mark = SnapshotMark(self._epoch, self._snapshot_ids, Seq(self._seq))
        chunks = self._residents.snapshot(self._config.chunk_blocks_max)
        first = next(chunks, None)
        self._rewind(cursor, self._seq + 1)
        cursor.snapshot = _Snapshot(mark, chunks, _columns([]) if first is None else first)
        self.stats.snapshots_begun += 1

    def _next_chunk(self, cursor: _Replica, snapshot: _Snapshot) -> SnapshotChunk[EventBatch]:
        events, number = snapshot.upcoming, snapshot.sent_count
        after = next(snapshot.chunks, None)
        if after is None:
            cursor.snapshot = None
        else:
            snapshot.upcoming = after
            snapshot.sent_count += 1
        return SnapshotChunk(snapshot.mark, number, after is None, events)


_NOTHING: U64Array = np.empty(0, np.uint64)


def _columns(pending: list[_PendingEvent]) -> EventBatch:
    pieces = [piece for event in pending for piece in event.pieces]
    lengths = [sum(map(len, event.pieces)) for event in pending]
    return EventBatch(
        kinds=np.array([event.kind for event in pending], np.uint8),
        tiers=np.array([event.tier for event in pending], np.uint8),
        lengths=np.array(lengths, np.uint32),
        parents=np.array([event.parent for event in pending], np.uint64),
        hashes=np.concatenate(pieces) if pieces else _NOTHING,
    )

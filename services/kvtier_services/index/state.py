"""What the index knows and how messages change it: the core's decisions, carried out.

Holds the fleet (holders by name over the prefix index), one acceptor per stream and the leases;
what routers reserve is `routers`. Every change of interest to others goes to `Changes`. Called
from one thread; `now` is monotonic seconds.

What must not live here: gRPC, asyncio, clocks (service.py), the queues of receivers (feed.py).
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import Final, Protocol

from kvtier.core.event_columns import EventKind, PackedBatch
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Digest,
    Heartbeat,
    Hello,
    SnapshotChunk,
    TierDigest,
    check_epoch,
)
from kvtier.core.events import (
    Acceptor,
    Action,
    ApplyBatch,
    ClearStream,
    DegradedReason,
    DiscardStaged,
    Outcome,
    ReplaceWithSnapshot,
    StageChunk,
    Verdict,
)
from kvtier.core.fleet import Fleet, HolderInfo, HolderRecord
from kvtier.core.membership import Forget, Hide, LeaseConfig, Leases, LeaseState, Renewal
from kvtier.core.prefix_index import TIERS_OF_KIND, PrefixIndex
from kvtier.core.reservations import ReservationConfig
from kvtier.core.workers import Load
from kvtier.errors import CallerError, IdentityError, LimitError
from kvtier.types import HOLDER_TIERS, Epoch, HolderId, Tier, Trust
from kvtier_services.index.replacing import SLICE_BLOCKS, Replacement
from kvtier_services.index.router_work import ReservationChanges, RouterWork

STAGED_BLOCK_BYTES: Final = 22
"""A block of a snapshot on the wire, where each block is an event of its own."""
CHUNK_BYTES: Final = 512
"""What a chunk of a snapshot costs beside its columns, about."""

AT_ONCE_BLOCKS_MAX: Final = 4 * SLICE_BLOCKS
"""A replacement of no more blocks than this is done at once: some five milliseconds."""

Stream = tuple[HolderId, int]
"""(holder, shard): what has an epoch, a sequence and a lease of its own."""

_STORES: Final = bytes([EventKind.STORE])


class Changes(ReservationChanges, Protocol):
    """Who is told what changed. Called synchronously, after the change."""

    def holder_joined(self, holder: HolderId) -> None: ...
    def holder_changed(self, holder: HolderId) -> None: ...
    def holder_hidden(self, holder: HolderId) -> None: ...
    def holder_resumed(self, holder: HolderId) -> None: ...
    def holder_left(self, record: HolderRecord) -> None: ...
    def batch_applied(self, stream: Stream, batch: PackedBatch) -> None: ...
    def messages_applied(self, stream: Stream, messages: list[bytes], count: int) -> None: ...
    def stream_replaced(self, stream: Stream) -> None: ...


@dataclass(frozen=True, slots=True)
class StateConfig:
    """`holder_blocks_max`: copies that one stream may hold, a flood beyond it is cut off."""

    lease: LeaseConfig = field(default_factory=LeaseConfig)
    reservations: ReservationConfig = field(default_factory=ReservationConfig)
    holder_blocks_max: int = 64 << 20


@dataclass(slots=True)
class StreamState:
    """One (holder, shard): read it, do not write."""

    own_tiers: bytes
    """The tiers that this kind of holder has, as they stand in a batch's column."""
    acceptor: Acceptor[PackedBatch] = field(default_factory=Acceptor)
    connection: object = None
    """Who introduced itself last; what is staged came over it."""
    staged: list[PackedBatch] = field(default_factory=list)
    staged_bytes: int = 0
    replacement: Replacement | None = None
    """Under way: the index holds a part of what the acceptor has applied."""
    load: Load = field(default_factory=Load)
    heard_at: float = 0.0
    trust: Trust = Trust.DEGRADED
    room_blocks: int = 0
    """Copies that may be stored for certain before the holder is full: counted anew below 0."""


@dataclass(slots=True)
class Counts:
    """Counters of the whole index; events, not messages, where a batch carries several."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    events_applied: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    blocks_unknown: int = 0
    blocks_evicted: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def named(self) -> Iterator[tuple[str, int]]:
        """All of them by name, for statistics."""
        yield "applied", self.events_applied
        yield "blocks_stored", self.blocks_stored
        yield "blocks_removed", self.blocks_removed
        yield "unresolved_unknown_block", self.blocks_unknown
        yield "blocks_evicted", self.blocks_evicted
        yield from ((verdict.value, self.verdicts[verdict]) for verdict in Verdict)
        yield from ((f"refused_{reason}", count) for reason, count in self.refused.items())


class IndexState:
    """The index; mutated by every message of a publisher or router, and by `tick`."""

    def __init__(self, index: PrefixIndex, config: StateConfig, changes: Changes) -> None:
        self.fleet = Fleet(index)
        self.counts = Counts()
        self._index = index
        self._config = config
        self._changes = changes
        self._streams: dict[Stream, StreamState] = {}
        self._leases: Leases[Stream] = Leases(config.lease)
        self._renew_after_s = config.lease.lease_s / 256
        """Batches that come closer together than this do not renew a lease again."""
        self.routers = RouterWork(self.fleet, index, config.reservations, changes)
        self._replacing: deque[Stream] = deque()
        self._described: dict[HolderId, tuple[HolderInfo, Trust]] = {}

    # ---- publishers

    def hello(
        self, info: HolderInfo, message: Hello, connection: object, now: float
    ) -> tuple[Stream, Outcome[PackedBatch]]:
        """A stream introduces itself. Raises IdentityError with both values if refused.

        `connection` is whatever tells one connection from another.

        A contradiction with shards of the same holder that are all silent is a restart with
        another description: their holder is forgotten first.
        """
        check_epoch(message.epoch)  # before anybody joins
        known = self.fleet.find(info.key)
        if known is not None and self._is_dead_epoch((known, info.shard_index), message.epoch):
            return self._fenced((known, info.shard_index), message, now)
        try:
            holder = self.fleet.join(info)
        except IdentityError:
            self.counts.refused["contradiction"] += 1
            if known is None or self._is_alive(known, besides=info.shard_index):
                raise
            self._forget_holder(known)
            holder = self.fleet.join(info)
        stream = (holder, info.shard_index)
        is_new = holder != known
        state = self._streams.get(stream)
        if state is None:
            state = self._streams[stream] = StreamState(bytes(TIERS_OF_KIND[info.kind]))
        state.connection = connection
        outcome = self._carry_out(stream, state.acceptor.hello(message, now))
        self._renew(stream, now)
        self._describe_anew(holder)
        if is_new:
            self._changes.holder_joined(holder)
        else:
            self._changes.holder_changed(holder)
        return stream, outcome

    def advance(self, stream: Stream, epoch: Epoch, messages: list[bytes], now: float) -> int:
        """Take in what nearly every message is: a batch, next in order, nothing in its way.

        `messages` are requests as they came off the wire. Returns how many of them, from the first,
        are applied and can be acknowledged; the next one has changed nothing, see `batch`.
        LimitError as there, once all that fits is applied.
        """
        state = self._stream(stream)
        seq = state.acceptor.next_plain(epoch)
        if seq is None or state.replacement is not None:
            return 0
        run = self._index.apply_messages(stream[0], stream[1], seq, messages, state.room_blocks)
        count, events, stored, removed, unknown, _, evicted = run
        if not count:
            return 0
        state.acceptor.advance(count)
        counts = self.counts
        counts.verdicts[Verdict.APPLY] += count
        counts.events_applied += events
        counts.blocks_stored += stored
        counts.blocks_removed += removed
        counts.blocks_unknown += unknown
        counts.blocks_evicted += evicted
        if evicted:
            self._mark_truncated()
        state.room_blocks -= stored
        self._changes.messages_applied(stream, messages, count)
        self._tell_trust(stream, state)
        self._applied(stream, state, now)
        return count

    def batch(
        self, stream: Stream, message: Batch[PackedBatch], now: float
    ) -> Outcome[PackedBatch]:
        """Numbered events of a stream. LimitError once the stream holds too much."""
        state = self._stream(stream)
        if not _fits(state.own_tiers, message.payload):
            return self.undecodable(stream, message.epoch, now)
        outcome = self._carry_out(stream, state.acceptor.batch(message, now))
        if outcome.verdict is Verdict.APPLY:
            self._applied(stream, state, now)
        return outcome

    def _applied(self, stream: Stream, state: StreamState, now: float) -> None:
        if now - state.heard_at > self._renew_after_s:
            state.heard_at = now
            self._renew(stream, now)
        if state.room_blocks < 0:
            self._check_room(stream, state)

    def undecodable(self, stream: Stream, epoch: Epoch, now: float) -> Outcome[PackedBatch]:
        """A batch that could not be read: the stream is DEGRADED until a snapshot repairs it."""
        return self._carry_out(stream, self._stream(stream).acceptor.undecodable(epoch, now))

    def heartbeat(
        self, stream: Stream, message: Heartbeat, load: Load, now: float
    ) -> Outcome[PackedBatch]:
        """Keeps the lease of a stream and notices what got lost."""
        state = self._stream(stream)
        is_comparable = message.digest is not None and state.replacement is None
        held = self._digest(stream) if is_comparable else None
        outcome = self._carry_out(stream, state.acceptor.heartbeat(message, held, now))
        if outcome.verdict is not Verdict.FENCED:
            state.heard_at = now
            changed = load != state.load
            state.load = load
            self._renew(stream, now)
            if changed:
                self._changes.holder_changed(stream[0])
        return outcome

    def snapshot(
        self, stream: Stream, message: SnapshotChunk[PackedBatch], now: float
    ) -> Outcome[PackedBatch]:
        """A piece of everything that a stream holds; when it is whole, it replaces what was held.

        Of many blocks only the beginning is replaced here: see `work`.

        LimitError once the stream holds, or has sent of the snapshot, too much.
        """
        state = self._stream(stream)
        if not _fits(state.own_tiers, message.payload) or not _only_stores(message.payload):
            return self.undecodable(stream, message.mark.epoch, now)
        outcome = self._carry_out(stream, state.acceptor.snapshot_chunk(message, now))
        if outcome.verdict is not Verdict.FENCED:
            self._renew(stream, now)
            self._check_room(stream, state)
        return outcome

    def stream(self, stream: Stream) -> StreamState | None:
        """What is known of a stream; None once its holder was forgotten.

        Numbers of holders are given out again, so who keeps a `Stream` for longer than a call must
        compare this with what it was.
        """
        return self._streams.get(stream)

    def disconnected(self, stream: Stream, connection: object) -> None:
        """A connection is gone, a snapshot that it had half sent with it; the lease runs on.

        Of a connection that a newer one has replaced nothing is left that could go.
        """
        state = self._streams.get(stream)
        if state is not None and state.connection is connection:
            for action in state.acceptor.disconnect():
                self._act(stream, state, action)

    def goodbye(self, stream: Stream, epoch: Epoch) -> None:
        """A publisher leaves on purpose: no lease, no grace. Of a dead epoch it means nothing."""
        state = self._streams.get(stream)
        if state is not None and state.acceptor.epoch == epoch:
            self._forget_holder(stream[0])

    # ---- time

    def tick(self, now: float) -> None:
        """Hide and forget whose lease ended, end reservations that expired."""
        for news in self._leases.tick(now):
            holder = news.key[0]
            if news.key not in self._streams:
                continue  # forgotten with another shard of its holder, a moment ago
            match news:
                case Hide():
                    self._hide(holder)
                case Forget():
                    if not self._is_alive(holder, besides=news.key[1]):
                        self._forget_holder(holder)
        self.routers.tick(now)
        self._index.expire(now)

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to go on with."""
        return bool(self._replacing)

    def work(self, now: float) -> object | None:
        """One slice of the large replacements that are under way, in turns.

        Returns the connection of a stream that now holds all that it has said, else None.
        """
        while self._replacing:
            stream = self._replacing.popleft()
            state = self._streams.get(stream)
            if state is None or state.replacement is None:
                continue  # forgotten, or begun anew
            self._renew(stream, now)  # what it says meanwhile waits to be heard
            if self._go_on(stream, state, state.replacement):
                self._replacing.append(stream)
                return None
            state.acceptor.restore(DegradedReason.SNAPSHOT_PENDING)
            self._tell_trust(stream, state)
            return state.connection
        return None

    def next_deadline(self) -> float | None:
        """Tick no later than this; None while nothing waits for time."""
        candidates = [self._leases.next_deadline(), self.routers.next_deadline()]
        return min((at for at in candidates if at is not None), default=None)

    # ---- reading

    def streams(self, holder: HolderId) -> Iterator[tuple[int, StreamState]]:
        for shard in sorted(self.fleet.record(holder).shards):
            if (holder, shard) in self._streams:
                yield shard, self._streams[holder, shard]

    def trust(self, holder: HolderId) -> tuple[Trust, str]:
        """EXACT, or DEGRADED with the reasons of all shards."""
        reasons: set[DegradedReason] = set()
        shards = dict(self.streams(holder))
        for state in shards.values():
            reasons |= state.acceptor.degraded_reasons()
        if len(shards) < self.fleet.record(holder).info.shards_count:
            reasons.add(DegradedReason.UNKNOWN)
        return (Trust.DEGRADED if reasons else Trust.EXACT), ",".join(sorted(reasons))

    def described(self, holder: HolderId) -> tuple[HolderInfo, Trust]:
        """`info` and `trust` of a holder; the same object again until one of them changes."""
        known = self._described.get(holder)
        if known is None:
            trust, _ = self.trust(holder)
            known = self._described[holder] = (self.fleet.record(holder).info, trust)
        return known

    def load(self, holder: HolderId) -> Load:
        """The load that the holder's lowest shard reported last."""
        for _, state in self.streams(holder):
            return state.load
        return Load()

    def heard_at(self, holder: HolderId) -> float:
        """When the most silent shard of the holder was last heard."""
        return min((state.heard_at for _, state in self.streams(holder)), default=0.0)

    def held(self, stream: Stream) -> dict[Tier, int]:
        """Copies that a stream holds, per tier that its kind of holder has."""
        kind = self.fleet.record(stream[0]).key.kind
        return {
            tier: self._index.digest(stream[0], tier, stream[1]).count
            for tier in TIERS_OF_KIND[kind]
        }

    # ---- parts

    def _stream(self, stream: Stream) -> StreamState:
        state = self._streams.get(stream)
        if state is None:
            raise CallerError("the holder of this stream was forgotten: say Hello again")
        return state

    def _is_dead_epoch(self, stream: Stream, epoch: Epoch) -> bool:
        state = self._streams.get(stream)
        return state is not None and state.acceptor.has_fenced(epoch)

    def _fenced(
        self, stream: Stream, message: Hello, now: float
    ) -> tuple[Stream, Outcome[PackedBatch]]:
        outcome = self._streams[stream].acceptor.hello(message, now)
        return stream, self._carry_out(stream, outcome)

    def _is_alive(self, holder: HolderId, besides: int) -> bool:
        """Whether another shard of the holder has a running lease."""
        return any(
            self._leases.state((holder, shard)) is LeaseState.LIVE
            for shard in self.fleet.record(holder).shards
            if shard != besides
        )

    def _carry_out(self, stream: Stream, outcome: Outcome[PackedBatch]) -> Outcome[PackedBatch]:
        """Do what concerns the index, in order; replies stay in the outcome for the caller."""
        self.counts.verdicts[outcome.verdict] += 1
        state = self._streams[stream]
        for action in outcome.actions:
            if not isinstance(action, AckUpTo):  # nearly every message brings one
                self._act(stream, state, action)
        self._tell_trust(stream, state)
        return outcome

    def _tell_trust(self, stream: Stream, state: StreamState) -> None:
        if state.trust is not state.acceptor.trust:
            self._describe_anew(stream[0])
            self._changes.holder_changed(stream[0])

    def _describe_anew(self, holder: HolderId) -> None:
        """The holder's description has changed and is about to be told."""
        self._described.pop(holder, None)
        for _, state in self.streams(holder):
            state.trust = state.acceptor.trust

    def _act(self, stream: Stream, state: StreamState, action: Action[PackedBatch]) -> None:
        match action:
            case ApplyBatch():
                if state.replacement is not None:
                    state.replacement.later.append(action.payload)
                else:
                    self._apply(stream, state, action.payload)
            case StageChunk(_, batch):
                state.staged.append(batch)
                state.staged_bytes += batch.payload_bytes + CHUNK_BYTES
            case DiscardStaged():
                state.staged, state.staged_bytes = [], 0
            case ReplaceWithSnapshot():
                self._begin_replacement(stream, state)
            case ClearStream():
                state.replacement = None
                self._index.clear(stream[0], shard=stream[1])
                self._changes.stream_replaced(stream)

    def _apply(self, stream: Stream, state: StreamState, batch: PackedBatch) -> None:
        result = self._index.apply(stream[0], stream[1], batch)
        counts = self.counts
        counts.events_applied += batch.events_count
        counts.blocks_stored += result.stored
        counts.blocks_removed += result.removed
        counts.blocks_unknown += result.unknown
        counts.blocks_evicted += result.evicted
        if result.evicted:
            self._mark_truncated()
        state.room_blocks -= result.stored
        self._changes.batch_applied(stream, batch)

    def _begin_replacement(self, stream: Stream, state: StreamState) -> None:
        """Let a stream hold exactly what was staged: at once, or with `work` if that is much."""
        staged, state.staged, state.staged_bytes = state.staged, [], 0
        tiers = TIERS_OF_KIND[self.fleet.record(stream[0]).key.kind]
        replacement = Replacement(self._index, stream, tiers, staged)
        state.replacement = replacement
        if replacement.blocks_count <= AT_ONCE_BLOCKS_MAX:
            while self._go_on(stream, state, replacement):
                pass
        else:
            state.acceptor.degrade(DegradedReason.SNAPSHOT_PENDING)
            self._replacing.append(stream)

    def _go_on(self, stream: Stream, state: StreamState, replacement: Replacement) -> bool:
        """One slice; False when the stream holds what it should, with all that came meanwhile."""
        if replacement.go_on():
            return True
        state.replacement = None
        self.counts.blocks_stored += replacement.stored_blocks
        self.counts.blocks_evicted += replacement.evicted_blocks
        if replacement.evicted_blocks:
            self._mark_truncated()
        state.room_blocks = -1
        self._changes.stream_replaced(stream)
        for batch in replacement.later:
            self._apply(stream, state, batch)
        return False

    def _mark_truncated(self) -> None:
        """Holders that lost blocks to the byte budget are DEGRADED: the index knows less."""
        for stats in self._index.stats().holders:
            if stats.truncated:
                for shard, state in self.streams(stats.holder):
                    state.acceptor.degrade(DegradedReason.BUDGET_EVICTED)
                    self._tell_trust((stats.holder, shard), state)

    def _check_room(self, stream: Stream, state: StreamState) -> None:
        """LimitError where a stream has come to hold or stage too much; asked last of all."""
        blocks, blocks_max = 0, self._config.holder_blocks_max
        if state.room_blocks < 0:
            blocks = sum(self.held(stream).values())
            state.room_blocks = blocks_max - blocks
        if blocks > blocks_max or state.staged_bytes > STAGED_BLOCK_BYTES * blocks_max:
            self.counts.refused["holder_full"] += 1
            raise LimitError(f"more than {blocks_max} blocks of one holder")

    def _digest(self, stream: Stream) -> Digest:
        own = TIERS_OF_KIND[self.fleet.record(stream[0]).key.kind]
        return tuple(
            TierDigest(*astuple(self._index.digest(stream[0], tier, stream[1])))
            if tier in own
            else TierDigest(0, 0)
            for tier in HOLDER_TIERS
        )

    def _renew(self, stream: Stream, now: float) -> None:
        if self._leases.renew(stream, now) is Renewal.RENEWED:
            return
        record = self.fleet.record(stream[0])
        all_alive = all(
            self._leases.state((stream[0], shard)) is LeaseState.LIVE for shard in record.shards
        )
        if record.hidden and all_alive:
            for _, state in self.streams(stream[0]):
                state.acceptor.restore(DegradedReason.HIDDEN)
            self.fleet.resume(stream[0])
            self._describe_anew(stream[0])
            self._changes.holder_resumed(stream[0])

    def _hide(self, holder: HolderId) -> None:
        for _, state in self.streams(holder):
            state.acceptor.degrade(DegradedReason.HIDDEN)
        self._describe_anew(holder)
        if not self.fleet.record(holder).hidden:
            self.fleet.hide(holder)
            self._changes.holder_hidden(holder)

    def _forget_holder(self, holder: HolderId) -> None:
        record = self.fleet.record(holder)
        self.routers.worker_gone(holder)
        for shard in record.shards:
            self._leases.leave((holder, shard))
            forgotten = self._streams.pop((holder, shard), None)
            if forgotten is not None:
                forgotten.replacement = None
        self.fleet.leave(holder)
        self._described.pop(holder, None)
        self._changes.holder_left(record)


def _fits(own_tiers: bytes, batch: PackedBatch) -> bool:
    """Whether every event speaks of a tier that this kind of holder has, or of none.

    A column less all of its allowed values is empty: no loop over events, whatever the size.
    """
    if not batch.tiers.translate(None, own_tiers):
        return True
    events = zip(batch.kinds, batch.tiers, strict=True)
    return all(kind == EventKind.CLEAR_ALL or tier in own_tiers for kind, tier in events)


def _only_stores(batch: PackedBatch) -> bool:
    return not batch.kinds.translate(None, _STORES)

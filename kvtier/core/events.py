"""Acceptance of one event stream by an index: what to do with each message of a publisher.

One `Acceptor` per (holder, shard). It orders, it does not look inside: payloads are opaque, the
index itself is the caller's. What must not live here: the index, connections, clocks, leases
(`membership`).

The rules, in short:

- An epoch is a random name, not a number: a Hello with one that was never seen ends the life of
  the epoch before it, for ever (bounded memory of the dead, `limits.DEAD_EPOCHS_COUNT_MAX`).
- Within an epoch only `applied + 1` is applied. What is behind is a duplicate, what is ahead is
  held (bounded) and the missing part asked for. The publisher answers with a delta from its ring
  or, if that has forgotten, with a snapshot.
- A snapshot is staged beside the old state and replaces it when it is whole. It carries the
  watermark `at_seq`; batches up to it are contained in it, later ones are held and follow the
  swap without a hole. An unfinished one leaves the old state standing. (Two watermarks and
  "buffer first, never wipe before the replacement is there" are the lessons of the recovery bugs
  in llm-d-router#1887 and ai-dynamo/dynamo#14627.)
- A sequence that runs backwards inside an epoch is never a silent reset: it is counted and makes
  the stream DEGRADED, and the answer tells the publisher how far the index is, upon which a
  publisher that really regressed fences itself (`publication`).
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvtier import limits
from kvtier.core.event_messages import (
    U64_MAX,
    AckUpTo,
    Batch,
    Digest,
    Fence,
    FenceReason,
    Heartbeat,
    Hello,
    Payload_co,
    Reply,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotMark,
    SnapshotReason,
    check_epoch,
    check_seq,
)
from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq, Trust

Payload = TypeVar("Payload")


class Verdict(StrEnum):
    """What a message turned out to be. One counter each."""

    RESUME = "resume"
    NEED_SNAPSHOT = "need_snapshot"
    APPLY = "apply"
    DUPLICATE = "duplicate"
    """Already applied, or contained in the snapshot that is arriving."""
    GAP = "gap"
    """Something before it is missing; the batch itself is held if there is room."""
    HELD = "held"
    """Waits for the snapshot that is arriving."""
    OK = "ok"
    DRIFT = "drift"
    STAGED = "staged"
    REPLACED = "replaced"
    ABORTED = "aborted"
    """A snapshot with a hole was given up."""
    STALE = "stale"
    """Of a snapshot that is finished, given up or older than the state."""
    UNDECODABLE = "undecodable"
    UNKNOWN_EPOCH = "unknown_epoch"
    FENCED = "fenced"
    PROTOCOL_ERROR = "protocol_error"


class DegradedReason(StrEnum):
    """Why a stream's state is not known to equal its publisher's."""

    UNKNOWN = "unknown"
    """No Hello yet."""
    GAP_PENDING = "gap_pending"
    SNAPSHOT_PENDING = "snapshot_pending"
    BUDGET_EVICTED = "budget_evicted"
    UNDECODABLE = "undecodable"
    DRIFT = "drift"
    HIDDEN = "hidden"
    REGRESSED = "regressed"
    """The publisher spoke of fewer batches than it has sent before."""
    SOURCE = "source"
    """The publisher itself does not know whether it says all that is held."""


@dataclass(frozen=True, slots=True)
class ApplyBatch(Generic[Payload_co]):
    """Apply to the live state, now."""

    seq: Seq
    payload: Payload_co


@dataclass(frozen=True, slots=True)
class StageChunk(Generic[Payload_co]):
    """Keep aside, or build up aside, under `mark`."""

    mark: SnapshotMark
    payload: Payload_co


@dataclass(frozen=True, slots=True)
class ReplaceWithSnapshot:
    """Swap the stream's live state for what was staged under `mark`, in one step for readers."""

    mark: SnapshotMark


@dataclass(frozen=True, slots=True)
class DiscardStaged:
    """Forget what was staged under `mark`; the live state stands."""

    mark: SnapshotMark


@dataclass(frozen=True, slots=True)
class ClearStream:
    """The life that held these blocks is over: empty the stream's live state."""


Action = (
    ApplyBatch[Payload_co]
    | StageChunk[Payload_co]
    | ReplaceWithSnapshot
    | DiscardStaged
    | ClearStream
    | Reply
)
"""Carry out in order. `Reply`s go back on the stream, the others concern the index."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Payload_co]):
    verdict: Verdict
    actions: tuple[Action[Payload_co], ...] = ()


@dataclass(frozen=True, slots=True)
class AcceptorConfig:
    """Room for batches that came too early, and how long to wait before asking again."""

    held_batches_max: int = 1024
    held_bytes_max: int = 64 << 20
    resend_timeout_s: float = 1.0
    snapshot_timeout_s: float = 5.0
    """Without any progress of the snapshot that was asked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_batches_max <= limits.RING_BATCHES_MAX:
            raise CallerError(
                f"held_batches_max: want 0 .. {limits.RING_BATCHES_MAX}, "
                f"got {self.held_batches_max}"
            )
        if self.held_bytes_max < 0 or self.resend_timeout_s <= 0 or self.snapshot_timeout_s <= 0:
            raise CallerError("held_bytes_max and timeouts: want positive values")


@dataclass(slots=True)
class _Assembly:
    mark: SnapshotMark
    next_chunk: int
    touched_at: float


class Acceptor(Generic[Payload]):
    """State of one stream on the index side. Mutated by every message; never by reading.

    Call in the order of arrival and carry out the returned actions before the next call. `now` is
    monotonic seconds. O(1) a message, plus what a filled hole releases. Messages with numbers
    outside u64 raise CallerError and change nothing.
    """

    def __init__(self, config: AcceptorConfig | None = None) -> None:
        self._config = config or AcceptorConfig()
        self._dead: OrderedDict[Epoch, None] = OrderedDict()
        self._counts = dict.fromkeys(Verdict, 0)
        self._held_overflows = 0
        self._epoch: Epoch | None = None
        self._epoch_last: Epoch | None = None
        """The living epoch, or the forgotten one: it dies when another is adopted."""
        self._reset()

    def _reset(self) -> None:
        self._applied = 0
        self._target = 0
        """Last batch that the publisher is known to have reached in this epoch."""
        self._synced = False
        """The live state is the publisher's state after batch `_applied`, as far as is known."""
        self._need: SnapshotReason | None = None
        self._marks: set[DegradedReason] = set()
        self._held: dict[int, Batch[Payload]] = {}
        self._held_bytes = 0
        self._assembly: _Assembly | None = None
        self._snapshot_id_last = -1
        self._snapshot_asked_at: float | None = None
        self._resend_asked: tuple[int, float] | None = None

    # ---- reading

    @property
    def epoch(self) -> Epoch | None:
        """The living epoch; None before the first Hello and after `forget`."""
        return self._epoch

    @property
    def applied_seq(self) -> Seq:
        return Seq(self._applied)

    @property
    def lag_batches(self) -> int:
        """How many batches the index is known to be behind its publisher."""
        return max(0, self._target - self._applied)

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Messages by verdict since the acceptor was made; live view, do not write."""
        return self._counts

    @property
    def held_overflows_count(self) -> int:
        """Batches that came too early and found no room; they are asked for again."""
        return self._held_overflows

    @property
    def trust(self) -> Trust:
        """EXACT exactly when `degraded_reasons` is empty; asked after every message, so cheap."""
        is_exact = (
            self._epoch is not None
            and self._synced
            and self._need is None
            and self._target <= self._applied
            and not self._marks
        )
        return Trust.EXACT if is_exact else Trust.DEGRADED

    def degraded_reasons(self) -> frozenset[DegradedReason]:
        """All reasons that hold now; empty means EXACT."""
        reasons = set(self._marks)
        if self._epoch is None:
            reasons.add(DegradedReason.UNKNOWN)
        elif not self._synced or self._need is not None:
            reasons.add(DegradedReason.SNAPSHOT_PENDING)
        if self._target > self._applied:
            reasons.add(DegradedReason.GAP_PENDING)
        return frozenset(reasons)

    def has_fenced(self, epoch: Epoch) -> bool:
        """Whether this epoch is dead: its messages change nothing any more. Mutates nothing."""
        return self._is_dead(epoch)

    # ---- messages

    def hello(self, message: Hello, now: float) -> Outcome[Payload]:
        """A stream opens or introduces itself again: RESUME, NEED_SNAPSHOT or FENCED.

        PROTOCOL_ERROR if the same epoch claims fewer batches than it has already sent; it is
        answered like RESUME so that the publisher can see for itself.
        """
        check_epoch(message.epoch)
        check_seq(message.seq)
        if self._is_dead(message.epoch):
            return self._fence(message.epoch)
        if message.epoch != self._epoch:
            outcome = self._adopt(message, now)
            self._note_trust(message.trust)
            return outcome
        self._note_trust(message.trust)
        # The snapshot that was arriving belonged to the connection before this one.
        actions: list[Action[Payload]] = self._drop_assembly()
        self._target = max(self._target, message.seq)
        if not self._synced or self._need is not None:
            actions.append(self._ask_snapshot(self._need or SnapshotReason.NEW_EPOCH, now))
            return self._outcome(Verdict.NEED_SNAPSHOT, actions)
        self._resend_asked = (self._applied + 1, now)
        actions.append(Resume(message.epoch, Seq(self._applied)))
        if message.seq < self._applied:
            self._marks.add(DegradedReason.REGRESSED)
            return self._outcome(Verdict.PROTOCOL_ERROR, actions)
        self._marks.discard(DegradedReason.REGRESSED)
        return self._outcome(Verdict.RESUME, actions)

    def batch(self, message: Batch[Payload], now: float) -> Outcome[Payload]:
        """APPLY, DUPLICATE, GAP, HELD, FENCED, UNKNOWN_EPOCH or PROTOCOL_ERROR (seq 0)."""
        if message.epoch != self._epoch:
            return self._foreign(message.epoch)
        seq = message.seq
        check_seq(seq)
        if seq == 0:
            return self._outcome(Verdict.PROTOCOL_ERROR)
        if self._is_duplicate(seq):
            regressed = DegradedReason.REGRESSED in self._marks
            verdict = Verdict.PROTOCOL_ERROR if regressed else Verdict.DUPLICATE
            return self._outcome(verdict, [AckUpTo(message.epoch, Seq(self._applied))])
        self._target = max(self._target, seq)
        if self._assembly is not None and seq <= self._assembly.mark.at_seq:
            return self._outcome(Verdict.DUPLICATE)
        if self._assembly is not None or not self._synced:
            self._hold(message)
            return self._outcome(Verdict.HELD)
        if self._is_ahead(seq):
            self._hold(message)
            return self._outcome(Verdict.GAP, self._ask_resend(now))
        self._applied = seq
        filled = self._drain_held() if self._held else ()
        ack = AckUpTo(message.epoch, Seq(self._applied))
        self._counts[Verdict.APPLY] += 1
        return Outcome(Verdict.APPLY, (ApplyBatch(seq, message.payload), *filled, ack))

    def next_plain(self, epoch: Epoch) -> Seq | None:
        """Number of the batch of `epoch` that `batch` would apply without further ado.

        None where there is none: another epoch, or something is held or arriving. Mutates nothing.
        """
        if epoch != self._epoch or not self._synced or self._assembly is not None or self._held:
            return None
        return Seq(self._applied + 1) if self._applied < U64_MAX else None

    def advance(self, count: int) -> None:
        """The next `count` batches have been applied: what `next_plain` named and those after it.

        Counted as APPLY. The same as `batch` for each, less the price of its messages.
        """
        self._applied += count
        self._target = max(self._target, self._applied)
        self._counts[Verdict.APPLY] += count

    def heartbeat(self, message: Heartbeat, held: Digest | None, now: float) -> Outcome[Payload]:
        """OK, GAP, DRIFT, NEED_SNAPSHOT, HELD (a snapshot is arriving), FENCED, ...

        `held` is the digest of the stream's live state at this moment; None skips the comparison.
        Digests are compared only when nothing is in flight, and not while the index is known to
        have evicted: a snapshot would only be evicted again.
        """
        if message.epoch != self._epoch:
            return self._foreign(message.epoch)
        check_seq(message.seq)
        self._note_trust(message.trust)
        ack = AckUpTo(message.epoch, Seq(self._applied))
        if self._synced and message.seq < self._applied:
            self._marks.add(DegradedReason.REGRESSED)
            return self._outcome(Verdict.PROTOCOL_ERROR, [ack])
        self._marks.discard(DegradedReason.REGRESSED)
        self._note_reached(message.seq)
        if self._assembly is not None and self._is_moving(self._assembly, now):
            return self._outcome(Verdict.HELD)
        if not self._synced or self._need is not None:
            reason = self._need or SnapshotReason.NEW_EPOCH
            return self._outcome(Verdict.NEED_SNAPSHOT, self._ask_snapshot_if_due(reason, now))
        if self._assembly is not None:
            # Nobody waits for it: the publisher chose to send it and stopped half-way.
            return self._outcome(Verdict.ABORTED, [*self._drop_assembly(), *self._ask_resend(now)])
        if self._target > self._applied:
            return self._outcome(Verdict.GAP, self._ask_resend(now))
        if message.seq == self._applied and self._has_drifted(message.digest, held):
            self._marks.add(DegradedReason.DRIFT)
            return self._outcome(Verdict.DRIFT, [self._ask_snapshot(SnapshotReason.DRIFT, now)])
        return self._outcome(Verdict.OK, [ack])

    def snapshot_chunk(self, message: SnapshotChunk[Payload], now: float) -> Outcome[Payload]:
        """One piece of a snapshot: STAGED, REPLACED by the last one, DUPLICATE, STALE, or ABORTED.

        STALE is what belongs to a snapshot that is over, or older than the live state; ABORTED
        means that a piece is missing, and asks for the whole anew.
        """
        mark = message.mark
        if mark.epoch != self._epoch:
            return self._foreign(mark.epoch)
        check_seq(mark.at_seq)
        assembly = self._assembly
        if assembly is None or assembly.mark != mark:
            if mark.snapshot_id <= self._snapshot_id_last:
                return self._outcome(Verdict.STALE)
            return self._open_snapshot(message, now)
        if message.number < assembly.next_chunk:
            return self._outcome(Verdict.DUPLICATE)
        return self._stage(assembly, message, [], now)

    def undecodable(self, epoch: Epoch, now: float) -> Outcome[Payload]:
        """A batch or chunk of this stream could not be decoded: a snapshot must go round it.

        A resend would bring the same bytes. Asked again at most once a `snapshot_timeout_s`, so
        that a publisher which only speaks gibberish is no storm.
        """
        if epoch != self._epoch:
            return self._foreign(epoch)
        self._marks.add(DegradedReason.UNDECODABLE)
        actions = self._drop_assembly()
        actions += self._ask_snapshot_if_due(SnapshotReason.UNDECODABLE, now)
        return self._outcome(Verdict.UNDECODABLE, actions)

    # ---- the caller's own news

    def disconnect(self) -> tuple[Action[Payload], ...]:
        """The connection broke: what was staged is abandoned, state and held batches stand."""
        self._snapshot_asked_at = None
        self._resend_asked = None
        return tuple(self._drop_assembly())

    def degrade(self, reason: DegradedReason) -> None:
        """Mark the stream, e.g. BUDGET_EVICTED after an eviction or HIDDEN at lease expiry.

        All marks but HIDDEN and SOURCE end with the next whole snapshot; `restore` ends one early.
        """
        self._marks.add(reason)

    def restore(self, reason: DegradedReason) -> None:
        """Take back what `degrade` said. A reason that the acceptor itself derives stays."""
        self._marks.discard(reason)

    def resync(self, now: float) -> tuple[Action[Payload], ...]:
        """Ask for a snapshot whatever the state is, e.g. when an evicted holder has room again."""
        if self._epoch is None:
            return ()
        return (self._ask_snapshot(SnapshotReason.OPERATOR, now),)

    def forget(self) -> tuple[Action[Payload], ...]:
        """The grace period is over: drop the state, remember the dead.

        The epoch may come back, but then needs a snapshot.
        """
        actions = [*self._drop_assembly(), ClearStream()]
        self._epoch = None
        self._reset()
        return tuple(actions)

    # ---- guards: each one line, so that tests can prove that each is needed

    def _is_dead(self, epoch: Epoch) -> bool:
        return epoch in self._dead

    def _is_duplicate(self, seq: int) -> bool:
        return self._synced and seq <= self._applied

    def _is_ahead(self, seq: int) -> bool:
        return seq > self._applied + 1

    def _note_reached(self, seq: int) -> None:
        self._target = max(self._target, seq)

    def _note_trust(self, trust: Trust) -> None:
        if trust is Trust.DEGRADED:
            self._marks.add(DegradedReason.SOURCE)
        else:
            self._marks.discard(DegradedReason.SOURCE)

    def _is_next_chunk(self, index: int, expected: int) -> bool:
        return index == expected

    def _splice_seq(self, mark: SnapshotMark) -> int:
        return mark.at_seq

    def _has_drifted(self, claimed: Digest | None, held: Digest | None) -> bool:
        if claimed is None or held is None or DegradedReason.BUDGET_EVICTED in self._marks:
            return False
        return claimed != held

    # ---- parts

    def _outcome(
        self, verdict: Verdict, actions: list[Action[Payload]] | None = None
    ) -> Outcome[Payload]:
        self._counts[verdict] += 1
        return Outcome(verdict, tuple(actions) if actions else ())

    def _fence(self, epoch: Epoch) -> Outcome[Payload]:
        return self._outcome(Verdict.FENCED, [Fence(epoch, FenceReason.DEAD_EPOCH)])

    def _foreign(self, epoch: Epoch) -> Outcome[Payload]:
        check_epoch(epoch)
        if self._is_dead(epoch):
            return self._fence(epoch)
        return self._outcome(Verdict.UNKNOWN_EPOCH, [RequestHello(epoch)])

    def _adopt(self, message: Hello, now: float) -> Outcome[Payload]:
        actions = self._drop_assembly()
        if self._epoch is not None:
            # The blocks died with their process: they are not to be matched while the new life's
            # snapshot is on its way.
            actions.append(ClearStream())
        if self._epoch_last is not None and self._epoch_last != message.epoch:
            self._dead[self._epoch_last] = None
            while len(self._dead) > limits.DEAD_EPOCHS_COUNT_MAX:
                self._dead.popitem(last=False)
        hidden = self._marks & {DegradedReason.HIDDEN}
        self._reset()
        self._marks |= hidden
        self._epoch = self._epoch_last = message.epoch
        self._target = message.seq
        actions.append(self._ask_snapshot(SnapshotReason.NEW_EPOCH, now))
        return self._outcome(Verdict.NEED_SNAPSHOT, actions)

    def _open_snapshot(self, message: SnapshotChunk[Payload], now: float) -> Outcome[Payload]:
        mark = message.mark
        self._snapshot_id_last = mark.snapshot_id
        if self._synced and mark.at_seq < self._applied:
            return self._outcome(Verdict.STALE)
        actions = self._drop_assembly()
        self._assembly = _Assembly(mark, 0, now)
        self._target = max(self._target, mark.at_seq)
        self._release_held_up_to(mark.at_seq)
        return self._stage(self._assembly, message, actions, now)

    def _stage(
        self,
        assembly: _Assembly,
        message: SnapshotChunk[Payload],
        actions: list[Action[Payload]],
        now: float,
    ) -> Outcome[Payload]:
        if not self._is_next_chunk(message.number, assembly.next_chunk):
            actions += self._drop_assembly()
            # A hole is news: ask at once, however lately the last snapshot was asked for.
            actions.append(self._ask_snapshot(self._need or SnapshotReason.INCOMPLETE, now))
            return self._outcome(Verdict.ABORTED, actions)
        assembly.next_chunk = message.number + 1
        assembly.touched_at = now
        actions.append(StageChunk(message.mark, message.payload))
        if not message.last:
            return self._outcome(Verdict.STAGED, actions)
        self._splice(message.mark)
        actions += [ReplaceWithSnapshot(message.mark), *self._drain_held()]
        actions.append(AckUpTo(message.mark.epoch, Seq(self._applied)))
        if self._target > self._applied:
            actions += self._ask_resend(now)
        return self._outcome(Verdict.REPLACED, actions)

    def _splice(self, mark: SnapshotMark) -> None:
        self._assembly = None
        self._applied = self._splice_seq(mark)
        self._synced = True
        self._need = None
        self._snapshot_asked_at = None
        self._marks &= {DegradedReason.HIDDEN, DegradedReason.SOURCE}

    def _hold(self, message: Batch[Payload]) -> None:
        if message.seq in self._held:
            return
        bytes_after = self._held_bytes + message.payload_bytes
        full = len(self._held) >= self._config.held_batches_max
        if full or bytes_after > self._config.held_bytes_max:
            # Not fatal and no restart of a snapshot: after the swap it is a gap like any other.
            self._held_overflows += 1
            return
        self._held[message.seq] = message
        self._held_bytes = bytes_after

    def _drain_held(self) -> list[Action[Payload]]:
        actions: list[Action[Payload]] = []
        while (message := self._held.pop(self._applied + 1, None)) is not None:
            self._applied = message.seq
            self._held_bytes -= message.payload_bytes
            actions.append(ApplyBatch(message.seq, message.payload))
        return actions

    def _release_held_up_to(self, seq: int) -> None:
        for contained in [number for number in self._held if number <= seq]:
            self._held_bytes -= self._held.pop(contained).payload_bytes

    def _drop_assembly(self) -> list[Action[Payload]]:
        if self._assembly is None:
            return []
        assembly, self._assembly = self._assembly, None
        return [DiscardStaged(assembly.mark)] if assembly.next_chunk else []

    def _is_moving(self, assembly: _Assembly, now: float) -> bool:
        return now - assembly.touched_at < self._config.snapshot_timeout_s

    def _ask_snapshot(self, reason: SnapshotReason, now: float) -> RequestSnapshot:
        assert self._epoch is not None
        self._need = reason
        self._snapshot_asked_at = now
        return RequestSnapshot(self._epoch, reason)

    def _ask_snapshot_if_due(self, reason: SnapshotReason, now: float) -> list[Action[Payload]]:
        asked_at = self._snapshot_asked_at
        self._need = reason
        if asked_at is not None and now - asked_at < self._config.snapshot_timeout_s:
            return []
        return [self._ask_snapshot(reason, now)]

    def _ask_resend(self, now: float) -> list[Action[Payload]]:
        assert self._epoch is not None
        if self._need is not None:
            return []  # the snapshot that was asked for brings it
        missing = self._applied + 1
        if self._resend_asked is not None:
            seq, asked_at = self._resend_asked
            if seq == missing and now - asked_at < self._config.resend_timeout_s:
                return []
        self._resend_asked = (missing, now)
        return [RequestResend(self._epoch, Seq(missing))]

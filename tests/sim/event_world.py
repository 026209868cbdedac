"""A publisher, its zombies, its index replicas and a bad network, under a virtual clock.

Every primitive takes explicit arguments, so that a seeded driver and hypothesis can both steer.
The oracle is a dict per (epoch, seq), replayed event by event from what was sealed, beside the
engine's own truth; neither shares code with what is tested.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeVar

import numpy as np

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Digest,
    Fence,
    Heartbeat,
    Hello,
    Reply,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotMark,
    TierDigest,
)
from kvtier.core.events import (
    Acceptor,
    AcceptorConfig,
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
from kvtier.core.membership import Forget, LeaseConfig, Leases, LeaseState, Renewal
from kvtier.core.publication import Message, Publication, PublicationConfig
from kvtier.types import HOLDER_TIERS, Epoch, Seq, Tier, Trust

Carried = bytes | EventBatch
"""What a message brings to an index: encoded events, or a chunk's columns."""
Blocks = Counter[tuple[int, int]]
"""(tier, hash) -> copies."""

Item = TypeVar("Item", Message, Reply)

LEASE_S = 3.0
KEY = "publisher"
TIERS = (Tier.GPU, Tier.DRAM)


class Reached(StrEnum):
    """What a run has seen: each must be reached over all seeds, or the simulation proves little."""

    DROP = auto()
    DUPLICATE = auto()
    REORDER = auto()
    DELAYED_ACROSS_RESTART = auto()
    PUBLISHER_RESTART = auto()
    INDEX_RESTART = auto()
    ZOMBIE = auto()
    LAST_BATCH_LOST = auto()
    STALL_OF_TWO_LEASES = auto()
    RACE_WITH_SNAPSHOT = auto()
    TAMPERED = auto()
    RECONNECT = auto()
    DELTA_RESEND = auto()
    SNAPSHOT = auto()
    SPLICE_WITH_HELD = auto()
    FENCE = auto()
    RESUME_WITHOUT_SNAPSHOT = auto()
    DRIFT_FOUND = auto()
    DRIFT_REPAIRED = auto()
    RING_OVERFLOW = auto()
    SNAPSHOT_ABORTED = auto()
    HELD_OVERFLOW = auto()
    HIDDEN = auto()
    FORGOTTEN = auto()
    SUCCESSOR = auto()


class Fate(StrEnum):
    """What the network does with the message it looks at."""

    DELIVER = auto()
    DROP = auto()
    DUPLICATE = auto()


def check(validator: str, holds: bool, story: str) -> None:
    """Raise with the name of the validator that does not hold."""
    if not holds:
        raise AssertionError(f"{validator}: {story}")


def replay(blocks: Blocks, events: EventBatch) -> None:
    """Apply a batch one block at a time."""
    at = 0
    for kind, tier, length in zip(events.kinds, events.tiers, events.lengths, strict=True):
        hashes = events.hashes[at : at + int(length)].tolist()
        at += int(length)
        if kind == EventKind.STORE:
            blocks.update((int(tier), name) for name in hashes)
        elif kind == EventKind.REMOVE:
            for name in hashes:
                take(blocks, int(tier), name)
        else:
            for tier_hash in list(blocks):
                if kind == EventKind.CLEAR_ALL or tier_hash[0] == tier:
                    del blocks[tier_hash]


def take(blocks: Blocks, tier: int, name: int) -> None:
    """Remove one copy if there is one."""
    count = blocks.pop((tier, name), 0)
    if count > 1:
        blocks[tier, name] = count - 1


def digest_of(blocks: Blocks) -> Digest:
    counts = [0] * len(HOLDER_TIERS)
    xors = [0] * len(HOLDER_TIERS)
    for (tier, name), count in blocks.items():
        counts[tier] += count
        xors[tier] ^= name
    return tuple(map(TierDigest, counts, xors))


@dataclass
class Index:
    """The shell of one index replica: carries actions out on a dict, and checks each of them."""

    name: str
    world: "World"
    acceptor: Acceptor[Carried]
    leases: Leases[str]
    blocks: Blocks = field(default_factory=Counter)
    staged: dict[SnapshotMark, Blocks] = field(default_factory=dict)
    replaced: bool = False
    """A whole snapshot of the living epoch has arrived."""
    tampered: bool = False
    adopted: list[Epoch] = field(default_factory=list)
    last_applied: int = 0
    applied: set[int] = field(default_factory=set)
    acked: dict[Epoch, int] = field(default_factory=dict)

    def take_in(self, message: Message) -> list[Reply]:
        acceptor, now = self.acceptor, self.world.now
        known = acceptor.epoch == message.epoch if isinstance(message, Hello) else False
        pending = DegradedReason.SNAPSHOT_PENDING in acceptor.degraded_reasons()
        outcome: Outcome[Carried]
        match message:
            case Hello():
                outcome = acceptor.hello(message, now)
                check(
                    "resumable",
                    not known or pending or outcome.verdict is not Verdict.NEED_SNAPSHOT,
                    f"{self.name} wanted a snapshot of an epoch that it has",
                )
            case Batch():
                outcome = acceptor.batch(message, now)
            case Heartbeat():
                outcome = acceptor.heartbeat(message, digest_of(self.blocks), now)
            case SnapshotChunk():
                outcome = acceptor.snapshot_chunk(message, now)
        self._note(outcome)
        if outcome.verdict not in (Verdict.FENCED, Verdict.UNKNOWN_EPOCH):
            self._renew()
        return self.carry_out(outcome.actions)

    def carry_out(self, actions: tuple[Action[Carried], ...]) -> list[Reply]:
        replies: list[Reply] = []
        for action in actions:
            match action:
                case ApplyBatch(seq, payload):
                    self._apply(seq, self.world.decode(payload))
                case StageChunk(mark, payload):
                    replay(self.staged.setdefault(mark, Counter()), self.world.decode(payload))
                case ReplaceWithSnapshot(mark):
                    self._replace(mark)
                case DiscardStaged(mark):
                    self.staged.pop(mark)
                case ClearStream():
                    self.blocks.clear()
                    self.replaced = self.tampered = False
                    self.last_applied = 0
                    self.applied.clear()
                case _:
                    self._reply(action)
                    replies.append(action)
        self.validate()
        return replies

    def tick(self) -> None:
        for news in self.leases.tick(self.world.now):
            if isinstance(news, Forget):
                self.world.reach(Reached.FORGOTTEN)
                self.carry_out(self.acceptor.forget())
            else:
                self.world.reach(Reached.HIDDEN)
                self.acceptor.degrade(DegradedReason.HIDDEN)

    def validate(self) -> None:
        epoch, applied = self.acceptor.epoch, self.acceptor.applied_seq
        if epoch is not None and (not self.adopted or self.adopted[-1] != epoch):
            check("ordered", epoch not in self.adopted, f"{self.name} adopted a dead epoch again")
            self.adopted.append(epoch)
        check("ordered", applied == self.last_applied, f"{self.name} counts other than it applies")
        if self.tampered:
            return
        exact = self.acceptor.trust is Trust.EXACT
        check("atomic", self.replaced or not exact, f"{self.name} trusts a state it never got")
        wanted: Blocks = Counter()
        if self.replaced and epoch is not None:
            wanted = self.world.history[epoch, applied]
        check("atomic", self.blocks == wanted, f"{self.name} is not at {applied} of its epoch")

    def _apply(self, seq: Seq, events: EventBatch) -> None:
        check("unique", seq not in self.applied, f"{self.name} applied {seq} twice")
        check("ordered", seq == self.last_applied + 1, f"{seq} after {self.last_applied}")
        self.applied.add(seq)
        self.last_applied = seq
        replay(self.blocks, events)

    def _replace(self, mark: SnapshotMark) -> None:
        check("reliable", mark.at_seq >= self.last_applied, "a snapshot took applied batches back")
        self.blocks = self.staged.pop(mark)
        if self.tampered:
            self.world.reach(Reached.DRIFT_REPAIRED)
        self.replaced, self.tampered = True, False
        self.last_applied = mark.at_seq
        self.applied = set(range(1, mark.at_seq + 1))
        self.world.reach(Reached.SNAPSHOT)

    def _reply(self, reply: Reply) -> None:
        match reply:
            case AckUpTo(epoch, seq):
                held = epoch == self.acceptor.epoch and seq <= self.acceptor.applied_seq
                check("reliable", held, f"{self.name} acknowledged {seq} without having it")
                check("reliable", seq >= self.acked.get(epoch, 0), "an acknowledgement was lost")
                self.acked[epoch] = seq
            case Fence():
                self.world.reach(Reached.FENCE)
            case Resume() | RequestSnapshot() | RequestResend() | RequestHello():
                pass

    def _renew(self) -> None:
        if self.leases.renew(KEY, self.world.now) is Renewal.RESUMED:
            self.acceptor.restore(DegradedReason.HIDDEN)
            if DegradedReason.SNAPSHOT_PENDING not in self.acceptor.degraded_reasons():
                self.world.reach(Reached.RESUME_WITHOUT_SNAPSHOT)

    def _note(self, outcome: Outcome[Carried]) -> None:
        if outcome.verdict is Verdict.HELD:
            self.world.reach(Reached.RACE_WITH_SNAPSHOT)
        elif outcome.verdict is Verdict.DRIFT:
            check("atomic", self.tampered, f"{self.name} sees drift where there is none")
            self.world.reach(Reached.DRIFT_FOUND)
        elif outcome.verdict is Verdict.ABORTED:
            self.world.reach(Reached.SNAPSHOT_ABORTED)
        elif outcome.verdict is Verdict.REPLACED and any(
            isinstance(action, ApplyBatch) for action in outcome.actions
        ):
            self.world.reach(Reached.SPLICE_WITH_HELD)
        if self.acceptor.held_overflows_count:
            self.world.reach(Reached.HELD_OVERFLOW)


@dataclass
class Link:
    """Both directions between the publisher's side and one index replica."""

    to_index: list[Message] = field(default_factory=list)
    to_publisher: list[Reply] = field(default_factory=list)


class World:
    """All actors. The two types are where tests put in a mutant."""

    def __init__(
        self,
        indexes_count: int = 1,
        acceptor_type: Callable[[AcceptorConfig], Acceptor[Carried]] = Acceptor,
        publication_type: type[Publication] = Publication,
    ) -> None:
        self.now = 100.0
        self.acceptor_type = acceptor_type
        self.publication_type = publication_type
        self.reached: Counter[Reached] = Counter()
        self.truth: Blocks = Counter()
        self.history: dict[tuple[Epoch, int], Blocks] = {}
        self.sealed: dict[bytes, EventBatch] = {}
        self.epochs_count = 0
        self.zombies: list[Publication] = []
        self.stalled = False
        self.publication = self._first_publication()
        self.indexes = [self._new_index(f"index-{n}") for n in range(indexes_count)]
        self.links = {index.name: Link() for index in self.indexes}
        self._attach_all()

    def reach(self, what: Reached) -> None:
        self.reached[what] += 1

    # ---- the engine

    def store(self, tier: Tier, chain: int, start: int, length: int) -> None:
        """Blocks `start` .. of a chain appear; each chain has names of its own."""
        names = [chain * 100 + start + step for step in range(1, length + 1)]
        self.truth.update((tier, name) for name in names)
        parent = chain * 100 + start if start else 0
        self.publication.store(tier, parent, np.array(names, np.uint64), self.now)

    def remove(self, tier: Tier, names: list[int]) -> None:
        for name in names:
            take(self.truth, tier, name)
        self.publication.remove(tier, names, self.now)

    def clear(self, tier: Tier | None) -> None:
        for tier_hash in list(self.truth):
            if tier is None or tier_hash[0] == tier:
                del self.truth[tier_hash]
        if tier is None:
            self.publication.clear_all(self.now)
        else:
            self.publication.clear_tier(tier, self.now)

    # ---- the publisher's shell

    def poll(self, index: Index, messages_max: int) -> None:
        if self.stalled:
            return
        overflows = self.publication.stats.overflows
        messages = self.publication.poll(index.name, self.now, messages_max)
        self.links[index.name].to_index += messages
        if self.publication.stats.overflows > overflows:
            self.reach(Reached.RING_OVERFLOW)

    def beat(self, index: Index) -> None:
        if self.stalled:
            return
        message = self.publication.heartbeat(index.name)
        if message is not None:
            self.links[index.name].to_index.append(message)

    def zombie_speaks(self, index: Index) -> None:
        """A process that should be dead says what it has to say."""
        for zombie in self.zombies:
            if zombie.fenced is None:
                self.reach(Reached.ZOMBIE)
                self.links[index.name].to_index += zombie.poll(index.name, self.now, 4)
                message = zombie.heartbeat(index.name)
                if message is not None:
                    self.links[index.name].to_index.append(message)

    # ---- the network

    def deliver_to_index(self, index: Index, position: int, fate: Fate) -> None:
        queue = self.links[index.name].to_index
        message = self._pick(queue, position, fate)
        if message is not None:
            self.links[index.name].to_publisher += index.take_in(message)

    def deliver_to_publisher(self, index: Index, position: int, fate: Fate) -> None:
        if self.stalled:
            return
        reply = self._pick(self.links[index.name].to_publisher, position, fate)
        if reply is None:
            return
        resends = self.publication.stats.resends
        self.publication.receive(index.name, reply)
        if self.publication.stats.resends > resends:
            self.reach(Reached.DELTA_RESEND)
        for zombie in self.zombies:
            zombie.receive(index.name, reply)
        if self.publication.fenced is not None:
            self.reach(Reached.SUCCESSOR)
            epoch = self._draw_epoch()
            self.publication = self.publication.successor(epoch)
            self.history[epoch, 0] = Counter(self.truth)
            self._attach_all()

    def lose_last_batch(self, index: Index) -> None:
        """Nothing follows the batch that is lost."""
        self.publication.flush()
        self.poll(index, 64)
        queue = self.links[index.name].to_index
        kept = [message for message in queue if not isinstance(message, Batch)]
        if len(kept) < len(queue):
            self.reach(Reached.LAST_BATCH_LOST)
        queue[:] = kept

    # ---- faults of the actors

    def restart_publisher(self, becomes_zombie: bool) -> None:
        """kill -9: what it held is gone. Or so everybody thinks, when it becomes a zombie."""
        self.reach(Reached.PUBLISHER_RESTART)
        if any(link.to_index for link in self.links.values()):
            self.reach(Reached.DELAYED_ACROSS_RESTART)
        self.zombies = [self.publication] if becomes_zombie else []
        self.truth.clear()
        self.stalled = False
        self.publication = self._first_publication()
        self._attach_all()

    def restart_index(self, index: Index) -> None:
        """Its memory is gone; what was on its way arrives at the new process."""
        self.reach(Reached.INDEX_RESTART)
        if self.links[index.name].to_index:
            self.reach(Reached.DELAYED_ACROSS_RESTART)
        at = self.indexes.index(index)
        self.indexes[at] = self._new_index(index.name)
        if not self.stalled:
            self.publication.attach(index.name)

    def reconnect(self, index: Index) -> None:
        self.reach(Reached.RECONNECT)
        index.carry_out(index.acceptor.disconnect())
        if not self.stalled:
            self.publication.attach(index.name)

    def tamper(self, index: Index) -> None:
        """The index's memory goes wrong by itself."""
        if index.blocks and index.acceptor.trust is Trust.EXACT:
            self.reach(Reached.TAMPERED)
            index.blocks.pop(next(iter(index.blocks)))
            index.tampered = True

    def stall_for_two_leases(self) -> None:
        """The publisher stands still, the indexes do not."""
        self.reach(Reached.STALL_OF_TWO_LEASES)
        self.stalled = True
        self.advance(2 * LEASE_S)

    def wake(self) -> None:
        self.stalled = False

    def advance(self, seconds: float) -> None:
        """Pass time in steps that an index believes."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for index in self.indexes:
                index.tick()

    # ---- the end

    def quiesce(self, rounds_max: int = 40) -> None:
        """Faults stop; soon every index must equal the truth, and stay so."""
        self.zombies = []
        self.wake()
        calm = 0
        for _ in range(rounds_max):
            self.advance(0.5)
            for index in list(self.indexes):
                self.poll(index, 64)
                self.beat(index)
                self._drain(index)
            calm = calm + 1 if not self.unsettled() else 0
            if calm == 2:
                return
        raise AssertionError(f"converged: {self.unsettled()} after {rounds_max} heartbeats")

    def unsettled(self) -> list[str]:
        """What is not yet as it must be when all is quiet."""
        problems: list[str] = []
        for index in self.indexes:
            if index.blocks != self.truth:
                problems.append(f"{index.name} differs from the truth")
            if index.acceptor.trust is not Trust.EXACT:
                reasons = sorted(index.acceptor.degraded_reasons())
                problems.append(f"{index.name} is degraded by {', '.join(reasons)}")
            if index.leases.state(KEY) is not LeaseState.LIVE:
                problems.append(f"{index.name} hides a living publisher")
            if index.acceptor.epoch != self.publication.epoch:
                problems.append(f"{index.name} follows another epoch")
        return problems

    def decode(self, payload: Carried) -> EventBatch:
        return self.sealed[payload] if isinstance(payload, bytes) else payload

    def _drain(self, index: Index) -> None:
        link = self.links[index.name]
        for _ in range(1000):
            if not link.to_index and not link.to_publisher:
                return
            while link.to_index:
                self.deliver_to_index(index, 0, Fate.DELIVER)
            while link.to_publisher:
                self.deliver_to_publisher(index, 0, Fate.DELIVER)
            self.poll(index, 64)
        raise AssertionError("converged: the two sides never stop talking")

    def _pick(self, queue: list[Item], position: int, fate: Fate) -> Item | None:
        if not queue:
            return None
        position %= len(queue)
        if position:
            self.reach(Reached.REORDER)
        if fate is Fate.DUPLICATE:
            self.reach(Reached.DUPLICATE)
            return queue[position]
        message = queue.pop(position)
        if fate is Fate.DROP:
            self.reach(Reached.DROP)
            return None
        return message

    def _first_publication(self) -> Publication:
        """Rings and batches are tiny, so that overflow and splitting happen in short runs."""
        epoch = self._draw_epoch()
        self.history[epoch, 0] = Counter()
        config = PublicationConfig(
            batch_blocks_max=6,
            batch_events_max=4,
            coalesce_s=0.05,
            ring_batches_max=6,
            window_batches_max=8,
            chunk_blocks_max=4,
        )
        return self.publication_type(epoch, self._encode, config)

    def _draw_epoch(self) -> Epoch:
        """Unordered, but the same in every run of a seed."""
        self.epochs_count += 1
        return Epoch(self.epochs_count * 0x9E3779B97F4A7C15 % 2**64)

    def _encode(self, epoch: Epoch, seq: Seq, events: EventBatch) -> bytes:
        blocks = Counter(self.history[epoch, seq - 1])
        replay(blocks, events)
        self.history[epoch, seq] = blocks
        payload = f"{epoch}:{seq}".encode().ljust(events.payload_bytes)
        self.sealed[payload] = events
        return payload

    def _new_index(self, name: str) -> Index:
        config = AcceptorConfig(held_batches_max=5, resend_timeout_s=0.6, snapshot_timeout_s=1.2)
        leases = Leases[str](LeaseConfig(lease_s=LEASE_S, grace_s=2.5 * LEASE_S))
        return Index(name, self, self.acceptor_type(config), leases)

    def _attach_all(self) -> None:
        for index in self.indexes:
            self.publication.attach(index.name)

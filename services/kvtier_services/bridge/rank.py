"""One rank of the engine: its messages in, what an index is to know out.

Belongs to one thread. What must not live here: sockets, disks, the order of messages and what they
mean (`kvtier.core.engine_sequence`, `engine_holdings`), which this only carries out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvtier.core.engine_events import AllCleared, EngineHash, EventFault
from kvtier.core.engine_holdings import Appeared, Change, EngineHoldings, Vanished
from kvtier.core.engine_residents import Frame, Hello, Rows, SlotBooks
from kvtier.core.engine_sequence import (
    Action,
    Apply,
    AskReplay,
    Doubt,
    Lost,
    Restarted,
    SequenceTracker,
)
from kvtier.core.event_columns import Hashes
from kvtier.engines.events import DecodePolicy, decode
from kvtier.telemetry.logs import EventLog
from kvtier.types import Tier, Trust
from kvtier_services.bridge.feed import FeedFault, FeedRefusedError
from kvtier_services.bridge.memory import RankDelta

LOG: Final = EventLog("kvtier_services.bridge")


class Announcer(Protocol):
    """What of a `Publisher` a rank uses."""

    def store(self, tier: Tier, parent: int, hashes: Hashes) -> None: ...
    def remove(self, tier: Tier, hashes: Hashes) -> None: ...
    def clear(self, tier: Tier | None = None) -> None: ...
    def set_trust(self, trust: Trust) -> None: ...


@dataclass(frozen=True, slots=True)
class Doors:
    """What a rank has done for it."""

    ask_replay: Callable[[int], None]
    """Ask for messages from this number on, dropping what was asked for before."""
    join: Callable[[], Announcer]
    """The engine is there: begin to speak for it."""
    leave: Callable[[], None]
    """It is gone: say so."""


class Source(StrEnum):
    """From whom it is known what a rank holds; labels of a metric."""

    EVENTS = "events"
    """What the engine publishes."""
    CONNECTOR = "connector"
    """What its own connector tells, which needs no history: always the better one."""


@dataclass(frozen=True, slots=True)
class FeedTerms:
    """Whom a connector must speak for to be believed."""

    root: bytes
    """Of the card's pool, without salt and adapter."""
    slots_max: int


class EngineRank:
    """Follows one rank. Every method returns at once, but for the work of hashing tokens.

    It keeps the books of both sources, and an index is told those of one at a time: the
    connector's while it speaks, else the events'. So nothing is counted twice, and whichever source
    goes, the other's books are whole.
    """

    def __init__(
        self,
        number: int,
        policy: DecodePolicy,
        tracker: SequenceTracker,
        holdings: EngineHoldings,
        doors: Doors,
        feed_terms: FeedTerms,
    ) -> None:
        self.number = number
        self.tracker = tracker
        self.holdings = holdings
        self.faults: Counter[EventFault] = Counter()
        self.doubted: Counter[Doubt] = Counter()
        """How often each doubt began."""
        self._doubts_before: frozenset[Doubt] = frozenset()
        self.events = 0
        self.unsaved = 0
        """Steps since `take_delta`."""
        self._policy = policy
        self._doors = doors
        self._feed_terms = feed_terms
        self.slots: SlotBooks | None = None
        """What the connector said last, of an engine that may be gone."""
        self._is_feed_open = False
        self._is_synced = False
        """Whether all has been said since the connector was connected."""
        self._announcer: Announcer | None = None
        self.source: Source | None = None
        """Whose books the announcer knows; None: nobody's."""
        self._trust_said: Trust | None = None
        self._is_subscribed = False
        self._heard_at: float | None = None
        self._lost_at: float | None = None
        """Since when the engine cannot be reached."""

    @property
    def is_joined(self) -> bool:
        """Whether the engine is in the fleet."""
        return self._announcer is not None

    @property
    def trust(self) -> Trust:
        return Trust.DEGRADED if self.doubts else Trust.EXACT

    @property
    def doubts(self) -> frozenset[Doubt]:
        """Why it is not known what the rank holds, by the source that is believed."""
        if self.source is not Source.CONNECTOR:
            unresolved = {Doubt.UNRESOLVED} if self.holdings.unresolved_count else set()
            return self.tracker.doubts | unresolved
        assert self.slots is not None
        unresolved = {Doubt.UNRESOLVED} if self.slots.unknown_count else set()
        return frozenset(unresolved if self._is_synced else {Doubt.JOINING})

    # ---- the connection

    def connected(self, now: float) -> None:
        self._heard_at = now
        self._is_subscribed = True
        LOG.info("engine connected", rank=self.number)
        self._reached()
        self._carry_out(self.tracker.connected(now))

    def disconnected(self, now: float) -> None:
        self._is_subscribed = False
        self.tracker.disconnected()
        self._lost(now)

    # ---- the connector

    def feed_opened(self, hello: Hello, now: float) -> None:
        """See `FeedHearer`. FeedRefusedError for one that speaks of something else."""
        if hello.root != self._feed_terms.root:
            raise FeedRefusedError(FeedFault.POOL)
        if hello.rank != self.number:
            raise FeedRefusedError(FeedFault.RANK)
        if hello.slots > self._feed_terms.slots_max:
            raise FeedRefusedError(FeedFault.TOO_LARGE)
        LOG.info("connector speaks", rank=self.number, slots=hello.slots)
        if self.source is Source.CONNECTOR:
            self._forget()
        self.slots = SlotBooks(hello.slots, self.holdings.known)
        self._is_feed_open, self._is_synced = True, False
        self._reached()

    def feed_said(self, frame: Frame, now: float) -> None:
        """See `FeedHearer`. CallerError for rows of blocks that there are not."""
        assert self.slots is not None
        if isinstance(frame, Rows):
            self.slots.take(frame)
            return
        changes = self.slots.settle()
        self._is_synced = True
        if self.source is Source.CONNECTOR:
            self._announce(changes)
        self._settle()

    def feed_closed(self, now: float) -> None:
        """See `FeedHearer`. What it said last stands, in doubt, until somebody knows better."""
        LOG.warning("connector is gone", rank=self.number)
        self._is_feed_open = self._is_synced = False
        self._lost(now)

    # ---- what a store knows

    def unresolved(self) -> Iterator[EngineHash]:
        """Digests of which nobody has said what an index calls them."""
        yield from self.holdings.unresolved()
        if self.slots is not None:
            yield from self.slots.unknown()

    def learn(self, hashes: Mapping[EngineHash, int]) -> None:
        """Prefix hashes of digests that were `unresolved`."""
        self.unsaved += 1
        self._tell(self.holdings.learn(hashes))
        if self.slots is not None:
            self.slots.learn(hashes)
            changes = self.slots.settle()
            if self.source is Source.CONNECTOR:
                self._announce(changes)
        self._settle()

    # ---- messages

    def live(self, seq: int, payload: bytes, now: float) -> None:
        self._heard_at = now
        self._carry_out(self.tracker.live(seq, payload, now))

    def replayed(self, seq: int, payload: bytes, now: float) -> None:
        self._carry_out(self.tracker.replayed(seq, payload, now))

    def replay_ended(self, now: float) -> None:
        self._heard_at = now
        self._carry_out(self.tracker.replay_ended(now))

    def tick(self, now: float, gone_s: float, probe_s: float) -> None:
        """Let time pass: replays that do not come, an engine that is gone, or silent."""
        self._carry_out(self.tracker.tick(now))
        if self._lost_at is not None and now - self._lost_at >= gone_s and self.is_joined:
            LOG.warning("engine leaves the fleet", rank=self.number)
            self._announcer = self.source = None
            self._doors.leave()
        is_silent = self._heard_at is not None and now - self._heard_at >= probe_s
        if self._is_subscribed and is_silent:
            self._heard_at = now
            self._carry_out(self.tracker.probe(now))

    def malformed(self) -> None:
        """A message without a number or of a shape that the protocol does not have."""
        self.faults[EventFault.SHAPE] += 1
        self.tracker.doubt(Doubt.UNDECODABLE)
        self._settle()

    # ---- disk

    def take_delta(self) -> RankDelta:
        """What changed since the last call, with the position that it belongs to."""
        self.unsaved = 0
        is_cleared, rows = self.holdings.take_rows()
        return RankDelta(self.tracker.position(), is_cleared, rows)

    # ---- parts

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.unsaved += 1
            match action:
                case Apply(_, payload):
                    self._apply(payload)
                case AskReplay(from_seq):
                    self._doors.ask_replay(from_seq)
                case Restarted():
                    LOG.warning("engine restarted", rank=self.number)
                    self._tell(self.holdings.restart())
                case Lost(doubt):
                    LOG.error("events of the engine are lost", rank=self.number, doubt=doubt.value)
                    self.holdings.doubt()
        self._settle()

    def _apply(self, payload: bytes) -> None:
        batch = decode(self._policy, payload)
        overflows = self.holdings.counts.overflows
        for event in batch.events:
            is_all = isinstance(event, AllCleared) and self.holdings.uses_only_gpu()
            self._tell(self.holdings.apply(event))
            if is_all:
                self.tracker.cleared()
        self.events += len(batch.events)
        if batch.faults:
            LOG.error("events cannot be read", rank=self.number, faults=_text(batch.faults))
            self.faults.update(batch.faults)
            self.tracker.doubt(Doubt.UNDECODABLE)
        if self.holdings.counts.overflows > overflows:
            self.tracker.doubt(Doubt.OVERFLOW)

    def _tell(self, changes: Iterable[Change]) -> None:
        """What changed in the books of the events."""
        if self.source is Source.EVENTS:
            self._announce(changes)

    def _announce(self, changes: Iterable[Change]) -> None:
        announcer = self._announcer
        if announcer is None:
            return
        for change in changes:
            match change:
                case Appeared(tier, parent, hashes):
                    announcer.store(tier, parent, hashes)
                case Vanished(tier, hashes):
                    announcer.remove(tier, hashes)
                case _:
                    announcer.clear(change.tier)

    def _settle(self) -> None:
        """Tell the books of whoever knows best, and how far they are trusted."""
        if self._announcer is None:
            return
        self._choose()
        doubts = self.doubts
        self.doubted.update(doubts - self._doubts_before)
        self._doubts_before = doubts
        if self.trust is not self._trust_said:
            self._trust_said = self.trust
            self._announcer.set_trust(self.trust)

    def _choose(self) -> None:
        assert self._announcer is not None
        best = self.source
        if self._is_synced:
            best = Source.CONNECTOR
        elif not self.tracker.is_joining:
            best = Source.EVENTS
        if best is not self.source and best is not None:
            if self.source is not None:
                self._announcer.clear()
            self.source = best
            books = self.holdings if best is Source.EVENTS else self.slots
            assert books is not None
            self._announce(books.held())
            LOG.info("index is told", rank=self.number, source=best.value)

    def _forget(self) -> None:
        """Another life's books: an index is told nothing until these are whole."""
        self.source = None
        if self._announcer is not None:
            self._announcer.clear()

    def _reached(self) -> None:
        self._lost_at = None
        if self._announcer is None:
            self._announcer = self._doors.join()
            self.source = self._trust_said = None
        self._settle()

    def _lost(self, now: float) -> None:
        is_reachable = self._is_subscribed or self._is_feed_open
        if self._lost_at is None and not is_reachable:
            self._lost_at = now
            LOG.warning("engine out of reach", rank=self.number)
        self._settle()


def _text(faults: Mapping[EventFault, int]) -> str:
    return ",".join(f"{fault.value}={count}" for fault, count in faults.items())

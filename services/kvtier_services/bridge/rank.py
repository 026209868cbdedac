"""One rank of the engine: its messages in, what an index is to know out.

Belongs to one thread. What must not live here: sockets, disks, the order of messages and what they
mean (`kvtier.core.engine_sequence`, `engine_holdings`), which this only carries out.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.core.engine_events import AllCleared, EventFault
from kvtier.core.engine_holdings import Appeared, Change, EngineHoldings, Vanished
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


class EngineRank:
    """Follows one rank. Every method returns at once, but for the work of hashing tokens."""

    def __init__(
        self,
        number: int,
        policy: DecodePolicy,
        tracker: SequenceTracker,
        holdings: EngineHoldings,
        doors: Doors,
    ) -> None:
        self.number = number
        self.tracker = tracker
        self.holdings = holdings
        self.faults: Counter[EventFault] = Counter()
        self.events = 0
        self.unsaved = 0
        """Steps since `take_delta`."""
        self._policy = policy
        self._doors = doors
        self._announcer: Announcer | None = None
        self._is_told = False
        """Whether the announcer knows all that is held."""
        self._trust_said: Trust | None = None
        self._heard_at: float | None = None
        self._lost_at: float | None = None
        """Since when the engine cannot be reached."""

    @property
    def is_joined(self) -> bool:
        """Whether the engine is in the fleet."""
        return self._announcer is not None

    @property
    def trust(self) -> Trust:
        return self.tracker.trust

    # ---- the connection

    def connected(self, now: float) -> None:
        self._lost_at = None
        self._heard_at = now
        LOG.info("engine connected", rank=self.number)
        if self._announcer is None:
            self._announcer = self._doors.join()
            self._is_told, self._trust_said = False, None
        self._carry_out(self.tracker.connected(now))

    def disconnected(self, now: float) -> None:
        if self._lost_at is None:
            self._lost_at = now
            LOG.warning("engine out of reach", rank=self.number)
        self.tracker.disconnected()
        self._say_trust()

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
            self._announcer = None
            self._doors.leave()
        is_silent = self._heard_at is not None and now - self._heard_at >= probe_s
        if self._lost_at is None and is_silent:
            self._heard_at = now
            self._carry_out(self.tracker.probe(now))

    def malformed(self) -> None:
        """A message without a number or of a shape that the protocol does not have."""
        self.faults[EventFault.SHAPE] += 1
        self.tracker.doubt(Doubt.UNDECODABLE)
        self._say_trust()

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
        if self._announcer is not None and not self._is_told and not self.tracker.is_joining:
            self._is_told = True
            self._tell(self.holdings.held())
        self._say_trust()

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
        announcer = self._announcer
        if announcer is None or not self._is_told:
            return
        for change in changes:
            match change:
                case Appeared(tier, parent, hashes):
                    announcer.store(tier, parent, hashes)
                case Vanished(tier, hashes):
                    announcer.remove(tier, hashes)
                case _:
                    announcer.clear(change.tier)

    def _say_trust(self) -> None:
        if self._announcer is not None and self.trust is not self._trust_said:
            self._trust_said = self.trust
            self._announcer.set_trust(self.trust)


def _text(faults: Mapping[EventFault, int]) -> str:
    return ",".join(f"{fault.value}={count}" for fault, count in faults.items())

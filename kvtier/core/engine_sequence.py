"""The order of one engine rank's messages: nothing is applied twice, early, or in another's place.

Engines number their messages from 0 in every life, keep a ring of the last ones, and name no life.
So a number proves nothing: an engine that died and came back may be at just the next one. What
proves that it is the same life is the last message itself, which the ring still holds; its bytes
carry a time. Whenever the connection is new, a number is missing or runs backwards, the tracker
asks for a replay from the last message on, holds what comes live meanwhile, and then:

    the first one replayed      is the last one, byte for byte    the same life: go on
                                has its number, other bytes       another life: begin anew
                                comes after it                    the ring has forgotten: GAP
    nothing is replayed         the engine is not that far        another life: begin anew

What is not known stays said, as a `Doubt`, until it is known again: after a restart or a clear of
the engine. One owner a rank; not thread-safe. What must not live here: sockets, clocks, decoding.

(Protocol of vLLM 0.33.0, which SGLang and TensorRT-LLM copied. That a replay must not be applied
beside live messages, and that numbers run backwards, are the lessons of llm-d-router#1887 and
#1737.)
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from kvtier.errors import CallerError
from kvtier.limits import ENGINE_HELD_BATCHES_MAX, ENGINE_HELD_BYTES_MAX
from kvtier.types import Trust

_PRINT_BYTES: Final = 16
_NONE: Final = -1
"""Number of the last message before the first."""


class Doubt(StrEnum):
    """Why it is not known what the engine holds."""

    JOINING = "joining"
    """The connection is new or gone, and what happened meanwhile is being found out."""
    GAP = "gap"
    """Messages were lost and no replay brought them."""
    UNVERIFIED = "unverified"
    """The numbers go on, but nothing proves that they are of the same life."""
    UNDECODABLE = "undecodable"
    """Something that the engine said could not be read."""
    OVERFLOW = "overflow"
    """More was stored than a ceiling lets the bridge remember."""
    UNRESOLVED = "unresolved"
    """Blocks are held of which nobody has said yet what an index calls them. Never a tracker's."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a bridge was, for the bridge after it."""

    seq: int
    fingerprint: bytes
    """Of the message with this number."""
    doubts: frozenset[Doubt] = frozenset()


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply this message now."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Ask the engine for its messages from `from_seq` on, over a new socket: answers to what was
    asked before must not be taken for answers to this."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The engine lives anew and holds nothing."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Messages between those before and those after this are lost."""

    doubt: Doubt


Action: TypeAlias = Apply | AskReplay | Restarted | Lost


@dataclass(frozen=True, slots=True)
class SequenceConfig:
    """`has_replay` says whether the engine was configured to answer."""

    has_replay: bool = True
    replay_timeout_s: float = 2.0
    """Silence after which a replay is asked for again."""
    replay_attempts_max: int = 4
    held_batches_max: int = 1 << 14
    held_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        if self.replay_timeout_s <= 0 or self.replay_attempts_max < 1:
            raise CallerError("replay_timeout_s, replay_attempts_max: want positive values")
        if not 1 <= self.held_batches_max <= ENGINE_HELD_BATCHES_MAX:
            raise CallerError(f"held_batches_max: want 1 .. {ENGINE_HELD_BATCHES_MAX}")
        if not 1 <= self.held_bytes_max <= ENGINE_HELD_BYTES_MAX:
            raise CallerError(f"held_bytes_max: want 1 .. {ENGINE_HELD_BYTES_MAX}")


@dataclass(slots=True)
class SequenceCounts:
    """Counters of one rank."""

    applied: int = 0
    replayed: int = 0
    """Of those, the ones that only a replay brought."""
    duplicates: int = 0
    gaps: int = 0
    """Times that numbers were missing, mended or not."""
    lost: int = 0
    """Times that they could not be mended."""
    restarts: int = 0
    replays: int = 0
    """Asked for."""


@dataclass(slots=True)
class _Replay:
    asked_at: float
    attempts: int
    arrivals: int
    """How many live messages had come when it was asked for."""
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    seq: int
    payload: bytes
    arrival: int


class SequenceTracker:
    """What to do with each message of one rank, live or replayed."""

    def __init__(
        self, config: SequenceConfig | None = None, position: Position | None = None
    ) -> None:
        """`position` is where a bridge before this one was, with its holdings."""
        self._config = config or SequenceConfig()
        self._applied = _NONE if position is None else position.seq
        self._print = b"" if position is None else position.fingerprint
        self._doubts = {Doubt.JOINING, *(position.doubts if position is not None else ())}
        self._is_linked = False
        self._replay: _Replay | None = None
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._arrivals = 0
        self.counts = SequenceCounts()

    # ---- reading

    @property
    def applied_seq(self) -> int:
        """Number of the last message applied; -1 before the first of a life."""
        return self._applied

    @property
    def doubts(self) -> frozenset[Doubt]:
        return frozenset(self._doubts)

    @property
    def trust(self) -> Trust:
        return Trust.DEGRADED if self._doubts else Trust.EXACT

    @property
    def is_joining(self) -> bool:
        """Whether it is still being found out what happened while nobody listened."""
        return Doubt.JOINING in self._doubts

    def position(self) -> Position | None:
        """For the bridge after this one; None before the first message of a life."""
        if self._applied == _NONE:
            return None
        return Position(self._applied, self._print, frozenset(self._doubts - {Doubt.JOINING}))

    def deadline(self) -> float | None:
        """Call `tick` then; None while nothing waits for time."""
        if self._replay is None:
            return None
        return self._replay.asked_at + self._config.replay_timeout_s

    # ---- the connection

    def connected(self, now: float) -> list[Action]:
        """The subscription stands, for the first time or again."""
        self._is_linked = True
        self._doubts.add(Doubt.JOINING)
        if self._config.has_replay:
            return self._ask(now)
        return []

    def disconnected(self) -> None:
        """Nothing is heard any more; whatever is published now is missed."""
        self._is_linked = False
        self._doubts.add(Doubt.JOINING)
        self._replay = None
        self._drop_held()

    def probe(self, now: float) -> list[Action]:
        """Nothing was heard for long: ask whether the last message is still the last one."""
        is_free = self._is_linked and self._replay is None
        return self._ask(now) if is_free and self._config.has_replay else []

    # ---- messages

    def live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A message of the subscription."""
        actions = [] if self._is_linked else self.connected(now)
        self._arrivals += 1
        message = _Held(seq, payload, self._arrivals)
        if self._replay is not None:
            return actions + self._hold(message)
        if not self._config.has_replay:
            return actions + self._take_unproven(message)
        return actions + self._take(message, now)

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A message of the replay that was asked for last."""
        replay = self._replay
        if replay is None or seq < self._applied:
            return []
        replay.asked_at = now
        if not replay.has_begun and self._applied != _NONE and seq == self._applied:
            if _fingerprint(payload) != self._print:
                return [*self._restart(), *self._ask(now)]
            replay.has_begun = True
            return []
        actions: list[Action] = []
        if seq == self._applied and replay.has_begun:
            return []
        if not replay.has_begun:
            replay.has_begun = True
            actions = self._begun_late(seq)
        elif seq != self._applied + 1:
            return self._ask_again(now)  # the replay itself has a hole
        self.counts.replayed += 1
        return [*actions, self._apply(seq, payload)]

    def replay_ended(self, now: float) -> list[Action]:
        """The engine has no more."""
        replay = self._replay
        if replay is None:
            return []
        if not replay.has_begun and self._applied != _NONE:
            return [*self._restart(), *self._ask(now)]
        self._replay = None
        self._doubts.discard(Doubt.JOINING)
        return list(self._drain(replay.arrivals, now))

    def tick(self, now: float) -> list[Action]:
        """Ask again for a replay that does not come, and give it up in the end."""
        replay = self._replay
        if replay is None or now < replay.asked_at + self._config.replay_timeout_s:
            return []
        return self._ask_again(now)

    # ---- the caller's own news

    def doubt(self, doubt: Doubt) -> None:
        """UNDECODABLE or OVERFLOW, of the message that was applied last."""
        self._doubts.add(doubt)

    def cleared(self) -> None:
        """The engine emptied all that it holds: what was lost before does not matter any more."""
        self._doubts &= {Doubt.JOINING}

    # ---- parts

    def _take(self, message: _Held, now: float) -> list[Action]:
        if message.seq == self._applied + 1:
            return [self._apply(message.seq, message.payload)]
        if message.seq == self._applied and _fingerprint(message.payload) == self._print:
            self.counts.duplicates += 1
            return []
        if message.seq > self._applied:
            self.counts.gaps += 1
        return [*self._ask(now), *self._hold(message)]

    def _take_unproven(self, message: _Held) -> list[Action]:
        """Without replays a number is all that there is."""
        was_joining = self.is_joining
        self._doubts.discard(Doubt.JOINING)
        actions: list[Action] = []
        if message.seq <= self._applied:
            if message.seq == self._applied and _fingerprint(message.payload) == self._print:
                self.counts.duplicates += 1
                return []
            actions = self._restart()
            self._doubts.discard(Doubt.JOINING)
        elif was_joining and message.seq == self._applied + 1 and self._applied != _NONE:
            actions = [self._lose(Doubt.UNVERIFIED)]
        if message.seq != self._applied + 1:
            self.counts.gaps += 1
            actions = [*actions, self._lose(Doubt.GAP)]
        return [*actions, self._apply(message.seq, message.payload)]

    def _begun_late(self, seq: int) -> list[Action]:
        """A replay begins with what comes after the last message: the ring has forgotten that."""
        if self._applied == _NONE and seq == 0:
            return []
        if seq == self._applied + 1:
            return [self._lose(Doubt.UNVERIFIED)]
        return [self._lose(Doubt.GAP)]

    def _drain(self, arrivals: int, now: float) -> Iterator[Action]:
        """Go on with what came live. What came before the replay was asked for and is not in it is
        of a life that is over: the engine replays all that it has published."""
        held = list(self._held)
        self._drop_held()
        for number, message in enumerate(held):
            if message.seq <= self._applied or message.arrival <= arrivals:
                self.counts.duplicates += 1
                continue
            yield from self._take(message, now)
            if self._replay is not None:  # another hole: the rest waits again
                for later in held[number + 1 :]:
                    yield from self._hold(later)
                return

    def _ask(self, now: float, attempts: int = 1) -> list[Action]:
        self._replay = _Replay(now, attempts, self._arrivals)
        self.counts.replays += 1
        return [AskReplay(max(self._applied, 0))]

    def _ask_again(self, now: float) -> list[Action]:
        assert self._replay is not None
        if self._replay.attempts < self._config.replay_attempts_max:
            return self._ask(now, self._replay.attempts + 1)
        return self._give_up()

    def _give_up(self) -> list[Action]:
        """No replay comes, or too much came meanwhile: go on with what there is."""
        self._replay = None
        self._doubts.discard(Doubt.JOINING)
        actions: list[Action] = [self._lose(Doubt.GAP)]
        held = list(self._held)
        self._drop_held()
        for message in held:
            actions += self._take_unproven(message)
        return actions

    def _hold(self, message: _Held) -> list[Action]:
        self._held.append(message)
        self._held_bytes += len(message.payload)
        config = self._config
        if len(self._held) > config.held_batches_max or self._held_bytes > config.held_bytes_max:
            return self._give_up()
        return []

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _apply(self, seq: int, payload: bytes) -> Apply:
        self._applied = seq
        self._print = _fingerprint(payload)
        self.counts.applied += 1
        return Apply(seq, payload)

    def _restart(self) -> list[Action]:
        self._applied, self._print = _NONE, b""
        self._doubts = {Doubt.JOINING}
        self.counts.restarts += 1
        return [Restarted()]

    def _lose(self, doubt: Doubt) -> Lost:
        self._doubts.add(doubt)
        self.counts.lost += 1
        return Lost(doubt)


def _fingerprint(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_PRINT_BYTES).digest()

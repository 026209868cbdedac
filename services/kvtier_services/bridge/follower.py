"""The bridge's thread: polls, hands messages to ranks, lets time pass, saves.

What must not live here: ZMQ (sockets.py), one rank (rank.py), the process (main.py).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvtier.core.engine_holdings import EngineHoldings, KnownKeys
from kvtier.core.engine_sequence import SequenceTracker
from kvtier.core.identity import chain_root
from kvtier.core.model_card import ModelCard
from kvtier.telemetry.logs import EventLog
from kvtier_services.bridge.config import BridgeConfig
from kvtier_services.bridge.feed import FeedSocket
from kvtier_services.bridge.memory import BridgeMemory
from kvtier_services.bridge.rank import Announcer, Doors, EngineRank, FeedTerms
from kvtier_services.bridge.resolver import Resolver
from kvtier_services.bridge.sockets import RankAddress, Wire

LOG: Final = EventLog("kvtier_services.bridge")
_WAIT_S_MAX: Final = 0.1
_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Speaking:
    """How to begin and to end to speak for a rank; both may take a while."""

    join: Callable[[int], Announcer]
    leave: Callable[[int], None]


class Follower:
    """Follows all ranks of one engine from `start` to `stop`."""

    def __init__(
        self,
        config: BridgeConfig,
        card: ModelCard,
        memory: BridgeMemory,
        speaking: Speaking,
        clock: Callable[[], float],
    ) -> None:
        """Takes over what the bridge before this one remembered. Connects nothing."""
        engine = config.engine
        self._config = config
        self._memory = memory
        self._clock = clock
        self.known = KnownKeys(config.memory.keys_max)
        self.known.restore(memory.known())
        addresses = [RankAddress(*engine.endpoints(n), engine.topic) for n in range(engine.ranks)]
        self._addresses = addresses
        self._wire: Wire | None = None
        paths = {n: engine.feed_path(n) for n in range(engine.ranks)}
        self.feeds = {n: FeedSocket(path) for n, path in paths.items() if path is not None}
        self.ranks = [self._rank(n, card, speaking) for n in range(engine.ranks)]
        self.resolver = Resolver(config)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._saved_at = clock()
        self._save_s = config.memory.save_ms / 1000

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, or was not started yet."""
        return self._thread.is_alive() or not self._thread.ident

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Save what is known, and end. Blocks until that is done."""
        self._stopping.set()
        if self._thread.ident:
            self._thread.join(_STOP_S)

    def _rank(self, number: int, card: ModelCard, speaking: Speaking) -> EngineRank:
        state = self._memory.rank(number)
        holdings = EngineHoldings(self._config.terms(card), self.known)
        if state is not None:
            holdings.restore(state.rows)
            LOG.info("rank goes on", rank=number, seq=state.position.seq, blocks=len(state.rows))
        position = None if state is None else state.position
        return EngineRank(
            number,
            self._config.policy(),
            SequenceTracker(self._config.sequence(), position),
            holdings,
            Doors(
                ask_replay=partial(self._ask_replay, number),
                join=partial(speaking.join, number),
                leave=partial(speaking.leave, number),
            ),
            FeedTerms(chain_root(card.pool, None, None), self._config.memory.residents_max),
        )

    def _ask_replay(self, number: int, from_seq: int) -> None:
        assert self._wire is not None
        self._wire.ranks[number].ask_replay(from_seq)

    # ---- the thread

    def _run(self) -> None:
        self._wire = Wire(self._addresses)
        try:
            is_pending = False
            while not self._stopping.is_set():
                if not is_pending:
                    self._wire.wait(self._wait_s(), [feed.fileno() for feed in self.feeds.values()])
                is_pending = self._turn(self._wire)
        finally:
            self._wire.close()
            for feed in self.feeds.values():
                feed.close()
            self.resolver.close()
            self._save()

    def _wait_s(self) -> float:
        now = self._clock()
        deadlines = [now + _WAIT_S_MAX]
        deadlines += [at for rank in self.ranks if (at := rank.tracker.deadline()) is not None]
        if self._is_unsaved():
            deadlines.append(self._saved_at + self._save_s)
        return max(0.0, min(deadlines) - now)

    def _turn(self, wire: Wire) -> bool:
        engine = self._config.engine
        is_pending = False
        for rank, sockets in zip(self.ranks, wire.ranks, strict=True):
            now = self._clock()
            is_pending |= sockets.take(rank, now)
            if rank.number in self.feeds:
                is_pending |= self.feeds[rank.number].take(rank, now)
            rank.tick(now, engine.gone_ms / 1000, engine.probe_ms / 1000)
        self.resolver.turn(self.ranks, self._clock())
        if self._is_unsaved() and self._clock() >= self._saved_at + self._save_s:
            self._save()
        return is_pending

    def _is_unsaved(self) -> bool:
        return any(rank.unsaved for rank in self.ranks)

    def _save(self) -> None:
        self._saved_at = self._clock()
        deltas = {rank.number: rank.take_delta() for rank in self.ranks}
        self._memory.save(self.known.take_fresh(), deltas)

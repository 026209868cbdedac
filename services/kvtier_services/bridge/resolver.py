"""Digests of which nobody told the tokens are asked of the store of the engine's connector.

The connector says with every block that it saves what an index calls it, so the store knows that of
all that it was given since it started. Asked in batches, by a thread of its own, with a deadline;
what the store does not know is asked again after a while. What must not live here: what follows
from an answer (rank.py, `kvtier.core.engine_holdings`).
"""

import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from kvtier.client.store import SharedMemory, StoreClientConfig
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.core.engine_events import EngineHash
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import KvtierError
from kvtier.telemetry.logs import EventLog
from kvtier.types import Fingerprint
from kvtier_services.bridge.config import BridgeConfig
from kvtier_services.bridge.rank import EngineRank

LOG: Final = EventLog("kvtier_services.bridge")
DIGEST_BYTES: Final = 32
BATCH_MAX: Final = 1024
ASKED_MAX: Final = 1 << 16
"""Digests that are remembered as asked; beyond it the oldest may be asked again early."""
TURN_S: Final = 0.25
AGAIN_S: Final = 5.0
DEADLINE_S: Final = 1.0
_CLOSE_S: Final = 5.0


class Outcome(StrEnum):
    """What became of a question; labels of a metric."""

    FOUND = "found"
    UNKNOWN = "unknown"
    """The store has never been told, or not since it started."""
    FAILED = "failed"
    """The store is not there, too slow, or of a version that cannot say."""


class Resolver:
    """Asks one store; nobody, where none is configured. `turn` is the follower's thread's."""

    def __init__(self, config: BridgeConfig) -> None:
        """Starts nothing before there is something to ask. ConfigError for credential files."""
        self.outcomes: Counter[Outcome] = Counter()
        self._questions: queue.Queue[Sequence[EngineHash] | None] = queue.Queue()
        self._answers: queue.Queue[dict[EngineHash, int]] = queue.Queue()
        self._asked: OrderedDict[EngineHash, float] = OrderedDict()
        self._is_asking = False
        self._next_at = 0.0
        self._client: BlockStoreClient | None = None
        if config.resolver.targets:
            self._namespace = Fingerprint(bytes.fromhex(config.model.namespace))
            terms = StoreClientConfig(deadline_s=DEADLINE_S, shared_memory=SharedMemory.NEVER)
            self._client = BlockStoreClient(config.resolver, terms)
        self._thread = threading.Thread(target=self._run, name="resolver", daemon=True)

    def turn(self, ranks: Iterable[EngineRank], now: float) -> None:
        """Hand over what was found out, and ask for what is not known. Never waits."""
        if self._client is None or now < self._next_at:
            return
        self._next_at = now + TURN_S
        if self._is_asking:
            try:
                found = self._answers.get_nowait()
            except queue.Empty:
                return
            self._is_asking = False
            if found:
                for rank in ranks:
                    rank.learn(found)
        wanted = self._wanted(ranks, now)
        if wanted:
            if not self._thread.ident:
                self._thread.start()
            self._is_asking = True
            self._questions.put(wanted)

    def close(self) -> None:
        """End the thread and the client. Blocks for seconds at most."""
        self._questions.put(None)
        if self._thread.ident:
            self._thread.join(_CLOSE_S)
        if self._client is not None:
            self._client.close()

    # ---- parts

    def _wanted(self, ranks: Iterable[EngineRank], now: float) -> list[EngineHash]:
        """A batch of digests that were not asked for lately. Shorter names name nothing there."""
        wanted: dict[EngineHash, None] = {}
        for rank in ranks:
            for name in rank.unresolved():
                is_due = now - self._asked.get(name, -AGAIN_S) >= AGAIN_S
                if len(name) == DIGEST_BYTES and is_due:
                    wanted[name] = None
                if len(wanted) >= BATCH_MAX:
                    break
        for name in wanted:
            self._asked[name] = now
            self._asked.move_to_end(name)
        while len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)
        return list(wanted)

    def _run(self) -> None:
        while (names := self._questions.get()) is not None:
            self._answers.put(self._ask(names))

    def _ask(self, names: Sequence[EngineHash]) -> dict[EngineHash, int]:
        assert self._client is not None
        asked = [FrameName(KeyKind.ENGINE_DIGEST, name, self._namespace) for name in names]
        try:
            hashes = self._client.prefix_hashes(asked, deadline_s=DEADLINE_S)
        except KvtierError as error:
            LOG.warning("the store refused to say what blocks are", reason=str(error))
            hashes = None
        if hashes is None:
            self.outcomes[Outcome.FAILED] += len(names)
            return {}
        found = {name: one for name, one in zip(names, hashes, strict=True) if one is not None}
        self.outcomes[Outcome.FOUND] += len(found)
        self.outcomes[Outcome.UNKNOWN] += len(names) - len(found)
        return found

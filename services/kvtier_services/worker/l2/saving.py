"""Which sealed blocks to write below, in what order, and which are there already.

Every key stands here at most once. The book holds names, never memory: a block that is evicted
before its turn is not written, and counted. What must not live here: the pool, the store, clocks.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Final

from kvtier.core.eviction import PRIORITY_DEFAULT
from kvtier.types import ScopeId

KNOWN_KEYS_MAX: Final = 1 << 17
_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One block to write: its 32-byte prefix key and on whose behalf."""

    key: bytes
    scope: ScopeId
    priority: int = PRIORITY_DEFAULT


class SaveEnd(Enum):
    """How the write of one block ended."""

    SAVED = auto()
    REFUSED = auto()
    """The store said no: not tried again."""
    FAILED = auto()
    """The store was absent, late or broken: tried again."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Ceilings of a `SaveBook`."""

    in_flight_blocks_max: int
    """Blocks that are being written: they cannot be evicted meanwhile."""
    order_blocks_max: int = 64
    backlog_blocks_max: int = 1 << 16


@dataclass(slots=True)
class SaveCounts:
    """Blocks, since the start."""

    saved: int = 0
    refused: int = 0
    """The store said no."""
    failed: int = 0
    """The store was absent, late or broken; tried again if the block is still there."""
    missed: int = 0
    """Evicted, or too many were waiting, before their turn."""


class SaveBook:
    """Backlog, blocks in flight, and keys that the store is known to have."""

    def __init__(self, limits: SaveLimits) -> None:
        self._limits = limits
        self._backlog: OrderedDict[bytes, SaveItem] = OrderedDict()
        self._again: deque[SaveItem] = deque()
        self._in_flight: dict[bytes, SaveItem] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pause_s = 0.0
        self._resume_at = 0.0
        self.counts = SaveCounts()

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    @property
    def backlog_count(self) -> int:
        return len(self._backlog)

    def next_at(self, now: float) -> float | None:
        """When `take` may have something although it has nothing now; None: not by time alone."""
        return self._resume_at if self._backlog and now < self._resume_at else None

    def is_known(self, key: bytes) -> bool:
        """Whether the store is believed to have a block."""
        return key in self._known

    def know(self, keys: Iterable[bytes]) -> None:
        """The store has these blocks: they need not be written. The oldest are forgotten first."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
            self._backlog.pop(key, None)
        while len(self._known) > KNOWN_KEYS_MAX:
            self._known.popitem(last=False)

    def doubt(self, keys: Iterable[bytes]) -> None:
        """The store did not have these blocks after all."""
        for key in keys:
            self._known.pop(key, None)

    def offer(self, items: Sequence[SaveItem]) -> None:
        """Queue blocks of one chain, head first, that are not known, queued or in flight."""
        for item in items:
            key = item.key
            if key in self._known or key in self._in_flight or key in self._backlog:
                continue
            self._backlog[key] = item
        while len(self._backlog) > self._limits.backlog_blocks_max:
            self._backlog.popitem(last=False)
            self.counts.missed += 1

    def withdraw(self, key: bytes) -> SaveItem | None:
        """Take a block out of the queue: its memory is about to be reused."""
        return self._backlog.pop(key, None)

    def missed(self, count: int = 1) -> None:
        """So many blocks that were taken or withdrawn could not be written."""
        self.counts.missed += count

    def take(self, now: float) -> list[SaveItem]:
        """The next blocks to write in one order: of one scope and priority, perhaps none.

        They are in flight until `ended`, or until `dropped`.
        """
        room = min(
            self._limits.in_flight_blocks_max - len(self._in_flight), self._limits.order_blocks_max
        )
        if room <= 0 or not self._backlog or now < self._resume_at:
            return []
        taken: list[SaveItem] = []
        for item in islice(self._backlog.values(), room):
            if taken and (item.scope, item.priority) != (taken[0].scope, taken[0].priority):
                break
            taken.append(item)
        for item in taken:
            del self._backlog[item.key]
            self._in_flight[item.key] = item
        return taken

    def dropped(self, item: SaveItem) -> None:
        """A block that was taken is gone: it is not written."""
        self._in_flight.pop(item.key, None)
        self.counts.missed += 1

    def ended(self, outcomes: Sequence[tuple[bytes, SaveEnd]], now: float) -> None:
        """Blocks are no longer in flight. Failures wait in the queue, and a pause begins."""
        failed: list[SaveItem] = []
        for key, end in outcomes:
            item = self._in_flight.pop(key, None)
            match end:
                case SaveEnd.SAVED:
                    self.counts.saved += 1
                    self.know([key])
                case SaveEnd.REFUSED:
                    self.counts.refused += 1
                case SaveEnd.FAILED:
                    self.counts.failed += 1
                    if item is not None:
                        failed.append(item)
        if not failed:
            self._pause_s = 0.0
            return
        self.offer(failed)
        self._pause_s = min(_PAUSE_S_MAX, max(_PAUSE_S_MIN, 2 * self._pause_s))
        self._resume_at = now + self._pause_s

"""Which sealed blocks to write below, in what order, and which are there already.

Every block stands here at most once. Writing a few blocks costs as much as writing a few more, so a
write waits for company: for a moment, and only as long as its blocks are not about to be evicted.
The book holds names, never memory: a block that is evicted before its turn is not written, and
counted. What must not live here: the pool, the store, clocks.
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
    """One block to write: its 32-byte prefix key, on whose behalf, and how dearly it is kept."""

    key: bytes
    scope: ScopeId
    priority: int = PRIORITY_DEFAULT
    group: int = 0
    """Of layers."""

    @property
    def name(self) -> bytes:
        """What the book knows it by."""
        return block_name(self.group, self.key)


def block_name(group: int, key: bytes) -> bytes:
    """Tells the blocks of several layer groups apart, which share prefix keys. Pure."""
    return key if group == 0 else bytes((group,)) + key


class Haste(Enum):
    """Whether a write may wait for company."""

    GATHER = auto()
    NOW = auto()
    """Some of what waits is about to be evicted."""


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
    gather_blocks: int = 16
    """A write that has so many waits no longer."""
    gather_s: float = 0.25
    """Nor does a block."""


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
        self._since = 0.0
        """When the oldest of the backlog came, or was left behind by a write."""
        self.counts = SaveCounts()

    @property
    def in_flight_count(self) -> int:
        return len(self._in_flight)

    @property
    def backlog_count(self) -> int:
        return len(self._backlog)

    def next_at(self, now: float) -> float | None:
        """When `take` may have something although it has nothing now; None: not by time alone."""
        if not self._backlog:
            return None
        if self.is_paused(now):
            return self._resume_at
        gathered_at = self._since + self._limits.gather_s
        return gathered_at if self._gathers(now) else None

    def is_paused(self, now: float) -> bool:
        """Whether nothing is written for a while, because the store failed."""
        return now < self._resume_at

    def is_waiting(self, name: bytes) -> bool:
        """Whether a block waits to be written."""
        return name in self._backlog

    def is_pending(self, name: bytes) -> bool:
        """Whether a block waits to be written, or is being written."""
        return name in self._backlog or name in self._in_flight

    def knows(self, name: bytes) -> bool:
        """Whether the store is believed to have a block."""
        return name in self._known

    def know(self, names: Iterable[bytes]) -> None:
        """The store has these blocks: they need not be written. The oldest are forgotten first."""
        for name in names:
            self._known[name] = None
            self._known.move_to_end(name)
            self._backlog.pop(name, None)
        while len(self._known) > KNOWN_KEYS_MAX:
            self._known.popitem(last=False)

    def doubt(self, names: Iterable[bytes]) -> None:
        """The store did not have these blocks after all."""
        for name in names:
            self._known.pop(name, None)

    def offer(self, items: Sequence[SaveItem], now: float) -> None:
        """Queue blocks of one chain, head first, that are not known, queued or in flight."""
        for item in items:
            name = item.name
            if name in self._known or name in self._in_flight or name in self._backlog:
                continue
            if not self._backlog:
                self._since = now
            self._backlog[name] = item
        while len(self._backlog) > self._limits.backlog_blocks_max:
            self._backlog.popitem(last=False)
            self.counts.missed += 1

    def withdraw(self, name: bytes) -> None:
        """A block is gone before its turn: it is not written, and counted."""
        if self._backlog.pop(name, None) is not None:
            self.counts.missed += 1

    def take(self, now: float, haste: Haste = Haste.GATHER) -> list[SaveItem]:
        """The next blocks to write in one order: of one scope, priority and group, perhaps none.

        They are in flight until `ended`, or until `dropped`.
        """
        if haste is Haste.GATHER and self._gathers(now):
            return []
        room = min(
            self._limits.in_flight_blocks_max - len(self._in_flight), self._limits.order_blocks_max
        )
        if room <= 0 or not self._backlog or now < self._resume_at:
            return []
        taken: list[SaveItem] = []
        for item in islice(self._backlog.values(), room):
            if taken and _terms(item) != _terms(taken[0]):
                break
            taken.append(item)
        for item in taken:
            del self._backlog[item.name]
            self._in_flight[item.name] = item
        return taken

    def dropped(self, item: SaveItem) -> None:
        """A block that was taken is gone: it is not written."""
        self._in_flight.pop(item.name, None)
        self.counts.missed += 1

    def ended(self, outcomes: Sequence[tuple[bytes, SaveEnd]], now: float) -> None:
        """Blocks are no longer in flight. Failures wait in the queue, and a pause begins."""
        failed: list[SaveItem] = []
        for name, end in outcomes:
            item = self._in_flight.pop(name, None)
            match end:
                case SaveEnd.SAVED:
                    self.counts.saved += 1
                    self.know([name])
                case SaveEnd.REFUSED:
                    self.counts.refused += 1
                case SaveEnd.FAILED:
                    self.counts.failed += 1
                    if item is not None:
                        failed.append(item)
        if not failed:
            self._pause_s = 0.0
            return
        self.offer(failed, now)
        self._pause_s = min(_PAUSE_S_MAX, max(_PAUSE_S_MIN, 2 * self._pause_s))
        self._resume_at = now + self._pause_s

    def _gathers(self, now: float) -> bool:
        """Whether what waits may wait for company."""
        count = len(self._backlog)
        return count < self._limits.gather_blocks and now < self._since + self._limits.gather_s


def _terms(item: SaveItem) -> tuple[ScopeId, int, int]:
    return item.scope, item.priority, item.group

"""What the engine asks of the tiers below its own cache, as orders and outcomes.

Orders return at once and their outcomes are collected later, so that nothing that a tier does can
hold up a step. What must not live here: a client of the store (`connector`), decisions
(`advisor`, `saving`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvtier.core.frame import FrameName
from kvtier.types import ScopeId, Source

Ticket = NewType("Ticket", int)
"""Number of an order, drawn by the engine; never used twice."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask from where blocks could come."""

    ticket: Ticket
    names: tuple[FrameName, ...]
    deadline_s: float
    """A duration."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Consecutive blocks of one source, which get a time of their own."""

    source: Source
    blocks_count: int
    deadline_s: float
    """A duration, from the start of this run."""
    group: int = 0
    """Of layers: to whom the blocks belong."""


@dataclass(frozen=True, slots=True)
class Load:
    """Read blocks into memory that nobody else touches until the outcome is there."""

    ticket: Ticket
    names: tuple[FrameName, ...]
    into: tuple[memoryview, ...]
    runs: tuple[LoadRun, ...]
    """Together all of the names, in order."""
    scope: ScopeId


@dataclass(frozen=True, slots=True)
class Save:
    """Write blocks of one chain, head first. Nobody changes the payloads before the outcome."""

    ticket: Ticket
    names: tuple[FrameName, ...]
    payloads: tuple[memoryview, ...]
    scope: ScopeId
    priority: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read blocks, each for itself, only to look at them. They are of one length."""

    ticket: Ticket
    names: tuple[FrameName, ...]
    into: tuple[memoryview, ...]
    """Nobody else touches it before the outcome."""
    scope: ScopeId
    deadline_s: float
    """A duration."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Take blocks out of the store, whoever wrote them."""

    ticket: Ticket
    names: tuple[FrameName, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """From where the blocks could come, one each; None where a block is nowhere."""

    ticket: Ticket
    sources: tuple[Source | None, ...]
    """Empty where nobody answered."""
    is_known: bool
    """False where nobody could be asked, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How one run of a load went."""

    source: Source
    asked_blocks: int
    arrived_blocks: int
    """Verified, wherever they stand in the run."""
    seconds: float
    was_late: bool
    """The deadline passed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load is over, and its memory is the engine's again."""

    ticket: Ticket
    blocks_count: int
    """Blocks without a gap from the first on that arrived and were verified."""
    runs: tuple[RunOutcome, ...]
    """Those that were begun."""
    reasons: tuple[str, ...]
    """Why the others did not arrive: words of `GetStatus`, one a block."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A save is over, and its memory is the engine's again."""

    ticket: Ticket
    held: tuple[bool, ...]
    """Which blocks the store has now."""
    reasons: tuple[str, ...]
    """Words of `PutStatus`, one a block."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetch is over, and its memory is the engine's again."""

    ticket: Ticket
    writer_ids: tuple[int | None, ...]
    """Who says to have written each block; None where it did not come."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A drop is over."""

    ticket: Ticket
    is_done: bool
    """False where the store could not be asked."""


Order = Lookup | Load | Save | Fetch | Drop
Outcome = Looked | Loaded | Saved | Fetched | Dropped


class BlockCache(Protocol):
    """Tiers below. Every order has exactly one outcome, sooner or later."""

    def begin(self, order: Order) -> None:
        """Carry out an order. Returns at once; LimitError past TIER_BATCH_BLOCKS_MAX names."""
        ...

    def outcomes(self) -> Sequence[Outcome]:
        """What has ended since the last call. Returns at once."""
        ...

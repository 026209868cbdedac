"""The planner of one store with everything that carries out its actions.

`Books` is where actions go: drops in DRAM wait for the next `flush`, everything else is handed to
the lanes and flights at once, without an await, so that a cancelled caller leaves nothing undone.
What must not live here: calls to lower tiers (see `lane` and `flights`), the public interface.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from kvtier.core.frame import FrameName
from kvtier.core.planner import (
    Action,
    Cancel,
    Demote,
    Drop,
    Fetch,
    Outcome,
    Planner,
    Promote,
    Reason,
    TransferId,
)
from kvtier.errors import KvtierError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.ports import BlockTier, ByNames, Clock, Landing, RemovalCause
from kvtier.store.gates import ByteGate, TierGuard
from kvtier.store.naming import block_key, frame_name
from kvtier.store.values import Latencies, Pinning, StoreCounts, TieredStoreConfig
from kvtier.store.watch import TierWatch
from kvtier.types import Tier

_AT_ONCE: Final = frozenset({Reason.SELECTED, Reason.CORRUPT, Reason.CONFLICT, Reason.TIER_LOST})
"""Drops that nobody's hold puts off."""


@dataclass(slots=True)
class Tally:
    """The counters of a store, as they grow."""

    hits: Counter[Tier] = field(default_factory=Counter)
    misses: int = 0
    joins: int = 0
    fetched: Counter[Tier] = field(default_factory=Counter)
    promoted: Counter[Tier] = field(default_factory=Counter)
    demoted: Counter[Tier] = field(default_factory=Counter)
    demotions_failed: Counter[Tier] = field(default_factory=Counter)
    dropped: Counter[tuple[Tier, Reason]] = field(default_factory=Counter)
    refused: Counter[Reason] = field(default_factory=Counter)
    divergent_puts: int = 0
    divergent_copies: int = 0
    drops_forgotten: int = 0

    def snapshot(self) -> StoreCounts:
        """As values that later counts do not change."""
        return StoreCounts(
            hits=dict(self.hits),
            misses=self.misses,
            joins=self.joins,
            fetched=dict(self.fetched),
            promoted=dict(self.promoted),
            demoted=dict(self.demoted),
            demotions_failed=dict(self.demotions_failed),
            dropped=dict(self.dropped),
            refused=dict(self.refused),
            divergent_puts=self.divergent_puts,
            drops_forgotten=self.drops_forgotten,
            divergent_copies=self.divergent_copies,
        )


class DownwardLane(Protocol):
    """What `Books` needs of the lane of a lower tier."""

    def demote(self, action: Demote) -> None: ...

    def drop(self, name: FrameName) -> None: ...

    def cancel(self, transfer_id: TransferId) -> bool: ...


class UpwardFlights(Protocol):
    """What `Books` needs of the flights."""

    def begin(self, actions: Sequence[Fetch | Promote]) -> None: ...

    def cancel(self, transfer_id: TransferId) -> None: ...


class Quiet:
    """`Latencies` for nobody."""

    def took(self, tier: Tier, operation: str, seconds: float) -> None:
        """Not counted."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of; shared by all that carry out actions."""

    config: TieredStoreConfig
    tiers: dict[Tier, BlockTier]
    """DRAM first, then downwards."""
    pins: dict[Tier, Pinning]
    """Where blocks can be kept from a tier's own eviction."""
    checksums: dict[Tier, Callable[[FrameName], int | None]]
    """Of what lower tiers hold, where they know it without reading."""
    watch: TierWatch
    guards: dict[Tier, TierGuard]
    """Of the lower tiers."""
    gate: ByteGate
    clock: Clock
    latencies: Latencies
    landing: Landing | None
    """Of DRAM."""

    @property
    def dram(self) -> BlockTier:
        return self.tiers[Tier.DRAM]


class Books:
    """The planner, and where each of its actions goes."""

    def __init__(self, planner: Planner, parts: Parts) -> None:
        self.planner = planner
        self.tally = Tally()
        self._parts = parts
        self._lanes: dict[Tier, DownwardLane] = {}
        self._flights: UpwardFlights | None = None
        self._dram_drops: dict[FrameName, None] = {}
        self._held: dict[FrameName, int] = {}
        self._put_off: dict[FrameName, None] = {}
        parts.watch.hook(self._on_removed)

    def attach(self, lanes: dict[Tier, DownwardLane], flights: UpwardFlights) -> None:
        """Who carries things out. Once."""
        self._lanes = lanes
        self._flights = flights

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Hand out everything but what the caller itself does (writes, serves, joins, skips)."""
        assert self._flights is not None
        ups: list[Fetch | Promote] = []
        for action in actions:
            match action:
                case Drop():
                    self._drop(action)
                case Demote():
                    self._lanes[action.target].demote(action)
                case Cancel():
                    self._cancel(action)
                case Fetch() | Promote():
                    ups.append(action)
                case _:
                    pass
        if ups:
            self._flights.begin(ups)

    def report(self, transfer_id: TransferId, outcome: Outcome) -> None:
        """Tell the planner, and hand out what follows."""
        self.carry_out(self.planner.report(transfer_id, outcome, self._parts.clock()))

    def drop_from_dram(self, name: FrameName) -> None:
        """Have a block dropped at the next `flush`; the books hear of it from the tier."""
        self._dram_drops[name] = None

    @property
    def has_drops(self) -> bool:
        """Whether the next `flush` has anything to do."""
        return bool(self._dram_drops)

    async def flush(self) -> None:
        """Drop from DRAM what is due. Cancelled or failed, it is due again."""
        while self._dram_drops:
            names = tuple(self._dram_drops)[:TIER_BATCH_BLOCKS_MAX]
            for name in names:
                del self._dram_drops[name]
            done = False
            try:
                await self._parts.dram.drop(
                    ByNames(names), self._parts.clock() + self._parts.config.drop_s
                )
                done = True
            except KvtierError:
                return  # the next flush tries again
            finally:
                if not done:
                    self._dram_drops.update(dict.fromkeys(names))

    def hold(self, names: Sequence[FrameName]) -> None:
        """Put off the eviction of blocks from DRAM, until as many `let_go`. No pin: 0.2 us each.

        The planner does not know: what it drops to make room stays meanwhile, and its bytes with
        it. A drop that somebody asked for, and one of bad bytes, is not put off.
        """
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1

    def let_go(self, names: Sequence[FrameName]) -> None:
        """Undo `hold`: what was put off is dropped at the next flush."""
        for name in names:
            count = self._held.get(name, 0) - 1
            if count > 0:
                self._held[name] = count
                continue
            self._held.pop(name, None)
            if name in self._put_off:
                del self._put_off[name]
                self._dram_drops[name] = None

    def is_held(self, name: FrameName) -> bool:
        return name in self._held

    def is_leaving(self, name: FrameName) -> bool:
        """Whether a block that is in DRAM is to be dropped from it."""
        return bool(self._dram_drops) and name in self._dram_drops

    def pin(self, tier: Tier, name: FrameName) -> Callable[[], None]:
        """Keep a block in a tier until the returned call, where the tier can."""
        pinning = self._parts.pins.get(tier)
        token = None if pinning is None else pinning.pin(name)
        if pinning is None or token is None:
            return _nothing
        return partial(pinning.unpin, name, token)

    def _drop(self, action: Drop) -> None:
        name = frame_name(action.key)
        self.tally.dropped[action.tier, action.reason] += 1
        if action.tier is Tier.DRAM:
            if name in self._held and action.reason not in _AT_ONCE:
                self._put_off[name] = None
            else:
                self.drop_from_dram(name)
        else:
            self._lanes[action.tier].drop(name)

    def _cancel(self, action: Cancel) -> None:
        assert self._flights is not None
        name = frame_name(action.key)
        if self._parts.watch.holds(Tier.DRAM, name):
            self.drop_from_dram(name)  # gone for readers of shared memory at once
        for lane in self._lanes.values():
            if lane.cancel(action.transfer_id):
                self.report(action.transfer_id, Outcome.CANCELLED)
                return
        self._flights.cancel(action.transfer_id)

    def _on_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        if tier is Tier.DRAM and self._put_off:
            for name in names:
                self._put_off.pop(name, None)
        if tier in self._parts.tiers:
            self.planner.vanished([block_key(name) for name in names], tier)


def _nothing() -> None:
    """There is no pin to undo."""

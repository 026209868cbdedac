"""What goes into a tiered store and what comes out: frozen values and ports.

What must not live here: state, decisions, I/O.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Final, Protocol

from kvtier.core.checks import require_integer
from kvtier.core.eviction import PRIORITY_DEFAULT, PinToken, Retention
from kvtier.core.frame import FrameName
from kvtier.core.health import BreakerPolicy
from kvtier.core.planner import PinId, PlannerConfig, Reason, Reuse, TierUsage, Verdict
from kvtier.errors import CallerError
from kvtier.limits import STORE_IN_FLIGHT_BYTES_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.ports import NO_SCOPE, BlockOwner, BlockTier, Landing, RemovalCause, TierStats
from kvtier.types import ScopeId, Tier


class WrittenBlock(Protocol):
    """A block that a writer put into DRAM past the store. Never changed."""

    @property
    def name(self) -> FrameName: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def owner(self) -> BlockOwner: ...

    @property
    def retention(self) -> Retention: ...


@dataclass(frozen=True, slots=True)
class TieredStoreConfig:
    """How the planner's actions are carried out. Ceilings of tiers are in `planner`."""

    planner: PlannerConfig
    group_blocks: int = 16
    """Blocks of one call to a lower tier: the first group can be used while others are read."""
    group_bytes: int = 16 << 20
    in_flight_bytes_max: int = 512 << 20
    """Of blocks that are being read from lower tiers, or written there, in memory of the store."""
    fetches_per_tier_max: int = 8
    """Calls to read from one lower tier at once."""
    dram_s: float = 5.0
    """Deadline of a write into DRAM by the store itself."""
    drop_s: float = 5.0
    """Deadline of one attempt to drop blocks from a lower tier."""
    drops_pending_max: int = 1 << 16
    """Blocks that a tier could not drop yet; above it the oldest are forgotten and counted."""
    tick_s: float = 0.25
    drain_s: float = 5.0
    """How long `close` lets demotions go on."""
    breaker: BreakerPolicy = field(
        default_factory=lambda: BreakerPolicy(failures_max=3, open_s=0.5, open_s_max=10.0)
    )
    """Of each lower tier and direction."""

    def __post_init__(self) -> None:
        require_integer("group_blocks", self.group_blocks, 1, TIER_BATCH_BLOCKS_MAX)
        require_integer("group_bytes", self.group_bytes, 1, STORE_IN_FLIGHT_BYTES_MAX)
        require_integer("in_flight_bytes_max", self.in_flight_bytes_max, 1,
                        STORE_IN_FLIGHT_BYTES_MAX)  # fmt: skip
        require_integer("fetches_per_tier_max", self.fetches_per_tier_max, 1, 1024)
        require_integer("drops_pending_max", self.drops_pending_max, 1, 1 << 22)
        for name in ("dram_s", "drop_s", "tick_s", "drain_s"):
            if not 0 < getattr(self, name) < inf:
                raise CallerError(f"{name} is {getattr(self, name)}, not positive and finite")


class Pinning(Protocol):
    """The part of `LocalTier` that keeps blocks from a tier's own eviction."""

    def pin(self, name: FrameName) -> PinToken | None: ...

    def unpin(self, name: FrameName, token: PinToken) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreTier:
    """One tier of a store. `pins` is None for a tier that evicts by nobody's leave (a Redis)."""

    blocks: BlockTier
    pins: Pinning | None = None
    checksum_of: Callable[[FrameName], int | None] | None = None
    """The payload's checksum of a block that it holds, without reading it. So the first bytes of a
    name are kept even where they are only below. None: the tier cannot say."""
    landing: Landing | None = None
    """Of DRAM: where lower tiers read into. None: what comes up is put, with one more copy."""


SHARED_TIERS: Final = frozenset({Tier.PEER, Tier.REDIS})
"""Tiers that other nodes write too: what this store never put may be there, and what they hold is
not announced as this store's."""


class SharedTier(StrEnum):
    """Whether a tier that other nodes write too is asked for blocks unknown here."""

    ASK = "ask"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What holds for all blocks of one read."""

    scope: ScopeId = NO_SCOPE
    """Whose read it is: what comes up from a shared tier counts against this scope's quota."""
    reuse: Reuse = Reuse.UNKNOWN
    shared: SharedTier = SharedTier.ASK


@dataclass(frozen=True, slots=True)
class PinTerms:
    """How strongly and how long blocks are pinned."""

    ttl_s: float
    priority: int = PRIORITY_DEFAULT


@dataclass(frozen=True, slots=True)
class PinResult:
    """A pin and the blocks that it holds."""

    pin_id: PinId
    names: tuple[FrameName, ...]


class Presence(StrEnum):
    """What `bring_up` made of one block."""

    RESIDENT = "resident"
    """It is in DRAM now."""
    MISS = "miss"
    NO_ROOM = "no_room"
    """It exists below, and DRAM has no room (or too much is under way): get it instead."""
    TIMEOUT = "timeout"
    ERROR = "error"


class StoreListener(Protocol):
    """Who is told of what tiers hold: the publisher. Called on the store's loop; return at once.

    A tier whose breaker is open is told as if it had lost everything, and again when it is back.
    """

    def on_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        """These can be had from the tier."""

    def on_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """These can no longer."""


class Latencies(Protocol):
    """Where the time of the tiers' calls is counted; the histogram of a service."""

    def took(self, tier: Tier, operation: str, seconds: float) -> None:
        """One call to a tier ended. `operation` is get, put or drop."""


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier as the store sees it."""

    stats: TierStats
    usage: TierUsage
    verdict: Verdict
    tripped_count: int
    """How often a breaker of it opened."""
    drops_pending: int


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Counters since the store was opened."""

    hits: Mapping[Tier, int]
    """Blocks read, by the tier that they came from."""
    misses: int
    joins: int
    """Reads and puts that waited for the work of another."""
    fetched: Mapping[Tier, int]
    promoted: Mapping[Tier, int]
    """By the tier that they came from."""
    demoted: Mapping[Tier, int]
    """By the tier that they went to."""
    demotions_failed: Mapping[Tier, int]
    dropped: Mapping[tuple[Tier, Reason], int]
    refused: Mapping[Reason, int]
    divergent_puts: int
    drops_forgotten: int
    divergent_copies: int
    """Demotions that found other bytes below: the copy below, which came first, is kept."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds and did. Does no I/O."""

    tiers: Mapping[Tier, TierView]
    counts: StoreCounts
    transfers: int
    """Under way: puts, fetches, promotions and demotions."""
    in_flight_bytes: int
    pins: int
    pinned_bytes: int
    quota_used_bytes: Mapping[tuple[ScopeId, Tier], int]

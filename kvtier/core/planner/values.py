"""What goes into the planner and what comes out: frozen values only.

What must not live here: state and decisions.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple, NewType

from kvtier.core.eviction import Retention
from kvtier.errors import CallerError
from kvtier.limits import (
    PAYLOAD_BYTES_MAX,
    PIN_TTL_S_MAX,
    PLANNER_QUOTAS_MAX,
    PLANNER_TRANSFERS_MAX,
)
from kvtier.types import Fingerprint, InstanceId, ScopeId, Tier

TransferId = NewType("TransferId", int)
"""Names one attempt to move one block; never used twice by a planner."""

PinId = NewType("PinId", int)


class BlockKey(NamedTuple):
    """What names stored bytes: the same key in another namespace is another block."""

    namespace: Fingerprint
    key: bytes


class Reuse(Enum):
    """What the writer or reader knows about later uses of a block."""

    UNKNOWN = "unknown"
    PREDICTED = "predicted"
    """Treated as if it had been touched often enough for every tier."""


@dataclass(frozen=True, slots=True)
class Block:
    """One stored block: name, frame bytes, whose it is, who wrote it."""

    key: BlockKey
    size_bytes: int
    scope_id: ScopeId
    writer_id: InstanceId
    reuse: Reuse = Reuse.UNKNOWN
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size_bytes <= PAYLOAD_BYTES_MAX:
            raise CallerError(f"size_bytes is {self.size_bytes}, must be 1 to {PAYLOAD_BYTES_MAX}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to read; `hinted`: tiers where others say it is (a Redis that another node fed)."""

    block: Block
    hinted: frozenset[Tier] = frozenset()


# Configuration


class WritePolicy(Enum):
    """When a block is copied into a lower tier."""

    ON_SEAL = "on_seal"
    """As soon as it is stored above (write-through)."""
    ON_REUSE = "on_reuse"
    """At the touch that makes `touches_min`."""
    ON_EVICT = "on_evict"
    """When it leaves the tier above, if it has `touches_min` (write-back)."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Ceilings of one tier. `write_policy` and what follows it mean nothing for DRAM."""

    tier: Tier
    capacity_bytes: int
    high_share: float = 0.95
    """Of the capacity: above it blocks begin to leave ..."""
    low_share: float = 0.90
    """... until this is reached."""
    deadline_s: float = 0.5
    """For one fetch from this tier or one write into it."""
    write_policy: WritePolicy = WritePolicy.ON_EVICT
    touches_min: int = 2
    write_bytes_per_day: float = inf
    write_burst_bytes: float = inf
    """What may be written at once after a quiet time."""
    queued_bytes_max: int = 1 << 30
    """Of demotions into this tier that are queued or being written."""

    def __post_init__(self) -> None:
        if self.tier is Tier.GPU:
            raise CallerError("the gpu tier belongs to the worker, not to the planner")
        if not (0 < self.low_share <= self.high_share <= 1):
            raise CallerError(f"{self.tier.name}: needs 0 < low_share <= high_share <= 1")
        if self.capacity_bytes < 1 or self.queued_bytes_max < 1 or self.touches_min < 1:
            raise CallerError(f"{self.tier.name}: capacity, queue and touches must be positive")
        if not 0 < self.deadline_s < inf:
            raise CallerError(f"{self.tier.name}: deadline_s must be positive and finite")
        if not (self.write_bytes_per_day > 0 and self.write_burst_bytes > 0):
            raise CallerError(f"{self.tier.name}: write budgets must be positive")


@dataclass(frozen=True, slots=True)
class ScopeQuota:
    """A ceiling for one scope in one tier, and a guarantee: others cannot push it below that."""

    scope_id: ScopeId
    tier: Tier
    bytes_max: int


_NEARNESS = (Tier.DRAM, Tier.NVME, Tier.PEER, Tier.REDIS)
"""In which order tiers are read. The stores of other nodes are only read."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Tiers nearest first (DRAM must be there), quotas, and the planner's own ceilings."""

    tiers: tuple[TierConfig, ...]
    quotas: tuple[ScopeQuota, ...] = ()
    promote_touches_min: int = 2
    """A hit below DRAM is kept in DRAM from this touch on."""
    touch_half_life_s: float = 600.0
    touches_tracked_max: int = 1 << 16
    flights_max: int = 1024
    """Puts, fetches and promotions under way."""
    demotions_max: int = 4096
    demotion_failures_max: int = 2
    """After so many failed demotions a block is given up."""
    pinned_share_max: float = 0.5
    """Of the DRAM capacity."""
    pin_ttl_s_max: float = PIN_TTL_S_MAX

    def __post_init__(self) -> None:
        order = [t.tier for t in self.tiers]
        if order != sorted(set(order), key=_NEARNESS.index) or Tier.DRAM not in order:
            raise CallerError("tiers must be DRAM and then others, nearest first, each once")
        if not (0 < self.touch_half_life_s < inf and 0 < self.pin_ttl_s_max <= PIN_TTL_S_MAX):
            raise CallerError("touch_half_life_s and pin_ttl_s_max must be positive and bounded")
        counts = (self.promote_touches_min, self.touches_tracked_max, self.demotion_failures_max)
        if min(counts) < 1 or not 0 <= self.pinned_share_max <= 1:
            raise CallerError("planner counts must be positive, pinned_share_max within 0 to 1")
        for name in ("flights_max", "demotions_max"):
            if not 1 <= getattr(self, name) <= PLANNER_TRANSFERS_MAX:
                raise CallerError(f"{name} must be 1 to {PLANNER_TRANSFERS_MAX}")
        self._check_quotas()

    def _check_quotas(self) -> None:
        if len(self.quotas) > PLANNER_QUOTAS_MAX:
            raise CallerError(f"{len(self.quotas)} quotas exceed {PLANNER_QUOTAS_MAX}")
        if len({(q.scope_id, q.tier) for q in self.quotas}) != len(self.quotas):
            raise CallerError("a scope has two quotas in one tier")
        left = {t.tier: int(t.capacity_bytes * t.low_share) for t in self.tiers}
        for quota in self.quotas:
            if quota.bytes_max < 1 or quota.tier not in left:
                raise CallerError(f"quota in {quota.tier.name} is not positive or has no tier")
            left[quota.tier] -= quota.bytes_max
        if min(left.values()) < 0:
            raise CallerError("quotas exceed the low_share of their tier: no guarantee would hold")


# Events


class Verdict(Enum):
    """What a tier is good for now."""

    OPEN = "open"
    READ_ONLY = "read_only"
    """Full disk, failed sync: it serves, nothing is written."""
    DOWN = "down"
    """Its breaker is open: it is skipped; what it holds is still remembered."""


class Outcome(Enum):
    """How a transfer ended."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    MISSING = "missing"
    """The source does not have it (any more)."""
    CORRUPT = "corrupt"
    """The source's bytes are not the block."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks to drop: those that match every criterion given; at least one is."""

    keys: frozenset[BlockKey] | None = None
    namespace: Fingerprint | None = None
    scope_id: ScopeId | None = None
    writer_id: InstanceId | None = None

    def __post_init__(self) -> None:
        if (self.keys, self.namespace, self.scope_id, self.writer_id) == (None,) * 4:
            raise CallerError("a selection without a criterion would drop everything")

    def matches(self, block: Block) -> bool:
        """Whether the block is selected. Pure."""
        return (
            (self.keys is None or block.key in self.keys)
            and (self.namespace is None or block.key.namespace == self.namespace)
            and (self.scope_id is None or block.scope_id == self.scope_id)
            and (self.writer_id is None or block.writer_id == self.writer_id)
        )


# Actions


class Reason(Enum):
    """Why a block is dropped or nothing is done."""

    MISS = "miss"
    RESIDENT = "resident"
    IN_FLIGHT = "in_flight"
    """Another writer is storing it; the first is kept."""
    BUSY = "busy"
    """A ceiling of the planner is reached."""
    CONFLICT = "conflict"
    """A block of another size or scope has this key."""
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"
    """Everything that could leave is pinned or still being written below."""
    TIER_DOWN = "tier_down"
    TIER_LOST = "tier_lost"
    """It was written into a tier that has been emptied since."""
    NOT_ADMITTED = "not_admitted"
    """Touched too seldom for any tier below."""
    BUDGET = "budget"
    """The write budget of the tier below is used up."""
    QUEUE_FULL = "queue_full"
    COPY_ELSEWHERE = "copy_elsewhere"
    """Nothing is lost: another tier has it."""
    NO_TIER_BELOW = "no_tier_below"
    DEMOTION_FAILED = "demotion_failed"
    CORRUPT = "corrupt"
    SELECTED = "selected"
    """An operator or a purge asked for it."""


@dataclass(frozen=True, slots=True)
class Write:
    """Room is reserved: write the put into the tier, then report."""

    transfer_id: TransferId
    key: BlockKey
    tier: Tier


@dataclass(frozen=True, slots=True)
class Serve:
    """It is in DRAM: read it in place."""

    key: BlockKey


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read it from the tier for the caller and keep nothing, then report."""

    transfer_id: TransferId
    key: BlockKey
    source: Tier
    deadline_at: float


@dataclass(frozen=True, slots=True)
class Promote:
    """Room in DRAM is reserved: read it from the tier into DRAM, then report."""

    transfer_id: TransferId
    key: BlockKey
    source: Tier
    deadline_at: float


@dataclass(frozen=True, slots=True)
class Join:
    """A put, fetch or promotion of this key is under way: wait for its end."""

    key: BlockKey


@dataclass(frozen=True, slots=True)
class Demote:
    """Room below is reserved: copy it from source to target, then report; it stays until then."""

    transfer_id: TransferId
    key: BlockKey
    source: Tier
    target: Tier
    deadline_s: float
    """Counted from when you start it: demotions wait for quiet moments."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Unpublish the block now and stop the transfer; its drops follow your report."""

    transfer_id: TransferId
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove it from the tier. The planner's books have done so already."""

    key: BlockKey
    tier: Tier
    reason: Reason


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing is done for this key: a read is a miss, a put is refused."""

    key: BlockKey
    reason: Reason


Action = Write | Serve | Fetch | Promote | Join | Demote | Cancel | Drop | Skip


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin and the keys that it holds: those that were in DRAM and fitted the pin budget."""

    pin_id: PinId
    keys: tuple[BlockKey, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes of one tier: resident, reserved for writes under way, leaving once written below."""

    resident_bytes: int
    reserved_bytes: int
    leaving_bytes: int
    blocks_count: int

"""The books: which block is in which tier, how many bytes that is, and what may not leave.

Every change of residency goes through here, so that one place owns the counters. What must not live
here: which block should move (see `planner`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.core.eviction import PinToken, Policy, Removal, Retention
from kvtier.core.planner.values import (
    Block,
    BlockKey,
    PinId,
    PlannerConfig,
    TierUsage,
    TransferId,
)
from kvtier.types import ScopeId, Tier

PolicyMaker = Callable[[Tier, int], Policy[BlockKey]]
"""Makes the policy of one pool from its tier and its ceiling in bytes."""


class Kind(Enum):
    """What a transfer does."""

    WRITE = "write"
    FETCH = "fetch"
    PROMOTE = "promote"
    DEMOTE = "demote"


class After(Enum):
    """What becomes of the source's copy once a demotion is written."""

    KEEP = "keep"
    DROP = "drop"


class Keep(Enum):
    """Whether a block that is fetched from below is to stay in DRAM."""

    NO = "no"
    WISH = "wish"
    MUST = "must"


class Stage(Enum):
    """Where a demotion is: queued, writing, and then gone from the books with its outcome."""

    QUEUED = "queued"
    WRITING = "writing"


@dataclass(slots=True, eq=False)
class Batch:
    """The keys of one put or read in chain order, touched as a whole when all have ended."""

    keys: tuple[BlockKey, ...]
    outstanding: int = 0


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt to move one block. `void`: its target was lost, nothing arrives there."""

    transfer_id: TransferId
    kind: Kind
    key: BlockKey
    source: Tier | None
    target: Tier | None
    after: After = After.KEEP
    stage: Stage = Stage.QUEUED
    void: bool = False
    keep: Keep = Keep.NO
    tried: frozenset[Tier] = frozenset()
    hinted: frozenset[Tier] = frozenset()
    batch: Batch | None = None


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one block that is somewhere or on its way."""

    block: Block
    tiers: set[Tier] = field(default_factory=set)
    flight: Transfer | None = None
    """The one put, fetch or promotion under way."""
    demotion: Transfer | None = None
    """The one demotion under way."""
    pins: set[PinId] = field(default_factory=set)
    holds: dict[Tier, PinToken] = field(default_factory=dict)
    demotion_failures: int = 0
    doomed: bool = False
    """Selected for dropping while a transfer runs: gone for readers, dropped at its end."""


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of one quota, or of all scopes without one, in one tier."""

    policy: Policy[BlockKey]
    quota_bytes: int | None
    resident_bytes: int = 0
    reserved_bytes: int = 0
    leaving_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Resident and reserved."""
        return self.resident_bytes + self.reserved_bytes


@dataclass(slots=True)
class _TierBooks:
    capacity_bytes: int
    common: Pool
    by_scope: dict[ScopeId, Pool]
    resident_bytes: int = 0
    reserved_bytes: int = 0
    leaving_bytes: int = 0
    blocks_count: int = 0

    def pool(self, scope_id: ScopeId) -> Pool:
        return self.by_scope.get(scope_id, self.common)

    @property
    def used_bytes(self) -> int:
        return self.resident_bytes + self.reserved_bytes


class Ledger:
    """Residency, bytes, pools and holds of all tiers. Each change O(1) plus the policy's cost.

    A scope with a quota in a tier has a pool of its own there; all others share the common pool.
    """

    __slots__ = ("_records", "_tiers")

    def __init__(self, config: PlannerConfig, make_policy: PolicyMaker) -> None:
        self._records: dict[BlockKey, Record] = {}
        self._tiers: dict[Tier, _TierBooks] = {}
        for tier_config in config.tiers:
            tier, capacity_bytes = tier_config.tier, tier_config.capacity_bytes
            self._tiers[tier] = _TierBooks(
                capacity_bytes,
                Pool(make_policy(tier, capacity_bytes), None),
                {
                    q.scope_id: Pool(make_policy(tier, q.bytes_max), q.bytes_max)
                    for q in config.quotas
                    if q.tier is tier
                },
            )

    def __len__(self) -> int:
        return len(self._records)

    def find(self, key: BlockKey) -> Record | None:
        """The record of a block that is somewhere or on its way."""
        return self._records.get(key)

    def records(self) -> Iterator[Record]:
        """All records; do not change residency while iterating."""
        return iter(self._records.values())

    def open(self, block: Block) -> Record:
        """The record of the block, made if there is none; close it when nothing came of it."""
        record = self._records.get(block.key)
        if record is None:
            record = self._records[block.key] = Record(block)
        return record

    def close_if_empty(self, record: Record) -> None:
        """Forget a block that is nowhere and not on its way."""
        if not record.tiers and record.flight is None and record.demotion is None:
            self._records.pop(record.block.key, None)

    def usage(self, tier: Tier) -> TierUsage:
        """The counters of one tier."""
        books = self._tiers[tier]
        return TierUsage(
            books.resident_bytes, books.reserved_bytes, books.leaving_bytes, books.blocks_count
        )

    def used_bytes(self, tier: Tier) -> int:
        """Resident and reserved bytes of a tier; never more than its capacity."""
        return self._tiers[tier].used_bytes

    def pool(self, scope_id: ScopeId, tier: Tier) -> Pool:
        """The pool that holds the scope's blocks in the tier."""
        return self._tiers[tier].pool(scope_id)

    def pools(self, tier: Tier) -> list[Pool]:
        """All pools of a tier, the common one first."""
        return [self._tiers[tier].common, *self._tiers[tier].by_scope.values()]

    def staying_share(self, pool: Pool, tier: Tier) -> float:
        """How full a pool will be once all that leaves is gone: of its quota, or of the tier."""
        if pool.quota_bytes is not None:
            return (pool.used_bytes - pool.leaving_bytes) / pool.quota_bytes
        books = self._tiers[tier]
        return (books.used_bytes - books.leaving_bytes) / books.capacity_bytes

    def can_ever_fit(self, block: Block, tier: Tier) -> bool:
        """Whether an empty tier would take the block, its scope's quota included."""
        books = self._tiers[tier]
        quota_bytes = books.pool(block.scope_id).quota_bytes
        return block.size_bytes <= min(books.capacity_bytes, quota_bytes or books.capacity_bytes)

    def shortage_pools(self, block: Block, tier: Tier) -> list[Pool]:
        """Whose blocks must go, in this order, before the block fits; empty when it fits now.

        Over its quota a scope pays with its own blocks. Under it, the common pool pays first, so
        that nobody is pushed below a guarantee.
        """
        books = self._tiers[tier]
        own = books.pool(block.scope_id)
        if own.quota_bytes is not None and own.used_bytes + block.size_bytes > own.quota_bytes:
            return [own]
        if books.used_bytes + block.size_bytes <= books.capacity_bytes:
            return []
        return [books.common] if own is books.common else [books.common, own]

    def reserve(self, block: Block, tier: Tier) -> None:
        """Set bytes aside for a write into the tier; the caller has made room."""
        books = self._tiers[tier]
        books.reserved_bytes += block.size_bytes
        books.pool(block.scope_id).reserved_bytes += block.size_bytes

    def unreserve(self, block: Block, tier: Tier) -> None:
        """Give reserved bytes back."""
        books = self._tiers[tier]
        books.reserved_bytes -= block.size_bytes
        books.pool(block.scope_id).reserved_bytes -= block.size_bytes

    def count_leaving(self, record: Record, tier: Tier, sign: int) -> None:
        """Count the block as leaving the tier (+1) or no longer so (-1)."""
        books = self._tiers[tier]
        books.leaving_bytes += sign * record.block.size_bytes
        books.pool(record.block.scope_id).leaving_bytes += sign * record.block.size_bytes

    def arrive(self, record: Record, tier: Tier, now: float) -> None:
        """The block is resident in the tier from now on."""
        if tier in record.tiers:
            return
        block, books = record.block, self._tiers[tier]
        pool = books.pool(block.scope_id)
        retention: Sequence[Retention] = () if block.retention is None else (block.retention,)
        pool.policy.on_stored((block.key,), now, retention)
        record.tiers.add(tier)
        books.resident_bytes += block.size_bytes
        books.blocks_count += 1
        pool.resident_bytes += block.size_bytes
        self.sync_holds(record)

    def leave(self, record: Record, tier: Tier, removal: Removal) -> None:
        """The block is no longer resident in the tier."""
        if tier not in record.tiers:
            return
        block, books = record.block, self._tiers[tier]
        pool = books.pool(block.scope_id)
        demotion = record.demotion
        if demotion is not None and demotion.source is tier and demotion.after is After.DROP:
            self.count_leaving(record, tier, -1)
            demotion.after = After.KEEP
        pool.policy.on_removed((block.key,), removal)
        record.tiers.remove(tier)
        record.holds.pop(tier, None)
        books.resident_bytes -= block.size_bytes
        books.blocks_count -= 1
        pool.resident_bytes -= block.size_bytes

    def touch(self, keys: Iterable[BlockKey], now: float) -> None:
        """Count a use of the blocks of one chain in every tier that has them, in chain order."""
        by_pool: dict[int, tuple[Pool, list[BlockKey]]] = {}
        for key in keys:
            record = self._records.get(key)
            if record is None:
                continue
            for tier in record.tiers:
                pool = self._tiers[tier].pool(record.block.scope_id)
                by_pool.setdefault(id(pool), (pool, []))[1].append(key)
        for pool, chain in by_pool.values():
            pool.policy.on_touched(chain, now)

    def sync_holds(self, record: Record) -> None:
        """Hold what is pinned, being read or being demoted; let go of the rest."""
        if not (record.pins or record.flight or record.demotion or record.holds):
            return  # most blocks, most of the time
        for tier in record.tiers:
            policy = self._tiers[tier].pool(record.block.scope_id).policy
            is_source = any(
                t is not None and t.source is tier for t in (record.flight, record.demotion)
            )
            if record.pins or is_source:
                if tier not in record.holds:
                    record.holds[tier] = policy.pin(record.block.key)
            elif tier in record.holds:
                policy.unpin(record.block.key, record.holds.pop(tier))

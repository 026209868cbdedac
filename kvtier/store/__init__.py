"""The tiered store of a node: carries out the planner over DRAM, NVMe and Redis.

From below: `values` and `naming`, `watch` (what tiers hold), `gates` (breakers, bytes under way),
`books` (the planner, and where its actions go), `lane` (down), `flights` (up), `writes`, `reads`,
and `store`, which is all of it together. What must not live here: gRPC, shared memory, publishing.
"""

from kvtier.store.naming import held_block
from kvtier.store.store import TieredStore, open_store
from kvtier.store.values import (
    Latencies,
    PinResult,
    PinTerms,
    Presence,
    ReadOptions,
    SharedTier,
    StoreCounts,
    StoreListener,
    StoreStats,
    StoreTier,
    TieredStoreConfig,
    TierView,
)
from kvtier.store.watch import TierWatch

__all__ = [
    "Latencies",
    "PinResult",
    "PinTerms",
    "Presence",
    "ReadOptions",
    "SharedTier",
    "StoreCounts",
    "StoreListener",
    "StoreStats",
    "StoreTier",
    "TierView",
    "TierWatch",
    "TieredStore",
    "TieredStoreConfig",
    "held_block",
    "open_store",
]

"""Which block goes first: one `Policy` contract, four policies, and retention by token range.

A policy orders keys; it owns no bytes and frees nothing. The paged L1 pool, the DRAM arena, the
NVMe tier and the simulator tell it what they stored, touched and removed, and ask for `victims`.
What must not live here: capacities in bytes, write policies and tiers (see `planner`), I/O, clocks.
"""

from kvtier.core.eviction.lru import LruPolicy
from kvtier.core.eviction.policy import PinToken, Policy, Removal, TouchOrder
from kvtier.core.eviction.priority import PriorityPolicy
from kvtier.core.eviction.ranked import RankedPolicy
from kvtier.core.eviction.retention import (
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    RequestShape,
    Retention,
    RetentionPlan,
    TokenRange,
    retention_of_blocks,
)
from kvtier.core.eviction.s3fifo import S3FifoConfig, S3FifoPolicy

__all__ = [
    "PRIORITY_DEFAULT",
    "PRIORITY_MAX",
    "LruPolicy",
    "PinToken",
    "Policy",
    "PriorityPolicy",
    "RankedPolicy",
    "Removal",
    "RequestShape",
    "Retention",
    "RetentionPlan",
    "S3FifoConfig",
    "S3FifoPolicy",
    "TokenRange",
    "TouchOrder",
    "retention_of_blocks",
]

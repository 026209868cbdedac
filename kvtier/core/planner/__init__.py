"""What to promote, demote, drop and fetch across a node's tiers: DRAM arena, NVMe, Redis.

Events in (a put, a read, an outcome), actions out; the shell carries actions out in order and
reports. What must not live here: bytes, I/O, clocks, and what loading costs (see `costs`).
"""

from kvtier.core.planner.budgets import ByteBudget, TouchCounts
from kvtier.core.planner.planner import Planner
from kvtier.core.planner.values import (
    Action,
    Block,
    BlockKey,
    Cancel,
    Demote,
    Drop,
    Fetch,
    Join,
    Outcome,
    PinId,
    Pinned,
    PlannerConfig,
    Promote,
    Reason,
    Reuse,
    ScopeQuota,
    Selection,
    Serve,
    Skip,
    TierConfig,
    TierUsage,
    TransferId,
    Verdict,
    Wanted,
    Write,
    WritePolicy,
)

__all__ = [
    "Action",
    "Block",
    "BlockKey",
    "ByteBudget",
    "Cancel",
    "Demote",
    "Drop",
    "Fetch",
    "Join",
    "Outcome",
    "PinId",
    "Pinned",
    "Planner",
    "PlannerConfig",
    "Promote",
    "Reason",
    "Reuse",
    "ScopeQuota",
    "Selection",
    "Serve",
    "Skip",
    "TierConfig",
    "TierUsage",
    "TouchCounts",
    "TransferId",
    "Verdict",
    "Wanted",
    "Write",
    "WritePolicy",
]

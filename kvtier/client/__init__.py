"""The index as a library: ask, watch, reserve, publish. `blocking` is the same without asyncio.

The store is `kvtier.client.store`, and `store_blocking` without asyncio.

What must not live here: the embedded index (`kvtier.replica`).
"""

from kvtier.client.calls import ClientConfig
from kvtier.client.client import IndexClient, TokenPrompt
from kvtier.client.reservations import ReserveResult, ReserveSession
from kvtier.client.results import (
    FleetChange,
    FleetChangeKind,
    IndexStats,
    Match,
    MatchedWorker,
)
from kvtier.core.workers import OwnReservation, WorkerName

__all__ = [
    "ClientConfig",
    "FleetChange",
    "FleetChangeKind",
    "IndexClient",
    "IndexStats",
    "Match",
    "MatchedWorker",
    "OwnReservation",
    "ReserveResult",
    "ReserveSession",
    "TokenPrompt",
    "WorkerName",
]

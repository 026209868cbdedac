"""Index and store as a library: ask, watch, reserve, publish; get and put blocks.

`blocking` and `store_blocking` are the same without asyncio.

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
from kvtier.client.store import (
    BlockStoreClient,
    ReadTerms,
    SharedMemory,
    StoreClientConfig,
    WriteTerms,
)
from kvtier.core.workers import OwnReservation, WorkerName

__all__ = [
    "BlockStoreClient",
    "ClientConfig",
    "FleetChange",
    "FleetChangeKind",
    "IndexClient",
    "IndexStats",
    "Match",
    "MatchedWorker",
    "OwnReservation",
    "ReadTerms",
    "ReserveResult",
    "ReserveSession",
    "SharedMemory",
    "StoreClientConfig",
    "TokenPrompt",
    "WorkerName",
    "WriteTerms",
]

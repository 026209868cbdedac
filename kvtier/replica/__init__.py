"""The index embedded in another process: fed by the index service, asked in microseconds.

What must not live here: the index itself (`kvtier.core`), choices of a worker.
"""

from kvtier.core.workers import HolderView, Load, OwnReservation, WorkerName
from kvtier.replica.predictions import Reserved
from kvtier.replica.replica import (
    HolderCensus,
    IndexReplica,
    ReplicaConfig,
    ReplicaLag,
    ReplicaLook,
    ReplicaMatch,
    ReplicaStats,
)

__all__ = [
    "HolderCensus",
    "HolderView",
    "IndexReplica",
    "Load",
    "OwnReservation",
    "ReplicaConfig",
    "ReplicaLag",
    "ReplicaLook",
    "ReplicaMatch",
    "ReplicaStats",
    "Reserved",
    "WorkerName",
]

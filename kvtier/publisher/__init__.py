"""Tells every index replica what this process holds, from a thread of its own.

What must not live here: the engine's hooks (`kvtier.engines`), the index.
"""

from kvtier.core.workers import Load
from kvtier.publisher.config import PublisherConfig
from kvtier.publisher.publisher import Publisher, PublisherListener
from kvtier.publisher.stats import PublisherStats, StreamState, StreamStats

__all__ = [
    "Load",
    "Publisher",
    "PublisherConfig",
    "PublisherListener",
    "PublisherStats",
    "StreamState",
    "StreamStats",
]

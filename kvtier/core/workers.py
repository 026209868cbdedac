"""A worker by name, and what it says of its own work.

What must not live here: how loads are weighed (`scoring`), the wire format (floor 2).
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.types import InstanceId


class WorkerName(NamedTuple):
    """One worker in every index: numbers differ from index to index, names do not."""

    instance: InstanceId
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker is doing, measured by itself; all zero before its first heartbeat."""

    running_requests: int = 0
    waiting_requests: int = 0
    queued_prefill_tokens: int = 0
    running_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0

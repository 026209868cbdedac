"""Workers and stores as others see them: by name, with the load they report and their trust.

What must not live here: how loads are weighed (`scoring`), who holds what, the wire format.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.checks import require_integer, require_name
from kvtier.core.fleet import HolderInfo
from kvtier.errors import CallerError, LimitError
from kvtier.limits import BATCH_BLOCKS_MAX, PROMPT_TOKENS_MAX, RESERVATION_TTL_MS_MAX
from kvtier.types import HolderId, InstanceId, Trust


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


@dataclass(frozen=True, slots=True)
class HolderView:
    """One holder as its index described it last."""

    holder: HolderId
    """The index's own number for it; another index has another one."""
    info: HolderInfo
    """As its lowest known shard gave it."""
    trust: Trust
    degraded_reason: str
    is_hidden: bool
    load: Load
    reserved_prefill_tokens: int
    reserved_requests: int
    """Reservations as they stood when the index wrote this; a replica knows them by the moment."""
    heard_at: float
    """Monotonic seconds of this process; when the index last heard of the holder."""

    @property
    def name(self) -> WorkerName:
        return WorkerName(self.info.instance, self.info.dp_rank)


@dataclass(frozen=True, slots=True, eq=False)
class OwnReservation:
    """Work that is about to be sent to a worker. `key` is unique to one life of one router.

    hashes: u64[n], what the worker will hold once it has prefilled.
    """

    key: str
    worker: WorkerName
    prefill_tokens: int
    ttl_ms: int
    hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def __post_init__(self) -> None:
        require_name("key", self.key)
        require_integer("prefill_tokens", self.prefill_tokens, 0, PROMPT_TOKENS_MAX)
        require_integer("ttl_ms", self.ttl_ms, 1, RESERVATION_TTL_MS_MAX)
        if self.hashes.dtype != np.uint64 or self.hashes.ndim != 1:
            raise CallerError("hashes: want a one-dimensional uint64 array")
        if len(self.hashes) > BATCH_BLOCKS_MAX:
            raise LimitError(f"hashes: {len(self.hashes)} exceed {BATCH_BLOCKS_MAX}")

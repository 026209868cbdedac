"""What the brain needs of an index, embedded or remote. What must not live here: decisions."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.client import Match
from kvtier.core.identity import Pool
from kvtier.core.workers import OwnReservation
from kvtier.replica import HolderCensus, ReplicaLook, ReplicaMatch

Hashes = npt.NDArray[np.uint64]


class IndexSource(Protocol):
    """An index in this process; `kvtier.replica.IndexReplica` is one. Nothing here waits."""

    def look(self) -> ReplicaLook: ...

    def census(self) -> Sequence[HolderCensus]:
        """How much everybody holds; empty where that is not known. O(holders)."""
        ...

    def match(self, hashes: Hashes, pool: Pool | None = None) -> ReplicaMatch: ...

    def reserve_local(self, wanted: OwnReservation) -> None: ...

    def prefilled_local(self, key: str, keep_s: float) -> None: ...

    def release_local(self, key: str) -> None: ...

    def keep_local(self, keep_s: float) -> None: ...


class RemoteMatcher(Protocol):
    """An index behind a network; `kvtier.client.IndexClient` is one."""

    async def match_many(
        self,
        queries: Sequence[Hashes],
        pool: Pool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Sequence[Match]: ...

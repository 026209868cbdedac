"""The fleet of an index that is not embedded: watched, and asked for every match.

For fleets too large to hold in a router's memory. What must not live here: the questions
themselves (`Router.route_remote`).
"""

from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Protocol

import numpy as np

from kvtier.client import FleetChange, FleetChangeKind
from kvtier.core.identity import Pool
from kvtier.core.prefix_index import MatchResult, NativePrefixIndex
from kvtier.core.workers import HolderView, OwnReservation
from kvtier.replica import HolderCensus, ReplicaLook, ReplicaMatch
from kvtier.types import HolderId, Trust
from kvtier_router.routing.ports import Hashes
from kvtier_router.routing.values import Clock

_INDEX_BYTES = 4 << 20
_GONE = frozenset({FleetChangeKind.LEFT})


class FleetWatcher(Protocol):
    """Tells who is there; `kvtier.client.IndexClient` is one."""

    def watch_fleet(self, models: Sequence[str] = ()) -> AsyncIterator[FleetChange]: ...


class RemoteFleet:
    """An IndexSource that knows the fleet and no block. Belongs to one event loop.

    Reservations have no place here: the index counts them, and tells of them in its views.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders: dict[HolderId, HolderView] = {}
        self._told: dict[HolderId, HolderView] = {}
        """What a new stream has told until it is complete."""
        self._changes_count = 0
        self._is_current = False
        self._lost_at = -inf
        self._foreign = np.zeros(0, np.int64)
        self._empty: MatchResult = NativePrefixIndex(_INDEX_BYTES).match(np.zeros(1, np.uint64))

    async def follow(self, watcher: FleetWatcher) -> None:
        """Take in changes until cancelled. Raises what trying again cannot mend."""
        async for change in watcher.watch_fleet():
            self.take(change)

    def take(self, change: FleetChange) -> None:
        """Take in one change."""
        if change.kind is FleetChangeKind.INTERRUPTED:
            self._is_current, self._lost_at, self._told = False, self._clock(), {}
            return
        if change.kind is FleetChangeKind.CURRENT:
            if not self._is_current:
                self._holders, self._told = self._told, {}
            self._is_current = True
            self._changes_count += 1
            return
        if change.holder is None:
            return
        into = self._holders if self._is_current else self._told
        if change.kind in _GONE:
            into.pop(change.holder.holder, None)
        else:
            into[change.holder.holder] = change.holder
        self._changes_count += 1

    # ---- IndexSource

    def look(self) -> ReplicaLook:
        trust = Trust.EXACT if self._is_current else Trust.DEGRADED
        age_s = 0.0 if self._is_current else self._clock() - self._lost_at
        return ReplicaLook(
            self._holders, self._changes_count, self._foreign, self._foreign, trust, age_s
        )

    def match(self, hashes: Hashes, pool: Pool | None = None) -> ReplicaMatch:
        """Nothing: whoever wants to know asks the index."""
        return ReplicaMatch(self._empty, self._holders, hashes, None)

    def census(self) -> tuple[HolderCensus, ...]:
        """Nothing: an index tells of that with its answers alone."""
        return ()

    def reserve_local(self, wanted: OwnReservation) -> None: ...

    def prefilled_local(self, key: str, keep_s: float) -> None: ...

    def release_local(self, key: str) -> None: ...

    def keep_local(self, keep_s: float) -> None: ...

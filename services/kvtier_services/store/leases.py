"""Leases of blocks in shared memory, each tied to the stream that took it.

A lease keeps a block from leaving DRAM while a device reads it; it ends with its stream, by
`Release`, or with its time. What must not live here: bringing blocks up, gRPC.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.core.eviction import PRIORITY_MAX
from kvtier.core.frame import FrameName
from kvtier.core.planner import PinId
from kvtier.errors import OverloadedError
from kvtier.limits import STORE_LEASES_MAX
from kvtier.store import PinTerms, TieredStore
from kvtier.tiers.arena.holdings import Held
from kvtier_services.store.arena import GovernedArena


@dataclass(frozen=True, slots=True)
class Leased:
    """One leased block, and where it is."""

    lease_id: int
    held: Held


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks that one pin holds; the pin ends with the last of them."""

    pin_id: PinId
    open: int


@dataclass(slots=True, eq=False)
class LeaseStream:
    """What one Acquire holds. `ended` is set when it holds nothing any more."""

    leases: dict[int, _Batch] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseBook:
    """All leases of a store. Of one event loop."""

    def __init__(self, store: TieredStore, arena: GovernedArena) -> None:
        self._store = store
        self._arena = arena
        self._ids = itertools.count(1)
        self._streams: dict[int, LeaseStream] = {}

    @property
    def count(self) -> int:
        return len(self._streams)

    def take(
        self, stream: LeaseStream, names: Sequence[FrameName], ttl_s: float
    ) -> list[Leased | None]:
        """Lease blocks that are in DRAM; None for one that is not, or that cannot be held."""
        if len(self._streams) + len(names) > STORE_LEASES_MAX:
            return [None] * len(names)
        try:
            pinned = self._store.pin(names, PinTerms(ttl_s, PRIORITY_MAX))
        except OverloadedError:
            return [None] * len(names)
        kept = set(pinned.names)
        batch = _Batch(pinned.pin_id, 0)
        leased: list[Leased | None] = []
        for name in names:
            held = self._arena.held(name) if name in kept else None
            if held is None:
                leased.append(None)
                continue
            lease_id = next(self._ids)
            batch.open += 1
            stream.leases[lease_id] = batch
            self._streams[lease_id] = stream
            leased.append(Leased(lease_id, held))
        if not batch.open:
            self._store.unpin(batch.pin_id)
        return leased

    def release(self, lease_ids: Iterable[int]) -> None:
        """End leases. Unknown ids are ignored: telling twice is harmless."""
        for lease_id in lease_ids:
            stream = self._streams.pop(lease_id, None)
            if stream is None:
                continue
            batch = stream.leases.pop(lease_id)
            batch.open -= 1
            if not batch.open:
                self._store.unpin(batch.pin_id)
            if not stream.leases:
                stream.ended.set()

    def close(self, stream: LeaseStream) -> None:
        """End all that a stream holds."""
        self.release(list(stream.leases))

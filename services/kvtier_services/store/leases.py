"""Leases of blocks in shared memory, each tied to the stream that took it.

A lease keeps a block from leaving DRAM while a device reads it; it ends with its stream, by
`Release`, or with its time. All of them together hold at most a share of the arena: the rest is for
puts. What must not live here: bringing blocks up, gRPC.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.frame import FrameName
from kvtier.limits import STORE_LEASES_MAX
from kvtier.tiers.arena.holdings import Held
from kvtier_services.store.arena import GovernedArena

LEASED_SHARE_MAX: Final = 0.5
"""Of the arena's bytes."""


@dataclass(frozen=True, slots=True)
class Leased:
    """One leased block, and where it is."""

    lease_id: int
    held: Held


@dataclass(slots=True, eq=False)
class LeaseStream:
    """What one Acquire holds. `ended` is set when it holds nothing any more."""

    leases: dict[int, tuple[FrameName, int]] = field(default_factory=dict)
    """By id: the block, and the bytes that it counts for."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseBook:
    """All leases of a store. Of one event loop."""

    def __init__(self, arena: GovernedArena) -> None:
        self._arena = arena
        self._bytes_max = int(arena.stats().bytes_max * LEASED_SHARE_MAX)
        self._ids = itertools.count(1)
        self._streams: dict[int, LeaseStream] = {}
        self.leased_bytes = 0

    @property
    def count(self) -> int:
        return len(self._streams)

    def take(self, stream: LeaseStream, names: Sequence[FrameName]) -> list[Leased | None]:
        """Lease blocks that are in DRAM; None for one that is not, or past a ceiling."""
        leased: list[Leased | None] = []
        taken: list[FrameName] = []
        for name in names:
            held = self._arena.held(name)
            if held is None or not self._has_room(held.slot.size):
                leased.append(None)
                continue
            lease_id = next(self._ids)
            self.leased_bytes += held.slot.size
            self._streams[lease_id] = stream
            stream.leases[lease_id] = (name, held.slot.size)
            taken.append(name)
            leased.append(Leased(lease_id, held))
        self._arena.hold(taken)
        return leased

    def release(self, lease_ids: Iterable[int]) -> None:
        """End leases. Unknown ids are ignored: telling twice is harmless."""
        freed: list[FrameName] = []
        for lease_id in lease_ids:
            stream = self._streams.pop(lease_id, None)
            if stream is None:
                continue
            name, size = stream.leases.pop(lease_id)
            self.leased_bytes -= size
            freed.append(name)
            if not stream.leases:
                stream.ended.set()
        self._arena.let_go(freed)

    def close(self, stream: LeaseStream) -> None:
        """End all that a stream holds."""
        self.release(list(stream.leases))

    def _has_room(self, size: int) -> bool:
        return len(self._streams) < STORE_LEASES_MAX and self.leased_bytes + size <= self._bytes_max

"""Slots of an arena that a lower tier reads into: `kvtier.ports.Landing`.

Nobody can find a slot before it is published, and what a tier has not verified in place is given
back. What must not live here: reads, which blocks come up.
"""

import itertools
from collections.abc import Sequence

from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import UnavailableError
from kvtier.ports import BlockOwner, LandingSlot, PutResult
from kvtier.tiers.arena.holdings import Reservation, Wanted
from kvtier.tiers.arena.tier import ArenaTier
from kvtier.types import ScopeId

_NOBODY = BlockOwner(0)


class ArenaLanding:
    """See the module. Past the planner of the store, which has planned what comes up."""

    def __init__(self, arena: ArenaTier) -> None:
        self._arena = arena
        self._tokens = itertools.count()
        self._taken: dict[int, Reservation] = {}

    def reserve(
        self, blocks: Sequence[tuple[FrameName, int, Retention]]
    ) -> list[LandingSlot | None]:
        """See `Landing.reserve`."""
        wanted = [Wanted(name, size, _NOBODY, retention) for name, size, retention in blocks]
        try:
            answers = ArenaTier.reserve_many(self._arena, wanted)
        except UnavailableError:
            return [None] * len(blocks)
        return [self._slot(one) if isinstance(one, Reservation) else None for one in answers]

    def publish(
        self, slots: Sequence[LandingSlot], arrived: Sequence[tuple[FrameHeader, ScopeId]]
    ) -> list[PutResult]:
        """See `Landing.publish`."""
        reservations = [self._taken.pop(slot.token) for slot in slots]
        for reservation, (header, scope) in zip(reservations, arrived, strict=True):
            one = reservation.wanted
            owner = BlockOwner(header.writer_id, scope)
            reservation.wanted = Wanted(one.name, one.payload_bytes, owner, one.retention)
        checksums = [header.payload_checksum for header, _ in arrived]
        wanted = [reservation.wanted for reservation in reservations]
        return ArenaTier.settle(self._arena, wanted, reservations, checksums, checksums)

    def give_back(self, slots: Sequence[LandingSlot]) -> None:
        """See `Landing.give_back`."""
        taken = [self._taken.pop(slot.token, None) for slot in slots]
        self._arena.abort([one for one in taken if one is not None])

    def _slot(self, reservation: Reservation) -> LandingSlot:
        token = next(self._tokens)
        self._taken[token] = reservation
        return LandingSlot(token, self._arena.writable(reservation))

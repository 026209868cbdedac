"""Puts in several calls, of clients of other nodes: memory first, payloads then, publishing last.

A reservation here is memory of the service's own, filled by its own handlers, so it may end by time
alone: nobody else can write into it. (A slot of shared memory may not: see the arena's server.)
What must not live here: gRPC, the store.
"""

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameName
from kvtier.core.planner import Reuse
from kvtier.limits import STORE_RESERVATIONS_MAX
from kvtier.ports import BlockOwner, Clock, PutRequest, PutResult, PutStatus, Refusal


@dataclass(frozen=True, slots=True)
class PutTerms:
    """What holds for all blocks of a put."""

    owner: BlockOwner
    retention: Retention
    reuse: Reuse


@dataclass(slots=True, eq=False)
class Staged:
    """Memory for one block that is coming. `is_filled` once all of it has come."""

    name: FrameName
    length: int
    terms: PutTerms
    principal: str
    expires_s: float
    buffer: bytearray
    is_filled: bool = False

    def request(self, checksum: int) -> PutRequest:
        return PutRequest(self.name, self.buffer, self.terms.owner, checksum, self.terms.retention)


class ReservationBook:
    """All reservations of clients elsewhere."""

    def __init__(self, bytes_max: int, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        # Ids cannot be guessed, and those of an earlier store mean nothing here.
        self._ids = itertools.count(secrets.randbits(48) << 16 | 1)
        self._staged: dict[int, Staged] = {}
        self.used_bytes = 0
        self.expired = 0

    def __len__(self) -> int:
        return len(self._staged)

    def reserve(
        self, name: FrameName, length: int, terms: PutTerms, principal: str, ttl_s: float
    ) -> tuple[int, PutResult]:
        """Keep memory for one block; id 0 and the reason where there is none."""
        full = len(self._staged) >= STORE_RESERVATIONS_MAX
        if full or self.used_bytes + length > self._bytes_max:
            return 0, PutResult(PutStatus.REFUSED, Refusal.FULL)
        reservation_id = next(self._ids)
        self._staged[reservation_id] = Staged(
            name, length, terms, principal, self._clock() + ttl_s, bytearray(length), length == 0
        )
        self.used_bytes += length
        return reservation_id, PutResult(PutStatus.STORED)

    def find(self, reservation_id: int, principal: str) -> Staged | None:
        """A reservation of this principal that has not ended."""
        staged = self._staged.get(reservation_id)
        return staged if staged is not None and staged.principal == principal else None

    def take(self, reservation_id: int, principal: str) -> Staged | None:
        """As `find`; it ends."""
        staged = self.find(reservation_id, principal)
        if staged is not None:
            self._end([reservation_id])
        return staged

    def abort(self, reservation_ids: Sequence[int], principal: str) -> None:
        """End reservations. Unknown ids are ignored."""
        self._end([i for i in reservation_ids if self.find(i, principal) is not None])

    def expire(self) -> None:
        """End those whose time is over."""
        now = self._clock()
        over = [i for i, staged in self._staged.items() if staged.expires_s <= now]
        self.expired += len(over)
        self._end(over)

    def _end(self, reservation_ids: Iterable[int]) -> None:
        for reservation_id in reservation_ids:
            self.used_bytes -= self._staged.pop(reservation_id).length

"""Work on its way to workers, as one router sees it: its own at once, that of others as heard.

A router's own reservations take effect here before the index has heard of them. When the index
tells everybody, this router included, they are recognised by router and key and not counted twice;
those that were given back meanwhile are recognised for as long as they could have lived. One whose
prefill is done is *kept* for a while: its work counts no more, its blocks do, until the worker's
events can have told of them; where no index tells of anything, what was kept is all there is.
What must not live here: locks, clocks, caps (the index sets those).
"""

import contextlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.prefix_index import PrefixIndex
from kvtier.core.workers import OwnReservation, WorkerName
from kvtier.errors import CallerError, LimitError
from kvtier.limits import (
    RESERVATIONS_PER_ROUTER_MAX,
)
from kvtier.types import HolderId

GIVEN_BACK_COUNT_MAX = 1 << 16
"""Keys remembered after they were given back; a forgotten one is counted until its TTL ends."""
KEPT_COUNT_MAX = 4096
"""Own reservations kept after their prefill; the oldest goes first."""
OWN_TICKETS_FROM = 1 << 63
"""An index numbers its tickets from 1 on; ours begin where it never arrives."""


class Reserved(NamedTuple):
    """What is on its way to one worker."""

    prefill_tokens: int = 0
    requests_count: int = 0

    def plus(self, prefill_tokens: int, requests_count: int) -> "Reserved":
        return Reserved(self.prefill_tokens + prefill_tokens, self.requests_count + requests_count)


NOTHING = Reserved()


@dataclass(frozen=True, slots=True)
class _Own:
    reservation: OwnReservation
    ticket: int
    expires_at: float


class OwnReservations:
    """This router's reservations; they outlive a change of index. O(log n) a call."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._held: dict[str, _Own] = {}
        self._kept: dict[str, _Own] = {}
        """Those that have prefilled, oldest first; not in `_held`."""
        self._totals: dict[WorkerName, Reserved] = {}
        self._given_back: dict[str, float] = {}
        """Keys that the index may still speak of, with the end of their TTL."""
        self._expiries: list[tuple[float, str, int]] = []
        self._next_ticket = OWN_TICKETS_FROM

    def __len__(self) -> int:
        return len(self._held)

    def is_own(self, router: str, key: str) -> bool:
        """Whether the index speaks of one of ours, of one just given back too."""
        known = key in self._held or key in self._kept or key in self._given_back
        return known and router == self._router

    def totals(self, worker: WorkerName) -> Reserved:
        return self._totals.get(worker, NOTHING)

    def add(self, wanted: OwnReservation, now: float) -> tuple[int, float]:
        """Note one; returns its ticket and when it expires. Replaces one of the same key."""
        self.end(wanted.key)
        if len(self._held) >= RESERVATIONS_PER_ROUTER_MAX:
            raise LimitError(f"reservations: more than {RESERVATIONS_PER_ROUTER_MAX} at once")
        own = _Own(wanted, self._next_ticket, now + wanted.ttl_ms / 1000)
        self._next_ticket += 1
        self._held[wanted.key] = own
        self._given_back.pop(wanted.key, None)
        self._count(wanted, 1)
        heapq.heappush(self._expiries, (own.expires_at, wanted.key, own.ticket))
        return own.ticket, own.expires_at

    def end(self, key: str) -> int | None:
        """Give one back; returns its ticket, None where there is none."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            return kept.ticket
        own = self._held.pop(key, None)
        if own is None:
            return None
        self._give_back(key, own)
        return own.ticket

    def prefilled(self, key: str, expires_at: float) -> list[int]:
        """Its work is done: keep its blocks until `expires_at`. Unknown keys are no error.

        Returns the tickets of what had to go for it.
        """
        own = self._held.pop(key, None)
        if own is None:
            return []
        self._give_back(key, own)
        self._kept[key] = replace(own, expires_at=expires_at)
        heapq.heappush(self._expiries, (expires_at, key, own.ticket))
        if len(self._kept) <= KEPT_COUNT_MAX:
            return []
        return [self._kept.pop(next(iter(self._kept))).ticket]

    def keep_until(self, expires_at: float) -> None:
        """All that is kept ends then, be it earlier or later than before. O(kept)."""
        for key, own in self._kept.items():
            self._kept[key] = replace(own, expires_at=expires_at)
            heapq.heappush(self._expiries, (expires_at, key, own.ticket))
        self._forget_expiries()

    def tick(self, now: float) -> list[int]:
        """End what has expired, and forget old keys; returns the tickets that ended."""
        ended = []
        while self._expiries and self._expiries[0][0] <= now:
            _, key, ticket = heapq.heappop(self._expiries)
            own = self._held.get(key) or self._kept.get(key)
            if own is not None and own.ticket == ticket and own.expires_at <= now:
                self.end(key)
                ended.append(ticket)
            until = self._given_back.get(key)
            if until is not None and until <= now:
                del self._given_back[key]
        return ended

    def live(self) -> Iterator[tuple[OwnReservation, int, float]]:
        """Each with its ticket and when it expires, kept ones first."""
        for own in (*self._kept.values(), *self._held.values()):
            yield own.reservation, own.ticket, own.expires_at

    def _give_back(self, key: str, own: _Own) -> None:
        self._given_back[key] = own.expires_at
        if len(self._given_back) > GIVEN_BACK_COUNT_MAX:
            del self._given_back[next(iter(self._given_back))]
        known = len(self._held) + len(self._kept) + len(self._given_back)
        if len(self._expiries) > 2 * known + 64:
            self._forget_expiries()
        self._count(own.reservation, -1)

    def _forget_expiries(self) -> None:
        """Drop those of reservations that nobody remembers."""
        self._expiries = [
            entry
            for entry in self._expiries
            if self._is_due(entry) or self._given_back.get(entry[1]) == entry[0]
        ]
        heapq.heapify(self._expiries)

    def _is_due(self, entry: tuple[float, str, int]) -> bool:
        own = self._held.get(entry[1]) or self._kept.get(entry[1])
        return own is not None and (own.expires_at, own.ticket) == (entry[0], entry[2])

    def _count(self, wanted: OwnReservation, sign: int) -> None:
        after = self.totals(wanted.worker).plus(sign * wanted.prefill_tokens, sign)
        if after.requests_count:
            self._totals[wanted.worker] = after
        else:
            self._totals.pop(wanted.worker, None)


@dataclass(frozen=True, slots=True)
class _Foreign:
    holder: HolderId
    prefill_tokens: int
    expires_at: float


class ForeignReservations:
    """What one index says of other routers' reservations; kept in that index's picture."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._held: dict[int, _Foreign] = {}
        self._totals: dict[HolderId, Reserved] = {}
        self.tokens: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        """Prefill tokens by holder number, up to the highest that was ever named; a longer array
        takes its place when it must grow. Others only read it."""
        self.requests: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        """How many requests those tokens are of."""
        self._expiries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def totals(self, holder: HolderId) -> Reserved:
        return self._totals.get(holder, NOTHING)

    def add(
        self,
        ticket: int,
        holder: HolderId,
        prefill_tokens: int,
        hashes: npt.NDArray[np.uint64],
        expires_at: float,
    ) -> None:
        """Note one, in the index as well. Replaces one of the same ticket.

        Blocks that the worker holds, or is expected to, and that the other router did not know of
        when it reserved, will not be computed again: a burst of siblings through several routers
        is one prefill and not one for each of them.
        """
        self.end(ticket)
        prefill_tokens -= self._doubled(holder, prefill_tokens, hashes)
        # A worker with too many tickets: the work counts all the same, its blocks are a hint.
        with contextlib.suppress(CallerError):
            self._index.predict(holder, hashes, ticket, expires_at)
        self._held[ticket] = _Foreign(holder, prefill_tokens, expires_at)
        self._totals[holder] = self.totals(holder).plus(prefill_tokens, 1)
        self._count(holder, prefill_tokens, 1)
        heapq.heappush(self._expiries, (expires_at, ticket))

    def end(self, ticket: int) -> None:
        """Idempotent."""
        held = self._held.pop(ticket, None)
        if held is None:
            return
        self._index.release(ticket)
        if len(self._expiries) > 2 * len(self._held) + 64:
            self._expiries = [entry for entry in self._expiries if entry[1] in self._held]
            heapq.heapify(self._expiries)
        self._count(held.holder, -held.prefill_tokens, -1)
        after = self.totals(held.holder).plus(-held.prefill_tokens, -1)
        if after.requests_count:
            self._totals[held.holder] = after
        else:
            self._totals.pop(held.holder, None)

    def _doubled(
        self, holder: HolderId, prefill_tokens: int, hashes: npt.NDArray[np.uint64]
    ) -> int:
        """Tokens of a reservation that somebody else's work computes as well. O(blocks)."""
        if prefill_tokens == 0 or len(hashes) == 0:
            return 0
        found = self._index.match(hashes)
        workers = found.workers
        row = int(np.searchsorted(workers, holder))
        if row >= len(workers) or workers[row] != holder:
            return 0
        start, end = found.run_offsets[row : row + 2].tolist()
        held_tokens, blocks_count = int(found.tokens[row]), int(found.run_blocks[start:end].sum())
        block_tokens = held_tokens // max(blocks_count, 1)
        known_tokens = max(0, len(hashes) * block_tokens - prefill_tokens)
        return min(prefill_tokens, max(0, held_tokens - known_tokens))

    def _count(self, holder: HolderId, tokens_count: int, requests_count: int) -> None:
        if holder >= len(self.tokens):
            length = max(2 * len(self.tokens), holder + 1)
            self.tokens = np.resize(np.append(self.tokens, np.zeros(length, np.int64)), length)
            self.requests = np.resize(np.append(self.requests, np.zeros(length, np.int64)), length)
        self.tokens[holder] += tokens_count
        self.requests[holder] += requests_count

    def holder_left(self, holder: HolderId) -> None:
        """All that was on its way to a holder is over. O(reservations)."""
        for ticket in [ticket for ticket, held in self._held.items() if held.holder == holder]:
            self.end(ticket)

    def tick(self, now: float) -> None:
        """End what has expired."""
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, ticket = heapq.heappop(self._expiries)
            held = self._held.get(ticket)
            if held is not None and held.expires_at == expires_at:
                self.end(ticket)

"""Work that routers have sent to workers: reservations, with the blocks they will leave there.

Holds who reserved what, by ticket, and the index's layer of predicted blocks. Called from one
thread; `now` is monotonic seconds.

What must not live here: what holders say of themselves (state.py), routers' messages (service.py).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from kvtier.core.fleet import Fleet
from kvtier.core.prefix_index import PrefixIndex
from kvtier.core.reservations import (
    Reservation,
    ReservationConfig,
    Reservations,
    ReserveVerdict,
    RouterLife,
    WorkerTotals,
)
from kvtier.errors import CallerError
from kvtier.types import HolderId, HolderKind


class ReservationChanges(Protocol):
    """Who is told of reservations. Called synchronously, after the change."""

    def reserved(self, ticket: int, reservation: Reservation) -> None: ...
    def reservation_over(self, ticket: int, reservation: Reservation) -> None: ...


class RouterWork:
    """What is on its way to each worker; mutated by routers' messages and by `tick`."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        config: ReservationConfig,
        changes: ReservationChanges,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._changes = changes
        self._reservations = Reservations(config)
        self._routers: Counter[RouterLife] = Counter()
        """Open streams of each life of a router."""
        self._tickets: dict[tuple[RouterLife, str], int] = {}
        self._reserved: dict[HolderId, dict[int, tuple[Reservation, float]]] = {}
        """Per worker: ticket -> (reservation, when it expires)."""
        self._next_ticket = 1

    def reserve(self, wanted: Reservation, now: float) -> ReserveVerdict:
        """Note work that a router sent to a worker, with the blocks it will leave there."""
        if self._fleet.record(wanted.worker).key.kind is not HolderKind.WORKER:
            raise CallerError(f"holder {wanted.worker} is not a worker")
        self.tick(now)
        outcome = self._reservations.reserve(wanted, now)
        self._end(outcome.ended)
        if outcome.verdict is ReserveVerdict.GRANTED:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._tickets[wanted.router, wanted.key] = ticket
            expires_at = now + wanted.ttl_ms / 1000
            self._reserved.setdefault(wanted.worker, {})[ticket] = (wanted, expires_at)
            self._index.predict(wanted.worker, wanted.blocks, ticket, expires_at)
            self._changes.reserved(ticket, wanted)
        return outcome.verdict

    def release(self, router: RouterLife, key: str) -> bool:
        """Give one reservation back; False where there was none."""
        ended = self._reservations.release(router, key)
        if ended is None:
            return False
        self._end((ended,))
        return True

    def router_came(self, router: RouterLife) -> None:
        """A router's stream begins; there may be two while it reconnects."""
        self._routers[router] += 1

    def router_gone(self, router: RouterLife) -> None:
        """A router's stream ended: all its reservations end with the last one."""
        self._routers[router] -= 1
        if not self._routers[router]:
            del self._routers[router]
            self._end(self._reservations.router_gone(router))

    def worker_gone(self, worker: HolderId) -> None:
        """A worker is forgotten, and all that was on its way to it."""
        self._end(self._reservations.worker_gone(worker))

    def tick(self, now: float) -> None:
        """End reservations that expired."""
        self._end(self._reservations.tick(now))

    def next_deadline(self) -> float | None:
        """Tick no later than this; None while nothing is reserved."""
        return self._reservations.next_deadline()

    def reserved(self, worker: HolderId) -> WorkerTotals:
        return self._reservations.totals(worker)

    def reservations(self, worker: HolderId) -> Iterator[tuple[int, Reservation, float]]:
        """(ticket, reservation, when it expires) of everything on its way to a worker."""
        for ticket, (reservation, expires_at) in self._reserved.get(worker, {}).items():
            yield ticket, reservation, expires_at

    def _end(self, ended: tuple[Reservation, ...]) -> None:
        for reservation in ended:
            ticket = self._tickets.pop((reservation.router, reservation.key))
            of_worker = self._reserved[reservation.worker]
            del of_worker[ticket]
            if not of_worker:
                del self._reserved[reservation.worker]
            self._index.release(ticket)
            self._changes.reservation_over(ticket, reservation)

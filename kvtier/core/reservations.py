"""Reservations: work that routers have sent to workers and that no event shows yet.

In-flight prefill tokens and predicted blocks, seen by all routers, so that many routers do not
herd onto one worker and a burst of siblings lands together. They are hints with a short life: each
has a TTL, dies with its router's stream or epoch, and counts against caps per router, per worker
and in all. What must not live here: real holdings, the predicted layer itself (`prefix_index` keeps
the blocks, with the same expiry), choice of a worker (`scoring`).

If the process stands still, everything expires at once: for a hint of seconds that is right.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier import limits
from kvtier.core.checks import require_integer, require_name
from kvtier.core.event_messages import check_epoch
from kvtier.errors import CallerError, LimitError
from kvtier.types import Epoch, HolderId, PrefixHash


@dataclass(frozen=True, slots=True)
class RouterLife:
    """One life of one router."""

    router_id: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a router has sent to a worker. `key` makes a repeated call harmless."""

    router: RouterLife
    key: str
    worker: HolderId
    prefill_tokens: int
    ttl_ms: int
    blocks: tuple[PrefixHash, ...] = ()
    """Prefix hashes that the worker will hold once it has prefilled."""

    def __post_init__(self) -> None:
        require_name("router_id", self.router.router_id)
        check_epoch(self.router.epoch)
        require_name("key", self.key)
        require_integer("worker", self.worker, 0, limits.HOLDERS_COUNT_MAX - 1)
        require_integer("prefill_tokens", self.prefill_tokens, 0, limits.PROMPT_TOKENS_MAX)
        require_integer("ttl_ms", self.ttl_ms, 1, limits.RESERVATION_TTL_MS_MAX)
        if len(self.blocks) > limits.BATCH_BLOCKS_MAX:
            raise LimitError(f"blocks: want at most {limits.BATCH_BLOCKS_MAX}")


class ReserveVerdict(StrEnum):
    GRANTED = "granted"
    REPEATED = "repeated"
    """The same key with the same content: nothing changed, the old TTL runs on."""
    CONFLICT = "conflict"
    """The same key with another content: refused."""
    ROUTER_FULL = "router_full"
    WORKER_FULL = "worker_full"
    ROUTERS_FULL = "routers_full"
    """As many routers, or blocks of all routers, as there may be."""
    FENCED = "fenced"
    """This router has been seen with a later epoch."""


@dataclass(frozen=True, slots=True)
class ReserveOutcome:
    verdict: ReserveVerdict
    ended: tuple[Reservation, ...] = ()
    """Reservations of the router's life before, which a new epoch ended."""


@dataclass(frozen=True, slots=True)
class WorkerTotals:
    """What is on its way to one worker."""

    reservations_count: int = 0
    prefill_tokens: int = 0
    blocks_count: int = 0


@dataclass(frozen=True, slots=True)
class ReservationConfig:
    """Caps; the ceilings are those of `limits`."""

    per_router_max: int = limits.RESERVATIONS_PER_ROUTER_MAX
    per_worker_max: int = limits.RESERVATIONS_PER_WORKER_MAX
    blocks_per_router_max: int = limits.RESERVED_BLOCKS_PER_ROUTER_MAX
    blocks_max: int = limits.RESERVED_BLOCKS_MAX

    def __post_init__(self) -> None:
        if not 1 <= self.per_router_max <= limits.RESERVATIONS_PER_ROUTER_MAX:
            raise CallerError(f"per_router_max: got {self.per_router_max}")
        if not 1 <= self.per_worker_max <= limits.RESERVATIONS_PER_WORKER_MAX:
            raise CallerError(f"per_worker_max: got {self.per_worker_max}")
        if not 0 <= self.blocks_per_router_max <= limits.RESERVED_BLOCKS_PER_ROUTER_MAX:
            raise CallerError(f"blocks_per_router_max: got {self.blocks_per_router_max}")
        if not 0 <= self.blocks_max <= limits.RESERVED_BLOCKS_MAX:
            raise CallerError(f"blocks_max: got {self.blocks_max}")


@dataclass(slots=True)
class _Router:
    epoch: Epoch
    held: dict[str, Reservation] = field(default_factory=dict)
    blocks_count: int = 0
    dead: OrderedDict[Epoch, None] = field(default_factory=OrderedDict)


_NONE = WorkerTotals()


class Reservations:
    """All reservations of an index. O(log n) to reserve, O(1) to release and to read totals."""

    def __init__(self, config: ReservationConfig | None = None) -> None:
        self._config = config or ReservationConfig()
        self._routers: OrderedDict[str, _Router] = OrderedDict()
        self._totals: dict[HolderId, WorkerTotals] = {}
        self._expiries: list[tuple[float, int]] = []
        self._by_ticket: dict[int, Reservation] = {}
        self._tickets: dict[tuple[str, str], int] = {}
        self._next_ticket = 0
        self._blocks_count = 0

    def __len__(self) -> int:
        return len(self._by_ticket)

    def totals(self, worker: HolderId) -> WorkerTotals:
        """What is on its way to a worker. O(1)."""
        return self._totals.get(worker, _NONE)

    def reserve(self, wanted: Reservation, now: float) -> ReserveOutcome:
        """Note work that was sent to a worker. Call `tick` first if `next_deadline` has passed."""
        router = self._routers.get(wanted.router.router_id)
        if router is None:
            if len(self._routers) >= limits.ROUTERS_COUNT_MAX and not self._drop_idle_router():
                return ReserveOutcome(ReserveVerdict.ROUTERS_FULL)
            router = self._routers[wanted.router.router_id] = _Router(wanted.router.epoch)
        if wanted.router.epoch in router.dead:
            return ReserveOutcome(ReserveVerdict.FENCED)
        ended: tuple[Reservation, ...] = ()
        if router.epoch != wanted.router.epoch:
            ended = self._end_life(router)
            router.epoch = wanted.router.epoch
        return ReserveOutcome(self._admit(router, wanted, now), ended)

    def release(self, router: RouterLife, key: str) -> Reservation | None:
        """End one reservation; None if it is over already, or another life's. Idempotent."""
        known = self._routers.get(router.router_id)
        if known is None or known.epoch != router.epoch or key not in known.held:
            return None
        return self._end(known.held[key])

    def router_gone(self, router: RouterLife) -> tuple[Reservation, ...]:
        """The router's stream is dead: all that this life reserved ends.

        The same epoch may come back (a reconnect); it starts with nothing.
        """
        known = self._routers.get(router.router_id)
        if known is None or known.epoch != router.epoch:
            return ()
        return tuple(self._end(held) for held in tuple(known.held.values()))

    def worker_gone(self, worker: HolderId) -> tuple[Reservation, ...]:
        """A worker was forgotten: nothing is on its way to it any more. O(all reservations)."""
        if worker not in self._totals:
            return ()
        affected = [held for held in self._by_ticket.values() if held.worker == worker]
        return tuple(self._end(held) for held in affected)

    def tick(self, now: float) -> tuple[Reservation, ...]:
        """End what has expired, oldest first."""
        ended: list[Reservation] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, ticket = heapq.heappop(self._expiries)
            held = self._by_ticket.get(ticket)
            if held is not None:
                ended.append(self._end(held))
        return tuple(ended)

    def next_deadline(self) -> float | None:
        """When the next one expires, or earlier; None if there is none."""
        return self._expiries[0][0] if self._expiries else None

    def _admit(self, router: _Router, wanted: Reservation, now: float) -> ReserveVerdict:
        known = router.held.get(wanted.key)
        if known is not None:
            return ReserveVerdict.REPEATED if known == wanted else ReserveVerdict.CONFLICT
        if len(router.held) >= self._config.per_router_max:
            return ReserveVerdict.ROUTER_FULL
        if router.blocks_count + len(wanted.blocks) > self._config.blocks_per_router_max:
            return ReserveVerdict.ROUTER_FULL
        if self._blocks_count + len(wanted.blocks) > self._config.blocks_max:
            return ReserveVerdict.ROUTERS_FULL
        totals = self.totals(wanted.worker)
        if totals.reservations_count >= self._config.per_worker_max:
            return ReserveVerdict.WORKER_FULL
        self._totals[wanted.worker] = WorkerTotals(
            totals.reservations_count + 1,
            totals.prefill_tokens + wanted.prefill_tokens,
            totals.blocks_count + len(wanted.blocks),
        )
        router.held[wanted.key] = wanted
        router.blocks_count += len(wanted.blocks)
        self._blocks_count += len(wanted.blocks)
        self._routers.move_to_end(wanted.router.router_id)
        ticket = self._next_ticket
        self._next_ticket += 1
        self._by_ticket[ticket] = wanted
        self._tickets[wanted.router.router_id, wanted.key] = ticket
        heapq.heappush(self._expiries, (now + wanted.ttl_ms / 1000, ticket))
        return ReserveVerdict.GRANTED

    def _end(self, held: Reservation) -> Reservation:
        router = self._routers[held.router.router_id]
        del router.held[held.key]
        router.blocks_count -= len(held.blocks)
        self._blocks_count -= len(held.blocks)
        del self._by_ticket[self._tickets.pop((held.router.router_id, held.key))]
        totals = self._totals[held.worker]
        if totals.reservations_count == 1:
            del self._totals[held.worker]
        else:
            self._totals[held.worker] = WorkerTotals(
                totals.reservations_count - 1,
                totals.prefill_tokens - held.prefill_tokens,
                totals.blocks_count - len(held.blocks),
            )
        if len(self._expiries) > 2 * len(self._by_ticket) + 64:
            # Released ones leave their expiry behind; do not let those pile up.
            self._expiries = [entry for entry in self._expiries if entry[1] in self._by_ticket]
            heapq.heapify(self._expiries)
        return held

    def _end_life(self, router: _Router) -> tuple[Reservation, ...]:
        ended = tuple(self._end(held) for held in tuple(router.held.values()))
        router.dead[router.epoch] = None
        while len(router.dead) > limits.DEAD_EPOCHS_COUNT_MAX:
            router.dead.popitem(last=False)
        return ended

    def _drop_idle_router(self) -> bool:
        """Forget the router that reserved least recently and holds nothing."""
        for router_id, router in self._routers.items():
            if not router.held:
                del self._routers[router_id]
                return True
        return False

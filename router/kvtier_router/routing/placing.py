"""Requests on their way: reserved when they are placed, let go as their answers come.

A placement counts twice in the roster: its prefill tokens until the first token, its KV tokens and
itself until the end. The same is reserved in the embedded index at once (so that the next sibling
is drawn to it) and told to other routers. What must not live here: the choice, HTTP.
"""

import heapq
import itertools
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core.health import Outcome, Permit
from kvtier.core.identity import Pool
from kvtier.core.workers import OwnReservation
from kvtier.errors import LimitError
from kvtier.limits import BATCH_BLOCKS_MAX, PROMPT_TOKENS_MAX, RESERVATION_TTL_MS_MAX
from kvtier.types import Trust
from kvtier_router.routing.config import RoutingConfig
from kvtier_router.routing.fleet import FleetView
from kvtier_router.routing.learning import (
    Expectation,
    FirstToken,
    Promise,
    SpeedBooks,
    TokenAudits,
)
from kvtier_router.routing.pools import Pools
from kvtier_router.routing.ports import IndexSource
from kvtier_router.routing.roster import Roster
from kvtier_router.routing.standing import Standing
from kvtier_router.routing.values import (
    Clock,
    Delivery,
    FailureKind,
    ReservationSink,
    Usage,
)

RESERVED_S_MIN = 5.0
"""A reservation lives at least so long, whatever was predicted."""

_AGAINST_WORKER = frozenset(
    {FailureKind.CONNECT, FailureKind.TIMEOUT, FailureKind.SERVER_ERROR, FailureKind.BROKEN}
)


class _Stage(IntEnum):
    WAITING = 0
    DECODING = 1
    ENDED = 2


class _Due(IntEnum):
    """What is due when time has passed."""

    PREFILLED = 0
    """An answer in one piece is presumed to have prefilled, or a reservation has expired."""
    RELEASE = 1
    """Other routers may be told."""
    EXPIRED = 2


@dataclass(slots=True, eq=False)
class Intent:
    """What a decision wants to be placed, once a request: not frozen, which
    would cost a call a field."""

    expected: Expectation
    pool: Pool
    hashes: npt.NDArray[np.uint64]
    permit: Permit
    prompt_tokens: int
    kv_tokens: int
    exact_tokens: int | None
    """Own count, where it must equal the worker's."""
    promised_tokens: int
    ttl_s: float
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Desk:
    """Whom a placement tells what came of it."""

    roster: Roster
    fleet: FleetView
    standing: Standing
    books: SpeedBooks
    audits: TokenAudits
    config: RoutingConfig
    clock: Clock
    pools: Pools
    source: IndexSource | None
    sink: ReservationSink | None


class Placed:
    """A Placement."""

    __slots__ = ("_desk", "_intent", "_office", "_permit", "_stage", "key")

    def __init__(self, office: "Placements", desk: Desk, key: str, intent: Intent) -> None:
        self.key = key
        self._office = office
        self._desk = desk
        self._intent = intent
        self._permit: Permit | None = intent.permit
        self._stage = _Stage.WAITING

    @property
    def slot(self) -> int:
        return self._intent.expected.member.slot

    @property
    def is_waiting(self) -> bool:
        return self._stage is _Stage.WAITING

    # ---- Placement

    def first_token(self, ttft_s: float, cached_tokens: int | None = None) -> None:
        if self._stage is not _Stage.WAITING:
            return
        now = self._desk.clock()
        self.prefilled(now)
        desk = self._desk
        expected, others_tokens = self._intent.expected, 0.0
        holder = expected.member.holder
        if desk.source is not None and holder is not None:
            foreign = desk.source.look().foreign_tokens
            others_tokens = float(foreign[holder]) if holder < len(foreign) else 0.0
        seen = FirstToken(ttft_s, cached_tokens, others_tokens)
        desk.books.first_token(expected, seen, now)
        if desk.standing.is_probing(self.slot, now):
            self._report(Outcome.SUCCESS, now)

    def finished(self, usage: Usage) -> None:
        if self._stage is _Stage.ENDED:
            return
        desk, intent, now = self._desk, self._intent, self._desk.clock()
        if intent.delivery is Delivery.WHOLE:
            desk.books.whole_answer(intent.expected, usage, now)
        self._report(Outcome.SUCCESS, now)
        desk.standing.judge(self.slot, Outcome.SUCCESS, now)
        desk.audits.see(self._promise(), usage, now)
        self.end(now)

    def failed(self, kind: FailureKind, retry_after_s: float | None = None) -> None:
        if self._stage is _Stage.ENDED:
            return
        desk, now = self._desk, self._desk.clock()
        outcome = Outcome.FAILURE if kind in _AGAINST_WORKER else Outcome.CANCELLED
        if self._permit is None and outcome is Outcome.FAILURE:
            self._permit = desk.standing.permit(self.slot, now)
        self._report(outcome, now)
        desk.standing.judge(self.slot, outcome, now)
        if kind is FailureKind.OVERLOADED:
            wanted_s = desk.config.overload_s if retry_after_s is None else retry_after_s
            desk.standing.rest(self.slot, min(max(wanted_s, 0.0), 60.0), now)
        if self._stage is _Stage.WAITING and desk.source is not None:
            desk.source.release_local(self.key)  # it will not hold what was predicted
        self.end(now)

    # ---- parts

    def prefilled(self, now: float) -> None:
        """Its prefill is done, or is presumed to be: other work no longer waits for it."""
        if self._stage is not _Stage.WAITING:
            return
        self._stage = _Stage.DECODING
        desk, slot = self._desk, self.slot
        desk.roster.own_tokens[slot] -= self._intent.expected.tokens
        desk.roster.own_decoding[slot] += 1
        self._office.let_go(self, now)

    def end(self, now: float) -> None:
        """Nothing of it counts any more. Idempotent."""
        if self._stage is _Stage.ENDED:
            return
        self.prefilled(now)
        self._stage = _Stage.ENDED
        desk, slot = self._desk, self.slot
        desk.roster.own_requests[slot] -= 1
        desk.roster.own_decoding[slot] -= 1
        desk.roster.own_kv_tokens[slot] -= self._intent.kv_tokens
        self._office.ended(self)
        desk.fleet.forget(self._intent.expected.member)

    def _promise(self) -> Promise:
        intent, member = self._intent, self._intent.expected.member
        return Promise(
            intent.pool,
            intent.exact_tokens,
            intent.promised_tokens,
            lambda: self._desk.pools.is_full(member),
        )

    def _report(self, outcome: Outcome, now: float) -> None:
        if self._permit is not None:
            self._desk.standing.report(self.slot, self._permit, outcome, now)
            self._permit = None


class Placements:
    """All placements of one life of one router."""

    def __init__(self, desk: Desk, life: str) -> None:
        self._desk = desk
        self._life = life
        self._numbers = itertools.count(1)
        self._placed: dict[str, Placed] = {}
        self._due: list[tuple[float, int, _Due, Placed]] = []
        self._was_fresh = True
        self.unreserved_count = 0
        """Placements that no reservation was left for."""

    def __len__(self) -> int:
        return len(self._placed)

    def place(self, intent: Intent, now: float) -> Placed:
        """Count and reserve one request."""
        desk, expected = self._desk, intent.expected
        placed = Placed(self, desk, f"{self._life}-{next(self._numbers)}", intent)
        self._placed[placed.key] = placed
        roster, slot = desk.roster, expected.member.slot
        roster.own_tokens[slot] += expected.tokens
        roster.own_requests[slot] += 1
        roster.own_kv_tokens[slot] += intent.kv_tokens
        roster.recent_tokens[slot] += expected.tokens
        roster.see_tokens(expected.tokens)
        self._reserve(placed.key, intent)
        self._later(now + intent.ttl_s, _Due.PREFILLED, placed)
        return placed

    def let_go(self, placed: Placed, now: float) -> None:
        """The prefill of one is done: its blocks stay predicted until events can have told."""
        desk = self._desk
        if desk.source is not None:
            kept_s = desk.config.kept_s if self._was_fresh else desk.config.kept_stale_s
            desk.source.prefilled_local(placed.key, kept_s)
        if desk.sink is not None:
            self._later(now + desk.config.release_s, _Due.RELEASE, placed)
        self._later(now + desk.config.placement_s_max, _Due.EXPIRED, placed)

    def ended(self, placed: Placed) -> None:
        """One counts no more."""
        self._placed.pop(placed.key, None)
        if len(self._due) > 4 * len(self._placed) + 4096:
            self._due = [entry for entry in self._due if self._is_needed(entry)]
            heapq.heapify(self._due)

    def tick(self, now: float) -> None:
        """Do what has become due. O(log n) each."""
        while self._due and self._due[0][0] <= now:
            _, _, what, placed = heapq.heappop(self._due)
            if what is _Due.PREFILLED:
                placed.prefilled(now)
            elif what is _Due.EXPIRED:
                placed.end(now)
            elif self._desk.sink is not None:
                self._desk.sink.release(placed.key)

    def watch_index(self, trust: Trust) -> None:
        """Keep what was placed for long when the index falls silent: nobody else tells of it. Once
        an index is followed again, what it says replaces that. O(kept) on a change, else O(1)."""
        is_fresh = trust is Trust.EXACT
        if is_fresh == self._was_fresh or self._desk.source is None:
            return
        self._was_fresh = is_fresh
        config = self._desk.config
        self._desk.source.keep_local(config.kept_s if is_fresh else config.kept_stale_s)

    # ---- parts

    def _reserve(self, key: str, intent: Intent) -> None:
        desk, expected = self._desk, intent.expected
        if desk.source is None and desk.sink is None:
            return
        wanted = OwnReservation(
            key=key,
            worker=expected.member.name,
            prefill_tokens=min(expected.tokens, PROMPT_TOKENS_MAX),
            ttl_ms=min(max(int(intent.ttl_s * 1000), 1), RESERVATION_TTL_MS_MAX),
            hashes=intent.hashes[:BATCH_BLOCKS_MAX],
        )
        if desk.source is not None:
            try:
                desk.source.reserve_local(wanted)
            except LimitError:
                self.unreserved_count += 1
        if desk.sink is not None:
            desk.sink.tell(wanted)

    def _later(self, when: float, what: _Due, placed: Placed) -> None:
        heapq.heappush(self._due, (when, next(self._numbers), what, placed))

    def _is_needed(self, entry: tuple[float, int, _Due, Placed]) -> bool:
        what, placed = entry[2], entry[3]
        return what is _Due.RELEASE or placed.key in self._placed

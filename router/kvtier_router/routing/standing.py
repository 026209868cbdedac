"""Which workers may be asked now: breakers, ejections, pauses after an overload, slow start.

In good health nothing of this costs a decision anything: only workers that are in some trouble are
looked at. What must not live here: load, drains and leases (roster.py).
"""

import numpy as np

from kvtier.core.health import Breaker, BreakerState, Outcome, Outliers, Permit, ramp
from kvtier.types import HolderId
from kvtier_router.routing.config import RoutingConfig
from kvtier_router.routing.fleet import Table
from kvtier_router.routing.roster import Bools, Member, Roster


class Standing:
    """The health of every member, by slot. A FleetListener."""

    def __init__(self, roster: Roster, config: RoutingConfig) -> None:
        self._roster = roster
        self._config = config
        self._breakers: dict[int, Breaker] = {}
        self._outliers = Outliers(config.outlier)
        self._unwell: set[int] = set()
        """Slots whose breaker may be other than closed."""
        self._busy_until: dict[int, float] = {}
        self._ramping: dict[int, float] = {}
        """Since when each goes through its slow start."""
        self._ejected: frozenset[HolderId] = frozenset()
        self.ejections_count = 0

    # ---- FleetListener

    def joined(self, member: Member, now: float, is_new: bool) -> None:
        self._breakers[member.slot] = Breaker(self._config.breaker)
        self._outliers.join(HolderId(member.slot), now)
        if is_new:
            self._start_slowly(member.slot, now)

    def left(self, member: Member) -> None:
        slot = member.slot
        self._breakers.pop(slot, None)
        self._outliers.leave(HolderId(slot))
        self._unwell.discard(slot)
        self._busy_until.pop(slot, None)
        self._ramping.pop(slot, None)
        self._ejected -= {HolderId(slot)}

    def reported(self, member: Member, tokens_per_s: float, now: float) -> None:
        """Speed is no matter of health."""

    # ---- calls and their outcomes

    def permit(self, slot: int, now: float) -> Permit | None:
        """Leave to send one request there; None: its breaker lets nothing more through."""
        breaker = self._breakers.get(slot)
        return None if breaker is None else breaker.acquire(now)

    def report(self, slot: int, permit: Permit, outcome: Outcome, now: float) -> None:
        """What came of a permitted request, once a permit."""
        breaker = self._breakers.get(slot)
        if breaker is None:
            return
        before = breaker.state(now)
        breaker.report(permit, outcome, 0.0, now)
        after = breaker.state(now)
        if after is not BreakerState.CLOSED:
            self._unwell.add(slot)
        elif before is not BreakerState.CLOSED:
            self._start_slowly(slot, now)

    def judge(self, slot: int, outcome: Outcome, now: float) -> None:
        """Count a finished or failed request among those of the fleet."""
        if self._outliers.report(HolderId(slot), outcome, now):
            self.ejections_count += 1
            self._ejected = self._outliers.ejected(now)

    def is_probing(self, slot: int, now: float) -> bool:
        """Whether one good answer tells more than it usually does."""
        breaker = self._breakers.get(slot)
        return breaker is not None and breaker.state(now) is BreakerState.HALF_OPEN

    def rest(self, slot: int, seconds: float, now: float) -> None:
        """It said that it is overloaded."""
        self._busy_until[slot] = max(self._busy_until.get(slot, 0.0), now + seconds)

    # ---- for decisions

    def update(self, now: float) -> bool:
        """Let time pass; whether anybody is in trouble. O(workers in trouble)."""
        if not (self._ramping or self._ejected or self._busy_until or self._unwell):
            return False
        for slot in [slot for slot, since in self._ramping.items()]:
            part = ramp(max(0.0, now - self._ramping[slot]), self._config.ramp_s)
            self._roster.ramp[slot] = part
            if part >= 1.0:
                del self._ramping[slot]
        if self._ejected:
            ejected = self._outliers.ejected(now)
            for worker in self._ejected - ejected:
                self._start_slowly(worker, now)
            self._ejected = ejected
        for slot in [slot for slot, until in self._busy_until.items() if until <= now]:
            del self._busy_until[slot]
        for slot in [s for s in self._unwell if self._is_closed(s, now)]:
            self._unwell.discard(slot)
        return bool(self._unwell or self._ejected or self._busy_until)

    @property
    def is_anybody_ramping(self) -> bool:
        """Whether somebody takes part in a part of the decisions only."""
        return bool(self._ramping)

    def let_through(self, table: Table, mask: Bools, now: float) -> Bools:
        """Of `mask`, the rows that health lets through; ejections and pauses are waived where
        nobody else, or too few, would be left. A new array."""
        slots = table.slots
        if self._unwell:
            shut = [s for s in self._unwell if self._state(s, now) is BreakerState.OPEN]
            mask = mask & ~np.isin(slots, shut)
        if self._ejected:
            out = [worker for worker, ok in zip(table.ids, mask.tolist(), strict=True) if not ok]
            kept = self._outliers.eligible(table.ids, frozenset(out), now)
            mask = mask & np.isin(slots, kept)
        if self._busy_until:
            rested = mask & ~np.isin(slots, list(self._busy_until))
            mask = rested if rested.any() else mask
        return mask

    def trouble(self, slot: int, now: float) -> str:
        """Why a worker is not asked: breaker, ejected, busy, or empty."""
        if slot in self._unwell and self._state(slot, now) is BreakerState.OPEN:
            return "breaker"
        if HolderId(slot) in self._ejected:
            return "ejected"
        return "busy" if slot in self._busy_until else ""

    def tripped_count(self) -> int:
        """How often breakers of present workers opened."""
        return sum(breaker.tripped_count for breaker in self._breakers.values())

    # ---- parts

    def _state(self, slot: int, now: float) -> BreakerState:
        breaker = self._breakers.get(slot)
        return BreakerState.CLOSED if breaker is None else breaker.state(now)

    def _is_closed(self, slot: int, now: float) -> bool:
        return self._state(slot, now) is BreakerState.CLOSED

    def _start_slowly(self, slot: int, now: float) -> None:
        self._ramping[slot] = now
        self._roster.ramp[slot] = ramp(0.0, self._config.ramp_s)

"""Pins: per-request tokens with priority and time to live, under a byte ceiling.

What must not live here: how a pinned block is kept from leaving (the ledger's holds).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.core.planner.values import BlockKey, PinId


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin and what it holds."""

    pin_id: PinId
    keys: tuple[BlockKey, ...]
    priority: int
    expires_at: float


class PinBook:
    """All live pins, by id and by end. Bounded by its caller (`limits.PINS_COUNT_MAX`)."""

    __slots__ = ("_drawn", "_ends", "_pins")

    def __init__(self) -> None:
        self._pins: dict[PinId, Pin] = {}
        self._ends: list[tuple[float, PinId]] = []
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, pin_id: object) -> bool:
        return pin_id in self._pins

    def draw_id(self) -> PinId:
        """A pin id that was never used."""
        self._drawn += 1
        return PinId(self._drawn)

    def add(
        self, pin_id: PinId, keys: tuple[BlockKey, ...], priority: int, expires_at: float
    ) -> None:
        """Remember a pin. O(log n)."""
        self._pins[pin_id] = Pin(pin_id, keys, priority, expires_at)
        heapq.heappush(self._ends, (expires_at, pin_id))
        if len(self._ends) > 2 * len(self._pins) + 64:
            self._ends = [(p.expires_at, p.pin_id) for p in self._pins.values()]
            heapq.heapify(self._ends)

    def remove(self, pin_id: PinId) -> Pin | None:
        """Forget a pin; None if it is gone already."""
        return self._pins.pop(pin_id, None)

    def expired(self, now: float) -> Iterator[PinId]:
        """The pins whose time is over; each is named once."""
        while self._ends and self._ends[0][0] <= now:
            _, pin_id = heapq.heappop(self._ends)
            if pin_id in self._pins:
                yield pin_id

    def weakest_below(self, priority: int) -> PinId | None:
        """The pin of lowest priority, ending soonest, if lower than `priority`. O(pins)."""
        weakest = min(self._pins.values(), key=lambda p: (p.priority, p.expires_at), default=None)
        return weakest.pin_id if weakest is not None and weakest.priority < priority else None

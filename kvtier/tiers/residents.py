"""Who is kept and who goes: an eviction policy, pins and the observer, as local tiers share them.

What must not live here: bytes, memory, which of them to write where.
"""

from collections.abc import Sequence

from kvtier.core.eviction import PinToken, Policy, Removal, Retention
from kvtier.core.eviction.policy import PinTable
from kvtier.core.frame import FrameName
from kvtier.ports import Clock, RemovalCause, TierObserver
from kvtier.types import Tier


class Residents:
    """The names that a tier holds, in order of eviction; tells the observer of every change."""

    def __init__(
        self, tier: Tier, policy: Policy[FrameName], observer: TierObserver | None, clock: Clock
    ) -> None:
        self._tier = tier
        self._policy = policy
        self._observer = observer
        self._clock = clock
        self._pins: PinTable[FrameName] = PinTable()
        self._policy_pins: dict[FrameName, PinToken] = {}

    @property
    def pinned_count(self) -> int:
        """Blocks that may not be evicted now."""
        return len(self._policy_pins)

    def store(self, names: Sequence[FrameName], retention: Sequence[Retention]) -> None:
        """Count the names, one chain, as held and used."""
        if not names:
            return
        self._policy.on_stored(names, self._clock(), retention)
        if self._observer is not None:
            self._observer.on_tier_stored(self._tier, names)

    def touch(self, names: Sequence[FrameName]) -> None:
        """Count one use of a chain; names that are not held are ignored."""
        self._policy.on_touched(names, self._clock())

    def remove(self, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """Count held names as gone, and their pins."""
        if not names:
            return
        if self._policy_pins:  # which has every name that is pinned
            for name in names:
                self._pins.forget(name)
                self._policy_pins.pop(name, None)
        evicted = cause is RemovalCause.EVICTED
        self._policy.on_removed(names, Removal.EVICTED if evicted else Removal.DROPPED)
        if self._observer is not None:
            self._observer.on_tier_removed(self._tier, names, cause)

    def coldest(self, count: int) -> list[FrameName]:
        """The names that would go next; none that is pinned."""
        return self._policy.victims(count, self._clock())

    def is_pinned(self, name: FrameName) -> bool:
        return name in self._policy_pins

    def pin(self, name: FrameName) -> PinToken:
        """Keep a held name from being evicted, until as many unpins."""
        if name not in self._policy_pins:
            self._policy_pins[name] = self._policy.pin(name)
        return self._pins.pin(name)

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """Undo one pin; harmless when the block is gone."""
        if self._pins.unpin(name, token):
            self._policy.unpin(name, self._policy_pins.pop(name))

"""Leases: who is alive, who is hidden, who is forgotten.

A holder whose lease runs out is *hidden* at once: nobody is sent to it. Its blocks stay for a
grace period, so that one that was only stalled returns without a snapshot and without a storm. Only
then is it *forgotten*. What must not live here: whether a returning holder's sequence is contiguous
(`events`), the index, health and load of a worker, clocks.

A stopped clock rule: the time between two calls never counts for more than `stall_s_max`. What
lies above it means that *this* process did not run (stopped, suspended, starved): heartbeats were
sent and wait unread, so all leases are extended by the surplus instead of hiding the whole fleet at
once. A caller that sleeps no longer than `next_deadline` says never comes near the rule.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvtier import limits
from kvtier.errors import CallerError, LimitError

Key = TypeVar("Key", bound=Hashable)
"""A holder, or a (holder, shard) where each shard has its own stream."""


class LeaseState(StrEnum):
    UNKNOWN = "unknown"
    LIVE = "live"
    HIDDEN = "hidden"


class Renewal(StrEnum):
    """What a renewal did."""

    JOINED = "joined"
    RENEWED = "renewed"
    RESUMED = "resumed"
    """It was hidden and is to be shown again."""


@dataclass(frozen=True, slots=True)
class Hide(Generic[Key]):
    """Stop matching this holder, keep its blocks."""

    key: Key


@dataclass(frozen=True, slots=True)
class Forget(Generic[Key]):
    """Drop this holder's blocks."""

    key: Key


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Durations in seconds; one lease length for all holders of an index."""

    lease_s: float = 3.0
    grace_s: float = 60.0
    """From hiding to forgetting."""
    stall_s_max: float = 1.0
    """Longest time between two calls that is believed. At most half of `lease_s`, so that a stop
    that is believed cannot end a lease that was half fresh before it."""

    def __post_init__(self) -> None:
        ceiling = limits.LEASE_MS_MAX / 1000
        if not 0 < self.lease_s <= ceiling:
            raise CallerError(f"lease_s: want 0 .. {ceiling}, got {self.lease_s}")
        if not 0 < self.stall_s_max <= self.lease_s / 2:
            raise CallerError(f"stall_s_max: want 0 .. {self.lease_s / 2}, got {self.stall_s_max}")
        if not 0 <= self.grace_s < float("inf"):
            raise CallerError(f"grace_s: want a finite duration, got {self.grace_s}")


class Leases(Generic[Key]):
    """The leases of an index. O(1) a call; `tick` also O(holders that change).

    All leases are equally long, so the order of renewal is the order of expiry. A `now` that runs
    backwards counts as no time at all.
    """

    def __init__(self, config: LeaseConfig | None = None) -> None:
        self._config = config or LeaseConfig()
        self._live: OrderedDict[Key, float] = OrderedDict()
        self._hidden: OrderedDict[Key, float] = OrderedDict()
        self._last_now: float | None = None
        self._not_counted_s = 0.0

    def __len__(self) -> int:
        """Holders that are live or hidden."""
        return len(self._live) + len(self._hidden)

    @property
    def not_counted_s(self) -> float:
        """How much time has been ignored because this process stood still."""
        return self._not_counted_s

    def state(self, key: Key) -> LeaseState:
        """Where a holder stands as of the last `tick`. Mutates nothing."""
        if key in self._live:
            return LeaseState.LIVE
        return LeaseState.HIDDEN if key in self._hidden else LeaseState.UNKNOWN

    def renew(self, key: Key, now: float) -> Renewal:
        """A holder gave a sign of life (one that its stream's acceptor did not fence).

        Raises LimitError for a new holder above `limits.HOLDERS_COUNT_MAX`.
        """
        counted = self._count(now)
        if key in self._live:
            self._live[key] = counted
            self._live.move_to_end(key)
            return Renewal.RENEWED
        if self._hidden.pop(key, None) is not None:
            self._live[key] = counted
            return Renewal.RESUMED
        if len(self) >= limits.HOLDERS_COUNT_MAX:
            raise LimitError(f"holders: more than {limits.HOLDERS_COUNT_MAX}")
        self._live[key] = counted
        return Renewal.JOINED

    def leave(self, key: Key) -> bool:
        """A holder said goodbye: no lease, no grace. Whether it was known."""
        was_hidden = self._hidden.pop(key, None) is not None
        return self._live.pop(key, None) is not None or was_hidden

    def tick(self, now: float) -> list[Hide[Key] | Forget[Key]]:
        """What time has brought, oldest first. Read what waits on the streams before ticking."""
        counted = self._count(now)
        news: list[Hide[Key] | Forget[Key]] = []
        while self._live:
            key, renewed = next(iter(self._live.items()))
            if not self._has_expired(renewed, counted):
                break
            del self._live[key]
            # The grace period starts at the expiry, not at the tick that noticed it.
            self._hidden[key] = renewed + self._config.lease_s
            news.append(Hide(key))
        while self._hidden:
            key, hidden = next(iter(self._hidden.items()))
            if counted - hidden < self._config.grace_s:
                break
            del self._hidden[key]
            news.append(Forget(key))
        return news

    def next_deadline(self) -> float | None:
        """Tick no later than this; None while there is nobody to watch.

        Never further away than half of `stall_s_max` from the last call.
        """
        if self._last_now is None or not len(self):
            return None
        candidates = [self._last_now + self._config.stall_s_max / 2]
        if self._live:
            renewed = next(iter(self._live.values()))
            candidates.append(renewed + self._config.lease_s + self._not_counted_s)
        if self._hidden:
            hidden = next(iter(self._hidden.values()))
            candidates.append(hidden + self._config.grace_s + self._not_counted_s)
        return min(candidates)

    def _has_expired(self, renewed: float, counted: float) -> bool:
        return counted - renewed >= self._config.lease_s

    def _count(self, now: float) -> float:
        """Believed time: `now` less all time in which this process did not run."""
        last = now if self._last_now is None else self._last_now
        self._not_counted_s += max(0.0, now - last - self._config.stall_s_max)
        self._last_now = max(now, last)
        return self._last_now - self._not_counted_s

"""Byte budgets over time and decayed touch counts: the two memories of admission.

What must not live here: what a tier does with the answer.
"""

from collections import OrderedDict
from math import inf

from kvtier.core.planner.values import BlockKey
from kvtier.errors import CallerError

DAY_S = 86_400.0


class ByteBudget:
    """Token bucket of bytes: over any time t at most burst + t * bytes_per_day / day are taken.

    Starts full; the burst is at most a day's bytes. A rate of inf is no budget. O(1).
    """

    __slots__ = ("_burst_bytes", "_bytes_per_s", "_left", "_then")

    def __init__(self, bytes_per_day: float, burst_bytes: float, now: float) -> None:
        if not (bytes_per_day > 0 and burst_bytes > 0):
            raise CallerError("a byte budget needs a positive rate and burst")
        self._bytes_per_s = bytes_per_day / DAY_S
        self._burst_bytes = self._left = min(burst_bytes, bytes_per_day)
        self._then = now

    def can_take(self, size_bytes: int, now: float) -> bool:
        """Whether so much may be written now. Refills, takes nothing."""
        if self._bytes_per_s == inf:
            return True
        # A clock that stands or steps back earns nothing.
        if now > self._then:
            self._left = min(self._burst_bytes, self._left + (now - self._then) * self._bytes_per_s)
            self._then = now
        return size_bytes <= self._left

    def take(self, size_bytes: int) -> None:
        """Use bytes that `can_take` granted."""
        if self._bytes_per_s != inf:
            self._left -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken and surely not written."""
        self._left = min(self._burst_bytes, self._left + size_bytes)


class TouchCounts:
    """How often keys were touched lately, also after they left every tier. Bounded, O(1).

    A count halves for every half-life without a touch; of too many keys the one touched longest
    ago is forgotten. Exact rather than a sketch: at 2^16 keys it costs some 15 MB, and a wrong
    admission costs a disk write.
    """

    __slots__ = ("_counts", "_half_life_s", "_keys_max")

    def __init__(self, keys_max: int, half_life_s: float) -> None:
        if keys_max < 1 or not half_life_s > 0:
            raise CallerError("touch counts need room for a key and a positive half-life")
        self._counts: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()
        self._keys_max = keys_max
        self._half_life_s = half_life_s

    def __len__(self) -> int:
        return len(self._counts)

    def touch(self, key: BlockKey, now: float) -> int:
        """Count a touch and return the count with it."""
        count = self.count(key, now) + 1
        self._counts[key] = (count, now)
        self._counts.move_to_end(key)
        if len(self._counts) > self._keys_max:
            self._counts.popitem(last=False)
        return count

    def count(self, key: BlockKey, now: float) -> int:
        """The decayed count; 0 for a key never seen or forgotten. Mutates nothing."""
        count, then = self._counts.get(key, (0, now))
        halvings = int(max(0.0, now - then) / self._half_life_s) if count else 0
        return count >> min(halvings, 64)

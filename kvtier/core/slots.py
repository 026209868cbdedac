"""Allocator of the fixed-size slots of an arena or a block pool: free, used, quarantined.

A quarantined slot is one whose writer may still be alive though its reservation is over: it never
returns by `free`, only by `release_quarantine`, after proof that nobody writes any more. What must
not live here: addresses, generations, leases, clocks.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier import _native, limits
from kvtier.errors import CallerError, LimitError
from kvtier.types import Integers


class SlotAllocator:
    """Hands out slots 0 .. slots_count - 1; every call changes all it names or nothing.

    Slots freed last come first (their memory may still be in a cache); those never used follow in
    ascending order, so that an arena is touched only as far as it is needed. O(1) a slot; 1 byte a
    slot and 4 a freed one.
    """

    __slots__ = ("_native",)

    def __init__(self, slots_count: int) -> None:
        """Raises CallerError for what is no count, LimitError beyond limits.SLOTS_COUNT_MAX."""
        if isinstance(slots_count, int) and slots_count > limits.SLOTS_COUNT_MAX:
            raise LimitError(f"slots_count: {slots_count} exceeds {limits.SLOTS_COUNT_MAX}")
        try:
            self._native = _native.SlotAllocator(slots_count)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error

    @property
    def slots_count(self) -> int:
        """All slots: free_count + used_count + quarantined_count."""
        return self._native.slots_count

    @property
    def free_count(self) -> int:
        return self._native.free_count

    @property
    def used_count(self) -> int:
        return self._native.used_count

    @property
    def quarantined_count(self) -> int:
        return self._native.quarantined_count

    def allocate(self, count: int) -> npt.NDArray[np.uint32] | None:
        """Takes `count` slots; None, and no slot is taken, where fewer are free."""
        try:
            slots = self._native.allocate(count)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        return None if slots is None else np.frombuffer(slots, np.uint32)

    def allocate_up_to(self, count: int) -> npt.NDArray[np.uint32]:
        """Takes `count` slots, or as many as are free."""
        try:
            return np.frombuffer(self._native.allocate_up_to(count), np.uint32)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error

    def free(self, slots: Integers) -> None:
        """Gives used slots back. CallerError where one is not used, foreign or named twice."""
        try:
            self._native.free(slots)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error

    def quarantine(self, slots: Integers) -> None:
        """Moves used slots into quarantine. Errors as `free`."""
        try:
            self._native.quarantine(slots)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error

    def release_quarantine(self, slots: Integers) -> None:
        """Makes quarantined slots free. Errors as `free`, for slots not in quarantine."""
        try:
            self._native.release_quarantine(slots)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error


class RawSlotAllocator(Protocol):
    """What `_native.SlotAllocator` and its twin have in common: ids travel as packed u32."""

    @property
    def slots_count(self) -> int: ...
    @property
    def free_count(self) -> int: ...
    @property
    def used_count(self) -> int: ...
    @property
    def quarantined_count(self) -> int: ...
    def allocate(self, count: int) -> bytes | None: ...
    def allocate_up_to(self, count: int) -> bytes: ...
    def free(self, slots: Integers) -> None: ...
    def quarantine(self, slots: Integers) -> None: ...
    def release_quarantine(self, slots: Integers) -> None: ...


class PureSlotAllocator:
    """Twin of `_native.SlotAllocator`, its oracle in tests."""

    def __init__(self, slots_count: int) -> None:
        if slots_count < 0:
            raise ValueError("slots_count: negative")
        self.slots_count = slots_count
        self._stack = list(range(slots_count))[::-1]
        self._used: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._stack)

    @property
    def used_count(self) -> int:
        return len(self._used)

    @property
    def quarantined_count(self) -> int:
        return len(self._quarantined)

    def allocate(self, count: int) -> bytes | None:
        if count < 0:
            raise ValueError("count: negative")
        return None if count > self.free_count else self.allocate_up_to(count)

    def allocate_up_to(self, count: int) -> bytes:
        if count < 0:
            raise ValueError("count: negative")
        slots = [self._stack.pop() for _ in range(min(count, self.free_count))]
        self._used.update(slots)
        return np.array(slots, np.uint32).tobytes()

    def free(self, slots: Integers) -> None:
        self._stack.extend(_moved(slots, self._used, None))

    def quarantine(self, slots: Integers) -> None:
        _moved(slots, self._used, self._quarantined)

    def release_quarantine(self, slots: Integers) -> None:
        self._stack.extend(_moved(slots, self._quarantined, None))


def _moved(slots: Integers, source: set[int], target: set[int] | None) -> list[int]:
    ids = [int(slot) for slot in slots]
    if len(set(ids)) != len(ids) or not source.issuperset(ids):
        raise ValueError("slots: one is not in the state it must be in, or is named twice")
    source.difference_update(ids)
    if target is not None:
        target.update(ids)
    return ids

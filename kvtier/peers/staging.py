"""Memory that others may move bytes into or out of, in slots that are lent one call at a time.

A slot comes back only from somebody who knows that nothing moves there any more. One of which
nobody can know that is retired: its memory is never used again.
What must not live here: how bytes are moved, and how it is known that they have come to rest.
"""

import contextlib
import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvtier.errors import OverloadedError

SLOT_BYTES: Final = 8 << 20
"""Payload of one exchange, at most; both ends have it from here."""
SLOTS: Final = 8
ALIGNMENT: Final = 64
_BURIED: Final[list[mmap.mmap]] = []
"""Address space, without pages, that nothing else of this process may ever get."""


@dataclass(slots=True, eq=False)
class Slot:
    """One piece of the memory. Counted up with each loan, its generation names the loan."""

    number: int
    generation: int
    offset: int
    memory: memoryview


class Staging:
    """See the module. Any thread may call it."""

    def __init__(self, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        """Takes address space; pages come when they are written."""
        self._mapped = mmap.mmap(-1, slots * slot_bytes)
        self.memory = memoryview(self._mapped)
        self._free = deque(
            Slot(i, 0, i * slot_bytes, self.memory[i * slot_bytes :][:slot_bytes])
            for i in range(slots)
        )
        self._changed = threading.Condition()
        self._slots = slots
        self.slot_bytes = slot_bytes
        self.retired = 0

    @property
    def is_spent(self) -> bool:
        """Whether every slot was retired."""
        return self.retired == self._slots

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, end: float) -> Slot:
        """A slot for the caller alone; waits for one. OverloadedError at `end`, or if none is left.

        `end` is a time of `time.monotonic`.
        """
        with self._changed:
            while not self._free:
                left = end - time.monotonic()
                if left <= 0 or self.is_spent or not self._changed.wait(left):
                    raise OverloadedError("no staging memory is free")
            slot = self._free.popleft()
            slot.generation += 1
            return slot

    def give_back(self, slot: Slot) -> None:
        """Whoever calls it knows that nothing moves from or to the slot."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def retire(self, slot: Slot) -> None:
        """Never lend the slot again. Mutates only the count."""
        with self._changed:
            self.retired += 1
            self._changed.notify_all()

    def bury(self) -> None:
        """End the use of all of it: nothing is lent any more. Frees the pages.

        Who still has a slot may write there without asking anybody (a process of the same machine
        by address alone). So unless all are back their addresses are kept until the process ends.
        """
        with self._changed:
            if len(self._free) == self._slots:
                return
            self._free.clear()
            self.retired = self._slots
            self._changed.notify_all()
        _BURIED.append(self._mapped)
        with contextlib.suppress(OSError):  # a kernel that keeps the pages
            self._mapped.madvise(mmap.MADV_REMOVE)


def step_of(size_bytes: int) -> int:
    """From the beginning of a payload to that of the next."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT

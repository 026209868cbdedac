"""Which blocks are thought to be in the shared Redis: a guess that every answer corrects. Pure.

Nothing tells us what a Redis evicts, expires, or what other nodes write and drop; so the set below
is wrong at any moment, and made right by what is seen anyway and by looking:

- a put that was stored, a first writer found, a verified hit: it is there;
- a miss, a drop, a bad copy: it is not;
- a random sample asked for by EXISTS, which does not count as use for the server's LRU;
- a census: one whole SCAN. What was there all the time is seen for sure, so whatever was believed
  when it began and was neither seen nor confirmed until it ended is not there.

What must not live here: I/O, when to look (`holder`), who is told (`tier`).
"""

import random
from collections import Counter
from collections.abc import Iterable

from kvtier.core.frame import FrameName
from kvtier.types import Fingerprint


class Belief:
    """The set, with the length of each value where it is known. O(1) a name unless stated."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._places: dict[FrameName, int] = {}
        """Where each name stands in `_names`, so that a random one costs O(1)."""
        self._names: list[FrameName] = []
        self._sizes: list[int] = []
        self._bytes = 0
        self._namespaces: Counter[Fingerprint] = Counter()
        self._doubted: set[FrameName] | None = None
        self._changed: set[FrameName] | None = None
        self.overflows_count = 0
        """Names that were not taken because `names_max` were held."""

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    @property
    def bytes(self) -> int:
        """Sum of the known lengths."""
        return self._bytes

    def names(self) -> list[FrameName]:
        """All of them. O(n)."""
        return list(self._names)

    def namespaces(self) -> set[Fingerprint]:
        """Those of all names. O(namespaces)."""
        return set(self._namespaces)

    def add(self, name: FrameName, value_bytes: int = 0) -> bool:
        """It is there; `value_bytes` 0: of unknown length. True if that is new. Mutates."""
        if self._doubted is not None:
            self._doubted.discard(name)
        place = self._places.get(name)
        if place is not None:
            if value_bytes:
                self._bytes += value_bytes - self._sizes[place]
                self._sizes[place] = value_bytes
            return False
        if len(self._names) >= self._names_max:
            self.overflows_count += 1
            return False
        self._places[name] = len(self._names)
        self._names.append(name)
        self._sizes.append(value_bytes)
        self._bytes += value_bytes
        self._namespaces[name.namespace] += 1
        self._note(name)
        return True

    def remove(self, name: FrameName) -> bool:
        """It is not there. True if that is new. Mutates."""
        place = self._places.pop(name, None)
        if place is None:
            return False
        self._bytes -= self._sizes[place]
        last_name, last_size = self._names.pop(), self._sizes.pop()
        if last_name != name:
            self._names[place], self._sizes[place] = last_name, last_size
            self._places[last_name] = place
        if self._doubted is not None:
            self._doubted.discard(name)
        self._namespaces[name.namespace] -= 1
        if not self._namespaces[name.namespace]:
            del self._namespaces[name.namespace]
        self._note(name)
        return True

    def clear(self) -> list[FrameName]:
        """Nothing is there: forget and return all. Mutates; O(n)."""
        gone = self._names
        for name in gone:
            self._note(name)
        self._places, self._names, self._sizes, self._bytes = {}, [], [], 0
        self._namespaces = Counter()
        self._doubted = None if self._doubted is None else set()
        return gone

    def sample(self, count: int, dice: random.Random) -> list[FrameName]:
        """Up to `count` names, each equally likely, none twice. O(count)."""
        return dice.sample(self._names, min(count, len(self._names)))

    def begin_census(self) -> None:
        """A SCAN begins: doubt all. Mutates; O(n)."""
        self._doubted = set(self._names)

    def seen(self, names: Iterable[FrameName]) -> list[FrameName]:
        """The SCAN found these: return the ones that are new. Mutates."""
        return [name for name in names if self.add(name)]

    def end_census(self) -> list[FrameName]:
        """The SCAN is complete: forget and return what it did not find. Mutates; O(lost)."""
        doubted, self._doubted = self._doubted or set(), None
        return [name for name in doubted if self.remove(name)]

    def abandon_census(self) -> None:
        """The SCAN broke off: it says nothing about what it did not find. Mutates."""
        self._doubted = None

    def record_changes(self) -> None:
        """From now on keep the names whose membership changes; all that are there begin as changed.

        Mutates; O(n).
        """
        self._changed = set(self._names)

    def stop_recording(self) -> None:
        """Keep no changes any more. Mutates."""
        self._changed = None

    def take_changes(self) -> set[FrameName]:
        """The names that changed since the last call: look up what is true now. Mutates."""
        if self._changed is None:
            return set()
        changed, self._changed = self._changed, set()
        return changed

    def _note(self, name: FrameName) -> None:
        if self._changed is not None:
            self._changed.add(name)

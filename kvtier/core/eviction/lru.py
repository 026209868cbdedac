"""Least recently used, suffix first: the default of every tier.

An OrderedDict rather than our own linked list: it is a linked list threaded through a hash table
written in C, so a touch costs a tenth of what Python attribute writes on nodes cost; a plain dict
would not do, because finding its oldest entry after many deletions is linear.
What must not live here: pins by reason, priorities, sizes.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Generic

from kvtier.core.eviction.policy import (
    K,
    PinTable,
    PinToken,
    Removal,
    TouchOrder,
    check_count,
    check_room,
    unknown_key,
)
from kvtier.core.eviction.retention import Retention


class _Unknown(Enum):
    ADD = 0
    IGNORE = 1


class LruPolicy(Generic[K]):
    """`Policy` that offers the unpinned key whose last use is longest ago.

    Each use draws a stamp, tails before heads (vLLM frees a request's blocks in reverse for the
    same reason), so a block is never older than the blocks behind it and prefixes stay whole.
    A pin never changes the order: a pinned key that `victims` meets is laid aside with its stamp
    and merged back by stamp when it is unpinned. O(1) amortised each; about 150 bytes a key.
    """

    __slots__ = ("_aside", "_order", "_pins", "_returned", "_stamp", "_touch_order")

    def __init__(
        self, touch_order: TouchOrder = TouchOrder.TAIL_FIRST, pins: PinTable[K] | None = None
    ) -> None:
        """`pins`: of several policies that share keys between them."""
        self._touch_order = touch_order
        self._order: OrderedDict[K, int] = OrderedDict()  # key -> stamp, oldest first
        self._aside: dict[K, int] = {}  # pinned keys that were met, out of the order
        self._returned: dict[K, int] = {}  # unpinned since, to be merged back
        self._pins: PinTable[K] = PinTable() if pins is None else pins
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._order) + len(self._aside) + len(self._returned)

    def __contains__(self, key: object) -> bool:
        return key in self._order or key in self._aside or key in self._returned

    def on_stored(self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()) -> None:
        """Track and touch the keys of one chain; `now` and `retention` are not used."""
        check_room(len(self), len(keys))
        if self._aside or self._returned or not self._add(keys):
            self._use(keys, _Unknown.ADD)

    def on_touched(
        self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        """Make the keys of one chain the most recent; `now` and `retention` are not used."""
        self._use(keys, _Unknown.IGNORE)

    def on_removed(self, keys: Iterable[K], removal: Removal = Removal.EVICTED) -> None:
        """Forget the keys and their pins."""
        pop, has_pins = self._order.pop, len(self._pins) > 0
        for key in keys:
            if pop(key, None) is None and self._aside.pop(key, None) is None:
                self._returned.pop(key, None)
            if has_pins:
                self._pins.forget(key)

    def victims(self, count: int, now: float) -> list[K]:
        """Propose the oldest unpinned keys; the same answer again until something is told."""
        check_count(count)
        self._merge_returned()
        if not len(self._pins):
            return list(itertools.islice(self._order, count))
        chosen: list[K] = []
        met: list[K] = []
        for key in self._order:
            if len(chosen) == count:
                break
            (met if key in self._pins else chosen).append(key)
        for key in met:
            self._aside[key] = self._order.pop(key)
        return chosen

    def pin(self, key: K) -> PinToken:
        """Keep the key out of `victims`; its place in the order stays."""
        if key not in self:
            raise unknown_key()
        return self._pins.pin(key)

    def unpin(self, key: K, token: PinToken) -> None:
        """Undo one pin."""
        if self._pins.unpin(key, token) and key in self._aside:
            self._returned[key] = self._aside.pop(key)

    def _add(self, keys: Sequence[K]) -> bool:
        """Add keys behind all others; False where some were there, and are not in order yet."""
        before = len(self._order)
        tail_first = self._touch_order is TouchOrder.TAIL_FIRST
        stamps = range(self._stamp + 1, self._stamp + 1 + len(keys))
        self._order.update(zip(reversed(keys) if tail_first else keys, stamps, strict=True))
        self._stamp += len(keys)
        return len(self._order) == before + len(keys)

    def _use(self, keys: Sequence[K], unknown: _Unknown) -> None:
        order, stamp = self._order, self._stamp
        tail_first = self._touch_order is TouchOrder.TAIL_FIRST
        for key in reversed(keys) if tail_first else keys:
            if key in order:
                order.move_to_end(key)
            elif key in self._aside:
                del self._aside[key]
            elif key in self._returned:
                del self._returned[key]
            elif unknown is _Unknown.IGNORE:
                continue
            stamp += 1
            order[key] = stamp
        self._stamp = stamp

    def _merge_returned(self) -> None:
        """Put unpinned keys back by stamp.

        Whatever in the order is older than they are was offered by the call that met them, so
        that call has paid for this walk.
        """
        if not self._returned:
            return
        newest = max(self._returned.values())
        front = [(stamp, key) for key, stamp in self._returned.items()]
        self._returned.clear()
        for key, stamp in self._order.items():
            if stamp > newest:
                break
            front.append((stamp, key))
        front.sort(key=lambda entry: entry[0], reverse=True)
        for stamp, key in front:
            self._order[key] = stamp
            self._order.move_to_end(key, last=False)

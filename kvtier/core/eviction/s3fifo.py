"""S3-FIFO (Yang et al., SOSP 2023): three FIFO queues, quick demotion of what is used once.

It beats LRU where capacity is scarce and loses to it from about a twentieth of the working set up,
which is why it is offered and not the default. What must not live here: sizes in bytes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

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
from kvtier.errors import CallerError
from kvtier.limits import EVICTION_KEYS_MAX

_USES_MAX: Final = 3
"""Two bits of use count, as in the paper."""


@dataclass(frozen=True, slots=True)
class S3FifoConfig:
    """Shares of the capacity; the defaults are the paper's."""

    capacity_blocks: int
    small_ratio: float = 0.1
    ghost_ratio: float = 0.9
    promote_uses: int = 2
    """Uses in the small queue, beyond the store, that earn a place in the main queue."""
    touch_order: TouchOrder = TouchOrder.TAIL_FIRST

    def __post_init__(self) -> None:
        if not 1 <= self.capacity_blocks <= EVICTION_KEYS_MAX:
            raise CallerError(
                f"capacity_blocks is {self.capacity_blocks}, must be 1 to {EVICTION_KEYS_MAX}"
            )
        if not 0 < self.small_ratio < 1:
            raise CallerError(f"small_ratio is {self.small_ratio}, must be between 0 and 1")
        if not 0 <= self.ghost_ratio <= 8:
            raise CallerError(f"ghost_ratio is {self.ghost_ratio}, must be 0 to 8")
        if not 1 <= self.promote_uses <= _USES_MAX:
            raise CallerError(f"promote_uses is {self.promote_uses}, must be 1 to {_USES_MAX}")


@dataclass(slots=True)
class _Queue(Generic[K]):
    """One FIFO: key -> uses since it was queued, next to leave first; pinned ones met are aside."""

    order: OrderedDict[K, int] = field(default_factory=OrderedDict)
    aside: dict[K, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.order) + len(self.aside)

    def __contains__(self, key: object) -> bool:
        return key in self.order or key in self.aside

    def use(self, key: K) -> bool:
        """Count a use if the key is here."""
        for held in (self.order, self.aside):
            uses = held.get(key)
            if uses is not None:
                held[key] = min(uses + 1, _USES_MAX)
                return True
        return False

    def give_back(self, key: K, uses: int) -> None:
        """Make the key the next to leave."""
        self.order[key] = uses
        self.order.move_to_end(key, last=False)

    def forget(self, key: K) -> bool:
        """Remove the key if it is here."""
        return self.order.pop(key, None) is not None or self.aside.pop(key, None) is not None


class S3FifoPolicy(Generic[K]):
    """`Policy` with a small probationary queue, a main queue and a ghost queue of keys only.

    `victims` moves what earned it from small to main and reinserts used keys of main with one use
    less; two calls without a removal between may differ. A pinned key that was met returns to the
    end that leaves next. Memory: tracked keys plus at most `ghost_ratio * capacity_blocks` ghosts
    plus those of one `on_removed`. O(1) amortised: each reinsertion was paid for by a touch.
    """

    __slots__ = ("_config", "_ghost", "_ghosts_max", "_main", "_main_max", "_pins", "_small",
                 "_small_max", "_warm")  # fmt: skip

    def __init__(self, config: S3FifoConfig) -> None:
        self._config = config
        self._small_max = int(config.capacity_blocks * config.small_ratio)
        self._main_max = config.capacity_blocks - self._small_max
        self._ghosts_max = int(config.capacity_blocks * config.ghost_ratio)
        self._small: _Queue[K] = _Queue()
        self._main: _Queue[K] = _Queue()
        self._ghost: OrderedDict[K, None] = OrderedDict()
        self._pins: PinTable[K] = PinTable()
        self._warm = False

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    @property
    def ghosts_count(self) -> int:
        """How many evicted keys are remembered."""
        return len(self._ghost)

    def on_stored(self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()) -> None:
        """Queue new keys (ghosts straight into main), touch the others."""
        check_room(len(self), len(keys))
        for key in self._in_order(keys):
            if self._small.use(key) or self._main.use(key):
                continue
            if key in self._ghost:
                del self._ghost[key]
                self._main.order[key] = 0
            elif not self._warm and len(self._small) >= self._small_max:
                # Until the first eviction nothing competes: fill main too, as the authors' code.
                self._main.order[key] = 0
            else:
                self._small.order[key] = 0
        self._trim_ghosts()

    def on_touched(
        self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        """Count one use of each tracked key; no queue moves."""
        for key in keys:
            if not self._small.use(key):
                self._main.use(key)

    def on_removed(self, keys: Iterable[K], removal: Removal = Removal.EVICTED) -> None:
        """Forget the keys; those evicted out of small become ghosts."""
        self._trim_ghosts()
        for key in keys:
            if self._small.forget(key):
                if removal is Removal.EVICTED:
                    # Trimmed by the next store, so that a ghost is found by the store that evicts.
                    self._ghost[key] = None
                    self._warm = True
            elif self._main.forget(key) and removal is Removal.EVICTED:
                self._warm = True
            self._pins.forget(key)

    def victims(self, count: int, now: float) -> list[K]:
        """Propose keys; promotes and reinserts on the way."""
        check_count(count)
        chosen: list[tuple[_Queue[K], K, int]] = []
        while len(chosen) < count and (self._small.order or self._main.order):
            main_full = len(self._main) > self._main_max
            if self._main.order and (main_full or not self._small.order):
                self._next_of_main(chosen)
            else:
                self._next_of_small(chosen)
        for queue, key, uses in reversed(chosen):
            queue.give_back(key, uses)
        return [key for _, key, _ in chosen]

    def pin(self, key: K) -> PinToken:
        """Keep the key out of `victims`."""
        if key not in self:
            raise unknown_key()
        return self._pins.pin(key)

    def unpin(self, key: K, token: PinToken) -> None:
        """Undo one pin."""
        if not self._pins.unpin(key, token):
            return
        for queue in (self._small, self._main):
            if key in queue.aside:
                queue.give_back(key, queue.aside.pop(key))

    def _next_of_small(self, chosen: list[tuple[_Queue[K], K, int]]) -> None:
        """Take small's keys in turn until one is chosen or the queue has run empty."""
        small = self._small
        while small.order:
            key, uses = small.order.popitem(last=False)
            if key in self._pins:
                small.aside[key] = uses
            elif uses >= self._config.promote_uses:
                self._main.order[key] = 0
            else:
                chosen.append((small, key, uses))
                return

    def _next_of_main(self, chosen: list[tuple[_Queue[K], K, int]]) -> None:
        """Take main's keys in turn until one is chosen or the queue has run empty."""
        main = self._main
        while main.order:
            key, uses = main.order.popitem(last=False)
            if key in self._pins:
                main.aside[key] = uses
            elif uses:
                main.order[key] = uses - 1
            else:
                chosen.append((main, key, uses))
                return

    def _in_order(self, keys: Sequence[K]) -> Iterable[K]:
        return reversed(keys) if self._config.touch_order is TouchOrder.TAIL_FIRST else keys

    def _trim_ghosts(self) -> None:
        while len(self._ghost) > self._ghosts_max:
            self._ghost.popitem(last=False)

"""The contract of an eviction policy, and the parts that all policies share.

What must not live here: the order of any one policy, and what a block weighs.
"""

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from typing import Generic, NewType, Protocol, TypeVar

from kvtier.core.eviction.retention import Retention
from kvtier.errors import CallerError, LimitError
from kvtier.limits import EVICTION_KEYS_MAX

K = TypeVar("K", bound=Hashable)

PinToken = NewType("PinToken", int)
"""Names one generation of pins of a key; a token that outlived its key releases nothing."""


class TouchOrder(Enum):
    """In which order the blocks of one request count as used."""

    TAIL_FIRST = "tail_first"
    """The head is the most recent, so tails go first and no block outlives its prefix."""
    HEAD_FIRST = "head_first"
    """Plain LRU; only for comparison with simulators that know no chains."""


class Removal(Enum):
    """Why a key left."""

    EVICTED = "evicted"
    """To make room: a policy may remember it as a ghost."""
    DROPPED = "dropped"
    """It was wrong, expired or unwanted: nothing is remembered."""


class Policy(Protocol[K]):
    """An order of eviction over the keys it was told of.

    Keys of one call are blocks of one request in chain order, head first. A chain stored in
    pieces is in order again after one `on_touched` of the whole chain. `now` is in seconds of any
    monotonic clock. Only `on_stored`, `on_touched` and `on_removed` change which keys are tracked;
    `pin` and `unpin` change which may be offered; `victims` only proposes.
    """

    def __len__(self) -> int:
        """How many keys are tracked, pinned ones included."""
        ...

    def __contains__(self, key: object) -> bool:
        """Whether the key is tracked. O(1), mutates nothing."""
        ...

    def on_stored(self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()) -> None:
        """Track the keys and count one use of each; keys already tracked are only touched.

        `retention` is empty or one entry a key; policies without priorities ignore it.
        Raises LimitError beyond `limits.EVICTION_KEYS_MAX` keys; nothing has changed then.
        """
        ...

    def on_touched(
        self, keys: Sequence[K], now: float, retention: Sequence[Retention] = ()
    ) -> None:
        """Count one use of each tracked key; unknown keys are ignored (they lost a race)."""
        ...

    def on_removed(self, keys: Iterable[K], removal: Removal = Removal.EVICTED) -> None:
        """Forget the keys and their pins. Unknown keys are ignored: telling twice is harmless."""
        ...

    def victims(self, count: int, now: float) -> list[K]:
        """Propose up to `count` unpinned keys, first to go first.

        Removes nothing: the caller evicts and then calls `on_removed`. Returns fewer when all
        others are pinned. Work is O(count) amortised: a pinned key is stepped over once after
        each pin or touch, not once a call. Bookkeeping of the order may move (S3-FIFO reinserts,
        expired priorities fall back), the set of tracked keys never does.
        """
        ...

    def pin(self, key: K) -> PinToken:
        """Keep the key out of `victims` until as many unpins. Raises CallerError if unknown."""
        ...

    def unpin(self, key: K, token: PinToken) -> None:
        """Undo one `pin`. A token of a removed key does nothing, even if the key came back."""
        ...


class PinTable(Generic[K]):
    """Counted pins by key. Holds pinned keys only."""

    __slots__ = ("_drawn", "_pins")

    def __init__(self) -> None:
        self._drawn = 0
        self._pins: dict[K, tuple[PinToken, int]] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: object) -> bool:
        return key in self._pins

    def pin(self, key: K) -> PinToken:
        """Count one more pin of the key and return the token that undoes it."""
        held = self._pins.get(key)
        if held is None:
            self._drawn += 1
            held = (PinToken(self._drawn), 0)
        self._pins[key] = (held[0], held[1] + 1)
        return held[0]

    def unpin(self, key: K, token: PinToken) -> bool:
        """Undo one pin; True when that was the last one of this key."""
        held = self._pins.get(key)
        if held is None or held[0] != token:
            return False
        if held[1] > 1:
            self._pins[key] = (token, held[1] - 1)
            return False
        del self._pins[key]
        return True

    def forget(self, key: K) -> None:
        """Drop all pins of a key that is gone."""
        self._pins.pop(key, None)


def check_room(tracked: int, added: int) -> None:
    """Raise LimitError if tracking `added` keys more could exceed the ceiling."""
    if tracked + added > EVICTION_KEYS_MAX:
        raise LimitError(
            f"{tracked} tracked and {added} stored keys exceed EVICTION_KEYS_MAX "
            f"({EVICTION_KEYS_MAX})"
        )


def check_count(count: int) -> None:
    """Raise CallerError unless `count` is a number of victims."""
    if count < 0:
        raise CallerError(f"count of victims is {count}, must not be negative")


def unknown_key() -> CallerError:
    """The error for a pin of a key that is not tracked (keys are never put into messages)."""
    return CallerError("key to pin is not tracked by this policy")

"""What each tier of this node holds now, as the tiers themselves say.

One `TierWatch` is the observer of every local tier of a store. It is the truth that the planner's
books are held against, and what a publisher announces.
What must not live here: decisions.
"""

from collections.abc import Callable, Iterable, Sequence

from kvtier.core.frame import FrameName
from kvtier.ports import RemovalCause
from kvtier.store.values import SHARED_TIERS, StoreListener
from kvtier.types import Tier

RemovedHook = Callable[[Tier, Sequence[FrameName], RemovalCause], None]


class TierWatch:
    """`TierObserver` of the tiers of one store; give it to them before the store is made.

    About 100 bytes a block and tier.
    """

    def __init__(self, listener: StoreListener | None = None) -> None:
        self._listener = listener
        self._present: dict[Tier, dict[FrameName, None]] = {}
        self._hidden: set[Tier] = set()
        self._removed: RemovedHook | None = None

    def on_tier_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        """See `TierObserver`. Of a shared tier nothing is kept and nobody told."""
        if tier in SHARED_TIERS:
            return
        self._present.setdefault(tier, {}).update(dict.fromkeys(names))
        self._tell_stored(tier, names)

    def on_tier_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """See `TierObserver`. Of a shared tier only the store hears."""
        present = self._present.setdefault(tier, {})
        for name in names:
            present.pop(name, None)
        if self._removed is not None:
            self._removed(tier, names, cause)
        is_told = tier not in self._hidden and tier not in SHARED_TIERS
        if self._listener is not None and is_told:
            self._listener.on_removed(tier, names, cause)

    def found(self, tier: Tier, names: Sequence[FrameName]) -> None:
        """What a tier held when it was opened, which it does not tell its observer."""
        self.on_tier_stored(tier, names)

    def holds(self, tier: Tier, name: FrameName) -> bool:
        """Whether the tier has the block now. Always False for a tier that says nothing."""
        return name in self._present.get(tier, ())

    def one_of(self, tier: Tier) -> FrameName | None:
        """Any block of the tier, to see whether the tier can be read; None if there is none."""
        return next(iter(self._present.get(tier, ())), None)

    def hook(self, removed: RemovedHook) -> None:
        """Whom to tell before the listener that blocks are gone. The store's own."""
        self._removed = removed

    def hide(self, tier: Tier) -> None:
        """Say that the tier's blocks cannot be had, until `show`. Idempotent."""
        if tier not in self._hidden:
            self._hidden.add(tier)
            names = tuple(self._present.get(tier, ()))
            if names and self._listener is not None:
                self._listener.on_removed(tier, names, RemovalCause.LOST)

    def show(self, tier: Tier) -> None:
        """Say what the tier holds again. Idempotent."""
        if tier in self._hidden:
            self._hidden.discard(tier)
            self._tell_stored(tier, tuple(self._present.get(tier, ())))

    def _tell_stored(self, tier: Tier, names: Iterable[FrameName]) -> None:
        told = tuple(names)
        if told and self._listener is not None and tier not in self._hidden:
            self._listener.on_stored(tier, told)

"""The hot set of a worker: counted while it serves, written before it ends, brought back later.

What must not live here: heat itself (`heat`), the list in the store (`hot_record`, `shelf`), when a
worker ends or starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvtier.limits import HOT_SET_BLOCKS_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.types import PrefixKey, ScopeId
from kvtier_services.worker.l2.heat import HeatBook, HotSet
from kvtier_services.worker.l2.loading import LoadPorts, Loads
from kvtier_services.worker.l2.port import Loaded, Looked, Lookup, Ticket
from kvtier_services.worker.l2.prefetch import Prefetch, PrefetchCounts, PrefetchPorts, names_of
from kvtier_services.worker.l2.saving import SaveItem, block_name

_ASKED_BLOCKS: Final = 1024
"""Blocks that one question names: what is hottest is written while the rest is still asked for."""


@dataclass(slots=True)
class HotSetCounts:
    """Since the start, in blocks of all layer groups."""

    hot: int = 0
    """Found worth writing when the worker was asked to end."""
    held: int = 0
    """Of those, what the store had already."""
    offered: int = 0
    """Of those, what was queued to be written."""


@dataclass(slots=True)
class _Asked:
    keys: Sequence[PrefixKey]
    scopes: Sequence[ScopeId]


class HotSets:
    """See the module. Not thread-safe; whoever drives the engine core owns it."""

    def __init__(self, ports: PrefetchPorts, load_ports: LoadPorts, load_s_max: float) -> None:
        """`load_ports` are those of requests' loads; loads of a prefetch are told to it instead."""
        self._ports = ports
        self._load_ports = load_ports
        self._load_s_max = load_s_max
        self._heat = HeatBook()
        self._asked: dict[Ticket, _Asked] = {}
        self._blocks_left = 0
        """Of the budget of writes."""
        self._prefetch: Prefetch | None = None
        self.counts = HotSetCounts()

    @property
    def prefetched(self) -> PrefetchCounts:
        """What came of the prefetch; all 0 where there was none."""
        return PrefetchCounts() if self._prefetch is None else self._prefetch.counts

    @property
    def is_prefetching(self) -> bool:
        """Whether a hot set is on its way into L1."""
        return self._prefetch is not None and not self._prefetch.is_over

    @property
    def is_asking(self) -> bool:
        """Whether it is being found out what must be written."""
        return bool(self._asked)

    @property
    def is_busy(self) -> bool:
        """Whether outcomes are awaited."""
        return self.is_asking or self.is_prefetching

    def deadlines(self) -> list[float]:
        """When `tick` has something to do."""
        return [] if self._prefetch is None else self._prefetch.loads.deadlines()

    # ---- while it serves

    def used(self, keys: Sequence[PrefixKey], scope: ScopeId, now: float) -> None:
        """A request ends, whose leading blocks these are, all in L1."""
        self._heat.used(keys, scope, now)

    def evicted(self, key: PrefixKey, now: float) -> None:
        """A block of layer group 0 left L1."""
        self._heat.evicted(key, now)

    # ---- before it ends

    def offer(self, blocks_max: int, now: float) -> None:
        """Queue what the store does not hold to be written, hottest first, at most so many blocks.

        The store is asked: what it was given once it may have evicted since.
        """
        hot = self._heat.hottest(HOT_SET_BLOCKS_MAX, now, self._is_resident)
        self._blocks_left = blocks_max
        most = max(1, min(_ASKED_BLOCKS, TIER_BATCH_BLOCKS_MAX // len(self._ports.namespaces)))
        for at in range(0, len(hot), most):
            part = hot[at : at + most]
            keys = [block.key for block in part]
            ticket = self._ports.tickets.draw()
            self._asked[ticket] = _Asked(keys, [block.scope for block in part])
            names = names_of(keys, self._ports.namespaces)
            self._ports.below.begin(Lookup(ticket, names, self._load_s_max))

    def held(self, now: float) -> HotSet:
        """The hot set as far as the store is known to have it. Mutates nothing."""
        return self._heat.hottest(HOT_SET_BLOCKS_MAX, now, self._is_held)

    # ---- when it starts

    def prefetch(self, hot: HotSet, blocks_max: int, until: float, now: float) -> None:
        """Begin to bring a hot set into L1. Once."""

        def loads_of(owner: Prefetch) -> Loads:
            return Loads(replace(self._load_ports, owner=owner), self._load_s_max)

        self._prefetch = Prefetch(self._ports, loads_of, hot, blocks_max, until)
        self._prefetch.begin(now)

    # ---- outcomes

    def owns(self, ticket: Ticket) -> bool:
        """Whether an outcome is to be given to this."""
        return ticket in self._asked or (self._prefetch is not None and self._prefetch.owns(ticket))

    def take(self, outcome: Looked | Loaded, now: float) -> None:
        """Take in an outcome that it owns."""
        asked = self._asked.pop(outcome.ticket, None)
        if asked is not None and isinstance(outcome, Looked):
            self._found(asked, outcome, now)
        elif self._prefetch is not None and isinstance(outcome, Looked):
            self._prefetch.looked(outcome)
        elif self._prefetch is not None and isinstance(outcome, Loaded):
            self._prefetch.loads.take(outcome, now)

    def tick(self, now: float) -> None:
        """Go on with what is under way."""
        if self._prefetch is not None:
            self._prefetch.tick(now)

    # ---- parts

    def _found(self, asked: _Asked, outcome: Looked, now: float) -> None:
        saves, keys = self._ports.saves, asked.keys
        for group in range(len(self._ports.namespaces)):
            sources = outcome.sources[group * len(keys) : (group + 1) * len(keys)]
            there = {key for key, source in zip(keys, sources, strict=False) if source is not None}
            saves.know(block_name(group, key) for key in keys if key in there)
            if outcome.is_known:
                saves.doubt(block_name(group, key) for key in keys if key not in there)
            resident = partial(self._ports.blocks.find, group=group)
            items = [
                SaveItem(key, scope, group=group)
                for key, scope in zip(keys, asked.scopes, strict=True)
                if resident(key) is not None
            ]
            missing = [item for item in items if not saves.knows(item.name)]
            self.counts.hot += len(items)
            self.counts.held += len(items) - len(missing)
            offered = missing[: self._blocks_left]
            self._blocks_left -= len(offered)
            self.counts.offered += len(offered)
            # A write takes blocks of one scope: neighbours of one go together.
            saves.offer(sorted(offered, key=lambda item: item.scope), now)

    def _is_resident(self, key: PrefixKey) -> bool:
        return self._ports.blocks.find(key) is not None

    def _is_held(self, key: PrefixKey) -> bool:
        return self._is_resident(key) and self._ports.saves.knows(key)

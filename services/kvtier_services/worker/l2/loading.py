"""Loads that were begun: orders to the tiers below, part by part, and what becomes of them.

A load is asked for in parts: as many blocks of one layer group as there is host memory for. Where
that memory is the pool's own, a group is one part. What has arrived is verified; staged blocks then
go to the pool slice by slice while the request already runs. What must not live here: whether to
load, writing, lookups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvtier.core.frame import FrameName
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.paged.transfer import BlockTransfer, Landing
from kvtier.types import Fingerprint, ScopeId, Source
from kvtier_services.worker.l2.advisor import Advisor
from kvtier_services.worker.l2.port import BlockCache, Load, Loaded, LoadRun, Ticket
from kvtier_services.worker.l2.saving import SaveBook, block_name
from kvtier_services.worker.l2.tickets import Tickets
from kvtier_services.worker.scheduler import LoadStart
from kvtier_services.worker.sequences import Phase, Request

_GRACE_S: Final = 0.05
"""What a load may take beyond its deadlines before its request goes on without it."""


@dataclass(slots=True)
class LoadCounts:
    """Since the start."""

    blocks_loaded: dict[Source, int] = field(default_factory=dict)
    blocks_not_loaded: dict[str, int] = field(default_factory=dict)
    """By why: words of `GetStatus`."""
    bytes_loaded: int = 0
    loads: int = 0
    loads_given_up: int = 0
    """The request went on without waiting for the end."""
    computed_ahead_blocks: int = 0
    """Computed while the blocks after them were loaded."""


@dataclass(slots=True)
class _Loading:
    start: LoadStart
    holder: str
    scope: ScopeId
    give_up_at: float
    asked: int = 0
    """Of the entries."""
    arrived: int = 0
    """Of the entries, from the first on."""
    landing: Landing | None = None
    """Of the part that is being read; None: none is, for want of room."""
    is_abandoned: bool = False


class LoadOwner(Protocol):
    """Whoever begins loads, and is told how they ended."""

    def loaded(self, start: LoadStart, blocks_count: int, now: float) -> None:
        """So many blocks arrived, from the first on."""
        ...

    def abandoned_ended(self, start: LoadStart, holder: str, blocks_count: int, now: float) -> None:
        """The same of a load that nobody waited for any more."""
        ...

    def give_up_load(self, request: Request) -> str:
        """A load is late: do not wait for it. Returns the name that its blocks are held under."""
        ...


@dataclass(frozen=True, slots=True)
class LoadPorts:
    """What loads are made of."""

    below: BlockCache
    transfer: BlockTransfer
    owner: LoadOwner
    advisor: Advisor
    saves: SaveBook
    tickets: Tickets
    namespaces: tuple[Fingerprint, ...]
    """Of each layer group."""


class Loads:
    """The loads of one worker. Not thread-safe; the engine's thread owns it."""

    def __init__(self, ports: LoadPorts, load_s_max: float) -> None:
        self._ports = ports
        self._load_s_max = load_s_max
        self._all: list[_Loading] = []
        self._by_ticket: dict[Ticket, _Loading] = {}
        geometry = ports.transfer.pool.geometry
        self._whole_only = len(geometry.groups) > 1 or geometry.groups[0].window is not None
        """With windows a load that ended early cannot be used in part."""
        self.counts = LoadCounts()

    @property
    def is_busy(self) -> bool:
        """Whether something is being loaded."""
        return bool(self._all)

    @property
    def waits_for_room(self) -> bool:
        """Whether a load goes on as soon as host memory is free."""
        return any(one.landing is None for one in self._all)

    def owns(self, ticket: Ticket) -> bool:
        """Whether an order is of one of these loads."""
        return ticket in self._by_ticket

    def deadlines(self) -> list[float]:
        """When `tick` has something to do."""
        return [one.give_up_at for one in self._all if not one.is_abandoned]

    def begin(self, start: LoadStart, scope: ScopeId, now: float) -> None:
        """Begin a load that the scheduler decided; its blocks are there."""
        wait_s = min(self._load_s_max, sum(run.deadline_s for run in start.runs)) + _GRACE_S
        loading = _Loading(start, start.request.holder, scope, now + wait_s)
        self.counts.loads += 1
        head = start.first_block - start.request.sealed_blocks
        self.counts.computed_ahead_blocks += max(0, head)
        self._all.append(loading)
        self._ask(loading)

    def take(self, outcome: Loaded, now: float) -> None:
        """A part is over."""
        loading = self._by_ticket.pop(outcome.ticket)
        landing, part = loading.landing, loading.asked - loading.arrived
        assert landing is not None
        loading.landing = None
        landing.restore(outcome.blocks_count)
        group = loading.start.entries[loading.arrived][0]
        loading.arrived += outcome.blocks_count
        self._count(outcome, group)
        self._ports.advisor.loaded(outcome.runs, group, now)
        is_whole = outcome.blocks_count == part
        if is_whole and loading.asked < len(loading.start.entries) and not loading.is_abandoned:
            self._ask(loading)
        else:
            self._end(loading, now)

    def tick(self, now: float) -> None:
        """Go on where there is room again, and stop waiting for what is late."""
        for loading in list(self._all):
            if not loading.is_abandoned and now >= loading.give_up_at:
                loading.is_abandoned = True
                self.counts.loads_given_up += 1
                request = loading.start.request
                if request.is_loading and request.holder == loading.holder:
                    self._ports.owner.give_up_load(request)
            if loading.landing is None:
                if loading.is_abandoned:
                    self._end(loading, now)
                else:
                    self._ask(loading)

    def abandon(self, request: Request) -> None:
        """A request is over: its load concerns nobody any more."""
        for loading in self._all:
            if loading.start.request is request:
                loading.is_abandoned = True

    # ---- parts

    def _ask(self, loading: _Loading) -> None:
        """Order the next part, where there is room for one."""
        entries, at = loading.start.entries, loading.asked
        group = entries[at][0]
        most = min(self._ports.transfer.room(group), TIER_BATCH_BLOCKS_MAX)
        part = [entry for entry in entries[at : at + most] if entry[0] == group]
        if not part:
            return
        landing = self._ports.transfer.landing([block for _, _, block in part], group)
        if landing is None:
            return
        loading.landing = landing
        loading.asked += len(part)
        order = Load(
            self._ports.tickets.draw(),
            self._names(loading, part),
            tuple(landing.memory(i) for i in range(len(part))),
            self._runs(loading.start.runs, at, len(part)),
            loading.scope,
        )
        self._by_ticket[order.ticket] = loading
        self._ports.below.begin(order)

    def _names(
        self, loading: _Loading, part: Sequence[tuple[int, int, int]]
    ) -> tuple[FrameName, ...]:
        """Places of one group follow one another."""
        group, first, _ = part[0]
        chain = loading.start.request.chain
        return chain.names(first, first + len(part), self._ports.namespaces[group])

    def _runs(self, runs: tuple[LoadRun, ...], at: int, count: int) -> tuple[LoadRun, ...]:
        """What entries at .. at + count - 1 are of the runs."""
        part: list[LoadRun] = []
        for run in runs:
            skipped = min(at, run.blocks_count)
            taken = min(count, run.blocks_count - skipped)
            at -= skipped
            count -= taken
            if taken:
                deadline_s = min(run.deadline_s, self._load_s_max)
                part.append(LoadRun(run.source, taken, deadline_s, run.group))
        return tuple(part)

    def _end(self, loading: _Loading, now: float) -> None:
        self._all.remove(loading)
        start = loading.start
        is_whole = loading.arrived == len(start.entries)
        keys = start.request.chain.keys
        self._ports.saves.doubt(
            block_name(group, keys[place])
            for group, place, _ in start.entries[loading.arrived : loading.asked]
        )
        blocks = 0 if self._whole_only else loading.arrived
        if is_whole:
            blocks = start.blocks_count
        if loading.is_abandoned:
            self._ports.owner.abandoned_ended(start, loading.holder, blocks, now)
        elif start.request.phase is not Phase.ENDED:
            self._ports.owner.loaded(start, blocks, now)

    def _count(self, outcome: Loaded, group: int) -> None:
        counts = self.counts
        block_bytes = self._ports.transfer.pool.geometry.block_bytes(group)
        for run in outcome.runs:
            before = counts.blocks_loaded.get(run.source, 0)
            counts.blocks_loaded[run.source] = before + run.arrived_blocks
            counts.bytes_loaded += run.arrived_blocks * block_bytes
        for reason in outcome.reasons:
            counts.blocks_not_loaded[reason] = counts.blocks_not_loaded.get(reason, 0) + 1

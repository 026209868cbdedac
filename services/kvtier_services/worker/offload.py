"""What a worker does with the tiers below: asks them, loads from them, writes to them.

Everything is begun here and ends as an outcome, so that no step ever waits. Blocks that are being
written into are their request's, or nobody's, until the load's outcome is there; blocks that are
being read are held. What must not live here: the store's client, which request runs next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.eviction import PRIORITY_DEFAULT
from kvtier.core.frame import KeyKind, frame_names
from kvtier.core.keys import KEY_BYTES
from kvtier.core.planner import WritePolicy
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.paged.blocks import BlockManager
from kvtier.paged.group_blocks import BlockId
from kvtier.paged.pool import KvPool
from kvtier.ports import NO_SCOPE, PutStatus
from kvtier.types import Fingerprint, PrefixKey, ScopeId, Source
from kvtier_services.worker.l2.advisor import Advisor
from kvtier_services.worker.l2.port import (
    BlockCache,
    Load,
    Loaded,
    LoadRun,
    Looked,
    Lookup,
    Outcome,
    RunOutcome,
    Save,
    Saved,
    Ticket,
)
from kvtier_services.worker.l2.saving import Haste, SaveBook, SaveEnd, SaveItem, SaveLimits
from kvtier_services.worker.scheduler import LoadStart, Scheduler
from kvtier_services.worker.sequences import Phase, Request

_LOOKUP_SHARE: Final = 0.25
"""A request waits for a lookup at most this part of what computing everything would take."""
_GRACE_S: Final = 0.05
"""What a load may take beyond its deadlines before its request goes on without it."""
_LOW_WATER: Final = 0.1
"""ON_EVICT: the coldest blocks are written once less than this share of the pool is free."""
_COLDEST: Final = 256
_GATHER_BLOCKS: Final = 16


_NOBODY: Final = (NO_SCOPE, PRIORITY_DEFAULT)


@dataclass(frozen=True, slots=True)
class OffloadTerms:
    """See `OffloadSection`."""

    namespace: Fingerprint
    write_policy: WritePolicy = WritePolicy.ON_SEAL
    in_flight_bytes_max: int = 128 << 20
    lookup_s_min: float = 0.02
    lookup_s_max: float = 0.1
    load_s_max: float = 5.0


@dataclass(slots=True)
class OffloadCounts:
    """Since the start."""

    lookups: int = 0
    lookups_unknown: int = 0
    """Nobody could be asked, or the answer came too late."""
    blocks_loaded: dict[Source, int] = field(default_factory=dict)
    blocks_not_loaded: dict[str, int] = field(default_factory=dict)
    """By why: words of `GetStatus`."""
    bytes_loaded: int = 0
    loads: int = 0
    loads_given_up: int = 0
    """The request went on without waiting for the end."""


@dataclass(slots=True)
class _Looking:
    request: Request
    start: int
    """First block that was asked for."""
    give_up_at: float


@dataclass(slots=True)
class _Loading:
    request: Request
    holder: str
    runs: tuple[LoadRun, ...]
    keys: list[PrefixKey]
    give_up_at: float
    is_abandoned: bool = False


class Offload:
    """The tiers below one worker. Not thread-safe; the engine's thread owns it."""

    def __init__(
        self,
        below: BlockCache,
        scheduler: Scheduler,
        blocks: BlockManager,
        pool: KvPool,
        advisor: Advisor,
        terms: OffloadTerms,
    ) -> None:
        self._below = below
        self._scheduler = scheduler
        self._blocks = blocks
        self._pool = pool
        self._advisor = advisor
        self._terms = terms
        self._block_bytes = pool.geometry.block_bytes(0)
        self._tickets = 0
        self._looking: dict[Ticket, _Looking] = {}
        self._loading: dict[Ticket, _Loading] = {}
        self._saving: dict[Ticket, tuple[list[PrefixKey], list[BlockId]]] = {}
        self._owners: dict[PrefixKey, tuple[ScopeId, int]] = {}
        """ON_EVICT: on whose behalf a resident block was computed, and how dearly it is kept, where
        that is not as with any other."""
        in_flight = max(1, min(terms.in_flight_bytes_max // self._block_bytes,
                               pool.blocks_counts[0] // 4))  # fmt: skip
        self.saves = SaveBook(SaveLimits(in_flight, gather_blocks=min(in_flight, _GATHER_BLOCKS)))
        self.counts = OffloadCounts()

    @property
    def is_busy(self) -> bool:
        """Whether outcomes are awaited."""
        return bool(self._looking or self._loading or self._saving)

    def is_writing(self, now: float) -> bool:
        """Whether blocks are being written, or wait for that and not for a store to come back."""
        waits = self.saves.backlog_count > 0 and not self.saves.is_paused(now)
        return bool(self._saving) or waits

    def next_deadline(self, now: float) -> float | None:
        """When `tick` or `pump` has something to do, if no outcome comes before."""
        times = [one.give_up_at for one in self._looking.values()]
        times += [one.give_up_at for one in self._loading.values() if not one.is_abandoned]
        resume_at = self.saves.next_at(now)
        return min(times if resume_at is None else [*times, resume_at], default=None)

    # ---- looking

    def look(self, request: Request, now: float, *, waits: bool) -> None:
        """Ask what the tiers below have of a request beyond L1; `waits`: it is not admitted before.

        Asks nothing where L1 has all of it, or nothing could come of it.
        """
        keys = request.chain.keys[: (len(request.tokens) - 1) // self._pool.geometry.block_tokens]
        hit = self._blocks.match(keys)
        asked = keys[hit : hit + TIER_BATCH_BLOCKS_MAX]
        if not asked:
            return
        block_tokens = self._pool.geometry.block_tokens
        compute_s = self._advisor.prefill_s(len(asked) * block_tokens, hit * block_tokens, now)
        wished_s = max(self._terms.lookup_s_min, _LOOKUP_SHARE * compute_s)
        wait_s = min(self._terms.lookup_s_max, wished_s)
        ticket = self._ticket()
        names = request.chain.names(hit, hit + len(asked), self._terms.namespace)
        self._looking[ticket] = _Looking(request, hit, now + wait_s)
        request.awaits_lookup = waits
        self.counts.lookups += 1
        self._below.begin(Lookup(ticket, names, wait_s))

    # ---- loading

    def load(self, start: LoadStart, now: float) -> None:
        """Begin a load that the scheduler decided; an `adopt` gave the blocks."""
        request = start.request
        first = start.first_block
        stop = first + sum(run.blocks_count for run in start.runs)
        into = tuple(self._pool.block_memory(block) for _, block in start.blocks.blocks[0])
        names = request.chain.names(first, stop, self._terms.namespace)
        cap = self._terms.load_s_max
        runs = tuple(
            LoadRun(run.source, run.blocks_count, min(run.deadline_s, cap)) for run in start.runs
        )
        ticket = self._ticket()
        wait_s = min(cap, sum(run.deadline_s for run in runs)) + _GRACE_S
        self._loading[ticket] = _Loading(
            request, request.holder, runs, request.chain.keys[first:stop], now + wait_s
        )
        self.counts.loads += 1
        self._below.begin(Load(ticket, names, into, runs, scope_of(request)))

    # ---- writing

    def reused(self, request: Request, hit_blocks: int, now: float) -> None:
        """A request began with blocks of L1."""
        if self._terms.write_policy is WritePolicy.ON_REUSE:
            self._offer(request, 0, hit_blocks, now)

    def sealed(self, request: Request, start: int, stop: int, now: float) -> None:
        """Blocks start .. stop - 1 of a request were computed and are full."""
        if self._terms.write_policy is WritePolicy.ON_SEAL:
            self._offer(request, start, stop, now)
        elif self._terms.write_policy is WritePolicy.ON_EVICT:
            scope = scope_of(request)
            for block in range(start, stop):
                owner = scope, request.priority_of(block, now)
                if owner != _NOBODY:
                    self._owners[request.chain.keys[block]] = owner

    def evicted(self, keys: Sequence[PrefixKey]) -> None:
        """Blocks left L1: what waits to be written of them is lost."""
        for key in keys:
            self._owners.pop(key, None)
            self.saves.withdraw(key)

    def pump(self, now: float) -> None:
        """Write what waits, as far as there is room in flight."""
        if self._terms.write_policy is WritePolicy.ON_EVICT:
            self._offer_coldest(now)
        haste = self._haste(now)
        while items := self.saves.take(now, haste):
            keys: list[PrefixKey] = []
            held: list[BlockId] = []
            for item in items:
                block = self._blocks.hold(PrefixKey(item.key))
                if block is None:
                    self.saves.dropped(item)
                else:
                    keys.append(PrefixKey(item.key))
                    held.append(block)
            if keys:
                self._write(items[0], keys, held)

    # ---- outcomes

    def tick(self, now: float) -> None:
        """Take in what has ended, and stop waiting for what is late."""
        for outcome in self._below.outcomes():
            self._take(outcome, now)
        for looking in self._looking.values():
            if looking.request.awaits_lookup and now >= looking.give_up_at:
                looking.request.awaits_lookup = False
        for loading in self._loading.values():
            if not loading.is_abandoned and now >= loading.give_up_at:
                self._abandon(loading)
                if loading.request.phase is Phase.LOADING:
                    self._scheduler.give_up_load(loading.request)

    def ended(self, request: Request) -> None:
        """A request is over: its lookup and its load concern nobody any more."""
        for loading in self._loading.values():
            if loading.request is request and not loading.is_abandoned:
                loading.is_abandoned = True

    # ---- parts

    def _ticket(self) -> Ticket:
        self._tickets += 1
        return Ticket(self._tickets)

    def _take(self, outcome: Outcome, now: float) -> None:
        match outcome:
            case Looked():
                self._looked(outcome)
            case Loaded():
                self._loaded(outcome, now)
            case Saved():
                self._saved(outcome, now)

    def _looked(self, outcome: Looked) -> None:
        looking = self._looking.pop(outcome.ticket)
        request, start = looking.request, looking.start
        request.awaits_lookup = False
        if not outcome.is_known:
            self.counts.lookups_unknown += 1
        self.saves.know(request.chain.keys[start : start + len(outcome.sources)])
        if request.phase is Phase.WAITING:
            request.below, request.below_from = outcome.sources, start

    def _loaded(self, outcome: Loaded, now: float) -> None:
        loading = self._loading.pop(outcome.ticket)
        arrived = outcome.blocks_count
        self._count(outcome)
        self._advisor.loaded(_measured(outcome.runs), now)
        self.saves.doubt(loading.keys[arrived:])
        if loading.is_abandoned:
            self._scheduler.abandoned_ended(loading.request, loading.holder, arrived, now)
            return
        self._scheduler.loaded(loading.request, arrived, loading.runs, now)

    def _saved(self, outcome: Saved, now: float) -> None:
        keys, held = self._saving.pop(outcome.ticket)
        for block in held:
            self._blocks.drop(block)
        ends = map(_save_end, outcome.held, outcome.reasons)
        self.saves.ended(list(zip(keys, ends, strict=True)), now)

    def _abandon(self, loading: _Loading) -> None:
        loading.is_abandoned = True
        self.counts.loads_given_up += 1

    def _count(self, outcome: Loaded) -> None:
        counts = self.counts
        for run in outcome.runs:
            before = counts.blocks_loaded.get(run.source, 0)
            counts.blocks_loaded[run.source] = before + run.arrived_blocks
            counts.bytes_loaded += run.arrived_blocks * self._block_bytes
        for reason in outcome.reasons:
            counts.blocks_not_loaded[reason] = counts.blocks_not_loaded.get(reason, 0) + 1

    def _offer(self, request: Request, start: int, stop: int, now: float) -> None:
        scope = scope_of(request)
        keys = request.chain.keys
        self.saves.offer(
            [SaveItem(keys[i], scope, request.priority_of(i, now)) for i in range(start, stop)], now
        )

    def _haste(self, now: float) -> Haste:
        """Whether the next step may evict what waits to be written."""
        if not self.saves.backlog_count:
            return Haste.GATHER
        wanted = self._scheduler.blocks_taken_max - self._blocks.usage().free_count
        if wanted > 0:
            for key, _ in self._blocks.coldest(wanted, now):
                if self.saves.is_waiting(key):
                    return Haste.NOW
        return Haste.GATHER

    def _offer_coldest(self, now: float) -> None:
        usage = self._blocks.usage()
        if usage.free_count >= _LOW_WATER * usage.blocks_count:
            return
        coldest = self._blocks.coldest(_COLDEST, now)
        self.saves.offer([SaveItem(k, *self._owners.get(k, _NOBODY)) for k, _ in coldest], now)

    def _write(self, like: SaveItem, keys: list[PrefixKey], held: list[BlockId]) -> None:
        ticket = self._ticket()
        names = frame_names(KeyKind.PREFIX_KEY, b"".join(keys), KEY_BYTES, self._terms.namespace)
        payloads = tuple(self._pool.block_memory(block) for block in held)
        self._saving[ticket] = (keys, held)
        self._below.begin(Save(ticket, tuple(names), payloads, like.scope, like.priority))


def scope_of(request: Request) -> ScopeId:
    """On whose behalf blocks of a request are kept: its salt, which is all a worker sees of it."""
    return ScopeId(request.terms.scope_salt or "")


def _save_end(held: bool, reason: str) -> SaveEnd:
    if held:
        return SaveEnd.SAVED
    return SaveEnd.REFUSED if reason == PutStatus.REFUSED.value else SaveEnd.FAILED


def _measured(runs: Sequence[RunOutcome]) -> list[RunOutcome]:
    return [run for run in runs if run.seconds > 0]

"""What a worker does with the tiers below: asks them, loads from them, writes to them.

Everything is begun here and ends as an outcome, so that no step ever waits. Blocks that are being
written into are their request's, or nobody's, until the load's outcome is there; blocks that are
being read are held. A layer group's blocks are frames of their own, in a namespace of their own.
What must not live here: the store's client, which request runs next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.eviction import PRIORITY_DEFAULT
from kvtier.core.planner import WritePolicy
from kvtier.errors import CallerError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.paged.blocks import BlockManager
from kvtier.paged.group_blocks import Change
from kvtier.paged.transfer import BlockTransfer
from kvtier.ports import NO_SCOPE
from kvtier.types import Fingerprint, PrefixKey, ScopeId
from kvtier_services.worker.l2.advisor import Advisor
from kvtier_services.worker.l2.audit import Audits, AuditTerms
from kvtier_services.worker.l2.heat import HotSet
from kvtier_services.worker.l2.hot_set import HotSets
from kvtier_services.worker.l2.loading import LoadCounts, LoadPorts, Loads
from kvtier_services.worker.l2.port import (
    BlockCache,
    Dropped,
    Fetched,
    Loaded,
    Looked,
    Lookup,
    Outcome,
    Saved,
    Ticket,
)
from kvtier_services.worker.l2.prefetch import PrefetchPorts
from kvtier_services.worker.l2.prefills import Prefills
from kvtier_services.worker.l2.saving import Haste, SaveBook, SaveItem, SaveLimits, block_name
from kvtier_services.worker.l2.tickets import Tickets
from kvtier_services.worker.l2.writing import WritePorts, Writes
from kvtier_services.worker.scheduler import LoadStart, Scheduler
from kvtier_services.worker.sequences import Phase, Request

_LOOKUP_SHARE: Final = 0.25
"""A request waits for a lookup at most this part of what computing everything would take."""
_LOW_WATER: Final = 0.1
"""ON_EVICT: the coldest blocks are written once less than this share of the pool is free."""
_COLDEST: Final = 256
_GATHER_BLOCKS: Final = 16
_ORDER_BLOCKS: Final = 64
_POLL_S: Final = 0.001
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
    prefill_wait_s_max: float = 5.0
    """How long a prefill half waits for its blocks to be written."""
    window_namespaces: tuple[Fingerprint, ...] = ()
    """Of the layer groups after the first."""
    audit: AuditTerms = field(default_factory=AuditTerms)
    """Which of what would be loaded is computed instead, and compared."""


@dataclass(slots=True)
class LookupCounts:
    """Since the start."""

    lookups: int = 0
    lookups_unknown: int = 0
    """Nobody could be asked, or the answer came too late."""


@dataclass(slots=True)
class _Looking:
    request: Request
    start: int
    """First block that was asked for."""
    count: int
    give_up_at: float


class Offload:
    """The tiers below one worker. Not thread-safe; the engine's thread owns it."""

    def __init__(
        self,
        below: BlockCache,
        scheduler: Scheduler,
        blocks: BlockManager,
        transfer: BlockTransfer,
        advisor: Advisor,
        terms: OffloadTerms,
    ) -> None:
        namespaces = (terms.namespace, *terms.window_namespaces)
        pool = transfer.pool
        if len(namespaces) != len(pool.blocks_counts):
            raise CallerError(f"{len(namespaces)} namespaces for {len(pool.blocks_counts)} groups")
        self._below = below
        self._scheduler = scheduler
        self._blocks = blocks
        self._transfer = transfer
        self._advisor = advisor
        self._terms = terms
        self._namespaces = namespaces
        self._block_tokens = pool.geometry.block_tokens
        self._tickets = Tickets()
        self._looking: dict[Ticket, _Looking] = {}
        self._owners: dict[PrefixKey, tuple[ScopeId, int]] = {}
        """ON_EVICT: on whose behalf a resident block was computed, and how dearly it is kept, where
        that is not as with any other."""
        largest = max(pool.geometry.block_bytes(group) for group in range(len(namespaces)))
        in_flight = min(terms.in_flight_bytes_max // largest, min(pool.blocks_counts) // 4)
        order_blocks = min(_ORDER_BLOCKS, max(1, transfer.room() // 2))
        in_flight = max(1, in_flight)
        gather = min(in_flight, order_blocks, _GATHER_BLOCKS)
        self.saves = SaveBook(SaveLimits(in_flight, order_blocks, gather_blocks=gather))
        writing = WritePorts(below, transfer, blocks, self.saves, self._tickets, namespaces)
        self._writes = Writes(writing, order_blocks)
        self.audits = Audits(writing, terms.audit, terms.load_s_max)
        ports = LoadPorts(
            below, transfer, scheduler, advisor, self.saves, self._tickets, namespaces
        )
        self._loads = Loads(ports, terms.load_s_max)
        self.prefills = Prefills(
            self.saves, len(namespaces), self._block_tokens, terms.prefill_wait_s_max
        )
        self.hot = HotSets(
            PrefetchPorts(below, blocks, self.saves, self._tickets, namespaces),
            ports,
            terms.load_s_max,
        )
        self.lookups = LookupCounts()

    @property
    def counts(self) -> LoadCounts:
        """Of loads."""
        return self._loads.counts

    @property
    def is_busy(self) -> bool:
        """Whether outcomes are awaited."""
        own = self._looking or self._loads.is_busy or self._writes.is_busy
        return bool(own) or self.hot.is_busy or self.audits.is_busy

    @property
    def is_restoring(self) -> bool:
        """Whether steps must call `before_layer`."""
        return self._transfer.is_restoring

    def is_writing(self, now: float) -> bool:
        """Whether blocks are being written, or wait for that and not for a store to come back."""
        waits = self.saves.backlog_count > 0 and not self.saves.is_paused(now)
        return self._writes.is_busy or waits or self.hot.is_asking

    def next_deadline(self, now: float) -> float | None:
        """When `tick` or `pump` has something to do, if no outcome comes before."""
        times = [one.give_up_at for one in self._looking.values()] + self._loads.deadlines()
        times += self.hot.deadlines()
        times += self.audits.deadlines(now)
        resume_at = self.saves.next_at(now)
        if resume_at is not None:
            times.append(resume_at)
        times += self.prefills.deadlines()
        if self._writes.is_gathering or self._loads.waits_for_room:
            times.append(now + _POLL_S)
        return min(times, default=None)

    # ---- looking

    def look(self, request: Request, now: float, *, waits: bool) -> None:
        """Ask what the tiers below have of a request beyond L1; `waits`: it is not admitted before.

        Asks nothing where L1 has all of it, or nothing could come of it. Of a prefill half it asks
        for all: what is said to be below must be there now, whatever was written once.
        """
        keys = request.chain.keys[: (len(request.tokens) - 1) // self._block_tokens]
        hit = 0 if request.is_prefill else self._blocks.match(keys)
        count = min(len(keys) - hit, TIER_BATCH_BLOCKS_MAX // len(self._namespaces))
        if count <= 0:
            return
        compute_s = self._advisor.prefill_s(
            count * self._block_tokens, hit * self._block_tokens, now
        )
        wished_s = max(self._terms.lookup_s_min, _LOOKUP_SHARE * compute_s)
        wait_s = min(self._terms.lookup_s_max, wished_s)
        ticket = self._tickets.draw()
        names = tuple(
            name
            for namespace in self._namespaces
            for name in request.chain.names(hit, hit + count, namespace)
        )
        self._looking[ticket] = _Looking(request, hit, count, now + wait_s)
        request.awaits_lookup = waits
        self.lookups.lookups += 1
        self._below.begin(Lookup(ticket, names, wait_s))

    # ---- loading

    def load(self, start: LoadStart, now: float) -> None:
        """Begin a load that the scheduler decided; its blocks are there."""
        self._loads.begin(start, scope_of(start.request), now)

    def before_layer(self, layer: int) -> None:
        """What a step reads or writes of a layer comes after all that is on its way there."""
        self._transfer.before_layer(layer)

    def ending(self, request: Request, now: float) -> None:
        """A request is about to be over: its blocks are still its own."""
        if request.sealed_blocks:
            keys = request.chain.keys[: request.sealed_blocks]
            self.hot.used(keys, scope_of(request), now)

    def ended(self, request: Request) -> None:
        """A request is over: what is being loaded for it concerns nobody any more."""
        self._loads.abandon(request)
        self.audits.ended(request)

    # ---- writing

    def reused(self, request: Request, hit_blocks: int, now: float) -> None:
        """A request began with blocks of L1."""
        if self._terms.write_policy is WritePolicy.ON_REUSE or request.is_prefill:
            self._offer(request, 0, hit_blocks, now)

    def sealed(self, request: Request, start: int, stop: int, now: float) -> None:
        """Blocks start .. stop - 1 of a request were computed and are full."""
        self.audits.sealed(request, start, stop)
        if self._terms.write_policy is WritePolicy.ON_SEAL or request.is_prefill:
            self._offer(request, start, stop, now)
        elif self._terms.write_policy is WritePolicy.ON_EVICT:
            scope = scope_of(request)
            for block in range(start, stop):
                owner = scope, request.priority_of(block, now)
                if owner != _NOBODY:
                    self._owners[request.chain.keys[block]] = owner

    def evicted(self, changes: Sequence[Change], now: float) -> None:
        """Blocks left L1: what waits to be written of them is lost."""
        for change in changes:
            if change.group == 0:
                self._owners.pop(change.key, None)
                self.hot.evicted(change.key, now)
            self.saves.withdraw(block_name(change.group, change.key))

    def pump(self, now: float) -> None:
        """Write what waits, as far as there is room in flight."""
        if self._terms.write_policy is WritePolicy.ON_EVICT:
            self._offer_coldest(now)
        self._writes.begin(self._haste(now), now)

    # ---- outcomes

    def tick(self, now: float) -> None:
        """Take in what has ended, and stop waiting for what is late."""
        self._transfer.settle()
        for outcome in self._below.outcomes():
            self._take(outcome, now)
        for looking in self._looking.values():
            if looking.request.awaits_lookup and now >= looking.give_up_at:
                looking.request.awaits_lookup = False
        self._writes.tick()
        self._loads.tick(now)
        self.hot.tick(now)
        self.audits.tick(now)

    # ---- parts

    def _take(self, outcome: Outcome, now: float) -> None:
        match outcome:
            case Looked() | Loaded() if self.hot.owns(outcome.ticket):
                self.hot.take(outcome, now)
            case Looked():
                self._looked(outcome)
            case Loaded():
                self._loads.take(outcome, now)
            case Saved():
                self._writes.take(outcome, now)
            case Fetched() | Dropped():
                self.audits.take(outcome, now)

    def _looked(self, outcome: Looked) -> None:
        looking = self._looking.pop(outcome.ticket)
        request, start, count = looking.request, looking.start, looking.count
        request.awaits_lookup = False
        if not outcome.is_known:
            self.lookups.lookups_unknown += 1
        if not outcome.sources:
            return
        keys = request.chain.keys[start : start + count]
        below = tuple(
            outcome.sources[group * count : (group + 1) * count]
            for group in range(len(self._namespaces))
        )
        for group, sources in enumerate(below):
            found = zip(keys, sources, strict=True)
            self.saves.know(block_name(group, key) for key, source in found if source is not None)
            if request.is_prefill:
                absent = zip(keys, sources, strict=True)
                self.saves.doubt(block_name(group, key) for key, source in absent if source is None)
        if request.phase is Phase.WAITING and not request.is_audited:
            request.is_audited = self.audits.begin(request, start, below, scope_of(request))
            if not request.is_audited:
                request.below, request.below_from = below, start

    # ---- the hot set

    def offer_hot_set(self, bytes_max: int, now: float) -> None:
        """Have the hottest of L1 written, as far as the store does not hold it."""
        geometry = self._transfer.pool.geometry
        block_bytes = max(geometry.block_bytes(group) for group in range(len(self._namespaces)))
        self.hot.offer(bytes_max // block_bytes, now)

    def prefetch(self, hot: HotSet, share: float, until: float, now: float) -> None:
        """Begin to bring a hot set into at most this share of the pool."""
        most = int(share * self._blocks.usage().blocks_count)
        self.hot.prefetch(hot, most, until, now)

    # ---- parts of saving

    def _offer(self, request: Request, start: int, stop: int, now: float) -> None:
        scope = scope_of(request)
        keys = request.chain.keys
        for group in range(len(self._namespaces)):
            items = [
                SaveItem(keys[i], scope, request.priority_of(i, now), group)
                for i in range(start, stop)
            ]
            self.saves.offer(items, now)

    def _haste(self, now: float) -> Haste:
        """Whether the next step may evict what waits to be written."""
        if not self.saves.backlog_count:
            return Haste.GATHER
        if self.prefills.is_busy:
            return Haste.NOW
        for group in range(len(self._namespaces)):
            usage = self._blocks.usage(group)
            wanted = self._scheduler.blocks_taken_max - usage.free_count
            if wanted <= 0:
                continue
            coldest = self._blocks.coldest(wanted, now, group)
            if len(coldest) < min(wanted, usage.idle_count):
                return Haste.NOW  # the policy does not say what comes after these
            if any(self.saves.is_waiting(block_name(group, key)) for key, _ in coldest):
                return Haste.NOW
        return Haste.GATHER

    def _offer_coldest(self, now: float) -> None:
        for group in range(len(self._namespaces)):
            usage = self._blocks.usage(group)
            if usage.free_count < _LOW_WATER * usage.blocks_count:
                coldest = self._blocks.coldest(_COLDEST, now, group)
                items = [
                    SaveItem(key, *self._owners.get(key, _NOBODY), group) for key, _ in coldest
                ]
                self.saves.offer(items, now)


def scope_of(request: Request) -> ScopeId:
    """On whose behalf blocks of a request are kept: its salt, which is all a worker sees of it."""
    return ScopeId(request.terms.scope_salt or "")

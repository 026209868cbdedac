"""Which requests run next, with how many tokens, and who gives way: continuous batching, sans-I/O.

Decodes come first, oldest first, one token each. What is left of the step's tokens goes to prefills
in chunks, those that run before those that wait. A request that finds the pool full takes the
blocks of a less important one, which is computed again later; it never takes those of a more
important one, so the most important always advances. A request whose next block somebody else is
computing, or loading, waits for that instead of doing it again.

What must not live here: torch, clocks, the tiers below (their answers are told to it), sampling.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from kvtier.core.eviction import RequestShape, Retention, retention_of_blocks
from kvtier.errors import CallerError
from kvtier.paged.blocks import Adoption, BlockManager
from kvtier.paged.group_blocks import BlockId
from kvtier.types import PrefixKey, Source
from kvtier_services.worker.l2.advisor import Intent, PrefixFound, leading
from kvtier_services.worker.l2.port import LoadRun
from kvtier_services.worker.sequences import Ahead, Phase, Request

SCAN_MAX: Final = 64
"""Waiting requests that one step looks at."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Ceilings of one step."""

    sequences_max: int
    """Requests that hold blocks at once."""
    step_tokens_max: int


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What holds for one step."""

    prefill_tokens_max: Callable[[int], int]
    """Tokens of prefill while somebody decodes, after so many tokens of context."""


@dataclass(slots=True)
class _Room:
    """What of a step's tokens is left."""

    tokens: int
    prefill_tokens_max: Callable[[int], int] | None
    """None: nobody decodes, nobody is stalled."""
    share: float = 1.0
    """What is left of the time that prefill may take."""

    def chunk(self, wished: int, context_tokens: int) -> int:
        """How many of the tokens that a prefill wishes fit. Mutates nothing."""
        count = min(wished, self.tokens)
        if count <= 0 or self.prefill_tokens_max is None:
            return max(0, count)
        return min(count, int(self.share * self.prefill_tokens_max(context_tokens)))

    def spend(self, count: int, context_tokens: int) -> None:
        """Take them."""
        self.tokens -= count
        if self.prefill_tokens_max is not None:
            self.share -= count / max(1, self.prefill_tokens_max(context_tokens))


@dataclass(frozen=True, slots=True)
class Part:
    """One request's part of a step: tokens [start, stop) are computed."""

    request: Request
    start: int
    stop: int

    @property
    def tokens_count(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the next token follows from it."""
        return self.stop == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class LoadStart:
    """Blocks of an admitted request that are to be filled from below."""

    request: Request
    first_block: int
    blocks_count: int
    """Blocks of the sequence that it brings on by; windows need fewer of their own."""
    runs: tuple[LoadRun, ...]
    entries: tuple[tuple[int, int, BlockId], ...]
    """(group, number of the block in the sequence, block), as the runs have them."""


@dataclass(slots=True)
class Plan:
    """What to do now."""

    parts: list[Part] = field(default_factory=list)
    loads: list[LoadStart] = field(default_factory=list)
    reused: list[tuple[Request, int]] = field(default_factory=list)
    """Requests that were admitted, with how many blocks of L1 they began."""
    preempted: list[Request] = field(default_factory=list)
    """Requests that gave way; they wait again."""

    @property
    def decodes_count(self) -> int:
        return sum(part.request.is_decoding for part in self.parts)

    @property
    def prefill_tokens(self) -> int:
        return sum(p.tokens_count for p in self.parts if not p.request.is_decoding)


class Decider(Protocol):
    """Compute or load."""

    def intend(self, found: PrefixFound, now: float) -> Intent:
        """What to load."""
        ...


@dataclass(slots=True)
class SchedulerCounts:
    """Since the start."""

    preempted: int = 0
    held_back: int = 0
    """Steps in which a request waited for another that was at the same block."""
    starved: int = 0
    """Parts that found no block and nobody to take one from."""
    recomputed_by_choice: int = 0
    """Blocks that the tiers below have, and that were expected to be computed as fast."""


class Scheduler:
    """Queues of one worker. Not thread-safe."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, decider: Decider) -> None:
        self._limits = limits
        self._blocks = blocks
        self._decider = decider
        self._block_tokens = blocks.geometry.block_tokens
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loading: dict[int, Request] = {}
        self._coming: dict[bytes, int] = {}
        """Keys of blocks that are being computed or loaded, and by whom."""
        self._generation = 0
        self._gave_way: list[Request] = []
        self.counts = SchedulerCounts()

    # ---- looking

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def loading_count(self) -> int:
        return len(self._loading)

    @property
    def is_idle(self) -> bool:
        """Whether no step could do anything now: at most loads are awaited."""
        return not self._waiting and not self._running

    def running(self) -> Iterator[Request]:
        """Requests that take part in steps, most important first."""
        return iter(self._running)

    def waiting(self) -> Iterator[Request]:
        """Requests that hold nothing, in the order in which they will be admitted."""
        return iter(self._waiting)

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request that holds nothing. O(waiting)."""
        request.phase = Phase.WAITING
        at = len(self._waiting)
        while at and self._waiting[at - 1].rank > request.rank:
            at -= 1
        self._waiting.insert(at, request)

    def end(self, request: Request, now: float) -> None:
        """Take a request out, whatever it does; its blocks are free, unless they are being loaded.

        Those of a load are released by `loaded`.
        """
        match request.phase:
            case Phase.WAITING:
                self._waiting.remove(request)
            case Phase.RUNNING:
                self._running.remove(request)
                if request.is_loading:
                    self._forget_coming(request)
                else:
                    self._release(request, now)
            case Phase.LOADING:
                del self._loading[request.number]
                self._forget_coming(request)
            case Phase.ENDED:
                pass
        request.phase = Phase.ENDED

    def give_up_load(self, request: Request) -> str:
        """Do not wait any longer: the request is queued and computes what it would have loaded.

        Returns the name under which the blocks of the load are still held; `abandoned_ended`
        releases them once nobody writes there.
        """
        holder = request.holder
        if request.phase is Phase.LOADING:
            del self._loading[request.number]
        else:
            self._running.remove(request)
        self._forget_coming(request)
        request.computed = request.sealed_blocks = 0
        request.ahead = None
        request.below = ()
        request.was_admitted = False
        self.add(request)
        return holder

    def abandoned_ended(self, start: LoadStart, holder: str, blocks_count: int, now: float) -> None:
        """The load of a request that went on without it, or ended, is over: what came is cached.

        Unless the request never came to where the load begins: then nothing ties it to the chain.
        """
        tokens = self._blocks.computed_tokens(holder)
        if tokens == start.first_block * self._block_tokens:
            tokens += blocks_count * self._block_tokens
            self._blocks.seal(holder, tokens, start.request.chain.keys, now)
        self._blocks.release(holder, now)

    def loaded(self, start: LoadStart, blocks_count: int, now: float) -> None:
        """So many blocks of a load arrived, from the first on; the request runs, or goes on."""
        request = start.request
        if request.phase is Phase.LOADING:
            del self._loading[request.number]
            self._forget_coming(request)
            request.ahead = Ahead(start.first_block, blocks_count, start.runs)
            self._meet(request, now)
            self._run(request)
            return
        request.ahead = Ahead(start.first_block, blocks_count, start.runs)
        self._meet(request, now)

    @property
    def blocks_taken_max(self) -> int:
        """Blocks that the next plan may take, of each group, at most."""
        waiting = sum(len(r.below[0]) for r in islice(self._waiting, SCAN_MAX) if r.below)
        step = self._blocks_of(self._limits.step_tokens_max) + self._limits.sequences_max
        return step + waiting

    # ---- steps

    def plan(self, terms: StepTerms, now: float) -> Plan:
        """Decide the next step, and take the blocks that it needs. Mutates."""
        plan = Plan()
        parts: dict[int, Part] = {}
        room = _Room(self._limits.step_tokens_max, None)
        for request in [r for r in self._running if r.is_decoding]:
            if room.tokens and self._grow(request, len(request.tokens), parts, now):
                parts[request.number] = Part(request, request.computed, len(request.tokens))
                room.tokens -= 1
        if parts:
            room.prefill_tokens_max = terms.prefill_tokens_max
        for request in [r for r in self._running if not r.is_decoding]:
            self._chunk(request, room, parts, now)
        self._admit_waiting(room, plan, parts, now)
        plan.parts = list(parts.values())
        plan.preempted, self._gave_way = self._gave_way, []
        return plan

    def computed(self, part: Part, now: float) -> None:
        """A part of the last plan was computed: its full blocks are sealed. Mutates."""
        request = part.request
        request.computed = part.stop
        request.computed_tokens += part.tokens_count
        self._seal(request, now)
        self._meet(request, now)

    # ---- parts

    def _chunk(self, request: Request, room: _Room, parts: dict[int, Part], now: float) -> None:
        """Give a prefill its chunk, where there is room for one, and up to what is being loaded."""
        wished = request.uncomputed
        if request.ahead is not None:
            wished = request.ahead.first_block * self._block_tokens - request.computed
        count = room.chunk(wished, request.computed)
        if count <= 0 or request.phase is not Phase.RUNNING:
            return
        stop = request.computed + count
        if self._grow(request, stop, parts, now):
            parts[request.number] = Part(request, request.computed, stop)
            room.spend(count, request.computed)

    def _grow(self, request: Request, tokens: int, parts: dict[int, Part], now: float) -> bool:
        """Get blocks for `tokens` tokens, from less important requests if need be."""
        if request.phase is not Phase.RUNNING:
            return False  # it gave way a moment ago
        while (growth := self._blocks.grow(request.holder, tokens, now)) is None:
            # Nobody may take blocks that are being written from below.
            victims = (one for one in reversed(self._running) if not one.is_loading)
            victim = next(victims, request)
            if victim.rank <= request.rank:
                self.counts.starved += 1
                return False
            self._preempt(victim, now)
            parts.pop(victim.number, None)
        if growth.copies:
            raise CallerError("a sequence that was never forked shares a block that it writes")
        return True

    def _preempt(self, request: Request, now: float) -> None:
        self._running.remove(request)
        self._release(request, now)
        request.preemptions += 1
        self.counts.preempted += 1
        self._gave_way.append(request)
        self.add(request)

    def _release(self, request: Request, now: float) -> None:
        self._forget_coming(request)
        self._blocks.release(request.holder, now)
        request.computed = request.sealed_blocks = 0
        request.ahead = None

    def _admit_waiting(self, room: _Room, plan: Plan, parts: dict[int, Part], now: float) -> None:
        seats = self._limits.sequences_max - len(self._running) - len(self._loading)
        for request in list(islice(self._waiting, SCAN_MAX)):
            if seats <= 0 or room.chunk(1, 0) <= 0:
                return
            if request.awaits_lookup:
                continue
            keys = self._reusable(request)
            hit = self._blocks.match(keys)
            if hit < len(keys) and self._coming.get(keys[hit], request.number) != request.number:
                self.counts.held_back += 1
                continue
            if not self._fits(request, hit):
                return
            self._waiting.remove(request)
            seats -= 1
            self._admit(request, keys, plan, now)
            if request.phase is Phase.RUNNING:
                self._chunk(request, room, parts, now)

    def _fits(self, request: Request, hit: int) -> bool:
        """Whether the whole of it would fit now, beside what the running ones still prefill.

        Hits that nobody else uses count as if they had to be taken: they are part of what is
        available now. When nothing else holds blocks it fits, or it would have been refused.
        """
        if not self._running and not self._loading:
            return True
        usage = self._blocks.usage()
        available = usage.free_count + usage.idle_count
        promised = sum(self._blocks_of(r.uncomputed) for r in self._running)
        return available >= self._blocks_of(len(request.tokens) + 1) - hit + promised

    def _admit(self, request: Request, keys: list[PrefixKey], plan: Plan, now: float) -> None:
        self._generation += 1
        request.holder = f"{request.number}.{self._generation}"
        request.worth = self._worth(request, now)
        computed = self._blocks.admit(request.holder, keys, now, request.worth)
        hit = computed // self._block_tokens
        request.computed, request.sealed_blocks = computed, hit
        plan.reused.append((request, hit))
        if not request.was_admitted:
            request.cached = {Source.GPU: computed} if computed else {}
            request.was_admitted = True
        self._announce_coming(request, hit)
        start = self._load_start(request, hit, len(keys), now)
        if start is None:
            self._run(request)
            return
        plan.loads.append(start)
        if start.first_block > hit:
            request.ahead = Ahead(start.first_block, None, start.runs)
            self._run(request)
            return
        request.phase = Phase.LOADING
        self._loading[request.number] = request

    def _load_start(
        self, request: Request, hit: int, keys_count: int, now: float
    ) -> LoadStart | None:
        """Decide what to load of what the lookup found, and take the blocks for it."""
        below, since = request.below, hit - request.below_from
        request.below = ()
        if since < 0 or not any(group[since:] for group in below):
            return None
        found = PrefixFound(len(request.tokens), hit, tuple(group[since:] for group in below))
        intent = self._decider.intend(found, now)
        held = min(leading(found.below[0]), keys_count - hit)
        self.counts.recomputed_by_choice += max(0, held - intent.blocks_count)
        if not intent.runs:
            return None
        total = intent.head_blocks + intent.blocks_count
        adoption = self._blocks.adopt(request.holder, total, now)
        if adoption is None:
            return None
        first = hit + intent.head_blocks
        entries = _entries(adoption, first)
        return LoadStart(request, first, intent.blocks_count, intent.runs, entries)

    def _meet(self, request: Request, now: float) -> None:
        """A request that came to the first block of a load that is over goes on behind it."""
        ahead = request.ahead
        if ahead is None or ahead.arrived_blocks is None:
            return
        if request.computed < ahead.first_block * self._block_tokens:
            return
        request.ahead = None
        if not request.preemptions:
            for source, count in _by_source(ahead.runs, ahead.arrived_blocks):
                tokens = count * self._block_tokens
                request.cached[source] = request.cached.get(source, 0) + tokens
        request.computed += ahead.arrived_blocks * self._block_tokens
        self._seal(request, now)

    def _run(self, request: Request) -> None:
        request.phase = Phase.RUNNING
        self._announce_coming(request, request.sealed_blocks)
        at = len(self._running)
        while at and self._running[at - 1].rank > request.rank:
            at -= 1
        self._running.insert(at, request)

    def _seal(self, request: Request, now: float) -> None:
        """Tell the block manager what is computed."""
        full = request.computed // self._block_tokens
        before, request.sealed_blocks = request.sealed_blocks, full
        self._blocks.seal(request.holder, request.computed, request.chain.keys, now)
        for key in request.chain.keys[before:full]:
            if self._coming.get(key) == request.number:
                del self._coming[key]

    def _reusable(self, request: Request) -> list[PrefixKey]:
        """Keys of blocks that may come from a cache: not that of the last token."""
        if request.is_audited:
            return []
        return request.chain.keys[: (len(request.tokens) - 1) // self._block_tokens]

    def _announce_coming(self, request: Request, start: int) -> None:
        for key in request.chain.keys[start:]:
            self._coming.setdefault(key, request.number)

    def _forget_coming(self, request: Request) -> None:
        for key in request.chain.keys[request.sealed_blocks :]:
            if self._coming.get(key) == request.number:
                del self._coming[key]

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _worth(self, request: Request, now: float) -> Sequence[Retention]:
        plan = request.terms.retention
        if plan is None:
            return ()
        total = request.prompt_count + request.terms.tokens_max
        return retention_of_blocks(
            plan, RequestShape(request.prompt_count, total, self._block_tokens), now
        )


def _entries(adoption: Adoption, first: int) -> tuple[tuple[int, int, BlockId], ...]:
    """(group, place, block) of all that is to be filled, from a block of the sequence on."""
    return tuple(
        (group, place, block)
        for group, blocks in enumerate(adoption.blocks)
        for place, block in blocks
        if place >= first
    )


def _by_source(runs: Sequence[LoadRun], blocks_count: int) -> Iterator[tuple[Source, int]]:
    """How many of the first `blocks_count` blocks each run stands for.

    Those that only a window spared are counted with the last run.
    """
    runs = [run for run in runs if run.group == 0]
    spared = blocks_count - sum(run.blocks_count for run in runs)
    if runs and spared > 0:
        yield runs[-1].source, spared
    for run in runs:
        count = min(run.blocks_count, blocks_count)
        if count:
            yield run.source, count
        blocks_count -= count

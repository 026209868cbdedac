"""`EngineCore`: one step after another, on whatever thread calls it; no thread, no loop, no queue.

    tick      what the tiers below have done; who is late
    plan      which requests run (scheduler)
    run       the model, sampling, sealing
    tell      tokens to the endpoint, events to the index, blocks to the tiers below

What must not live here: threads, HTTP, the choice of a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from kvtier.core.costs import Priors
from kvtier.core.event_columns import NO_PARENT, Hashes
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import HASH_BYTES
from kvtier.core.workers import Load
from kvtier.errors import CallerError
from kvtier.paged.blocks import BlockManager, Usage
from kvtier.paged.group_blocks import Change, ChangeKind
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Logits, ModelRunner, Slice
from kvtier.paged.sampling import Draw, Sampled, sample
from kvtier.paged.transfer import BlockTransfer
from kvtier.types import PrefixKey, Tier
from kvtier_services.worker.l2.advisor import Advisor
from kvtier_services.worker.l2.heat import HotSet
from kvtier_services.worker.l2.port import BlockCache
from kvtier_services.worker.l2.prefetch import PrefetchCounts
from kvtier_services.worker.l2.windowed import GroupShape
from kvtier_services.worker.offload import Offload, OffloadTerms
from kvtier_services.worker.pace import Pace, PacePolicy, StepRecord
from kvtier_services.worker.requests import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    TokenDelta,
)
from kvtier_services.worker.scheduler import (
    Part,
    Plan,
    Scheduler,
    SchedulerLimits,
    StepTerms,
)
from kvtier_services.worker.sequences import KeyChain, Request

_CALIBRATION_TOKENS: Final = 256
_STAGING_BYTES: Final = 256 << 20
"""Host memory for blocks on their way, where the pool is not in it."""


class Events(Protocol):
    """Who is told what L1 holds and what the worker does. Calls return within microseconds."""

    def store(self, tier: Tier, parent: int, hashes: Hashes) -> None:
        """Blocks of one chain appeared."""
        ...

    def remove(self, tier: Tier, hashes: Hashes) -> None:
        """Blocks are gone."""
        ...

    def set_load(self, load: Load) -> None:
        """What the worker does now."""
        ...


@dataclass(frozen=True, slots=True)
class Machine:
    """A model with the memory that it works in."""

    runner: ModelRunner
    pool: KvPool
    blocks: BlockManager


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers below and how they are used."""

    cache: BlockCache
    terms: OffloadTerms
    transfer: BlockTransfer | None = None
    """How blocks get to host memory and back; None: as the pool's device needs it."""


@dataclass(frozen=True, slots=True)
class CoreTerms:
    """See `BatchSection`."""

    limits: SchedulerLimits
    pace: PacePolicy = field(default_factory=PacePolicy)
    priors: Priors = field(default_factory=Priors)
    """What is believed of speeds before anything was measured."""


@dataclass(slots=True)
class CoreCounts:
    """Since the start."""

    steps: int = 0
    step_seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that steps computed, prompts and generated, again after preemptions."""
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delta, and whose it is."""

    number: int
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until an outcome of the tiers below, a request, or this time."""

    until: float | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """What a step brought, for whoever waits for it."""

    deliveries: tuple[Delivery, ...]
    idle: Idle | None
    """Given where no step was run."""
    seconds: float = 0.0
    decodes_count: int = 0
    prefill_tokens: int = 0


class EngineCore:
    """All of a worker but its threads. Not thread-safe."""

    def __init__(
        self,
        machine: Machine,
        terms: CoreTerms,
        events: Events | None,
        below: Below | None,
        clock: Callable[[], float],
    ) -> None:
        geometry = machine.runner.geometry
        self._runner = machine.runner
        self._pool = machine.pool
        self._blocks = machine.blocks
        self._events = events
        self._clock = clock
        self._identity = Pool(
            machine.runner.model_id, machine.runner.revision, geometry.block_tokens
        )
        self._eos = frozenset(machine.runner.eos_token_ids)
        shapes = [
            GroupShape(geometry.block_bytes(number), group.window)
            for number, group in enumerate(geometry.groups)
        ]
        self.advisor = Advisor(geometry.block_tokens, shapes, priors=terms.priors)
        self.scheduler = Scheduler(terms.limits, machine.blocks, self.advisor)
        self.pace = Pace(terms.pace, self.advisor)
        self.offload: Offload | None = None
        if below is not None:
            self.offload = Offload(
                below.cache,
                self.scheduler,
                machine.blocks,
                below.transfer or BlockTransfer(machine.pool, _slots(machine.pool)),
                self.advisor,
                below.terms,
            )
        self._requests: dict[int, Request] = {}
        self._numbers = 0
        self.counts = CoreCounts()
        self.wasted_tokens = 0
        """Places in blocks of requests that held nothing when `load` was asked last."""

    def calibrate(self) -> None:
        """Measure prefill and decode before the first request, in blocks that nobody has yet."""
        block_tokens = self._identity.block_tokens
        most = min(_CALIBRATION_TOKENS, self.context_tokens - 1)
        most = min(most, min(self._pool.blocks_counts) * block_tokens)
        table = list(range(-(-most // block_tokens)))
        tables = [table] * len(self._pool.blocks_counts)
        # The first run of a model prepares itself, and is not measured.
        for tokens_count, is_measured in ((most // 2, False), (most, True), (1, True), (1, True)):
            if not tokens_count:
                continue
            tokens = [i % self._runner.vocab_size for i in range(tokens_count)]
            began = self._clock()
            self._runner.step(self._pool, [Slice(tokens, 0, tables)]).tolist()
            now = self._clock()
            if is_measured:
                prefill = tokens_count if tokens_count > 1 else 0
                self.pace.learn(StepRecord(int(not prefill), prefill, 0, now - began), now)

    # ---- requests

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence that fits the model and the pool by itself."""
        geometry = self._runner.geometry
        if geometry.groups[0].window is not None:
            return self._runner.context_tokens
        pool_tokens = self._pool.blocks_counts[0] * geometry.block_tokens
        return min(self._runner.context_tokens, pool_tokens)

    @property
    def vocab_size(self) -> int:
        """Token ids lie below this."""
        return self._runner.vocab_size

    @property
    def requests_count(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def is_writing(self) -> bool:
        """Whether blocks are being written to the tiers below, or wait for that with hope."""
        return self.offload is not None and self.offload.is_writing(self._clock())

    @property
    def is_prefetching(self) -> bool:
        """Whether a hot set is on its way into L1."""
        return self.offload is not None and self.offload.hot.is_prefetching

    @property
    def prefetched(self) -> PrefetchCounts:
        """What came of the prefetch; all 0 where there was none."""
        return PrefetchCounts() if self.offload is None else self.offload.hot.prefetched

    def prefetch(self, hot: HotSet, share: float, until: float) -> None:
        """Begin to bring a hot set into at most a share of the pool; nothing is begun after
        `until`. Steps carry it on. Mutates; nothing without tiers below."""
        if self.offload is not None:
            self.offload.prefetch(hot, share, until, self._clock())

    def offer_hot_set(self, bytes_max: int) -> None:
        """Have what is used most written to the store, as far as it is not there. Mutates."""
        if self.offload is not None:
            now = self._clock()
            for request in self._requests.values():
                self.offload.ending(request, now)
            self.offload.offer_hot_set(bytes_max, now)

    def hot_set(self) -> HotSet:
        """What is used most and the store is known to have. Mutates nothing."""
        return () if self.offload is None else self.offload.hot.held(self._clock())

    def check(self, terms: GenerationRequest) -> None:
        """CallerError for a request that can never run here. Thread-safe; mutates nothing."""
        vocab = self._runner.vocab_size
        if max(terms.prompt_tokens) >= vocab:
            raise CallerError(f"the prompt has token ids beyond the vocabulary of {vocab}")
        if len(terms.prompt_tokens) >= self.context_tokens:
            raise CallerError(
                f"the prompt has {len(terms.prompt_tokens)} tokens, and with one more it does not "
                f"fit {self.context_tokens}"
            )
        if any(token >= vocab for token, _ in terms.sampling.logit_bias):
            raise CallerError(f"logit_bias names a token beyond the vocabulary of {vocab}")

    def submit(self, terms: GenerationRequest) -> int:
        """Take a request that was checked; returns its number. Mutates."""
        self._numbers += 1
        root = chain_root(self._identity, terms.scope_salt, None)
        chain = KeyChain(root, self._identity.block_tokens)
        request = Request(self._numbers, terms, chain, list(terms.prompt_tokens))
        chain.extend(request.tokens)
        self._requests[request.number] = request
        self.counts.requests += 1
        self.counts.prompt_tokens += len(terms.prompt_tokens)
        self.scheduler.add(request)
        if self.offload is not None:
            if request.is_prefill:
                self.offload.prefills.begin(request)
            self.offload.look(request, self._clock(), waits=True)
        return request.number

    def cancel(self, number: int) -> None:
        """End a request: what it holds is free now, or when its load has ended. Idempotent."""
        request = self._requests.get(number)
        if self.offload is not None:
            self.offload.prefills.cancel(number)
        if request is not None:
            self.counts.cancelled += 1
            self._end(request)

    def request(self, number: int) -> Request:
        """A request that has not ended, to look at. KeyError for others."""
        return self._requests[number]

    # ---- steps

    def step(self) -> StepDone:
        """Do what can be done now, at most one run of the model. Mutates."""
        now = self._clock()
        if self.offload is not None:
            self.offload.tick(now)
        plan = self.scheduler.plan(
            StepTerms(lambda context: self.pace.prefill_tokens_max(context, now)), now
        )
        self._tell_changes()
        self._begin(plan, now)
        if not plan.parts:
            self._after(now)
            return StepDone(tuple(self._settled()), Idle(self._wake_at(now)))
        record, deliveries = self._run(plan)
        self._tell_changes()
        self._after(self._clock())
        deliveries += self._settled()
        return StepDone(
            tuple(deliveries), None, record.seconds, record.decodes_count, record.prefill_tokens
        )

    def usage(self) -> Usage:
        """How the blocks of the pool are used now."""
        return self._blocks.usage()

    def load(self) -> Load:
        """What this worker does now."""
        self.wasted_tokens = self._blocks.unfilled_tokens()
        running = list(self.scheduler.running())
        waiting = list(self.scheduler.waiting())
        usage = self._blocks.usage()
        token_s = self.advisor.prefill_s(1024, 0, self._clock()) / 1024
        queued = sum(r.uncomputed for r in waiting)
        queued += sum(r.uncomputed for r in running if not r.is_decoding)
        return Load(
            running_requests=len(running),
            waiting_requests=len(waiting) + self.scheduler.loading_count,
            queued_prefill_tokens=queued,
            running_tokens=sum(len(r.tokens) for r in running),
            free_blocks=usage.free_count + usage.idle_count,
            total_blocks=usage.blocks_count,
            prefill_tokens_per_s=1.0 / token_s,
        )

    # ---- parts

    def _wake_at(self, now: float) -> float | None:
        return None if self.offload is None else self.offload.next_deadline(now)

    def _begin(self, plan: Plan, now: float) -> None:
        """What a plan brings for the tiers below."""
        if self.offload is None:
            return
        for start in plan.loads:
            self.offload.load(start, now)
        for request, hit_blocks in plan.reused:
            self.offload.reused(request, hit_blocks, now)
        for request in plan.preempted:
            self.offload.look(request, now, waits=False)

    def _after(self, now: float) -> None:
        if self.offload is not None:
            self.offload.pump(now)

    def _run(self, plan: Plan) -> tuple[StepRecord, list[Delivery]]:
        began = self._clock()
        decodes, prefill = plan.decodes_count, plan.prefill_tokens
        contexts = [part.start for part in plan.parts if not part.request.is_decoding]
        slices = [self._slice(part) for part in plan.parts]
        before_layer = None
        if self.offload is not None and self.offload.is_restoring:
            before_layer = self.offload.before_layer
        logits = self._runner.step(self._pool, slices, before_layer)
        last = [part for part in plan.parts if part.is_last]
        sampled = sample(logits, [_draw(part.request) for part in last])
        now = self._clock()
        for part in plan.parts:
            self._computed(part, now)
        taken = [self._take(part.request, token) for part, token in zip(last, sampled, strict=True)]
        deliveries = [delivery for delivery in taken if delivery is not None]
        seconds = now - began
        context = sum(contexts) // len(contexts) if contexts else 0
        record = StepRecord(decodes, prefill, context, seconds)
        self.pace.learn(record, now)
        self.counts.steps += 1
        self.counts.step_seconds += seconds
        return record, deliveries

    def _slice(self, part: Part) -> Slice:
        request = part.request
        return Slice(
            request.tokens[part.start : part.stop],
            part.start,
            self._blocks.tables(request.holder),
            Logits.LAST if part.is_last else Logits.NONE,
        )

    def _computed(self, part: Part, now: float) -> None:
        request = part.request
        before = request.sealed_blocks
        self.scheduler.computed(part, now)
        self.counts.computed_tokens += part.tokens_count
        if self.offload is not None and request.sealed_blocks > before:
            self.offload.sealed(request, before, request.sealed_blocks, now)

    def _take(self, request: Request, token: Sampled) -> Delivery | None:
        """Give a request its next token, and end it where that was the last; None for a prefill
        half, which is told when its blocks are below."""
        request.append(token.token_id)
        self.counts.generated_tokens += 1
        now = self._clock()
        finish = self._finish(request, token.token_id)
        cached = None
        if not request.cached_told:
            request.cached_told = True
            cached = request.cached_tokens()
        generated = GeneratedToken(token.token_id, token.logprob, token.top)
        if finish is not None:
            self.counts.finished += 1
            self._end(request)
        delta = TokenDelta((generated,), finish, cached)
        if finish is not None and request.is_prefill and self.offload is not None:
            self.offload.prefills.computed(request, delta, now)
            return None
        return Delivery(request.number, delta)

    def _settled(self) -> list[Delivery]:
        """Prefill halves whose blocks are below, as far as they will be."""
        if self.offload is None:
            return []
        return [Delivery(*told) for told in self.offload.prefills.take(self._clock())]

    def _finish(self, request: Request, token_id: int) -> FinishReason | None:
        terms = request.terms
        if token_id in terms.stop_token_ids:
            return FinishReason.STOP
        if token_id in self._eos and not terms.ignore_eos:
            return FinishReason.STOP
        count = len(request.tokens) - request.prompt_count
        if count >= terms.tokens_max or len(request.tokens) >= self.context_tokens:
            return FinishReason.LENGTH
        return None

    def _end(self, request: Request) -> None:
        now = self._clock()
        if self.offload is not None:
            self.offload.ending(request, now)
        self.scheduler.end(request, now)
        if self.offload is not None:
            self.offload.ended(request)
        del self._requests[request.number]

    def _tell_changes(self) -> None:
        """Pass on what L1 stored and evicted, in order, as few events as may be."""
        changes = self._blocks.drain_changes()
        if not changes:
            return
        evicted = [change for change in changes if change.kind is ChangeKind.EVICTED]
        if evicted and self.offload is not None:
            self.offload.evicted(evicted, self._clock())
        if self._events is not None:
            tell(self._events, changes)


def tell(events: Events, changes: Sequence[Change]) -> None:
    """Publish changes of group 0, which a prefix needs whole; one event a run of a chain."""
    run: list[PrefixKey] = []
    kind, parent = ChangeKind.STORED, NO_PARENT

    def flush() -> None:
        if run and kind is ChangeKind.STORED:
            events.store(Tier.GPU, parent, _hashes(run))
        elif run:
            events.remove(Tier.GPU, _hashes(run))
        run.clear()

    for change in changes:
        if change.group:
            continue
        continues = change.kind is kind and (
            kind is ChangeKind.EVICTED or (bool(run) and change.parent == run[-1])
        )
        if not continues:
            flush()
            kind = change.kind
            parent = NO_PARENT if change.parent is None else _hash(change.parent)
        run.append(change.key)
    flush()


def _slots(pool: KvPool) -> int:
    """Blocks of each group that are on their way at once."""
    geometry = pool.geometry
    size = sum(geometry.block_bytes(group) for group in range(len(geometry.groups)))
    return max(2, min(max(pool.blocks_counts), _STAGING_BYTES // size))


def _draw(request: Request) -> Draw:
    terms = request.terms
    return Draw(terms.sampling, request.generated, terms.logprobs_count)


def _hash(key: PrefixKey) -> int:
    return int.from_bytes(key[:HASH_BYTES], "little")


def _hashes(keys: Sequence[PrefixKey]) -> Hashes:
    packed = b"".join(key[:HASH_BYTES] for key in keys)
    return np.frombuffer(packed, "<u8").astype(np.uint64)

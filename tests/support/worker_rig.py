"""An engine core that a test drives step by step, over the fake model and a scripted tier below.

Time stands still unless the test moves it; the tier below answers when the script says so.
What must not live here: what a test expects.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from kvtier.core.costs import Priors
from kvtier.core.event_columns import Hashes
from kvtier.core.eviction import PriorityPolicy
from kvtier.core.frame import FrameName
from kvtier.core.identity import KvDtype
from kvtier.core.planner import WritePolicy
from kvtier.core.workers import Load as WorkerLoad
from kvtier.paged.blocks import BlockManager, PolicyFactory
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import KvGeometry, LayerGroup
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import BeforeLayer, ModelRunner, Slice
from kvtier.paged.sampling import SamplingTerms
from kvtier.paged.transfer import BlockTransfer, Carrier
from kvtier.types import Source, Tier
from kvtier_services.worker.core import Below, CoreTerms, EngineCore, Machine
from kvtier_services.worker.l2.audit import AuditTerms
from kvtier_services.worker.l2.port import (
    Drop,
    Dropped,
    Fetch,
    Fetched,
    Load,
    Loaded,
    Looked,
    Lookup,
    Order,
    Outcome,
    RunOutcome,
    Save,
    Saved,
)
from kvtier_services.worker.offload import OffloadTerms
from kvtier_services.worker.pace import PacePolicy
from kvtier_services.worker.requests import (
    CachedTokens,
    FinishReason,
    GenerationRequest,
    Stored,
)
from kvtier_services.worker.scheduler import SchedulerLimits

WRITER = 0xABC
"""Of all blocks below."""
GREEDY = SamplingTerms(temperature=0.0)
BLOCK_TOKENS = 4


FULL = (LayerGroup((0, 1)),)
MIXED = (LayerGroup((1,)), LayerGroup((0, 2), 6))
"""One layer that sees everything, two that look back 6 tokens."""
WINDOWED = (LayerGroup((0,), 5), LayerGroup((1,), 9))


def small_fake(
    seed: int = 0,
    prefill_tokens_per_s: float | None = None,
    groups: tuple[LayerGroup, ...] = FULL,
) -> FakeModel:
    """A fake model whose blocks are a few hundred bytes, each of which counts."""
    layers_count = sum(len(group.layers) for group in groups)
    geometry = KvGeometry(layers_count, 1, 4, KvDtype.FLOAT32, BLOCK_TOKENS, groups)
    return FakeModel(
        geometry,
        FakeTerms(context_tokens=4096, seed=seed, prefill_tokens_per_s=prefill_tokens_per_s),
    )


def machine_of(runner: ModelRunner, blocks: int) -> Machine:
    """A runner with a pool of so many blocks a group."""
    geometry = runner.geometry
    pool = KvPool(geometry, [blocks] * len(geometry.groups))
    return Machine(runner, pool, BlockManager(geometry, pool.blocks_counts))


class LazyCarrier:
    """A `Carrier` that does its work as late as it may: when somebody waits for it, or by the way.

    So bytes that are read before they were waited for are wrong, every time.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._work: deque[Callable[[], None]] = deque()
        self._begun = 0
        self.ended = 0
        self.waited = 0
        """How often somebody waited for what was not there."""

    def carry(self, work: Callable[[], None]) -> "LazyArrival":
        self._work.append(work)
        self._begun += 1
        return LazyArrival(self, self._begun)

    def is_done(self, number: int) -> bool:
        if self._work and self._dice.random() < 0.3:
            self._next()
        return self.ended >= number

    def finish(self, number: int) -> None:
        self.waited += self.ended < number
        while self.ended < number:
            self._next()

    def _next(self) -> None:
        self._work.popleft()()
        self.ended += 1


@dataclass(frozen=True)
class LazyArrival:
    """See `Arrival`."""

    carrier: LazyCarrier
    number: int

    @property
    def done(self) -> bool:
        return self.carrier.is_done(self.number)

    def wait(self) -> None:
        self.carrier.finish(self.number)

    def join(self) -> None:
        self.carrier.finish(self.number)


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Script:
    """How the tier below behaves; odds are of each order."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    late_max: int = 0
    """Outcomes come after up to so many looks."""
    fails: float = 0.0
    """Odds that an order fails whole."""
    loses: float = 0.0
    """Odds that a block is found by a lookup and does not arrive."""
    block_s: float = 0.0
    """What loads say that a block took."""
    scribbles: bool = True
    """Memory of blocks that do not arrive is overwritten."""


class TierBelow:
    """`BlockCache` in a dict. Loads copy only when their outcome is due, as late as can be."""

    def __init__(self, script: Script | None = None, source: Source = Source.DRAM) -> None:
        self.script = script or Script()
        self.held: dict[FrameName, bytes] = {}
        self.source = source
        self.orders: list[Order] = []
        self._due: deque[tuple[int, Order]] = deque()
        self.loaded: list[tuple[FrameName, bytes]] = []
        self.is_frozen = False
        """Nothing ends any more."""

    def begin(self, order: Order) -> None:
        self.orders.append(order)
        self._due.append((self.script.dice.randint(0, self.script.late_max), order))

    def outcomes(self) -> Sequence[Outcome]:
        if self.is_frozen:
            return []
        waiting = list(self._due)
        self._due.clear()
        ended = []
        for looks, order in waiting:
            if looks > 0:
                self._due.append((looks - 1, order))
            else:
                ended.append(self._end(order))
        return ended

    @property
    def is_quiet(self) -> bool:
        return not self._due

    def _end(self, order: Order) -> Outcome:
        fails = self.script.dice.random() < self.script.fails
        match order:
            case Lookup():
                found = (self.source if name in self.held else None for name in order.names)
                return Looked(order.ticket, () if fails else tuple(found), is_known=not fails)
            case Load():
                return self._load(order, fails)
            case Save():
                if not fails:
                    for name, payload in zip(order.names, order.payloads, strict=True):
                        self.held.setdefault(name, bytes(payload))
                blocks = len(order.names)
                word = "error" if fails else "stored"
                return Saved(order.ticket, (not fails,) * blocks, (word,) * blocks, 0.001)
            case Fetch():
                return self._fetch(order, fails)
            case Drop():
                for name in () if fails else order.names:
                    self.held.pop(name, None)
                return Dropped(order.ticket, is_done=not fails)

    def _fetch(self, order: Fetch, fails: bool) -> Fetched:
        writers: list[int | None] = []
        for name, into in zip(order.names, order.into, strict=True):
            there = not fails and name in self.held
            there = there and self.script.dice.random() >= self.script.loses
            into[:] = self.held[name] if there else self.script.dice.randbytes(into.nbytes)
            writers.append(WRITER if there else None)
        return Fetched(order.ticket, tuple(writers))

    def _load(self, order: Load, fails: bool) -> Loaded:
        arrived = []
        for name, into in zip(order.names, order.into, strict=True):
            there = not fails and name in self.held
            there = there and self.script.dice.random() >= self.script.loses
            arrived.append(there)
            if there:
                into[:] = self.held[name]
                self.loaded.append((name, bytes(into)))
            elif self.script.scribbles:
                into[:] = self.script.dice.randbytes(into.nbytes)
        leading = arrived.index(False) if False in arrived else len(arrived)
        seconds = max(1e-6, self.script.block_s * len(arrived))
        run = RunOutcome(self.source, len(arrived), sum(arrived), seconds, was_late=False)
        reasons = ("miss",) * arrived.count(False)
        return Loaded(order.ticket, leading, (run,), reasons)


@dataclass
class Heard:
    """`Events` that keeps what an index would believe."""

    hashes: set[int] = field(default_factory=set)
    load: WorkerLoad | None = None

    def store(self, tier: Tier, parent: int, hashes: Hashes) -> None:
        assert tier is Tier.GPU
        fresh = {int(one) for one in hashes}
        assert not fresh & self.hashes, "stored twice"
        self.hashes |= fresh

    def remove(self, tier: Tier, hashes: Hashes) -> None:
        gone = {int(one) for one in hashes}
        assert gone <= self.hashes, "removed what was not stored"
        self.hashes -= gone

    def set_load(self, load: WorkerLoad) -> None:
        self.load = load


@dataclass
class Told:
    """What one generation came to."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: CachedTokens | None = None
    stored: Stored | None = None


@dataclass(frozen=True)
class RigTerms:
    """How small the engine is."""

    blocks: int = 64
    sequences_max: int = 8
    step_tokens_max: int = 32
    write_policy: WritePolicy = WritePolicy.ON_SEAL
    prefill_tokens_max: int = 32
    priors: Priors = field(default_factory=Priors)
    policy: PolicyFactory = PriorityPolicy
    audit: AuditTerms = field(default_factory=AuditTerms)


SLOW = Priors(
    prefill_tokens_per_s=1000.0,
    latency_s=dict.fromkeys(Source, 1e-4),
    bytes_per_s=dict.fromkeys(Source, 256 / 0.003),
)
"""Believes that a block of `FULL` takes three quarters as long to load as to compute."""


class Timed:
    """A runner whose steps take a millisecond a token, by the test's clock."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def step(
        self, pool: KvPool, slices: Sequence[Slice], before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        self._clock.now += 0.001 * sum(len(one.tokens) for one in slices)
        return self._runner.step(pool, slices, before_layer)


class Rig:
    """One core with everything around it."""

    def __init__(
        self,
        runner: ModelRunner | None = None,
        terms: RigTerms | None = None,
        below: TierBelow | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """A `carrier` has blocks staged on their way, eight slots of each group."""
        terms = terms or RigTerms()
        runner = runner or small_fake()
        self.runner = runner
        self.below = below
        self.clock = Clock()
        self.events = Heard()
        geometry = runner.geometry
        self.pool = KvPool(geometry, [terms.blocks] * len(geometry.groups))
        self.blocks = BlockManager(geometry, self.pool.blocks_counts, terms.policy)
        self.carrier = carrier
        self.transfer = BlockTransfer(self.pool, 8, carrier)
        identity = runner.model_id, runner.revision, runner.rope_digest
        namespaces = [
            geometry.spec(group, *identity).fingerprint() for group in range(len(geometry.groups))
        ]
        self.namespace = namespaces[0]
        offload = OffloadTerms(
            self.namespace,
            terms.write_policy,
            window_namespaces=tuple(namespaces[1:]),
            audit=terms.audit,
        )
        self.core = EngineCore(
            Machine(cast(ModelRunner, Timed(runner, self.clock)), self.pool, self.blocks),
            CoreTerms(
                SchedulerLimits(terms.sequences_max, terms.step_tokens_max),
                PacePolicy(stall_s_min=terms.prefill_tokens_max / 1000),
                terms.priors,
            ),
            self.events,
            None if below is None else Below(below, offload, self.transfer),
            self.clock,
        )
        self.told: dict[int, Told] = {}
        self.tops: dict[int, list[tuple[tuple[int, float], ...]]] = {}
        """The likeliest tokens of each, where log-probabilities were asked for."""

    def submit(self, prompt: Sequence[int], tokens_max: int, **terms: object) -> int:
        values: dict[str, object] = {"sampling": GREEDY, "ignore_eos": True} | terms
        request = GenerationRequest(
            request_id=f"r{len(self.told)}",
            prompt_tokens=tuple(prompt),
            tokens_max=tokens_max,
            **values,  # type: ignore[arg-type]
        )
        self.core.check(request)
        number = self.core.submit(request)
        self.told[number] = Told()
        return number

    def cancel(self, number: int) -> None:
        self.core.cancel(number)
        self.told.pop(number)

    def step(self, elapsed_s: float = 0.001) -> bool:
        """One step; whether the model ran."""
        self.clock.now += elapsed_s
        done = self.core.step()
        for delivery in done.deliveries:
            told = self.told[delivery.number]
            assert told.finish is None, "a delta after the last"
            told.tokens += [token.token_id for token in delivery.delta.tokens]
            tops = self.tops.setdefault(delivery.number, [])
            tops += [token.top for token in delivery.delta.tokens]
            told.finish = delivery.delta.finish
            told.stored = delivery.delta.stored
            if delivery.delta.cached is not None:
                assert told.cached is None, "cached tokens told twice"
                told.cached = delivery.delta.cached
        return done.idle is None

    def finish(self, steps_max: int = 3000) -> None:
        """Step until every generation has ended."""
        for _ in range(steps_max):
            if not self.core.requests_count:
                return
            self.step()
        left = [self.core.request(n) for n in self.told if self.told[n].finish is None]
        raise AssertionError(f"{len(left)} generations do not end: {left[:2]}")

    def settle(self, steps_max: int = 200) -> None:
        """Step until the tiers below have nothing to do."""
        for _ in range(steps_max):
            self.step(0.5)
            offload = self.core.offload
            if offload is None or not (offload.is_busy or offload.saves.backlog_count):
                return
        raise AssertionError("the tiers below do not come to rest")

    def generate(self, prompt: Sequence[int], tokens_max: int, **terms: object) -> Told:
        number = self.submit(prompt, tokens_max, **terms)
        self.finish()
        return self.told[number]


class CacheOff:
    """What requests come to with nothing shared, loaded or preempted: each alone, from scratch."""

    def __init__(self, groups: tuple[LayerGroup, ...] = FULL) -> None:
        self._groups = groups
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens after a prompt."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            rig = Rig(small_fake(groups=self._groups), RigTerms(step_tokens_max=4096))
            known = rig.generate(prompt, count).tokens
            self._known[tuple(prompt)] = known
        return known[:count]

"""An engine core that the bench steps itself, in this process, and what its steps took.

What must not live here: what is measured, processes.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.paged.blocks import BlockManager
from kvtier.paged.group_blocks import BlockId
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import ModelRunner, Slice
from kvtier.paged.sampling import SamplingTerms
from kvtier.types import PrefixKey
from kvtier_services.worker.core import Below, CoreTerms, EngineCore, Events, Machine
from kvtier_services.worker.pace import PacePolicy
from kvtier_services.worker.requests import CachedTokens, GenerationRequest
from kvtier_services.worker.scheduler import SchedulerLimits

STEP_TOKENS_MAX: Final = 512
TIE_GAP: Final = 1e-4
"""Answers may part where the two likeliest tokens' logits are nearer than this (issue 5)."""
_GREEDY: Final = SamplingTerms(temperature=0.0)
_IDLE_S_MAX: Final = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a bench."""

    prompt: tuple[int, ...]
    tokens_count: int


@dataclass(slots=True)
class Done:
    """What a request came to."""

    began: float
    times: list[float] = field(default_factory=list)
    """Of each token, seconds."""
    tokens: list[int] = field(default_factory=list)
    cached: CachedTokens | None = None

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Uncached(BlockManager):
    """A block manager without a prefix cache: nothing is kept, looked up or told."""

    __slots__ = ()

    def match(self, keys: Sequence[PrefixKey]) -> int:
        return 0

    def seal(
        self, sequence_id: str, computed_tokens: int, keys: Sequence[PrefixKey], now: float
    ) -> None:
        super().seal(sequence_id, computed_tokens, (), now)


@dataclass(frozen=True, slots=True)
class Around:
    """What a core has besides its model."""

    events: Events | None = None
    below: Below | None = None
    sequences_max: int = 8


class Desk:
    """A core, stepped by whoever waits for its requests."""

    def __init__(self, machine: Machine, around: Around, news: threading.Event) -> None:
        """`news` is set, on any thread, when the tiers below have an outcome."""
        self.core = EngineCore(
            machine,
            CoreTerms(SchedulerLimits(around.sequences_max, STEP_TOKENS_MAX), PacePolicy()),
            around.events,
            around.below,
            time.monotonic,
        )
        self.core.calibrate()
        self._news = news
        self._machine = machine
        self.done: dict[int, Done] = {}
        self.step_seconds: list[float] = []
        """Of steps that ran the model, everything included."""
        self.places = 0
        self.wasted_places = 0
        """Token places of blocks in use, and those that held nothing, added up over steps."""

    def submit(self, job: Job) -> int:
        number = self.core.submit(
            GenerationRequest(
                request_id="bench",
                prompt_tokens=job.prompt,
                sampling=_GREEDY,
                tokens_max=job.tokens_count,
                ignore_eos=True,
            )
        )
        self.done[number] = Done(time.monotonic())
        return number

    def step(self) -> None:
        """Run a step, or wait for news of the tiers below."""
        self._news.clear()
        began = time.monotonic()
        told = self.core.step()
        now = time.monotonic()
        for delivery in told.deliveries:
            done = self.done[delivery.number]
            done.tokens += [token.token_id for token in delivery.delta.tokens]
            done.times.append(now)
            done.cached = delivery.delta.cached or done.cached
        if told.idle is not None:
            until = told.idle.until
            wait_s = _IDLE_S_MAX if until is None else min(_IDLE_S_MAX, until - now)
            if wait_s > 0:
                self._news.wait(wait_s)
            return
        self.step_seconds.append(now - began)
        block_tokens = self._machine.blocks.geometry.block_tokens
        self.places += self._machine.blocks.usage().in_use_count * block_tokens
        self.wasted_places += self._machine.blocks.unfilled_tokens()

    def finish(self) -> None:
        """Step until every request has ended."""
        while self.core.requests_count:
            self.step()

    def run(self, jobs: Iterable[Job]) -> list[Done]:
        """All of them at once, to their ends."""
        return self.collect([self.submit(job) for job in jobs])

    def collect(self, numbers: Sequence[int]) -> list[Done]:
        """Step until every request has ended; what became of these."""
        self.finish()
        return [self.done.pop(number) for number in numbers]

    def hear(self) -> None:
        """Wait until what was asked of the tiers below about waiting requests is answered."""
        offload = self.core.offload
        while offload is not None and any(r.awaits_lookup for r in self.core.scheduler.waiting()):
            self._news.clear()
            offload.tick(time.monotonic())
            self._news.wait(0.001)

    def settle(self) -> None:
        """Step until the tiers below have nothing to do."""
        offload = self.core.offload
        while offload is not None and (offload.is_busy or offload.saves.backlog_count):
            self.step()


def machine_of(runner: ModelRunner, tokens_count: int, *, cached: bool = True) -> Machine:
    """A runner with a pool for so many tokens."""
    geometry = runner.geometry
    counts = [-(-tokens_count // geometry.block_tokens)] * len(geometry.groups)
    pool = KvPool(geometry, counts, runner.device)
    blocks = (BlockManager if cached else Uncached)(geometry, counts)
    return Machine(runner, pool, blocks)


def differs(runner: ModelRunner, job: Job, first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two answers part where the model is not undecided (see TIE_GAP)."""
    if list(first) == list(second):
        return False
    if len(first) != len(second):
        return True
    at = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    tokens = [*job.prompt, *first[:at]]
    blocks = -(-len(tokens) // runner.geometry.block_tokens)
    pool = KvPool(runner.geometry, [blocks], runner.device)
    table: list[BlockId] = [BlockId(block) for block in range(blocks)]
    logits = runner.step(pool, [Slice(tokens, 0, [table])])[0]
    high, low = logits.topk(2).values.tolist()
    return bool(high - low >= TIE_GAP)


def tiers_of(cached: CachedTokens | None) -> Mapping[str, int]:
    """Cached tokens by tier; those with none are left out."""
    if cached is None:
        return {}
    names = ("gpu", "dram", "nvme", "redis", "peer")
    return {name: count for name in names if (count := getattr(cached, name))}

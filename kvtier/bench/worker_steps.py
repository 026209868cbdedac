"""Steps of the worker with a real model: throughput, gaps between tokens, stalls, wasted memory.

The engine core runs in this process, on the bench's own thread; the store and the index that it
writes to are processes. What must not live here: time to first token over HTTP (`worker_ttft`).
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvtier import __version__
from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_desk import Around, Desk, Done, Job, differs, machine_of, tiers_of
from kvtier.bench.worker_pairs import Pairs, interval, quantile
from kvtier.bench.worker_processes import MIB, Node, StoreSizes
from kvtier.client.store import StoreClientConfig
from kvtier.core.identity import KvDtype
from kvtier.core.model_card import ModelCard
from kvtier.engines.transformers.runner import TransformersRunner, load_runner
from kvtier.engines.transformers.sources import resolve
from kvtier.errors import BackendError
from kvtier.sections import DialConfig
from kvtier.types import Fingerprint, InstanceId, NodeId
from kvtier_services.worker.core import Below
from kvtier_services.worker.l2.connector import StoreConnector
from kvtier_services.worker.offload import OffloadTerms
from kvtier_services.worker.pace import Pace, PacePolicy
from kvtier_services.worker.publishing import Identity, new_publisher

BLOCK_TOKENS: Final = 16
THROUGHPUT_MIN, GAP_MAX = 0.97, 1.05
STALL_MAX: Final = 2.5
WASTE_MAX: Final = 0.04
CONCURRENT: Final = 8
SAVE_DEADLINE_S: Final = 5.0
EVEN_PREFILL_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much is measured."""

    model: str = "smollm2"
    vocab: range = range(1000, 40_000)
    bursts: int = 8
    burst_jobs: int = 12
    prompt_tokens: range = range(64, 385)
    answer_tokens: range = range(24, 65)
    stalls: int = 3
    stall_prompt_tokens: int = 4000
    decodes: int = 4
    steps: int = 80
    running_tokens: int = 1500
    """At most, of each request that others run beside."""


QUICK = StepSizes(
    model="tiny",
    vocab=range(256),
    bursts=2,
    burst_jobs=4,
    prompt_tokens=range(32, 65),
    answer_tokens=range(8, 17),
    stalls=1,
    stall_prompt_tokens=1000,
    steps=10,
)


def open_runner(name: str) -> TransformersRunner:
    """The worker's model."""
    source = resolve(name)
    return load_runner(
        source.directory,
        source.model_id,
        source.revision,
        BLOCK_TOKENS,
        "cpu",
        KvDtype.FLOAT32,
    )


class Jobs:
    """New requests of mixed lengths, equal on every machine."""

    def __init__(self, sizes: StepSizes, seed: int) -> None:
        self._sizes = sizes
        self._rng = random.Random(seed)

    def next(self, prompt_tokens: int | None = None, tokens_count: int | None = None) -> Job:
        rng, sizes = self._rng, self._sizes
        count = prompt_tokens or rng.choice(sizes.prompt_tokens)
        prompt = tuple(rng.choices(sizes.vocab, k=count))
        return Job(prompt, tokens_count or rng.choice(sizes.answer_tokens))

    def burst(self) -> list[Job]:
        return [self.next() for _ in range(self._sizes.burst_jobs)]


# ---- complete misses


class EvenPace(Pace):
    """Lets every step carry as much prefill, so that both cores run the same steps.

    What is measured online differs between two cores by chance, and a chunk of 16 tokens instead of
    20 makes a fifth more steps: a difference with which the cache has nothing to do.
    """

    def prefill_tokens_max(self, context_tokens: int, now: float) -> int:
        return EVEN_PREFILL_TOKENS


@dataclass(slots=True)
class Burst:
    """Requests that were all there at once, to their ends."""

    seconds: float
    cpu_s: float
    """Of all threads of this process: the model's, the connector's, the publisher's."""
    done: list[Done]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(one.tokens) for one in self.done) / self.seconds

    @property
    def gaps(self) -> list[float]:
        return [gap for one in self.done for gap in one.gaps]


def misses_rows(node: Node, runner: TransformersRunner, sizes: StepSizes) -> list[Result]:
    """Nothing is ever found: what the caches, the store and the index cost, step by equal step."""
    room = 2 * CONCURRENT * (max(sizes.prompt_tokens) + max(sizes.answer_tokens))
    news = threading.Event()
    off = Desk(machine_of(runner, room, cached=False), Around(), news)
    with cached_desk(node, runner, room, news) as on:
        for desk in (on, off):
            desk.core.pace = EvenPace(PacePolicy(), desk.core.advisor)
        jobs = Jobs(sizes, 1)
        bursts: list[tuple[Burst, Burst]] = []
        differing = 0
        for number in range(sizes.bursts + 1):
            asked = jobs.burst()
            order = (on, off) if number % 2 else (off, on)
            ran = {desk: burst(desk, asked) for desk in order}
            if number:
                bursts.append((ran[on], ran[off]))
            for job, with_cache, without in zip(asked, ran[on].done, ran[off].done, strict=True):
                if tiers_of(with_cache.cached):
                    raise BackendError(f"a new prompt was found in {with_cache.cached}")
                differing += differs(runner, job, without.tokens, with_cache.tokens)
        assert on.core.offload is not None
        saved = on.core.offload.saves.counts.saved
    if not saved:
        raise BackendError("the cache that is on has written nothing below")
    throughput, cpu = Pairs(), Pairs()
    for first, second in bursts:
        throughput.add(first.tokens_per_s, second.tokens_per_s)
        cpu.add(first.cpu_s, second.cpu_s)
    ends = interval_of(bursts, gap_ratio)
    return [
        Result("misses, blocks written below", saved, "blocks"),
        throughput.result("misses, tokens/s, cache on / off", THROUGHPUT_MIN, Bar.AT_LEAST),
        cpu.result("misses, CPU time of the worker, cache on / off", None, Bar.AT_MOST),
        Result(
            "misses, p99 between tokens, cache on / off",
            gap_ratio(bursts),
            "ratio",
            GAP_MAX,
            Bar.AT_MOST,
            ends,
        ),
        Result("misses, answers that differ", differing, "answers", 0, Bar.AT_MOST),
    ]


def burst(desk: Desk, jobs: Sequence[Job]) -> Burst:
    """Run requests that have waited together; what is left to write is written afterwards.

    At saturation a request's lookup is answered while it waits. Were the first steps to take those
    whose answer came first, they would carry less prefill, and the rest of it would come in chunks
    beside decodes: another schedule, whose steps say nothing of the cache.
    """
    numbers = [desk.submit(job) for job in jobs]
    desk.hear()
    began, cpu_began = time.monotonic(), time.process_time()
    done = desk.collect(numbers)
    ran = Burst(time.monotonic() - began, time.process_time() - cpu_began, done)
    desk.settle()
    return ran


def gap_ratio(bursts: Sequence[tuple[Burst, Burst]]) -> float:
    """99th percentiles of all gaps, first against second."""
    first = quantile([gap for one, _ in bursts for gap in one.gaps], 0.99)
    second = quantile([gap for _, one in bursts for gap in one.gaps], 0.99)
    return first / second


def interval_of(
    bursts: Sequence[tuple[Burst, Burst]], of: Callable[[Sequence[tuple[Burst, Burst]]], float]
) -> tuple[float, float]:
    """As `interval`, drawing whole bursts again."""

    def drawn(numbers: Sequence[float]) -> float:
        return of([bursts[int(number)] for number in numbers])

    return interval(range(len(bursts)), drawn)


@contextmanager
def cached_desk(
    node: Node, runner: TransformersRunner, room: int, news: threading.Event
) -> Iterator[Desk]:
    """A core with everything on: prefix cache, a store below, an index that is told."""
    machine = machine_of(runner, room)
    spec = runner.geometry.spec(0, runner.model_id, runner.revision, runner.rope_digest)
    namespace = spec.fingerprint()
    store = node.store("misses", StoreSizes(dram_bytes=1024 * MIB))
    connector = StoreConnector(
        DialConfig(targets=(store.target,)), StoreClientConfig(), news.set, SAVE_DEADLINE_S
    )
    publisher = new_publisher(
        _identity(runner, namespace, machine.pool.blocks_counts[0]),
        DialConfig(targets=(node.index("index"),)),
        lambda: None,
    )
    assert publisher is not None
    publisher.start()
    try:
        below = Below(connector, OffloadTerms(namespace))
        yield Desk(machine, Around(publisher, below), news)
    finally:
        connector.close()
        publisher.close()


def _identity(runner: TransformersRunner, namespace: Fingerprint, blocks_count: int) -> Identity:
    card = ModelCard(("bench",), runner.model_id, runner.revision, b"t" * 32, None, BLOCK_TOKENS)
    return Identity(
        instance=InstanceId("bench"),
        node=NodeId("bench"),
        zone="",
        store="",
        http_address="",
        card=card,
        namespace=namespace,
        blocks_count=blocks_count,
        block_bytes=runner.geometry.block_bytes(0),
        version=__version__,
    )


# ---- stalls


def stall_rows(runner: TransformersRunner, sizes: StepSizes) -> list[Result]:
    """Steps of running requests while a long prompt comes in, and without."""
    room = sizes.stall_prompt_tokens + sizes.decodes * (64 + sizes.running_tokens)
    desk = Desk(machine_of(runner, room), Around(), threading.Event())
    jobs = Jobs(sizes, 2)
    # More tokens than all its steps: they run until they are cancelled.
    running = [desk.submit(jobs.next(64, sizes.running_tokens)) for _ in range(sizes.decodes)]
    while not all(desk.done[number].tokens for number in running):
        desk.step()
    steps = Pairs()
    tokens = 0
    for number in range(sizes.stalls + 1):
        alone = _steps(desk, sizes.steps)
        prompt = desk.submit(jobs.next(sizes.stall_prompt_tokens, 1))
        desk.step_seconds.clear()
        before = len(desk.done[running[0]].tokens)
        while not desk.done[prompt].tokens:
            desk.step()
        beside = list(desk.step_seconds)
        tokens = len(desk.done[running[0]].tokens) - before
        if tokens < len(beside) - 1:
            raise BackendError("a request that decodes was left out of steps")
        if number:
            steps.add(quantile(beside, 0.99), quantile(alone, 0.99))
    for one in running:
        desk.core.cancel(one)
    return [
        steps.result("stall, p99 of a step, with a prefill / without", STALL_MAX, Bar.AT_MOST),
        Result("stall, steps of the prefill", tokens, "steps"),
    ]


def _steps(desk: Desk, count: int) -> list[float]:
    desk.step_seconds.clear()
    for _ in range(count):
        desk.step()
    return list(desk.step_seconds)

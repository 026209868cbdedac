"""The emulated GPU over a tier that is slower than computing: the worker must find that out.

A store of its own process holds every prompt; between it and the core stands a brake, which lets
bytes of loads through at 0.5 GB/s and ends what is late at its deadline, as a slow tier does. Both
kinds of prompt run on one core that writes nothing below, so that nothing else tells them apart.
What must not live here: the row with the tier at full speed (`worker_ttft`).
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_desk import Around, Desk, Done, Job, machine_of, tiers_of
from kvtier.bench.worker_pairs import Pairs
from kvtier.bench.worker_processes import Node, StoreSizes
from kvtier.bench.worker_ttft import (
    BLOCK_TOKENS,
    GPU_STRIDE_BYTES,
    GPU_TOKEN_BYTES,
    GPU_TOKENS_PER_S,
    Prompts,
    TtftSizes,
    slabs,
)
from kvtier.client.store import StoreClientConfig
from kvtier.core.identity import KvDtype
from kvtier.core.planner import WritePolicy
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import one_group
from kvtier.sections import DialConfig
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier_services.worker.core import Below
from kvtier_services.worker.l2.connector import StoreConnector
from kvtier_services.worker.l2.port import Load, Loaded, LoadRun, Order, Outcome, RunOutcome
from kvtier_services.worker.offload import OffloadTerms

THROTTLED_MAX: Final = 1.03
BYTES_PER_S: Final = 0.5e9
LEARNING_ROUNDS: Final = 3
_LAYERS: Final = 4
_ANSWER_TOKENS: Final = 4


class Brake:
    """A `BlockCache` whose loads take at least what they would at BYTES_PER_S."""

    def __init__(self, inner: StoreConnector, news: threading.Event, block_bytes: int) -> None:
        self._inner = inner
        self._news = news
        self._block_s = block_bytes / BYTES_PER_S
        self._loads: dict[int, tuple[Load, float]] = {}
        self._held: deque[tuple[float, Outcome]] = deque()

    def begin(self, order: Order) -> None:
        if isinstance(order, Load):
            self._loads[order.ticket] = (order, time.monotonic())
        self._inner.begin(order)

    def outcomes(self) -> Sequence[Outcome]:
        now = time.monotonic()
        ended: list[Outcome] = []
        for outcome in self._inner.outcomes():
            if isinstance(outcome, Loaded):
                order, began = self._loads.pop(outcome.ticket)
                due, braked = self._braked(order, outcome, began)
                self._held.append((due, braked))
                timer = threading.Timer(max(0.0, due - now), self._news.set)
                timer.daemon = True
                timer.start()
            else:
                ended.append(outcome)
        ended += [outcome for due, outcome in self._held if due <= now]
        self._held = deque(one for one in self._held if one[0] > now)
        return ended

    def _braked(self, order: Load, outcome: Loaded, began: float) -> tuple[float, Loaded]:
        """When the load would have ended, and how."""
        runs: list[RunOutcome] = []
        leading = 0
        for asked, ran in zip(order.runs, outcome.runs, strict=False):
            slow = self._slow(asked, ran)
            runs.append(slow)
            leading += slow.arrived_blocks
            if slow.arrived_blocks < asked.blocks_count:
                break
        missing = len(order.names) - leading
        seconds = sum(run.seconds for run in runs)
        return began + seconds, replace(
            outcome,
            blocks_count=min(leading, outcome.blocks_count),
            runs=tuple(runs),
            reasons=("timeout",) * missing,
        )

    def _slow(self, asked: LoadRun, ran: RunOutcome) -> RunOutcome:
        seconds = max(ran.seconds, asked.blocks_count * self._block_s)
        if seconds <= asked.deadline_s:
            return replace(ran, seconds=seconds)
        arrived = min(ran.arrived_blocks, int(asked.deadline_s / self._block_s))
        return replace(ran, arrived_blocks=arrived, seconds=asked.deadline_s, was_late=True)


def throttled_rows(node: Node, sizes: TtftSizes) -> list[Result]:
    """Prompts that the slow tier has, against prompts that nobody has."""
    prefix_bytes = sizes.gpu_prefix_tokens * GPU_TOKEN_BYTES
    store = node.store("throttled", StoreSizes(slabs(3 * prefix_bytes)))
    news = threading.Event()
    dial = DialConfig(targets=(store.target,))
    connectors = [StoreConnector(dial, _client(), news.set, 30.0) for _ in range(2)]
    head_dim = GPU_TOKEN_BYTES // (2 * _LAYERS * KvDtype.FLOAT32.element_bytes)
    geometry = one_group(_LAYERS, 1, head_dim, KvDtype.FLOAT32, BLOCK_TOKENS)
    terms = FakeTerms(prefill_tokens_per_s=float(GPU_TOKENS_PER_S), stride_bytes=GPU_STRIDE_BYTES)
    runner = FakeModel(geometry, terms)
    spec = geometry.spec(0, runner.model_id, runner.revision, runner.rope_digest)
    namespace = spec.fingerprint()
    room = 2 * (sizes.gpu_prefix_tokens + 64)
    brake = Brake(connectors[1], news, geometry.block_bytes(0))
    try:
        writer = Desk(
            machine_of(runner, room // 2),
            Around(below=Below(connectors[0], OffloadTerms(namespace))),
            news,
        )
        reader = Desk(
            machine_of(runner, room),
            Around(below=Below(brake, OffloadTerms(namespace, WritePolicy.ON_REUSE))),
            news,
        )
        return _rounds(writer, reader, Prompts(range(256), sizes.gpu_prefix_tokens), sizes)
    finally:
        for connector in connectors:
            connector.close()


def _rounds(writer: Desk, reader: Desk, prompts: Prompts, sizes: TtftSizes) -> list[Result]:
    pairs = Pairs()
    differing = loaded = found = 0
    for number in range(LEARNING_ROUNDS + sizes.gpu_rounds):
        known = Job(tuple(prompts.next()), _ANSWER_TOKENS)
        told = _alone(writer, known)
        writer.settle()
        order = (True, False) if number % 2 else (False, True)
        seconds: dict[bool, float] = {}
        for is_known in order:
            job = known if is_known else Job(tuple(prompts.next()), _ANSWER_TOKENS)
            done = _alone(reader, job)
            seconds[is_known] = done.ttft_s
            if is_known:
                differing += done.tokens != told.tokens
                if number >= LEARNING_ROUNDS:
                    loaded += sum(tiers_of(done.cached).values())
                    found += len(job.prompt)
        if number >= LEARNING_ROUNDS:
            pairs.add(seconds[True], seconds[False])
    return [
        pairs.result("emulated GPU TTFT from DRAM at 0.5 GB/s / cold", THROTTLED_MAX, Bar.AT_MOST),
        Result("throttled, part of the prompts loaded all the same", loaded / found, "share"),
        Result("throttled, answers that differ", differing, "answers", 0, Bar.AT_MOST),
    ]


def _alone(desk: Desk, job: Job) -> Done:
    """One request; what it loads or writes has ended when it returns."""
    done = desk.run([job])[0]
    desk.settle()
    return done


def _client() -> StoreClientConfig:
    block_bytes = BLOCK_TOKENS * GPU_TOKEN_BYTES
    segment = max(64 << 20, 4 * block_bytes)
    return StoreClientConfig(arena=ArenaClientConfig(segment, segment))

"""A routing brain without knowledge: workers in turn, those excluded last."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from kvtier.core.identity import Pool
from kvtier.core.workers import Load, WorkerName
from kvtier.errors import NotFoundError, UnavailableError
from kvtier.types import InstanceId, Source
from kvtier_router.brain import Brain
from kvtier_router.config import RouterConfig, pairs
from kvtier_router.routing.values import (
    Candidate,
    FailureKind,
    Knowledge,
    ModelReport,
    Policy,
    RouteAsk,
    RouteDecision,
    Target,
    Usage,
    WorkerReport,
)

RANKED = "#"
"""Stands before the rank in the name of a worker that shares its address with other ranks."""
BUG = "bug"
"""A served name whose routing fails as no request should."""


class FakePlacement:
    """Remembers what it was told."""

    def __init__(self, brain: "FakeBrain", worker: WorkerName) -> None:
        self.key = f"p{next(brain.numbers)}"
        self.worker = worker
        self.ttft_s: float | None = None
        self.usage: Usage | None = None
        self.failure: FailureKind | None = None
        self.retry_after_s: float | None = None
        brain.placements.append(self)

    def first_token(self, ttft_s: float, cached_tokens: int | None = None) -> None:
        self.ttft_s = ttft_s

    def finished(self, usage: Usage) -> None:
        assert self.usage is None
        assert self.failure is None
        self.usage = usage

    def failed(self, kind: FailureKind, retry_after_s: float | None = None) -> None:
        assert self.usage is None
        assert self.failure is None
        self.failure = kind
        self.retry_after_s = retry_after_s


class FakeBrain:
    """See the module."""

    def __init__(self, workers: dict[WorkerName, tuple[str, tuple[str, ...]]]) -> None:
        self.workers_by_name = workers
        self.numbers = itertools.count()
        self.placements: list[FakePlacement] = []
        self.asks: list[RouteAsk] = []
        self.drained: set[WorkerName] = set()
        self._turn = itertools.count()

    def route(self, ask: RouteAsk) -> RouteDecision:
        self.asks.append(ask)
        return self._choose(ask)

    def explain(self, ask: RouteAsk) -> RouteDecision:
        decision = self._choose(ask)
        row = Candidate(
            decision.worker,
            decision.target.pool,
            "candidate",
            True,
            False,
            {},
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        )
        return replace(decision, candidates=(row,))

    def _choose(self, ask: RouteAsk) -> RouteDecision:
        behind = [
            name for name, (_, models) in self.workers_by_name.items() if ask.served_name in models
        ]
        if ask.served_name == BUG:
            raise RuntimeError("as told")
        if not behind:
            raise NotFoundError(f"nobody serves {ask.served_name!r}")
        eligible = [name for name in behind if name not in self.drained]
        if not eligible:
            raise UnavailableError("no worker is eligible: draining")
        chosen = [name for name in eligible if name not in ask.excluded] or eligible
        worker = chosen[next(self._turn) % len(chosen)]
        return RouteDecision(
            target=Target(
                worker,
                self.workers_by_name[worker][0],
                "mock",
                Pool("m", "r", 16),
                None,
                "",
                "",
                worker.dp_rank if RANKED in worker.instance else None,
            ),
            policy=Policy.ROUND_ROBIN,
            knowledge=Knowledge.LOAD_ONLY,
            cause="fake",
            prompt_tokens=len(ask.tokens),
            matched_tokens={Source.GPU: 16},
            reused_tokens=16,
            predicted_ttft_s=0.0,
            decided_in_s=1e-5,
            placement=FakePlacement(self, worker),
        )

    def models(self) -> tuple[ModelReport, ...]:
        names = sorted({name for _, models in self.workers_by_name.values() for name in models})
        count = len(self.workers_by_name)
        return tuple(
            ModelReport(name, (), False, count, count - len(self.drained), "", 0, 0, 0)
            for name in names
        )

    def worker_names(self) -> tuple[WorkerName, ...]:
        return tuple(self.workers_by_name)

    def workers(self, only: Sequence[WorkerName] | None = None) -> tuple[WorkerReport, ...]:
        wanted = self.workers_by_name if only is None else only
        return tuple(
            WorkerReport(
                worker=name,
                address=address,
                served_names=models,
                pool=Pool("m", "r", 16),
                node="",
                state="draining" if name in self.drained else "candidate",
                trust="unknown",
                cause="",
                requests_in_flight=0,
                waiting_prefill_tokens=0,
                prefill_tokens_per_s=0.0,
                ramp=1.0,
            )
            for name, (address, models) in self.workers_by_name.items()
            if name in wanted
        )

    def troubled(self) -> dict[WorkerName, str]:
        return dict.fromkeys(self.drained, "draining")

    def drain(self, worker: WorkerName) -> None:
        if worker not in self.workers_by_name:
            raise NotFoundError(f"no worker {worker.instance!r}")
        self.drained.add(worker)

    def undrain(self, worker: WorkerName) -> None:
        self.drained.discard(worker)

    def unreported(self) -> list[tuple[WorkerName, str]]:
        return []

    def take_load(self, worker: WorkerName, load: Load | None) -> None:
        return None

    def tick(self) -> None:
        return None


@contextlib.asynccontextmanager
async def fake_brain(config: RouterConfig, process: int) -> AsyncIterator[Brain]:
    """A brain of the configuration's static workers."""
    workers = {}
    for name, rest in pairs(config.static_workers, "static_workers"):
        address, _, models = rest.partition(" ")
        _, _, rank = name.partition(RANKED)
        workers[WorkerName(InstanceId(name), int(rank or 0))] = (address, tuple(models.split()))
    yield Brain(FakeBrain(workers))

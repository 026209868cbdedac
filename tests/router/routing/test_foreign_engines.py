"""Workers that are engines of others: which rank is named, and whose load is known from whom."""

from dataclasses import replace

import numpy as np
import pytest

from kvtier.core.fleet import Addresses, HolderInfo
from kvtier.core.workers import Load, WorkerName
from kvtier.types import InstanceId
from kvtier_router.routing import Policy, RouteAsk
from kvtier_router.routing.config import RoutingConfig, static_worker
from tests.router.routing.bench import PROMPT, Bench, chain, name
from tests.support.virtual_fleet import BLOCK_TOKENS, info_of, view_of, words

BUSY = Load(running_requests=1, waiting_requests=30)


def rank_of(rank: int, engine: str = "vllm", port: int = 8000) -> HolderInfo:
    address = Addresses(http=f"http://10.0.0.9:{port}")
    return replace(info_of(0), dp_rank=rank, addresses=address, engine=engine)


def queue_s(bench: Bench, worker: WorkerName) -> float:
    """How long a request would wait for a worker."""
    told = bench.router.explain(RouteAsk("model", PROMPT))
    return next(row.queue_s for row in told.candidates if row.worker == worker)


# ---- ranks


@pytest.mark.parametrize(("engine", "rank"), [("vllm", 1), ("sglang", 1), ("trtllm", None)])
def test_a_rank_behind_a_shared_address_is_named_to_engines_that_can_be_told(
    engine: str, rank: int | None
) -> None:
    bench = Bench(0)
    for number in range(2):
        bench.replica.tell(view_of(number, rank_of(number, engine), heard_at=100.0))
    bench.replica.store(1, chain(PROMPT)[:30])
    decision = bench.route()
    assert decision.worker == WorkerName(InstanceId("w0"), 1)
    assert decision.target.rank == rank


def test_an_engine_with_one_rank_or_an_address_for_each_is_left_to_itself() -> None:
    bench = Bench(0)
    bench.replica.tell(view_of(0, rank_of(0), heard_at=100.0))
    assert bench.route().target.rank is None
    bench.replica.tell(view_of(1, rank_of(1, port=8001), heard_at=100.0))
    assert {bench.route(words(str(n), 2000)).target.rank for n in range(8)} == {None}
    bench.replica.tell(view_of(1, rank_of(1), heard_at=100.0))
    assert {bench.route(words(str(n), 2000)).target.rank for n in range(8)} == {0, 1}


# ---- loads that nobody reports


def test_the_load_that_a_worker_of_a_list_says_when_asked_weighs_until_it_says_another() -> None:
    workers = tuple(
        static_worker(f"w{n}", f"http://10.0.0.{n}:8000", ["model"], BLOCK_TOKENS) for n in (0, 1)
    )
    bench = Bench(0, RoutingConfig(workers=workers, policy=Policy.LEAST_LOADED))
    assert dict(bench.router.unreported()) == {
        name(0): "http://10.0.0.0:8000",
        name(1): "http://10.0.0.1:8000",
    }
    bench.router.take_load(name(0), BUSY)
    assert {bench.serve().worker for _ in range(8)} == {name(1)}
    bench.router.take_load(name(1), replace(BUSY, running_requests=2))
    assert {bench.serve().worker for _ in range(8)} == {name(0)}
    bench.router.take_load(name(1), None)
    assert {bench.serve().worker for _ in range(8)} == {name(1)}


def bridged(bench: Bench, number: int, load: Load | None = None) -> None:
    """A heartbeat of the bridge beside a vLLM server."""
    info = replace(info_of(number), engine="vllm")
    bench.replica.tell(view_of(number, info, load=load, heard_at=bench.clock.now))


def test_a_bridge_that_reports_nothing_is_helped_out_and_one_that_does_is_believed() -> None:
    bench = Bench(0)
    bridged(bench, 0)
    bridged(bench, 1)
    own = replace(info_of(2), engine="kvtier")
    bench.replica.tell(view_of(2, own, heard_at=100.0))
    assert [worker for worker, _ in bench.router.unreported()] == [name(0), name(1)]
    bench.router.take_load(name(0), BUSY)
    bridged(bench, 0)
    assert queue_s(bench, name(0)) > 0.5, "a heartbeat without a load takes nothing away"
    for number in (0, 1):
        bridged(bench, number, Load(total_blocks=100, free_blocks=100))
    assert queue_s(bench, name(0)) == 0
    assert bench.router.unreported() == []
    bench.router.take_load(name(1), BUSY)
    assert queue_s(bench, name(1)) == 0


def test_what_waited_when_a_worker_was_asked_is_worked_off() -> None:
    bench = Bench(0)
    bridged(bench, 0)
    bench.router.workers()
    bench.router.take_load(name(0), BUSY)
    assert queue_s(bench, name(0)) > 0.5
    bench.advance(60.0)
    assert queue_s(bench, name(0)) == 0


def test_own_requests_are_not_counted_twice_and_nobody_unknown_is_counted() -> None:
    bench = Bench(0)
    bridged(bench, 0)
    held = bench.route(np.concatenate([PROMPT, words("more", 3000)]))
    before = queue_s(bench, held.worker)
    assert before > 0
    bench.router.take_load(held.worker, Load(waiting_requests=1))
    assert queue_s(bench, held.worker) == pytest.approx(before)
    bench.router.take_load(WorkerName(InstanceId("nobody"), 0), BUSY)
    assert {report.worker for report in bench.router.workers()} == {name(0)}

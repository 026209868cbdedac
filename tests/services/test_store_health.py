"""When a store says that it serves: by trials, whatever becomes of them."""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.errors import UnavailableError
from kvtier.tiers.arena.holdings import Trial
from kvtier.wire import rpc
from kvtier_services.store.health import HealthPolicy, HealthWatch
from tests.harness.waiting import eventually_async
from tests.support.store_service import a_store, on_socket, small_store

QUICK = HealthPolicy(period_s=0.001, patience_s=0.01, failures_max=3)


@dataclass
class Arena:
    """Does what it is told to when it is tried out."""

    answer: Trial | Exception | None = Trial.PASSED
    """None: it never answers."""
    said: list[bool] = field(default_factory=list)

    async def try_out(self) -> Trial:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer

    async def report(self, is_serving: bool) -> None:
        self.said.append(is_serving)


async def test_it_serves_once_a_trial_has_passed_and_says_so_once() -> None:
    arena = Arena(Trial.FAILED)
    watch = HealthWatch(arena.try_out, arena.report, QUICK)
    for _ in range(9):
        await watch.look()
    assert arena.said == []
    arena.answer = Trial.PASSED
    for _ in range(9):
        await watch.look()
    assert (arena.said, watch.is_serving, watch.failures_count) == ([True], True, 9)


async def test_a_few_failures_one_after_another_end_it_and_one_success_begins_it_again() -> None:
    arena = Arena()
    watch = HealthWatch(arena.try_out, arena.report, QUICK)
    await watch.look()
    for bad in (Trial.FAILED, UnavailableError("closed"), ValueError("no directory"), None):
        for _ in range(QUICK.failures_max - 1):
            arena.answer = bad
            await watch.look()
            assert watch.is_serving
        await watch.look()
        assert not watch.is_serving
        arena.answer = Trial.PASSED
        await watch.look()
        assert watch.is_serving
    assert arena.said == [True, *[False, True] * 4]


async def test_failures_that_do_not_follow_each_other_end_nothing() -> None:
    arena = Arena()
    watch = HealthWatch(arena.try_out, arena.report, QUICK)
    for answer in (Trial.PASSED, Trial.FAILED, Trial.FAILED) * 5:
        arena.answer = answer
        await watch.look()
    assert arena.said == [True]


async def is_serving(watch: HealthWatch, answer: Trial) -> bool:
    return watch.is_serving is (answer is Trial.PASSED)


async def test_it_goes_on_looking_for_ever() -> None:
    arena = Arena()
    watch = HealthWatch(arena.try_out, arena.report, QUICK)
    looking = asyncio.create_task(watch.run())
    for answer in (Trial.PASSED, Trial.FAILED, Trial.PASSED):
        arena.answer = answer
        await eventually_async(partial(is_serving, watch, answer), 30, f"it sees {answer}")
    looking.cancel()
    assert arena.said == [True, False, True]


async def test_a_store_serves_by_name_and_as_a_whole_on_both_its_addresses(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, remote), on_socket(running) as local:
        for client in (remote, local):
            stub = health_pb2_grpc.HealthStub(client.channel)
            for service in ("", rpc.STORE.full_name):
                asked = health_pb2.HealthCheckRequest(service=service)
                answer = await stub.Check(asked, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        page = running.metrics.render().decode()
        assert "kvtier_store_serving 1.0" in page
        assert "kvtier_store_trials_failed_total 0.0" in page

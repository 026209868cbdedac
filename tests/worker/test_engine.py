"""The engine on its thread: hand-over, cancelling, ceilings, draining, failure."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtier.core.model_card import ModelCard
from kvtier.errors import BackendError, CallerError, OverloadedError, UnavailableError
from kvtier.paged.runner import ModelRunner
from kvtier_services.worker.core import CoreTerms, EngineCore, Machine
from kvtier_services.worker.engine import WorkerEngine
from kvtier_services.worker.requests import Generation, GenerationRequest
from kvtier_services.worker.scheduler import SchedulerLimits
from tests.harness.waiting import eventually_async
from tests.support.worker_rig import GREEDY, CacheOff, machine_of, small_fake

OFF = CacheOff()
CARD = ModelCard(("fake",), "kvtier-fake", "1", bytes(32), None, 4)


@asynccontextmanager
async def an_engine(
    runner: ModelRunner | None = None, queue_max: int = 16, blocks: int = 64
) -> AsyncIterator[tuple[WorkerEngine, Machine]]:
    machine = machine_of(runner or small_fake(), blocks)
    core = EngineCore(machine, CoreTerms(SchedulerLimits(8, 32)), None, None, time.monotonic)
    engine = WorkerEngine(core, CARD, queue_max)
    engine.start()
    try:
        yield engine, machine
    finally:
        await engine.close()


def request(prompt: list[int], tokens_max: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_tokens=tuple(prompt),
        sampling=GREEDY,
        tokens_max=tokens_max,
        ignore_eos=True,
    )


async def tokens_of(generation: Generation) -> list[int]:
    return [token.token_id async for delta in generation for token in delta.tokens]


async def test_many_generations_at_once_give_what_each_gives_alone() -> None:
    prompts = [[n, *range(20 + n)] for n in range(10)]
    async with an_engine() as (engine, _):
        running = [engine.submit(request(prompt, 12)) for prompt in prompts]
        told = await asyncio.gather(*map(tokens_of, running))
    assert told == [OFF.tokens(prompt, 12) for prompt in prompts]


async def test_the_first_delta_tells_the_cached_tokens_and_the_last_one_the_end() -> None:
    async with an_engine() as (engine, _):
        await tokens_of(engine.submit(request(list(range(20)), 2)))
        deltas = [d async for d in engine.submit(request(list(range(20)), 3))]
    assert [d.cached.gpu if d.cached else None for d in deltas] == [16, None, None]
    assert [d.finish.value if d.finish else None for d in deltas] == [None, None, "length"]


async def test_a_cancelled_generation_ends_and_frees_its_blocks() -> None:
    async with an_engine() as (engine, machine):
        generation = engine.submit(request(list(range(20)), 200))
        async for _ in generation:
            break
        generation.cancel()
        generation.cancel()
        assert len(await tokens_of(generation)) < 100, "no more than what was on its way"

        async def is_free() -> bool:
            return machine.blocks.usage().in_use_count == 0

        await eventually_async(is_free, 30, "the blocks are free")
        assert engine.live_count == 0


async def test_a_client_that_goes_before_its_request_is_taken_in_costs_nothing() -> None:
    async with an_engine() as (engine, machine):
        for _ in range(20):
            engine.submit(request(list(range(20)), 200)).cancel()
        assert await tokens_of(engine.submit(request([1, 2, 3], 2))) == OFF.tokens([1, 2, 3], 2)
        assert machine.blocks.usage().in_use_count == 0


async def test_requests_beyond_the_queue_are_turned_away() -> None:
    async with an_engine(queue_max=2) as (engine, _):
        kept = [engine.submit(request([n], 200)) for n in range(2)]
        with pytest.raises(OverloadedError):
            engine.submit(request([3], 1))
        kept[0].cancel()
        assert await tokens_of(engine.submit(request([3], 1))) == OFF.tokens([3], 1)


async def test_what_can_never_run_is_refused_at_once() -> None:
    async with an_engine(blocks=8) as (engine, _):
        assert engine.context_tokens == 32
        with pytest.raises(CallerError):
            engine.submit(request(list(range(40)), 1))


async def test_draining_lets_what_runs_end_and_takes_nothing_new() -> None:
    async with an_engine() as (engine, _):
        generation = engine.submit(request([1, 2, 3], 30))
        draining = asyncio.create_task(engine.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            engine.submit(request([1], 1))
        assert await tokens_of(generation) == OFF.tokens([1, 2, 3], 30)
        await draining


async def test_draining_cuts_off_what_takes_too_long() -> None:
    async with an_engine() as (engine, machine):
        generation = engine.submit(request([1, 2, 3], 250))
        await engine.drain(0.0)
        with pytest.raises(UnavailableError):
            await tokens_of(generation)

        async def is_free() -> bool:
            return machine.blocks.usage().in_use_count == 0

        await eventually_async(is_free, 30, "the blocks are free")


class Breaking:
    """A runner whose steps fail once they are told to."""

    def __init__(self) -> None:
        self._runner = small_fake()
        self.is_broken = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def step(self, *given: object) -> object:
        if self.is_broken:
            raise RuntimeError("no memory")
        return self._runner.step(*given)  # type: ignore[arg-type]


async def test_a_broken_model_fails_every_request_and_the_health_check() -> None:
    runner = Breaking()
    async with an_engine(runner) as (engine, _):  # type: ignore[arg-type]
        await engine.check()
        running = [engine.submit(request([n], 250)) for n in range(3)]
        runner.is_broken = True
        for generation in running:
            with pytest.raises(BackendError):
                await tokens_of(generation)
        assert not engine.is_alive
        with pytest.raises(BackendError):
            await engine.check()
        with pytest.raises(BackendError):
            engine.submit(request([1], 1))


async def test_the_health_check_leaves_nothing_behind() -> None:
    async with an_engine(queue_max=1) as (engine, machine):
        busy = engine.submit(request([1], 40))
        await engine.check()
        assert await tokens_of(busy) == OFF.tokens([1], 40)
        assert engine.live_count == 0
        assert machine.blocks.usage().in_use_count == 0

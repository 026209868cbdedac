"""The connector against a real store: blocks go there and come back, byte for byte."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.client.store import StoreClientConfig
from kvtier.core.planner import WritePolicy
from kvtier.ports import NO_SCOPE
from kvtier.sections import DialConfig
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier.types import Source, Tier
from kvtier_services.worker.core import Below, CoreTerms, EngineCore
from kvtier_services.worker.engine import WorkerEngine
from kvtier_services.worker.l2.connector import StoreConnector
from kvtier_services.worker.l2.port import (
    Load,
    Loaded,
    LoadRun,
    Looked,
    Lookup,
    Outcome,
    Save,
    Saved,
    Ticket,
)
from kvtier_services.worker.offload import OffloadTerms
from kvtier_services.worker.requests import CachedTokens, GenerationRequest
from kvtier_services.worker.scheduler import SchedulerLimits
from tests.harness.waiting import eventually_async
from tests.support.store_service import MIB, a_store, small_store
from tests.support.worker_rig import GREEDY, CacheOff, machine_of, small_fake
from tests.tiers.contract import name_of
from tests.worker.test_engine import CARD

OFF = CacheOff()
CLIENT = StoreClientConfig(
    deadline_s=20.0, arena=ArenaClientConfig(segment_bytes=2 * MIB, staging_bytes=MIB)
)
BLOCK = 4096


@asynccontextmanager
async def a_connector(target: str) -> AsyncIterator[StoreConnector]:
    connector = StoreConnector(DialConfig(targets=(target,)), CLIENT, lambda: None, 5.0)
    try:
        yield connector
    finally:
        await asyncio.to_thread(connector.close)


async def outcome(connector: StoreConnector) -> Outcome:
    found: list[Outcome] = []

    async def is_there() -> bool:
        found.extend(connector.outcomes())
        return bool(found)

    await eventually_async(is_there, 30, "an outcome")
    assert len(found) == 1
    return found[0]


def payload(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(BLOCK))


def save(*numbers: int) -> Save:
    names = tuple(name_of(n) for n in numbers)
    payloads = tuple(memoryview(payload(n)) for n in numbers)
    return Save(Ticket(1), names, payloads, NO_SCOPE, 35)


def load(memory: list[bytearray], *numbers: int) -> Load:
    names = tuple(name_of(n) for n in numbers)
    runs = (LoadRun(Source.DRAM, len(names), 5.0),)
    return Load(Ticket(2), names, tuple(map(memoryview, memory)), runs, NO_SCOPE)


async def test_blocks_come_back_as_they_were_saved(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (store, _),
        a_connector(f"unix:{store.socket}") as connector,
    ):
        connector.begin(save(1, 2, 3))
        saved = await outcome(connector)
        assert isinstance(saved, Saved)
        assert saved.held == (True,) * 3
        connector.begin(Lookup(Ticket(3), tuple(name_of(n) for n in (1, 2, 4, 3)), 1.0))
        looked = await outcome(connector)
        found = (Source.DRAM, Source.DRAM, None, Source.DRAM)
        assert looked == Looked(Ticket(3), found, is_known=True)
        memory = [bytearray(BLOCK) for _ in range(3)]
        connector.begin(load(memory, 1, 2, 3))
        loaded = await outcome(connector)
        assert isinstance(loaded, Loaded)
        assert loaded.blocks_count == 3
        assert memory == [payload(n) for n in (1, 2, 3)]
        assert connector.is_attached


async def test_only_the_blocks_before_a_missing_one_count(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (store, _),
        a_connector(f"unix:{store.socket}") as connector,
    ):
        connector.begin(save(1, 3))
        await outcome(connector)
        connector.begin(load([bytearray(BLOCK) for _ in range(3)], 1, 2, 3))
        loaded = await outcome(connector)
        assert isinstance(loaded, Loaded)
        assert loaded.blocks_count == 1
        assert loaded.runs[0].arrived_blocks == 2
        assert loaded.reasons == ("miss",)


async def test_an_absent_store_is_an_outcome_of_every_order(tmp_path: Path) -> None:
    async with a_connector(f"unix:{tmp_path / 'nobody.sock'}") as connector:
        connector.begin(save(1))
        saved = await outcome(connector)
        assert isinstance(saved, Saved)
        assert saved.held == (False,)
        connector.begin(Lookup(Ticket(3), (name_of(1),), 1.0))
        looked = await outcome(connector)
        assert isinstance(looked, Looked)
        assert not any(looked.sources)
        connector.begin(load([bytearray(BLOCK)], 1))
        loaded = await outcome(connector)
        assert isinstance(loaded, Loaded)
        assert loaded.blocks_count == 0


async def test_orders_after_the_end_fail(tmp_path: Path) -> None:
    async with a_connector(f"unix:{tmp_path / 'nobody.sock'}") as connector:
        await asyncio.to_thread(connector.close)
        connector.begin(save(1))
        saved = await outcome(connector)
        assert isinstance(saved, Saved)
        assert saved.held == (False,)


@asynccontextmanager
async def a_worker(target: str, policy: WritePolicy) -> AsyncIterator[WorkerEngine]:
    """An engine with an empty L1 over the store."""
    machine = machine_of(small_fake(prefill_tokens_per_s=200.0), 64)
    runner = machine.runner
    spec = runner.geometry.spec(0, runner.model_id, runner.revision, runner.rope_digest)
    wakers: list[WorkerEngine] = []

    def wake() -> None:
        for engine in wakers:
            engine.wake()

    connector = StoreConnector(DialConfig(targets=(target,)), CLIENT, wake, 5.0)
    terms = OffloadTerms(spec.fingerprint(), policy, lookup_s_min=5.0, lookup_s_max=5.0)
    core = EngineCore(
        machine, CoreTerms(SchedulerLimits(8, 32)), None, Below(connector, terms), time.monotonic
    )
    core.calibrate()
    engine = WorkerEngine(core, CARD, 16)
    wakers.append(engine)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        await asyncio.to_thread(connector.close)


async def generated(engine: WorkerEngine, prompt: list[int]) -> tuple[list[int], CachedTokens]:
    tokens: list[int] = []
    cached = CachedTokens()
    request = GenerationRequest(
        request_id="r",
        prompt_tokens=tuple(prompt),
        sampling=GREEDY,
        tokens_max=8,
        ignore_eos=True,
    )
    async for delta in engine.submit(request):
        tokens += [token.token_id for token in delta.tokens]
        cached = delta.cached or cached
    return tokens, cached


@pytest.mark.parametrize("policy", [WritePolicy.ON_SEAL, WritePolicy.ON_REUSE])
async def test_a_worker_goes_on_where_another_computed(tmp_path: Path, policy: WritePolicy) -> None:
    prompt = [(3 + 7 * i) % 259 for i in range(61)]
    async with a_store(small_store(tmp_path)) as (store, _):
        target = f"unix:{store.socket}"
        async with a_worker(target, policy) as engine:
            for _ in range(2):
                tokens, _cached = await generated(engine, prompt)
                assert tokens == OFF.tokens(prompt, 8)

            async def is_saved() -> bool:
                return store.store.stats().tiers[Tier.DRAM].stats.blocks >= 15

            await eventually_async(is_saved, 30, "the blocks are in the store")
        async with a_worker(target, policy) as engine:
            tokens, cached = await generated(engine, prompt)
    assert tokens == OFF.tokens(prompt, 8)
    assert (cached.dram, cached.gpu) == (60, 0)

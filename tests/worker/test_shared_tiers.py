"""A worker over a live store whose shared tier is a real Redis, or one that fails on demand.

Each test asserts which tier served, that the fault happened, and that no token changed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvtier.core.planner import WritePolicy
from kvtier.peers import PeerTier
from kvtier.store import StoreTier, TierWatch
from kvtier.tiers.faulty import Fail, Fault, FaultyTier, FlipBit, Full, Hang, Operation, Rule, Slow
from kvtier.tiers.faulty import Truncate as Cut
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.types import Tier
from kvtier_services.store import tiers as built
from kvtier_services.store.config import RedisSection, StoreConfig
from kvtier_services.store.main import RunningStore
from kvtier_services.worker.engine import WorkerEngine
from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlValue
from tests.harness.valkey import requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.support.store_cluster import start_store
from tests.support.store_service import MIB, a_store, small_store
from tests.support.worker_cluster import Expected, prompt_of, start_worker
from tests.support.worker_rig import CacheOff
from tests.worker.test_connector import a_worker, generated

pytestmark = pytest.mark.timeout(180)
EXPECTED = Expected()
OFF = CacheOff()
LOADED = "kvtier_worker_loaded_blocks_total"
SMALL_PROMPT = [(3 + 7 * i) % 259 for i in range(61)]
"""15 blocks of 4 tokens, and one token."""


@requires_valkey
async def test_what_one_node_computed_comes_to_another_through_redis(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    valkey = await asyncio.to_thread(start_valkey, processes)
    shared: dict[str, TomlValue] = {
        "url": valkey.url,
        "write_policy": "on_seal",
        "touches_min": 1,
        "deadline_ms": 2000,
    }
    stores = [
        await asyncio.to_thread(
            start_store,
            processes,
            tmp_path / name,
            name,
            node=name,
            nvme={"enabled": False},
            redis=shared,
        )
        for name in ("store-a", "store-b")
    ]
    first, second = [
        await start_worker(
            processes, f"worker-{store.process.name}", store={"targets": [store.socket]}
        )
        for store in stores
    ]
    async with first.client() as one, second.client() as two:
        for number in range(1, 20):
            prompt = prompt_of(number, 321)
            assert (await one.answer(prompt, 20)).text == EXPECTED.text(prompt, 20)

            async def is_shared(least: int = 20 * number) -> bool:
                return (await stores[0].tier(Tier.REDIS)).blocks >= least

            await eventually_async(is_shared, 30, "the blocks are in Redis")
            told = await two.answer(prompt, 20)
            assert told.text == EXPECTED.text(prompt, 20)
            if told.cached == {"redis": 320}:
                break  # else the machine was too slow to load all of it before it was computed
        assert told.cached == {"redis": 320}
        assert await two.metric(LOADED, source="redis") >= 20
        # Gone with what it held: what is in no other tier is computed.
        other = prompt_of(200, 321)
        assert (await one.answer(other, 20)).text == EXPECTED.text(other, 20)
        await asyncio.to_thread(valkey.process.kill)
        told = await two.answer(other, 20)
        assert told.text == EXPECTED.text(other, 20)
        assert told.cached == {}
        assert await two.healthy()
    for worker in (first, second):
        worker.clean_log()


@asynccontextmanager
async def two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_ms: int = 300
) -> AsyncIterator[tuple[FaultyTier, MemoryTier, list[WorkerEngine]]]:
    """Two live stores of one shared tier that does what it is told, and a worker on each."""
    memory = MemoryTier(MemoryConfig(4 * MIB, Tier.REDIS))
    shared = FaultyTier(memory, asyncio.get_running_loop().time)
    open_tiers = built.open_tiers

    async def opened(
        config: StoreConfig, watch: TierWatch, peers: PeerTier | None = None
    ) -> built.BuiltTiers:
        plain = await open_tiers(config, watch, peers)
        tiers = (*plain.tiers, StoreTier(shared))
        return built.BuiltTiers(plain.arena, tiers, None, None, None, None)

    monkeypatch.setattr(built, "open_tiers", opened)
    section = RedisSection(write_policy=WritePolicy.ON_SEAL, touches_min=1, deadline_ms=deadline_ms)
    async with AsyncExitStack() as stack:
        engines = []
        for name in ("a", "b"):
            config = small_store(tmp_path / name, instance=name, node=name, redis=section)
            store: RunningStore
            store, _ = await stack.enter_async_context(a_store(config))
            worker = a_worker(f"unix:{store.socket}", WritePolicy.ON_SEAL)
            engines.append(await stack.enter_async_context(worker))
        yield shared, memory, engines


async def written(memory: MemoryTier) -> None:
    """Wait until the shared tier has all blocks of the prompt."""

    async def is_there() -> bool:
        return memory.stats().blocks >= 15

    await eventually_async(is_there, 30, "the blocks are in the shared tier")


async def test_the_shared_tier_serves_while_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path, monkeypatch, 20_000) as (_, memory, (first, second)):
        tokens, cached = await generated(first, SMALL_PROMPT)
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.total == 0
        await written(memory)
        tokens, cached = await generated(second, SMALL_PROMPT)
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.redis == 60


@pytest.mark.parametrize(
    "fault",
    [Slow(5.0), Fail(), FlipBit(5000), FlipBit(40), Cut(9), Hang()],
    ids=["slow", "failing", "wrong payload", "wrong header", "cut off", "hanging"],
)
async def test_a_read_that_goes_wrong_is_computed(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path, monkeypatch) as (shared, memory, (first, second)):
        await generated(first, SMALL_PROMPT)
        await written(memory)
        shared.add(Rule(Operation.GET, fault))
        tokens, cached = await generated(second, SMALL_PROMPT)
        assert shared.applied[Operation.GET, type(fault)] > 0
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.total == 0
        shared.heal()
        tokens, cached = await generated(second, SMALL_PROMPT)
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.gpu == 60


async def test_one_wrong_block_costs_what_is_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path, monkeypatch) as (shared, memory, (first, second)):
        await generated(first, SMALL_PROMPT)
        await written(memory)
        shared.add(Rule(Operation.GET, FlipBit(5000), times=1))
        tokens, cached = await generated(second, SMALL_PROMPT)
        assert shared.applied[Operation.GET, FlipBit] == 1
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.redis < 60
        assert cached.redis % 4 == 0


@pytest.mark.parametrize("fault", [Full(), Fail()], ids=["full", "failing"])
async def test_what_the_shared_tier_does_not_take_is_served_by_the_node_that_has_it(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path, monkeypatch) as (shared, memory, (first, second)):
        shared.add(Rule(Operation.PUT, fault))
        await generated(first, SMALL_PROMPT)

        async def was_refused() -> bool:
            return shared.applied[Operation.PUT, type(fault)] > 0

        await eventually_async(was_refused, 30, "a put was refused")
        tokens, cached = await generated(second, SMALL_PROMPT)
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.total == 0
        assert memory.stats().blocks == 0
        tokens, cached = await generated(first, SMALL_PROMPT)
        assert tokens == OFF.tokens(SMALL_PROMPT, 8)
        assert cached.gpu == 60

"""A real worker with a real store that is killed, frozen, corrupt, full or absent.

Each test asserts that the fault happened, that no answer was wrong or late beyond reason, and that
the tiers that should have served did.
"""

import asyncio
import random
from pathlib import Path

import pytest

from kvtier.types import Tier
from tests.harness.processes import ProcessRunner
from tests.support.nvme_directory import flip, segments
from tests.support.store_cluster import StoreProcess, start_store, store_launch
from tests.support.worker_cluster import (
    BLOCK,
    MIB,
    Answer,
    Client,
    Expected,
    Failed,
    WorkerProcess,
    prompt_of,
    start_worker,
)

pytestmark = pytest.mark.timeout(180)
EXPECTED = Expected()
PROMPT = prompt_of(1, 321)
"""20 blocks, and one token."""
SAVED = "kvtier_worker_saved_blocks_total"
LOADED = "kvtier_worker_loaded_blocks_total"
COMPUTED = "kvtier_worker_computed_tokens_total"


async def fill_l1(client: Client, number: int) -> None:
    """Put other prompts in place of whatever L1 holds."""
    for i in range(2):
        await client.answer(prompt_of(1000 + 2 * number + i, 600), 1)


async def served_by(client: Client, tier: str, number: int = 0) -> Answer | None:
    """Ask for the prompt, with an L1 that has forgotten it, until all of it comes from the store
    and some of it from a tier. None where it would be NVMe and is all in DRAM: it will stay there.

    A client leaves a store that did not answer alone for up to a second; a load that takes longer
    than computing is given up, and what it had read by then may be in a higher tier.
    """
    told = None
    for at in range(40):
        await fill_l1(client, 10 + 40 * number + at)
        before = await client.metric(COMPUTED)
        told = await client.answer(PROMPT, 20)
        assert told.text == EXPECTED.text(PROMPT, 20)
        loaded = "gpu" not in told.cached and sum(told.cached.values()) == 320
        if loaded and await client.metric(COMPUTED) - before == 1 + 19:
            if tier in told.cached:
                return told
            if tier == "nvme":
                return None
    raise AssertionError(f"the prompt never came from {tier}, the last time from {told}")


async def served_by_disk(client: Client, store: StoreProcess) -> None:
    """Have the store start anew until it gives the prompt from its disk."""
    for number in range(1, 6):
        await asyncio.to_thread(store.process.terminate)
        await asyncio.to_thread(store.process.wait, 40)
        await asyncio.to_thread(store.process.restart)
        if await served_by(client, "nvme", number) is not None:
            return
    raise AssertionError("after no restart the prompt came from the disk")


async def with_store(
    processes: ProcessRunner, tmp_path: Path, **settings: object
) -> tuple[StoreProcess, WorkerProcess]:
    store = await asyncio.to_thread(
        start_store,
        processes,
        tmp_path / "data",
        **settings,  # type: ignore[arg-type]
    )
    return store, await start_worker(
        processes,
        store={"targets": [store.socket]},
        offload={"lookup_ms_max": 300},  # so much is lost to a store that stands still
    )


async def is_computed(client: Client, number: int) -> None:
    """A prompt that nobody has seen is answered, right and without a cache."""
    prompt = prompt_of(number, 70)
    told = await client.answer(prompt, 3)
    assert told.text == EXPECTED.text(prompt, 3)
    assert told.cached == {}


async def test_a_prefix_goes_to_the_store_and_comes_back_from_dram_and_from_nvme(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store, worker = await with_store(processes, tmp_path)
    async with worker.client() as client:
        cold = await client.answer(PROMPT, 20)
        warm = await client.answer(PROMPT, 20)
        await client.until(SAVED, 21, outcome="saved")
        from_dram = await served_by(client, "dram")
        assert from_dram is not None
        await served_by_disk(client, store)
        assert {cold.text, warm.text, from_dram.text} == {EXPECTED.text(PROMPT, 20)}
        assert cold.cached == {}
        assert warm.cached == {"gpu": 320}
        assert await client.metric(LOADED, source="dram") >= 20
        assert await client.metric("kvtier_worker_store_attached") == 1
    worker.clean_log()


async def some_load(client: Client, seed: int, stop: asyncio.Event) -> list[Answer]:
    dice = random.Random(seed)
    told = []
    while not stop.is_set():
        number = dice.randrange(12) if dice.random() < 0.7 else dice.randrange(100, 10_000)
        prompt = [*prompt_of(number, 160), dice.randrange(3)]
        answer = await client.answer(prompt, 4)
        assert answer.text == EXPECTED.text(prompt, 4)
        told.append(answer)
    return told


async def test_a_store_killed_under_load_costs_time_and_no_answer(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store, worker = await with_store(processes, tmp_path)
    stop = asyncio.Event()
    async with worker.client() as client:
        loads = [asyncio.create_task(some_load(client, seed, stop)) for seed in range(4)]
        for _ in range(2):
            saved = await client.metric(SAVED, outcome="saved")
            await client.until(SAVED, saved + 5, outcome="saved")
            await asyncio.to_thread(store.process.kill)
            failed = await client.metric(SAVED, outcome="failed")
            await client.until(SAVED, failed + 1, outcome="failed")
            await asyncio.to_thread(store.process.restart)
        loaded = await client.metric(LOADED, source="dram")
        await client.until(LOADED, loaded + 5, source="dram")
        stop.set()
        told = [answer for answers in await asyncio.gather(*loads) for answer in answers]
        assert sum("dram" in answer.cached for answer in told) > 0
        assert await client.healthy()
    worker.clean_log()


async def test_a_store_that_stands_still_is_not_waited_for(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store, worker = await with_store(processes, tmp_path)
    async with worker.client() as client:
        await client.answer(PROMPT, 4)
        await client.until(SAVED, 20, outcome="saved")
        await fill_l1(client, 0)
        await asyncio.to_thread(store.process.freeze)
        try:
            others = asyncio.create_task(client.answer(prompt_of(50, 33), 60))
            told = await client.answer(PROMPT, 4)
            assert told.text == EXPECTED.text(PROMPT, 4)
            assert (await others).text == EXPECTED.text(prompt_of(50, 33), 60)
            for number in range(3):
                await is_computed(client, 60 + number)
        finally:
            await asyncio.to_thread(store.process.thaw)
        lookups = await client.metric("kvtier_worker_lookups_total", outcome="unknown")
        assert lookups > 0
        await served_by(client, "dram")
    worker.clean_log()


async def corrupt_count(store: StoreProcess) -> int:
    return sum(one.count for one in (await store.tier(Tier.NVME)).corrupt)


async def test_corrupt_blocks_are_computed_and_never_answered_with(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store, worker = await with_store(processes, tmp_path)
    async with worker.client() as client:
        await client.answer(PROMPT, 4)
        await client.until(SAVED, 20, outcome="saved")
        await asyncio.to_thread(store.process.terminate)
        await asyncio.to_thread(store.process.wait, 40)
        (home,) = (path.parent for path in (tmp_path / "data").rglob("generation-*"))
        for path in segments(home):
            for at in range(BLOCK // 4, path.stat().st_size, BLOCK // 2):
                flip(path, at + 777)
        await asyncio.to_thread(store.process.restart)
        for number in range(20):
            await fill_l1(client, number)
            told = await client.answer(PROMPT, 4)
            assert told.text == EXPECTED.text(PROMPT, 4)
            if await corrupt_count(store):
                break
        else:
            raise AssertionError("no corrupt block was met")
        assert told.cached.get("nvme", 0) < 320
        lost = [
            await client.metric("kvtier_worker_load_failures_total", reason=reason)
            for reason in ("corrupt", "miss")
        ]
        assert sum(lost) > 0
        await served_by(client, "dram")  # written anew
    worker.clean_log()


async def test_a_store_without_room_keeps_what_it_can(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    small = {"bytes_max": MIB, "slab_bytes": MIB, "blocks_max": 8}
    _, worker = await with_store(processes, tmp_path, dram=small, nvme={"enabled": False})
    async with worker.client() as client:
        for number in range(4):
            prompt = prompt_of(number, 500)
            told = await client.answer(prompt, 4)
            assert told.text == EXPECTED.text(prompt, 4)
        for number in range(4):
            prompt = prompt_of(number, 500)
            told = await client.answer(prompt, 4)
            assert told.text == EXPECTED.text(prompt, 4)
            assert told.cached.get("dram", 0) <= 8 * 16
        assert await client.healthy()
    worker.clean_log()


async def test_a_store_may_come_after_its_worker(processes: ProcessRunner, tmp_path: Path) -> None:
    launch, _ = store_launch(processes, tmp_path / "data")
    socket = f"unix:{tmp_path / 'data' / 'run' / 'store.sock'}"
    worker = await start_worker(processes, store={"targets": [socket]})
    async with worker.client() as client:
        for number in range(3):
            await is_computed(client, number)
        await client.until(SAVED, 1, outcome="failed")
        await asyncio.to_thread(processes.start, launch)
        await client.until(SAVED, 1, outcome="saved")
        await client.answer(PROMPT, 4)
        await client.until(SAVED, 20, outcome="saved")
        await served_by(client, "dram")
    worker.clean_log()


async def test_a_worker_alone_survives_its_clients(processes: ProcessRunner) -> None:
    """Without a store and without an index: clients that go, a full pool, prompts that are too
    long, and a stop while somebody waits for an answer."""
    worker = await start_worker(processes)
    async with worker.client() as client:
        await clients_go(client)
        await pool_is_full(client)
        await prompt_is_too_long(client)
        waiting = asyncio.create_task(client.answer(prompt_of(9, 200), 30))
        await client.until("kvtier_worker_live_requests", 1, state="running")
        worker.process.terminate()
        assert (await waiting).text == EXPECTED.text(prompt_of(9, 200), 30)
    assert await asyncio.to_thread(worker.process.wait, 40) == 0
    worker.clean_log()


async def clients_go(client: Client) -> None:
    body = {"model": "kvtier-fake", "prompt": prompt_of(3, 300), "max_tokens": 600, "stream": True}
    for _ in range(4):
        async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
            await response.content.readline()
            assert await client.metric("kvtier_worker_live_requests", state="running") > 0
            response.close()
    await client.until("kvtier_worker_requests_total", 4, outcome="cancelled")
    assert await client.metric("kvtier_worker_blocks", state="used") == 0
    await is_computed(client, 4)


async def pool_is_full(client: Client) -> None:
    """Twelve requests of 300 tokens in a pool of 1,024."""
    prompts = [prompt_of(100 + n, 200) for n in range(12)]
    told = await asyncio.gather(*(client.answer(prompt, 100) for prompt in prompts))
    assert [one.text for one in told] == [EXPECTED.text(prompt, 100) for prompt in prompts]
    assert await client.metric("kvtier_worker_preempted_total") > 0


async def prompt_is_too_long(client: Client) -> None:
    told = await client.ask(prompt_of(5, 1024), 1)
    assert isinstance(told, Failed)
    assert told.status == 400
    await is_computed(client, 6)

"""A store process is killed, stopped, restarted and left by its clients, under load.

Each test asserts that the fault happened, what was promised while it lasted, and what came after.
"""

import asyncio
import random
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvtier.client.store import BlockStoreClient, WriteTerms
from kvtier.core.frame import HEADER_BYTES, FrameName
from kvtier.types import ScopeId, Tier
from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport
from tests.faults.store_client_process import WRITER_TTL_MS
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command, python_module
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually, eventually_async
from tests.support.store_cluster import (
    MIB,
    StoreProcess,
    get,
    put,
    some_numbers,
    start_store,
)
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of

NUMBERS = 400
KILLS = 2
LOSS_WINDOW_MS = 1000


async def load(store: StoreProcess, seed: int, stop: asyncio.Event) -> Counter[str]:
    """Put and get blocks at random until told to stop; wrong bytes fail in `get`."""
    dice = random.Random(seed)
    seen: Counter[str] = Counter()
    async with store.client(remote=seed % 3 == 0) as client:
        while not stop.is_set():
            numbers = some_numbers(dice, NUMBERS, 6)
            if dice.random() < 0.5:
                held = await put(client, numbers, version=dice.randrange(3))
                seen["held"] += sum(held)
                seen["lost"] += len(held) - sum(held)
            else:
                versions = await get(client, numbers)
                seen["hits"] += sum(v is not None for v in versions)
                seen["misses"] += sum(v is None for v in versions)
    return seen


async def test_a_store_killed_under_load_serves_no_wrong_byte_after_its_restart(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    stop = asyncio.Event()
    loads = [asyncio.create_task(load(store, seed, stop)) for seed in range(4)]
    for _ in range(KILLS):
        await until_saved(store, 150)
        await asyncio.to_thread(store.process.kill)
        assert not any(task.done() for task in loads)
        await asyncio.to_thread(store.process.restart)
        assert (await store.tier(Tier.NVME)).blocks > 0
    await until_saved(store, 150)
    stop.set()
    seen = sum(await asyncio.gather(*loads), Counter())
    assert min(seen["held"], seen["hits"], seen["misses"], seen["lost"]) > 0
    async with store.client() as client:
        found = [v for n in range(0, NUMBERS, 50) for v in await get(client, range(n, n + 50))]
    assert sum(v is not None for v in found) > 100
    assert store.process.starts_count == KILLS + 1
    store.clean_log()


async def until_saved(store: StoreProcess, count: int) -> None:
    """Wait until so many blocks are on disk for longer than the loss window of a kill."""

    async def is_written() -> bool:
        return (await store.tier(Tier.NVME)).blocks >= count

    await eventually_async(is_written, 30, f"{count} blocks on disk")
    await later(store, LOSS_WINDOW_MS)


async def later(store: StoreProcess, ms: int) -> None:
    """Wait until the store has lived so much longer, by its own clock."""
    since_ms = (await store.stats()).uptime_ms

    async def is_later() -> bool:
        return (await store.stats()).uptime_ms >= since_ms + ms

    await eventually_async(is_later, 30, f"{ms} ms later")


async def put_all(client: BlockStoreClient, numbers: range) -> None:
    """Put blocks, again where DRAM is full of what the disk has not taken yet."""

    async def is_held() -> bool:
        return all(await put(client, numbers))

    await eventually_async(is_held, 30, "the blocks are held")


def client_launch(role: str, store: StoreProcess) -> Launch:
    argv = python_module("tests.faults.store_client_process", role, str(store.run_dir))
    return Launch(f"client-{role}", argv, directory=Path(__file__).resolve().parents[2])


async def says(process: Process, word: str) -> None:
    await asyncio.to_thread(
        eventually, lambda: word in process.log_text(), 30, f"the client says {word}"
    )


async def test_a_client_that_dies_leaves_no_lease_and_no_reservation(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    async with store.client() as client:
        assert all(await put(client, [1, 2, 3]))
        holder = processes.start(client_launch("hold", store))
        await says(holder, "holding")
        assert await store.count("leases") == 3
        assert await store.count("reservations") == 6
        await asyncio.to_thread(holder.kill)

        async def is_clean() -> bool:
            dram = await store.tier(Tier.DRAM)
            held = await store.count("leases") + await store.count("reservations")
            return (dram.blocks_pinned, dram.blocks_reserved, held) == (0, 0, 0)

        await eventually_async(is_clean, 30, "nothing is held for the dead client")
        assert await get(client, [1, 2, 3]) == [0, 0, 0]
        for start in range(1000, 1400, 8):
            await put_all(client, range(start, start + 8))
    store.clean_log()


async def test_a_writer_stopped_past_its_reservation_changes_no_published_block(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    writer = processes.start(client_launch("write", store))
    await says(writer, "reserved")
    await asyncio.to_thread(writer.freeze)
    async with store.client() as client:
        assert await put(client, [1], version=5) == [True]
        for start in range(1000, 1200, 8):
            await put_all(client, range(start, start + 8))

        await later(store, 3 * WRITER_TTL_MS)
        assert (await store.tier(Tier.DRAM)).blocks_reserved == 1
        (store.run_dir / "go").touch()
        await asyncio.to_thread(writer.thaw)
        await says(writer, "committed")
        for _ in range(50):
            assert await get(client, [1]) == [5]
        await says(writer, "done")
        assert await get(client, [1]) == [5]
    assert "committed stored" not in writer.log_text()
    await asyncio.to_thread(writer.wait, 40)
    store.clean_log()


async def test_a_store_told_to_stop_drains_and_its_blocks_are_there_again(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    async with store.client() as client:
        for start in range(0, 80, 8):
            await put_all(client, range(start, start + 8))
        await asyncio.to_thread(store.process.terminate)
        assert await asyncio.to_thread(store.process.wait, 40) == 0
        assert await get(client, [1]) == [None]
        await asyncio.to_thread(store.process.restart)

        async def is_there() -> bool:
            return (await get(client, [0]))[0] == 0

        await eventually_async(is_there, 30, "the client finds the store again")
        found = await get(client, range(80))
        assert sum(v is not None for v in found) >= 72
    store.clean_log()


async def test_a_second_store_on_the_same_directory_ends_with_one_line(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    table: dict[str, TomlValue] = {
        "data_dir": str(tmp_path / "data"),
        "listen": {"bind": "127.0.0.1:0"},
        "dram": {"bytes_max": 8 * MIB, "slab_bytes": MIB},
    }
    elsewhere: dict[str, TomlValue] = {"run_dir": str(tmp_path / "elsewhere")}
    for name, settings in (("same-run", table), ("same-data", table | elsewhere)):
        path = processes.config_file(f"{name}.toml", settings)
        second = processes.spawn(Launch(name, kvtier_command("store", "--config", str(path))))
        assert await asyncio.to_thread(second.wait, 40) == 1
        assert "Traceback" not in second.log_text()
    async with store.client() as client:
        assert all(await put(client, [1]))


@pytest.mark.timeout(180)  # 140,000 puts; other tests run meanwhile
async def test_a_hundred_thousand_blocks_of_two_models_and_three_tenants_fit_in_bounded_memory(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    dram: dict[str, TomlValue] = {
        "bytes_max": 64 * MIB, "slab_bytes": MIB, "blocks_max": 110_000,
    }  # fmt: skip
    nvme: dict[str, TomlValue] = {"enabled": False}
    quotas = [f"dram:{16 * MIB}:tenant-{n}" for n in range(3)]
    start = partial(start_store, processes, tmp_path / "data", dram=dram, nvme=nvme, quotas=quotas)
    store = await asyncio.to_thread(start)
    async with store.client() as client:
        for at in range(0, 100_000, 4000):
            await put_small(client, range(at, at + 4000))
        assert (await store.tier(Tier.DRAM)).blocks == 100_000
        used = {quota.scope: quota.used_bytes for quota in (await store.stats()).quotas}
        assert used.keys() == {"tenant-0", "tenant-1", "tenant-2"}
        assert all(30_000 * HEADER_BYTES < size < 16 * MIB for size in used.values())
        before = rss(store)
        for at in range(100_000, 140_000, 4000):
            await put_small(client, range(at, at + 4000))
        assert (await store.tier(Tier.DRAM)).blocks <= 110_000
        assert rss(store) - before < 100 * MIB
        newest = range(139_000, 140_000)
        assert await held_small(client, newest) == set(newest)
        others = [name_of(n, NAMESPACE) for n in newest if n % 2]
        assert not any(result.is_hit for result in await client.get_many(others))
        assert await dropped_of(store, "tenant-1") > 10_000
        assert await held_small(client, newest) == {n for n in newest if n % 3 != 1}
    store.clean_log()


async def dropped_of(store: StoreProcess, scope: str) -> int:
    """Drop all blocks of a tenant; how many there were."""
    channel = transport.new_channel(f"127.0.0.1:{store.port}")
    try:
        request = pb.DropBlocksRequest(scope=scope)
        return int((await rpc.call(channel, rpc.STORE, "Drop")(request, timeout=60)).dropped)
    finally:
        await channel.close()


def small_name(number: int) -> FrameName:
    """Odd numbers are blocks of one model, even ones of another."""
    return name_of(number, OTHER_NAMESPACE if number % 2 else NAMESPACE)


def small(number: int) -> bytes:
    """One model's blocks are three times as long as the other's."""
    return np.full(24 if number % 2 else 8, number, np.uint64).tobytes()


async def put_small(client: BlockStoreClient, numbers: range) -> None:
    """Put blocks: of every third number for the same tenant, in chains of one model and tenant."""
    for rest in range(6):
        some = [n for n in numbers if n % 6 == rest]
        terms = WriteTerms(scope=ScopeId(f"tenant-{rest % 3}"))
        results = await client.put_many(
            [small_name(n) for n in some], [small(n) for n in some], terms, deadline_s=30.0
        )
        assert all(result.is_held for result in results)


async def held_small(client: BlockStoreClient, numbers: range) -> set[int]:
    """Which are there; other bytes fail."""
    found: set[int] = set()
    for some in (numbers[::2], numbers[1::2]):  # a call is of one model
        hits = await client.get_many([small_name(n) for n in some])
        for n, hit in zip(some, hits, strict=True):
            if hit.is_hit:
                assert hit.payload is not None
                assert bytes(hit.payload) == small(n)
                found.add(n)
    return found


def rss(store: StoreProcess) -> int:
    size: int = psutil.Process(store.process.pid).memory_info().rss
    return size

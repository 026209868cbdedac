"""`kvtier store` with NIXL as processes: two askers, ends that die on the way, and the end.

Real agents over UCX: what they do is not what a stand-in says they do. A store gives what was put
or nothing, and ends in time whatever its agents are doing.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.errors import KvtierError
from kvtier.peers.nixl_agent import is_installed
from kvtier.peers.nixl_transport import NixlTransport
from kvtier.peers.staging import SLOTS
from kvtier.ports import BlockOwner, GetRequest, GetStatus, PeerPlace, PutRequest
from kvtier.sections import DialConfig
from kvtier.types import InstanceId, NodeId, ScopeId, Tier
from tests.harness.ports import free_port
from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import start_index
from tests.support.store_cluster import (
    BLOCK,
    StoreProcess,
    described,
    get,
    put,
    start_store,
    version_of,
)
from tests.tiers.contract import name_of, soon

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not is_installed(), reason="NIXL: pip install 'kvtier[nixl]'"),
]
NUMBERS = range(48)
OWNER = BlockOwner(7, ScopeId("it"))
END_S = 60.0
PATIENT: TomlValue = {"transport": "nixl", "deadline_ms": 20_000, "ask_ms": 20_000}


class Asker:
    """One process's way to one store by NIXL alone: nothing else is tried."""

    def __init__(self, store: StoreProcess, bulk_port: int) -> None:
        self.place = PeerPlace(
            InstanceId(store.process.name),
            NodeId("node-1"),
            f"127.0.0.1:{store.port}",
            f"127.0.0.1:{bulk_port}",
        )
        self.transport = NixlTransport(DialConfig())

    async def put(self, *numbers: int) -> None:
        asked = [PutRequest(name_of(n), memoryview(described(n)), OWNER) for n in numbers]
        results = await self.transport.put_many(self.place, asked, soon())
        assert all(one.is_held for one in results), results

    async def get(self, *numbers: int, deadline_s: float | None = None) -> list[bool]:
        """Which are there; other bytes fail."""
        asked = [GetRequest(name_of(n), None, BLOCK) for n in numbers]
        results = await self.transport.get_many(self.place, asked, deadline_s or soon())
        for number, one in zip(numbers, results, strict=True):
            assert one.status in {GetStatus.HIT, GetStatus.MISS, GetStatus.ERROR}, one
            if one.is_hit:
                assert one.payload is not None
                assert version_of(number, one.payload) == 0
        return [one.is_hit for one in results]


@asynccontextmanager
async def asking(store: StoreProcess, bulk_port: int) -> AsyncIterator[Asker]:
    asker = Asker(store, bulk_port)
    try:
        yield asker
    finally:
        await asker.transport.close()


async def ends(store: StoreProcess) -> None:
    store.process.terminate()
    assert await asyncio.to_thread(store.process.wait, END_S) == 0
    store.clean_log()


async def test_a_store_that_stands_still_or_dies_while_it_is_read_gives_right_bytes_or_none(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    port = free_port()
    store = await asyncio.to_thread(
        start_store, processes, tmp_path, peers=PATIENT, bulk={"port": port}
    )
    async with asking(store, port) as one, asking(store, port) as other:
        await one.put(*NUMBERS)
        assert await other.get(*NUMBERS) == [True] * len(NUMBERS)
        store.process.freeze()
        for _ in range(2):
            with pytest.raises(KvtierError):
                await one.get(*NUMBERS, deadline_s=time.monotonic() + 0.5)
        store.process.thaw()

        async def is_settled() -> bool:
            return one.transport.quarantined == 0

        await eventually_async(is_settled, 90, "what the store writes late has come to rest")
        assert one.transport.free + one.transport.retired == SLOTS
        reads = 0

        async def reading(asker: Asker) -> None:
            nonlocal reads
            while True:
                assert all(await asker.get(*NUMBERS))
                reads += 1

        async def has_read() -> bool:
            return reads >= 4

        tasks = [asyncio.create_task(reading(asker)) for asker in (one, other)]
        await eventually_async(has_read, 60, "both read")
        await asyncio.to_thread(store.process.kill)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, KvtierError) for error in ended), ended
        await asyncio.to_thread(store.process.restart)
        async with store.client() as client:
            await put(client, NUMBERS)

        async def is_read_again() -> bool:
            try:
                return all([*await one.get(*NUMBERS), *await other.get(*NUMBERS)])
            except KvtierError:
                return False

        await eventually_async(is_read_again, 60, "the store that was started anew is read")
        reads = 0
        tasks = [asyncio.create_task(reading(asker)) for asker in (one, other)]
        await eventually_async(has_read, 60, "both read while it is told to end")
        await ends(store)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, KvtierError) for error in ended), ended


async def test_an_asker_that_dies_or_stands_still_while_it_reads_costs_others_nothing(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    index = await start_index(processes)
    dial: TomlValue = {"targets": [index.address]}
    port = free_port()
    store = await asyncio.to_thread(
        start_store, processes, tmp_path / "a", "a",
        peers=PATIENT, bulk={"port": port}, index=dial,
    )  # fmt: skip
    far = await asyncio.to_thread(
        start_store, processes, tmp_path / "b", "b",
        peers=PATIENT, node="node-2", index=dial, promote_touches_min=1000,
    )  # fmt: skip
    async with asking(store, port) as beside, store.client() as near, far.client() as reader:
        assert all(await put(near, NUMBERS))

        async def is_read() -> bool:
            return await get(reader, NUMBERS) == [0] * len(NUMBERS)

        await eventually_async(is_read, 60, "blocks come from the other node")
        assert sum(one.count for one in (await far.tier(Tier.PEER)).gets if one.name == "hit")
        assert all(await beside.get(*NUMBERS))
        far.process.freeze()
        assert all(await beside.get(*NUMBERS))
        far.process.thaw()
        await asyncio.to_thread(far.process.kill)
        for _ in range(4):
            assert all(await beside.get(*NUMBERS))
        await asyncio.to_thread(far.process.restart)
    async with far.client() as reader:

        async def is_read_anew() -> bool:
            return await get(reader, NUMBERS) == [0] * len(NUMBERS)

        await eventually_async(is_read_anew, 60, "and again by one that was started anew")
    await ends(far)
    await ends(store)

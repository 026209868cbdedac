"""The store's client, async and blocking, against a served store: payload of every kind."""

import asyncio
import io
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.client import store_blocking
from kvtier.client.store import (
    BlockStoreClient,
    ReadTerms,
    SharedMemory,
    StoreClientConfig,
    WriteTerms,
)
from kvtier.client.store_memory import Payload
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.planner import WritePolicy
from kvtier.errors import CallerError
from kvtier.ports import GetStatus, PutStatus
from kvtier.sections import DialConfig
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier.tiers.arena.directory import ABI_VERSION
from kvtier.types import Tier
from kvtier_services.store.config import NvmeSection, StoreConfig
from kvtier_services.store.main import RunningStore, serve
from tests.harness.waiting import eventually_async
from tests.support.store_service import BLOCK, MIB, names, small_store
from tests.tiers.contract import NAMESPACE, name_of, payload_of, soon

SMALL = StoreClientConfig(
    deadline_s=20.0, arena=ArenaClientConfig(segment_bytes=4 * MIB, staging_bytes=4 * MIB)
)
REMOTE = replace(SMALL, shared_memory=SharedMemory.NEVER)
LENGTH = ReadTerms(payload_bytes=BLOCK)


def dial(running: RunningStore) -> DialConfig:
    return DialConfig(targets=(f"unix:{running.socket}",))


def payloads(*numbers: int) -> list[bytes]:
    return [payload_of(n, BLOCK) for n in numbers]


@asynccontextmanager
async def a_client(
    config: StoreConfig, client_config: StoreClientConfig = SMALL
) -> AsyncIterator[tuple[RunningStore, BlockStoreClient]]:
    async with (
        serve(config, io.StringIO()) as running,
        BlockStoreClient(dial(running), client_config) as client,
    ):
        yield running, client


@pytest.mark.parametrize("config", [SMALL, REMOTE], ids=["shared", "chunks"])
async def test_blocks_come_back_as_they_were_put(tmp_path: Path, config: StoreClientConfig) -> None:
    async with a_client(small_store(tmp_path), config) as (_, client):
        results = await client.put_many(names(1, 2), payloads(1, 2))
        assert [r.status for r in results] == [PutStatus.STORED] * 2
        assert client.is_attached == (config is SMALL)
        found = await client.get_many(names(2, 9, 1))
        assert [r.status for r in found] == [GetStatus.HIT, GetStatus.MISS, GetStatus.HIT]
        assert [bytes(r.payload or b"") for r in found] == [payloads(2)[0], b"", payloads(1)[0]]
        again = await client.put_many(names(1), payloads(2))
        assert again[0].status is PutStatus.DIVERGENT


@pytest.mark.parametrize("config", [SMALL, REMOTE], ids=["shared", "chunks"])
async def test_arrays_and_tensors_are_put_and_filled_in_place(
    tmp_path: Path, config: StoreClientConfig
) -> None:
    async with a_client(small_store(tmp_path), config) as (_, client):
        array = np.arange(BLOCK // 4, dtype=np.float32).reshape(64, -1)
        tensor = torch.arange(BLOCK // 2).to(torch.bfloat16).reshape(2, -1)
        crooked = torch.arange(32, dtype=torch.int32).reshape(4, 8).t()
        results = await client.put_many(names(1, 2, 3), [array, tensor, crooked])
        assert [r.status for r in results] == [PutStatus.STORED] * 3
        array_back, tensor_back = np.zeros_like(array), torch.zeros_like(tensor)
        crooked_back = torch.zeros((8, 4), dtype=torch.int32)
        into: list[Payload] = [array_back, tensor_back, crooked_back]
        found = await client.get_many(names(1, 2, 3), into)
        assert all(r.is_hit for r in found)
        assert np.array_equal(array, array_back)
        assert torch.equal(tensor, tensor_back)
        assert torch.equal(crooked, crooked_back)


async def test_memory_that_cannot_be_used_is_the_callers_mistake(tmp_path: Path) -> None:
    async with a_client(small_store(tmp_path)) as (_, client):
        bad: list[Payload] = [bytes(8), torch.zeros(4, 4).t(), torch.zeros(4, device="meta")]
        for target in bad:
            with pytest.raises(CallerError):
                await client.get_many(names(1), [target])
        with pytest.raises(CallerError):
            await client.put_many(names(1, 2), payloads(1))
        with pytest.raises(CallerError):
            await client.put_many(names(1), [np.array([object()])])


async def test_a_buffer_of_another_length_gets_no_bytes(tmp_path: Path) -> None:
    for config in (SMALL, REMOTE):
        async with a_client(small_store(tmp_path), config) as (_, client):
            await client.put_many(names(1), payloads(1))
            short, long = bytearray(BLOCK - 1), bytearray(BLOCK + 1)
            found = await client.get_many(names(1, 1), [short, long])
            assert not found[0].is_hit
            assert found[1].payload is not None
            assert bytes(found[1].payload) == payloads(1)[0]
            wrong = await client.get_many(names(1), [short], ReadTerms(payload_bytes=BLOCK - 1))
            assert not wrong[0].is_hit
            assert (await client.get_many(names(1), None, LENGTH))[0].is_hit


async def test_blocks_from_below_come_through_shared_memory(tmp_path: Path) -> None:
    nvme = NvmeSection(bytes_max=64 * MIB, write_policy=WritePolicy.ON_SEAL)
    async with a_client(small_store(tmp_path, nvme=nvme)) as (running, client):
        for n in range(0, 200, 10):
            await client.put_many(names(*range(n, n + 10)), payloads(*range(n, n + 10)))
            assert await running.store.settled(soon())
        assert await client.contains(names(0, 199)) == [
            {Tier.NVME}, {Tier.DRAM, Tier.NVME},
        ]  # fmt: skip
        into = [bytearray(BLOCK) for _ in range(20)]
        found = await client.get_many(names(*range(20)), into, LENGTH)
        assert [r.is_hit for r in found] == [True] * 20
        assert [bytes(one) for one in into] == payloads(*range(20))
        assert Tier.DRAM in (await client.contains(names(0)))[0]

        async def no_leases() -> bool:
            page = running.metrics.render().decode()
            return "kvtier_store_leases 0.0" in page

        await eventually_async(no_leases, 30, "the leases end with the call")


async def test_a_block_longer_than_the_segment_goes_through_it_in_pieces(tmp_path: Path) -> None:
    config = replace(SMALL, arena=ArenaClientConfig(segment_bytes=1 << 16, staging_bytes=1 << 16))
    async with a_client(small_store(tmp_path), config) as (_, client):
        big = random.Random(1).randbytes(1 << 18)
        assert (await client.put_many(names(1, 2), [big, b"x" * 100]))[0].is_held
        found = await client.get_many(names(1, 2))
        assert [bytes(r.payload or b"") for r in found] == [big, b"x" * 100]


async def test_without_a_store_everything_is_a_miss_and_soon(tmp_path: Path) -> None:
    path = tmp_path / "nobody.sock"
    async with BlockStoreClient(DialConfig(targets=(f"unix:{path}",)), SMALL) as client:
        for _ in range(5):
            assert not (await client.get_many(names(1), None, LENGTH))[0].is_hit
            put = (await client.put_many(names(1), payloads(1)))[0]
            assert (put.status, put.reason) == (PutStatus.ERROR, "unavailable")
        assert await client.contains(names(1)) == [frozenset()]
        assert await client.prefetch(names(1)) == 0


async def test_a_client_of_another_abi_gets_its_blocks_as_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.client.store_arena.ABI_VERSION", ABI_VERSION + 1)
    async with a_client(small_store(tmp_path)) as (running, client):
        assert [r.status for r in await client.put_many(names(1), payloads(1))] == ["stored"]
        (found,) = await client.get_many(names(1), None, LENGTH)
        assert bytes(found.payload or b"") == payloads(1)[0]
        assert not client.is_attached
        assert running.store.stats().counts.hits[Tier.DRAM] == 1


async def test_a_store_that_appears_later_is_found(tmp_path: Path) -> None:
    config = small_store(tmp_path)
    target = f"unix:{tmp_path}/run/store.sock"
    async with BlockStoreClient(DialConfig(targets=(target,)), SMALL) as client:
        assert not (await client.get_many(names(1)))[0].is_hit
        async with serve(config, io.StringIO()):
            await stored(client, 1)
        assert not (await client.get_many(names(1), None, LENGTH))[0].is_hit
        async with serve(config, io.StringIO()):
            await stored(client, 2)
            found = await client.get_many(names(2, 1))
            assert [r.is_hit for r in found] == [True, False]


async def stored(client: BlockStoreClient, number: int) -> None:
    async def is_stored() -> bool:
        held = (await client.put_many(names(number), payloads(number)))[0].is_held
        return held and client.is_attached

    await eventually_async(is_stored, 30, "the store is found, and its shared memory")


async def test_blocks_named_by_engine_digests_bring_their_prefix_hashes(tmp_path: Path) -> None:
    async with a_client(small_store(tmp_path)) as (_, client):
        digests = [FrameName(KeyKind.ENGINE_DIGEST, bytes([n]) * 16, NAMESPACE) for n in (1, 2)]
        terms = WriteTerms(prefix_hashes=(11, 12))
        results = await client.put_many(digests, payloads(1, 2), terms)
        assert [r.status for r in results] == [PutStatus.STORED] * 2
        assert [r.is_hit for r in await client.get_many(digests)] == [True, True]
        with pytest.raises(CallerError):
            await client.put_many(digests, payloads(1, 2), WriteTerms(prefix_hashes=(11,)))


async def test_a_cancelled_read_gives_the_buffer_back_at_once(tmp_path: Path) -> None:
    async with a_client(small_store(tmp_path)) as (_, client):
        await client.put_many(names(1), payloads(1))
        for steps in range(30):
            into = bytearray(BLOCK)
            task = asyncio.ensure_future(client.get_many(names(1, 9), [into, None], LENGTH))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            before = bytes(into)
            into[:] = b"\1" * BLOCK
            await asyncio.sleep(0)
            assert into == b"\1" * BLOCK
            assert before in (bytes(BLOCK), payloads(1)[0])
        assert (await client.get_many(names(1)))[0].is_hit


async def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    def use(target: DialConfig) -> None:
        with store_blocking.BlockStoreClient(target, SMALL) as client:
            assert client.put_many(names(1, 2), payloads(1, 2))[0].is_held
            assert client.is_attached
            assert client.put_many(names(3), payloads(3))[0].status is PutStatus.STORED
            found = client.get_many(names(1, 9, 3), None, LENGTH)
            assert [r.is_hit for r in found] == [True, False, True]
            into = torch.zeros(BLOCK, dtype=torch.uint8)
            assert client.get_many(names(2), [into])[0].is_hit
            assert bytes(into.numpy()) == payloads(2)[0]
            assert client.contains(names(1)) == [{Tier.DRAM}]
            assert client.prefetch(names(1)) == 1
            assert client.drop(names(1, 2)) == 2
            assert not client.get_many(names(1))[0].is_hit

    async with serve(small_store(tmp_path), io.StringIO()) as running:
        await asyncio.to_thread(use, dial(running))


def test_a_client_has_one_store() -> None:
    with pytest.raises(CallerError):
        BlockStoreClient(DialConfig(targets=("unix:/a", "unix:/b")))
    with pytest.raises(CallerError):
        StoreClientConfig(deadline_s=0)
    assert name_of(1).namespace == NAMESPACE

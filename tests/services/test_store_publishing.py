"""What an index hears of a store: its own blocks by tier, and those of a shared Redis."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config import Secret
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.planner import WritePolicy
from kvtier.ports import ByNames
from kvtier.sections import DialConfig, ListenConfig
from kvtier.tiers.redis.control import RedisControl, ServerState
from kvtier.tiers.redis.holder import HolderPolicy
from kvtier.tiers.redis.naming import block_key
from kvtier.types import Fingerprint, HolderKind, Tier, Trust
from kvtier.wire import blocks, rpc
from kvtier.wire import messages as pb
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import RunningIndex
from kvtier_services.index.main import serve as serve_index
from kvtier_services.store.config import NvmeSection, RedisSection, StoreConfig
from kvtier_services.store.main import RunningStore
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.support.store_cluster import start_store
from tests.support.store_service import BLOCK, MIB, Client, a_store, names, small_store
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of, payload_of, soon


@asynccontextmanager
async def an_index(lease_ms: int = 1000) -> AsyncIterator[RunningIndex]:
    listen = ListenConfig(bind="127.0.0.1:0")
    config = IndexConfig(listen=listen, lease_ms=lease_ms, drain_ms_max=0)
    async with serve_index(config, io.StringIO()) as running:
        yield running


def held(index: RunningIndex, kind: HolderKind, tier: Tier) -> set[int]:
    """Prefix hashes that the index knows of all holders of a kind."""
    found: set[int] = set()
    for record in index.state.fleet.records():
        if record.key.kind is kind and not record.hidden:
            for shard in record.shards:
                snapshot = index.state.fleet.index.snapshot(record.holder, tier, shard)
                found.update(snapshot.hashes.tolist())
    return found


def shown(index: RunningIndex) -> dict[Fingerprint, set[int]]:
    """What the index says of a shared Redis, namespace by namespace."""
    found: dict[Fingerprint, set[int]] = {}
    for record in index.state.fleet.records():
        if record.key.kind is HolderKind.SHARED and not record.hidden:
            for shard in record.shards:
                snapshot = index.state.fleet.index.snapshot(record.holder, Tier.REDIS, shard)
                found.setdefault(record.info.namespace, set()).update(snapshot.hashes.tolist())
    return found


def hashes(*numbers: int) -> set[int]:
    return {int.from_bytes(name.key[:8], "little") for name in names(*numbers)}


async def until(condition: Callable[[], bool], what: str) -> None:
    async def asked() -> bool:
        return condition()

    await eventually_async(asked, 30, what)


def telling(index: RunningIndex, directory: Path, **changes: object) -> StoreConfig:
    dial = DialConfig(targets=(f"127.0.0.1:{index.port}",))
    return small_store(directory, index=dial, **changes)


async def test_an_index_hears_of_each_tier_what_it_holds(tmp_path: Path) -> None:
    nvme = NvmeSection(bytes_max=64 * MIB, write_policy=WritePolicy.ON_SEAL)
    async with an_index() as index:
        config = telling(index, tmp_path, nvme=nvme)
        async with a_store(config) as (running, client):
            await client.put_numbers(1, 2, 3)
            await until(lambda: held(index, HolderKind.STORE, Tier.DRAM) == hashes(1, 2, 3), "dram")
            await until(lambda: held(index, HolderKind.STORE, Tier.NVME) == hashes(1, 2, 3), "nvme")
            [record] = index.state.fleet.records()
            info = record.info
            assert (info.instance, info.node, info.namespace) == ("s1", "n1", NAMESPACE)
            assert info.addresses.grpc == f"127.0.0.1:{running.port}"
            assert {c.tier for c in info.capacities} == {Tier.DRAM, Tier.NVME}
            await running.store.drop(ByNames(tuple(names(2))), soon())
            await until(
                lambda: (
                    held(index, HolderKind.STORE, Tier.NVME)
                    == held(index, HolderKind.STORE, Tier.DRAM)
                    == hashes(1, 3)
                ),
                "a drop",
            )
            await client.put({7: payload_of(7, BLOCK)}, namespace=OTHER_NAMESPACE)
            await until(lambda: len(list(index.state.fleet.records())) == 2, "a second holder")
            assert index.state.trust(record.holder)[0] is Trust.EXACT
        await until(lambda: not held(index, HolderKind.STORE, Tier.DRAM), "a goodbye")
        async with a_store(config):
            await until(lambda: held(index, HolderKind.STORE, Tier.NVME) >= hashes(1, 3), "disk")
            assert held(index, HolderKind.STORE, Tier.DRAM) == set()


async def test_what_leaves_dram_is_taken_back(tmp_path: Path) -> None:
    async with an_index() as index, a_store(telling(index, tmp_path)) as (running, client):
        for start in range(0, 300, 20):
            await client.put_numbers(*range(start, start + 20))

        def is_told() -> bool:
            told = held(index, HolderKind.STORE, Tier.DRAM)
            return told >= hashes(299) and len(told) == blocks_of(running) < 300

        await until(is_told, "as many blocks as the tier holds, the last one too")


def blocks_of(running: RunningStore) -> int:
    return running.store.stats().tiers[Tier.DRAM].stats.blocks


async def test_blocks_of_engine_digests_are_told_by_their_prefix_hashes(tmp_path: Path) -> None:
    async with an_index() as index, a_store(telling(index, tmp_path)) as (running, client):
        digests = [FrameName(KeyKind.ENGINE_DIGEST, bytes([n]) * 16, NAMESPACE) for n in (1, 2)]
        head = pb.PutHead(names=blocks.names_to(digests), lengths=blocks.u64s([8, 8]))
        head.prefix_hashes = blocks.u64s([111, 222])
        assert await put_with(client, head, b"a" * 16) == bytes(2)
        await until(lambda: held(index, HolderKind.STORE, Tier.DRAM) == {111, 222}, "both")
        silent = FrameName(KeyKind.ENGINE_DIGEST, bytes([3]) * 16, NAMESPACE)
        late = pb.PutHead(names=blocks.names_to([silent]), lengths=blocks.u64s([8]))
        await put_with(client, late, b"b" * 8)
        announce = pb.AnnounceRequest(
            names=blocks.names_to([silent]), prefix_hashes=blocks.u64s([333])
        )
        await client.ask("Announce", announce)
        await until(lambda: held(index, HolderKind.STORE, Tier.DRAM) == {111, 222, 333}, "three")
        await running.store.drop(ByNames((digests[0],)), soon())
        await until(lambda: held(index, HolderKind.STORE, Tier.DRAM) == {222, 333}, "a drop")


async def put_with(client: Client, head: pb.PutHead, data: bytes) -> bytes:
    async def messages() -> AsyncIterator[pb.PutBlocksRequest]:
        yield pb.PutBlocksRequest(head=head)
        yield pb.PutBlocksRequest(data=data)

    answer = await rpc.call(client.channel, rpc.STORE, "Put")(messages(), timeout=10)
    statuses: bytes = answer.statuses
    return statuses


@requires_valkey
async def test_a_shared_redis_is_a_holder_of_its_own_and_outlives_the_writer(
    tmp_path: Path, processes: ProcessRunner
) -> None:
    server = start_valkey(processes)
    redis = RedisSection(url=Secret(server.url), write_policy=WritePolicy.ON_SEAL, touches_min=1)
    async with an_index() as index:
        first = telling(index, tmp_path / "a", redis=redis)
        second = replace(telling(index, tmp_path / "b", redis=redis), instance="s2", node="n2")
        async with AsyncExitStack() as stack:
            running, writer = await stack.enter_async_context(a_store(first))
            await writer.put_numbers(1, 2)
            assert await running.store.settled(soon())
            await until(
                lambda: held(index, HolderKind.SHARED, Tier.REDIS) >= hashes(1, 2), "shared"
            )
            async with a_store(second) as (_, reader):
                assert await reader.get([1], payload_bytes=BLOCK) == [payload_of(1, BLOCK)]
                await stack.aclose()
                assert await reader.get([2], payload_bytes=BLOCK) == [payload_of(2, BLOCK)]
                await until(
                    lambda: held(index, HolderKind.SHARED, Tier.REDIS) >= hashes(1, 2),
                    "announced by the other store",
                )
                assert held(index, HolderKind.STORE, Tier.REDIS) == set()


async def test_a_store_ends_although_its_redis_client_swallows_that_it_shall(
    tmp_path: Path, processes: ProcessRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As redis-py does where it is cancelled while it sends: it waits with `asyncio.wait_for`, and
    that of Python 3.11 swallows a cancellation that comes when what it waits for has ended."""
    server = start_valkey(processes)
    redis = RedisSection(url=Secret(server.url), write_policy=WritePolicy.ON_SEAL, touches_min=1)
    state, swallowed = RedisControl.state, []

    async def slow(self: RedisControl) -> ServerState:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            swallowed.append(1)
        return await state(self)

    async with asyncio.timeout(30):
        async with a_store(small_store(tmp_path, redis=redis)):
            monkeypatch.setattr(RedisControl, "state", slow)
            await asyncio.sleep(2 * HolderPolicy().look_s)  # it looks once a second
    assert swallowed == [1]


@requires_valkey
async def test_an_announcer_that_is_killed_is_followed_without_a_gap_and_without_leftovers(
    tmp_path: Path, processes: ProcessRunner
) -> None:
    """Its lock ends long before its lease: from the kill on an index shows the old list, then the
    new one, and of the namespace that has emptied meanwhile nothing."""
    server = await asyncio.to_thread(start_valkey, processes)
    redis = RedisSection(url=Secret(server.url), write_policy=WritePolicy.ON_SEAL, touches_min=1)
    async with an_index(lease_ms=60_000) as index:
        store = await asyncio.to_thread(
            start_store,
            processes,
            tmp_path / "first",
            redis={"url": server.url, "write_policy": "on_seal", "touches_min": 1},
            index={"targets": [f"127.0.0.1:{index.port}"]},
            nvme={"enabled": False},
        )
        both = names(1, 2, 3), [name_of(9, OTHER_NAMESPACE)]
        async with store.client(remote=True) as client:
            for some in both:
                payloads = [payload_of(9, BLOCK) for _ in some]
                assert all(r.is_held for r in await client.put_many(some, payloads))
        before = {NAMESPACE: hashes(1, 2, 3), OTHER_NAMESPACE: hashes(9)}
        await until(lambda: shown(index) == before, "all of the first store")
        await asyncio.to_thread(store.process.kill)
        gone = (block_key(names(2)[0]), block_key(both[1][0]))
        assert await asyncio.to_thread(server.command, "DEL", *gone) == b":2\r\n"
        after = {NAMESPACE: hashes(1, 3), OTHER_NAMESPACE: set[int]()}

        def is_followed() -> bool:
            now = shown(index)
            assert all(now[n] in (before[n], after[n]) for n in before), now
            return now == after

        assert not is_followed()
        second = telling(index, tmp_path / "second", redis=redis)
        async with a_store(replace(second, instance="s2", node="n2")):
            await until(is_followed, "the successor's list")

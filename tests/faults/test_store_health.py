"""Health of a store process: false while no block goes in or comes out, though it lives."""

import asyncio
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.ports import BlockOwner
from kvtier.tiers.arena.client import ArenaClientConfig, connect_arena
from kvtier.tiers.arena.holdings import Wanted
from kvtier.types import Tier
from kvtier.wire import transport
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.store_cluster import MIB, SERVICE, get, put, start_store
from tests.tiers.contract import name_of, soon

SLABS = 8
CHANGES_S = 60.0


async def says(channel: grpc.aio.Channel, serving: bool) -> None:
    """Wait until Check answers so."""
    stub = health_pb2_grpc.HealthStub(channel)

    async def is_so() -> bool:
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        answer = await stub.Check(asked, timeout=CHANGES_S)
        return bool(serving) is (answer.status == health_pb2.HealthCheckResponse.SERVING)

    await eventually_async(is_so, CHANGES_S, f"health is {serving}")


def wanted() -> list[Wanted]:
    """Blocks that take an arena whole."""
    return [Wanted(name_of(1000 + n), MIB, BlockOwner(1)) for n in range(SLABS)]


async def test_a_store_whose_memory_is_stuck_says_so_and_serves_again_when_it_is_not(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    dram = {"bytes_max": SLABS * MIB, "slab_bytes": MIB, "blocks_max": 64}
    store = await asyncio.to_thread(
        start_store, processes, tmp_path / "data", dram=dram, nvme={"enabled": False}
    )
    channel = transport.new_channel(f"127.0.0.1:{store.port}")
    config = ArenaClientConfig(segment_bytes=2 * MIB, staging_bytes=MIB)
    writer = await asyncio.to_thread(connect_arena, store.arena_socket, config)
    async with store.client(remote=True) as client:
        await says(channel, serving=True)
        granted = await asyncio.to_thread(writer.reserve, wanted(), 60_000, soon())
        assert all(one.reservation_id for one in granted)
        assert await put(client, [1]) == [False]
        await says(channel, serving=False)
        assert (await store.tier(Tier.DRAM)).blocks == 0  # it answers; only it cannot serve
        await asyncio.to_thread(writer.close)
        await says(channel, serving=True)

        async def is_kept() -> bool:
            return await put(client, [1]) == [True] and await get(client, [1]) == [0]

        await eventually_async(is_kept, CHANGES_S, "a block goes in and comes out")
    await channel.close()
    log = store.clean_log()
    assert "no block goes in or comes out" in log

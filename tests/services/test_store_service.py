"""The store service over its real wire, in this process: puts, gets, leases, limits, rights."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtier.core.checksum import checksum
from kvtier.core.planner import WritePolicy
from kvtier.errors import UnavailableError
from kvtier.ports import BlockOwner, GetRequest, PutRequest, PutStatus
from kvtier.security import without_method, without_policy
from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig, connect_arena
from kvtier.types import Tier
from kvtier.wire import blocks, rpc
from kvtier.wire import messages as pb
from kvtier_services.store.config import NvmeSection, StoreConfig
from kvtier_services.store.main import POLICY, RunningStore, serve
from kvtier_services.store.metrics import DEFINITIONS
from tests.harness.waiting import eventually_async
from tests.support.store_service import (
    BLOCK,
    MIB,
    Client,
    a_store,
    names,
    on_socket,
    small_store,
)
from tests.tiers.contract import OTHER_NAMESPACE, name_of, payload_of, soon


def test_every_method_has_a_policy_and_every_policy_a_method() -> None:
    assert without_policy(POLICY, [rpc.STORE]) == ()
    assert without_method(POLICY, [rpc.STORE]) == ()


async def attached(running: RunningStore) -> ArenaClient:
    config = ArenaClientConfig(segment_bytes=4 * MIB, staging_bytes=4 * MIB)
    return await asyncio.to_thread(connect_arena, running.arena_socket, config)


async def put_shared(arena: ArenaClient, *numbers: int) -> list[PutStatus]:
    requests = [PutRequest(name_of(n), payload_of(n, BLOCK), BlockOwner(5)) for n in numbers]
    return [r.status for r in await asyncio.to_thread(arena.put_many, requests, soon())]


def read_shared(arena: ArenaClient, *numbers: int) -> list[bool]:
    results = arena.get_many([GetRequest(name_of(n)) for n in numbers])
    for n, result in zip(numbers, results, strict=True):
        if result.is_hit:
            assert result.payload is not None
            assert bytes(result.payload) == payload_of(n, BLOCK)
    return [result.is_hit for result in results]


async def test_payloads_put_over_tcp_come_back_in_chunks(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        payloads = {1: payload_of(1, 700_000), 2: b"", 3: payload_of(3, 10), 4: payload_of(4, MIB)}
        assert (await client.put(payloads))[0] == ["stored"] * 4
        assert await client.get([1, 2, 9, 3, 4]) == [
            payloads[1], b"", None, payloads[3], payloads[4],
        ]  # fmt: skip


async def test_what_was_put_over_tcp_is_read_in_shared_memory_and_back(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        arena = await attached(running)
        try:
            assert await client.put_numbers(1, 2) == ["stored", "stored"]
            assert read_shared(arena, 1, 2, 3) == [True, True, False]
            assert await put_shared(arena, 3, 1) == [PutStatus.STORED, PutStatus.DUPLICATE]
            assert await client.get([3]) == [payload_of(3, BLOCK)]
        finally:
            arena.close()


async def test_what_clients_of_shared_memory_put_is_in_the_planners_books(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        arena = await attached(running)
        try:
            for n in range(0, 300, 4):
                assert await put_shared(arena, *range(n, n + 4)) == [PutStatus.STORED] * 4
            await running.store.caught_up()
            view = running.store.stats().tiers[Tier.DRAM]
            assert view.usage.blocks_count == view.stats.blocks
            assert view.usage.resident_bytes <= 8 * MIB
            assert view.stats.removals
            held = read_shared(arena, *range(300))
            assert sum(held) == view.stats.blocks
            assert held[-4:] == [True] * 4
            found = await client.ask(
                "Contains", pb.ContainsRequest(names=blocks.names_to(names(299, 298, 0)))
            )
            assert (found.prefix_blocks, found.tiers) == (2, bytes([2, 2, 0]))
        finally:
            arena.close()


async def test_acquired_blocks_are_leased_until_the_stream_ends(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client), on_socket(running) as local:
        await client.put_numbers(1, 2)
        call = local.stream("Acquire", acquiring(1, 9, 2))
        answer = await call.read()
        assert answer.statuses == bytes([0, 1, 0])
        assert blocks.u64s_from("lengths", answer.lengths) == (BLOCK, BLOCK)
        sums = blocks.u64s_from("checksums", answer.checksums)
        assert sums == (checksum(payload_of(1, BLOCK)), checksum(payload_of(2, BLOCK)))
        assert await counted(client, "leases") == 2
        for n in range(100, 300):
            await client.put_numbers(n)
        assert await client.get([1, 2]) == [payload_of(1, BLOCK), payload_of(2, BLOCK)]
        call.cancel()
        await nothing_held(running, client)


async def test_a_lease_ends_by_release_and_by_time(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        await client.put_numbers(1, 2)
        call = client.stream("Acquire", acquiring(1, 2))
        answer = await call.read()
        await client.ask("Release", pb.ReleaseLeasesRequest(lease_ids=answer.lease_ids))
        assert await call.read() is grpc.aio.EOF
        await nothing_held(running, client)
        short = client.stream("Acquire", acquiring(1, ttl_ms=50))
        assert (await short.read()).statuses == b"\0"
        assert await short.read() is grpc.aio.EOF
        await nothing_held(running, client)


async def test_a_lease_through_the_arenas_socket_holds_against_the_planner(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        arena = await attached(running)
        try:
            await client.put_numbers(1)
            leased = await asyncio.to_thread(arena.lease, names(1), 30_000, soon())
            for n in range(100, 300):
                await client.put_numbers(n)
            assert arena.is_valid([one for one in leased if one is not None]) == [True]
        finally:
            arena.close()
        await nothing_held(running, client)


def acquiring(*numbers: int, ttl_ms: int = 10_000) -> pb.AcquireRequest:
    return pb.AcquireRequest(
        names=blocks.names_to(names(*numbers)), payload_bytes=BLOCK, ttl_ms=ttl_ms
    )


async def counted(client: Client, name: str) -> int:
    stats = await client.ask("Stats", pb.StoreStatsRequest())
    return next((c.count for c in stats.counts if c.name == name), 0)


async def nothing_held(running: RunningStore, client: Client) -> None:
    async def none_left() -> bool:
        stats = running.store.stats()
        pinned = stats.pins + stats.tiers[Tier.DRAM].stats.blocks_pinned
        return pinned + await counted(client, "leases") == 0

    await eventually_async(none_left, 30, "no pins and no leases")


async def reserve(client: Client, *numbers: int, ttl_ms: int = 10_000) -> tuple[list[int], bytes]:
    answer = await client.ask(
        "Reserve",
        pb.ReserveBlocksRequest(
            names=blocks.names_to(names(*numbers)),
            lengths=blocks.u64s([BLOCK] * len(numbers)),
            ttl_ms=ttl_ms,
        ),
    )
    return list(blocks.u64s_from("ids", answer.reservation_ids)), answer.statuses


async def fill(client: Client, ids: list[int], data: bytes) -> Any:
    async def messages() -> AsyncIterator[pb.PutBlocksRequest]:
        yield pb.PutBlocksRequest(head=pb.PutHead(reservation_ids=blocks.u64s(ids)))
        yield pb.PutBlocksRequest(data=data)

    return await rpc.call(client.channel, rpc.STORE, "Put")(messages(), timeout=10)


async def test_a_put_in_several_calls_is_published_by_its_commit(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        await client.put_numbers(9)
        ids, statuses = await reserve(client, 1, 9, 2)
        assert (statuses, ids[1]) == (bytes([0, 1, 0]), 0)
        await fill(client, [ids[0], ids[2]], payload_of(1, BLOCK) + payload_of(2, BLOCK))
        assert await client.get([1, 2]) == [None, None]
        sums = [checksum(payload_of(1, BLOCK)), checksum(payload_of(1, BLOCK))]
        done = await client.ask(
            "Commit",
            pb.CommitBlocksRequest(
                reservation_ids=blocks.u64s([ids[0], ids[2]]), checksums=blocks.u64s(sums)
            ),
        )
        assert [s.value for s in blocks.put_statuses_from(done.statuses)] == ["stored", "corrupt"]
        assert await client.get([1, 2]) == [payload_of(1, BLOCK), None]


async def test_reservations_end_by_abort_and_by_time(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        ids, _ = await reserve(client, 1, 2)
        await client.ask("Abort", pb.AbortBlocksRequest(reservation_ids=blocks.u64s(ids[:1])))
        short, _ = await reserve(client, 3, ttl_ms=20)

        async def is_over() -> bool:
            done = await client.ask(
                "Commit",
                pb.CommitBlocksRequest(
                    reservation_ids=blocks.u64s(short), checksums=blocks.u64s([0])
                ),
            )
            return bool(done.reason == "no_reservation")

        await eventually_async(is_over, 30, "the reservation ends")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fill(client, ids[:1], payload_of(1, BLOCK))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_pin_keeps_blocks_and_an_unpin_lets_them_go(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        await client.put_numbers(1)
        pinned = await client.ask(
            "Pin",
            pb.PinBlocksRequest(
                names=blocks.names_to(names(1, 9)), ttl_ms=60_000, priority=50, deadline_ms=100
            ),
        )
        assert pinned.pinned == bytes([1, 0])
        for n in range(100, 300):
            await client.put_numbers(n)
        assert await client.get([1]) == [payload_of(1, BLOCK)]
        await client.ask("Unpin", pb.UnpinBlocksRequest(pin_id=pinned.pin_id))
        await nothing_held(running, client)


async def test_dropped_blocks_are_gone_for_every_kind_of_client(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        arena = await attached(running)
        try:
            await client.put_numbers(1, 2)
            dropped = await client.ask(
                "Drop", pb.DropBlocksRequest(names=blocks.names_to(names(1, 9)))
            )
            assert (dropped.dropped, dropped.undone) == (1, "")
            assert read_shared(arena, 1, 2) == [False, True]
            assert await client.get([1]) == [None]
            await client.ask("Drop", pb.DropBlocksRequest(writer_id=0))
            assert read_shared(arena, 2) == [False]
        finally:
            arena.close()


async def test_blocks_of_other_namespaces_kinds_and_lengths_are_misses(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        await client.put_numbers(1)
        assert await client.get([1], namespace=OTHER_NAMESPACE) == [None]
        assert await client.get([1], payload_bytes=BLOCK - 1) == [None]
        request = pb.GetBlocksRequest(names=blocks.names_to(names(1)))
        request.names.key_kind = 2
        [message] = [m async for m in client.stream("Get", request)]
        assert message.statuses == bytes([1])
        assert await client.get([1], payload_bytes=BLOCK) == [payload_of(1, BLOCK)]


async def test_three_tenants_two_block_sizes_and_two_writers_at_once(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        writers = [pb.BlockWriter(writer_id=w, scope=f"tenant {w}") for w in (1, 2, 3)]
        payloads = {w.writer_id: payload_of(w.writer_id, BLOCK // w.writer_id) for w in writers}
        puts = [client.put({w.writer_id: payloads[w.writer_id]}, writer=w) for w in writers]
        puts.append(client.put({1: payload_of(7, BLOCK)}))
        statuses = [s for s, _ in await asyncio.gather(*puts)]
        assert statuses[1:3] == [["stored"], ["stored"]]
        assert sorted([statuses[0], statuses[3]]) == [["divergent"], ["stored"]]
        found = await client.get([1, 2, 3])
        assert found[1:] == [payloads[2], payloads[3]]
        assert found[0] in (payloads[1], payload_of(7, BLOCK))


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_declared_nonsense_is_refused_before_any_memory_is_taken(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        invalid, out = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
        head = pb.PutHead(names=blocks.names_to(names(1)), lengths=blocks.u64s([2**63]))

        async def only(*parts: pb.PutBlocksRequest) -> Any:
            async def messages() -> AsyncIterator[pb.PutBlocksRequest]:
                for part in parts:
                    yield part

            return await rpc.call(client.channel, rpc.STORE, "Put")(messages(), timeout=10)

        assert await refused(only(pb.PutBlocksRequest(head=head))) is out
        assert await refused(only(pb.PutBlocksRequest(data=b"x"))) is invalid
        assert await refused(only()) is invalid
        assert await refused(client.put({1: b"x" * BLOCK}, chunk=1)) is invalid
        assert await refused(client.put({1: b"x" * BLOCK}, checksums=b"123")) is invalid
        many = pb.BlockNames(namespace=bytes(32), keys=bytes(32 * 5000))
        assert await refused(client.ask("Contains", pb.ContainsRequest(names=many))) is out
        odd = pb.BlockNames(namespace=b"short", keys=bytes(32))
        assert await refused(client.ask("Contains", pb.ContainsRequest(names=odd))) is invalid
        endless = acquiring(1, ttl_ms=0)
        assert await refused(client.stream("Acquire", endless).read()) is invalid
        assert await client.get([1]) == [None]


@pytest.mark.parametrize("chunk", [b"", b"x"])
async def test_ten_million_chunks_are_refused_at_the_first(tmp_path: Path, chunk: bytes) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        head = pb.PutHead(names=blocks.names_to(names(1)), lengths=blocks.u64s([BLOCK]))
        sent = 0

        async def messages() -> AsyncIterator[pb.PutBlocksRequest]:
            nonlocal sent
            yield pb.PutBlocksRequest(head=head)
            for _ in range(10_000_000):
                sent += 1
                yield pb.PutBlocksRequest(data=chunk)

        call = rpc.call(client.channel, rpc.STORE, "Put")(messages(), timeout=60)
        assert await refused(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert sent < 100_000
        assert running.store.stats().in_flight_bytes == 0
        assert (await client.put({1: b"x" * BLOCK}))[0] == ["stored"]


async def test_a_payload_longer_than_any_slot_is_refused_and_the_rest_kept(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (_, client):
        statuses, reason = await client.put(
            {1: b"a" * BLOCK, 2: b"b" * (2 * MIB), 3: b"c" * BLOCK}, chunk=MIB
        )
        assert (statuses, reason) == (["stored", "refused", "stored"], "too_long")
        assert await client.get([1, 2, 3]) == [b"a" * BLOCK, None, b"c" * BLOCK]


async def test_thousands_of_small_blocks_are_held_at_once(tmp_path: Path) -> None:
    config = small_store(tmp_path)
    async with a_store(config) as (running, client):
        for start in range(0, 4000, 1000):
            payloads = {n: payload_of(n, 100) for n in range(start, start + 1000)}
            assert set((await client.put(payloads))[0]) == {"stored"}
        assert running.store.stats().tiers[Tier.DRAM].stats.blocks == 4000
        found = await client.get(range(2000, 3000))
        assert found == [payload_of(n, 100) for n in range(2000, 3000)]


async def test_stats_and_metrics_say_what_happened(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, client):
        await client.put_numbers(1, 2)
        await client.get([1, 3])
        stats = await client.ask("Stats", pb.StoreStatsRequest())
        assert (stats.instance, stats.tiers[0].blocks) == ("s1", 2)
        assert {c.name: c.count for c in stats.counts}["misses"] == 1
        assert {c.name: c.count for c in stats.tiers[0].puts}["stored"] == 2
        page = running.metrics.render().decode()
        assert 'kvtier_store_blocks{tier="dram"} 2.0' in page
        assert running.metrics.unbound == ()
        assert len({definition.name for definition in DEFINITIONS}) == len(DEFINITIONS)


async def test_a_second_store_in_the_same_place_is_refused(tmp_path: Path) -> None:
    config = small_store(tmp_path)
    async with a_store(config) as (_, client):
        with pytest.raises(UnavailableError):
            async with serve(config, io.StringIO()):
                pass
        assert await client.put_numbers(1) == ["stored"]
    async with a_store(config) as (_, client):
        assert await client.get([1]) == [None]


def with_disk(directory: Path) -> StoreConfig:
    nvme = NvmeSection(bytes_max=64 * MIB, write_policy=WritePolicy.ON_SEAL)
    return small_store(directory, nvme=nvme)


async def test_what_the_disk_holds_is_served_by_the_next_store(tmp_path: Path) -> None:
    async with a_store(with_disk(tmp_path)) as (running, client):
        for start in range(0, 200, 20):
            await client.put_numbers(*range(start, start + 20))
            assert await running.store.settled(soon())
        held = running.store.stats().tiers[Tier.NVME].stats.blocks
        assert held >= 190
    async with a_store(with_disk(tmp_path)) as (running, client):
        assert running.store.stats().tiers[Tier.NVME].usage.blocks_count >= 190
        found = await client.get(range(100), payload_bytes=BLOCK)
        assert sum(one is not None for one in found) >= 90
        for n, one in enumerate(found):
            assert one in (None, payload_of(n, BLOCK))


async def test_acquired_blocks_come_up_from_the_disk_into_shared_memory(tmp_path: Path) -> None:
    async with a_store(with_disk(tmp_path)) as (running, client), on_socket(running) as local:
        for start in range(0, 200, 20):
            await client.put_numbers(*range(start, start + 20))
            assert await running.store.settled(soon())
        arena = await attached(running)
        try:
            wanted = range(8)
            assert read_shared(arena, *wanted) == [False] * 8
            call = local.stream("Acquire", acquiring(*wanted))
            statuses = bytearray()
            while len(statuses) < len(wanted):
                statuses += (await call.read()).statuses
            assert bytes(statuses) == bytes(8)
            assert read_shared(arena, *wanted) == [True] * 8
            call.cancel()
            await nothing_held(running, client)
        finally:
            arena.close()


async def test_what_is_sealed_on_disk_is_read_by_the_next_store_and_erased_with_its_scope(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    config = with_disk(tmp_path)
    config = replace(config, nvme=replace(config.nvme, seal_keys_file=keys))
    canary = b"nobody reads this on the disk" * 1000
    writer = pb.BlockWriter(writer_id=1, scope="tenant")
    async with a_store(config) as (running, client):
        await client.put({1: canary}, writer=writer)
        await client.put_numbers(2)
        assert await running.store.settled(soon())
        assert running.store.stats().tiers[Tier.NVME].stats.blocks == 2
    files = [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()]
    assert not any(canary[:64] in path.read_bytes() for path in files)
    async with a_store(config) as (running, client):
        assert await client.get([1, 2]) == [canary, payload_of(2, BLOCK)]
        await client.ask("Drop", pb.DropBlocksRequest(scope="tenant"))
        assert await client.get([1]) == [None]
    assert keys.stat().st_mode & 0o077 == 0
    async with a_store(config) as (_, client):
        assert await client.get([1, 2], payload_bytes=0) == [None, payload_of(2, BLOCK)]

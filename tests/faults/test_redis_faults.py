"""A Redis that is stopped, killed, full, read-only, loading, or changed in flight: misses, and no
wrong byte; each test proves that its fault happened, and that the tier heals.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtier.core.health import BreakerPolicy, BreakerState
from kvtier.errors import BackendError, DeadlineError, FrameFault
from kvtier.ports import (
    BlockOwner,
    ByNames,
    ByNamespace,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
)
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.troubles import Trouble
from tests.harness.processes import ProcessRunner
from tests.harness.proxy import Direction, Faults, TcpProxy
from tests.harness.valkey import Valkey, ValkeyOptions, requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.tiers.contract import (
    NAMESPACE,
    Journal,
    bytes_of,
    get,
    get_bytes,
    get_status,
    holds,
    name_of,
    payload_of,
    put,
    put_of,
    soon,
)

pytestmark = requires_valkey

QUICK = BreakerPolicy(failures_max=3, open_s=0.05, open_s_max=0.2, probe_timeout_s=2.0)
HEALS_S = 45.0
PATIENT_S = 5.0
"""For servers that answer: the machine may be busy."""
LONG_BYTES = 256 << 10


def within(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def started(processes: ProcessRunner, *lines: str, name: str = "valkey") -> Valkey:
    return await asyncio.to_thread(start_valkey, processes, name, ValkeyOptions(lines))


@asynccontextmanager
async def tier_of(
    server: Valkey,
    port: int | None = None,
    journal: Journal | None = None,
    connect_timeout_s: float = PATIENT_S,
) -> AsyncIterator[RedisTier]:
    url = f"redis://127.0.0.1:{port or server.port}"
    config = RedisConfig(
        parse_url(url),
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=PATIENT_S,
        breaker=QUICK,
    )
    tier = RedisTier(config, journal)
    try:
        yield tier
    finally:
        await tier.close()


def calls(server: Valkey, command: str) -> int:
    text = server.command("INFO", "commandstats").decode()
    found = re.search(rf"^cmdstat_{command}:calls=(\d+)", text, re.M)
    return int(found[1]) if found else 0


async def read(tier: RedisTier, number: int) -> GetResult:
    return await get(tier, name_of(number))


async def written(tier: RedisTier, number: int, size: int = 4096) -> PutResult:
    return (await tier.put_many([put_of(number, size)], soon()))[0]


async def closed_again(tier: RedisTier) -> None:
    async def is_closed() -> bool:
        return tier.sessions.state is BreakerState.CLOSED

    await eventually_async(is_closed, HEALS_S, "the breaker closes")


async def test_a_stopped_server_costs_one_attempt_a_call_until_the_breaker_opens(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    async with tier_of(server, connect_timeout_s=0.4) as tier:
        assert await put(tier, put_of(1)) == [PutStatus.STORED]
        await asyncio.to_thread(server.process.freeze)
        for _ in range(QUICK.failures_max):
            assert tier.sessions.state is BreakerState.CLOSED
            (late,) = await tier.get_many([GetRequest(name_of(1))], within(0.2))
            assert late.status in {GetStatus.TIMEOUT, GetStatus.ERROR}
        assert tier.sessions.tripped_count == 1
        connects = tier.sessions.connects_count
        (shut,) = await tier.get_many([GetRequest(name_of(1))], soon())
        (unsaid,) = await tier.put_many([put_of(2)], soon())
        assert (shut.status, shut.reason) == (GetStatus.ERROR, Trouble.BREAKER_OPEN)
        assert (unsaid.status, unsaid.reason) == (PutStatus.ERROR, Trouble.BREAKER_OPEN)
        with pytest.raises(BackendError):
            await holds(tier, name_of(1))
        # One call found a connection and sent one GET; the others could not even log in.
        assert connects == 1 + (QUICK.failures_max - 1)
        assert tier.trouble is not None
        await asyncio.to_thread(server.process.thaw)
        await closed_again(tier)
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert calls(server, "get") == 1 + 1
        assert tier.trouble is None


async def test_a_deadline_ends_every_kind_of_call_to_a_stopped_server(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    async with tier_of(server, connect_timeout_s=0.4) as tier:
        await put(tier, put_of(1))
        await asyncio.to_thread(server.process.freeze)
        with pytest.raises((DeadlineError, BackendError)):
            await tier.contains([name_of(1)], within(0.1))
        with pytest.raises((DeadlineError, BackendError)):
            await tier.drop(ByNamespace(NAMESPACE), within(0.1))
        (result,) = await tier.put_many([put_of(2)], within(0.1))
        assert result.status in {PutStatus.TIMEOUT, PutStatus.ERROR}
        await asyncio.to_thread(server.process.thaw)


async def test_a_stopped_server_never_writes_into_memory_that_was_given_up(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    async with tier_of(server, connect_timeout_s=0.4) as tier:
        await put(tier, put_of(1))
        await asyncio.to_thread(server.process.freeze)
        into = memoryview(bytearray(4096))
        (late,) = await tier.get_many([GetRequest(name_of(1), into)], within(0.1))
        assert late.status is GetStatus.TIMEOUT
        await asyncio.to_thread(server.process.thaw)
        await closed_again(tier)
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert bytes(into) == bytes(4096)


async def test_a_restarted_server_is_found_empty_and_filled_again(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    journal = Journal()
    async with tier_of(server, journal=journal) as tier:
        await put(tier, *map(put_of, range(5)))
        await asyncio.to_thread(server.process.restart)

        async def misses() -> bool:
            return await get_status(tier, name_of(0)) is GetStatus.MISS

        await eventually_async(misses, HEALS_S, "the new server answers")
        assert server.process.starts_count == 2
        assert journal.held == set()
        assert tier.stats().removals[RemovalCause.LOST] == 5
        assert await put(tier, put_of(1)) == [PutStatus.STORED]
        assert await get_bytes(tier, name_of(1)) == payload_of(1)


async def test_a_server_that_is_killed_while_blocks_are_on_their_way_loses_only_blocks(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        async with tier_of(server, proxy.port) as tier:
            await put(tier, put_of(99))
            proxy.set(Direction.TO_SERVER, Faults(bytes_per_s=2e6))
            before = proxy.counters(Direction.TO_SERVER).bytes_sent
            putting = asyncio.ensure_future(
                tier.put_many([put_of(n, LONG_BYTES) for n in range(8)], soon())
            )

            async def under_way() -> bool:
                return proxy.counters(Direction.TO_SERVER).bytes_sent > before + 2 * LONG_BYTES

            await eventually_async(under_way, HEALS_S, "two blocks are sent")
            await asyncio.to_thread(server.process.kill)
            results = await putting
            statuses = {result.status for result in results}
            assert PutStatus.ERROR in statuses
            assert statuses <= {PutStatus.STORED, PutStatus.ERROR}
            proxy.heal()
            await asyncio.to_thread(server.process.restart)
            await closed_again(tier)
            for n in range(8):
                assert bytes_of(await read(tier, n)) in {None, payload_of(n, LONG_BYTES)}
            assert await put(tier, put_of(1)) == [PutStatus.STORED]


async def test_a_server_that_is_killed_while_blocks_are_read_costs_misses(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        async with tier_of(server, proxy.port) as tier:
            await put(tier, *[put_of(n, LONG_BYTES) for n in range(8)])
            proxy.set(Direction.TO_CLIENT, Faults(bytes_per_s=4e6))
            before = proxy.counters(Direction.TO_CLIENT).bytes_sent
            targets = [memoryview(bytearray(LONG_BYTES)) for _ in range(8)]
            requests = [GetRequest(name_of(n), targets[n]) for n in range(8)]
            reading = asyncio.ensure_future(tier.get_many(requests, soon()))

            async def under_way() -> bool:
                return proxy.counters(Direction.TO_CLIENT).bytes_sent > before + 2 * LONG_BYTES

            await eventually_async(under_way, HEALS_S, "two blocks have come")
            proxy.reset()
            results = await reading
            assert [r.status for r in results[:2]] == [GetStatus.HIT] * 2
            assert results[-1].status is GetStatus.ERROR
            assert results[-1].reason == Trouble.UNREACHABLE
            for n, result in enumerate(results):
                if result.is_hit:
                    assert bytes(targets[n]) == payload_of(n, LONG_BYTES)


async def test_a_bit_that_flips_on_its_way_to_us_is_a_miss_and_the_stored_copy_stays(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        async with tier_of(server, proxy.port) as tier:
            await put(tier, put_of(1))
            for at in (100, 2000, 4200):
                flipped = proxy.counters(Direction.TO_CLIENT).bits_flipped
                proxy.set(Direction.TO_CLIENT, Faults(flip_at=at))
                result = await read(tier, 1)
                assert proxy.counters(Direction.TO_CLIENT).bits_flipped == flipped + 1
                assert result.status in {GetStatus.CORRUPT, GetStatus.MISS}
                assert result.payload is None
                assert server.command("EXISTS", block_key(name_of(1))) == b":1\r\n"
                assert await get_bytes(tier, name_of(1)) == payload_of(1)
            assert sum(tier.transit_faults.values()) == 3
            assert sum(tier.stats().corrupt.values()) == 3


async def test_a_bit_that_flips_anywhere_in_a_reply_never_gives_wrong_bytes(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        async with tier_of(server, proxy.port) as tier:
            await put(tier, put_of(1, 64))
            length = len(b"$204\r\n") + 128 + 64 + 12 + 2
            for at in [*range(12), *range(12, length, 9), length - 2, length - 1]:
                await closed_again(tier)
                flipped = proxy.counters(Direction.TO_CLIENT).bits_flipped
                # Of a warm connection, so that the reply is what is hit.
                await holds(tier, name_of(1))
                proxy.set(Direction.TO_CLIENT, Faults(flip_at=at))
                (result,) = await tier.get_many([GetRequest(name_of(1))], within(1.5))
                assert proxy.counters(Direction.TO_CLIENT).bits_flipped == flipped + 1
                proxy.heal()
                assert not result.is_hit or bytes_of(result) == payload_of(1, 64)
            await closed_again(tier)
            assert await put(tier, put_of(1, 64)) == [PutStatus.DUPLICATE]
            assert await get_bytes(tier, name_of(1)) == payload_of(1, 64)


async def test_a_bit_that_flips_on_its_way_to_the_server_is_found_by_the_reader(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        async with tier_of(server, proxy.port) as tier:
            await put(tier, put_of(99))
            proxy.set(Direction.TO_SERVER, Faults(flip_at=3000))
            assert await put(tier, put_of(1)) == [PutStatus.STORED]
            assert proxy.counters(Direction.TO_SERVER).bits_flipped == 1
            result = await read(tier, 1)
            assert result.status is GetStatus.CORRUPT
            assert result.reason == FrameFault.PAYLOAD_CHECKSUM
            assert server.command("EXISTS", block_key(name_of(1))) == b":0\r\n"
            assert tier.stats().removals[RemovalCause.CORRUPT] == 1
            assert await put(tier, put_of(1)) == [PutStatus.STORED]
            assert await get_bytes(tier, name_of(1)) == payload_of(1)


async def test_a_bad_copy_that_was_replaced_meanwhile_is_not_deleted(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    async with tier_of(server) as tier:
        await put(tier, put_of(1))
        async with tier.control.recheck(block_key(name_of(1))) as look:
            server.command("SET", block_key(name_of(1)), "a newer value")
            look.condemn()
        assert not look.is_deleted
        assert b"a newer value" in server.command("GET", block_key(name_of(1)))


async def test_a_server_without_memory_refuses_puts_and_gives_reads(
    processes: ProcessRunner,
) -> None:
    server = await started(processes, "maxmemory 5mb", "maxmemory-policy noeviction")
    async with tier_of(server) as tier:
        refused: PutResult | None = None
        stored: list[int] = []
        for n in range(100):
            result = await written(tier, n, LONG_BYTES)
            if result.status is PutStatus.STORED:
                stored.append(n)
            else:
                refused = result
                break
        assert refused == PutResult(PutStatus.REFUSED, Refusal.FULL)
        assert b"errorstat_OOM" in server.command("INFO", "errorstats")
        assert tier.trouble is Trouble.OUT_OF_MEMORY
        for n in stored:
            assert bytes_of(await read(tier, n)) == payload_of(n, LONG_BYTES)
        for n in range(200, 210):
            assert (await written(tier, n, LONG_BYTES)).reason == Refusal.FULL
        sets = calls(server, "set")
        assert tier.sessions.state is BreakerState.CLOSED
        assert sets < len(stored) + 10, "the breaker for writes keeps payloads back"
        assert await tier.drop(ByNames(tuple(name_of(n) for n in stored)), soon()) == len(stored)

        async def stores() -> bool:
            return (await written(tier, 300)).status is PutStatus.STORED

        await eventually_async(stores, HEALS_S, "there is room again")
        assert tier.trouble is None


async def test_a_replica_refuses_puts_and_gives_reads_and_the_master_is_looked_for(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    master = await started(processes, name="master")
    async with tier_of(server) as tier:
        await put(tier, put_of(1))
        server.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
        server.command("REPLICAOF", "127.0.0.1", "1")  # nobody is there: it serves what it has
        result = await written(tier, 2)
        assert result == PutResult(PutStatus.REFUSED, Refusal.READ_ONLY)
        assert tier.trouble is Trouble.READ_ONLY
        connects = tier.sessions.connects_count
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert tier.sessions.connects_count == connects + 1, "it looked for the master again"
        server.command("CONFIG", "SET", "replica-serve-stale-data", "no")
        assert (await read(tier, 1)).reason == Trouble.MASTER_DOWN
        server.command("REPLICAOF", "NO", "ONE")

        async def stores() -> bool:
            return (await written(tier, 3)).status is PutStatus.STORED

        await eventually_async(stores, HEALS_S, "it is a master again")
    assert master.process.alive


async def test_a_flush_in_the_middle_of_the_load_gives_misses_only(
    processes: ProcessRunner,
) -> None:
    server = await started(processes)
    journal = Journal()
    async with tier_of(server, journal=journal) as tier:
        flushed = asyncio.Event()

        async def load(first: int) -> tuple[int, int]:
            hits = misses = 0
            for n in range(first, first + 60):
                assert (await written(tier, n)).status is PutStatus.STORED
                for m in range(first, n + 1, 7):
                    result = await read(tier, m)
                    assert bytes_of(result) in {None, payload_of(m)}
                    hits, misses = hits + result.is_hit, misses + (not result.is_hit)
                if n == first + 30:
                    flushed.set()
            return hits, misses

        async def flush() -> None:
            await flushed.wait()
            assert await asyncio.to_thread(server.command, "FLUSHALL") == b"+OK\r\n"

        (hits, misses), _, _ = await asyncio.gather(load(0), load(1000), flush())
        assert hits > 0
        assert misses > 0
        assert not journal.faults


async def test_a_server_that_loads_its_data_is_asked_again_later(
    processes: ProcessRunner,
) -> None:
    lines = ("key-load-delay 4000", "loading-process-events-interval-bytes 1024")
    server = await started(processes, *lines)
    async with tier_of(server) as tier:
        await put(tier, *map(put_of, range(200)))
        assert server.command("SAVE") == b"+OK\r\n"
        await asyncio.to_thread(server.process.kill)
        server.process.spawn()
        seen: set[str] = set()

        async def loading() -> bool:
            seen.add((await read(tier, 1)).reason)
            return Trouble.LOADING in {*seen, tier.sessions.trouble}

        await eventually_async(loading, HEALS_S, "LOADING is met")

        async def hits() -> bool:
            return bytes_of(await read(tier, 1)) == payload_of(1)

        await eventually_async(hits, HEALS_S, "it has loaded")
        assert await get_bytes(tier, name_of(150)) == payload_of(150)


async def test_a_cluster_is_refused_by_name(processes: ProcessRunner) -> None:
    server = await started(processes, "cluster-enabled yes")
    async with tier_of(server) as tier:
        (result,) = await tier.put_many([PutRequest(name_of(1), b"x", BlockOwner(1))], soon())
        assert (result.status, result.reason) == (PutStatus.ERROR, Trouble.CLUSTER)
        assert (await read(tier, 1)).reason == Trouble.CLUSTER


async def test_a_server_that_answers_nonsense_is_given_up(processes: ProcessRunner) -> None:
    server = await started(processes)

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with listener, tier_of(server, listener.sockets[0].getsockname()[1]) as tier:
        assert (await read(tier, 1)).reason == Trouble.PROTOCOL


async def test_nothing_is_left_of_many_failures(processes: ProcessRunner) -> None:
    server = await started(processes)
    tasks = len(asyncio.all_tasks())
    async with tier_of(server) as tier:
        for _ in range(3):
            await put(tier, put_of(1))
            await asyncio.to_thread(server.process.kill)
            while tier.sessions.state is BreakerState.CLOSED:
                await read(tier, 1)
            await asyncio.to_thread(server.process.restart)
            await closed_again(tier)
        assert await get_status(tier, name_of(1)) is GetStatus.MISS
        assert tier.sessions.tripped_count >= 3
    assert len(asyncio.all_tasks()) == tasks

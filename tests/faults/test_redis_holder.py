"""The shared Redis as a holder: what is announced is what is there, whoever wrote it and died."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtier.core.frame import FrameName
from kvtier.ports import BlockOwner, GetStatus, PutRequest, PutStatus, RemovalCause
from kvtier.tiers.redis.caretaker import RedisCaretaker
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.control import ANNOUNCED_KEY, ID_KEY, LOCK_KEY
from kvtier.tiers.redis.holder import (
    Began,
    Completed,
    Ended,
    HolderEvent,
    HolderPolicy,
    Removed,
    Standing,
    Stored,
    prefix_hash,
)
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.types import Fingerprint
from tests.faults.redis_node import POLICY
from tests.harness.processes import REPOSITORY, Launch, ProcessRunner, python_module
from tests.harness.valkey import Valkey, ValkeyOptions, requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.tiers.contract import (
    NAMESPACE,
    OTHER_NAMESPACE,
    bytes_of,
    get,
    get_status,
    name_of,
    payload_of,
    put,
    put_of,
)

pytestmark = requires_valkey

SLOW = HolderPolicy(look_s=1.0, lock_ttl_s=30.0)
"""Terms that do not end within a test."""


class Index:
    """What an index makes of the events: one epoch a namespace after another, each replacing the
    last."""

    def __init__(self) -> None:
        self.by_namespace: dict[Fingerprint, set[int]] = {}
        self.lives_count = 0
        self.is_complete = False

    @property
    def held(self) -> set[int]:
        return set[int]().union(*self.by_namespace.values())

    def take(self, events: Sequence[HolderEvent]) -> None:
        began: set[Fingerprint] = set()
        for event in events:
            match event:
                case Began():
                    began = set(self.by_namespace)
                    self.is_complete = False
                    self.lives_count += 1
                case Stored():
                    self._renew(event.namespace, began)
                    held = self.by_namespace.setdefault(event.namespace, set())
                    assert not held & set(event.hashes), "stored twice"
                    held |= set(event.hashes)
                case Removed():
                    held = self.by_namespace[event.namespace]
                    assert set(event.hashes) <= held, "removed without being there"
                    held -= set(event.hashes)
                case Completed():
                    for namespace in event.emptied:
                        self._renew(namespace, began)
                    self.is_complete = True
                case Ended():
                    pass

    def _renew(self, namespace: Fingerprint, began: set[Fingerprint]) -> None:
        """The first that a term says of a namespace replaces what the one before said."""
        if namespace in began:
            began.remove(namespace)
            self.by_namespace[namespace] = set()


class Node:
    """One store: a tier, its caretaker, and what it publishes."""

    def __init__(self, server: Valkey, index: Index, policy: HolderPolicy) -> None:
        self.tier = RedisTier(RedisConfig(parse_url(server.url), connect_timeout_s=2.0))
        self.caretaker = RedisCaretaker(self.tier, policy)
        self._index = index

    async def look(self) -> Standing:
        await self.caretaker.look()
        self._index.take(self.caretaker.poll())
        return self.caretaker.standing()


@asynccontextmanager
async def node(server: Valkey, index: Index, policy: HolderPolicy = SLOW) -> AsyncIterator[Node]:
    made = Node(server, index, policy)
    try:
        yield made
    finally:
        await made.tier.close()


def hashes(numbers: Sequence[int]) -> set[int]:
    return {prefix_hash(name_of(n)) for n in numbers}


def there(server: Valkey, names: Sequence[FrameName]) -> set[int]:
    """The truth, asked of the server itself."""
    found = (name for name in names if server.command("EXISTS", block_key(name)) == b":1\r\n")
    return {prefix_hash(name) for name in found}


async def started(processes: ProcessRunner, *lines: str) -> Valkey:
    return await asyncio.to_thread(start_valkey, processes, "valkey", ValkeyOptions(lines))


async def test_one_store_announces_and_says_what_every_store_wrote(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as one, node(server, index) as other:
        await put(one.tier, put_of(1), put_of(2))
        await put(other.tier, put_of(3))
        assert await one.look() is Standing.ANNOUNCER
        assert await other.look() is Standing.BYSTANDER
        assert one.caretaker.holder_id == other.caretaker.holder_id
        assert index.held == hashes([1, 2, 3])
        assert index.is_complete
        assert index.lives_count == 1
        await put(one.tier, put_of(4))
        await one.look()
        assert index.held == hashes([1, 2, 3, 4])


async def test_blocks_of_a_killed_node_are_announced_by_another_and_read_whole(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    launch = Launch(
        "node",
        python_module("tests.faults.redis_node", server.url, "0", "20"),
        lambda: server.command("EXISTS", LOCK_KEY) == b":1\r\n",
        directory=REPOSITORY,
    )
    writer = await asyncio.to_thread(processes.start, launch)
    async with node(server, index, POLICY) as survivor:
        assert await survivor.look() is Standing.BYSTANDER
        await asyncio.to_thread(writer.kill)
        assert not writer.alive

        async def announces() -> bool:
            return await survivor.look() is Standing.ANNOUNCER

        await eventually_async(announces, 30, "the lock of the dead node ends")
        assert index.held == hashes(range(20))
        for n in range(20):
            assert bytes_of(await get(survivor.tier, name_of(n))) == payload_of(n)


async def test_after_a_death_the_old_list_is_shown_until_the_new_one_is_whole(
    processes: ProcessRunner,
) -> None:
    """The census of the successor takes many looks; at none of them the index has a part of it."""
    server, index = await started(processes), Index()
    short = HolderPolicy(look_s=0.1, lock_ttl_s=0.5, patience_s=600.0)
    slow = HolderPolicy(look_s=0.1, lock_ttl_s=30.0, patience_s=600.0, page_count=1,
                        pages_per_look=1)  # fmt: skip
    async with node(server, index, short) as first, node(server, index, slow) as second:
        await put(first.tier, *map(put_of, range(30)))
        other = PutRequest(name_of(1, OTHER_NAMESPACE), payload_of(1), BlockOwner(7))
        await put(first.tier, other)
        assert await first.look() is Standing.ANNOUNCER
        # It dies here: no goodbye, its lock lives on for a term. Then the server loses some.
        before = dict(index.by_namespace)
        assert before == {NAMESPACE: hashes(range(30)), OTHER_NAMESPACE: hashes([1])}
        lost = [*map(name_of, range(10)), name_of(1, OTHER_NAMESPACE)]
        assert server.command("DEL", *map(block_key, lost)) == b":11\r\n"
        await put(second.tier, put_of(77))
        standings: list[Standing] = []

        async def is_over() -> bool:
            standings.append(await second.look())
            is_whole = standings[-1] is Standing.ANNOUNCER
            after = {NAMESPACE: hashes([*range(10, 30), 77]), OTHER_NAMESPACE: set[int]()}
            assert index.by_namespace == (after if is_whole else before)
            return is_whole

        await eventually_async(is_over, 30.0, "a whole census of the successor")
        assert standings.count(Standing.CANDIDATE) >= 5
        assert index.lives_count == 2
        assert index.is_complete


async def test_after_a_goodbye_a_successor_says_at_once_what_it_knows(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    slow = HolderPolicy(look_s=0.1, lock_ttl_s=30.0, page_count=1, pages_per_look=1)
    async with node(server, index, slow) as first, node(server, index, slow) as second:
        await put(first.tier, *map(put_of, range(30)))

        async def is_announcer() -> bool:
            return await first.look() is Standing.ANNOUNCER

        await eventually_async(is_announcer, 30.0, "a census")
        assert server.command("EXISTS", ANNOUNCED_KEY) == b":1\r\n"
        await first.caretaker.close()
        assert server.command("EXISTS", ANNOUNCED_KEY) == b":0\r\n"
        await put(second.tier, put_of(77))
        assert await second.look() is Standing.CANDIDATE
        assert index.lives_count == 2
        assert hashes([77]) <= index.held < hashes([*range(30), 77])


async def test_something_else_at_the_key_of_the_announced_is_overwritten(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as one:
        await put(one.tier, put_of(1))
        for command in (("LPUSH", ANNOUNCED_KEY, "x"), ("SET", ANNOUNCED_KEY, "no namespaces")):
            server.command("DEL", ANNOUNCED_KEY)
            server.command(*command)
            assert await one.look() is Standing.ANNOUNCER
            assert index.held == hashes([1])
            assert bytes(NAMESPACE) in server.command("GET", ANNOUNCED_KEY)
            await one.caretaker.close()


async def test_evictions_leave_less_than_one_phantom_in_a_hundred(
    processes: ProcessRunner,
) -> None:
    server = await started(processes, "maxmemory 6mb", "maxmemory-policy allkeys-lru")
    index = Index()
    written: list[FrameName] = []
    async with node(server, index) as writer:
        for start in range(0, 1500, 100):
            requests = [put_of(n) for n in range(start, start + 100)]
            written += [request.name for request in requests]
            assert PutStatus.STORED in await put(writer.tier, *requests)
            assert await writer.look() is Standing.ANNOUNCER
            truth = await asyncio.to_thread(there, server, written[-600:])
            recent = {prefix_hash(name) for name in written[-600:]}
            phantoms = (index.held & recent) - truth
            assert len(phantoms) <= 0.01 * max(100, len(index.held))
        assert b"evicted_keys:0\r" not in server.command("INFO", "stats")
        assert 0 < len(index.held) < 1400
        assert writer.tier.stats().removals[RemovalCause.LOST] > 100


async def test_a_flush_is_noticed_and_what_is_written_after_it_is_announced(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as writer, node(server, index) as other:
        await put(writer.tier, *map(put_of, range(50)))
        await writer.look()
        assert index.held == hashes(range(50))
        holder_id = writer.caretaker.holder_id
        assert server.command("FLUSHALL") == b"+OK\r\n"
        await put(other.tier, put_of(77))
        assert await get_status(writer.tier, name_of(0)) is GetStatus.MISS
        await writer.look()
        assert index.held == hashes([77])
        assert writer.caretaker.holder_id == holder_id
        assert holder_id.encode() in server.command("GET", ID_KEY)
        assert await put(writer.tier, put_of(1)) == [PutStatus.STORED]
        await writer.look()
        assert index.held == hashes([1, 77])


async def test_a_restarted_server_is_taken_for_empty(processes: ProcessRunner) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as writer:
        await put(writer.tier, *map(put_of, range(10)))
        await writer.look()
        await asyncio.to_thread(server.process.restart)

        async def looked() -> bool:
            await writer.look()
            return writer.caretaker.trouble is None and index.is_complete

        await eventually_async(looked, 30, "a look at the new server")
        assert index.held == set()
        assert writer.tier.stats().blocks == 0
        assert server.process.starts_count == 2


async def test_an_announcer_that_gives_its_lock_back_is_followed_at_once(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as first, node(server, index) as second:
        await put(first.tier, put_of(1))
        assert await first.look() is Standing.ANNOUNCER
        await first.caretaker.close()
        assert await second.look() is Standing.ANNOUNCER
        assert await first.look() is Standing.BYSTANDER
        assert index.held == hashes([1])
        assert index.lives_count == 2


async def test_an_announcer_whose_lock_was_lost_says_so_before_another_speaks_twice(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index) as first, node(server, index) as second:
        await first.look()
        server.command("SET", LOCK_KEY, "somebody")
        assert await first.look() is Standing.BYSTANDER
        assert await second.look() is Standing.BYSTANDER
        server.command("DEL", LOCK_KEY)
        assert await second.look() is Standing.ANNOUNCER
        assert await first.look() is Standing.BYSTANDER


async def test_looking_at_a_server_that_is_away_is_quiet_and_heals(
    processes: ProcessRunner,
) -> None:
    server, index = await started(processes), Index()
    async with node(server, index, POLICY) as writer:
        await put(writer.tier, put_of(1))
        await writer.look()
        await asyncio.to_thread(server.process.freeze)
        await writer.look()
        await writer.look()
        assert writer.caretaker.trouble is not None
        assert writer.caretaker.standing() is Standing.BYSTANDER
        await asyncio.to_thread(server.process.thaw)

        async def announces() -> bool:
            return await writer.look() is Standing.ANNOUNCER

        await eventually_async(announces, 30, "it announces again")
        assert index.held == hashes([1])
        assert writer.caretaker.trouble is None


async def test_something_else_at_our_keys_is_no_disaster(processes: ProcessRunner) -> None:
    server, index = await started(processes), Index()
    server.command("RPUSH", ID_KEY, "x")
    server.command("RPUSH", LOCK_KEY, "x")
    async with node(server, index) as writer:
        assert await writer.look() is Standing.BYSTANDER
        assert writer.caretaker.trouble is not None
        assert await put(writer.tier, put_of(1)) == [PutStatus.STORED]

"""A master that dies under Sentinels: misses until another is master, and never a wrong byte."""

import asyncio
import re
import time
from functools import partial

from kvtier.core.health import BreakerPolicy
from kvtier.ports import GetRequest, GetStatus, PutStatus, Refusal, RemovalCause
from kvtier.tiers.redis.caretaker import RedisCaretaker
from kvtier.tiers.redis.config import HostPort, RedisConfig, SentinelGroup
from kvtier.tiers.redis.holder import Completed, HolderPolicy, Stored
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.troubles import Trouble
from tests.harness.ports import free_port
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import (
    Valkey,
    ValkeyOptions,
    requires_valkey,
    start_sentinel,
    start_valkey,
)
from tests.harness.waiting import eventually, eventually_async
from tests.tiers.contract import Journal, bytes_of, get, name_of, payload_of, put, put_of, soon

pytestmark = requires_valkey

SERVICE = "blocks"
SYNC_S = 45.0
FAILOVER_S = 45.0
QUICK = BreakerPolicy(failures_max=2, open_s=0.05, open_s_max=0.2, probe_timeout_s=2.0)
POLICY = HolderPolicy(look_s=0.5, lock_ttl_s=10.0)


class Group:
    """One master, one replica that is in sync, three Sentinels that know each other."""

    def __init__(self, processes: ProcessRunner) -> None:
        self.master = start_valkey(processes, "master")
        line = f"replicaof 127.0.0.1 {self.master.port}"
        self.replica = start_valkey(processes, "replica", ValkeyOptions((line,)))
        eventually(self.is_in_sync, SYNC_S, "the replica is in sync")
        names = [f"sentinel{i}" for i in range(3)]
        self.sentinels = [start_sentinel(processes, n, SERVICE, self.master) for n in names]
        for sentinel in self.sentinels:
            eventually(partial(knows_all, sentinel), SYNC_S, f"{sentinel.process.name} knows")

    def is_in_sync(self) -> bool:
        return b"master_link_status:up" in self.replica.command("INFO", "replication")

    def config(self) -> RedisConfig:
        # The first one is nobody: a Sentinel that is away must not matter.
        places = [free_port(), *(sentinel.port for sentinel in self.sentinels)]
        group = SentinelGroup(SERVICE, tuple(HostPort("127.0.0.1", port) for port in places))
        return RedisConfig(group, connect_timeout_s=3.0, reply_timeout_s=3.0, breaker=QUICK)


def knows_all(sentinel: Valkey) -> bool:
    text = sentinel.command("INFO", "sentinel").decode()
    return re.search(r"slaves=1,sentinels=3", text) is not None


def is_master(server: Valkey) -> bool:
    return b"role:master" in server.command("INFO", "replication")


async def test_a_killed_master_is_followed_and_the_tier_taken_for_what_it_is(
    processes: ProcessRunner,
) -> None:
    group = await asyncio.to_thread(Group, processes)
    journal = Journal()
    tier = RedisTier(group.config(), journal)
    caretaker = RedisCaretaker(tier, POLICY)
    numbers = range(40)
    assert await put(tier, *map(put_of, numbers)) == [PutStatus.STORED] * 40
    assert group.master.command("WAIT", "1", "2000") == b":1\r\n"
    await caretaker.look()
    assert Completed() in caretaker.poll()
    assert not is_master(group.replica)

    await asyncio.to_thread(group.master.process.kill)
    killed_s = time.monotonic()
    (during,) = await tier.get_many([GetRequest(name_of(1))], soon())
    assert during.status is GetStatus.ERROR

    async def stores() -> bool:
        (result,) = await tier.put_many([put_of(1000)], soon())
        assert result.status in {PutStatus.STORED, PutStatus.ERROR, PutStatus.REFUSED}
        for n in (0, 17):
            assert bytes_of(await get(tier, name_of(n))) in {None, payload_of(n)}
        return result.status is PutStatus.STORED

    await eventually_async(stores, FAILOVER_S, "blocks can be put again")
    assert is_master(group.replica)
    assert time.monotonic() > killed_s
    assert tier.stats().removals[RemovalCause.LOST] >= 40, "what was believed of the dead one"
    for n in numbers:
        assert bytes_of(await get(tier, name_of(n))) == payload_of(n), "it was in sync"
    assert not journal.faults

    async def announces() -> bool:
        await caretaker.look()
        return caretaker.trouble is None

    await eventually_async(announces, FAILOVER_S, "a look at the new master")
    hashes = [h for event in caretaker.poll() if isinstance(event, Stored) for h in event.hashes]
    assert len(hashes) >= 1
    assert len(tier.belief) == 41
    await caretaker.close()
    await tier.close()


async def test_a_master_that_is_demoted_alive_is_left_for_the_new_one(
    processes: ProcessRunner,
) -> None:
    group = await asyncio.to_thread(Group, processes)
    tier = RedisTier(group.config())
    follower = RedisTier(group.config())
    for each in (tier, follower):
        assert PutStatus.ERROR not in await put(each, put_of(1))
    answer = await asyncio.to_thread(group.sentinels[0].command, "SENTINEL", "FAILOVER", SERVICE)
    assert answer == b"+OK\r\n"

    def is_replaced() -> bool:
        port = str(group.replica.port).encode()
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return all(port in sentinel.command(*question) for sentinel in group.sentinels)

    await asyncio.to_thread(eventually, is_replaced, FAILOVER_S, "the Sentinels name the other")
    # One that asks the Sentinels from time to time leaves a master that was not told yet.
    caretaker = RedisCaretaker(follower, POLICY)
    await caretaker.look()
    assert await put(follower, put_of(2)) == [PutStatus.STORED]
    assert group.replica.command("EXISTS", block_key(name_of(2))) == b":1\r\n"
    # One that does not is told by the demoted master itself. (A Sentinel would do this, later.)
    group.master.command("REPLICAOF", "127.0.0.1", str(group.replica.port))
    assert not is_master(group.master)
    (refused,) = await tier.put_many([put_of(3)], soon())
    assert (refused.status, refused.reason) == (PutStatus.REFUSED, Refusal.READ_ONLY)

    async def stores() -> bool:
        return (await put(tier, put_of(3)))[0] is PutStatus.STORED

    await eventually_async(stores, FAILOVER_S, "the new master takes blocks")
    assert group.replica.command("EXISTS", block_key(name_of(3))) == b":1\r\n"
    assert group.master.process.alive
    await tier.close()
    await follower.close()


async def test_without_any_sentinel_every_call_is_a_miss_with_its_reason(
    processes: ProcessRunner,
) -> None:
    places = (HostPort("127.0.0.1", free_port()), HostPort("127.0.0.1", free_port()))
    tier = RedisTier(
        RedisConfig(SentinelGroup(SERVICE, places), connect_timeout_s=0.5, breaker=QUICK)
    )
    result = await get(tier, name_of(1))
    assert (result.status, result.reason) == (GetStatus.ERROR, Trouble.UNREACHABLE)
    assert processes.log_tails() == []
    await tier.close()

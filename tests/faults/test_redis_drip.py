"""A Redis that answers one byte a second: it is up, it is connected, and of no use to anybody.

Lookups miss at their deadline, each is one attempt, and once the breaker is open nothing more goes
to the server but its own probes. Judged by counters of the proxy and of the server, not by clocks.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvtier.config import Secret
from kvtier.core.health import BreakerPolicy, BreakerState
from kvtier.core.planner import Verdict
from kvtier.ports import GetRequest, GetStatus, PutStatus
from kvtier.store import TierView
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.troubles import Trouble
from kvtier.types import Tier
from kvtier_services.store.config import RedisSection
from kvtier_services.store.main import RunningStore
from tests.harness.processes import ProcessRunner
from tests.harness.proxy import Direction, Faults, TcpProxy
from tests.harness.valkey import Valkey, requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.support.store_service import BLOCK, a_store, small_store
from tests.tiers.contract import get_bytes, name_of, payload_of, put, put_of

pytestmark = requires_valkey

DRIP = Faults(bytes_per_s=1)
PATIENCE = BreakerPolicy(failures_max=3, open_s=2.0, open_s_max=2.0, probes_to_close=1)
LOOKUPS = 500
ASKED_MAX = LOOKUPS // 10
"""Far more than the probes of minutes; a tenth of what lookups would ask that were let through."""
HEALS_S = 60.0


@asynccontextmanager
async def dripping(processes: ProcessRunner) -> AsyncIterator[tuple[Valkey, TcpProxy]]:
    """A server and a way to it that can be made to drip."""
    server = await asyncio.to_thread(start_valkey, processes)
    with TcpProxy(("127.0.0.1", server.port)) as proxy:
        yield server, proxy


def calls(server: Valkey, command: str) -> int:
    text = server.command("INFO", "commandstats").decode()
    found = re.search(rf"^cmdstat_{command}:calls=(\d+)", text, re.M)
    return int(found[1]) if found else 0


async def test_a_dripping_server_costs_one_attempt_a_lookup_and_nothing_behind_its_breaker(
    processes: ProcessRunner,
) -> None:
    async with dripping(processes) as (server, proxy):
        url = parse_url(f"redis://127.0.0.1:{proxy.port}")
        tier = RedisTier(RedisConfig(url, connect_timeout_s=5.0, breaker=PATIENCE))
        assert await put(tier, put_of(1)) == [PutStatus.STORED]
        accepted, connects = proxy.connections().accepted, tier.sessions.connects_count
        proxy.set(Direction.TO_CLIENT, DRIP)
        while tier.sessions.state is BreakerState.CLOSED:
            deadline_s = asyncio.get_running_loop().time() + 0.3
            (late,) = await tier.get_many([GetRequest(name_of(1))], deadline_s)
            assert late.status is GetStatus.TIMEOUT
        assert proxy.counters(Direction.TO_CLIENT).bytes_throttled > 0
        assert tier.sessions.tripped_count == 1
        # One lookup found the connection and sent one GET; each other opened one, and no more.
        assert tier.sessions.connects_count == connects + PATIENCE.failures_max - 1

        asked = tier.sessions.connects_count
        for _ in range(LOOKUPS):
            (shut,) = await tier.get_many([GetRequest(name_of(1))], _soon())
            assert (shut.status, shut.reason) == (GetStatus.ERROR, Trouble.BREAKER_OPEN)
        assert tier.sessions.connects_count - asked < ASKED_MAX

        async def all_are_ours() -> bool:
            ours = tier.sessions.connects_count - connects
            return proxy.connections().accepted - accepted == ours

        await eventually_async(all_are_ours, HEALS_S, "no connection but those that are counted")
        proxy.heal()

        async def is_closed() -> bool:
            return tier.sessions.state is BreakerState.CLOSED

        await eventually_async(is_closed, HEALS_S, "the breaker closes")
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert calls(server, "get") <= 1 + 1
        await tier.close()


def _soon() -> float:
    return asyncio.get_running_loop().time() + 30.0


def redis_of(running: RunningStore) -> TierView:
    return running.store.stats().tiers[Tier.REDIS]


async def test_a_store_behind_a_dripping_server_misses_goes_on_and_finds_it_again(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with dripping(processes) as (server, proxy):
        other = RedisTier(RedisConfig(parse_url(server.url)))  # of another node, which fills it
        assert set(await put(other, *[put_of(n, BLOCK) for n in range(40)])) == {PutStatus.STORED}
        await other.close()
        url = Secret(f"redis://127.0.0.1:{proxy.port}")
        config = small_store(tmp_path, redis=RedisSection(url=url, deadline_ms=400))
        async with a_store(config) as (running, client):

            async def is_read() -> bool:  # a busy machine may take longer than the tier may
                return await client.get([0], BLOCK) == [payload_of(0, BLOCK)]

            await eventually_async(is_read, HEALS_S, "the tier is read")
            await client.put_numbers(1000)
            proxy.set(Direction.TO_CLIENT, DRIP)

            async def is_down() -> bool:
                assert await client.get([1], BLOCK) == [None]
                return redis_of(running).verdict is Verdict.DOWN

            await eventually_async(is_down, HEALS_S, "the tier counts as down")
            assert redis_of(running).tripped_count > 0
            before = sum(redis_of(running).stats.gets.values())
            for _ in range(LOOKUPS // 5):
                assert await client.get([2, 3, 1000], BLOCK) == [
                    None, None, payload_of(1000, BLOCK),
                ]  # fmt: skip
            # The tier was asked by its own probes, of one block each, and by no lookup.
            assert sum(redis_of(running).stats.gets.values()) - before < ASKED_MAX
            proxy.heal()

            async def is_back() -> bool:
                is_hit = await client.get([4], BLOCK) == [payload_of(4, BLOCK)]
                return is_hit and redis_of(running).verdict is Verdict.OPEN

            await eventually_async(is_back, HEALS_S, "the tier counts again, and is read")

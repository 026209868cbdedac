"""A million keys and a thousand tenants go through a store: what it keeps of them has ceilings."""

import gc
import re
from pathlib import Path

import psutil
import pytest

from kvtier.ports import BlockOwner, GetRequest, PutRequest, PutStatus
from kvtier.types import ScopeId, Tier
from kvtier.wire import messages as pb
from kvtier_services.store.main import RunningStore
from tests.support.store_service import MIB, SMALL_ARENA, Client, a_store, small_store
from tests.tiers.contract import name_of, soon

TENANTS = 1000
KEYS = 1000
"""Of each tenant: looked up, and missed. A part of them is put then, as workers do."""
PUT = 50
RSS_GROWTH_BYTES_MAX = 32 * MIB
QUOTAS = tuple(f"dram:{MIB}:tenant-{n}" for n in range(3))


def payload_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 8


async def serve_tenant(running: RunningStore, tenant: int) -> None:
    """One tenant's day: all keys are new, and nobody has them."""
    numbers = range(tenant * KEYS, (tenant + 1) * KEYS)
    found = await running.store.get_many(
        [GetRequest(name_of(n), None, 64) for n in numbers], soon()
    )
    assert not any(result.is_hit for result in found)
    owner = BlockOwner(tenant, ScopeId(f"tenant-{tenant}"))
    puts = [PutRequest(name_of(n), payload_of(n), owner) for n in numbers[:PUT]]
    results = await running.store.put_many(puts, soon())
    assert {result.status for result in results} == {PutStatus.STORED}


async def kept(running: RunningStore, client: Client) -> tuple[int, int, int]:
    """Resident bytes of this process; series of the metrics page; rows of Stats."""
    gc.collect()
    page = running.metrics.render().decode()
    series = [line for line in page.splitlines() if not line.startswith("#")]
    assert not re.search(r"tenant-\d", page)
    stats = await client.ask("Stats", pb.StoreStatsRequest())
    assert {quota.scope for quota in stats.quotas} == {"tenant-0", "tenant-1", "tenant-2"}
    rows = len(stats.tiers) + len(stats.quotas) + len(stats.counts)
    return psutil.Process().memory_info().rss, len(series), rows


@pytest.mark.timeout(300)  # a million look-ups; other tests run meanwhile
async def test_a_million_keys_of_a_thousand_tenants_leave_no_more_than_half_of_them(
    tmp_path: Path,
) -> None:
    config = small_store(tmp_path, quotas=QUOTAS)
    async with a_store(config) as (running, client):
        for tenant in range(TENANTS // 2):
            await serve_tenant(running, tenant)
        half_rss, half_series, half_rows = await kept(running, client)
        for tenant in range(TENANTS // 2, TENANTS):
            await serve_tenant(running, tenant)
        rss, series, rows = await kept(running, client)

        stats = running.store.stats()
        assert stats.counts.misses == TENANTS * KEYS
        dram = stats.tiers[Tier.DRAM].stats
        assert dram.puts[PutStatus.STORED] == TENANTS * PUT
        assert 0 < dram.blocks <= SMALL_ARENA.blocks_max
        assert (series, rows) == (half_series, half_rows)
        assert rss - half_rss < RSS_GROWTH_BYTES_MAX

        last = [TENANTS * KEYS - KEYS + n for n in range(PUT)]
        found = await running.store.get_many(
            [GetRequest(name_of(n), None, 64) for n in last], soon()
        )
        assert all(result.is_hit for result in found)
        assert [bytes(r.payload or b"") for r in found] == [payload_of(n) for n in last]

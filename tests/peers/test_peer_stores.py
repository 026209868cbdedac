"""Blocks of one node's store, read through another's: whole services, one index."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from kvtier.core.frame import FrameName
from kvtier.core.planner import PlannerConfig, TierConfig
from kvtier.store import SharedTier, StoreTier, TieredStoreConfig, TierWatch, open_store
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.types import Tier
from kvtier_services.store.config import PeersSection
from tests.harness.waiting import eventually_async
from tests.support.peer_stores import some_nodes
from tests.support.store_service import BLOCK, names
from tests.tiers.contract import soon


async def test_a_store_gives_what_only_another_nodes_store_has(tmp_path: Path) -> None:
    async with some_nodes(tmp_path, "a", "b") as nodes:
        await nodes.put("a", 1, 2, 3)
        assert await nodes.get("b", 1, 2, 3, 4) == [True, True, True, False]
        assert nodes.fetched("b") == 3
        assert nodes.metric("b", 'kvtier_store_read_bytes_total{tier="peer"}') == 3 * BLOCK
        assert nodes.metric("b", 'kvtier_store_peers{state="closed"}') == 1


async def test_a_block_that_is_wanted_twice_is_copied_and_not_fetched_again(
    tmp_path: Path,
) -> None:
    async with some_nodes(tmp_path, "a", "b") as nodes:
        await nodes.put("a", 1)
        for _ in range(2):
            assert await nodes.get("b", 1) == [True]
        await nodes.told("b", 1)
        for _ in range(5):
            assert await nodes.get("b", 1) == [True]
        assert nodes.fetched("b") == 2
        assert nodes.stores["b"].store.stats().counts.promoted[Tier.PEER] == 1


async def test_many_readers_of_one_block_cost_one_fetch(tmp_path: Path) -> None:
    async with some_nodes(tmp_path, "a", "b", promote_touches_min=100) as nodes:
        await nodes.put("a", *range(8))
        found = await asyncio.gather(*(nodes.get("b", *range(8)) for _ in range(6)))
        assert found == [[True] * 8] * 6
        counts = nodes.stores["b"].store.stats().counts
        # Who comes after a flight has ended begins another one: never more than one at a time.
        assert counts.fetched[Tier.PEER] + counts.joins == 48


async def test_stores_do_not_ask_in_circles(tmp_path: Path) -> None:
    """What the index believes of a store that lost it: nobody passes the question on."""
    async with some_nodes(tmp_path, "a", "b", "c") as nodes:
        await nodes.put("a", 1)
        assert await nodes.get("b", 1) == [True]
        await nodes.drop("a", 1)
        assert await nodes.get("c", 2) == [False]
        assert nodes.fetched("a") == nodes.fetched("c") == 0


async def test_with_peers_off_nobody_is_asked(tmp_path: Path) -> None:
    off = PeersSection(enabled=False)
    async with some_nodes(tmp_path, "a", "b", peers=off) as nodes:
        await nodes.put("a", 1)
        assert await nodes.get("b", 1) == [False]
        assert Tier.PEER not in nodes.stores["b"].store.stats().tiers


async def test_what_was_dropped_at_one_store_does_not_come_back_from_another(
    tmp_path: Path,
) -> None:
    async with some_nodes(tmp_path, "a", "b") as nodes:
        await nodes.put("a", 1, 2)
        assert await nodes.get("b", 1, 2) == [True, True]
        await nodes.drop("b", 1)
        assert await nodes.get("b", 1, 2) == [False, True]
        assert await nodes.get("a", 1) == [True]


async def test_where_blocks_are_says_that_a_peer_has_them(tmp_path: Path) -> None:
    async with some_nodes(tmp_path, "a", "b") as nodes:
        await nodes.put("a", 1)
        store = nodes.stores["b"].store

        async def is_said() -> bool:  # a late answer of the index counts from the next time on
            found = await store.contains(names(1, 2), soon(), SharedTier.ASK)
            return found == [{Tier.PEER}, frozenset()]

        await eventually_async(is_said, 30, "the index has said who has the block")


async def test_where_blocks_of_this_node_are_is_said_without_asking_an_index(
    tmp_path: Path,
) -> None:
    async with some_nodes(tmp_path, "a") as nodes:
        await nodes.put("a", 1, 2)
        found = await nodes.stores["a"].store.contains(names(1, 2), soon(), SharedTier.ASK)
        assert found == [{Tier.DRAM}] * 2
        assert nodes.metric("a", "kvtier_store_peer_questions_total") == 0


class Patience(MemoryTier):
    """Other nodes' blocks; notes how long it may take to say where they are."""

    def __init__(self) -> None:
        super().__init__(MemoryConfig(1 << 20, Tier.PEER))
        self.given_s: list[float] = []

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        self.given_s.append(deadline_s - time.monotonic())
        return await super().contains(names, deadline_s)


async def test_who_has_time_waits_longer_to_hear_of_other_nodes() -> None:
    watch, peers = TierWatch(), Patience()
    dram = MemoryTier(MemoryConfig(1 << 20, Tier.DRAM), observer=watch)
    planner = PlannerConfig(tuple(TierConfig(tier, 1 << 20) for tier in (Tier.DRAM, Tier.PEER)))
    tiers = [StoreTier(dram), StoreTier(peers)]
    async with open_store(TieredStoreConfig(planner), tiers, watch) as store:
        for seconds in (1000.0, 0.05):
            await store.contains(names(1), time.monotonic() + seconds, SharedTier.ASK)
    assert 50 < peers.given_s[0] <= 100
    assert peers.given_s[1] <= 0.01

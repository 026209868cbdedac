"""An engine that speaks vLLM's protocol, its bridge, and a real index: what the index says."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.harness.processes import ProcessRunner
from tests.support import engine_wire as wire
from tests.support.bridge_cluster import BridgeCluster, EngineSpec, channel_of, started
from tests.support.index_cluster import IndexProcess, index_launch

GAP = 'kvtier_bridge_doubts{reason="gap"}'
RESTARTS = 'kvtier_bridge_sequence_total{event="restart"}'


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexProcess]:
    """One for all engines of these tests."""
    with ProcessRunner("bridge_index", tmp_path_factory.mktemp("index")) as runner:
        launch, port = index_launch(runner)
        yield IndexProcess(runner.start(launch), port)


Clusters = Callable[..., AbstractAsyncContextManager[BridgeCluster]]


@pytest.fixture
def cluster_of(processes: ProcessRunner, index: IndexProcess) -> Clusters:
    """Makes the cluster of a test."""

    @asynccontextmanager
    async def made(spec: EngineSpec | None = None) -> AsyncIterator[BridgeCluster]:
        cluster = await started(processes, index, spec)
        async with channel_of(cluster) as cluster.channel:
            yield cluster

    return made


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec(),
        EngineSpec(is_old=True, topic=""),
        EngineSpec(int_hashes=False, block_tokens=32),
    ],
    ids=["maps", "arrays", "digests"],
)
async def test_a_bridge_that_joins_late_knows_all_and_follows(
    cluster_of: Clusters, spec: EngineSpec
) -> None:
    async with cluster_of(spec) as cluster:
        for chain in range(3):
            await cluster.ask("run", chain, 4 + chain)
        await cluster.start_bridge()
        view = await cluster.shows(exact=True)
        assert sum(map(len, view.shards[0].values())) == 15
        await cluster.ask("run", 1, 8)
        await cluster.ask("run", 1, 8, salt="tenant")
        await cluster.ask("run", 2, 8, adapter="ad")
        await cluster.ask("run", 3, 8, adapter="nobody")
        await cluster.ask("run", 4, 3, twice=True)
        await cluster.ask("run", 4, 3, twice=True)
        await cluster.shows(exact=True)
        await cluster.ask("evict", count=30)
        await cluster.ask("run", 5, 20)
        await cluster.shows(exact=True)
        await cluster.ask("clear")
        assert (await cluster.shows(exact=True)).shards == {0: {}}
        await cluster.metric_is('kvtier_bridge_ranks{state="exact"}', 1)
        assert await cluster.metric(
            'kvtier_bridge_blocks_unindexed_total{reason="adapter_unknown"}'
        ) == 8  # fmt: skip


async def test_a_gap_is_mended_by_a_replay(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await cluster.ask("run", 1, 4, heard=False)
        await cluster.ask("evict", count=1, heard=False)
        await cluster.ask("run", 2, 4)
        await cluster.shows(exact=True)
        await cluster.ask("run", 3, 4, heard=False)  # nothing follows: noticed by asking
        await cluster.shows(exact=True)
        assert await cluster.metric('kvtier_bridge_sequence_total{event="lost"}') == 0


async def test_a_gap_that_the_ring_forgot_is_said_until_the_engine_is_empty(
    cluster_of: Clusters,
) -> None:
    async with cluster_of(EngineSpec(ring=2)) as cluster:
        await cluster.start_bridge(probe_ms=60_000)
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        for chain in range(1, 5):
            await cluster.ask("run", chain, 2, heard=False)
        await cluster.ask("run", 9, 2)
        await cluster.is_degraded()
        await cluster.metric_is(GAP, 1)
        await cluster.ask("clear")
        await cluster.ask("run", 10, 4)
        await cluster.shows(exact=True)
        await cluster.metric_is(GAP, 0)
        assert await cluster.metric('kvtier_bridge_doubted_total{reason="gap"}') == 1


async def test_without_replays_a_gap_stays(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge(replay="ipc:///nobody/is/here")
        await cluster.ask("run", 0, 4)
        await cluster.is_degraded()


async def test_an_engine_that_dies_leaves_and_comes_back_empty(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        for chain in range(4):
            await cluster.ask("run", chain, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.engine.kill)
        await cluster.is_absent()
        await asyncio.to_thread(cluster.engine.restart)
        for chain in range(10, 14):  # as many messages as before: the next number fits
            await cluster.ask("run", chain, 3)
        await cluster.shows(exact=True)


async def test_an_engine_that_is_back_at_once_shows_nothing_of_its_old_life(
    cluster_of: Clusters,
) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge(gone_ms=60_000)
        for chain in range(4):
            await cluster.ask("run", chain, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.engine.kill)
        await asyncio.to_thread(cluster.engine.restart)
        await cluster.ask("run", 20, 2)
        await cluster.shows(exact=True)
        assert await cluster.metric(RESTARTS) == 1


async def test_a_killed_bridge_goes_on_from_its_disk(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(ring=4)) as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 3)
        await cluster.shows(exact=True)
        for chain in range(1, 10):
            await cluster.ask("run", chain, 3)
        await cluster.shows(exact=True)
        await cluster.metric_is("kvtier_bridge_unsaved_steps", 0)
        await asyncio.to_thread(cluster.bridge.kill)
        await cluster.ask("run", 3, 6)
        await cluster.ask("evict", count=2)
        await asyncio.to_thread(cluster.bridge.restart)
        await cluster.shows(exact=True)
        assert "Traceback" not in cluster.bridge.log_text()


async def test_a_bridge_that_slept_longer_than_the_ring_says_so(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(ring=4)) as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.bridge.kill)
        for chain in range(1, 12):
            await cluster.ask("run", chain, 2)
        await asyncio.to_thread(cluster.bridge.restart)
        view = await cluster.is_degraded()
        await cluster.metric_is(GAP, 1)
        # What it knows is right as far as it goes, behind known parents too.
        await cluster.ask("run", 0, 6)
        truth = set(await cluster.ask("truth"))
        assert {int(one) for held in view.shards[0].values() for one in held} <= truth
        await cluster.ask("clear")
        await cluster.shows(exact=True)


async def test_both_killed_at_once_leave_nothing_stale(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        for chain in range(3):
            await cluster.ask("run", chain, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.engine.kill)
        await asyncio.to_thread(cluster.bridge.kill)
        await asyncio.to_thread(cluster.engine.restart)
        for chain in range(50, 53):
            await cluster.ask("run", chain, 2)
        await asyncio.to_thread(cluster.bridge.restart)
        await cluster.shows(exact=True)


async def test_what_cannot_be_read_degrades_until_the_engine_is_empty(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        strange = wire.encoded({"type": "BlockFolded"}, wire.removed([12345]))
        await cluster.ask("say", payload=base64.b64encode(strange).decode())
        await cluster.is_degraded()
        line = 'kvtier_bridge_events_undecodable_total{reason="unknown_type"}'
        assert await cluster.metric(line) == 1
        await cluster.ask("clear")
        await cluster.ask("run", 1, 4)
        await cluster.shows(exact=True)


async def test_ranks_are_followed_each_for_itself(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(ranks=2, ring=2)) as cluster:
        await cluster.start_bridge(probe_ms=60_000)
        for rank in range(2):
            await cluster.ask("run", rank, 4, rank=rank)
        for rank in range(2):
            await cluster.shows(exact=True, rank=rank)
        for chain in range(4, 9):
            await cluster.ask("run", chain, 2, rank=0, heard=False)
        await cluster.ask("run", 9, 2, rank=0)
        await cluster.ask("run", 9, 2, rank=1)
        await cluster.is_degraded(rank=0)
        await cluster.shows(exact=True, rank=1)


async def test_a_bridge_asked_to_stop_says_goodbye(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        cluster.bridge.terminate()
        assert await asyncio.to_thread(cluster.bridge.wait, 40) == 0
        await cluster.is_absent()


async def test_an_index_without_memory_is_told_everything(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.index.process.kill)
        await cluster.ask("run", 1, 4)
        await asyncio.to_thread(cluster.index.process.restart)
        await cluster.shows(exact=True)

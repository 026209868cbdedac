"""What the engine's own connector tells: preferred, never counted twice, and left when it goes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.harness.processes import ProcessRunner
from tests.support.bridge_cluster import BridgeCluster, EngineSpec, channel_of, started
from tests.support.index_cluster import IndexProcess, index_launch

BY_CONNECTOR = 'kvtier_bridge_sources{source="connector"}'
BY_EVENTS = 'kvtier_bridge_sources{source="events"}'
COPIES = "kvtier_bridge_published_copies"
NOBODY = "ipc:///nobody/is/here"
TELLS = EngineSpec(tells=True, ring=2)

Clusters = Callable[..., AbstractAsyncContextManager[BridgeCluster]]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexProcess]:
    """One for all engines of these tests."""
    with ProcessRunner("connector_index", tmp_path_factory.mktemp("index")) as runner:
        launch, port = index_launch(runner)
        yield IndexProcess(runner.start(launch), port)


@pytest.fixture
def cluster_of(processes: ProcessRunner, index: IndexProcess) -> Clusters:
    """Makes the cluster of a test."""

    @asynccontextmanager
    async def made(spec: EngineSpec = TELLS) -> AsyncIterator[BridgeCluster]:
        cluster = await started(processes, index, spec)
        async with channel_of(cluster) as cluster.channel:
            yield cluster

    return made


async def test_a_bridge_that_joins_after_the_ring_forgot_knows_all_by_the_connector(
    cluster_of: Clusters,
) -> None:
    async with cluster_of() as cluster:
        for chain in range(6):
            await cluster.ask("run", chain, 4)
        await cluster.ask("evict", count=5)
        await cluster.start_bridge()
        view = await cluster.shows(exact=True)
        assert sum(map(len, view.shards[0].values())) == 19
        await cluster.metric_is('kvtier_bridge_sequence_total{event="lost"}', 1)
        await cluster.ask("run", 1, 8, salt="tenant")
        await cluster.ask("run", 2, 8, adapter="ad")
        await cluster.ask("run", 3, 8, adapter="nobody")
        await cluster.ask("run", 4, 30)
        await cluster.shows(exact=True)
        await cluster.metric_is(BY_CONNECTOR, 1)


async def test_both_sources_at_once_count_each_block_once(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(tells=True)) as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 5)
        await cluster.ask("run", 0, 5, twice=True)
        await cluster.shows(exact=True)
        await cluster.metric_is(BY_CONNECTOR, 1)
        await cluster.metric_is(COPIES, 5)
        await cluster.metric_is("kvtier_bridge_resident_blocks", 5)
        await cluster.ask("evict", count=5)  # one copy of each is left
        await cluster.shows(exact=True)
        await cluster.metric_is(COPIES, 5)
        await cluster.ask("evict", count=5)
        assert (await cluster.shows(exact=True)).shards == {0: {}}


async def test_without_any_events_the_connector_is_enough(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.ask("run", 0, 4)
        await cluster.start_bridge(events=NOBODY, replay=NOBODY)
        await cluster.shows(exact=True)
        await cluster.ask("run", 1, 4)
        await cluster.ask("clear")
        await cluster.ask("run", 2, 3)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.engine.kill)
        await cluster.is_absent()
        await asyncio.to_thread(cluster.engine.restart)
        await cluster.ask("run", 3, 2)
        view = await cluster.shows(exact=True)
        assert sum(map(len, view.shards[0].values())) == 2


async def test_where_the_connector_falls_silent_the_events_go_on_and_back(
    cluster_of: Clusters,
) -> None:
    async with cluster_of(EngineSpec(tells=True)) as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await cluster.ask("tell", on=False)
        await cluster.metric_is(BY_EVENTS, 1)
        await cluster.ask("run", 1, 4)
        await cluster.ask("evict", count=2)
        await cluster.shows(exact=True)
        await cluster.metric_is(COPIES, 6)
        # Blocks of before the connector began are not of any request that it saw.
        await cluster.ask("clear")
        await cluster.ask("tell", on=True)
        await cluster.metric_is(BY_CONNECTOR, 1)
        await cluster.ask("run", 2, 4)
        await cluster.shows(exact=True)
        await cluster.metric_is(COPIES, 4)


async def test_a_bridge_that_is_killed_knows_all_when_it_is_back(cluster_of: Clusters) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge()
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.bridge.kill)
        for chain in range(1, 8):
            await cluster.ask("run", chain, 3)
        await cluster.ask("evict", count=2)
        await asyncio.to_thread(cluster.bridge.restart)
        await cluster.shows(exact=True)
        assert "Traceback" not in cluster.bridge.log_text()


async def test_an_engine_that_is_back_at_once_shows_nothing_of_its_old_life(
    cluster_of: Clusters,
) -> None:
    async with cluster_of() as cluster:
        await cluster.start_bridge(gone_ms=60_000)
        await cluster.ask("run", 0, 4)
        await cluster.shows(exact=True)
        await asyncio.to_thread(cluster.engine.kill)
        await asyncio.to_thread(cluster.engine.restart)
        await cluster.ask("run", 20, 2)
        await cluster.shows(exact=True)
        await cluster.metric_is(COPIES, 2)


async def test_a_connector_of_another_model_is_not_believed(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(tells=True)) as cluster:
        settings = cluster.settings()
        model = settings["model"]
        assert isinstance(model, dict)
        model["revision"] = "another"
        await cluster.start_bridge_of(settings)
        await cluster.metric_is(BY_EVENTS, 1)
        await cluster.metric_reaches('kvtier_bridge_connector_refused_total{reason="pool"}', 1)
        assert await cluster.metric(BY_CONNECTOR) == 0


async def test_ranks_have_connectors_of_their_own(cluster_of: Clusters) -> None:
    async with cluster_of(EngineSpec(tells=True, ranks=2, ring=1)) as cluster:
        for chain in range(4):
            await cluster.ask("run", chain, 3, rank=chain % 2)
        await cluster.start_bridge()
        for rank in range(2):
            await cluster.shows(exact=True, rank=rank)
        await cluster.ask("tell", on=False, rank=0)
        await cluster.is_degraded(rank=0)
        await cluster.ask("run", 9, 3, rank=1)
        await cluster.shows(exact=True, rank=1)

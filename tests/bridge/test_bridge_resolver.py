"""Blocks of which nobody told the tokens: the store that has them says what an index calls them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

from kvtier.client.store import WriteTerms
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.identity import Pool
from kvtier.errors import ConfigError
from kvtier.sections import DialConfig
from kvtier.types import Fingerprint, Tier
from kvtier_services.bridge.config import BridgeConfig, CardSection
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.bridge_cluster import (
    SHOWN_S,
    BridgeCluster,
    EngineSpec,
    channel_of,
    started,
)
from tests.support.fake_engine import EngineCache, Prompt
from tests.support.index_cluster import IndexProcess, index_launch
from tests.support.store_cluster import MIB, StoreProcess, start_store

NAMESPACE = Fingerprint(b"n" * 32)
SPEC = EngineSpec(int_hashes=False, ring=2)
UNRESOLVED = 'kvtier_bridge_doubts{reason="unresolved"}'
FOUND = 'kvtier_bridge_store_lookups_total{outcome="found"}'
UNKNOWN = 'kvtier_bridge_store_lookups_total{outcome="unknown"}'
FAILED = 'kvtier_bridge_store_lookups_total{outcome="failed"}'

Clusters = Callable[..., AbstractAsyncContextManager[BridgeCluster]]


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[IndexProcess, StoreProcess]]:
    """An index and a store for all tests."""
    directory = tmp_path_factory.mktemp("services")
    with ProcessRunner("resolver_services", directory) as runner:
        launch, port = index_launch(runner)
        index = IndexProcess(runner.start(launch), port)
        dram = {"bytes_max": 64 * MIB, "slab_bytes": 4 * MIB}
        yield index, start_store(runner, directory / "store", dram=dram)


@pytest.fixture
def cluster_of(processes: ProcessRunner, services: tuple[IndexProcess, StoreProcess]) -> Clusters:
    """Makes the cluster of a test: an engine of whose early messages nobody knows any more, and a
    bridge that begins late."""

    @asynccontextmanager
    async def made(store: str) -> AsyncIterator[BridgeCluster]:
        cluster = await started(processes, services[0], SPEC)
        async with channel_of(cluster) as cluster.channel:
            for one in range(4):
                await cluster.ask("run", one, 4)
            settings = cluster.settings()
            model = settings["model"]
            assert isinstance(model, dict)
            model["namespace"] = NAMESPACE.hex()
            settings["resolver"] = {"targets": [store]}
            await cluster.start_bridge_of(settings)
            await cluster.is_degraded()
            yield cluster

    return made


def named(chain: int, blocks: int) -> tuple[list[FrameName], list[int]]:
    """What the engine, and the index, call a prompt's blocks."""
    cache = EngineCache(Pool(SPEC.model_id, SPEC.revision, SPEC.block_tokens), 64, SPEC.seed)
    one = Prompt(tuple(1000 * chain + n for n in range(blocks * SPEC.block_tokens)))
    cache.run(one)
    table = cache.table(one)
    assert table.keys is not None
    names = [FrameName(KeyKind.ENGINE_DIGEST, digest, NAMESPACE) for digest in table.digests]
    return names, [int(one) for one in table.keys.hashes]


def put(store: StoreProcess, chain: int, blocks: int) -> list[int]:
    """As the connector saves a prompt; what the index calls its blocks."""
    names, hashes = named(chain, blocks)
    payloads = [np.full(4096, chain, np.uint8) for _ in names]
    with BlockStoreClient(DialConfig((store.socket,))) as client:
        results = client.put_many(names, payloads, WriteTerms(prefix_hashes=hashes), deadline_s=20)
        assert all(result.is_held for result in results)
        assert client.prefix_hashes(names, deadline_s=20) == hashes
    return hashes


async def shows(cluster: BridgeCluster, hashes: list[int]) -> None:
    """Wait until the index shows these, and others perhaps."""

    async def is_shown() -> bool:
        view = await cluster.view()
        if view is None:
            return False
        return set(hashes) <= set(view.shards.get(0, {}).get(Tier.GPU, np.empty(0)).tolist())

    await eventually_async(is_shown, SHOWN_S, f"{len(hashes)} blocks")


async def test_blocks_behind_a_parent_that_nobody_told_are_named_by_the_store(
    cluster_of: Clusters, services: tuple[IndexProcess, StoreProcess]
) -> None:
    hashes = put(services[1], 0, 8)
    async with cluster_of(services[1].socket) as cluster:
        await cluster.ask("run", 0, 8)  # four more, behind four that the ring forgot
        await shows(cluster, hashes[4:])
        await cluster.metric_is(FOUND, 4)
        await cluster.metric_is(UNRESOLVED, 0)
        # The gap stays a gap: what was stored before is not known to be there.
        await cluster.is_degraded()
        await cluster.ask("clear")
        await cluster.ask("run", 0, 8)
        await cluster.shows(exact=True)


async def test_what_the_store_does_not_know_is_in_doubt_until_it_is_gone(
    cluster_of: Clusters, services: tuple[IndexProcess, StoreProcess]
) -> None:
    async with cluster_of(services[1].socket) as cluster:
        await cluster.ask("run", 1, 6)
        await cluster.metric_reaches(UNKNOWN, 2)
        await cluster.metric_is(UNRESOLVED, 1)
        await cluster.ask("clear")
        await cluster.ask("run", 9, 2)
        await cluster.shows(exact=True)
        await cluster.metric_is(UNRESOLVED, 0)


async def test_a_store_that_is_not_there_costs_nothing_but_the_answer(
    cluster_of: Clusters, processes: ProcessRunner
) -> None:
    async with cluster_of(f"unix:{processes.directory}/nobody.sock") as cluster:
        await cluster.ask("run", 1, 6)
        await cluster.metric_reaches(FAILED, 2)
        await cluster.ask("clear")
        await cluster.ask("run", 9, 2)
        await cluster.shows(exact=True)


def test_a_store_says_nothing_of_blocks_that_it_was_not_told_of(
    services: tuple[IndexProcess, StoreProcess],
) -> None:
    names, hashes = named(7, 3)
    with BlockStoreClient(DialConfig((services[1].socket,))) as client:
        assert client.prefix_hashes(names, deadline_s=20) == [None] * 3
        payloads = [np.zeros(4096, np.uint8)]
        client.put_many(names[:1], payloads, WriteTerms(prefix_hashes=hashes[:1]), deadline_s=20)
        assert client.prefix_hashes(names, deadline_s=20) == [hashes[0], None, None]


def test_a_resolver_needs_the_namespace_of_its_blocks() -> None:
    store = DialConfig(("unix:/run/store.sock",))
    with pytest.raises(ConfigError, match="namespace"):
        BridgeConfig(resolver=store)
    BridgeConfig(resolver=store, model=CardSection(namespace="ab" * 32))

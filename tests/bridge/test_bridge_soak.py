"""100,000 blocks of two models in four ranks through their bridges: bounded, and right at last."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import psutil
import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlValue
from tests.support.bridge_cluster import BridgeCluster, EngineSpec, channel_of, started
from tests.support.index_cluster import IndexProcess, index_launch

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20
BLOCKS = 100_000
ROUNDS = 5
KEYS_MAX = 1 << 14
FILE_BYTES_MAX = 32 * MIB
GROWTH_BYTES_MAX = 64 * MIB
"""Of a bridge's memory, from a fifth of the way to the end."""

SMALL = EngineSpec(ranks=3, blocks=2_000, block_tokens=16, model_id="org/small")
LARGE = EngineSpec(ranks=1, blocks=2_000, block_tokens=64, model_id="org/large", tells=True)


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexProcess]:
    with ProcessRunner("soak_index", tmp_path_factory.mktemp("index")) as runner:
        launch, port = index_launch(runner)
        yield IndexProcess(runner.start(launch), port)


async def begun(
    runner: ProcessRunner, index: IndexProcess, spec: EngineSpec, stack: AsyncExitStack
) -> BridgeCluster:
    cluster = await started(runner, index, spec)
    cluster.channel = await stack.enter_async_context(channel_of(cluster))
    settings = cluster.settings()
    memory: dict[str, TomlValue] = {
        "data_dir": str(runner.directory / "data"),
        "residents_max": spec.blocks,
        "keys_max": KEYS_MAX,
        "file_bytes_max": FILE_BYTES_MAX,
        "save_ms": 200,
    }
    settings["memory"] = memory
    await cluster.start_bridge_of(settings)
    return cluster


def resident_bytes(cluster: BridgeCluster) -> int:
    return int(psutil.Process(cluster.bridge.pid).memory_info().rss)


def file_bytes(cluster: BridgeCluster) -> int:
    return sum(path.stat().st_size for path in (cluster.runner.directory / "data").iterdir())


async def test_a_hundred_thousand_blocks_leave_what_is_held_and_nothing_else(
    index: IndexProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with AsyncExitStack() as stack:
        clusters = []
        for spec in (SMALL, LARGE):
            name = spec.model_id.replace("/", "-")
            folder = tmp_path_factory.mktemp(name)
            runner = stack.enter_context(ProcessRunner(f"soak-{name}", folder))
            clusters.append(await begun(runner, index, spec, stack))
        ranks = [(one, rank) for one in clusters for rank in range(one.spec.ranks)]
        share = BLOCKS // (ROUNDS * len(ranks)) + 1
        before: list[int] = []
        stored = 0
        for turn in range(ROUNDS):
            stored += sum(
                await asyncio.gather(
                    *(one.ask("churn", seed=turn, blocks=share, rank=rank) for one, rank in ranks)
                )
            )
            for one, rank in ranks:
                await one.shows(exact=True, rank=rank)
            before = before or [resident_bytes(one) for one in clusters]
        assert stored >= BLOCKS
        for one, had in zip(clusters, before, strict=True):
            assert resident_bytes(one) - had < GROWTH_BYTES_MAX
            assert file_bytes(one) < FILE_BYTES_MAX + FILE_BYTES_MAX // 2  # with its journal
            assert await one.metric("kvtier_bridge_known_keys") <= KEYS_MAX
            assert await one.metric('kvtier_bridge_memory_total{event="failure"}') == 0
            assert await one.metric('kvtier_bridge_oddities_total{kind="contradiction"}') == 0
            await one.metric_is("kvtier_bridge_unsaved_steps", 0)
            await asyncio.to_thread(one.bridge.kill)
            await asyncio.to_thread(one.bridge.restart)
        for one, rank in ranks:
            await one.shows(exact=True, rank=rank)
        assert await clusters[0].metric('kvtier_bridge_sequence_total{event="lost"}') == 0

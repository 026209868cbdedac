"""Two ranks of one engine: a block is there where both ranks' shards of it are, or nowhere."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvtier.core.frame import FrameName
from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlTable
from tests.support.store_cluster import MIB, StoreProcess, start_store
from tests.support.vllm_models import CONTEXT_TOKENS, TOKEN_IDS, write_model_of_even_heads
from tests.support.vllm_servers import (
    BLOCK_TOKENS,
    PYTHON,
    WHY_NOT,
    VllmServer,
    launch_vllm,
    names_of,
    prompt,
    start_vllm,
    stored_by,
    whole,
)

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

DRAM: TomlTable = {"bytes_max": 512 * MIB, "slab_bytes": 64 * MIB, "blocks_max": 4096}
NVME: TomlTable = {"bytes_max": 2048 * MIB, "write_policy": "on_seal"}
RANKS = 2
TOKENS = prompt(1, 10 * BLOCK_TOKENS + 5, TOKEN_IDS)


@dataclass(frozen=True, slots=True)
class Rig:
    server: VllmServer
    store: StoreProcess

    def names(self, rank: int) -> list[FrameName]:
        """Of one rank's shards of TOKENS."""
        return names_of(self.server, TOKENS, rank)

    def held(self, rank: int) -> list[bool]:
        """Which blocks of TOKENS the store has of a rank."""

        async def ask() -> list[bool]:
            async with self.store.client() as client:
                return [bool(tiers) for tiers in await client.contains(self.names(rank))]

        return asyncio.run(ask())

    def drop(self, rank: int, block: int) -> int:
        async def ask() -> int:
            async with self.store.client() as client:
                return await client.drop([self.names(rank)[block]])

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("vllm")
    model = directory / "model"
    model.mkdir()
    write_model_of_even_heads(model)
    with ProcessRunner("vllm-ranks", directory) as runner:
        store = start_store(runner, directory / "store", dram=DRAM, nvme=NVME)
        launch = launch_vllm(
            "vllm-ranks",
            model,
            store.socket,
            f"--tensor-parallel-size={RANKS}",
            "--distributed-executor-backend=mp",
            f"--max-model-len={CONTEXT_TOKENS}",
        )
        (server,) = start_vllm(runner, launch)
        yield Rig(server, store)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def test_a_block_is_loaded_by_all_ranks_or_by_none(rig: Rig) -> None:
    blocks = len(TOKENS) // BLOCK_TOKENS
    first = stored_by(rig.server, TOKENS)
    assert rig.held(0) == rig.held(1) == [True] * blocks
    rig.server.forget()
    before = rig.server.count("loaded")
    again = rig.server.complete(TOKENS)
    assert again.cached_tokens == whole(TOKENS)
    assert again.equals(first)
    rig.server.gained("loaded", before, RANKS * blocks)
    for rank, block in ((1, 4), (0, 2)):
        assert rig.drop(rank, block) == 1
        rig.server.forget()
        before = rig.server.count("loaded")
        short = rig.server.complete(TOKENS)
        assert short.cached_tokens == block * BLOCK_TOKENS
        assert short.equals(first)
        rig.server.gained("loaded", before, RANKS * block)


def test_the_ranks_have_namespaces_of_their_own(rig: Rig) -> None:
    assert not set(rig.names(0)) & set(rig.names(1))

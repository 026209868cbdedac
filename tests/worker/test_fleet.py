"""A worker as the index sees it: who it is, what it and its store hold, and that it is gone."""

import asyncio
from pathlib import Path

import pytest

from kvtier.client import IndexClient, TokenPrompt
from kvtier.sections import DialConfig
from kvtier.types import Source
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import start_index
from tests.support.store_cluster import start_store
from tests.support.worker_cluster import MODEL, prompt_of, start_worker

pytestmark = pytest.mark.timeout(120)
PROMPT = prompt_of(1, 321)


async def found(client: IndexClient, salt: str = "") -> dict[str, list[tuple[Source, int]]]:
    """Who has how much of the prompt, in runs."""
    held: dict[str, list[tuple[Source, int]]] = {}
    for match in await client.match_tokens(TokenPrompt(MODEL, PROMPT, salt)):
        held |= {str(w.name.instance): match.runs(row) for row, w in enumerate(match.workers)}
    return held


async def until(client: IndexClient, expected: dict[str, list[tuple[Source, int]]]) -> None:
    async def is_so() -> bool:
        return await found(client) == expected

    await eventually_async(is_so, 30, f"the index says {expected}")


async def test_the_index_knows_a_worker_and_its_blocks_in_every_tier(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    index = await start_index(processes)
    told = {"targets": [index.address]}
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data", index=told)
    worker = await start_worker(processes, store={"targets": [store.socket]}, index=told)
    async with (
        IndexClient(DialConfig(targets=(index.address,))) as seen,
        worker.client() as client,
    ):
        await client.answer(PROMPT, 1)
        await until(seen, {"worker": [(Source.GPU, 20)]})
        assert await found(seen, "another scope") == {}
        await client.until("kvtier_worker_saved_blocks_total", 20, outcome="saved")
        holders = {
            str(one.view.info.instance): one.view.info for one in (await seen.stats()).holders
        }
        described = holders["worker"]
        assert described.addresses.http == f"127.0.0.1:{worker.port}"
        assert described.card is not None
        assert described.card.served_names == (MODEL,)
        assert (described.node, described.store) == ("node-1", "node-1")
        assert described.namespace == holders["store"].namespace
        # What leaves L1 is still found, in the store of the worker's node.
        for number in range(2):
            await client.answer(prompt_of(100 + number, 600), 1)
        await until(seen, {"worker": [(Source.DRAM, 20)]})
        worker.process.terminate()
        await asyncio.to_thread(worker.process.wait, 40)
        await until(seen, {})
    worker.clean_log()

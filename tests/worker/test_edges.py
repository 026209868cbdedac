"""Requests at the edges, against a real worker over a real store: sizes, counts, cut strings.

The model is the fake one with a context of 131,072 tokens: every KV byte counts.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.core.identity import KvDtype
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import one_group
from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.store_cluster import start_store
from tests.support.worker_cluster import (
    BLOCK_TOKENS,
    MODEL,
    Client,
    Expected,
    Failed,
    WorkerProcess,
    prompt_of,
    start_worker,
)
from tests.support.worker_rig import Rig, RigTerms

pytestmark = pytest.mark.timeout(180)
EXPECTED = Expected()
SAVED = "kvtier_worker_saved_blocks_total"
LOADED = "kvtier_worker_loaded_blocks_total"
CONTEXT = 131_072
LONG_TOKEN_BYTES = 64
PROMPT = prompt_of(7, 321)
"""20 blocks of 16 tokens, and one token."""


def long_model(prefill_tokens_per_s: float) -> dict[str, TomlValue]:
    """A model whose pool takes its whole context in a few MiB."""
    return {
        "model": "fake",
        "fake": {
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "token_bytes": LONG_TOKEN_BYTES,
            "context_tokens": CONTEXT,
            "stride_bytes": 256,
        },
    }


@asynccontextmanager
async def opened(worker: WorkerProcess) -> AsyncIterator[Client]:
    async with worker.client() as client:
        yield client
        assert await client.healthy()
    worker.clean_log()


def long_text(prompt: list[int], count: int) -> str:
    geometry = one_group(4, 1, LONG_TOKEN_BYTES // 32, KvDtype.FLOAT32, BLOCK_TOKENS)
    runner = FakeModel(geometry, FakeTerms(context_tokens=CONTEXT, stride_bytes=256))
    rig = Rig(runner, RigTerms(step_tokens_max=1 << 17, blocks=len(prompt) // BLOCK_TOKENS + 4))
    return "".join(map(chr, rig.generate(prompt, count).tokens))


def peak_kb(worker: WorkerProcess) -> int:
    status = Path(f"/proc/{worker.process.pid}/status").read_text(encoding="utf-8")
    return next(int(one.split()[1]) for one in status.splitlines() if one.startswith("VmHWM"))


async def test_prompts_of_the_context_are_served_and_longer_ones_refused(
    processes: ProcessRunner,
) -> None:
    pool = (CONTEXT // BLOCK_TOKENS + 64) * BLOCK_TOKENS * LONG_TOKEN_BYTES
    worker = await start_worker(processes, model=long_model(0.0), cache={"kv_memory_bytes": pool})
    async with opened(worker) as client:
        prompt = prompt_of(3, 100_000)
        told = await client.answer(prompt, 3)
        assert told.text == long_text(prompt, 3)
        assert told.prompt_tokens == 100_000
        last = await client.answer(prompt_of(4, CONTEXT - 1), 1)
        assert (last.finish, len(last.text)) == ("length", 1)  # the context is full
        before = peak_kb(worker)
        for count in (CONTEXT, CONTEXT + 1, 300_000):
            refused = await client.ask([5] * count, 1)
            assert isinstance(refused, Failed)
            assert (refused.status, refused.code) == (400, "context_length_exceeded")
        assert peak_kb(worker) - before < 256 << 10


async def test_a_prompt_beyond_the_pool_is_refused_and_an_empty_one_too(
    processes: ProcessRunner,
) -> None:
    worker = await start_worker(processes)  # its pool holds 1,024 tokens
    async with opened(worker) as client:
        refused = await client.ask(prompt_of(3, 100_000), 1)
        assert isinstance(refused, Failed)
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        fits = await client.answer(prompt_of(5, 1023), 1)
        assert (fits.finish, fits.text) == ("length", EXPECTED.text(prompt_of(5, 1023), 1))
        empties: list[object] = [[], "", [[]], [""]]
        for empty in empties:
            async with client.session.post(
                f"{client.url}/v1/completions", json={"model": MODEL, "prompt": empty}
            ) as response:
                assert response.status == 400
                error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == "prompt"


async def fill_l1(client: Client, number: int) -> None:
    for i in range(2):
        await client.answer(prompt_of(1000 + 2 * number + i, 600), 1)


async def asked(client: Client, **terms: object) -> dict[str, object]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0} | terms
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        told = await response.json()
        assert response.status == 200, told
    assert isinstance(told, dict)
    return told


async def test_choices_salts_and_priorities_over_a_store(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    worker = await start_worker(processes, store={"targets": [store.socket]})
    text = EXPECTED.text(PROMPT, 20)
    async with opened(worker) as client:
        await client.answer(PROMPT, 20)
        await client.until(SAVED, 21, outcome="saved")

        async def is_loaded_once() -> bool:
            """One prompt is loaded once, and shared by all choices; unless loading took so long
            that some of it was computed."""
            await fill_l1(client, 0)
            before = await client.metric(LOADED, source="dram")
            three = await asked(client, n=3)
            assert [choice["text"] for choice in three["choices"]] == [text] * 3  # type: ignore[attr-defined]
            usage = three["usage"]
            assert isinstance(usage, dict)
            loaded = await client.metric(LOADED, source="dram") - before
            assert loaded <= 20
            return usage["kvtier"]["cached_tokens"]["dram"] == 320 and loaded == 20

        await eventually_async(is_loaded_once, 60, "all of it comes from the store")
        # Another salt shares neither L1 nor the store with it, and still answers the same.
        salted = await client.answer(PROMPT, 20, cache_salt="other")
        assert (salted.text, salted.cached) == (text, {})
        await fill_l1(client, 1)
        again = await client.answer(PROMPT, 20, cache_salt="other")
        assert again.text == text
        assert set(again.cached) <= {"dram", "gpu"}
        # The important one overtakes those that wait, whoever came first.
        many = [
            asyncio.create_task(client.answer(prompt_of(2000 + i, 500), 30, priority=5))
            for i in range(6)
        ]
        await client.until("kvtier_worker_live_requests", 1, state="waiting")
        first = await client.answer(prompt_of(3000, 100), 2, priority=-5)
        assert first.text == EXPECTED.text(prompt_of(3000, 100), 2)
        assert any(not task.done() for task in many)
        for i, told in enumerate(await asyncio.gather(*many)):
            assert told.text == EXPECTED.text(prompt_of(2000 + i, 500), 30)


async def streamed(client: Client, stop: str | None) -> tuple[str, int, str | None]:
    """(text, chunks with text, finish) of a stream; a token is a character."""
    body = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True,
        "stop": stop,
    }  # fmt: skip
    text, chunks, finish = "", 0, None
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
                chunks += bool(choice["text"])
                finish = choice["finish_reason"] or finish
    return text, chunks, finish


async def test_a_stop_string_may_span_chunks_of_a_stream(processes: ProcessRunner) -> None:
    worker = await start_worker(processes)
    async with opened(worker) as client:
        whole, chunks, _ = await streamed(client, None)
        assert whole == EXPECTED.text(PROMPT, 40)
        assert chunks > 20  # a stop string of several characters spans several
        for at, count in ((5, 6), (20, 3), (33, 7)):
            stop = whole[at : at + count]
            text, _, finish = await streamed(client, stop)
            assert (text, finish) == (whole[: whole.index(stop)], "stop")
        text, _, finish = await streamed(client, whole[:9] + "\x00")
        assert (text, finish) == (whole, "length")  # what looked like the stop is text after all

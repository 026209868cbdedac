"""`kvtier worker` with the tiny model as a process, as the official `openai` client sees it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionMessageParam

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually_async
from tests.support.raw_http import RawConnection, ask, post

MODEL = "tiny-model"
BLOCK_TOKENS = 16
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "tell me a story"}]
LONG = "the quick brown fox jumps over the lazy dog and runs away from it, " * 3


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, int]]:
    directory: Path = tmp_path_factory.mktemp("real-worker")
    port = free_port()
    with ProcessRunner("test_real_worker", directory) as runner:
        config = runner.config_file(
            "worker.toml",
            {
                "listen": {"bind": f"127.0.0.1:{port}"},
                "model": {"model": "tiny", "served_names": [MODEL, "an-alias"], "threads": 1},
                "cache": {"block_tokens": BLOCK_TOKENS, "kv_memory_bytes": 16 << 20},
            },
        )
        argv = kvtier_command("worker", "--config", str(config))
        ready = http_ready(f"http://127.0.0.1:{port}/health")
        yield runner.start(Launch("worker", argv, ready=ready, ready_deadline_s=60.0)), port


@pytest.fixture
async def client(worker: tuple[Process, int]) -> AsyncIterator[AsyncOpenAI]:
    base = f"http://127.0.0.1:{worker[1]}/v1"
    async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=50) as made:
        yield made


async def test_a_greedy_chat_says_the_same_whole_streamed_and_beside_others(
    client: AsyncOpenAI,
) -> None:
    async def whole() -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_tokens=24
        )
        return answer.choices[0].message.content or ""

    async def other(n: int) -> None:
        await client.completions.create(model=MODEL, prompt=f"{n} {LONG}", max_tokens=20, seed=n)

    alone = await whole()
    stream = await client.chat.completions.create(
        model="an-alias",
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    beside, *_ = await asyncio.gather(whole(), *(other(n) for n in range(6)))
    assert alone
    assert streamed == beside == alone
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 24


async def test_a_repeated_prefix_is_cached_and_says_where(client: AsyncOpenAI) -> None:
    prompt = f"once upon a time {LONG}"
    extra = {"x-kvtier-explain": "1"}

    async def ask_for(tail: str) -> tuple[int, dict[str, int], int]:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt + tail, max_tokens=2, extra_headers=extra
        )
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        by_tier = (usage.model_extra or {})["kvtier"]["cached_tokens"]
        return usage.prompt_tokens_details.cached_tokens or 0, by_tier, usage.prompt_tokens

    cold, _, _ = await ask_for("a")
    warm, by_tier, prompt_tokens = await ask_for("b")
    assert cold == 0
    assert warm == by_tier["gpu"] == sum(by_tier.values())
    assert warm % BLOCK_TOKENS == 0
    assert prompt_tokens - 2 * BLOCK_TOKENS <= warm < prompt_tokens
    other_salt = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "another"}
    )
    assert other_salt.usage is not None
    assert other_salt.usage.prompt_tokens_details is not None
    assert other_salt.usage.prompt_tokens_details.cached_tokens == 0


async def test_seeds_decide_choices_whatever_runs_beside_them(client: AsyncOpenAI) -> None:
    async def drawn(seed: int, n: int) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt="a b c", max_tokens=8, seed=seed, n=n, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    three = await drawn(7, 3)
    assert len(set(three)) == 3
    again, second, *_ = await asyncio.gather(drawn(7, 3), drawn(8, 1), drawn(9, 2), drawn(10, 4))
    assert again == three
    assert second == three[1:2]


async def test_logprobs_are_of_the_model_and_greedy_takes_the_best(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        ranked = [top.logprob for top in token.top_logprobs]
        assert len(ranked) == 3
        assert ranked == sorted(ranked, reverse=True)
        assert token.logprob == ranked[0] <= 0


async def test_a_stop_string_ends_the_text_before_it(client: AsyncOpenAI) -> None:
    async def said(stop: str | None) -> tuple[str, str | None]:
        answer = await client.completions.create(
            model=MODEL, prompt="stop here", max_tokens=24, temperature=0, stop=stop
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    text, _ = await said(None)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    assert stop
    assert await said(stop) == (text[: text.index(stop)], "stop")


async def test_what_cannot_run_is_refused_in_openais_words(client: AsyncOpenAI) -> None:
    (model, *_) = [model async for model in client.models.list()]
    assert model.id == MODEL
    context_tokens = (model.model_extra or {})["max_model_len"]
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[5] * context_tokens)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(NotFoundError):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError) as unsupported:
        await client.chat.completions.create(model=MODEL, messages=CHAT, reasoning_effort="low")
    assert unsupported.value.code == "unsupported_parameter"


async def metric(port: int, sample: str) -> float:
    page = (await ask(port, b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")).body.decode()
    (line,) = [line for line in page.splitlines() if line.startswith(sample + " ")]
    return float(line.rpartition(" ")[2])


async def test_a_client_that_goes_frees_what_it_held(worker: tuple[Process, int]) -> None:
    _, port = worker
    body = {
        "model": MODEL, "prompt": LONG, "max_tokens": 1500, "stream": True, "ignore_eos": True,
        "n": 8,
    }  # fmt: skip
    used = 'kvtier_worker_blocks{state="used"}'
    cancelled = 'kvtier_worker_requests_total{outcome="cancelled"}'
    before = await metric(port, cancelled)
    connection = await RawConnection.open(port)
    await connection.send(post("/v1/completions", json.dumps(body).encode()))
    await connection.until(b"data: ")
    assert await metric(port, used) > 0
    connection.reset()

    async def freed() -> bool:
        gone = await metric(port, cancelled) - before
        return gone == 8 and await metric(port, used) == 0

    await eventually_async(freed, 30, "every choice cancelled and their blocks free")


async def test_health_and_metrics_of_the_process_tell_that_it_works(
    worker: tuple[Process, int], client: AsyncOpenAI
) -> None:
    process, port = worker
    before = await metric(port, "kvtier_endpoint_completion_tokens_total")
    await client.completions.create(
        model=MODEL, prompt="x", max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert await metric(port, "kvtier_endpoint_completion_tokens_total") == before + 3
    health = await ask(port, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (health.status, health.json) == (200, {"status": "ok"})
    assert "Traceback" not in process.log_text()

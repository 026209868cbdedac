"""Halves of a split request over HTTP, with a scripted engine."""

import asyncio
import json

import pytest

from kvtier_services.worker.requests import (
    CachedTokens,
    FinishReason,
    GeneratedToken,
    Purpose,
    Stored,
    TokenDelta,
)
from tests.harness.waiting import eventually_async
from tests.support.raw_http import RawConnection, ask
from tests.support.scripted_engine import MODEL, ScriptedEngine, says, served

CACHED = CachedTokens(gpu=2, dram=3)
LAST = TokenDelta((GeneratedToken(65),), FinishReason.LENGTH, CACHED, Stored(16, 0.25))


def asked(body: dict[str, object], *headers: str, path: str = "/v1/completions") -> bytes:
    data = json.dumps({"model": MODEL} | body).encode()
    lines = ["host: x", "content-type: application/json", f"content-length: {len(data)}", *headers]
    return f"POST {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + data


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_half_says_what_is_stored_and_generates_nothing(stream: bool) -> None:
    engine = ScriptedEngine(lambda _: [LAST])
    body = {"prompt": "hello", "max_tokens": 40, "stream": stream, "logprobs": 2}
    async with served(engine) as it:
        answer = await ask(it.port, asked(body, "x-kvtier-prefill: 1"))
    assert answer.status == 200
    assert answer.json["object"] == "kvtier.prefill"
    assert answer.json["choices"] == []
    assert answer.json["kvtier"] == {"stored_tokens": 16, "store_wait_s": 0.25}
    usage = answer.json["usage"]
    assert isinstance(usage, dict)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 0)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert engine.request.purpose is Purpose.PREFILL
    assert (engine.request.tokens_max, engine.request.logprobs_count) == (1, None)


async def test_chats_have_prefill_halves_too() -> None:
    engine = ScriptedEngine(lambda _: [LAST])
    body: dict[str, object] = {"messages": [{"role": "user", "content": "hello"}]}
    async with served(engine) as it:
        path = "/v1/chat/completions"
        answer = await ask(it.port, asked(body, "x-kvtier-prefill: 1", path=path))
    assert (answer.status, answer.json["object"]) == (200, "kvtier.prefill")


@pytest.mark.parametrize("body", [{"prompt": "a", "n": 2}, {"prompt": ["a", "b"]}])
async def test_requests_with_several_sequences_have_none(body: dict[str, object]) -> None:
    engine = ScriptedEngine()
    async with served(engine) as it:
        answer = await ask(it.port, asked(body, "x-kvtier-prefill: 1"))
    assert answer.status == 400
    assert engine.generations == []


async def test_a_caller_that_goes_gives_the_prefill_up() -> None:
    never = asyncio.Event()
    engine = ScriptedEngine(lambda _: [never, LAST])
    async with served(engine) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(asked({"prompt": "hello"}, "x-kvtier-prefill: 1"))

        async def has_begun() -> bool:
            return bool(engine.generations)

        await eventually_async(has_begun, 30, "the engine is asked")
        connection.reset()
        async with asyncio.timeout(20):
            await engine.generations[0].cancelled.wait()


async def test_what_another_worker_computed_for_this_request_is_not_called_cached() -> None:
    engine = ScriptedEngine(lambda _: says("abc", cached=CACHED))
    headers = ("x-kvtier-prefilled: 3", "x-kvtier-explain: 1")
    async with served(engine) as it:
        answer = await ask(it.port, asked({"prompt": "hello"}, *headers))
        all_of_it = await ask(it.port, asked({"prompt": "hello"}, "x-kvtier-prefilled: 6"))
        wrong = await ask(it.port, asked({"prompt": "hello"}, "x-kvtier-prefilled: some"))
    usage, other = answer.json["usage"], all_of_it.json["usage"]
    assert isinstance(usage, dict)
    assert isinstance(other, dict)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2, "reused_tokens": 5}
    assert usage["kvtier"]["cached_tokens"]["dram"] == 3
    assert other["prompt_tokens_details"] == {"cached_tokens": 0, "reused_tokens": 5}
    assert wrong.status == 400

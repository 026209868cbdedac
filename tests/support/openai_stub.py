"""An OpenAI endpoint that answers by rule and remembers every request it got.

What must not live here: what a test expects.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Json = dict[str, Any]
Rule = Callable[[str, int], Awaitable[web.Response | None]]
"""(prompt, how many times it came before) to an answer; None: the usual one."""


@dataclass(slots=True)
class Stub:
    """Serves `/v1/models`, `/v1/completions` and `/v1/chat/completions`."""

    rule: Rule | None = None
    port: int = 0
    asked: list[str] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    at_once: int = 0
    at_once_max: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        before = self.asked.count(prompt)
        self.asked.append(prompt)
        self.bodies.append(body)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            told = None if self.rule is None else await self.rule(prompt, before)
        finally:
            self.at_once -= 1
        return web.json_response(completion(body, prompt)) if told is None else told


def completion(body: Json, prompt: str) -> Json:
    """The usual answer: the prompt's end backwards; half of its tokens were cached."""
    tokens = len(prompt) // 4
    return {
        "id": "cmpl-1",
        "model": body["model"],
        "choices": [{"index": 0, "text": prompt[-20:][::-1], "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": tokens,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": tokens // 2},
            "kvtier": {"cached_tokens": {"gpu": tokens // 4, "dram": tokens // 2 - tokens // 4}},
        },
    }


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "stub-model"}]})


@asynccontextmanager
async def serving(rule: Rule | None = None) -> AsyncIterator[Stub]:
    """A stub that serves while entered."""
    stub = Stub(rule)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", stub.answer)
    app.router.add_post("/v1/chat/completions", stub.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.port = runner.addresses[0][1]
    try:
        yield stub
    finally:
        await asyncio.wait_for(runner.cleanup(), 30)

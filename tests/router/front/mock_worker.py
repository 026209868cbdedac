"""A recording worker in a process of its own: OpenAI over HTTP with a deterministic 'model'.

The next token is a function of all tokens before it, so that a stream that goes on elsewhere gives
the same text exactly if it was handed the same tokens. `POST /behave` sets what goes wrong, `GET
/recorded` returns what came. Usage: mock_worker.py PORT DIRECTORY [TOKEN_MS].
"""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from aiohttp import web

from kvtier.text.model import ChatOptions, SpecialTokens, TextModel

MODEL = "mock"
CREATED = 1_700_000_000


class Worker:
    def __init__(self, directory: Path, token_s: float, name: str) -> None:
        self.text = TextModel.load(directory)
        self.token_s = token_s
        self.name = name
        self.recorded: deque[dict[str, Any]] = deque(maxlen=1000)
        self.behaviour: dict[str, Any] = {}
        self.open_streams = 0
        self.cancelled = 0
        self.cancelled_at = 0.0
        """Monotonic seconds, which all processes of a machine share."""
        self.words = [
            token
            for token in range(min(4000, self.text.vocabulary_size))
            if self.text.encode(self.text.decode([token]), SpecialTokens.OMIT).tolist() == [token]
            and self.text.decode([token]).startswith(" ")
        ]

    def next_token(self, tokens: list[int]) -> int:
        digest = hashlib.sha256(",".join(map(str, tokens)).encode()).digest()
        return self.words[int.from_bytes(digest[:4], "little") % len(self.words)]

    def end_if(self, request: web.Request, moment: str | int) -> None:
        """Die (the process) or cut (the connection, once) if this is the moment."""
        if self.behaviour.get("die") == moment:
            os._exit(3)
        if self.behaviour.get("cut") == moment:
            self.behaviour = {}
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError

    # Handlers

    async def behave(self, request: web.Request) -> web.Response:
        self.behaviour = await request.json()
        return web.json_response({})

    async def show(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "requests": list(self.recorded),
                "open_streams": self.open_streams,
                "cancelled": self.cancelled,
                "cancelled_at": self.cancelled_at,
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.recorded.append({"path": request.path_qs, "headers": headers, "body": body})
        wrong = self.behaviour
        if wrong.get("status"):
            reply = wrong.get("reply", {"error": {"message": "as told", "type": "t"}})
            return web.json_response(
                reply, status=wrong["status"], headers=wrong.get("headers", {})
            )
        self.end_if(request, "before")
        if wrong.get("hang"):
            await asyncio.sleep(3600)
        is_chat = "chat" in request.path
        if is_chat:
            options = ChatOptions(tools=body.get("tools"))
            prompt = self.text.encode_chat(body["messages"], options).tolist()
        else:
            first = body["prompt"]
            if isinstance(first, list) and first and not isinstance(first[0], int):
                first = first[0]
            prompt = self.text.encode(first).tolist() if isinstance(first, str) else list(first)
        if "scripted" in wrong:
            return await self.scripted(request, body, wrong["scripted"])
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if body.get("stream"):
            return await self.stream(request, body, prompt, most, is_chat)
        self.end_if(request, "first")
        return self.whole(body, prompt, most, is_chat)

    async def scripted(
        self, request: web.Request, body: dict[str, Any], script: Any
    ) -> web.StreamResponse:
        """Exactly what the test wants: a JSON answer, or the events of a stream."""
        if not body.get("stream"):
            return web.json_response(script)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in script:
            text = chunk if isinstance(chunk, str) else json.dumps(chunk)
            await response.write(f"data: {text}\n\n".encode())
        await response.write_eof()
        return response

    def usage(self, prompt: list[int], count: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            "prompt_tokens_details": {"cached_tokens": self.behaviour.get("cached", 0)},
        }

    def whole(
        self, body: dict[str, Any], prompt: list[int], most: int, is_chat: bool
    ) -> web.Response:
        tokens = list(prompt)
        for _ in range(most):
            tokens.append(self.next_token(tokens))
        text = self.text.decode(tokens[len(prompt) :])
        choices = []
        for index in range(body.get("n") or 1):
            choice: dict[str, Any] = {"index": index, "finish_reason": "length", "logprobs": None}
            if is_chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        answer = {
            "id": "chatcmpl-1" if is_chat else "cmpl-1",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": CREATED,
            "model": body["model"],
            "choices": choices,
            "usage": self.usage(prompt, most),
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = prompt
        return web.json_response(answer)

    async def stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        prompt: list[int],
        most: int,
        is_chat: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        frame = {
            "id": f"chatcmpl-{self.name}" if is_chat else f"cmpl-{self.name}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": CREATED,
            "model": body["model"],
        }

        async def send(chunk: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        self.open_streams += 1
        try:
            self.end_if(request, "first")
            if is_chat:
                role = {"role": "assistant", "content": ""}
                await send(
                    {**frame, "choices": [{"index": 0, "delta": role, "finish_reason": None}]}
                )
            tokens = list(prompt)
            for number in range(most):
                if number in (self.behaviour.get("die"), self.behaviour.get("cut")):
                    await response.write(b'data: {"id": "half')
                    await asyncio.sleep(0.05)
                    self.end_if(request, number)
                tokens.append(self.next_token(tokens))
                text = self.text.decode(tokens[-1:])
                finish = "length" if number == most - 1 else None
                part = {"delta": {"content": text}} if is_chat else {"text": text}
                choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish}
                await send({**frame, "choices": [choice]})
                if self.token_s:
                    await asyncio.sleep(self.token_s)
            if "done" in (self.behaviour.get("die"), self.behaviour.get("cut")):
                await asyncio.sleep(0.05)
                self.end_if(request, "done")
            if (body.get("stream_options") or {}).get("include_usage"):
                await send({**frame, "choices": [], "usage": self.usage(prompt, most)})
            await response.write(b"data: [DONE]\n\n")
            await asyncio.sleep(self.behaviour.get("linger", 0.0))
            if self.behaviour.get("cut") == "end":
                await asyncio.sleep(0.05)
                self.end_if(request, "end")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            self.cancelled_at = time.monotonic()
            raise
        finally:
            self.open_streams -= 1
        return response

    async def any_path(self, request: web.Request) -> web.Response:
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        text = raw.decode("utf-8", "replace")
        self.recorded.append({"path": request.path_qs, "headers": headers, "text": text})
        if "scripted" in self.behaviour:
            return web.json_response(self.behaviour["scripted"])
        return web.json_response({"id": f"resp-{len(self.recorded)}", "worker": self.name})


def main() -> None:
    port, directory = int(sys.argv[1]), Path(sys.argv[2])
    token_s = float(sys.argv[3]) / 1e3 if len(sys.argv) > 3 else 0.0
    worker = Worker(directory, token_s, str(port))
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/behave", worker.behave)
    app.router.add_get("/recorded", worker.show)
    app.router.add_get("/v1/models", worker.models)
    app.router.add_post("/v1/chat/completions", worker.generate)
    app.router.add_post("/v1/completions", worker.generate)
    app.router.add_route("*", "/{path:.*}", worker.any_path)
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        handler_cancellation=True,
        print=None,
        access_log=None,
    )


if __name__ == "__main__":
    main()

"""The mock workers of the router bench: one process, several ports, one engine behind each.

`python -m kvtier.bench.router_mock SPEC` with a JSON object (see `MockSpec`); says `port=N` of its
control port on standard error once every worker listens. What it understands of a request:

- a `prompt` of token ids, or chat messages where it has a tokenizer, go through the engine;
- `user: "tokens=N"` stands for a prompt of N tokens that nobody tokenises here;
- `user: "chunks=N every_ms=M"` is a stream of N chunks that carry their number and time.

What must not live here: scheduling and caching (router_engine), HTTP details (router_mock_http).
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from kvtier.bench.router_engine import Engine, EngineShape, Run, Work
from kvtier.bench.router_mock_http import Answer, MockConnection, MockRequest
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.core.workers import Load
from kvtier.publisher import Publisher
from kvtier.sections import DialConfig
from kvtier.text import TextModel
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier

MODEL: Final = "mock"
LOAD_S: Final = 0.25
"""How often workers say what they are doing."""
INSTANT: Final = 0
"""`cache_blocks` of a worker without an engine: it answers at once."""


@dataclass(frozen=True, slots=True)
class MockSpec:
    """One process of mock workers."""

    names: tuple[str, ...]
    index: tuple[str, ...] = ()
    """Index replicas to publish to."""
    text: str = ""
    """Directory of tokenizer and chat template; empty: chats are not tokenised here."""
    cache_blocks: int = INSTANT
    token_scale: int = 1
    time_scale: float = 1.0
    event_delay_ms: float = 0.0
    answer_ms: float = 0.0
    """Of a worker without an engine."""
    block_tokens: int = 16

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "MockSpec":
        fields = json.loads(text)
        fields["names"], fields["index"] = tuple(fields["names"]), tuple(fields["index"])
        return cls(**fields)


class Worker:
    """One mock worker: takes requests of its port, publishes what its engine holds."""

    def __init__(self, spec: MockSpec, name: str, text: TextModel | None) -> None:
        self.name = name
        self.port = 0
        self.requests = 0
        self.streams = 0
        self.stray = 0
        """Requests that it did not understand."""
        self._spec = spec
        self._text = text
        self._loop = asyncio.get_running_loop()
        self._publisher: Publisher | None = None
        self._server: asyncio.Server | None = None
        shape = EngineShape(spec.cache_blocks, spec.block_tokens, spec.token_scale, spec.time_scale)
        self.engine = Engine(shape, self._changed) if spec.cache_blocks else None
        self._root = chain_root(Pool("bench/mock", "1", spec.block_tokens), None, None)

    async def open(self) -> None:
        self._server = await self._loop.create_server(
            lambda: MockConnection(self.answer), "127.0.0.1", 0, backlog=2048
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self._spec.index:
            dial = DialConfig(targets=self._spec.index)
            self._publisher = Publisher(self._info(), dial).start()
            await asyncio.to_thread(self._publisher.flush, 30.0)

    def _info(self) -> HolderInfo:
        digests = self._text.digests if self._text is not None else None
        card = ModelCard(
            served_names=(MODEL,),
            model_id="bench/mock",
            revision="1",
            tokenizer_digest=digests.tokenizer if digests is not None else b"t" * 32,
            chat_template_digest=digests.chat_template if digests is not None else None,
            block_tokens=self._spec.block_tokens,
        )
        blocks = self._spec.cache_blocks or 10_000
        return HolderInfo(
            HolderKind.WORKER,
            InstanceId(self.name),
            NodeId(f"{self.name}-node"),
            Fingerprint(b"n" * 32),
            card,
            addresses=Addresses(http=f"127.0.0.1:{self.port}"),
            engine="mock",
            capacities=(TierCapacity(Tier.GPU, blocks, blocks << 16),),
            block_bytes=1 << 16,
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._publisher is not None:
            self._publisher.close()

    def tell_load(self) -> None:
        if self._publisher is None or self.engine is None:
            return
        running, waiting, queued = self.engine.load
        blocks = self._spec.cache_blocks
        self._publisher.set_load(
            Load(
                running_requests=running,
                waiting_requests=waiting,
                queued_prefill_tokens=queued,
                free_blocks=max(0, blocks - len(self.engine.cache)),
                total_blocks=blocks,
            )
        )

    def _changed(self, gained: list[Run], lost: list[int]) -> None:
        if self._publisher is None:
            return
        if self._spec.event_delay_ms:
            self._loop.call_later(self._spec.event_delay_ms / 1e3, self._publish, gained, lost)
        else:
            self._publish(gained, lost)

    def _publish(self, gained: list[Run], lost: list[int]) -> None:
        assert self._publisher is not None
        for parent, blocks in gained:
            self._publisher.store(Tier.GPU, parent, np.array(blocks, np.uint64))
        if lost:
            self._publisher.remove(Tier.GPU, np.array(lost, np.uint64))

    # Requests

    def answer(self, request: MockRequest, answer: Answer) -> None:
        """Take one request; whatever comes of it goes to `answer`, now or later."""
        if not request.path.startswith("/v1/") or request.method != "POST":
            answer.whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        self.requests += 1
        body = request.json()
        hints = dict(_hints(body.get("user")))
        if "chunks" in hints:
            self.streams += 1
            self._loop.create_task(self._tick(answer, hints["chunks"], hints["every_ms"] / 1e3))
            return
        tokens = self._tokens(body) if self.engine is not None else None
        if self.engine is None or tokens is None:
            self.stray += self.engine is not None
            self._loop.call_later(
                self._spec.answer_ms / 1e3, _answer_at_once, answer, body, hints.get("tokens", 1)
            )
            return
        chain = prefix_hashes(self._root, tokens, self._spec.block_tokens).tolist()
        output = body.get("max_tokens") or 16
        assert isinstance(output, int)
        relay = Relay(answer, body)
        work = Work(len(tokens), chain, output, relay.first, relay.piece, relay.done)
        answer.on_gone = lambda: setattr(work, "is_gone", True)
        self.engine.submit(work)

    def _tokens(self, body: dict[str, object]) -> "np.typing.NDArray[np.uint32] | None":
        prompt, messages = body.get("prompt"), body.get("messages")
        if isinstance(prompt, list):
            return np.array(prompt, np.uint32)
        if isinstance(messages, list) and self._text is not None:
            return self._text.encode_chat(messages)
        return None

    async def _tick(self, answer: Answer, chunks: int, every_s: float) -> None:
        """Send chunks that say when they left; the first after a random part of the interval."""
        start = self._loop.time() + (time.monotonic_ns() % 1000) / 1000 * every_s
        answer.start()
        for number in range(chunks):
            await asyncio.sleep(max(0.0, start + number * every_s - self._loop.time()))
            if answer.is_gone:
                return
            answer.event(_chunk(f"n={number} t={time.monotonic_ns()} "))
        answer.end()


class Relay:
    """Puts what an engine makes of a request into its answer."""

    def __init__(self, answer: Answer, body: dict[str, object]) -> None:
        self._answer = answer
        self._streams = bool(body.get("stream"))
        options = body.get("stream_options")
        self._tells_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._is_chat = "messages" in body

    def first(self, work: Work) -> None:
        if self._streams:
            self._answer.start()
            self.piece(work)

    def piece(self, _: Work) -> None:
        if self._streams:
            self._answer.event(_chunk("word ") if self._is_chat else _text_chunk("word "))

    def done(self, work: Work) -> None:
        usage = _usage(work.prompt_tokens, work.output_tokens, work.cached_tokens)
        if not self._streams:
            self._answer.whole(200, _whole(usage, is_chat=self._is_chat))
            return
        if self._tells_usage:
            last = _frame(is_chat=self._is_chat) | {"choices": [], "usage": usage}
            self._answer.event(json.dumps(last))
        self._answer.end()


def _answer_at_once(answer: Answer, body: dict[str, object], prompt_tokens: int) -> None:
    if answer.is_gone:
        return
    relay = Relay(answer, body)
    work = Work(prompt_tokens, (), 1, relay.first, relay.piece, relay.done)
    relay.first(work)
    relay.done(work)


def _hints(text: object) -> Iterator[tuple[str, int]]:
    if isinstance(text, str) and "=" in text:
        for part in text.split():
            key, _, value = part.partition("=")
            yield key, int(value)


def _usage(prompt: int, output: int, cached: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _frame(*, is_chat: bool) -> dict[str, object]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": "mock-1", "object": kind, "created": 1_700_000_000, "model": MODEL}


_CHAT_FRAME: Final = json.dumps(_frame(is_chat=True))[:-1]
_TEXT_FRAME: Final = json.dumps(_frame(is_chat=False))[:-1]


def _chunk(text: str) -> str:
    delta = f'{{"index": 0, "delta": {{"content": "{text}"}}, "finish_reason": null}}'
    return f'{_CHAT_FRAME}, "choices": [{delta}]}}'


def _text_chunk(text: str) -> str:
    return f'{_TEXT_FRAME}, "choices": [{{"index": 0, "text": "{text}", "finish_reason": null}}]}}'


def _whole(usage: dict[str, object], *, is_chat: bool) -> dict[str, object]:
    said: dict[str, object] = {"text": "word"}
    if is_chat:
        said = {"message": {"role": "assistant", "content": "word"}}
    choice = {"index": 0, "finish_reason": "stop", **said}
    kind = "chat.completion" if is_chat else "text_completion"
    return _frame(is_chat=is_chat) | {"object": kind, "choices": [choice], "usage": usage}


class Control:
    """The control port: `GET /` tells what all workers did, `POST /` makes one slow."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def answer(self, request: MockRequest, answer: Answer) -> None:
        if request.method == "POST":
            told = request.json()
            for worker in self._workers:
                slowness = told.get(worker.name)
                if worker.engine is not None and isinstance(slowness, int | float):
                    worker.engine.slowness = float(slowness)
        answer.whole(200, {worker.name: _state(worker) for worker in self._workers})


def _state(worker: Worker) -> dict[str, object]:
    engine = worker.engine
    return {
        "port": worker.port,
        "requests": worker.requests,
        "stray": worker.stray,
        "prompt_tokens": engine.prompt_tokens if engine is not None else 0,
        "cached_tokens": engine.cached_tokens if engine is not None else 0,
    }


async def serve(spec: MockSpec) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    text = TextModel.load(Path(spec.text)) if spec.text else None
    workers = [Worker(spec, name, text) for name in spec.names]
    try:
        for worker in workers:
            await worker.open()
        control = Control(workers)
        server = await loop.create_server(lambda: MockConnection(control.answer), "127.0.0.1", 0)
        sys.stderr.write(f"serving port={server.sockets[0].getsockname()[1]}\n")
        sys.stderr.flush()
        while True:
            await asyncio.sleep(LOAD_S)
            for worker in workers:
                worker.tell_load()
    finally:
        for worker in workers:
            worker.close()


def main(argv: list[str]) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(MockSpec.loads(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])

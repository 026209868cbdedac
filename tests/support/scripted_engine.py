"""An engine that says what a test tells it to, a tokenizer of bytes, and the endpoint around them.

Tokens are UTF-8 bytes; 256 begins a text, 257 ends one, and both are special. What a test needs to
see of the engine is recorded: requests, cancellations.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web
from openai import AsyncOpenAI

from kvtier.core.model_card import ModelCard
from kvtier.errors import KvtierError
from kvtier.text import ChatOptions, SpecialTokens, TokenIds
from kvtier.text.messages import chat_messages
from kvtier.text.template import ContentFormat, Ending
from kvtier_services.worker.http.app import Surroundings, create_app, create_runner
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.http.texts import Texts
from kvtier_services.worker.requests import (
    CachedTokens,
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    TokenDelta,
)

BOS, EOS, VOCAB_SIZE, CONTEXT_TOKENS = 256, 257, 300, 512
MODEL = "scripted"
CARD = ModelCard((MODEL, "alias/of-it"), "model-id", "r1", b"t" * 32, b"c" * 32, 16)

Step = TokenDelta | KvtierError | Exception | asyncio.Event
"""A delta, an error to raise, or an event to wait for."""
Script = Callable[[GenerationRequest], Iterable[Step]]


class ByteTexts:
    """`Texts` of bytes. A chat is `role: content` a line."""

    def encode(
        self, text: str, special_tokens: SpecialTokens = SpecialTokens.ADD, scope: str = ""
    ) -> TokenIds:
        ids = list(text.encode())
        return np.array(
            [BOS, *ids] if special_tokens is SpecialTokens.ADD else ids, dtype=np.uint32
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: ChatOptions,
        scope: str = "",
    ) -> TokenIds:
        read = chat_messages(messages, ContentFormat.TEXT)
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in read)
        if options.ending is Ending.GENERATION_PROMPT:
            text += "\nassistant: "
        return self.encode(text + str(options.template_arguments.get("suffix", "")))

    def decode(self, ids: Sequence[int], special_tokens: SpecialTokens = SpecialTokens.OMIT) -> str:
        special = {BOS: "<s>", EOS: "</s>"} if special_tokens is SpecialTokens.ADD else {}
        parts = [bytes([i]) if i < 256 else special.get(i, "").encode() for i in ids]
        return b"".join(parts).decode("utf-8", errors="replace")


def says(
    text: str, finish: FinishReason | None = FinishReason.STOP, cached: CachedTokens | None = None
) -> list[Step]:
    """`text`, a byte a delta; a stop token at the end where the finish is STOP."""
    tokens = [*text.encode(), *([EOS] if finish is FinishReason.STOP else [])]
    deltas: list[Step] = []
    for at, token in enumerate(tokens):
        last = finish if at == len(tokens) - 1 else None
        first = (cached or CachedTokens()) if at == 0 else None
        deltas.append(TokenDelta((with_logprobs(token),), last, first))
    return deltas


def with_logprobs(token: int) -> GeneratedToken:
    """The token with the log-probability -1, the next one as its rival with -2."""
    return GeneratedToken(token, -1.0, ((token, -1.0), ((token + 1) % 256, -2.0)))


class ScriptedGeneration:
    """Plays one script."""

    def __init__(self, request: GenerationRequest, steps: Iterable[Step]) -> None:
        self.request = request
        self.cancelled = asyncio.Event()
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        count = self.request.logprobs_count
        for step in self._steps:
            await asyncio.sleep(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            elif count is None:
                bare = tuple(GeneratedToken(token.token_id) for token in step.tokens)
                yield TokenDelta(bare, step.finish, step.cached, step.stored)
            else:
                cut = tuple(
                    GeneratedToken(token.token_id, token.logprob, token.top[:count])
                    for token in step.tokens
                )
                yield TokenDelta(cut, step.finish, step.cached)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedEngine:
    """An `Engine` whose generations follow `script`; errors in `refusals` are raised by submit."""

    script: Script = field(default=lambda request: says("ok"))
    refusals: list[KvtierError] = field(default_factory=list)
    failure: KvtierError | None = None
    """What `check` raises."""
    generations: list[ScriptedGeneration] = field(default_factory=list)
    checks_count: int = 0
    card: ModelCard = CARD
    context_tokens: int = CONTEXT_TOKENS
    vocab_size: int = VOCAB_SIZE

    def submit(self, request: GenerationRequest) -> ScriptedGeneration:
        if self.refusals:
            raise self.refusals.pop(0)
        generation = ScriptedGeneration(request, self.script(request))
        self.generations.append(generation)
        return generation

    async def check(self) -> None:
        self.checks_count += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure

    @property
    def request(self) -> GenerationRequest:
        """The last one submitted."""
        return self.generations[-1].request


@dataclass
class Served:
    """An endpoint that listens."""

    engine: ScriptedEngine
    port: int
    client: AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def served(
    engine: ScriptedEngine,
    settings: EndpointSettings | None = None,
    surroundings: Surroundings | None = None,
    texts: Texts | None = None,
) -> AsyncIterator[Served]:
    """Serve `engine` on a free port while entered, with an `openai` client that never retries."""
    runner = create_runner(
        create_app(engine, texts or ByteTexts(), settings, surroundings), drain_s=1.0
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20
    )
    try:
        yield Served(engine, port, client)
    finally:
        await client.close()
        await runner.cleanup()

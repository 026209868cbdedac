"""From tokens to answers: each choice as its text grows, and all choices of a request at once.

What must not live here: JSON, HTTP, tokenizers.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvtier.errors import BackendError, KvtierError
from kvtier.text.stream import TextStream
from kvtier_services.worker.requests import (
    CachedTokens,
    Engine,
    FinishReason,
    GeneratedToken,
    Generation,
    GenerationRequest,
    TokenDelta,
)


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and the offset of its text in the choice's text."""

    token: GeneratedToken
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta added to a choice: text that may go out, its tokens, perhaps the end."""

    index: int
    text: str
    tokens: tuple[PlacedToken, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All generated tokens, a stop token at the end included."""
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """The state of one choice. Sans-I/O; `feed` it deltas until it has a `finish`."""

    index: int
    prompt_token_ids: tuple[int, ...]
    stream: TextStream
    echo: str = ""
    """Text of the prompt, where the answer repeats it."""
    finish: str | None = None
    completion_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def feed(self, delta: TokenDelta) -> Piece:
        """Take a delta; return what it adds. Tokens after a stop string do not count."""
        if delta.cached is not None:
            self.cached = delta.cached
        text, placed, token_ids = "", [], []
        for at, token in enumerate(delta.tokens):
            token_ids.append(token.token_id)
            if delta.finish is FinishReason.STOP and at == len(delta.tokens) - 1:
                break  # the stop token is no text
            placed.append(PlacedToken(token, len(self.echo) + self.stream.chars_count))
            text += self.stream.push(token.token_id)
            if self.stream.stopped:
                self.finish = FinishReason.STOP.value
                break
        if self.finish is None and delta.finish is not None:
            text += self.stream.finish()
            stopped = self.stream.stopped
            self.finish = FinishReason.STOP.value if stopped else delta.finish.value
        self.completion_tokens += len(token_ids)
        return Piece(self.index, text, tuple(placed), tuple(token_ids), self.finish)


class Flow:
    """The deltas of several generations as they come, each given to its choice.

    Made by `running`. One task consumes it.
    """

    def __init__(self, choices: Sequence[Choice], generations: Sequence[Generation]) -> None:
        self._choices = choices
        self._generations = generations
        self._arrived: deque[tuple[int, TokenDelta] | BaseException] = deque()
        self._wake = asyncio.Event()
        self._pumps = [
            asyncio.create_task(self._pump(index, generation))
            for index, generation in enumerate(generations)
        ]

    async def pieces(self) -> list[Piece]:
        """Wait for something, and return all that is there; empty when every choice is finished.

        Raises the KvtierError with which the engine gave up, after everything that came before it.
        """
        found: list[Piece] = []
        while not found:
            if all(choice.finish is not None for choice in self._choices):
                break
            await self._wake.wait()
            self._take(found)
        return found

    async def close(self) -> None:
        """Cancel what still runs, at once, and wait for the own tasks. Idempotent."""
        for generation in self._generations:
            generation.cancel()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _take(self, found: list[Piece]) -> None:
        while self._arrived:
            arrival = self._arrived[0]
            if isinstance(arrival, tuple):
                found += self._feed(*arrival)
            elif found:
                return  # first what came before the failure
            else:
                raise arrival
            self._arrived.popleft()
        self._wake.clear()

    def _feed(self, index: int, delta: TokenDelta) -> list[Piece]:
        choice = self._choices[index]
        if choice.finish is not None:
            return []  # came between a stop string and the end of its generation
        piece = choice.feed(delta)
        if piece.finish is not None:
            self._generations[index].cancel()
            self._pumps[index].cancel()
        return [piece]

    async def _pump(self, index: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                self._arrive((index, delta))
                if delta.finish is not None:
                    return
            if self._choices[index].finish is None:
                self._arrive(BackendError("the engine ended a generation without a reason"))
        except KvtierError as error:
            self._arrive(error)
        except BaseException as error:
            self._arrive(error)  # a bug of ours: the consumer must not wait for ever
            raise

    def _arrive(self, arrival: tuple[int, TokenDelta] | BaseException) -> None:
        self._arrived.append(arrival)
        self._wake.set()


@asynccontextmanager
async def running(
    engine: Engine, choices: Sequence[Choice], requests: Sequence[GenerationRequest]
) -> AsyncIterator[Flow]:
    """Submit `requests` (one a choice) and follow them; whatever happens inside, nothing of them
    runs on after the block. Raises what `Engine.submit` raises, with all of them given up."""
    generations: list[Generation] = []
    try:
        generations.extend(engine.submit(request) for request in requests)
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    flow = Flow(choices, generations)
    try:
        yield flow
    finally:
        await flow.close()

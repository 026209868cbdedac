"""Load for the router bench: requests with token ids, sent when they are due, and how each went.

Prompts are made of numbered pieces: equal numbers are equal tokens, so that two prompts share a
prefix exactly as far as their numbers agree. What must not live here: fleets, bars.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np

from kvtier.bench.index_service_processes import BenchError
from kvtier.bench.router_http import Connection, Reply, post
from kvtier.bench.router_mock import MODEL

COMPLETIONS: Final = "/v1/completions"
_WORKER: Final = b"x-kvtier-worker"
_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')
_DONE: Final = b"data: [DONE]"
_TOKENS: Final = (32, 100)
"""Short ids are short to send, and these are letters to a byte-level tokenizer, so that a router
can go on with a stream; otherwise only sameness counts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it is due, in seconds from the start, and of what its prompt is made."""

    at: float
    pieces: tuple[int, ...]
    tokens_count: int
    """The last piece may be cut short."""
    output_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request went. `error` is empty where it went well."""

    at: float
    """When it was sent, in seconds from the start."""
    worker: str
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    """To the first byte of the answer; infinite where none came."""
    error: str = ""


@dataclass(slots=True)
class Pieces:
    """Token ids by piece number, as JSON text, made once."""

    piece_tokens: int
    _texts: dict[int, list[str]] = field(default_factory=dict)

    def prompt(self, ask: Ask) -> str:
        """The token ids of a prompt, as the inside of a JSON list."""
        ids: list[str] = []
        for number in ask.pieces:
            ids += self._text(number)
        return ",".join(ids[: ask.tokens_count])

    def _text(self, number: int) -> list[str]:
        found = self._texts.get(number)
        if found is None:
            rng = np.random.default_rng(number)
            found = [str(token) for token in rng.integers(*_TOKENS, self.piece_tokens)]
            self._texts[number] = found
        return found

    def request(self, ask: Ask) -> bytes:
        """The bytes of a streamed completion."""
        body = (
            f'{{"model": "{MODEL}", "stream": true, "stream_options": {{"include_usage": true}}, '
            f'"max_tokens": {ask.output_tokens}, "prompt": [{self.prompt(ask)}]}}'
        )
        return post(COMPLETIONS, body.encode())


class Sender:
    """Sends requests to routers in turn over connections that it keeps."""

    def __init__(self, ports: Sequence[int], pieces: Pieces) -> None:
        self._ports = ports
        self._pieces = pieces
        self._idle: dict[int, list[Connection]] = {port: [] for port in ports}
        self._turn = 0
        self._start = asyncio.get_running_loop().time()
        self.outcomes: list[Outcome] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def send(self, ask: Ask) -> Outcome:
        """Send one request now; an error is an outcome."""
        port = self._ports[self._turn % len(self._ports)]
        self._turn += 1
        idle = self._idle[port]
        connection = idle.pop() if idle else Connection(port)
        at = self.now
        try:
            outcome = _outcome(at, ask, await connection.request(self._pieces.request(ask)))
            idle.append(connection)
        except (BenchError, TimeoutError) as error:
            connection.close()
            outcome = Outcome(at, "", ask.tokens_count, 0, inf, str(error) or "timeout")
        self.outcomes.append(outcome)
        return outcome

    async def replay(self, asks: Iterable[Ask]) -> list[Outcome]:
        """Send each request when it is due, whatever became of the others; wait for all."""
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await asyncio.sleep(max(0.0, ask.at - self.now))
                group.create_task(self.send(ask))
        return self.outcomes

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()


def _outcome(at: float, ask: Ask, reply: Reply) -> Outcome:
    error = ""
    if reply.status != 200:
        error = f"status {reply.status}: {reply.body[:200]!r}"
    elif _DONE not in reply.body:
        error = f"no end: {reply.body[-200:]!r}"
    said = _CACHED.findall(reply.body)
    cached = int(said[-1]) if said else 0
    worker = reply.header(_WORKER)
    first_s = reply.first_s if reply.status == 200 else inf
    return Outcome(at, worker, ask.tokens_count, cached, first_s, error)


def hit_rate(outcomes: Iterable[Outcome]) -> float:
    """Tokens that workers had cached, of all prompt tokens that were answered."""
    well = [outcome for outcome in outcomes if not outcome.error]
    total = sum(outcome.prompt_tokens for outcome in well)
    return sum(outcome.cached_tokens for outcome in well) / total if total else 0.0


def errors(outcomes: Iterable[Outcome]) -> int:
    """How many failed; the first of them is told on standard error."""
    found = [outcome for outcome in outcomes if outcome.error]
    if found:
        sys.stderr.write(
            f"first of {len(found)} errors, at {found[0].at:.1f} s: {found[0].error}\n"
        )
    return len(found)


async def in_parallel(*jobs: Callable[[], Awaitable[None]]) -> None:
    """Run all at once, so that noise of the machine falls on all."""
    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(_run(job))


async def _run(job: Callable[[], Awaitable[None]]) -> None:
    await job()


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Chats of several turns, arriving at random; turns of a chat wait for the answer before."""

    chats_per_s: float
    turns: int
    turn_pieces: int
    think_s: float
    """Between an answer and the next turn, on average."""
    groups: int = 8
    """Chats of a group begin alike."""
    shared_pieces: int = 1
    output_tokens: int = 32


def chat_numbers(shape: ChatShape, chat: int, turn: int) -> tuple[int, ...]:
    """The pieces of a turn's prompt: the group's, and those of all turns up to this one."""
    group = chat % shape.groups
    shared = tuple(group * 1000 + number for number in range(shape.shared_pieces))
    first = 1_000_000 + chat * 10_000
    return shared + tuple(first + number for number in range((turn + 1) * shape.turn_pieces))


async def chatter(
    sender: Sender, shape: ChatShape, piece_tokens: int, seconds: float, seed: int = 1
) -> list[Outcome]:
    """Chats for so long; those under way then end with their turn. Returns all outcomes."""
    rng = np.random.default_rng(seed)

    async def chat(number: int, thinks: Iterator[float]) -> None:
        for turn in range(shape.turns):
            pieces = chat_numbers(shape, number, turn)
            ask = Ask(sender.now, pieces, len(pieces) * piece_tokens, shape.output_tokens)
            await sender.send(ask)
            await asyncio.sleep(next(thinks))
            if sender.now > seconds:
                return

    arrivals = np.cumsum(rng.exponential(1 / shape.chats_per_s, int(seconds * shape.chats_per_s)))
    async with asyncio.TaskGroup() as group:
        for number, at in enumerate(arrivals[arrivals < seconds].tolist()):
            await asyncio.sleep(max(0.0, at - sender.now))
            thinks = iter(rng.exponential(shape.think_s, shape.turns).tolist())
            group.create_task(chat(number, thinks))
    return sender.outcomes

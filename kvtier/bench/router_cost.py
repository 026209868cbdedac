"""What the router itself costs: CPU of a chat, latency it adds, and how both grow with history.

CPU is read from the kernel's clock of the router's process, so that client, mocks and router may
share two cores; latency is taken against the same workers called directly, in turns.
What must not live here: where requests go.
"""

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.bench.index_service_processes import BenchError
from kvtier.bench.report import Bar, Result
from kvtier.bench.router_fleet import Fleet, FleetSpec, running
from kvtier.bench.router_http import Connection, Reply, post
from kvtier.bench.router_mock import MODEL
from kvtier.bench.text import prose, seconds
from kvtier.text import TextModel

CPU_US_MAX: Final = 500.0
P50_MS_MAX: Final = 1.5
P99_MS_MAX: Final = 8.0
TURN_RATIO_MAX: Final = 2.0
CHAT: Final = "/v1/chat/completions"
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class CostSizes:
    """How much is measured."""

    sessions: int = 256
    requests: int = 3000
    connections: int = 16
    latency_connections: int = 64
    latency_rate: float = 150.0
    """Requests a second through the router, and as many beside it."""
    latency_s: float = 20.0
    answer_ms: float = 10.0
    chats: int = 8
    turn_repeats: int = 12


QUICK: Final = CostSizes(
    sessions=8, requests=64, connections=4, latency_connections=4, latency_s=0.5, chats=2,
    turn_repeats=1,
)  # fmt: skip


def body_of(messages: Messages, **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def closed_loop(port: int, connections: int, bodies: Sequence[bytes]) -> list[Reply]:
    """Send all bodies, each connection its next one as soon as it has an answer."""
    left = iter(bodies)
    replies: list[Reply] = []

    async def one() -> None:
        connection = Connection(port)
        try:
            for body in left:
                replies.append(checked(await connection.request(post(CHAT, body))))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(one())
    return replies


def checked(reply: Reply) -> Reply:
    """A reply that is no error. BenchError for others."""
    if reply.status != 200:
        raise BenchError(f"status {reply.status}: {reply.body[:300]!r}")
    return reply


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def cpu(texts: Path, sizes: CostSizes) -> list[Result]:
    """CPU a request of new 2 KB chats: with a beginning that 256 sessions share, and all new.

    Mocks tokenise, cache and publish, so that the router follows a live index meanwhile.
    """
    rng = random.Random(1)
    shared = [prose(rng, 2000) for _ in range(sizes.sessions)]
    known = [body_of([user(f"{rng.choice(shared)} q{n}")]) for n in range(sizes.requests)]
    new = [body_of([user(prose(rng, 2000))]) for _ in range(sizes.requests)]
    async with running(live_spec(texts)) as fleet:
        await closed_loop(fleet.ports[0], sizes.connections, [body_of([user(t)]) for t in shared])
        known_us = await _cpu_us(fleet, sizes, known)
        new_us = await _cpu_us(fleet, sizes, new)
    tokens_us = _tokens_us(TextModel.load(texts), [prose(rng, 2000) for _ in range(200)])
    return [
        Result("CPU of tokenising such a chat, alone", tokens_us, "us"),
        Result("CPU of a 2 KB chat, 256 sessions", known_us, "us", CPU_US_MAX, Bar.AT_MOST),
        Result("CPU of a 2 KB chat, all text new", new_us, "us", CPU_US_MAX, Bar.AT_MOST),
    ]


def _tokens_us(model: TextModel, texts: Sequence[str]) -> float:
    """The part of a request's CPU that is tokens, on this machine as it is just now."""
    chats = [[user(text)] for text in texts]
    return statistics.median(seconds(partial(model.encode_chat, chat)) for chat in chats) * 1e6


def live_spec(texts: Path) -> FleetSpec:
    """Workers that tokenise, cache and publish, and take hardly any time for it."""
    spec = FleetSpec(texts=texts)
    mock = replace(spec.mock, text=str(texts), cache_blocks=50_000, time_scale=0.02)
    return replace(spec, mock=mock)


async def _cpu_us(fleet: Fleet, sizes: CostSizes, bodies: Sequence[bytes]) -> float:
    """The median of eight batches."""
    router, each = fleet.routers[0], max(1, len(bodies) // 8)
    found = []
    for first in range(0, each * 8, each):
        before = router.cpu_s()
        batch = bodies[first : first + each]
        await closed_loop(fleet.ports[0], sizes.connections, batch)
        found.append((router.cpu_s() - before) / len(batch) * 1e6)
    return statistics.median(found)


async def turns(texts: Path, sizes: CostSizes) -> list[Result]:
    """CPU of turn 20 with 40 KB of history, against a first turn; both end in 2 KB of new text."""
    rng = random.Random(2)
    first, last = [], []
    async with running(live_spec(texts)) as fleet:
        router, port = fleet.routers[0], fleet.ports[0]

        async def cost(bodies: Sequence[bytes]) -> float:
            before = router.cpu_s()
            await closed_loop(port, 1, bodies)
            return (router.cpu_s() - before) / len(bodies) * 1e6

        histories = [_history(rng) for _ in range(sizes.chats)]
        await closed_loop(port, 1, [body_of(history) for history in histories])
        for _ in range(sizes.turn_repeats):
            new = [prose(rng, 2000) for _ in histories]
            first.append(await cost([body_of([user(text)]) for text in new]))
            new = [prose(rng, 2000) for _ in histories]
            turn = [body_of([*h, user(t)]) for h, t in zip(histories, new, strict=True)]
            last.append(await cost(turn))
    first_us, last_us = statistics.median(first), statistics.median(last)
    return [
        Result("CPU of turn 1", first_us, "us"),
        Result("CPU of turn 20", last_us, "us"),
        Result("turn 20 against turn 1", last_us / first_us, "ratio", TURN_RATIO_MAX, Bar.AT_MOST),
    ]


def _history(rng: random.Random) -> Messages:
    """19 turns, 2 KB each."""
    roles = ("user", "assistant")
    return [{"role": role, "content": prose(rng, 1000)} for _ in range(19) for role in roles]


async def latency(texts: Path, sizes: CostSizes) -> list[Result]:
    """What the router adds to a 2 KB chat, by arrivals at random on 64 connections."""
    rng = random.Random(3)
    model = TextModel.load(texts)
    bodies = []
    for _ in range(sizes.sessions):
        messages = [user(prose(rng, 2000))]
        count = len(model.encode_chat(messages))
        bodies.append(body_of(messages, user=f"tokens={count}"))
    spec = FleetSpec(texts=texts)
    spec = replace(spec, mock=replace(spec.mock, text=str(texts), answer_ms=sizes.answer_ms))
    async with running(spec) as fleet:
        workers = [state["port"] for state in (await fleet.states()).values()]
        through, beside = await _in_turns(fleet.ports[0], workers, bodies, sizes)
    added = [
        (percentile(through, share) - percentile(beside, share)) * 1e3 for share in (0.5, 0.99)
    ]
    return [
        Result("direct call p50", percentile(beside, 0.5) * 1e3, "ms"),
        Result("direct call p99", percentile(beside, 0.99) * 1e3, "ms"),
        Result("added latency p50", added[0], "ms", P50_MS_MAX, Bar.AT_MOST),
        Result("added latency p99", added[1], "ms", P99_MS_MAX, Bar.AT_MOST),
    ]


async def _in_turns(
    router: int, workers: Sequence[int], bodies: Sequence[bytes], sizes: CostSizes
) -> tuple[list[float], list[float]]:
    """Seconds through the router and beside it; every connection does the one, then the other."""
    through: list[float] = []
    beside: list[float] = []
    loop = asyncio.get_running_loop()
    end = loop.time() + sizes.latency_s

    async def one(number: int) -> None:
        rng = random.Random(number)
        pair = Connection(router), Connection(workers[number % len(workers)])
        try:
            while True:
                wait = rng.expovariate(2 * sizes.latency_rate / sizes.latency_connections)
                if loop.time() + wait > end:
                    return
                await asyncio.sleep(wait)
                body = post(CHAT, rng.choice(bodies))
                is_through = len(through) <= len(beside)
                reply = checked(await pair[0 if is_through else 1].request(body))
                (through if is_through else beside).append(reply.total_s)
        finally:
            for connection in pair:
                connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(sizes.latency_connections):
            group.create_task(one(number))
    return through, beside

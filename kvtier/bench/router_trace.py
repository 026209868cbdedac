"""The conversation trace under trouble: cache_aware against affinity hashing and least_loaded.

Arrivals are those of the trace, spread over the three seconds that its stamps are rounded to, and
sped up; a token stands for 16. One worker is slow from the start, one is killed half-way, and for a
third of the time a third of the requests begin with one hot prefix. The three policies run at the
same time over fleets of their own. What must not live here: other loads.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.router_cost import percentile
from kvtier.bench.router_fleet import WORKERS, Fleet, FleetSpec, running
from kvtier.bench.router_load import Ask, Outcome, Pieces, Sender, errors, hit_rate, in_parallel
from kvtier.bench.router_spread import TOKEN_SCALE, fleet_spec
from kvtier.core.trace import MOONCAKE_BLOCK_TOKENS, TraceRow, parse_trace_row

HIT_PART_MIN: Final = 0.95
P99_PART_MAX: Final = 1.0
STAMP_S: Final = 3.0
PIECE_TOKENS: Final = MOONCAKE_BLOCK_TOKENS // TOKEN_SCALE
HOT: Final = tuple(range(10_000_000, 10_000_008))
"""Pieces of the hot prefix: 4,096 tokens of the profile."""
HOT_SHARE: Final = 0.3
CACHES_IN_WORKING_SET: Final = 3
SLOW, KILLED = "w1", "w7"
SLOWNESS: Final = 3.0


@dataclass(frozen=True, slots=True)
class TraceSizes:
    """How much of it, how fast."""

    seconds: float = 60.0
    rate: float = 30.0
    """Requests a second, on average."""
    time_scale: float = 0.5
    """Of the workers: half of the profile's times, so that they carry the rate."""


QUICK: Final = TraceSizes(seconds=2.0, rate=10.0)

ARMS: Final = ("cache_aware", "affinity", "least_loaded")


async def trace(path: Path, texts: Path, sizes: TraceSizes) -> list[Result]:
    """Hits and first tokens of the three, in one run.

    The routers have a tokenizer, so that they can go on with the streams of a killed worker.
    """
    asks = read_asks(path, sizes)
    cache_blocks = _cache_blocks(asks)
    found: dict[str, list[Outcome]] = {}

    def job(arm: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            found[arm] = await _arm(
                replace(_spec(arm, cache_blocks, sizes), texts=texts), asks, sizes
            )

        return run

    await in_parallel(*(job(arm) for arm in ARMS))
    hits = {arm: hit_rate(outcomes) for arm, outcomes in found.items()}
    p99s = {arm: percentile(firsts(outcomes), 0.99) for arm, outcomes in found.items()}
    results = []
    for arm in ARMS:
        results += [
            Result(f"trace, {arm}: token-weighted hit", hits[arm], "ratio"),
            Result(f"trace, {arm}: p50 TTFT", percentile(firsts(found[arm]), 0.5), "s"),
            Result(f"trace, {arm}: p99 TTFT", p99s[arm], "s"),
            Result(f"trace, {arm}: errors", errors(found[arm]), "requests"),
        ]
    others = ARMS[1:]
    hit = hits[ARMS[0]] / max(1e-9, *(hits[arm] for arm in others))
    p99 = p99s[ARMS[0]] / min(p99s[arm] for arm in others)
    return [
        *results,
        Result("trace: hit against the better", hit, "ratio", HIT_PART_MIN),
        Result("trace: p99 TTFT against the better", p99, "ratio", P99_PART_MAX, Bar.AT_MOST),
        Result("trace: errors", errors(found[ARMS[0]]), "requests", 0, Bar.AT_MOST),
    ]


def firsts(outcomes: Sequence[Outcome]) -> list[float]:
    """Seconds to the first byte; infinite for a request that got none."""
    return [outcome.first_s for outcome in outcomes]


def read_asks(path: Path, sizes: TraceSizes) -> list[Ask]:
    """The first requests of the trace, sped up, with the hot prefix mixed in."""
    rng = random.Random(5)
    wanted = int(sizes.seconds * sizes.rate)
    rows: list[TraceRow] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            rows.append(parse_trace_row(line))
            if len(rows) == wanted:
                break
    ats = sorted(row.timestamp / 1e3 + rng.uniform(0, STAMP_S) for row in rows)
    speed = ats[-1] / sizes.seconds
    asks = [_ask(row, at / speed) for row, at in zip(rows, ats, strict=True)]
    for number, ask in enumerate(asks):
        if sizes.seconds / 3 < ask.at < sizes.seconds * 2 / 3 and rng.random() < HOT_SHARE:
            pieces = (*HOT, 20_000_000 + number)
            asks[number] = replace(ask, pieces=pieces, tokens_count=len(pieces) * PIECE_TOKENS)
    return asks


def _ask(row: TraceRow, at: float) -> Ask:
    tokens = max(2, ceil(row.input_tokens / TOKEN_SCALE))
    return Ask(at, row.hash_ids, tokens, max(1, row.output_tokens))


def _cache_blocks(asks: Sequence[Ask]) -> int:
    """Of one worker, so that all together hold a third of what the requests name."""
    pieces = {piece for ask in asks for piece in ask.pieces}
    blocks = len(pieces) * PIECE_TOKENS // 16
    longest = max(ask.tokens_count for ask in asks) // 16 + 1
    return max(longest, blocks // (CACHES_IN_WORKING_SET * WORKERS))


def _spec(arm: str, cache_blocks: int, sizes: TraceSizes) -> FleetSpec:
    spec = replace(fleet_spec(sizes.time_scale, cache_blocks), lone=(KILLED,))
    if arm == "affinity":  # without an index that is what the router does
        return replace(spec, indexes=0)
    return replace(spec, policy=arm)


async def _arm(spec: FleetSpec, asks: Sequence[Ask], sizes: TraceSizes) -> list[Outcome]:
    async with running(spec) as fleet:
        await fleet.slow_down(SLOW, SLOWNESS)
        sender = Sender(fleet.ports, Pieces(PIECE_TOKENS))
        async with asyncio.TaskGroup() as group:
            group.create_task(_kill(fleet, sizes.seconds / 2))
            await sender.replay(asks)
        sender.close()
        return sender.outcomes


async def _kill(fleet: Fleet, after_s: float) -> None:
    await asyncio.sleep(after_s)
    await fleet.kill_worker(KILLED)

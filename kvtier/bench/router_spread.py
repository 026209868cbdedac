"""Whether the router spreads load: unrelated cold requests, and a worker that was slow for a while.

What must not live here: prefixes that requests share.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from kvtier.bench.index_service_processes import BenchError
from kvtier.bench.report import Bar, Result
from kvtier.bench.router_fleet import WORKERS, Fleet, FleetSpec, running
from kvtier.bench.router_load import Ask, Outcome, Pieces, Sender, errors

SHARE_RATIO_MAX: Final = 1.3
RETURN_S_MAX: Final = 60.0
PIECE_TOKENS: Final = 16
TOKEN_SCALE: Final = 16
SLOWED: Final = "w3"
FAIR_PART: Final = 0.75
"""A worker is back when it gets this part of its fair share: less is not told from chance by the
300 requests of a window."""
WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class SpreadSizes:
    """How much is measured."""

    prompts: tuple[tuple[int, int], ...] = ((1, 64), (4, 128), (16, 256), (64, 512))
    """Requests at a time, and tokens of their prompts: longer ones where more run, so that the
    workers are what is waited for and not the machine under this bench."""
    requests: int = 1200
    """At each concurrency: even a draw without memory then stays below the bar."""
    slow_rate: float = 30.0
    before_s: float = 10.0
    slow_s: float = 30.0
    after_s: float = RETURN_S_MAX + 10.0


QUICK: Final = SpreadSizes(
    prompts=((4, 64),), requests=32, slow_rate=20, before_s=0.5, slow_s=0.5, after_s=1.0
)


def fleet_spec(time_scale: float, cache_blocks: int = 50_000) -> FleetSpec:
    """Workers in a profile's time; a token stands for 16 of the profile."""
    spec = FleetSpec()
    mock = replace(
        spec.mock, cache_blocks=cache_blocks, token_scale=TOKEN_SCALE, time_scale=time_scale
    )
    return replace(spec, mock=mock)


def cold(tokens_count: int, first: int = 0) -> Iterator[Ask]:
    """Requests that share nothing, made of pieces from `first` on."""
    for begin in count(first, 1000):
        pieces = tuple(range(begin, begin + tokens_count // PIECE_TOKENS))
        yield Ask(0.0, pieces, tokens_count)


async def spread(sizes: SpreadSizes) -> list[Result]:
    """Requests of the busiest worker against those of the idlest, closed loop, nothing cached."""
    results = []
    async with running(fleet_spec(time_scale=0.5)) as fleet:
        for concurrency, tokens_count in sizes.prompts:
            sender = Sender(fleet.ports, Pieces(PIECE_TOKENS))
            asks = cold(tokens_count, first=concurrency * 10_000_000)
            left = iter([next(asks) for _asked in range(sizes.requests)])
            async with asyncio.TaskGroup() as group:
                for _connection in range(concurrency):
                    group.create_task(_closed(sender, left))
            sender.close()
            if errors(sender.outcomes):
                raise BenchError(next(o.error for o in sender.outcomes if o.error))
            ratio = _ratio(sender.outcomes)
            name = f"max/min over workers at {concurrency} at a time"
            results.append(Result(name, ratio, "ratio", SHARE_RATIO_MAX, Bar.AT_MOST))
    return results


async def _closed(sender: Sender, left: Iterator[Ask]) -> None:
    for ask in left:
        await sender.send(ask)


def _ratio(outcomes: Sequence[Outcome]) -> float:
    counts = Counter(outcome.worker for outcome in outcomes)
    if len(counts) < WORKERS:
        return float("inf")
    return max(counts.values()) / min(counts.values())


async def slow(sizes: SpreadSizes) -> list[Result]:
    """How long a worker that was eight times slower for 30 s waits for its fair share."""
    begin, end = sizes.before_s, sizes.before_s + sizes.slow_s
    async with running(fleet_spec(time_scale=1.0)) as fleet:
        sender = Sender(fleet.ports, Pieces(PIECE_TOKENS))
        asks = _arrivals(sizes.slow_rate, end + sizes.after_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(_slowed(fleet, begin, end))
            replay = group.create_task(sender.replay(asks))
            back_s = await _back(sender, end, end + sizes.after_s)
            replay.cancel()
        sender.close()
    during = _share([o for o in sender.outcomes if begin + 2 <= o.at < end])
    return [
        Result("share of a slow worker, of its fair one", during, "ratio"),
        Result("back at its fair share after", back_s, "s", RETURN_S_MAX, Bar.AT_MOST),
        Result("errors meanwhile", errors(sender.outcomes), "requests", 0, Bar.AT_MOST),
    ]


def _arrivals(rate: float, seconds: float) -> list[Ask]:
    rng, at = random.Random(4), 0.0
    asks: list[Ask] = []
    for ask in cold(4096 // TOKEN_SCALE):
        at += rng.expovariate(rate)
        if at > seconds:
            break
        asks.append(replace(ask, at=at, output_tokens=64))
    return asks


async def _slowed(fleet: Fleet, begin: float, end: float) -> None:
    await asyncio.sleep(begin)
    await fleet.slow_down(SLOWED, 8.0)
    await asyncio.sleep(end - begin)
    await fleet.slow_down(SLOWED, 1.0)


async def _back(sender: Sender, well_at: float, until: float) -> float:
    """Seconds from `well_at` to the end of the first window in which the worker is back."""
    while sender.now < until:
        await asyncio.sleep(0.5)
        now = sender.now
        window = [o for o in sender.outcomes if now - WINDOW_S <= o.at]
        if now > well_at + WINDOW_S / 2 and _share(window) >= FAIR_PART:
            return now - well_at
    return float("inf")


def _share(outcomes: Sequence[Outcome]) -> float:
    """Of one worker's fair share."""
    mine = sum(outcome.worker == SLOWED for outcome in outcomes)
    return mine * WORKERS / len(outcomes) if outcomes else 0.0

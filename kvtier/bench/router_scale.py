"""Several routers over one index, and one router without it: what becomes of hits.

Both sides of every comparison run at the same time, each with processes of its own, so that the
machine's noise falls on both. What must not live here: the trace (router_trace).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvtier.bench.index_service_processes import Program, index_arguments
from kvtier.bench.report import Bar, Result
from kvtier.bench.router_fleet import Fleet, FleetSpec, running
from kvtier.bench.router_load import (
    Ask,
    ChatShape,
    Outcome,
    Pieces,
    Sender,
    chatter,
    errors,
    hit_rate,
    in_parallel,
)  # fmt: skip
from kvtier.bench.router_spread import PIECE_TOKENS, fleet_spec

MANY: Final = 4
MANY_HIT_MIN: Final = 0.98
SIBLINGS: Final = 32
SIBLING_S: Final = 0.010
EVENT_DELAY_MS: Final = 50.0
COMPUTED_MAX: Final = 1.3
PREFIX_PIECES: Final = 32
"""Of siblings: 512 tokens that stand for 8,192."""
LOSS_HIT_MIN: Final = 0.85


def _chats() -> ChatShape:
    return ChatShape(chats_per_s=4.0, turns=6, turn_pieces=4, think_s=1.0)


@dataclass(frozen=True, slots=True)
class ScaleSizes:
    """How much is measured."""

    chats_s: float = 40.0
    bursts: int = 12
    burst_every_s: float = 2.0
    before_s: float = 15.0
    loss_s: float = 60.0
    after_s: float = 10.0
    chats: ChatShape = field(default_factory=_chats)
    """Of each side; a turn adds 1,024 tokens of the profile."""
    cache_blocks: int = 1_500


QUICK: Final = ScaleSizes(
    chats_s=2.0, bursts=1, burst_every_s=0.5, before_s=1.0, loss_s=1.0, after_s=0.5
)

Load = Callable[[Fleet, Sender], Awaitable[None]]


async def _outcomes(spec: FleetSpec, load: Load) -> list[Outcome]:
    """Run a fleet under a load; returns how its requests went."""
    async with running(spec) as fleet:
        sender = Sender(fleet.ports, Pieces(PIECE_TOKENS))
        await load(fleet, sender)
        sender.close()
        return sender.outcomes


async def _both(one: FleetSpec, other: FleetSpec, load: Load) -> list[list[Outcome]]:
    """The same load on two fleets at once."""
    found: list[list[Outcome]] = [[], []]

    def job(number: int, spec: FleetSpec) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            found[number] = await _outcomes(spec, load)

        return run

    await in_parallel(job(0, one), job(1, other))
    return found


async def routers(sizes: ScaleSizes) -> list[Result]:
    """Chats whose every turn meets another of four routers, against all on one router."""
    spec = fleet_spec(time_scale=0.5, cache_blocks=sizes.cache_blocks)

    async def load(_: Fleet, sender: Sender) -> None:
        await chatter(sender, sizes.chats, PIECE_TOKENS, sizes.chats_s)

    one, many = await _both(spec, replace(spec, routers=MANY), load)
    return [
        Result("hit of one router", hit_rate(one), "ratio"),
        Result("hit of 4 routers", hit_rate(many), "ratio"),
        Result(
            "4 routers against 1: hit", _ratio(hit_rate(many), hit_rate(one)), "ratio", MANY_HIT_MIN
        ),
        Result("4 routers: errors", errors(many), "requests", 0, Bar.AT_MOST),
    ]


async def siblings(sizes: ScaleSizes) -> list[Result]:
    """Bursts of requests with one prefix, faster than any event: how often it is computed."""
    spec = fleet_spec(time_scale=0.5)
    spec = replace(spec, mock=replace(spec.mock, event_delay_ms=EVENT_DELAY_MS))

    async def load(_: Fleet, sender: Sender) -> None:
        await sender.replay(_bursts(sizes))

    one, many = await _both(spec, replace(spec, routers=MANY), load)
    prefix = PREFIX_PIECES * PIECE_TOKENS
    computed = [
        sum(max(0, prefix - outcome.cached_tokens) for outcome in outcomes)
        / (sizes.bursts * prefix)
        for outcomes in (one, many)
    ]
    return [
        Result("siblings: prefix computed, one router", computed[0], "times"),
        Result("siblings: prefix computed, 4 routers", computed[1], "times"),
        Result(
            "siblings on 4 routers against 1", _ratio(computed[1], computed[0]), "ratio",
            COMPUTED_MAX, Bar.AT_MOST,
        ),
        Result("siblings: errors", errors([*one, *many]), "requests", 0, Bar.AT_MOST),
    ]  # fmt: skip


def _bursts(sizes: ScaleSizes) -> list[Ask]:
    asks = []
    for burst in range(sizes.bursts):
        prefix = tuple(burst * 1000 + number for number in range(PREFIX_PIECES))
        for sibling in range(SIBLINGS):
            at = burst * sizes.burst_every_s + sibling * SIBLING_S / SIBLINGS
            own = 1_000_000 + burst * 1000 + sibling
            asks.append(Ask(at, (*prefix, own), (PREFIX_PIECES + 1) * PIECE_TOKENS))
    return asks


async def index_loss(sizes: ScaleSizes) -> list[Result]:
    """Hits while both index replicas are dead, against a fleet that keeps them."""
    spec = replace(fleet_spec(time_scale=0.5, cache_blocks=sizes.cache_blocks), indexes=2)
    end = sizes.before_s + sizes.loss_s
    total = end + sizes.after_s

    async def keep(_: Fleet, sender: Sender) -> None:
        await chatter(sender, sizes.chats, PIECE_TOKENS, total)

    async def lose(fleet: Fleet, sender: Sender) -> None:
        started: list[Program] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(_kill(fleet, sizes, started))
            await chatter(sender, sizes.chats, PIECE_TOKENS, total)
        for program in started:
            await program.stop()

    found: list[list[Outcome]] = [[], []]

    async def first() -> None:
        found[0] = await _outcomes(spec, keep)

    async def second() -> None:
        found[1] = await _outcomes(spec, lose)

    await in_parallel(first, second)
    kept, lost = (
        hit_rate(o for o in outcomes if sizes.before_s <= o.at < end) for outcomes in found
    )
    back = [hit_rate(o for o in outcomes if o.at >= end) for outcomes in found]
    return [
        Result("hit with index", kept, "ratio"),
        Result("hit without index", lost, "ratio"),
        Result("index dead for 60 s: hit", _ratio(lost, kept), "ratio", LOSS_HIT_MIN),
        Result("index dead for 60 s: errors", errors(found[1]), "requests", 0, Bar.AT_MOST),
        Result("index back for 10 s: hit", _ratio(back[1], back[0]), "ratio"),
    ]


async def _kill(fleet: Fleet, sizes: ScaleSizes, started: list[Program]) -> None:
    """Kill every index, and start empty ones in their places later."""
    await asyncio.sleep(sizes.before_s)
    ports = [await index.port() for index in fleet.indexes]
    await asyncio.gather(*(index.kill() for index in fleet.indexes))
    await asyncio.sleep(sizes.loss_s)
    for port in ports:
        started.append(await Program.start(index_arguments(port)))


def _ratio(value: float, of: float) -> float:
    return value / of if of else float("nan")

"""Reads: what is in DRAM is read in place, what is below is waited for, in rounds.

What must not live here: puts, the flights themselves.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvtier.core.block_copy import copy_checksum
from kvtier.core.frame import HEADER_BYTES, FrameName
from kvtier.core.planner import (
    Action,
    Block,
    Fetch,
    Join,
    Promote,
    Reason,
    Serve,
    Skip,
    Wanted,
)
from kvtier.errors import FrameFault, KvtierError
from kvtier.ports import GetRequest, GetResult, GetStatus
from kvtier.store.books import Books, Parts
from kvtier.store.flights import Flights
from kvtier.store.lane import Lane
from kvtier.store.naming import block_key, unseen_block
from kvtier.store.values import Presence, ReadOptions, SharedTier
from kvtier.store.writes import Writes
from kvtier.types import Tier

ROUNDS_MAX = 4
"""How often a call plans anew for blocks that moved under it."""

_Way: TypeAlias = asyncio.Future[GetResult] | asyncio.Future[None]
_Begun: TypeAlias = Presence | _Way
_NOWHERE: frozenset[Tier] = frozenset()
_SKIPPED = {
    Reason.TIER_DOWN: GetResult(GetStatus.ERROR, reason="tier_down"),
    Reason.BUSY: GetResult(GetStatus.ERROR, reason="busy"),
}
_MISS = GetResult(GetStatus.MISS)
_TIMEOUT = GetResult(GetStatus.TIMEOUT)
_PRESENCE = {
    GetStatus.HIT: Presence.NO_ROOM,
    GetStatus.MISS: Presence.MISS,
    GetStatus.CORRUPT: Presence.MISS,
    GetStatus.TIMEOUT: Presence.TIMEOUT,
    GetStatus.ERROR: Presence.ERROR,
}


@dataclass(slots=True)
class _Step:
    """What one round does for the blocks of a call, by their positions."""

    served: list[int] = field(default_factory=list)
    flown: dict[int, asyncio.Future[GetResult]] = field(default_factory=dict)
    landing: dict[int, asyncio.Future[GetResult]] = field(default_factory=dict)
    """Blocks that are read into DRAM itself: to be planned again when they are there."""
    written: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Blocks that a put is storing: to be planned again when it has ended."""


class Reads:
    """Carries out reads and the bringing up of blocks."""

    def __init__(
        self,
        books: Books,
        parts: Parts,
        flights: Flights,
        writes: Writes,
        shared: dict[Tier, Lane],
    ) -> None:
        """`shared` are the lanes of tiers that other nodes write too."""
        self._books = books
        self._parts = parts
        self._flights = flights
        self._writes = writes
        self._shared = shared

    async def get_many(
        self, requests: Sequence[GetRequest], deadline_s: float, options: ReadOptions
    ) -> list[GetResult]:
        """See `TieredStore.get_many`."""
        results: dict[int, GetResult] = {}
        pending: Sequence[int] = range(len(requests))
        for _ in range(ROUNDS_MAX):
            if not pending:
                break
            if self._parts.clock() >= deadline_s:
                results.update(dict.fromkeys(pending, _TIMEOUT))
                break
            pending = await self._round(requests, pending, results, deadline_s, options)
        answers = [results.get(i, _MISS) for i in range(len(requests))]
        self._books.tally.misses += sum(not answer.is_hit for answer in answers)
        return answers

    async def _round(
        self,
        requests: Sequence[GetRequest],
        pending: Sequence[int],
        results: dict[int, GetResult],
        deadline_s: float,
        options: ReadOptions,
    ) -> list[int]:
        """Answer what can be answered; returns what must be planned again."""
        step = self._planned(requests, pending, results, options)
        again: list[int] = []
        try:
            if step.served:
                again += await self._serve(requests, step.served, results, deadline_s)
            waited: list[_Way] = [
                *step.flown.values(), *step.landing.values(), *step.written.values()
            ]  # fmt: skip
            if waited:
                timeout = max(0.0, deadline_s - self._parts.clock())
                await asyncio.wait(waited, timeout=timeout)
        finally:
            await self._books.flush()
        for i, flown in step.flown.items():
            results[i] = self._taken(requests[i], flown.result()) if flown.done() else _TIMEOUT
        moving: dict[int, _Way] = {**step.landing, **step.written}
        for i, way in moving.items():
            if way.done():
                again.append(i)
            else:
                results[i] = _TIMEOUT
        return sorted(again)

    def _planned(
        self,
        requests: Sequence[GetRequest],
        pending: Sequence[int],
        results: dict[int, GetResult],
        options: ReadOptions,
    ) -> _Step:
        step = _Step()
        asked: list[int] = []
        wanted: list[Wanted] = []
        for i in pending:
            want = self.wanted(requests[i].name, requests[i].payload_bytes, options)
            if isinstance(want, Wanted):
                asked.append(i)
                wanted.append(want)
            elif want.status is GetStatus.MISS and self._is_held(requests[i].name):
                step.served.append(i)
            else:
                results[i] = want
        actions = self._books.planner.read(wanted, self._parts.clock())
        self._books.carry_out(actions)
        for i, action in zip(asked, _answers(actions), strict=True):
            match action:
                case Serve():
                    step.served.append(i)
                case Skip(reason=Reason.MISS) if self._is_held(requests[i].name):
                    step.served.append(i)
                case Skip():
                    results[i] = _SKIPPED.get(action.reason, _MISS)
                case Join():
                    self._books.tally.joins += 1
                    self._join(step, i, action)
                case Fetch() | Promote():
                    self._join(step, i, action)
        return step

    def _join(self, step: _Step, i: int, action: Join | Fetch | Promote) -> None:
        flight = self._flights.find(action.key)
        if flight is not None and flight.slot is not None:
            step.landing[i] = flight.done
            return
        if flight is not None:
            flight.is_for_bytes = True
            step.flown[i] = flight.done
            return
        written = self._writes.find(action.key)
        if written is not None:
            step.written[i] = written

    def _is_held(self, name: FrameName) -> bool:
        """Whether a block that the planner has let go is in DRAM all the same, for a reader."""
        return self._books.is_held(name) and self._parts.watch.holds(Tier.DRAM, name)

    def wanted(
        self, name: FrameName, payload_bytes: int | None, options: ReadOptions
    ) -> Wanted | GetResult:
        """What to ask the planner for, or the answer where it need not be asked."""
        key = block_key(name)
        block: Block | None = self._books.planner.block(key)
        hinted = _NOWHERE
        if options.shared is SharedTier.ASK:
            hinted = frozenset(t for t, lane in self._shared.items() if not lane.owes_drop(name))
        if block is None:
            if payload_bytes is None or not hinted:
                return _MISS
            return Wanted(unseen_block(name, payload_bytes, options.scope, options.reuse), hinted)
        if payload_bytes is not None and payload_bytes != block.size_bytes - HEADER_BYTES:
            return GetResult(GetStatus.ERROR, reason=FrameFault.LENGTH.value)
        if block.reuse is not options.reuse:
            block = replace(block, reuse=options.reuse)
        return Wanted(block, hinted)

    async def _serve(
        self,
        requests: Sequence[GetRequest],
        served: list[int],
        results: dict[int, GetResult],
        deadline_s: float,
    ) -> list[int]:
        """Read from DRAM; returns what turned out not to be there."""
        clock = self._parts.clock
        began = clock()
        try:
            found = await self._parts.dram.get_many([requests[i] for i in served], deadline_s)
        except KvtierError as error:
            found = [GetResult(GetStatus.ERROR, reason=type(error).__name__)] * len(served)
        self._parts.latencies.took(Tier.DRAM, "get", clock() - began)
        again: list[int] = []
        for i, result in zip(served, found, strict=True):
            if result.status in {GetStatus.MISS, GetStatus.CORRUPT}:
                self._books.planner.vanished([block_key(requests[i].name)], Tier.DRAM)
                again.append(i)
                continue
            results[i] = result
            self._books.tally.hits[Tier.DRAM] += result.is_hit
        return again

    def _taken(self, request: GetRequest, result: GetResult) -> GetResult:
        """A flight's result in the caller's memory, verified as it is copied."""
        if not result.is_hit:
            return result
        assert result.payload is not None
        assert result.header is not None
        if request.into is None:
            shared = result.payload.toreadonly()
            return replace(result, payload=shared)
        length = result.payload.nbytes
        if request.into.nbytes < length:
            return GetResult(GetStatus.ERROR, reason="buffer_short")
        into = request.into.cast("B")[:length] if length else memoryview(bytearray())
        if copy_checksum(into, result.payload) != result.header.payload_checksum:
            return GetResult(GetStatus.CORRUPT, reason=FrameFault.PAYLOAD_CHECKSUM.value)
        return replace(result, payload=into)

    # Bringing up

    async def bring_up(
        self,
        names: Sequence[tuple[FrameName, int | None]],
        deadline_s: float,
        options: ReadOptions,
    ) -> AsyncIterator[list[Presence]]:
        """See `TieredStore.bring_up`."""
        first = self._plan_up(names, options)
        known: list[Presence] = []
        for (name, payload_bytes), begun in zip(names, first, strict=True):
            presence = begun
            for _ in range(ROUNDS_MAX):
                if isinstance(presence, Presence):
                    break
                if known and not presence.done():
                    yield known
                    known = []
                arrived = await self._arrived(name, presence, deadline_s)
                presence = arrived or self._plan_up([(name, payload_bytes)], options)[0]
            known.append(presence if isinstance(presence, Presence) else Presence.NO_ROOM)
        if known:
            yield known

    def _plan_up(
        self, names: Sequence[tuple[FrameName, int | None]], options: ReadOptions
    ) -> list[_Begun]:
        found: dict[int, _Begun] = {}
        asked: list[int] = []
        wanted: list[Wanted] = []
        for i, (name, payload_bytes) in enumerate(names):
            if self._parts.watch.holds(Tier.DRAM, name) and not self._books.is_leaving(name):
                found[i] = Presence.RESIDENT
                continue
            want = self.wanted(name, payload_bytes, options)
            if isinstance(want, GetResult):
                found[i] = _PRESENCE[want.status]
            else:
                asked.append(i)
                wanted.append(want)
        if not wanted:
            return [found[i] for i in range(len(names))]
        actions = self._books.planner.prefetch(wanted, self._parts.clock())
        self._books.carry_out(actions)
        for i, action in zip(asked, _answers(actions), strict=True):
            match action:
                case Skip(reason=Reason.RESIDENT) | Serve():
                    found[i] = Presence.RESIDENT
                case Skip(reason=Reason.NO_ROOM | Reason.BUSY):
                    found[i] = Presence.NO_ROOM
                case Skip(reason=Reason.TIER_DOWN):
                    found[i] = Presence.ERROR
                case Skip():
                    found[i] = Presence.MISS
                case _:
                    flight = self._flights.find(action.key)
                    written = self._writes.find(action.key)
                    if flight is not None:
                        found[i] = flight.done
                    else:
                        found[i] = Presence.MISS if written is None else written
        return [found[i] for i in range(len(names))]

    def prefetch(self, names: Sequence[tuple[FrameName, int | None]], options: ReadOptions) -> int:
        """See `TieredStore.prefetch`."""
        begun = self._plan_up(names, options)
        return sum(not isinstance(one, Presence) or one is Presence.RESIDENT for one in begun)

    async def _arrived(
        self,
        name: FrameName,
        way: _Way,
        deadline_s: float,
    ) -> Presence | None:
        """What came of a block's way up; None: it ended without the block in DRAM, plan again."""
        try:
            await asyncio.wait([way], timeout=max(0.0, deadline_s - self._parts.clock()))
        finally:
            await self._books.flush()
        if not way.done():
            return Presence.TIMEOUT
        if self._parts.watch.holds(Tier.DRAM, name):
            return Presence.RESIDENT
        result = way.result()
        if result is None or result.is_hit:
            return None
        return _PRESENCE[result.status]


def _answers(actions: Sequence[Action]) -> list[Serve | Fetch | Promote | Join | Skip]:
    """The one action of each wanted block, in order, without what made room for them."""
    return [a for a in actions if isinstance(a, Serve | Fetch | Promote | Join | Skip)]

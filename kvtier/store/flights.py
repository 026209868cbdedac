"""The way up: blocks that are read from lower tiers, for all who wait for them at once.

A flight is one block; it runs in a task of the store's, so a waiter that is cancelled cancels
nothing for others, and its bytes are in memory of the store's until the last waiter has copied
them. What must not live here: who waits, and with which deadline (see `store`).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from kvtier.core.eviction import Retention
from kvtier.core.frame import HEADER_BYTES, FrameHeader, FrameName
from kvtier.core.health import Outcome as CallOutcome
from kvtier.core.planner import BlockKey, Fetch, Outcome, Promote, TransferId
from kvtier.errors import KvtierError
from kvtier.ports import (
    BlockOwner,
    GetRequest,
    GetResult,
    GetStatus,
    LandingSlot,
    PutRequest,
    PutResult,
    PutStatus,
)
from kvtier.store.books import Books, Parts
from kvtier.store.gates import grouped
from kvtier.store.naming import frame_name
from kvtier.types import ScopeId, Tier

Spawn = Callable[[Coroutine[None, None, None]], None]
"""Runs work in a task of the store's, until it ends or the store is closed."""

_OUTCOMES = {
    GetStatus.HIT: Outcome.DONE,
    GetStatus.MISS: Outcome.MISSING,
    GetStatus.CORRUPT: Outcome.CORRUPT,
    GetStatus.TIMEOUT: Outcome.TIMED_OUT,
    GetStatus.ERROR: Outcome.FAILED,
}
_TROUBLE = {GetStatus.TIMEOUT, GetStatus.ERROR}
_GONE = GetResult(GetStatus.MISS)


@dataclass(slots=True, eq=False)
class Flight:
    """One block on its way up. `done` has its bytes, read-only and shared, or says why not."""

    key: BlockKey
    name: FrameName
    size_bytes: int
    transfer_id: TransferId
    source: Tier
    promotes: bool
    deadline_at: float
    done: asyncio.Future[GetResult] = field(default_factory=asyncio.Future)
    is_cancelled: bool = False
    is_reported: bool = False
    is_for_bytes: bool = False
    """Whether somebody waits for the bytes themselves: they come in memory of the store's."""
    slot: LandingSlot | None = None
    """Where in DRAM it is being read into: who wants its bytes then reads them there."""


class Flights:
    """All blocks on their way up. `begin` and `cancel` return at once."""

    def __init__(
        self, books: Books, parts: Parts, spawn: Spawn, judged: Callable[[Tier], None]
    ) -> None:
        self._books = books
        self._parts = parts
        self._spawn = spawn
        self._judged = judged
        self._flying: dict[BlockKey, Flight] = {}
        self._by_id: dict[TransferId, Flight] = {}
        self._turns = {
            tier: asyncio.Semaphore(parts.config.fetches_per_tier_max) for tier in parts.guards
        }

    def __len__(self) -> int:
        return len(self._flying)

    def find(self, key: BlockKey) -> Flight | None:
        """The flight of a block, if it is on its way."""
        return self._flying.get(key)

    def begin(self, actions: Sequence[Fetch | Promote]) -> None:
        """Start what the planner asks for, in groups of one tier; a flight that failed goes on."""
        by_tier: dict[Tier, list[Flight]] = {}
        for action in actions:
            by_tier.setdefault(action.source, []).append(self._aimed(action))
        config = self._parts.config
        for source, flights in by_tier.items():
            sizes = [flight.size_bytes for flight in flights]
            for run in grouped(sizes, config.group_blocks, config.group_bytes):
                self._spawn(self._run(source, [flights[i] for i in run]))

    def cancel(self, transfer_id: TransferId) -> None:
        """The block was dropped: those who wait miss, and nothing is kept."""
        flight = self._by_id.get(transfer_id)
        if flight is not None:
            flight.is_cancelled = True
            if not flight.done.done():
                flight.done.set_result(_GONE)

    def _aimed(self, action: Fetch | Promote) -> Flight:
        flight = self._flying.get(action.key)
        if flight is None:
            block = self._books.planner.block(action.key)
            assert block is not None
            flight = Flight(
                action.key, frame_name(action.key), block.size_bytes, action.transfer_id,
                action.source, isinstance(action, Promote), action.deadline_at,
            )  # fmt: skip
            self._flying[action.key] = flight
        else:
            self._by_id.pop(flight.transfer_id, None)
            flight.transfer_id = action.transfer_id
            flight.source = action.source
            flight.promotes = isinstance(action, Promote)
            flight.deadline_at = action.deadline_at
            flight.is_reported = False
        self._by_id[action.transfer_id] = flight
        return flight

    async def _run(self, source: Tier, flights: list[Flight]) -> None:
        ids = [flight.transfer_id for flight in flights]
        try:
            size_bytes = sum(flight.size_bytes for flight in flights)
            async with self._turns[source], self._parts.gate.room(size_bytes):
                if any(flight.promotes for flight in flights):
                    await self._books.flush()  # what makes room for it goes first
                self._reserve(flights)
                results = await self._read(source, flights)
                await self._land(source, flights, results)
        finally:
            self._give_back(flights)
            for flight, transfer_id in zip(flights, ids, strict=True):
                if flight.transfer_id == transfer_id and not flight.is_reported:
                    self._report(flight, Outcome.CANCELLED, _GONE)
            await self._books.flush()

    async def _read(self, source: Tier, flights: list[Flight]) -> list[GetResult]:
        clock, guard = self._parts.clock, self._parts.guards[source]
        deadline_s = min(flight.deadline_at for flight in flights)
        began = clock()
        if began >= deadline_s:
            return [GetResult(GetStatus.TIMEOUT)] * len(flights)
        permit = guard.read(began)
        if permit is None:
            return [GetResult(GetStatus.ERROR, reason="breaker_open")] * len(flights)
        asked = [_request_of(flight) for flight in flights]
        outcome = CallOutcome.CANCELLED
        try:
            try:
                results = await self._parts.tiers[source].get_many(asked, deadline_s)
            except KvtierError as error:
                results = [GetResult(GetStatus.ERROR, reason=type(error).__name__)] * len(flights)
            outcome = _judge(results)
        finally:
            now = clock()
            guard.read_ended(permit, outcome, now - began, now)
            self._judged(source)
        self._parts.latencies.took(source, "get", now - began)
        return results

    async def _land(self, source: Tier, flights: list[Flight], results: list[GetResult]) -> None:
        """Have in DRAM what is to stay, report, and let those who wait have the bytes."""
        staying = [
            (flight, result)
            for flight, result in zip(flights, results, strict=True)
            if flight.promotes and result.is_hit and not flight.is_cancelled
        ]
        stays = self._published([pair for pair in staying if pair[0].slot is not None])
        kept = [pair for pair in staying if pair[0].slot is None]
        if kept:
            requests = [self._put_of(flight, result) for flight, result in kept]
            deadline_s = self._parts.clock() + self._parts.config.dram_s
            try:
                puts = await self._parts.dram.put_many(requests, deadline_s)
            except KvtierError as error:
                puts = [PutResult(PutStatus.ERROR, type(error).__name__)] * len(kept)
            stays |= {id(flight): put for (flight, _), put in zip(kept, puts, strict=True)}
        for flight, result in zip(flights, results, strict=True):
            outcome = _OUTCOMES[result.status]
            if result.is_hit:
                self._books.tally.fetched[source] += 1
            if result.is_hit and flight.promotes:
                put = stays.get(id(flight))
                if put is not None and put.is_held and self._is_in_dram(flight):
                    self._books.tally.promoted[source] += 1
                else:
                    outcome = Outcome.CANCELLED  # the bytes are there, no other tier is asked
            if flight.slot is not None:
                result = replace(result, payload=None)  # anybody's to evict
            self._report(flight, outcome, result)

    def _reserve(self, flights: list[Flight]) -> None:
        """Take slots in DRAM for what stays there and whose bytes nobody else waits for.

        A payload in a slot is anybody's to evict once it is published, so it is not handed out.
        """
        landing = self._parts.landing
        up = [f for f in flights if f.promotes and not f.is_for_bytes and not f.is_cancelled]
        if landing is None or not up:
            return
        blocks = [
            (flight.name, flight.size_bytes - HEADER_BYTES, self._retention_of(flight))
            for flight in up
        ]
        for flight, slot in zip(up, landing.reserve(blocks), strict=True):
            flight.slot = slot

    def _published(self, arrived: list[tuple[Flight, GetResult]]) -> dict[int, PutResult]:
        """Publish slots that were filled; what became of each flight's."""
        landing = self._parts.landing
        if landing is None or not arrived:
            return {}
        slots: list[LandingSlot] = []
        headers: list[tuple[FrameHeader, ScopeId]] = []
        for flight, result in arrived:
            assert flight.slot is not None
            assert result.header is not None
            slots.append(flight.slot)
            headers.append((result.header, self._scope_of(flight, result)))
        puts = landing.publish(slots, headers)
        return {id(flight): put for (flight, _), put in zip(arrived, puts, strict=True)}

    def _give_back(self, flights: list[Flight]) -> None:
        """Free the slots of what did not come, was dropped, or was cancelled."""
        slots = [flight.slot for flight in flights if flight.slot is not None]
        for flight in flights:
            flight.slot = None
        if self._parts.landing is not None and slots:
            self._parts.landing.give_back(slots)

    def _retention_of(self, flight: Flight) -> Retention:
        block = self._books.planner.block(flight.key)
        return Retention() if block is None or block.retention is None else block.retention

    def _scope_of(self, flight: Flight, result: GetResult) -> ScopeId:
        block = self._books.planner.block(flight.key)
        return result.scope if block is None else result.scope or block.scope_id

    def _is_in_dram(self, flight: Flight) -> bool:
        return self._parts.watch.holds(Tier.DRAM, flight.name)

    def _put_of(self, flight: Flight, result: GetResult) -> PutRequest:
        assert result.header is not None
        assert result.payload is not None
        owner = BlockOwner(result.header.writer_id, self._scope_of(flight, result))
        checksum = result.header.payload_checksum
        retention = self._retention_of(flight)
        return PutRequest(flight.name, result.payload, owner, checksum, retention)

    def _report(self, flight: Flight, outcome: Outcome, result: GetResult) -> None:
        """Tell the planner; unless it sends the flight to another tier, it has ended."""
        transfer_id = flight.transfer_id
        flight.is_reported = True
        self._books.report(transfer_id, outcome)
        if flight.transfer_id != transfer_id:
            return
        self._by_id.pop(transfer_id, None)
        if self._flying.get(flight.key) is flight:
            del self._flying[flight.key]
        if not flight.done.done():
            flight.done.set_result(result)


def _request_of(flight: Flight) -> GetRequest:
    into = None if flight.slot is None else flight.slot.memory
    return GetRequest(flight.name, into, flight.size_bytes - HEADER_BYTES)


def _judge(results: Sequence[GetResult]) -> CallOutcome:
    """What a call says of the tier: trouble, unless some block of it was answered."""
    bad = [r.status in _TROUBLE and r.reason != "buffer_short" for r in results]
    return CallOutcome.FAILURE if bad and all(bad) else CallOutcome.SUCCESS

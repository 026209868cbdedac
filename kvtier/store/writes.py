"""Puts: planned, written into DRAM, reported; the first writer of a name wins.

What must not live here: what happens below DRAM.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.checksum import checksum
from kvtier.core.planner import (
    Action,
    Block,
    BlockKey,
    Outcome,
    Reason,
    Reuse,
    Skip,
    TransferId,
    Write,
)
from kvtier.errors import KvtierError
from kvtier.ports import GetResult, PutRequest, PutResult, PutStatus, Refusal
from kvtier.store.books import Books, Parts
from kvtier.store.flights import Flights
from kvtier.store.naming import STORED_PAYLOAD_BYTES_MAX, block_of_put, frame_name
from kvtier.tiers.tally import payload_view
from kvtier.types import Tier

ROUNDS_MAX = 4

_TOO_LONG = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
_FULL = PutResult(PutStatus.REFUSED, Refusal.FULL)
_REFUSALS = {
    Reason.TOO_LARGE: _TOO_LONG,
    Reason.NO_ROOM: _FULL,
    Reason.BUSY: _FULL,
    Reason.TIER_DOWN: PutResult(PutStatus.ERROR, "tier_down"),
}
_OUTCOMES = {
    PutStatus.REFUSED: Outcome.FAILED,
    PutStatus.CORRUPT: Outcome.FAILED,
    PutStatus.TIMEOUT: Outcome.TIMED_OUT,
    PutStatus.ERROR: Outcome.FAILED,
}


class Writes:
    """Carries out puts, and knows which blocks are being stored right now."""

    def __init__(self, books: Books, parts: Parts, flights: Flights) -> None:
        self._books = books
        self._parts = parts
        self._flights = flights
        self._writing: dict[BlockKey, asyncio.Future[None]] = {}

    def find(self, key: BlockKey) -> asyncio.Future[None] | None:
        """Done when the put of this block that is under way has ended; None if none is."""
        return self._writing.get(key)

    async def put_many(
        self, requests: Sequence[PutRequest], deadline_s: float, reuse: Reuse
    ) -> list[PutResult]:
        """See `TieredStore.put_many`."""
        results: dict[int, PutResult] = {}
        pending: list[int] = []
        for i, request in enumerate(requests):
            if payload_view(request.payload).nbytes > STORED_PAYLOAD_BYTES_MAX:
                results[i] = _TOO_LONG
            else:
                pending.append(i)
        blocks = {i: block_of_put(requests[i], reuse) for i in pending}
        for _ in range(ROUNDS_MAX):
            if not pending:
                break
            if self._parts.clock() >= deadline_s:
                results.update(dict.fromkeys(pending, PutResult(PutStatus.TIMEOUT)))
                break
            pending = await self._round(requests, blocks, pending, results, deadline_s)
        answers = [results.get(i, _FULL) for i in range(len(requests))]
        self._books.tally.divergent_puts += sum(
            answer.status is PutStatus.DIVERGENT for answer in answers
        )
        return answers

    def adopt(self, blocks: Sequence[Block], checksums: Sequence[int]) -> None:
        """Take blocks into the books that a writer has put into DRAM past this class.

        Those that the planner has no place for, and those of which other bytes came first and are
        in a tier below, are dropped at the next flush.
        """
        kept = []
        for block, seen in zip(blocks, checksums, strict=True):
            if self._is_second(block, seen):
                self._books.tally.divergent_puts += 1
                self._books.drop_from_dram(frame_name(block.key))
            else:
                kept.append(block)
        actions = self._books.planner.adopted(kept, Tier.DRAM, self._parts.clock())
        self._books.carry_out(actions)

    def _has_below(self, key: BlockKey) -> bool:
        return not self._books.planner.tiers_of(key).isdisjoint(self._parts.checksums)

    def _is_second(self, block: Block, seen: int) -> bool:
        """Whether a tier below has other bytes of this name."""
        below = self._books.planner.tiers_of(block.key)
        return any(
            self._parts.checksums[tier](frame_name(block.key)) not in {None, seen}
            for tier in below & self._parts.checksums.keys()
        )

    async def _round(
        self,
        requests: Sequence[PutRequest],
        blocks: dict[int, Block],
        pending: Sequence[int],
        results: dict[int, PutResult],
        deadline_s: float,
    ) -> list[int]:
        """Store and answer what can be; returns what must be planned again."""
        actions = self._books.planner.put([blocks[i] for i in pending], self._parts.clock())
        self._books.carry_out(actions)
        writes: dict[int, TransferId] = {}
        compared: list[int] = []
        awaited: dict[int, asyncio.Future[None] | asyncio.Future[GetResult]] = {}
        again: list[int] = []
        for i, action in zip(pending, _answers(actions), strict=True):
            if isinstance(action, Write):
                if self._has_below(action.key) and self._is_second(
                    blocks[i], _checksum(requests[i])
                ):
                    self._books.report(action.transfer_id, Outcome.CANCELLED)
                    results[i] = PutResult(PutStatus.DIVERGENT)
                    continue
                writes[i] = action.transfer_id
                self._writing[action.key] = asyncio.get_running_loop().create_future()
            elif action.reason is Reason.IN_FLIGHT:
                self._books.tally.joins += 1
                other = self._under_way(action.key)
                if other is None:
                    again.append(i)  # it was of this call, and refused as a second one
                else:
                    awaited[i] = other
            elif action.reason in {Reason.RESIDENT, Reason.CONFLICT}:
                if self._parts.watch.holds(Tier.DRAM, requests[i].name):
                    compared.append(i)
                elif action.reason is Reason.RESIDENT:
                    self._books.planner.vanished([action.key], Tier.DRAM)
                    again.append(i)
                else:
                    results[i] = PutResult(PutStatus.DIVERGENT)
            else:
                self._books.tally.refused[action.reason] += 1
                refused = PutResult(PutStatus.REFUSED, action.reason.value)
                results[i] = _REFUSALS.get(action.reason, refused)
        await self._store(_Batch(requests, blocks, writes, compared), results, deadline_s)
        if awaited:
            timeout = max(0.0, deadline_s - self._parts.clock())
            await asyncio.wait(awaited.values(), timeout=timeout)
        for i, way in awaited.items():
            if way.done():
                again.append(i)
            else:
                results[i] = PutResult(PutStatus.TIMEOUT)
        return sorted(again)

    def _under_way(self, key: BlockKey) -> asyncio.Future[None] | asyncio.Future[GetResult] | None:
        flight = self._flights.find(key)
        return self._writing.get(key) if flight is None else flight.done

    async def _store(
        self, batch: "_Batch", results: dict[int, PutResult], deadline_s: float
    ) -> None:
        """One call to DRAM for what is written and what is only compared with what is there.

        Every write is reported, whatever happens: cancelled, those that were not published end.
        """
        positions = [*batch.writes, *batch.compared]
        try:
            await self._books.flush()
            if positions:
                began = self._parts.clock()
                asked = [batch.requests[i] for i in positions]
                try:
                    puts = await self._parts.dram.put_many(asked, deadline_s)
                except KvtierError as error:
                    puts = [PutResult(PutStatus.ERROR, type(error).__name__)] * len(asked)
                results.update(zip(positions, puts, strict=True))
                self._parts.latencies.took(Tier.DRAM, "put", self._parts.clock() - began)
        finally:
            for i, transfer_id in batch.writes.items():
                self._ended(batch.blocks[i], transfer_id, results.get(i))
        for i in batch.compared:
            if results[i].status is PutStatus.STORED:  # it had gone in the meantime
                self.adopt([batch.blocks[i]], [_checksum(batch.requests[i])])
        await self._books.flush()

    def _ended(self, block: Block, transfer_id: TransferId, result: PutResult | None) -> None:
        is_there = self._parts.watch.holds(Tier.DRAM, frame_name(block.key))
        if is_there:
            outcome = Outcome.DONE
        elif result is None:
            outcome = Outcome.CANCELLED
        else:
            # Stored and gone again, perhaps for a later block of the same batch.
            outcome = Outcome.FAILED if result.is_held else _OUTCOMES[result.status]
        self._books.report(transfer_id, outcome)
        self._writing.pop(block.key).set_result(None)


@dataclass(frozen=True, slots=True)
class _Batch:
    """One round's blocks by position: which are written, and which only compared."""

    requests: Sequence[PutRequest]
    blocks: dict[int, Block]
    writes: dict[int, TransferId]
    compared: list[int]


def _checksum(request: PutRequest) -> int:
    declared = request.payload_checksum
    return checksum(payload_view(request.payload)) if declared is None else declared


def _answers(actions: list[Action]) -> list[Write | Skip]:
    """The one action of each block, in order, without what made room for them."""
    return [action for action in actions if isinstance(action, Write | Skip)]

"""The way down into one lower tier: demotions and drops.

One worker a tier: before each run of demotions it carries out all drops that are due, then it reads
the blocks of the run from the tier above and writes them in one call. So a block that is written
again after a drop is not dropped by it. The planner bounds the queue (`demotions_max`,
`queued_bytes_max`). A drop that fails is owed: it is tried again, and until it has succeeded the
block is neither written into the tier nor read from it.
What must not live here: reads for callers (see `flights`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.core.frame import FrameName
from kvtier.core.health import Outcome as CallOutcome
from kvtier.core.planner import Demote, Outcome, TransferId
from kvtier.errors import KvtierError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.ports import (
    BlockOwner,
    ByNames,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
)
from kvtier.store.books import Books, Parts
from kvtier.store.naming import frame_name
from kvtier.types import Tier

_OF_GET = {
    GetStatus.MISS: Outcome.MISSING,
    GetStatus.CORRUPT: Outcome.CORRUPT,
    GetStatus.TIMEOUT: Outcome.TIMED_OUT,
    GetStatus.ERROR: Outcome.FAILED,
}
_TROUBLE = {PutStatus.TIMEOUT, PutStatus.ERROR}


@dataclass(slots=True, eq=False)
class _Demotion:
    """One block on its way down; its source is pinned until `unpin`."""

    action: Demote
    name: FrameName
    size_bytes: int
    unpin: Callable[[], None]
    is_over: bool = False


class Lane:
    """See the module. `run` is its worker; everything else returns at once."""

    def __init__(
        self, tier: Tier, books: Books, parts: Parts, judged: Callable[[Tier], None]
    ) -> None:
        """`judged` is called after each call that may have moved a breaker."""
        self._tier = tier
        self._books = books
        self._parts = parts
        self._judged = judged
        self._items: deque[_Demotion] = deque()
        self._queued: dict[TransferId, _Demotion] = {}
        self._owed: dict[FrameName, None] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def drops_pending(self) -> int:
        """Drops that the tier could not carry out yet."""
        return len(self._owed)

    def owes_drop(self, name: FrameName) -> bool:
        """Whether the tier may still have a block that must not be read from it."""
        return name in self._owed

    def demote(self, action: Demote) -> None:
        """Queue a demotion; its source is pinned from here on."""
        name = frame_name(action.key)
        block = self._books.planner.block(action.key)
        assert block is not None
        unpin = self._books.pin(action.source, name)
        demotion = _Demotion(action, name, block.size_bytes, unpin)
        self._queued[action.transfer_id] = demotion
        self._items.append(demotion)
        self._wake()

    def drop(self, name: FrameName) -> None:
        """Owe a drop. Above the ceiling the oldest are forgotten and counted."""
        self._owed[name] = None
        while len(self._owed) > self._parts.config.drops_pending_max:
            del self._owed[next(iter(self._owed))]
            self._books.tally.drops_forgotten += 1
        self._wake()

    def cancel(self, transfer_id: TransferId) -> bool:
        """Take a demotion out of the queue; False if it is not in it (any more)."""
        demotion = self._queued.pop(transfer_id, None)
        if demotion is None:
            return False
        self._items.remove(demotion)
        demotion.is_over = True
        demotion.unpin()
        return True

    def nudge(self) -> None:
        """Try again what is owed."""
        if self._owed:
            self._wake()

    async def idle(self) -> None:
        """Wait until everything that is queued now or later is carried out, or owed."""
        await self._idle.wait()

    async def run(self) -> None:
        """Carry out what comes, for ever. Cancelled, it reports what it had begun or queued."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                await self._settle_debts()
                while self._items:
                    await self._write(self._next_run())
                    await self._settle_debts()
                self._idle.set()
        finally:
            for demotion in list(self._queued.values()):
                self._end(demotion, Outcome.CANCELLED)

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()

    def _next_run(self) -> list[_Demotion]:
        """Take demotions from one source off the queue, as many as make one call."""
        config = self._parts.config
        run = [self._items.popleft()]
        run_bytes = run[0].size_bytes
        while self._items and len(run) < config.group_blocks:
            run_bytes += self._items[0].size_bytes
            same = self._items[0].action.source is run[0].action.source
            if not same or run_bytes > config.group_bytes:
                break
            run.append(self._items.popleft())
        return run

    # Demotions

    async def _write(self, demotions: list[_Demotion]) -> None:
        for demotion in demotions:
            self._queued.pop(demotion.action.transfer_id, None)
            self._books.planner.started(demotion.action.transfer_id)
        try:
            async with self._parts.gate.room(sum(d.size_bytes for d in demotions)):
                await self._copy(demotions)
        finally:
            for demotion in demotions:
                self._end(demotion, Outcome.CANCELLED)
            await self._books.flush()

    async def _copy(self, demotions: list[_Demotion]) -> None:
        clock = self._parts.clock
        source = self._parts.tiers[demotions[0].action.source]
        deadline_s = demotions[0].action.deadline_s
        asked = [GetRequest(d.name) for d in demotions]
        try:
            read = await source.get_many(asked, clock() + deadline_s)
        except KvtierError:
            read = [GetResult(GetStatus.ERROR)] * len(demotions)
        copies: list[tuple[_Demotion, PutRequest]] = []
        for demotion, result in zip(demotions, read, strict=True):
            if self._owed and demotion.name in self._owed:
                self._end(demotion, Outcome.FAILED)
            elif result.is_hit:
                copies.append((demotion, self._copy_of(demotion, result)))
            else:
                self._end(demotion, _OF_GET[result.status])
        if copies:
            written = await self._put([request for _, request in copies], deadline_s)
            for (demotion, _), put in zip(copies, written, strict=True):
                self._written(demotion, put)

    def _copy_of(self, demotion: _Demotion, result: GetResult) -> PutRequest:
        assert result.header is not None
        assert result.payload is not None
        block = self._books.planner.block(demotion.action.key)
        owner = BlockOwner(result.header.writer_id, result.scope)
        request = PutRequest(demotion.name, result.payload, owner, result.header.payload_checksum)
        if block is None or block.retention is None:
            return request
        return PutRequest(
            request.name, request.payload, owner, request.payload_checksum, block.retention
        )

    async def _put(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        clock, guard = self._parts.clock, self._parts.guards[self._tier]
        began = clock()
        permit = guard.write(began)
        if permit is None:
            return [PutResult(PutStatus.ERROR, "breaker_open")] * len(requests)
        outcome = CallOutcome.CANCELLED
        try:
            try:
                results = await self._parts.tiers[self._tier].put_many(requests, began + deadline_s)
            except KvtierError as error:
                results = [PutResult(PutStatus.ERROR, type(error).__name__)] * len(requests)
            outcome = _judge(results)
        finally:
            now = clock()
            guard.write_ended(permit, outcome, now - began, now)
            self._judged(self._tier)
        self._parts.latencies.took(self._tier, "put", now - began)
        return results

    def _written(self, demotion: _Demotion, result: PutResult) -> None:
        if result.is_held:
            if result.status is PutStatus.DIVERGENT:
                self._books.tally.divergent_copies += 1
                if demotion.action.source is Tier.DRAM:
                    self._books.drop_from_dram(demotion.name)  # the copy below was there first
            self._end(demotion, Outcome.DONE)
        elif result.status is PutStatus.TIMEOUT:
            self._end(demotion, Outcome.TIMED_OUT)
        else:
            self._end(demotion, Outcome.FAILED)

    def _end(self, demotion: _Demotion, outcome: Outcome) -> None:
        """Report a demotion, once: what comes later changes nothing."""
        if demotion.is_over:
            return
        demotion.is_over = True
        self._queued.pop(demotion.action.transfer_id, None)
        tally = self._books.tally
        if outcome is Outcome.DONE:
            tally.demoted[self._tier] += 1
        elif outcome is not Outcome.CANCELLED:
            tally.demotions_failed[self._tier] += 1
        demotion.unpin()
        self._books.report(demotion.action.transfer_id, outcome)

    # Drops

    async def _settle_debts(self) -> None:
        """Try to drop what is owed, in one call after the other until one fails."""
        clock, guard = self._parts.clock, self._parts.guards[self._tier]
        while self._owed:
            now = clock()
            if guard.is_down(now):
                return
            names = tuple(self._owed)[:TIER_BATCH_BLOCKS_MAX]
            try:
                await self._parts.tiers[self._tier].drop(
                    ByNames(names), now + self._parts.config.drop_s
                )
            except KvtierError:
                return
            self._parts.latencies.took(self._tier, "drop", clock() - now)
            for name in names:
                self._owed.pop(name, None)


def _judge(results: Sequence[PutResult]) -> CallOutcome:
    """What a call says of the tier: trouble, unless some block of it was taken or refused."""
    bad = [
        r.status in _TROUBLE
        or (r.status is PutStatus.REFUSED and r.reason == Refusal.READ_ONLY.value)
        for r in results
    ]
    return CallOutcome.FAILURE if bad and all(bad) else CallOutcome.SUCCESS

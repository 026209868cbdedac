"""`TieredStore`: one node's blocks over DRAM and lower tiers, through the planner.

Every block that is read is exactly the bytes that were put under its name, or a miss: tiers verify
each frame, and nothing is handed out that a tier did not call a HIT. What must not live here:
decisions about what moves (kvtier.core.planner), networks, configuration files.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from kvtier.core.eviction import Policy, RankedPolicy
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.health import Outcome as CallOutcome
from kvtier.core.planner import (
    Block,
    BlockKey,
    Cancel,
    Drop,
    PinId,
    Planner,
    Reuse,
    Verdict,
)
from kvtier.core.planner import Selection as KnownBlocks
from kvtier.errors import BackendError, CallerError, KvtierError
from kvtier.limits import MATCH_BLOCKS_MAX
from kvtier.ports import (
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    Selection,
    require_batch,
)
from kvtier.store.books import Books, Parts, Quiet
from kvtier.store.flights import Flights
from kvtier.store.gates import ByteGate, TierGuard
from kvtier.store.lane import Lane
from kvtier.store.naming import block_key, frame_name, held_block, writer_name
from kvtier.store.reads import Reads
from kvtier.store.values import (
    SHARED_TIERS,
    Latencies,
    PinResult,
    PinTerms,
    Presence,
    ReadOptions,
    SharedTier,
    StoreStats,
    StoreTier,
    TieredStoreConfig,
    TierView,
    WrittenBlock,
)
from kvtier.store.watch import TierWatch
from kvtier.store.writes import Writes
from kvtier.tiers.tally import require_open
from kvtier.types import Fingerprint, Tier
from kvtier.wire.loop_thread import end

ADOPTIONS_MAX: Final = 1024
"""Blocks that may wait to be booked ..."""
ADOPTIONS_BYTES_MAX: Final = 64 << 20
"""... and their bytes: what waits is evicted by the arena alone, without a copy below."""
PEER_HINT_S = 0.01
"""How long a question where blocks are waits to hear of other nodes ..."""
PEER_HINT_SHARE = 0.1
"""... or this part of the asker's time, where that is more. Late answers help the next question."""
PROBE_S = 1.0
"""How long a tier may take to show that it is back."""
_PROBE_NAME = FrameName(KeyKind.PREFIX_KEY, bytes(32), Fingerprint(bytes(32)))
_EVERYTHING = ReadOptions()
_DRAM = Tier.DRAM
_HERE = frozenset({Tier.DRAM, Tier.NVME})


def _ranked(_: Tier, __: int) -> Policy[BlockKey]:
    return RankedPolicy()


class TieredStore:
    """See the module. Made by `open_store`; of one event loop. Calls are cancel-safe."""

    def __init__(self, planner: Planner, parts: Parts, tasks: asyncio.TaskGroup) -> None:
        """For `open_store`."""
        self._parts = parts
        self._planner = planner
        self._group = tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._books = Books(planner, parts)
        self._lanes = {tier: Lane(tier, self._books, parts, self._judged) for tier in parts.guards}
        self._flights = Flights(self._books, parts, self._spawn, self._judged)
        self._books.attach(dict(self._lanes), self._flights)
        self._writes = Writes(self._books, parts, self._flights)
        shared = {tier: lane for tier, lane in self._lanes.items() if tier in SHARED_TIERS}
        self._reads = Reads(self._books, parts, self._flights, self._writes, shared)
        self._pins: dict[PinId, list[Callable[[], None]]] = {}
        self._probing: set[Tier] = set()
        self._written: list[tuple[WrittenBlock, int]] = []
        self._written_bytes = 0
        self._catching_up: asyncio.Handle | None = None
        self._is_open = True
        self._is_ended = False
        for lane in self._lanes.values():
            self._spawn(lane.run())
        self._spawn(self._tick_for_ever())

    @property
    def is_running(self) -> bool:
        """Whether its lanes run: a store that was closed, or one with a bug, does not."""
        return self._is_open and len(self._tasks) > len(self._lanes)

    # Blocks

    async def get_many(
        self, requests: Sequence[GetRequest], deadline_s: float, options: ReadOptions = _EVERYTHING
    ) -> list[GetResult]:
        """Read blocks, wherever they are; results and buffers as in `BlockTier.get_many`.

        Counts a touch of each: what is touched often comes up, and down into tiers that ask for it.
        A block that many ask for is read once. A payload that is given in the store's memory is
        read-only and may be shared with others. A length that is not the block's is an ERROR. A
        shared tier is asked only for blocks whose length is given.
        """
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        self._catch_up()
        return await self._reads.get_many(requests, deadline_s, options)

    async def put_many(
        self, requests: Sequence[PutRequest], deadline_s: float, reuse: Reuse = Reuse.UNKNOWN
    ) -> list[PutResult]:
        """Store blocks of one chain in DRAM; results as in `BlockTier.put_many`.

        Copies go down when the write policies say so, after this call.
        """
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        self._catch_up()
        return await self._writes.put_many(requests, deadline_s, reuse)

    async def bring_up(
        self,
        names: Sequence[tuple[FrameName, int | None]],
        deadline_s: float,
        options: ReadOptions = _EVERYTHING,
    ) -> AsyncIterator[list[Presence]]:
        """Bring blocks (with payload lengths, where known) into DRAM; one answer each, in order.

        Answers come in runs, as soon as they and all before them are known. All blocks begin at
        once. Counts no touch: see `touch`.
        """
        require_batch(names, deadline_s)
        require_open(self._is_open)
        self._catch_up()
        async for known in self._reads.bring_up(names, deadline_s, options):
            yield known

    def prefetch(
        self, names: Sequence[tuple[FrameName, int | None]], options: ReadOptions = _EVERYTHING
    ) -> int:
        """Begin to bring blocks into DRAM; returns at once how many are there or on their way."""
        require_batch(names, 0.0)
        require_open(self._is_open)
        self._catch_up()
        return self._reads.prefetch(names, options)

    async def contains(
        self, names: Sequence[FrameName], deadline_s: float, shared: SharedTier = SharedTier.SKIP
    ) -> list[frozenset[Tier]]:
        """Where each block can be read now: a hint. Touches nothing.

        A shared tier that cannot say counts as having nothing.
        """
        require_batch(names, deadline_s)
        require_open(self._is_open)
        self._catch_up()
        down = {t for t, guard in self._parts.guards.items() if guard.is_down(self._parts.clock())}
        found = [self._planner.tiers_of(block_key(name)) - down for name in names]
        if shared is SharedTier.SKIP:
            return found
        for tier in SHARED_TIERS & self._parts.guards.keys() - down:
            absent = [i for i, tiers in enumerate(found) if tier not in tiers]
            end_s = deadline_s
            if tier is Tier.PEER:  # who asks for what is here must not wait for an index
                absent = [i for i in absent if _HERE.isdisjoint(found[i])]
                now = self._parts.clock()
                hint_s = max(PEER_HINT_S, PEER_HINT_SHARE * (deadline_s - now))
                end_s = min(deadline_s, now + hint_s)
            with contextlib.suppress(KvtierError):
                asked = [names[i] for i in absent]
                held = await self._parts.tiers[tier].contains(asked, end_s) if asked else []
                for i, there in zip(absent, held, strict=True):
                    if there and not self._lanes[tier].owes_drop(names[i]):
                        found[i] |= {tier}
        return found

    def touch(self, names: Sequence[FrameName]) -> None:
        """Count a use of a chain that was read in place, in DRAM."""
        if self._is_open:
            self._catch_up()
            self._books.tally.hits[Tier.DRAM] += len(names)
            keys = [block_key(name) for name in names[:MATCH_BLOCKS_MAX]]
            self._books.carry_out(self._planner.touch(keys, self._parts.clock()))

    def adopt(self, blocks: Sequence[WrittenBlock], checksums: Sequence[int]) -> None:
        """Take blocks of one chain into the books that a writer put into DRAM by itself.

        With the checksums of their payloads. They are in the books before anything else is asked of
        the store, else a moment later: booking costs as much as copying, and no writer needs to
        wait for it. What may not stay is dropped then.
        """
        require_open(self._is_open)
        self._written += zip(blocks, checksums, strict=True)
        self._written_bytes += sum([block.payload_bytes for block in blocks])
        if len(self._written) >= ADOPTIONS_MAX or self._written_bytes >= ADOPTIONS_BYTES_MAX:
            self._catch_up()
        elif self._catching_up is None:
            loop = asyncio.get_running_loop()
            self._catching_up = loop.call_soon(self._catch_up)

    async def caught_up(self) -> None:
        """Have what was adopted in the books, and what may not stay dropped, before it returns."""
        self._catch_up()
        await self._books.flush()

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """Remove the selected blocks from every tier; how many blocks of this node there were.

        They are gone for readers at once. Raises BackendError where a tier could not be asked by
        the deadline: what is named, or known here, is dropped there later; what only that tier
        knows of (a shared one, by namespace, scope or writer) must be dropped by calling again.
        """
        require_open(self._is_open)
        self._catch_up()
        actions = self._planner.drop(_known(selection))
        self._books.carry_out(actions)
        count = len({action.key for action in actions if isinstance(action, Cancel | Drop)})
        await self._books.flush()
        failed: list[str] = []
        for tier, blocks in self._parts.tiers.items():
            try:
                await blocks.drop(selection, deadline_s)
            except KvtierError:
                failed.append(tier.name.lower())
                lane = self._lanes.get(tier)
                if lane is not None and isinstance(selection, ByNames):
                    for name in selection.names:
                        lane.drop(name)
        if failed:
            raise BackendError(f"could not drop from {', '.join(failed)}")
        return count

    # Pins and holds

    def hold(self, names: Sequence[FrameName]) -> None:
        """Put off that the planner evicts blocks from DRAM, until as many `let_go`.

        For readers of shared memory, briefly: see `Books.hold`. What the tier itself evicts must be
        held there too.
        """
        self._books.hold(names)

    def let_go(self, names: Sequence[FrameName]) -> None:
        """Undo one `hold` of each."""
        self._books.let_go(names)

    def pin(self, names: Sequence[FrameName], terms: PinTerms) -> PinResult:
        """Keep blocks that are in DRAM there, until `unpin` or the end of the terms.

        Those that are not there, or do not fit into the budget of pins, are left out of the result.
        CallerError for impossible terms, OverloadedError beyond the number of pins.
        """
        require_open(self._is_open)
        self._catch_up()
        keys = [block_key(name) for name in names]
        pinned = self._planner.pin(keys, terms.priority, terms.ttl_s, self._parts.clock())
        held = tuple(frame_name(key) for key in pinned.keys)
        self._pins[pinned.pin_id] = [self._books.pin(Tier.DRAM, name) for name in held]
        return PinResult(pinned.pin_id, held)

    def unpin(self, pin_id: PinId) -> None:
        """End a pin. Idempotent: unknown ones are ignored."""
        self._planner.unpin(pin_id)
        for undo in self._pins.pop(pin_id, ()):
            undo()

    # The owner

    def restore(self, tier: Tier, blocks: Iterable[Block]) -> int:
        """Take into the books what a tier found in itself when it was opened; how many it kept."""
        known = list(blocks)
        for start in range(0, len(known), MATCH_BLOCKS_MAX):
            some = known[start : start + MATCH_BLOCKS_MAX]
            actions = self._planner.restored(some, tier, self._parts.clock())
            self._books.carry_out(actions)
        return self._planner.usage(tier).blocks_count

    def tier_lost(self, tier: Tier) -> None:
        """A tier has started empty behind the store's back."""
        self._catch_up()
        self._planner.tier_lost(tier)

    def vanished(self, tier: Tier, names: Iterable[FrameName]) -> None:
        """A tier that tells no observer lost blocks."""
        self._planner.vanished([block_key(name) for name in names], tier)

    def stats(self) -> StoreStats:
        """See `StoreStats`."""
        self._catch_up()
        now = self._parts.clock()
        quotas = self._parts.config.planner.quotas
        return StoreStats(
            tiers={tier: self._view(tier, now) for tier in self._parts.tiers},
            counts=self._books.tally.snapshot(),
            transfers=self._planner.transfers_count,
            in_flight_bytes=self._parts.gate.used_bytes,
            pins=len(self._pins),
            pinned_bytes=self._planner.pinned_bytes,
            quota_used_bytes={
                (q.scope_id, q.tier): self._planner.quota_used_bytes(q.scope_id, q.tier)
                for q in quotas
            },
        )

    async def settled(self, deadline_s: float) -> bool:
        """Wait until nothing is on its way down; False where the deadline came first."""
        self._catch_up()
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._parts.clock())):
                for lane in self._lanes.values():
                    await lane.idle()
        except TimeoutError:
            return False
        return True

    async def drain(self) -> None:
        """Take nothing more, let demotions go on for `drain_s`, and end every task. Idempotent."""
        if not self._is_open:
            return
        self._catch_up()
        self._is_open = False
        await self.settled(self._parts.clock() + self._parts.config.drain_s)
        self._is_ended = True
        await end(self._tasks)
        for pin_id in list(self._pins):
            self.unpin(pin_id)

    # Time

    def _catch_up(self) -> None:
        """Take what writers put into DRAM by themselves into the books, but for what has gone."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            self._catching_up = None
        if not self._written:
            return
        written, self._written, self._written_bytes = self._written, [], 0
        last = {one[0].name: one for one in written}  # one that went meanwhile and came again
        there = [one for name, one in last.items() if self._parts.watch.holds(_DRAM, name)]
        self._writes.adopt(
            [held_block(b.name, b.payload_bytes, b.owner, b.retention) for b, _ in there],
            [seen for _, seen in there],
        )
        if self._books.has_drops:
            self._spawn(self._books.flush())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._is_ended:
            work.close()
            return
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._parts.config.tick_s)
            self._catch_up()
            self._books.carry_out(self._planner.tick(self._parts.clock()))
            for pin_id in [p for p in self._pins if not self._planner.has_pin(p)]:
                self.unpin(pin_id)
            for tier, lane in self._lanes.items():
                self._judged(tier)
                lane.nudge()
            await self._books.flush()

    def _judged(self, tier: Tier) -> None:
        """Tell the planner and the listener what a tier is good for now."""
        guard, now = self._parts.guards[tier], self._parts.clock()
        verdict = guard.verdict(now)
        self._planner.set_verdict(tier, verdict)
        if verdict is Verdict.DOWN:
            self._parts.watch.hide(tier)
        else:
            self._parts.watch.show(tier)
        if self._is_open and guard.is_probe_due(now) and tier not in self._probing:
            self._probing.add(tier)
            self._spawn(self._probe(tier))

    async def _probe(self, tier: Tier) -> None:
        """Read one block to see whether the tier is back: one that is there, if any is."""
        guard, clock = self._parts.guards[tier], self._parts.clock
        name = self._parts.watch.one_of(tier) or _PROBE_NAME
        began = clock()
        try:
            permit = guard.read(began)
            if permit is None:
                return
            outcome = CallOutcome.CANCELLED
            try:
                result = (await self._parts.tiers[tier].get_many([GetRequest(name)],
                                                                 began + PROBE_S))[0]  # fmt: skip
                bad = result.status in {GetStatus.TIMEOUT, GetStatus.ERROR}
                outcome = CallOutcome.FAILURE if bad else CallOutcome.SUCCESS
            except KvtierError:
                outcome = CallOutcome.FAILURE
            finally:
                now = clock()
                guard.read_ended(permit, outcome, now - began, now)
        finally:
            self._probing.discard(tier)
        self._judged(tier)

    def _view(self, tier: Tier, now: float) -> TierView:
        guard = self._parts.guards.get(tier)
        lane = self._lanes.get(tier)
        return TierView(
            stats=self._parts.tiers[tier].stats(),
            usage=self._planner.usage(tier),
            verdict=Verdict.OPEN if guard is None else guard.verdict(now),
            tripped_count=0 if guard is None else guard.tripped_count,
            drops_pending=0 if lane is None else lane.drops_pending,
        )


@asynccontextmanager
async def open_store(
    config: TieredStoreConfig,
    tiers: Sequence[StoreTier],
    watch: TierWatch,
    latencies: Latencies | None = None,
    clock: Clock = time.monotonic,
) -> AsyncIterator[TieredStore]:
    """A store over tiers, DRAM first, while entered; then it drains and closes the tiers.

    Every tier but a shared one must have `watch` as its observer. Raises CallerError where the
    tiers are not those of `config.planner`. An error that only a bug can cause ends the body too
    (it comes out of a TaskGroup): a store whose lanes stand still would only pretend to live.
    """
    by_tier = {one.blocks.tier: one.blocks for one in tiers}
    if list(by_tier) != [t.tier for t in config.planner.tiers] or len(by_tier) != len(tiers):
        raise CallerError("the tiers are not those of the planner's configuration")
    parts = Parts(
        config=config,
        tiers=by_tier,
        pins={one.blocks.tier: one.pins for one in tiers if one.pins is not None},
        checksums={
            one.blocks.tier: one.checksum_of
            for one in tiers
            if one.checksum_of is not None and one.blocks.tier is not Tier.DRAM
        },
        watch=watch,
        guards={tier: TierGuard(config.breaker) for tier in by_tier if tier is not Tier.DRAM},
        gate=ByteGate(config.in_flight_bytes_max),
        clock=clock,
        latencies=Quiet() if latencies is None else latencies,
        landing=next((one.landing for one in tiers if one.blocks.tier is Tier.DRAM), None),
    )
    planner = Planner(config.planner, _ranked, clock())
    try:
        async with asyncio.TaskGroup() as tasks:
            store = TieredStore(planner, parts, tasks)
            try:
                yield store
            finally:
                await store.drain()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None  # the body's own error, as if there were no group
    finally:
        for one in tiers:
            await one.blocks.close()


def _known(selection: Selection) -> KnownBlocks:
    match selection:
        case ByNames():
            return KnownBlocks(keys=frozenset(block_key(name) for name in selection.names))
        case ByNamespace():
            return KnownBlocks(namespace=selection.namespace)
        case ByScope():
            return KnownBlocks(scope_id=selection.scope)
        case ByWriter():
            return KnownBlocks(writer_id=writer_name(selection.writer_id))

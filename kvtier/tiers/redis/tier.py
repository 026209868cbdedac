"""`RedisTier`: the `BlockTier` over a shared Redis. One value a block, checked on every read.

What a Redis adds to the port's promises and takes from them:

- A put that ended with TIMEOUT or ERROR may have been stored all the same: its command can be in
  the server's socket already. What is stored is a whole, checked value or nothing.
- `names`, counts and what the observer hears are a belief (`belief`), for the server says nothing
  of what it evicts and of what others do; `bytes` counts values whose length is known.
- A bad copy is looked at a second time and deleted only if it is still that very value (WATCH): a
  reader whose own memory or network damages bytes must not empty a Redis that many share. What is
  whole on the second look stays; the reader misses, and the accident is counted.
- Errors that a server gives while it still answers (out of memory, read-only) stop writes by a
  breaker of their own; reads go on.

What must not live here: commands' packing (`connection`), rounds of a put (`writing`), looking
after the belief (`caretaker`).
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvtier.core.frame import HEADER_BYTES, FrameHeader, FrameName, parse_header
from kvtier.core.health import BreakerState, Outcome
from kvtier.errors import BackendError, DeadlineError, FrameError, FrameFault
from kvtier.ports import (
    NO_SCOPE,
    ByNames,
    ByNamespace,
    ByScope,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    RemovalCause,
    Selection,
    TierObserver,
    TierStats,
    require_batch,
)
from kvtier.tiers.redis.belief import Belief
from kvtier.tiers.redis.config import Place, RedisConfig, SentinelGroup
from kvtier.tiers.redis.connection import Command, RedisConnection, ServerFacts
from kvtier.tiers.redis.control import RedisControl
from kvtier.tiers.redis.naming import block_key, name_of_key, pattern
from kvtier.tiers.redis.replies import ErrorReply, Reply
from kvtier.tiers.redis.sessions import RedisSessions
from kvtier.tiers.redis.troubles import (
    WRONG_TYPE,
    RedisTroubleError,
    Trouble,
    classify,
    code_of,
    refused_put,
)
from kvtier.tiers.redis.values import TAIL_BYTES_MAX, ValueSink, fault_of, scope_in, value_bytes
from kvtier.tiers.redis.writing import PutBatch, put_batch
from kvtier.tiers.tally import Holding, Tally, failed_get, is_selected, require_open
from kvtier.types import Tier

_ROUNDS_MAX: Final = 8
"""Of one put: each more is a race lost against another writer and a drop."""
_SCAN_COUNT: Final = 512
_UNKNOWN_BYTES: Final = 1 << 20
"""What a read whose length nobody says counts for, until it has come."""

_Round: TypeAlias = tuple[list[int], list[Command]]
_Take: TypeAlias = Callable[[Sequence[int], Sequence[Reply]], None]


class RedisTier:
    """See the module's docstring. Connects when it is first used; `close` it."""

    def __init__(
        self,
        config: RedisConfig,
        observer: TierObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._observer = observer
        self._clock = clock
        self._tally = Tally()
        self._is_open = True
        self._run_id = ""
        self._place: Place | None = None
        """Where the Sentinels said that the master is, the last time they were asked."""
        self._value_bytes_max = config.value_bytes_max
        self._limited_run_id = ""
        """The server process whose `proto-max-bulk-len` is in `_value_bytes_max`."""
        self.belief: Final = Belief(config.names_max)
        self.control: Final = RedisControl(config)
        self.sessions: Final = RedisSessions(
            config, self.control, self._locate, self._connected, clock
        )
        self.transit_faults: Counter[FrameFault] = Counter()
        """Bad copies that were whole on the second look; part of `TierStats.corrupt`."""

    @property
    def tier(self) -> Tier:
        return Tier.REDIS

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with the server, as of the last call; None: nothing is known."""
        if self.sessions.state is not BreakerState.CLOSED:
            return self.sessions.trouble or Trouble.BREAKER_OPEN
        return self.sessions.trouble or self.sessions.write_trouble

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`. Does not count as use for the server's eviction."""
        require_batch(names, deadline_s)
        require_open(self._is_open)
        commands = [Command((b"EXISTS", block_key(name))) for name in names]
        found = [bool(reply) for reply in await self._counted(commands, deadline_s)]
        gone = [name for name, is_there in zip(names, found, strict=True) if not is_there]
        self.removed(gone, RemovalCause.LOST)
        return found

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. Receives payloads where they belong; copies few bytes twice."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        commands = [
            Command((b"GET", block_key(r.name)), ValueSink(r), _cost_bytes(r)) for r in requests
        ]
        replies: list[Reply] = []
        missing = GetResult(GetStatus.TIMEOUT)
        try:
            if commands:
                async with self.sessions.session(deadline_s) as connection:
                    await connection.exchange(commands, replies)
                    self.sessions.judge(replies)
        except DeadlineError:
            missing = GetResult(GetStatus.TIMEOUT)
        except RedisTroubleError as error:
            missing = GetResult(GetStatus.ERROR, reason=error.trouble)
        results = [missing] * len(requests)
        for i, reply in enumerate(replies):
            results[i] = await self._taken(requests[i], reply, deadline_s)
        self._tally.count_gets(results)
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`. What is there already is not sent."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        batch = put_batch(requests, self._config.ttl_s)
        try:
            if batch.open:
                async with self.sessions.session(deadline_s) as connection:
                    batch.refuse_longer_than(self._value_bytes_max)
                    await self._put_rounds(connection, batch, deadline_s)
            batch.settle(PutResult(PutStatus.ERROR, Trouble.CONTENDED))
        except DeadlineError:
            batch.settle(PutResult(PutStatus.TIMEOUT))
        except RedisTroubleError as error:
            batch.settle(refused_put(error.trouble))
        results = batch.done()
        for put, result in zip(batch.puts, results, strict=True):
            if result.is_held:
                length = put.value_bytes if result.status is not PutStatus.DIVERGENT else 0
                self.believed([put.request.name], length)
        self._tally.count_puts(requests, results)
        return results

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`. O(keys of the server) unless the selection is `ByNames`."""
        require_batch(selection.names if isinstance(selection, ByNames) else (), deadline_s)
        require_open(self._is_open)
        if isinstance(selection, ByNames):
            return await self._unlink(list(dict.fromkeys(selection.names)), deadline_s)
        namespace = selection.namespace if isinstance(selection, ByNamespace) else None
        dropped = cursor = 0
        while True:
            cursor, keys = await self._page(cursor, pattern(namespace), deadline_s)
            names = [name for key in dict.fromkeys(keys) if (name := name_of_key(key)) is not None]
            if not isinstance(selection, ByNamespace):
                names = await self._selected(names, selection, deadline_s)
            dropped += await self._unlink(names, deadline_s)
            if cursor == 0:
                return dropped

    def stats(self) -> TierStats:
        """See `BlockTier.stats`: blocks are believed ones, `bytes_max` is as configured."""
        return self._tally.stats(
            Holding(len(self.belief), self.belief.bytes, self._config.bytes_max)
        )

    async def close(self) -> None:
        """End every connection."""
        self._is_open = False
        await self.sessions.close()
        await self.control.close()

    async def follow_master(self) -> None:
        """Ask the Sentinels, if there are any, and leave a server that is not the master any more.

        A master that was replaced while it could not be told takes writes that will be lost.
        Raises RedisTroubleError.
        """
        if isinstance(self._config.server, SentinelGroup):
            place = await self.control.locate()
            if self._place not in {None, place}:
                await self.sessions.forget()
            self._place = place

    # for the caretaker

    def believed(self, names: Sequence[FrameName], length: int = 0) -> None:
        """These are there: correct the belief and tell the observer. Mutates."""
        self.told_stored([name for name in names if self.belief.add(name, length)])

    def removed(self, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """These are not there: correct the belief and tell the observer. Mutates."""
        self.told_removed([name for name in names if self.belief.remove(name)], cause)

    def told_stored(self, names: Sequence[FrameName]) -> None:
        """The belief has taken these: tell the observer."""
        if names and self._observer is not None:
            self._observer.on_tier_stored(self.tier, names)

    def told_removed(self, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """The belief has lost these: count them and tell the observer."""
        if cause is RemovalCause.LOST:
            self._tally.removals[cause] += len(names)
        if names and self._observer is not None:
            self._observer.on_tier_removed(self.tier, names, cause)

    async def sampled(self, count: int, dice: random.Random, deadline_s: float) -> tuple[int, int]:
        """Ask for `count` random names of the belief: how many were asked for, and missing.

        Raises as `contains`.
        """
        names = self.belief.sample(count, dice)
        found = await self.contains(names, deadline_s)
        return len(names), found.count(False)

    # parts

    async def _locate(self) -> Place:
        self._place = await self.control.locate()
        return self._place

    async def _connected(self, facts: ServerFacts) -> None:
        """A connection begins: another server process has lost all, as far as we know."""
        if isinstance(self._config.server, SentinelGroup) and facts.role not in {"", "master"}:
            raise RedisTroubleError(Trouble.READ_ONLY, "the Sentinels name a replica")
        if not facts.run_id:
            return
        is_other = self._run_id not in {"", facts.run_id}
        self._run_id = facts.run_id
        if is_other:
            self.told_removed(self.belief.clear(), RemovalCause.LOST)
            await self.control.forget()
        if self._limited_run_id != facts.run_id:
            # Known before the first value is sent on any connection, this one or one beside it.
            limit = await self.control.value_bytes_max()
            ours = self._config.value_bytes_max
            self._value_bytes_max = ours if limit is None else min(ours, limit)
            self._limited_run_id = facts.run_id

    async def _taken(self, request: GetRequest, reply: Reply, deadline_s: float) -> GetResult:
        """The outcome that one reply to a GET means."""
        if reply is None:
            self.removed([request.name], RemovalCause.LOST)
            return GetResult(GetStatus.MISS)
        if isinstance(reply, ErrorReply):
            if code_of(reply) != WRONG_TYPE:
                return GetResult(GetStatus.ERROR, reason=classify(reply))
            fault = FrameError(FrameFault.MAGIC, "no string stands at the key")
            return await self._corrupt(request, fault, deadline_s)
        if not isinstance(reply, ValueSink):
            return GetResult(GetStatus.ERROR, reason=Trouble.PROTOCOL)
        result = reply.result()
        if result is None:
            assert reply.fault is not None
            return await self._corrupt(request, reply.fault, deadline_s)
        if result.header is not None:
            length = value_bytes(result.header.payload_bytes, result.scope.encode())
            self.believed([request.name], length)
        return result

    async def _corrupt(
        self, request: GetRequest, fault: FrameError, deadline_s: float
    ) -> GetResult:
        self._tally.corrupt[fault.fault] += 1
        await self._condemn(request, fault.fault, deadline_s)
        return failed_get(fault)

    async def _condemn(self, request: GetRequest, fault: FrameFault, deadline_s: float) -> bool:
        """Look again at what stands at a block's key, and delete it if it is still bad.

        Where that cannot be done in time it stays, and the next reader finds it. False where
        nothing stands there any more.
        """
        asked = GetRequest(request.name, None, request.payload_bytes)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                async with self.control.recheck(block_key(request.name)) as look:
                    is_bad = not look.is_value
                    if look.value is not None:
                        is_bad = fault_of(asked, look.value) is not None
                    if is_bad:
                        look.condemn()
        except (TimeoutError, RedisTroubleError):
            return True
        if look.is_deleted:
            self._tally.removals[RemovalCause.CORRUPT] += 1
            self.removed([request.name], RemovalCause.CORRUPT)
        elif look.value is None and look.is_value:
            self.removed([request.name], RemovalCause.LOST)
            return False
        elif not is_bad:
            self.transit_faults[fault] += 1
        return True

    async def _put_rounds(
        self, connection: RedisConnection, batch: PutBatch, deadline_s: float
    ) -> None:
        for _ in range(_ROUNDS_MAX):
            if not batch.open:
                return
            await self._round(connection, batch.probes(), batch.take_probes)
            for i, fault in batch.bad:
                asked = GetRequest(batch.puts[i].request.name)
                self._tally.corrupt[fault] += await self._condemn(asked, fault, deadline_s)
            if not batch.open:
                return
            permit = self.sessions.write_permit()
            if permit is None:
                batch.settle(refused_put(self.sessions.write_trouble or Trouble.BREAKER_OPEN))
                return
            outcome, replies = Outcome.CANCELLED, list[Reply]()
            try:
                await self._round(connection, batch.sets(), batch.take_sets, replies)
                outcome = Outcome.SUCCESS
            finally:
                await self.sessions.report_write(permit, outcome, replies)

    async def _round(
        self,
        connection: RedisConnection,
        commands: _Round,
        take: _Take,
        replies: list[Reply] | None = None,
    ) -> None:
        """Exchange one round; what was answered is taken also where the rest was not."""
        answers = [] if replies is None else replies
        try:
            await connection.exchange(commands[1], answers)
        finally:
            take(commands[0], answers)
        self.sessions.judge(answers)

    async def _counted(self, commands: Sequence[Command], deadline_s: float) -> list[int]:
        """Commands that are answered by numbers. Raises BackendError or DeadlineError."""
        replies = await self._replies(commands, deadline_s)
        return [reply if isinstance(reply, int) else 0 for reply in replies]

    async def _replies(self, commands: Sequence[Command], deadline_s: float) -> list[Reply]:
        replies: list[Reply] = []
        if not commands:
            return replies
        try:
            async with self.sessions.session(deadline_s) as connection:
                await connection.exchange(commands, replies)
                self.sessions.judge(replies)
        except RedisTroubleError as error:
            raise BackendError(error.trouble.value) from error
        for reply in replies:
            if isinstance(reply, ErrorReply) and code_of(reply) != WRONG_TYPE:
                raise BackendError(classify(reply).value)
        return replies

    async def _unlink(self, names: Sequence[FrameName], deadline_s: float) -> int:
        commands = [Command((b"UNLINK", block_key(name))) for name in names]
        dropped = sum(await self._counted(commands, deadline_s))
        self._tally.removals[RemovalCause.DROPPED] += dropped
        self.removed(names, RemovalCause.DROPPED)
        return dropped

    async def _page(self, cursor: int, match: bytes, deadline_s: float) -> tuple[int, list[bytes]]:
        left_s = deadline_s - self._clock()
        try:
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                return await self.control.scan(cursor, match, _SCAN_COUNT)
        except TimeoutError as error:
            raise DeadlineError("the walk over all keys reached the deadline") from error
        except RedisTroubleError as error:
            raise BackendError(error.trouble.value) from error

    async def _selected(
        self, names: Sequence[FrameName], selection: Selection, deadline_s: float
    ) -> list[FrameName]:
        """Of the names those whose values say that they are of the writer or scope."""
        last = b"%d" % (HEADER_BYTES - 1)
        commands: list[Command] = []
        for name in names:
            key = block_key(name)
            commands.append(Command((b"GETRANGE", key, b"0", last)))
            commands.append(Command((b"GETRANGE", key, b"-%d" % TAIL_BYTES_MAX, b"-1")))
        replies = await self._replies(commands, deadline_s)
        pairs = zip(names, replies[::2], replies[1::2], strict=True)
        return [name for name, head, end in pairs if _says(head, end, selection)]


def _says(head: Reply, end: Reply, selection: Selection) -> bool:
    """Whether a value is one of the selection's; one that is not ours never is."""
    if isinstance(head, ErrorReply) or not isinstance(head, bytes) or not isinstance(end, bytes):
        return False
    with contextlib.suppress(FrameError):
        header: FrameHeader = parse_header(head)
        scope = scope_in(head, end) if isinstance(selection, ByScope) else NO_SCOPE
        return is_selected(selection, header.name, header.writer_id, scope)
    return False


def _cost_bytes(request: GetRequest) -> int:
    if request.payload_bytes is not None:
        return request.payload_bytes
    return _UNKNOWN_BYTES if request.into is None else request.into.nbytes

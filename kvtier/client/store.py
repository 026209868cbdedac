"""`BlockStoreClient`: blocks of a node's store, through shared memory where that is possible.

    async with BlockStoreClient(DialConfig(targets=("unix:/run/kvtier/store.sock",))) as store:
        await store.put_many(names, tensors)
        results = await store.get_many(names, into=tensors)

A client whose store is on its own machine moves payload through shared memory only: it reads what
is resident without any call, has the store bring up what is below, and writes into a segment of its
own. Any other gets chunks over gRPC. Each byte is verified in the memory that is handed out. A
store that is gone costs misses, not errors, and is found again when it is back.
What must not live here: shared memory itself (`kvtier.tiers.arena.client`), calls (`store_link`).
"""

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

from kvtier.client.store_arena import SharedArena
from kvtier.client.store_link import ABSENT, PRESENCES, Pauses, StoreLink
from kvtier.client.store_memory import Payload, all_readable, all_writable, readable
from kvtier.core.checks import require_integer
from kvtier.core.encoding import U64_MAX
from kvtier.core.eviction import PRIORITY_DEFAULT, Retention
from kvtier.core.frame import FrameName
from kvtier.errors import CallerError, DeadlineError, KvtierError
from kvtier.limits import STORE_DEADLINE_MS_MAX
from kvtier.ports import (
    NO_SCOPE,
    BlockOwner,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
)
from kvtier.sections import DialConfig
from kvtier.store.values import Presence
from kvtier.tiers.arena.client import ROUSE_BLOCKS_MIN, ArenaClientConfig
from kvtier.tiers.minting import blocks_to_put, blocks_wanted
from kvtier.types import ScopeId, Tier
from kvtier.wire import blocks
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import end

INLINE_BYTES = 256 << 10
"""Reads of shared memory up to this size run on the event loop: a thread would cost as much."""
_LEASE_MS = 10_000
_MISS = GetResult(GetStatus.MISS)
_TIMEOUT = GetResult(GetStatus.TIMEOUT)
_UNAVAILABLE = PutResult(PutStatus.ERROR, "unavailable")
_OF_PRESENCE = {
    Presence.MISS: _MISS,
    Presence.TIMEOUT: _TIMEOUT,
    Presence.ERROR: GetResult(GetStatus.ERROR, reason="tier_down"),
}


class SharedMemory(StrEnum):
    """Whether payload goes through shared memory."""

    USE = "use"
    """Where the store is on this machine and lets this process in."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StoreClientConfig:
    """Deadlines and memory of a client."""

    deadline_s: float = 2.0
    """Of each call that brings none of its own."""
    shared_memory: SharedMemory = SharedMemory.USE
    arena: ArenaClientConfig = field(default_factory=ArenaClientConfig)
    """Size of the segment that payloads are put through."""
    pauses: Pauses = field(default_factory=Pauses)
    writer_id: int = 0
    """Written into every frame that is put; 0: drawn at random."""

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < float("inf"):
            raise CallerError(f"deadline_s: want a finite duration, got {self.deadline_s}")


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """What holds for all blocks of one read."""

    payload_bytes: int | None = None
    """Length of each payload. Needed to find what this node has never held in a shared tier."""
    scope: ScopeId = NO_SCOPE
    skip_shared: bool = False
    predicted: bool = False
    """Will surely be read again soon: treated as if touched often."""


@dataclass(frozen=True, slots=True)
class WriteTerms:
    """What holds for all blocks of one put."""

    scope: ScopeId = NO_SCOPE
    priority: int = PRIORITY_DEFAULT
    prefix_hashes: Sequence[int] = ()
    """One a block, for blocks that are named by a foreign engine's digests."""


T = TypeVar("T")
_READ = ReadTerms()
_WRITE = WriteTerms()


class BlockStoreClient:
    """See the module. An async context manager; belongs to one event loop."""

    def __init__(self, dial: DialConfig, config: StoreClientConfig | None = None) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        self._config = config or StoreClientConfig()
        self._link = StoreLink(dial, self._config.pauses)
        self.arena = SharedArena(self._config.arena)
        self.writer_id = self._config.writer_id or secrets.randbits(64)
        self._attaching: asyncio.Task[bool] | None = None
        self._attach_again_s = 0.0

    @property
    def is_attached(self) -> bool:
        """Whether payload goes through shared memory now."""
        return self.arena.is_attached

    async def get_many(
        self,
        names: Sequence[FrameName],
        into: Sequence[Payload | None] | None = None,
        terms: ReadTerms = _READ,
        *,
        deadline_s: float | None = None,
    ) -> list[GetResult]:
        """Read blocks; one result each, in order. `deadline_s` is a duration.

        Payloads go into `into` where given (contiguous and writable: buffers, arrays, CPU tensors),
        whose contents are unspecified after anything but a HIT. Raises CallerError for what cannot
        be meant, UnauthenticatedError and ForbiddenError; an absent store is a miss.
        """
        requests = get_requests(names, into, terms)
        end = self._end(deadline_s)
        results = await self.read_shared(requests)
        return await self.complete(requests, results, terms, end)

    async def put_many(
        self,
        names: Sequence[FrameName],
        payloads: Sequence[Payload],
        terms: WriteTerms = _WRITE,
        *,
        deadline_s: float | None = None,
    ) -> list[PutResult]:
        """Put blocks of one chain, head first; one result each. `deadline_s` is a duration.

        Payloads must not change until this returns. Errors as `get_many`; an absent store gives
        ERROR with the reason `unavailable`.
        """
        rouse_arena(self.arena, len(names))
        requests = put_requests(names, payloads, terms, self.writer_id)
        end = self._end(deadline_s)
        await self.announce(names, terms, end)
        if not self.arena.is_attached:
            await self._attach(end)
        results = await self._put_shared(requests, end)
        return await self.complete_put(requests, results, terms, end)

    async def contains(
        self,
        names: Sequence[FrameName],
        *,
        shared: bool = False,
        deadline_s: float | None = None,
    ) -> list[frozenset[Tier]]:
        """In which tiers blocks are; nowhere, where the store cannot be asked."""
        found = await self.find(names, shared=shared, deadline_s=deadline_s)
        return [frozenset()] * len(names) if found is None else found

    async def find(
        self,
        names: Sequence[FrameName],
        *,
        shared: bool = False,
        deadline_s: float | None = None,
    ) -> list[frozenset[Tier]] | None:
        """As `contains`, for who must tell "nowhere" from "nobody says": that is None."""
        request = pb.ContainsRequest(names=blocks.names_to(names), shared=shared)
        try:
            answer = await self._ask("Contains", request, deadline_s)
        except ABSENT:
            return None
        return [blocks.tiers_from(mask) for mask in answer.tiers]

    async def prefix_hashes(
        self, names: Sequence[FrameName], *, deadline_s: float | None = None
    ) -> list[int | None] | None:
        """What the index calls blocks that are named by a foreign engine's digests, as far as the
        store was told since it started; None where nobody says."""
        request = pb.ContainsRequest(names=blocks.names_to(names), prefix_hashes=True)
        try:
            answer = await self._ask("Contains", request, deadline_s)
        except ABSENT:
            return None
        if not answer.prefix_hashes:
            return None  # a store of an older version
        column = blocks.u64s_from("prefix_hashes", answer.prefix_hashes, len(names))
        return [one or None for one in column]

    async def prefetch(self, names: Sequence[FrameName], terms: ReadTerms = _READ) -> int:
        """Have blocks brought into DRAM; how many are there or on their way. 0 without a store."""
        request = pb.PrefetchRequest(
            names=blocks.names_to(names),
            payload_bytes=terms.payload_bytes or 0,
            scope=terms.scope,
            skip_shared=terms.skip_shared,
        )
        try:
            return int((await self._ask("Prefetch", request, None)).begun)
        except ABSENT:
            return 0

    async def drop(self, names: Sequence[FrameName]) -> int:
        """Remove blocks from every tier; how many there were. Raises where the store is absent."""
        request = pb.DropBlocksRequest(names=blocks.names_to(names))
        return int((await self._ask("Drop", request, None)).dropped)

    async def close(self) -> None:
        """End the session and all calls. Idempotent."""
        if self._attaching is not None:
            await end([self._attaching])
        await self._link.close()
        self.arena.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # Steps, also of the blocking client

    async def read_shared(self, requests: Sequence[GetRequest]) -> list[GetResult]:
        """What shared memory holds, without any call; all misses where there is none."""
        size = sum(request.payload_bytes or INLINE_BYTES for request in requests)
        if size <= INLINE_BYTES:
            return read_arena(self.arena, requests)
        return await _whole(asyncio.to_thread(read_arena, self.arena, requests))

    async def complete(
        self,
        requests: Sequence[GetRequest],
        results: list[GetResult],
        terms: ReadTerms,
        end: float,
    ) -> list[GetResult]:
        """Ask the store for what is not in shared memory."""
        missing = [i for i, result in enumerate(results) if _is_open(result)]
        if not missing:
            return results
        try:
            if self.arena.is_attached or await self._attach(end):
                missing = await self._acquire(requests, results, missing, terms, end)
            if missing:
                asked = [requests[i] for i in missing]
                head = _get_head(asked, terms, end)
                found = await self._link.get_many(asked, head, _left(end))
                for i, result in zip(missing, found, strict=True):
                    results[i] = result
        except (TimeoutError, *ABSENT) as error:
            late = isinstance(error, TimeoutError | DeadlineError)
            for i in missing:
                if _is_open(results[i]):
                    results[i] = _TIMEOUT if late else _MISS
        return results

    async def complete_put(
        self,
        requests: Sequence[PutRequest],
        results: list[PutResult],
        terms: WriteTerms,
        end: float,
    ) -> list[PutResult]:
        """Send as chunks what could not go through shared memory."""
        missing = [i for i, result in enumerate(results) if needs_chunks(result)]
        if not missing:
            return results
        asked = [requests[i] for i in missing]
        payloads = [readable(request.payload) for request in asked]
        head = pb.PutHead(
            names=blocks.names_to([request.name for request in asked]),
            lengths=blocks.u64s(payload.nbytes for payload in payloads),
            writer=_writer(asked[0].owner, terms),
            deadline_ms=_ms(end),
        )
        if terms.prefix_hashes:
            head.prefix_hashes = blocks.u64s(terms.prefix_hashes[i] for i in missing)
        try:
            sent = await self._link.put_many(head, payloads, _left(end))
        except ABSENT:
            sent = [_UNAVAILABLE] * len(missing)
        for i, result in zip(missing, sent, strict=True):
            results[i] = result
        return results

    async def announce(self, names: Sequence[FrameName], terms: WriteTerms, end: float) -> None:
        """Tell the store the prefix hashes of blocks that go through shared memory."""
        if not terms.prefix_hashes:
            return
        if len(terms.prefix_hashes) != len(names):
            raise CallerError("prefix_hashes: not one for each block")
        request = pb.AnnounceRequest(
            names=blocks.names_to(names), prefix_hashes=blocks.u64s(terms.prefix_hashes)
        )
        try:
            await self._link.ask("Announce", request, _left(end))
        except ABSENT:
            return

    # Pieces

    async def _put_shared(self, requests: Sequence[PutRequest], end: float) -> list[PutResult]:
        results = await _whole(asyncio.to_thread(write_arena, self.arena, requests, end))
        if not any(result == _UNAVAILABLE for result in results):
            return results
        # The store may have restarted since: puts are idempotent, so once more.
        if await self._attach(end):
            return await _whole(asyncio.to_thread(write_arena, self.arena, requests, end))
        return results

    async def _acquire(
        self,
        requests: Sequence[GetRequest],
        results: list[GetResult],
        missing: list[int],
        terms: ReadTerms,
        end: float,
    ) -> list[int]:
        """Have blocks brought up, and read each run as it is there; what must come as chunks."""
        request = pb.AcquireRequest(
            names=blocks.names_to([requests[i].name for i in missing]),
            payload_bytes=terms.payload_bytes or 0,
            ttl_ms=_LEASE_MS,
            deadline_ms=_ms(end),
            scope=terms.scope,
            skip_shared=terms.skip_shared,
        )
        rest: list[int] = []
        at = 0
        async with self._link.acquired(request) as answers, asyncio.timeout(_left(end)):
            async for answer in answers:
                run = missing[at : at + len(answer.statuses)]
                at += len(run)
                there = []
                for i, status in zip(run, answer.statuses, strict=True):
                    presence = PRESENCES[status] if status < len(PRESENCES) else Presence.ERROR
                    if presence is Presence.RESIDENT:
                        there.append(i)
                    elif presence is Presence.NO_ROOM:
                        rest.append(i)
                    else:
                        results[i] = _OF_PRESENCE[presence]
                rest += await self._read_acquired(requests, results, there)
                if at == len(missing):
                    return rest
        return rest + missing[at:]

    async def _read_acquired(
        self, requests: Sequence[GetRequest], results: list[GetResult], there: list[int]
    ) -> list[int]:
        """Read blocks that the store says are in shared memory; those that are not, as chunks."""
        read = await self.read_shared([requests[i] for i in there]) if there else []
        rest = []
        for i, result in zip(there, read, strict=True):
            results[i] = result
            if _is_open(result):
                rest.append(i)
        if rest and len(rest) == len(there):
            self.arena.doubt()  # this memory is of another store than the one that answers
        return rest

    async def _attach(self, end: float) -> bool:
        """Attach to shared memory if this machine's store has one; one attempt at a time."""
        never = self._config.shared_memory is SharedMemory.NEVER
        if never or self._link.is_paused or time.monotonic() < self._attach_again_s:
            return False
        if self._attaching is None or self._attaching.done():
            self._attaching = asyncio.get_running_loop().create_task(self._try_attach(end))
        try:
            async with asyncio.timeout(_left(end)):
                return await asyncio.shield(self._attaching)
        except TimeoutError:
            return False

    async def _try_attach(self, end: float) -> bool:
        try:
            answer = await self._link.ask("Attach", pb.AttachRequest(), _left(end))
        except KvtierError:
            return False
        attached = await asyncio.to_thread(
            self.arena.attach, answer.arena_socket, answer.arena_abi, answer.arena_epoch
        )
        if not attached:
            self._attach_again_s = time.monotonic() + self._config.pauses.s_max
        return attached

    async def _ask(self, name: str, request: Any, deadline_s: float | None) -> Any:
        return await self._link.ask(name, request, deadline_s or self._config.deadline_s)

    def _end(self, deadline_s: float | None) -> float:
        return time.monotonic() + (deadline_s or self._config.deadline_s)


def get_requests(
    names: Sequence[FrameName], into: Sequence[Payload | None] | None, terms: ReadTerms
) -> list[GetRequest]:
    """Checked requests of a read."""
    targets: Sequence[Payload | None] = [None] * len(names) if into is None else into
    if len(targets) != len(names):
        raise CallerError(f"into: {len(targets)} for {len(names)} blocks")
    if terms.payload_bytes is not None:
        require_integer("payload_bytes", terms.payload_bytes, 0, U64_MAX)
    return blocks_wanted(names, all_writable(targets), terms.payload_bytes)


def put_requests(
    names: Sequence[FrameName], payloads: Sequence[Payload], terms: WriteTerms, writer_id: int
) -> list[PutRequest]:
    """Checked requests of a put."""
    if len(payloads) != len(names):
        raise CallerError(f"payloads: {len(payloads)} for {len(names)} blocks")
    owner, retention = BlockOwner(writer_id, terms.scope), Retention(terms.priority)
    return blocks_to_put(names, all_readable(payloads), owner, retention)


def read_arena(arena: SharedArena, requests: Sequence[GetRequest]) -> list[GetResult]:
    """Read shared memory on this thread; misses where there is none."""
    with arena.use() as client:
        return [_MISS] * len(requests) if client is None else client.get_many(requests)


def rouse_arena(arena: SharedArena, blocks_count: int) -> None:
    """Have a sleeping store wake while a put of so many blocks is prepared."""
    if blocks_count >= ROUSE_BLOCKS_MIN:
        with arena.use() as client:
            if client is not None:
                client.rouse()


def write_arena(arena: SharedArena, requests: Sequence[PutRequest], end: float) -> list[PutResult]:
    """Put through the segment on this thread; `unavailable` where there is none."""
    with arena.use() as client:
        if client is None:
            return [_UNAVAILABLE] * len(requests)
        return client.put_flat(requests, end)


def _is_open(result: GetResult) -> bool:
    """Whether the store may know more of a block than shared memory said."""
    return result.status in {GetStatus.MISS, GetStatus.CORRUPT}


def needs_chunks(result: PutResult) -> bool:
    """Whether a put that shared memory did not take is worth sending."""
    return result == _UNAVAILABLE or (
        result.status is PutStatus.REFUSED and result.reason == Refusal.TOO_LONG
    )


def _get_head(requests: Sequence[GetRequest], terms: ReadTerms, end: float) -> pb.GetBlocksRequest:
    return pb.GetBlocksRequest(
        names=blocks.names_to([request.name for request in requests]),
        payload_bytes=terms.payload_bytes or 0,
        deadline_ms=_ms(end),
        scope=terms.scope,
        skip_shared=terms.skip_shared,
        predicted=terms.predicted,
    )


def _writer(owner: BlockOwner, terms: WriteTerms) -> pb.BlockWriter:
    return pb.BlockWriter(
        writer_id=owner.writer_id, scope=owner.scope, priority_plus_one=terms.priority + 1
    )


def _left(end: float) -> float:
    return max(0.001, end - time.monotonic())


def _ms(end: float) -> int:
    return min(STORE_DEADLINE_MS_MAX, max(1, int(1000 * _left(end))))


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Await work that uses a caller's memory: cancelled, it is waited for all the same."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        raise

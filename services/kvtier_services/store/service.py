"""The store on grpc.aio: each RPC turns columns into calls of `TieredStore` and back.

What must not live here: what moves between tiers, sessions of shared memory, configuration.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from kvtier.core.frame import FrameName
from kvtier.core.planner import PinId, Reuse
from kvtier.errors import (
    BackendError,
    CallerError,
    DeadlineError,
    ForbiddenError,
    KvtierError,
    UnavailableError,
)
from kvtier.limits import (
    LEASE_MS_MAX,
    PIN_TTL_S_MAX,
    RESERVATION_TTL_MS_MAX,
    STORE_DEADLINE_MS_MAX,
    STORE_STREAM_IDLE_MS_MAX,
)
from kvtier.ports import (
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    Clock,
    GetRequest,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    Selection,
)
from kvtier.security import AccessRole, caller
from kvtier.store import PinTerms, Presence, ReadOptions, SharedTier, TieredStore, TierWatch
from kvtier.store.gates import ByteGate, grouped
from kvtier.tiers.arena.directory import ABI_VERSION
from kvtier.types import Fingerprint, InstanceId, NodeId, ScopeId
from kvtier.wire import blocks, rpc
from kvtier.wire import messages as pb
from kvtier_services.store.arena import GovernedArena
from kvtier_services.store.chunks import Gatherer, cut
from kvtier_services.store.leases import LeaseBook, Leased, LeaseStream
from kvtier_services.store.publishing import Announcer
from kvtier_services.store.reservations import PutTerms, ReservationBook, Staged
from kvtier_services.store.stats import StatsView

Context = grpc.aio.ServicerContext[Any, Any]

GROUP_BLOCKS: Final = 16
GROUP_BYTES: Final = 8 << 20
"""Payload of one call to the store from a stream."""
IDLE_S: Final = STORE_STREAM_IDLE_MS_MAX / 1000
_PRESENCES: Final = {presence: number for number, presence in enumerate(Presence)}
_DROPPERS_OF_ALL: Final = frozenset({AccessRole.OPERATOR, AccessRole.LOCAL})
"""Who may drop what they do not name block by block."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service speaks for."""

    store: TieredStore
    watch: TierWatch
    arena: GovernedArena
    leases: LeaseBook
    reservations: ReservationBook
    announcer: Announcer
    stats: StatsView
    staging: ByteGate
    clock: Clock
    instance: InstanceId
    node: NodeId
    arena_socket: str
    erase: Callable[[ScopeId], None]
    """Erases the keys that a scope's blocks below DRAM were sealed with."""


class StoreService:
    """Handlers of kvtier.v1.Store. `handler()` is what a server serves."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.epoch = secrets.randbits(63) + 1

    def handler(self) -> grpc.GenericRpcHandler:
        return rpc.service_handler(
            rpc.STORE,
            {
                "Attach": self.attach,
                "Contains": self.contains,
                "Acquire": self.acquire,
                "Release": self.release,
                "Reserve": self.reserve,
                "Commit": self.commit,
                "Abort": self.abort,
                "Get": self.get,
                "Put": self.put,
                "Announce": self.announce,
                "Prefetch": self.prefetch,
                "Pin": self.pin,
                "Unpin": self.unpin,
                "Drop": self.drop,
                "Stats": self.stats,
            },
        )

    async def attach(self, _: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        parts = self._parts
        return pb.AttachResponse(
            store_epoch=self.epoch,
            instance=parts.instance,
            node=parts.node,
            arena_socket=parts.arena_socket,
            arena_abi=ABI_VERSION,
            arena_epoch=parts.arena.layout.epoch,
        )

    async def contains(self, request: pb.ContainsRequest, context: Context) -> pb.ContainsResponse:
        try:
            names = blocks.names_from(request.names)
            shared = SharedTier.ASK if request.shared else SharedTier.SKIP
            left_s = context.time_remaining()
            end_s = self._parts.clock() + (IDLE_S if left_s is None else min(left_s, IDLE_S))
            found = await self._parts.store.contains(names, end_s, shared)
        except KvtierError as error:
            await refuse(context, error)
        masks = bytes(blocks.tier_mask(tiers) for tiers in found)
        prefix = masks.find(0)
        hashes = self._parts.announcer.hashes_of(names) if request.prefix_hashes else ()
        return pb.ContainsResponse(
            prefix_blocks=len(masks) if prefix < 0 else prefix,
            tiers=masks,
            prefix_hashes=blocks.u64s(hashes),
        )

    # Shared memory

    async def acquire(
        self, request: pb.AcquireRequest, context: Context
    ) -> AsyncIterator[pb.AcquireResponse]:
        stream = LeaseStream()
        try:
            names = blocks.names_from(request.names)
            length = blocks.length_from(request.payload_bytes)
            ttl_s = blocks.seconds_from("ttl_ms", request.ttl_ms, LEASE_MS_MAX)
            deadline_s = self._deadline(request.deadline_ms)
            options = _options(request.scope, request.skip_shared)
            at = 0
            wanted = [(name, length) for name in names]
            resident: list[FrameName] = []
            async for known in self._parts.store.bring_up(wanted, deadline_s, options):
                run = names[at : at + len(known)]
                yield self._leased(stream, run, known)
                resident += [n for n, p in zip(run, known, strict=True) if p is Presence.RESIDENT]
                at += len(known)
            self._parts.store.touch(resident)
            if stream.leases:
                async with asyncio.timeout(ttl_s):
                    await stream.ended.wait()
        except TimeoutError:
            return  # the leases' time is over
        except KvtierError as error:
            await refuse(context, error)
        finally:
            self._parts.leases.close(stream)

    def _leased(
        self, stream: LeaseStream, names: list[FrameName], known: list[Presence]
    ) -> pb.AcquireResponse:
        """Lease what is resident. What left again at once counts as a miss."""
        there = [n for n, one in zip(names, known, strict=True) if one is Presence.RESIDENT]
        leased = iter(self._parts.leases.take(stream, there) if there else [])
        statuses = bytearray()
        taken: list[Leased] = []
        for name, presence in zip(names, known, strict=True):
            if presence is Presence.RESIDENT:
                lease = next(leased)
                if lease is None:
                    is_there = self._parts.arena.held(name) is not None
                    presence = Presence.NO_ROOM if is_there else Presence.MISS
                else:
                    taken.append(lease)
            statuses.append(_PRESENCES[presence])
        return pb.AcquireResponse(
            statuses=bytes(statuses),
            lease_ids=blocks.u64s(one.lease_id for one in taken),
            entries=blocks.u64s(one.held.entry for one in taken),
            generations=blocks.u64s(one.held.generation for one in taken),
            slot_offsets=blocks.u64s(one.held.slot.offset for one in taken),
            lengths=blocks.u64s(one.held.payload_bytes for one in taken),
            checksums=blocks.u64s(one.held.payload_checksum for one in taken),
        )

    async def release(
        self, request: pb.ReleaseLeasesRequest, context: Context
    ) -> pb.ReleaseLeasesResponse:
        try:
            self._parts.leases.release(blocks.u64s_from("lease_ids", request.lease_ids))
        except KvtierError as error:
            await refuse(context, error)
        return pb.ReleaseLeasesResponse()

    # Puts in several calls

    async def reserve(
        self, request: pb.ReserveBlocksRequest, context: Context
    ) -> pb.ReserveBlocksResponse:
        try:
            names = blocks.names_from(request.names)
            lengths = blocks.lengths_from(request.lengths, len(names))
            ttl_s = blocks.seconds_from("ttl_ms", request.ttl_ms, RESERVATION_TTL_MS_MAX)
            terms = self._terms(request.writer)
            self._learn(names, request.prefix_hashes)
            granted = [
                self._reserved(name, length, terms, ttl_s)
                for name, length in zip(names, lengths, strict=True)
            ]
        except KvtierError as error:
            await refuse(context, error)
        return pb.ReserveBlocksResponse(
            reservation_ids=blocks.u64s(reservation_id for reservation_id, _ in granted),
            statuses=blocks.put_statuses(result.status for _, result in granted),
        )

    def _reserved(
        self, name: FrameName, length: int, terms: PutTerms, ttl_s: float
    ) -> tuple[int, PutResult]:
        if self._parts.arena.held(name) is not None:
            return 0, PutResult(PutStatus.DUPLICATE)
        if length > self._parts.arena.payload_bytes_max:
            return 0, PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
        return self._parts.reservations.reserve(name, length, terms, caller().name, ttl_s)

    async def commit(
        self, request: pb.CommitBlocksRequest, context: Context
    ) -> pb.PutBlocksResponse:
        try:
            ids = blocks.u64s_from("reservation_ids", request.reservation_ids)
            checksums = blocks.u64s_from("checksums", request.checksums, len(ids))
            results: dict[int, PutResult] = {}
            ready: list[tuple[int, Staged]] = []
            for i, reservation_id in enumerate(ids):
                staged = self._parts.reservations.take(reservation_id, caller().name)
                if staged is None:
                    results[i] = PutResult(PutStatus.ERROR, "no_reservation")
                elif not staged.is_filled:
                    results[i] = PutResult(PutStatus.ERROR, "not_filled")
                else:
                    ready.append((i, staged))
            for reuse in Reuse:
                some = [(i, staged) for i, staged in ready if staged.terms.reuse is reuse]
                puts = [staged.request(checksums[i]) for i, staged in some]
                done = await self._parts.store.put_many(puts, self._deadline(0), reuse)
                results.update(zip((i for i, _ in some), done, strict=True))
        except KvtierError as error:
            await refuse(context, error)
        return _put_response([results[i] for i in range(len(ids))])

    async def abort(
        self, request: pb.AbortBlocksRequest, context: Context
    ) -> pb.AbortBlocksResponse:
        try:
            ids = blocks.u64s_from("reservation_ids", request.reservation_ids)
            self._parts.reservations.abort(ids, caller().name)
        except KvtierError as error:
            await refuse(context, error)
        return pb.AbortBlocksResponse()

    # Chunks

    async def get(self, request: pb.GetBlocksRequest, context: Context) -> None:
        """A coroutine that writes: a client that takes nothing must not hold memory for ever."""
        try:
            self._require_meant(request.store)
            names = blocks.names_from(request.names)
            length = blocks.length_from(request.payload_bytes)
            deadline_s = self._deadline(request.deadline_ms)
            options = _options(request.scope, request.skip_shared, request.predicted)
            longest = length or self._parts.arena.payload_bytes_max
            sizes = [longest] * len(names)
            for run in grouped(sizes, GROUP_BLOCKS, GROUP_BYTES):
                asked = [GetRequest(names[i], None, length) for i in run]
                async with self._parts.staging.room(sum(sizes[i] for i in run)):
                    results = await self._parts.store.get_many(asked, deadline_s, options)
                    for message in cut(results, framed=request.framed):
                        async with asyncio.timeout(IDLE_S):
                            await context.write(message)
        except TimeoutError:
            await refuse(context, DeadlineError("the client takes nothing"))
        except KvtierError as error:
            await refuse(context, error)

    async def put(
        self, requests: AsyncIterator[pb.PutBlocksRequest], context: Context
    ) -> pb.PutBlocksResponse:
        try:
            first = await _next(requests)
            if first is None or first.WhichOneof("part") != "head":
                raise CallerError("a Put begins with its head")
            head = first.head
            self._require_meant(head.store)
            if head.reservation_ids:
                results = await self._fill(head, requests)
            else:
                results = await self._put_directly(head, requests)
        except KvtierError as error:
            await refuse(context, error)
        return _put_response(results)

    async def _fill(
        self, head: pb.PutHead, requests: AsyncIterator[pb.PutBlocksRequest]
    ) -> list[PutResult]:
        ids = blocks.u64s_from("reservation_ids", head.reservation_ids)
        found = [self._parts.reservations.find(i, caller().name) for i in ids]
        if any(staged is None for staged in found):
            raise CallerError("reservation_ids: one is not open")
        staged_all = [staged for staged in found if staged is not None]
        if len({id(staged) for staged in staged_all}) != len(ids):
            raise CallerError("reservation_ids: one is named twice")
        gatherer = Gatherer(sum(staged.length for staged in staged_all))
        for staged in staged_all:
            staged.is_filled = False
            await _receive(gatherer, requests, memoryview(staged.buffer), staged.length)
            staged.is_filled = True
        await _finish(gatherer, requests)
        return [PutResult(PutStatus.STORED)] * len(ids)

    async def _put_directly(
        self, head: pb.PutHead, requests: AsyncIterator[pb.PutBlocksRequest]
    ) -> list[PutResult]:
        names = blocks.names_from(head.names)
        lengths = blocks.lengths_from(head.lengths, len(names))
        checksums: Sequence[int | None] = [None] * len(names)
        if head.checksums:
            checksums = blocks.u64s_from("checksums", head.checksums, len(names))
        terms = self._terms(head.writer)
        deadline_s = self._deadline(head.deadline_ms)
        self._learn(names, head.prefix_hashes)
        gatherer = Gatherer(sum(lengths))
        longest = self._parts.arena.payload_bytes_max
        results: list[PutResult] = []
        for run in grouped(lengths, GROUP_BLOCKS, GROUP_BYTES):
            kept = {i: lengths[i] for i in run if lengths[i] <= longest}
            async with self._parts.staging.room(sum(kept.values())):
                puts: dict[int, PutRequest] = {}
                for i in run:
                    buffer = memoryview(bytearray(lengths[i])) if i in kept else None
                    await _receive(gatherer, requests, buffer, lengths[i])
                    if buffer is not None:
                        puts[i] = PutRequest(
                            names[i], buffer, terms.owner, checksums[i], terms.retention
                        )
                done = await self._parts.store.put_many(
                    list(puts.values()), deadline_s, terms.reuse
                )
            by_position = dict(zip(puts, done, strict=True))
            too_long = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
            results += [by_position.get(i, too_long) for i in run]
        await _finish(gatherer, requests)
        return results

    async def announce(self, request: pb.AnnounceRequest, context: Context) -> pb.AnnounceResponse:
        try:
            names = blocks.names_from(request.names)
            self._learn(names, request.prefix_hashes)
        except KvtierError as error:
            await refuse(context, error)
        return pb.AnnounceResponse()

    # Keeping and dropping

    async def prefetch(self, request: pb.PrefetchRequest, context: Context) -> pb.PrefetchResponse:
        try:
            length = blocks.length_from(request.payload_bytes)
            names = [(name, length) for name in blocks.names_from(request.names)]
            options = _options(request.scope, request.skip_shared)
            begun = self._parts.store.prefetch(names, options)
        except KvtierError as error:
            await refuse(context, error)
        return pb.PrefetchResponse(begun=begun)

    async def pin(self, request: pb.PinBlocksRequest, context: Context) -> pb.PinBlocksResponse:
        try:
            names = blocks.names_from(request.names)
            length = blocks.length_from(request.payload_bytes)
            ttl_s = blocks.seconds_from("ttl_ms", request.ttl_ms, 1000 * PIN_TTL_S_MAX)
            deadline_s = self._deadline(request.deadline_ms)
            options = _options(request.scope, skip_shared=False)
            wanted = [(name, length) for name in names]
            async for _ in self._parts.store.bring_up(wanted, deadline_s, options):
                pass
            pinned = self._parts.store.pin(names, PinTerms(ttl_s, request.priority))
        except KvtierError as error:
            await refuse(context, error)
        kept = set(pinned.names)
        return pb.PinBlocksResponse(
            pin_id=pinned.pin_id, pinned=bytes(name in kept for name in names)
        )

    async def unpin(
        self, request: pb.UnpinBlocksRequest, context: Context
    ) -> pb.UnpinBlocksResponse:
        self._parts.store.unpin(PinId(request.pin_id))
        return pb.UnpinBlocksResponse()

    async def drop(self, request: pb.DropBlocksRequest, context: Context) -> pb.DropBlocksResponse:
        try:
            selection = _selection(request)
            if not isinstance(selection, ByNames) and caller().role not in _DROPPERS_OF_ALL:
                raise ForbiddenError("only operators drop what they do not name block by block")
            undone = ""
            dropped = 0
            try:
                dropped = await self._parts.store.drop(selection, self._deadline(0))
            except BackendError as error:
                undone = str(error)
            if isinstance(selection, ByScope):
                self._parts.erase(selection.scope)  # copies that nobody reached are erased too
        except KvtierError as error:
            await refuse(context, error)
        return pb.DropBlocksResponse(dropped=dropped, undone=undone)

    async def stats(self, _: pb.StoreStatsRequest, context: Context) -> pb.StoreStatsResponse:
        return self._parts.stats.response(self.epoch, self._parts.instance)

    # Pieces

    def _require_meant(self, instance: str) -> None:
        """Addresses move on: who asks for a store by its name is not to get another one."""
        if instance and instance != self._parts.instance:
            raise UnavailableError("another store stands at this address")

    def _deadline(self, deadline_ms: int) -> float:
        """A time of the store's clock; 0: as long as a call may take."""
        ms = deadline_ms or STORE_DEADLINE_MS_MAX
        return self._parts.clock() + blocks.seconds_from("deadline_ms", ms, STORE_DEADLINE_MS_MAX)

    def _terms(self, writer: pb.BlockWriter) -> PutTerms:
        reuse = Reuse.PREDICTED if writer.predicted else Reuse.UNKNOWN
        retention = blocks.retention_from(writer, self._parts.clock())
        return PutTerms(blocks.owner_from(writer), retention, reuse)

    def _learn(self, names: list[FrameName], column: bytes) -> None:
        if column:
            hashes = blocks.u64s_from("prefix_hashes", column, len(names))
            self._parts.announcer.learn(names, hashes, self._parts.watch)


def _options(scope: str, skip_shared: bool, predicted: bool = False) -> ReadOptions:
    return ReadOptions(
        blocks.scope_from(scope),
        Reuse.PREDICTED if predicted else Reuse.UNKNOWN,
        SharedTier.SKIP if skip_shared else SharedTier.ASK,
    )


def _selection(request: pb.DropBlocksRequest) -> Selection:
    match request.WhichOneof("selection"):
        case "names":
            return ByNames(tuple(blocks.names_from(request.names)))
        case "namespace":
            return ByNamespace(Fingerprint(request.namespace))
        case "scope":
            return ByScope(ScopeId(request.scope))
        case "writer_id":
            return ByWriter(request.writer_id)
    raise CallerError("selection: say what to drop")


def _put_response(results: Sequence[PutResult]) -> pb.PutBlocksResponse:
    reason = next((r.reason for r in results if not r.is_held), "")
    return pb.PutBlocksResponse(
        statuses=blocks.put_statuses(r.status for r in results), reason=str(reason)
    )


async def _next(requests: AsyncIterator[pb.PutBlocksRequest]) -> pb.PutBlocksRequest | None:
    """The next message; None at the end. DeadlineError for a client that says nothing."""
    try:
        async with asyncio.timeout(IDLE_S):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineError("no data for too long") from None


async def _receive(
    gatherer: Gatherer,
    requests: AsyncIterator[pb.PutBlocksRequest],
    buffer: memoryview | None,
    length: int,
) -> None:
    """Fill one block from the stream. CallerError where the stream ends before."""
    filled = gatherer.fill(buffer, length, 0)
    while filled < length:
        message = await _next(requests)
        if message is None or message.WhichOneof("part") != "data":
            raise CallerError("data: less than was declared")
        gatherer.add(message.data)
        filled = gatherer.fill(buffer, length, filled)


async def _finish(gatherer: Gatherer, requests: AsyncIterator[pb.PutBlocksRequest]) -> None:
    if not gatherer.is_whole or await _next(requests) is not None:
        raise CallerError("data: more than was declared")


async def refuse(context: Context, error: KvtierError) -> NoReturn:
    """End a call with the status that the error's class has; raises grpc's abort."""
    await context.abort(grpc.StatusCode[error.grpc_status], str(error))
    raise AssertionError("abort returned")

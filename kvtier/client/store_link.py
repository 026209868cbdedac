"""The calls of a store's client: over gRPC, to the store of this node or of another.

A store that does not answer is left alone for a while, so that its absence costs nothing. What
must not live here: shared memory, what is asked when.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from kvtier.core.checksum import checksum
from kvtier.core.frame import HEADER_BYTES, FrameHeader, parse_header
from kvtier.errors import (
    BackendError,
    CallerError,
    DeadlineError,
    FrameError,
    FrameFault,
    KvtierError,
    OverloadedError,
    UnavailableError,
)
from kvtier.limits import PAYLOAD_BYTES_MAX, STORE_CHUNK_BYTES_MAX
from kvtier.ports import GetRequest, GetResult, GetStatus, PutResult
from kvtier.sections import DialConfig
from kvtier.security import Dialer
from kvtier.store.values import Presence
from kvtier.wire import blocks, rpc
from kvtier.wire import messages as pb
from kvtier.wire.status import error_of

PRESENCES = tuple(Presence)
ABSENT = (UnavailableError, DeadlineError, BackendError, OverloadedError)
"""Errors that mean "no store": the caller misses."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """How long a store that is not there is left alone."""

    s_min: float = 0.05
    s_max: float = 1.0


@dataclass(slots=True)
class _Arriving:
    """Payloads of a Get stream as they fill the callers' memory."""

    requests: Sequence[GetRequest]
    results: list[GetResult | None]
    is_framed: bool = False
    """Whether each hit must come with its frame's header."""
    hits: list[tuple[int, FrameHeader, memoryview | None]] = field(default_factory=list)
    at: int = 0
    filled: int = 0


class StoreLink:
    """One store. Belongs to one event loop; raises errors of our tree only."""

    def __init__(self, dial: DialConfig, pauses: Pauses) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        if len(dial.targets) != 1:
            raise CallerError(f"targets: a store's client has one, got {len(dial.targets)}")
        self._dial = dial
        self._target = dial.targets[0]
        self._pauses = pauses
        self._dialer = Dialer(dial, self._target)
        self._failures = 0
        self._resume_s = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether the store did not answer lately, and is not asked."""
        return time.monotonic() < self._resume_s

    async def ask(self, name: str, request: Any, timeout_s: float) -> Any:
        """One unary call, tried once. UnavailableError at once while the store is left alone."""
        with self._judged():
            call = rpc.call(self._dialer.channel(), rpc.STORE, name)
            return await call(request, timeout=timeout_s)

    @contextlib.asynccontextmanager
    async def acquired(
        self, request: pb.AcquireRequest
    ) -> AsyncIterator[AsyncIterator[pb.AcquireResponse]]:
        """The answers of an Acquire; its leases end when this is left."""
        call: Any = None
        try:
            with self._judged():
                call = rpc.call(self._dialer.channel(), rpc.STORE, "Acquire")(request)
            yield self._answers(call)
        finally:
            if call is not None:
                call.cancel()

    async def get_many(
        self, requests: Sequence[GetRequest], head: pb.GetBlocksRequest, timeout_s: float
    ) -> list[GetResult]:
        """Read blocks as chunks, straight into the requests' memory, each checked when whole."""
        arriving = _Arriving(requests, [None] * len(requests), head.framed)
        with self._judged():
            call = rpc.call(self._dialer.channel(), rpc.STORE, "Get")(head, timeout=timeout_s)
            try:
                async for message in call:
                    _take(arriving, message)
            finally:
                call.cancel()
        missing = GetResult(GetStatus.ERROR, reason="incomplete")
        return [result or missing for result in arriving.results]

    async def put_many(
        self, head: pb.PutHead, payloads: Sequence[memoryview], timeout_s: float
    ) -> list[PutResult]:
        """Send blocks as chunks; the payloads are read until this returns."""
        with self._judged():
            call = rpc.call(self._dialer.channel(), rpc.STORE, "Put")
            answer = await call(_chunks(head, payloads), timeout=timeout_s)
        statuses = blocks.put_statuses_from(answer.statuses)
        if len(statuses) != len(payloads):
            raise BackendError("the store answered for other blocks")
        return [
            PutResult(status, "" if PutResult(status).is_held else answer.reason)
            for status in statuses
        ]

    async def close(self) -> None:
        """End all calls and connections at once."""
        await self._dialer.close()

    async def _answers(self, call: Any) -> AsyncIterator[pb.AcquireResponse]:
        with self._judged():
            async for message in call:
                yield message

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """Translate errors, and remember whether the store is there."""
        if self.is_paused:
            raise UnavailableError(f"{self._target} did not answer lately")
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failed = error_of(error, self._target)
            if isinstance(failed, UnavailableError):
                self._fail()
            raise failed from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise UnavailableError(f"{self._target}: {error}") from error
        except asyncio.CancelledError:
            # Who connects anew because another call failed ends all calls of the old connection.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnavailableError(f"{self._target}: the connection was given up") from None
        self._failures = 0

    def _fail(self) -> None:
        """The store is not there: leave it alone, and then connect anew rather than wait."""
        self._failures += 1
        pause = min(self._pauses.s_max, self._pauses.s_min * 2 ** min(self._failures - 1, 20))
        self._resume_s = time.monotonic() + pause
        with contextlib.suppress(KvtierError):  # credential files that are being replaced
            retired, self._dialer = self._dialer, Dialer(self._dial, self._target)
            task = asyncio.get_running_loop().create_task(retired.close())
            _RETIRED.add(task)
            task.add_done_callback(_RETIRED.discard)


_RETIRED: set[asyncio.Task[None]] = set()


async def _chunks(
    head: pb.PutHead, payloads: Sequence[memoryview]
) -> AsyncIterator[pb.PutBlocksRequest]:
    yield pb.PutBlocksRequest(head=head)
    pending: list[memoryview] = []
    size = 0
    for payload in payloads:
        at = 0
        while at < payload.nbytes:
            part = payload[at : at + STORE_CHUNK_BYTES_MAX - size]
            pending.append(part)
            size += part.nbytes
            at += part.nbytes
            if size == STORE_CHUNK_BYTES_MAX:
                yield pb.PutBlocksRequest(data=b"".join(pending))
                pending, size = [], 0
    if pending:
        yield pb.PutBlocksRequest(data=b"".join(pending))


def _take(arriving: _Arriving, message: pb.GetBlocksResponse) -> None:
    """Take one message: what is said of blocks first, then bytes."""
    statuses = blocks.get_statuses_from(message.statuses)
    hits = sum(status is GetStatus.HIT for status in statuses)
    lengths = iter(blocks.u64s_from("lengths", message.lengths, hits))
    sums = iter(blocks.u64s_from("checksums", message.checksums, hits))
    writers = iter(blocks.u64s_from("writer_ids", message.writer_ids, hits))
    frames = iter(
        message.headers[i : i + HEADER_BYTES] for i in range(0, len(message.headers), HEADER_BYTES)
    )
    if arriving.at + len(statuses) > len(arriving.requests):
        raise BackendError("the store answered for more blocks than were asked for")
    for status in statuses:
        position, arriving.at = arriving.at, arriving.at + 1
        if status is GetStatus.HIT:
            length = next(lengths)
            if length > PAYLOAD_BYTES_MAX:
                raise BackendError("the store says a length that cannot be")
            request = arriving.requests[position]
            header = FrameHeader(request.name, next(writers), length, next(sums))
            target = _target(arriving, position, header)
            if arriving.is_framed and (fault := _fault(header, next(frames, b""))) is not None:
                target, arriving.results[position] = None, fault
            arriving.hits.append((position, header, target))
        else:
            arriving.results[position] = GetResult(status)
    _fill(arriving, memoryview(message.data))


def _fault(header: FrameHeader, frame: bytes) -> GetResult | None:
    """None where a frame's header is whole, and of the block that was asked for with these bytes.

    A store of an earlier release sends no headers: an error, which is nobody's corruption.
    """
    if not frame:
        return GetResult(GetStatus.ERROR, reason="unframed")
    try:
        is_right = parse_header(frame) == header
    except FrameError as error:
        return GetResult(GetStatus.CORRUPT, reason=error.fault.value)
    fault = FrameFault.HEADER_FIELD.value
    return None if is_right else GetResult(GetStatus.CORRUPT, reason=fault)


def _target(arriving: _Arriving, position: int, header: FrameHeader) -> memoryview | None:
    """Memory for a payload; None, and the outcome said, where it does not fit."""
    request = arriving.requests[position]
    if request.payload_bytes not in {None, header.payload_bytes}:
        arriving.results[position] = GetResult(GetStatus.CORRUPT, reason=FrameFault.LENGTH.value)
        return None
    if request.into is None:
        return memoryview(bytearray(header.payload_bytes))
    if request.into.nbytes < header.payload_bytes:
        arriving.results[position] = GetResult(GetStatus.ERROR, reason="buffer_short")
        return None
    return request.into[: header.payload_bytes]


def _fill(arriving: _Arriving, data: memoryview) -> None:
    """Put bytes where they belong; a block that is whole is checked and done."""
    while arriving.hits:
        position, header, target = arriving.hits[0]
        part = data[: header.payload_bytes - arriving.filled]
        if target is not None:
            target[arriving.filled : arriving.filled + part.nbytes] = part
        arriving.filled += part.nbytes
        data = data[part.nbytes :]
        if arriving.filled < header.payload_bytes:
            return
        if target is not None:
            arriving.results[position] = _checked(header, target)
        arriving.hits.pop(0)
        arriving.filled = 0
    if data.nbytes:
        raise BackendError("the store sent more bytes than it said")


def _checked(header: FrameHeader, payload: memoryview) -> GetResult:
    if checksum(payload) != header.payload_checksum:
        return GetResult(GetStatus.CORRUPT, reason=FrameFault.PAYLOAD_CHECKSUM.value)
    return GetResult(GetStatus.HIT, payload, header)

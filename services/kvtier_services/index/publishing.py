"""One publisher's stream: messages in, the core's replies out, acknowledgements gathered.

What must not live here: what a message does (state.py).
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from kvtier.core.event_columns import PackedBatch
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Fence,
    Heartbeat,
    Hello,
    Reply,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotMark,
    TierDigest,
)
from kvtier.core.events import Outcome, Verdict
from kvtier.core.workers import Load
from kvtier.errors import CallerError, ForbiddenError, IdentityError, LimitError
from kvtier.security.guard import caller
from kvtier.types import Epoch, Seq
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb
from kvtier_services.index.metrics import IndexMetrics
from kvtier_services.index.state import IndexState, Stream, StreamState

Context = grpc.aio.ServicerContext[Any, Any]

ACK_DELAY_S: Final = 0.02
"""Acknowledgements of one stream are gathered for so long: one message instead of hundreds."""
_WAITING: Final = frozenset({Verdict.STAGED, Verdict.HELD})
"""Nothing new can be acknowledged while a snapshot arrives, so the last number is said again: a
publisher that heard nothing for as long as that takes would give up and begin anew, for ever."""


class PublishStream:
    """Serves one Publish call from its Hello to its end."""

    def __init__(
        self,
        state: IndexState,
        clock: Callable[[], float],
        welcome: pb.Welcome,
        metrics: IndexMetrics,
    ) -> None:
        self._metrics = metrics
        self._state = state
        self._clock = clock
        self._welcome = welcome
        self._stream: Stream | None = None
        self._known: StreamState | None = None
        """What the state knew of `_stream` at its Hello."""
        self._epoch = Epoch(0)
        self._owes_welcome = False
        self._hello_asked = False
        self._acked = asyncio.Event()
        self._ack_seq = 0

    async def serve(self, context: Context) -> None:
        """Read until the publisher ends, is fenced or refused, or floods."""
        acks = asyncio.create_task(self._send_acks(context))
        try:
            while True:
                request = await context.read()
                if request is grpc.aio.EOF or not await self._take(request, context):
                    break
        finally:
            if self._stream is not None:
                self._state.disconnected(self._stream, connection=self)
            acks.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acks

    async def _take(self, request: pb.PublishRequest, context: Context) -> bool:
        """Handle one message; False when the stream is over."""
        kind = request.WhichOneof("message")
        try:
            if kind == "hello":
                return await self._hello(request.hello, context)
            if self._stream is None:
                raise CallerError(f"a stream begins with Hello, not with {kind}")
            if self._state.stream(self._stream) is not self._known:
                return await self._unknown(kind, context)
            if kind == "goodbye":
                self._state.goodbye(self._stream, self._epoch)
                return False
            began = self._clock()
            outcome = self._outcome(kind, request)
            self._metrics.apply_took(self._clock() - began)
        except LimitError as error:
            # Whatever else this publisher holds is still right; it may not hold more.
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except CallerError as error:
            await context.abort(grpc.StatusCode[error.grpc_status], str(error))
        return await self._reply(outcome, context)

    async def _unknown(self, kind: str | None, context: Context) -> bool:
        """The holder was forgotten under the open stream: what comes before a Hello is nobody's."""
        if kind != "goodbye" and not self._hello_asked:
            self._hello_asked = True
            await context.write(pb.PublishResponse(hello_needed=pb.HelloNeeded()))
        return kind != "goodbye"

    def _outcome(self, kind: str | None, request: pb.PublishRequest) -> Outcome[PackedBatch]:
        """What a message does; one whose columns cannot be read makes the stream DEGRADED."""
        assert self._stream is not None
        now = self._clock()
        match kind:
            case "heartbeat":
                return self._heartbeat(self._stream, request.heartbeat, now)
            case "batch":
                message, handle = request.batch, self._batch
            case "snapshot":
                message, handle = request.snapshot.batch, self._snapshot
            case _:
                raise CallerError("an empty message, or one that this version does not know")
        try:
            columns = convert.packed_from(message)
        except CallerError:
            return self._state.undecodable(self._stream, self._epoch, now)
        return handle(self._stream, request, columns, now)

    def _batch(
        self, stream: Stream, request: pb.PublishRequest, columns: PackedBatch, now: float
    ) -> Outcome[PackedBatch]:
        batch = Batch(self._epoch, Seq(request.batch.seq), columns, columns.payload_bytes)
        return self._state.batch(stream, batch, now)

    def _snapshot(
        self, stream: Stream, request: pb.PublishRequest, columns: PackedBatch, now: float
    ) -> Outcome[PackedBatch]:
        chunk = request.snapshot
        mark = SnapshotMark(self._epoch, chunk.mark.snapshot_id, Seq(chunk.mark.at_seq))
        piece = SnapshotChunk(mark, chunk.number, chunk.last, columns)
        return self._state.snapshot(stream, piece, now)

    def _heartbeat(self, stream: Stream, beat: pb.Heartbeat, now: float) -> Outcome[PackedBatch]:
        digest = tuple(TierDigest(one.count, one.xor) for one in beat.digests) or None
        load = holders.load_from(beat.load) if beat.HasField("load") else Load()
        message = Heartbeat(self._epoch, Seq(beat.seq), digest)
        return self._state.heartbeat(stream, message, load, now)

    async def _hello(self, hello: pb.Hello, context: Context) -> bool:
        try:
            info = convert.info_from(hello)
            caller().require_instance(info.instance)
            self._epoch = Epoch(hello.epoch)
            self._owes_welcome = True
            self._hello_asked = False
            self._ack_seq = 0
            message = Hello(self._epoch, Seq(hello.seq))
            self._stream, outcome = self._state.hello(info, message, self, self._clock())
            self._known = self._state.stream(self._stream)
        except IdentityError as error:
            await context.write(pb.PublishResponse(refused=pb.Refused(reason=str(error))))
            return False
        except ForbiddenError as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return await self._reply(outcome, context)

    async def _reply(self, outcome: Outcome[PackedBatch], context: Context) -> bool:
        """Send what the outcome says to the publisher; False once it is fenced."""
        if outcome.verdict in _WAITING:
            self._acked.set()
        for action in outcome.actions:
            if isinstance(action, AckUpTo):
                self._ack_seq = max(self._ack_seq, action.seq)
                self._acked.set()
            elif isinstance(action, Reply):
                await context.write(self._message(action))
                if isinstance(action, Fence):
                    return False
        return True

    def _message(self, reply: Reply) -> pb.PublishResponse:
        match reply:
            case Resume(_, after_seq):
                return self._welcomed(resume_after_seq=after_seq)
            case RequestSnapshot() if self._owes_welcome:
                return self._welcomed(need_snapshot=True)
            case RequestSnapshot(_, reason):
                needed = pb.SnapshotNeeded(reason=reason)
                return pb.PublishResponse(snapshot_needed=needed)
            case RequestResend(_, from_seq):
                return pb.PublishResponse(resend=pb.ResendRequest(from_seq=from_seq))
            case RequestHello():
                return pb.PublishResponse(hello_needed=pb.HelloNeeded())
            case Fence(_, reason):
                return pb.PublishResponse(fenced=pb.Fenced(reason=reason))
            case AckUpTo(_, seq):
                return pb.PublishResponse(ack=pb.Ack(seq=seq))

    def _welcomed(
        self, *, resume_after_seq: int = 0, need_snapshot: bool = False
    ) -> pb.PublishResponse:
        """Answer a Hello: only a Welcome tells a publisher how long its lease is."""
        self._owes_welcome = False
        welcome = pb.Welcome(resume_after_seq=resume_after_seq, need_snapshot=need_snapshot)
        welcome.MergeFrom(self._welcome)
        return pb.PublishResponse(welcome=welcome)

    async def _send_acks(self, context: Context) -> None:
        while True:
            await self._acked.wait()
            await asyncio.sleep(ACK_DELAY_S)
            self._acked.clear()
            await context.write(pb.PublishResponse(ack=pb.Ack(seq=self._ack_seq)))

"""One publisher's stream: messages in, the core's replies out, acknowledgements gathered.

What must not live here: what a message does (state.py).
"""

import asyncio
from collections import deque
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
from kvtier.errors import CallerError, ForbiddenError, IdentityError, KvtierError, LimitError
from kvtier.security.guard import caller
from kvtier.types import Epoch, Seq
from kvtier.wire import convert, holders, rpc
from kvtier.wire import messages as pb
from kvtier_services.index.metrics import IndexMetrics
from kvtier_services.index.state import IndexState, Stream, StreamState

Context = grpc.aio.ServicerContext[Any, Any]

ACK_DELAY_S: Final = 0.02
"""Acknowledgements of one stream are gathered for so long: one message instead of hundreds."""
GATHER_S: Final = 0.001
"""From one turn to the next, so that messages come in company."""
WAITING_COUNT_MAX: Final = 32
"""Messages of one stream that wait to be taken in; of large ones only one does."""
LARGE_BYTES: Final = 128 << 10
TURN_S_MAX: Final = 0.005
"""How long messages are taken in before others have their turn."""
REPLIES_COUNT_MAX: Final = 16
"""Replies that wait for one publisher before nothing more is read from it."""
_PUBLISH: Final = rpc.methods(rpc.INDEX)["Publish"]
_WAITING: Final = frozenset({Verdict.STAGED, Verdict.HELD})
"""Nothing new can be acknowledged while a snapshot arrives, so the last number is said again: a
publisher that heard nothing for as long as that takes would give up and begin anew, for ever."""


class Intake:
    """What the publishers of one event loop have sent, taken in together once a millisecond.

    A stream keeps its messages and asks gRPC for the next one at once, so gRPC fetches while
    messages are taken in; and those that are taken in one after the other find the caches warm.
    What comes after a pause is taken in at once. Work beyond `TURN_S_MAX` waits for the next turn
    of the loop, behind the calls that came meanwhile; so does each next slice of a large snapshot,
    and what its stream says then.
    """

    def __init__(self, state: IndexState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock
        self._waiting: deque[PublishStream] = deque()
        """Streams whose messages wait, each once."""
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Handle | None = None
        self._gather_until = 0.0

    def put(self, stream: "PublishStream") -> None:
        """Take in what waits in `stream`, which is not waiting yet."""
        self._waiting.append(stream)
        if self._due is None:
            pause_s = self._gather_until - self._clock()
            if pause_s > 0:
                self._due = self._loop.call_later(pause_s, self._take_in)
            else:
                self._due = self._loop.call_soon(self._take_in)

    def hurry(self) -> None:
        """Wait for no more company."""
        if isinstance(self._due, asyncio.TimerHandle):
            self._due.cancel()
            self._due = self._loop.call_soon(self._take_in)

    def _take_in(self) -> None:
        self._due = None
        waiting = self._waiting
        now = self._clock()
        until = now + TURN_S_MAX
        postponed = []
        try:
            while waiting and now < until:
                stream = waiting.popleft()
                if stream.is_replacing:
                    postponed.append(stream)
                    continue
                now = stream.take(now)
                if stream.has_waiting:
                    waiting.append(stream)
            if self._state.has_work:
                done = self._state.work(now)
                if isinstance(done, PublishStream):
                    done.replaced()
        finally:  # a bug in one stream is reported by the loop and does not hold up the others
            waiting.extendleft(reversed(postponed))
            self._gather_until = now + GATHER_S
            if waiting or self._state.has_work:
                self._due = self._loop.call_soon(self._take_in)


class PublishStream:
    """Serves one Publish call from its Hello to its end."""

    def __init__(
        self,
        state: IndexState,
        clock: Callable[[], float],
        welcome: pb.Welcome,
        metrics: IndexMetrics,
        intake: Intake,
    ) -> None:
        self._metrics = metrics
        self._state = state
        self._clock = clock
        self._welcome = welcome
        self._intake = intake
        self._caller = caller()
        """Asked for now: messages are taken in outside of the call's own context."""
        self._stream: Stream | None = None
        self._known: StreamState | None = None
        """What the state knew of `_stream` at its Hello."""
        self._epoch = Epoch(0)
        self._owes_welcome = False
        self._hello_asked = False
        self._loop = asyncio.get_running_loop()
        self._ack_seq = 0
        self._ack_timer: asyncio.TimerHandle | None = None
        self._replies: deque[pb.PublishResponse] = deque()
        self._to_send = asyncio.Event()
        self._sent = asyncio.Event()
        self._waiting: list[bytes] = []
        """What was read and not yet taken in."""
        self._taken = asyncio.Event()
        """Set whenever nothing waits any more."""
        self._is_ending = False
        self._error: KvtierError | None = None

    async def serve(self, context: Context) -> None:
        """Read until the publisher ends, is fenced or refused, or floods."""
        reading = asyncio.create_task(self._read(context))
        sending = asyncio.create_task(self._send(context))
        try:
            await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            await self._all_taken()  # what was read last may still wait for its turn
            if not sending.done():
                # Not cancelled: in the midst of a write that would spoil the status of the call.
                self._end(self._error)
                await asyncio.wait({sending})
        finally:
            self._is_ending = True
            if self._stream is not None:
                self._state.disconnected(self._stream, connection=self)
            if self._ack_timer is not None:
                self._ack_timer.cancel()
            for task in (reading, sending):
                task.cancel()
            ends = await asyncio.gather(reading, sending, return_exceptions=True)
        if self._error is not None:
            await context.abort(_status(self._error), str(self._error))
        for end in ends:
            # What gRPC raises where the publisher is gone is no news.
            if isinstance(end, Exception) and not isinstance(end, grpc.aio.InternalError):
                raise end

    async def _read(self, context: Context) -> None:
        read, waiting, put = context.read, self._waiting, self._intake.put
        while (message := await read()) is not grpc.aio.EOF:
            waiting.append(message)
            count = len(waiting)
            if count == 1:
                put(self)
            if count >= WAITING_COUNT_MAX or len(message) > LARGE_BYTES:
                self._intake.hurry()
                await self._all_taken()
            while len(self._replies) > REPLIES_COUNT_MAX or self._is_ending:
                self._sent.clear()  # it does not read what it is told: read no more from it
                await self._sent.wait()

    async def _all_taken(self) -> None:
        while self._waiting:
            self._taken.clear()
            await self._taken.wait()

    async def _send(self, context: Context) -> None:
        """Write replies in their order; ends when the stream is to end."""
        while not self._is_ending or self._replies:
            await self._to_send.wait()
            self._to_send.clear()
            while self._replies:
                await context.write(self._replies.popleft())
            self._sent.set()

    @property
    def is_replacing(self) -> bool:
        """Whether a large snapshot of this stream is on its way into the index."""
        return self._known is not None and self._known.replacement is not None

    def replaced(self) -> None:
        """The snapshot is in, with all that was said after it: now it can be acknowledged."""
        if self._known is not None:
            self._ack_seq = self._known.acceptor.applied_seq
            self._acknowledge()

    @property
    def has_waiting(self) -> bool:
        """Whether a message waits to be taken in."""
        return bool(self._waiting)

    def take(self, now: float) -> float:
        """Handle the message that waits longest, and at once those behind it that are plain.

        Returns the time after that.
        """
        waiting, is_bug, count = self._waiting, True, 1
        try:
            count = 0 if self._is_ending else self._advance(now) or self._take_one(now)
            is_bug = False
        except (CallerError, ForbiddenError) as error:
            self._end(error)
            is_bug = False
        finally:
            if is_bug:
                self._end(None)
            if self._is_ending:  # nobody hears what waits behind it
                waiting.clear()
            else:
                del waiting[:count]
            if not waiting:
                self._taken.set()
        ended = self._clock()
        self._metrics.apply_took(ended - now, count)
        return ended

    def _advance(self, now: float) -> int:
        """Take in batches that come next, as many as nothing stands in the way of."""
        stream = self._stream
        known = self._known
        if stream is None or known is None or self._state.stream(stream) is not known:
            return 0
        count = self._state.advance(stream, self._epoch, self._waiting, now)
        if count:
            self._ack_seq = known.acceptor.applied_seq
            self._acknowledge()
        return count

    def _take_one(self, now: float) -> int:
        """Take in whatever comes next; returns 1, which is how many messages that was."""
        outcome = self._outcome(rpc.parsed(_PUBLISH, self._waiting[0]), now)
        if outcome is not None:
            self._reply(outcome)
        return 1

    def leave(self, reason: KvtierError) -> None:
        """End the stream for a reason of the index's own: say how far it was heard, then why."""
        if not self._is_ending:
            if self._ack_timer is not None:
                self._ack_timer.cancel()
                self._say_ack()
            self._end(reason)

    def _end(self, error: KvtierError | None) -> None:
        """The stream is over once what it is still to be told is sent."""
        self._is_ending, self._error = True, error
        self._to_send.set()

    def _say(self, response: pb.PublishResponse) -> None:
        self._replies.append(response)
        self._to_send.set()

    def _outcome(self, request: pb.PublishRequest, now: float) -> Outcome[PackedBatch] | None:
        """What a message does; None where it has been answered already."""
        kind = request.WhichOneof("message")
        if kind == "hello":
            return self._hello(request.hello, now)
        if self._stream is None:
            raise CallerError(f"a stream begins with Hello, not with {kind}")
        if self._state.stream(self._stream) is not self._known:
            self._unknown(kind)
            return None
        match kind:
            case "batch":
                message, handle = request.batch, self._batch
            case "snapshot":
                message, handle = request.snapshot.batch, self._snapshot
            case "heartbeat":
                return self._heartbeat(self._stream, request.heartbeat, now)
            case "goodbye":
                self._state.goodbye(self._stream, self._epoch)
                self._end(None)
                return None
            case _:
                raise CallerError("an empty message, or one that this version does not know")
        try:
            columns = convert.packed_from(message)
        except CallerError:  # the stream becomes DEGRADED
            return self._state.undecodable(self._stream, self._epoch, now)
        return handle(self._stream, request, columns, now)

    def _unknown(self, kind: str | None) -> None:
        """The holder was forgotten under the open stream: what comes before a Hello is nobody's."""
        if kind == "goodbye":
            self._end(None)
        elif not self._hello_asked:
            self._hello_asked = True
            self._say(pb.PublishResponse(hello_needed=pb.HelloNeeded()))

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
        trust = convert.said_trust_from(beat.trust)
        message = Heartbeat(self._epoch, Seq(beat.seq), digest, trust)
        return self._state.heartbeat(stream, message, load, now)

    def _hello(self, hello: pb.Hello, now: float) -> Outcome[PackedBatch] | None:
        try:
            info = convert.info_from(hello)
            self._caller.require_instance(info.instance)
            self._epoch = Epoch(hello.epoch)
            self._owes_welcome = True
            self._hello_asked = False
            self._ack_seq = 0
            trust = convert.said_trust_from(hello.trust)
            message = Hello(self._epoch, Seq(hello.seq), trust)
            self._stream, outcome = self._state.hello(info, message, self, now)
        except IdentityError as error:
            self._say(pb.PublishResponse(refused=pb.Refused(reason=str(error))))
            self._end(None)
            return None
        self._known = self._state.stream(self._stream)
        return outcome

    def _reply(self, outcome: Outcome[PackedBatch]) -> None:
        """Say what the outcome says to the publisher; a fence ends the stream."""
        if outcome.verdict in _WAITING:
            self._acknowledge()
        for action in outcome.actions:
            if isinstance(action, AckUpTo):
                if not self.is_replacing:
                    self._ack_seq = max(self._ack_seq, action.seq)
                    self._acknowledge()
            elif isinstance(action, Reply):
                self._say(self._message(action))
                if isinstance(action, Fence):
                    self._end(None)

    def _acknowledge(self) -> None:
        if self._ack_timer is None:
            self._ack_timer = self._loop.call_later(ACK_DELAY_S, self._say_ack)

    def _say_ack(self) -> None:
        self._ack_timer = None
        self._say(pb.PublishResponse(ack=pb.Ack(seq=self._ack_seq)))

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


def _status(error: KvtierError) -> grpc.StatusCode:
    """LimitError: what else this publisher holds is still right, but it may not hold more."""
    if isinstance(error, LimitError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode[error.grpc_status]

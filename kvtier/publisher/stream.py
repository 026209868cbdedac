"""The stream to one index replica: opens it, feeds it from the outbox, opens it again.

What must not live here: what is sent (`Publication`), the engine's side (`outbox`).
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
import grpc.aio

from kvtier.core.event_messages import (
    AckUpTo,
    Heartbeat,
    Hello,
    RequestHello,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
)
from kvtier.core.fleet import HolderInfo
from kvtier.core.workers import Load
from kvtier.errors import CallerError
from kvtier.publisher import requests
from kvtier.publisher.config import PublisherConfig
from kvtier.publisher.outbox import Outbox
from kvtier.publisher.stats import StreamState, StreamStats
from kvtier.security import Dialer
from kvtier.telemetry.logs import EventLog
from kvtier.types import Epoch, Seq, Trust
from kvtier.wire import messages as pb
from kvtier.wire import rpc
from kvtier.wire.loop_thread import raise_if_cancelled

LOG = EventLog("kvtier.publisher")

_POLL_MESSAGES_MAX = 16
_LASTING = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Trying again at once would end the same way."""
_JITTER = secrets.SystemRandom()


class Owner(Protocol):
    """What a stream needs of its publisher. Called on the publishing thread."""

    info: HolderInfo
    load: Load | None

    def progressed(self) -> None:
        """An acknowledgement came, or a stream opened or ended."""

    def refused(self, target: str, reason: str) -> None: ...


@dataclass(slots=True)
class _Counts:
    opened: int = 0
    welcomed: int = 0
    failures: int = 0
    refusals: int = 0
    messages_sent: int = 0
    heartbeats_sent: int = 0
    last_error: str = ""


class PublishStream:
    """Feeds one replica for as long as `run` runs. Belongs to one event loop."""

    def __init__(
        self,
        dialer: Dialer,
        target: str,
        outbox: Outbox,
        owner: Owner,
        config: PublisherConfig,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self.state = StreamState.IDLE
        self._dialer = dialer
        self._outbox = outbox
        self._owner = owner
        self._config = config
        self._clock = clock
        self._counts = _Counts()
        self._wake = asyncio.Event()
        self._is_open = False
        self._goodbye: str | None = None
        self._epoch = Epoch(0)
        self._index_epoch = 0
        self._acked_seq = 0
        self._owes_snapshot = False
        self._is_snapshot_sent = False
        self._beat_s = config.heartbeat_s
        self._silence_s = config.silence_s
        self._failures_in_row = 0
        self._live_since: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a call is under way, answered or not."""
        return self._is_open

    def has_acked(self, seq: Seq) -> bool:
        """Whether the replica holds everything up to a batch, snapshots that it asked for too."""
        is_settled = self.state is StreamState.LIVE and not self._owes_snapshot
        return is_settled and self._acked_seq >= seq

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    def say_goodbye(self, reason: str) -> None:
        """Leave for good: what is due is sent first, then the stream ends, and `run` with it."""
        self._goodbye = reason
        self._wake.set()

    def stats(self) -> StreamStats:
        counts = self._counts
        return StreamStats(
            target=self.target,
            state=self.state,
            lag_batches=self._outbox.lag_batches(self.target),
            index_epoch=self._index_epoch,
            opened=counts.opened,
            welcomed=counts.welcomed,
            failures=counts.failures,
            refusals=counts.refusals,
            messages_sent=counts.messages_sent,
            heartbeats_sent=counts.heartbeats_sent,
            last_error=counts.last_error,
        )

    async def run(self) -> None:
        """Publish until fenced, until goodbye was said, or cancelled."""
        try:
            while self._goodbye is None and self._outbox.fenced is None:
                await self._attempt()
                self._owner.progressed()
                raise_if_cancelled()
                if self._goodbye is None and self._outbox.fenced is None:
                    await asyncio.sleep(self._pause_s())
        finally:
            fenced = self._outbox.fenced is not None
            self.state = StreamState.FENCED if fenced else StreamState.CLOSED
            await self._dialer.close()
            self._owner.progressed()

    def _pause_s(self) -> float:
        """Exponential, with the upper half at random so that publishers do not come in step."""
        if self.state is StreamState.REFUSED:
            return self._config.refused_retry_s
        doublings = min(self._failures_in_row, 30)
        longest = min(self._config.reconnect_s_max, self._config.reconnect_s_min * 2.0**doublings)
        return longest * _JITTER.uniform(0.5, 1.0)

    async def _attempt(self) -> None:
        """One stream from its Hello to its end, whatever ends it."""
        self._failures_in_row += 1
        self._live_since = None
        try:
            await self._session()
            if self.state is not StreamState.REFUSED:
                self.state = StreamState.IDLE
        except TimeoutError:
            self._failed(f"nothing was heard for {self._silence_s:g} s")
        except grpc.aio.AioRpcError as error:
            self._ended(error)
        except (CallerError, grpc.aio.UsageError) as error:
            self._failed(str(error))
        lived_s = 0.0 if self._live_since is None else self._clock() - self._live_since
        if lived_s > self._config.reconnect_s_max:
            self._failures_in_row = 0
        # A channel that failed would wait before it connects again; this loop does that already.
        await self._dialer.close()

    def _ended(self, error: grpc.aio.AioRpcError) -> None:
        code, reason = error.code(), f"{error.code().name}: {error.details()}"
        too_much = code is grpc.StatusCode.RESOURCE_EXHAUSTED and self._live_since is not None
        self._failed(reason)
        if too_much or code in _LASTING:
            self._refuse(reason)

    def _failed(self, reason: str) -> None:
        self.state = StreamState.IDLE
        self._counts.failures += 1
        self._counts.last_error = reason
        if self._failures_in_row == 1:
            LOG.warning("index stream lost", target=self.target, reason=reason)

    def _refuse(self, reason: str) -> None:
        self.state = StreamState.REFUSED
        self._counts.refusals += 1
        self._counts.last_error = reason
        LOG.error("index refuses this publisher", target=self.target, reason=reason)
        self._owner.refused(self.target, reason)

    async def _session(self) -> None:
        call_publish = rpc.call(self._dialer.channel(), rpc.INDEX, "Publish")
        self._epoch = self._outbox.attach(self.target)
        self.state = StreamState.GREETING
        self._acked_seq = 0
        self._owes_snapshot = self._is_snapshot_sent = False
        self._counts.opened += 1
        self._is_open = True
        call = call_publish(self._requests())
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    response = await call.read()
                if response is grpc.aio.EOF or not self._take(response):
                    break
        finally:
            self._is_open = False
            self._wake.set()
            call.cancel()

    def _take(self, response: pb.PublishResponse) -> bool:
        """Act on what the index said; False when the stream is over."""
        reply = requests.reply(response, self._epoch)
        if reply is None:
            self._refuse(response.refused.reason)
            return False
        match reply:
            case RequestSnapshot():
                self._owes_snapshot, self._is_snapshot_sent = True, False
                if response.HasField("welcome"):
                    self._welcomed(response.welcome)
                elif self.state is StreamState.GREETING:
                    self._went_live()
            case Resume():
                self._acked_seq = reply.after_seq
                self._welcomed(response.welcome)
            case RequestHello():
                self.state = StreamState.GREETING
            case AckUpTo():
                self._acked(reply)
        self._outbox.receive(self.target, reply)
        self._wake.set()
        return self._outbox.fenced is None

    def _acked(self, ack: AckUpTo) -> None:
        self._acked_seq = max(self._acked_seq, ack.seq)
        if self._is_snapshot_sent:
            # An index that waits for a snapshot acknowledges nothing before it is whole.
            self._owes_snapshot = self._is_snapshot_sent = False
        self._owner.progressed()

    def _welcomed(self, welcome: pb.Welcome) -> None:
        if welcome.heartbeat_ms or welcome.lease_ms:
            self._beat_s = (welcome.heartbeat_ms or welcome.lease_ms / 3) / 1000
        self._silence_s = max(3 * self._beat_s, self._config.silence_s)
        self._index_epoch = welcome.index_epoch
        self._went_live()

    def _went_live(self) -> None:
        self.state = StreamState.LIVE
        self._counts.welcomed += 1
        self._live_since = self._clock()
        self._owner.progressed()

    # ---- what is sent

    async def _requests(self) -> AsyncIterator[bytes]:
        """Everything for this stream, in order, as fast as the index takes it."""
        rhythm = _Rhythm(self._config, self._clock(), self._outbox.trust(self.target))
        while self._is_open:
            self._wake.clear()
            messages = self._outbox.poll(self.target, _POLL_MESSAGES_MAX)
            for message in messages:
                self._counts.messages_sent += 1
                yield requests.request(message, self._owner.info, None)
                if isinstance(message, SnapshotChunk):
                    self._owes_snapshot, self._is_snapshot_sent = True, message.last
            load = self._owner.load
            is_news = self._outbox.trust(self.target) is not rhythm.trust
            if is_news or rhythm.is_due(self._clock(), load, self._beat_s):
                beat = self._outbox.heartbeat(self.target)
                if beat is not None:
                    self._counts.heartbeats_sent += 1
                    beat = rhythm.sent(self._clock(), load, beat)
                    yield requests.request(beat, self._owner.info, load)
            elif not messages:
                if self._goodbye is not None:
                    yield requests.goodbye(self._goodbye)
                    return
                await self._wait(rhythm.wait_s(self._clock(), load, self._beat_s))

    async def _wait(self, longest_s: float) -> None:
        try:
            async with asyncio.timeout(longest_s):
                await self._wake.wait()
        except TimeoutError:
            return


class _Rhythm:
    """When the next heartbeat of one stream is due, and what it carries."""

    def __init__(self, config: PublisherConfig, now: float, trust: Trust) -> None:
        self.trust = trust
        """What was said last."""
        self._config = config
        self._sent_at = now
        self._digest_at = float("-inf")
        self._load: Load | None = None

    def is_due(self, now: float, load: Load | None, beat_s: float) -> bool:
        interval = self._config.load_interval_s if load is not self._load else beat_s
        return now - self._sent_at >= min(interval, beat_s)

    def wait_s(self, now: float, load: Load | None, beat_s: float) -> float:
        """How long nothing can become due. A load that changes wakes nobody: it is looked for."""
        until_beat = self._sent_at + beat_s - now
        longest = until_beat if load is None else min(until_beat, self._config.load_interval_s)
        return max(longest, 0.001)

    def sent(self, now: float, load: Load | None, beat: Heartbeat | Hello) -> Heartbeat | Hello:
        """Note that `beat` goes out now; without its digest where that was sent lately."""
        self._sent_at = now
        self._load = load
        self.trust = beat.trust
        if isinstance(beat, Hello) or beat.digest is None:
            return beat
        if now - self._digest_at < self._config.digest_interval_s:
            return replace(beat, digest=None)
        self._digest_at = now
        return beat

"""A router's reservations at every index: one stream a target, all saying the same.

Routers may follow different index replicas, so a reservation goes to each of them, or routers would
herd after all. Reservations die with their stream; one that breaks is opened again and told what
still lives. The first message after a pause leaves at once, those that follow it within GATHER_S
leave together. What must not live here: what a reservation does.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from kvtier.client.calls import ClientConfig, Targets
from kvtier.core.checks import require_name
from kvtier.core.event_messages import U64_MAX
from kvtier.core.workers import OwnReservation
from kvtier.errors import CallerError, ConfigError, DeadlineError, LimitError, UnavailableError
from kvtier.limits import (
    RESERVATIONS_PER_ROUTER_MAX,
)
from kvtier.telemetry.logs import EventLog
from kvtier.types import Epoch
from kvtier.wire import messages as pb
from kvtier.wire import rpc
from kvtier.wire.loop_thread import LoopThread, end, raise_if_cancelled, spawn

LOG = EventLog("kvtier.client")
_QUEUE_COUNT_MAX = 4 * RESERVATIONS_PER_ROUTER_MAX
GATHER_S = 0.01
_GROUP_COUNT_MAX = 256
_GROUP_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """What the first index that answered said."""

    is_granted: bool
    reason: str
    """Why not; empty where granted."""
    worker_prefill_tokens: int
    """Reserved on that worker by all routers."""


@dataclass(frozen=True, slots=True)
class _Live:
    reservation: OwnReservation
    ends_at: float


class ReserveSession:
    """One life of one router. An async context manager; belongs to one event loop.

    All it holds ends with it. A reservation is believed to live until it is released or its TTL
    ends.
    """

    def __init__(self, targets: Targets, router: str, config: ClientConfig) -> None:
        require_name("router", router)
        self.router = router
        self._config = config
        self._live: dict[str, _Live] = {}
        self._opened = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[ReserveResult]] = {}
        self._streams = [_Stream(self, targets, target) for target in targets.in_order()]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [spawn(stream.run(), LOG) for stream in self._streams]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end(self._tasks)
        for future in self._waiting.values():
            future.cancel()

    async def reserve(
        self, wanted: OwnReservation, *, deadline_s: float | None = None
    ) -> ReserveResult:
        """Tell every index; returns what the first one answers, granted or not.

        UnavailableError when no index is connected, DeadlineError when none answers: then nothing
        is reserved. CallerError for a key that is in use, LimitError for too many at once.
        """
        self._forget_ended()
        if wanted.key in self._live:
            raise CallerError(f"key {wanted.key!r} is reserved already")
        if len(self._live) >= RESERVATIONS_PER_ROUTER_MAX:
            raise LimitError(f"reservations: more than {RESERVATIONS_PER_ROUTER_MAX} at once")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[ReserveResult] = loop.create_future()
        self._live[wanted.key] = _Live(wanted, loop.time() + wanted.ttl_ms / 1000)
        self._waiting[wanted.key] = answer
        request = _Said(wanted.key, _message(wanted, wanted.ttl_ms), is_answered=True)
        is_kept = False
        try:
            await self._say(request, deadline_s or self._config.deadline_s, answer)
            result = answer.result()
            is_kept = result.is_granted
            return result
        finally:
            del self._waiting[wanted.key]
            if not is_kept:
                self._live.pop(wanted.key, None)
                self._send(_Said(wanted.key, None))

    def tell(self, wanted: OwnReservation) -> None:
        """As `reserve`, but nobody waits for an answer, and none is an error: for a caller whose
        own decision stands whatever an index says of it. Beyond a limit nothing is told."""
        now = asyncio.get_running_loop().time()
        if len(self._live) >= RESERVATIONS_PER_ROUTER_MAX:
            if next(iter(self._live.values())).ends_at > now:
                return
            self._forget_ended()
        if wanted.key in self._live or len(self._live) >= RESERVATIONS_PER_ROUTER_MAX:
            return
        self._live[wanted.key] = _Live(wanted, now + wanted.ttl_ms / 1000)
        self._send(_Said(wanted.key, _message(wanted, wanted.ttl_ms)))

    def release(self, key: str) -> None:
        """Give one back, at every index; returns at once. Unknown keys are no error."""
        if self._live.pop(key, None) is not None:
            self._send(_Said(key, None))

    @property
    def live_count(self) -> int:
        """Reservations that are believed to live."""
        self._forget_ended()
        return len(self._live)

    # ---- parts

    async def _say(
        self,
        request: "_Said",
        deadline_s: float,
        answer: "asyncio.Future[ReserveResult]",
    ) -> None:
        """Send to who is connected, or becomes so in time, and wait for the first answer."""
        try:
            async with asyncio.timeout(deadline_s):
                if not self._send(request):
                    # A stream that opens sends all that lives: there is nothing to do but wait.
                    self._opened.clear()
                    await self._opened.wait()
                await asyncio.shield(answer)
        except TimeoutError:
            if any(stream.is_open for stream in self._streams):
                raise DeadlineError(f"no index answered within {deadline_s:g} s") from None
            errors = "; ".join(stream.last_error for stream in self._streams)
            raise UnavailableError(f"no index is connected: {errors}") from None

    def _send(self, said: "_Said") -> bool:
        """Queue for every open stream; whether there is any."""
        sent = [stream.send(said) for stream in self._streams]
        return any(sent)

    def heard(self, response: pb.ReserveResponse) -> None:
        """An index answered (called by the streams)."""
        waiting = self._waiting.get(response.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(
                ReserveResult(response.granted, response.reason, response.worker_prefill_tokens)
            )

    def opened(self) -> list["_Said"]:
        """A stream has just opened; returns what it must say first (called by the streams)."""
        self._opened.set()
        self._forget_ended()
        now = asyncio.get_running_loop().time()
        said = []
        for live in self._live.values():
            ttl_ms = max(1, int((live.ends_at - now) * 1000))
            key = live.reservation.key
            said.append(_Said(key, _message(live.reservation, ttl_ms), key in self._waiting))
        return said

    def pause_s(self, failures: int) -> float:
        return self._config.pause_s(failures)

    def _forget_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        for key in [key for key, live in self._live.items() if live.ends_at <= now]:
            del self._live[key]


class ReserveDesk:
    """A session on a thread of its own, told and released from one other thread without waiting.

    The session's loop is woken once for all that is said within GATHER_S. Beyond
    four times RESERVATIONS_PER_ROUTER_MAX waiting nothing is told.
    """

    def __init__(self, thread: LoopThread, session: ReserveSession) -> None:
        self._thread = thread
        self._session = session
        self._waiting: deque[OwnReservation | str] = deque()
        self._is_awaited = False
        """The session's loop will look at what waits by itself."""

    def open(self, wait_s: float) -> None:
        """Enter the session on its thread. Blocks."""
        self._thread.submit(self._session.__aenter__()).result(wait_s)

    def close(self, wait_s: float) -> None:
        """Leave the session: all that it holds ends. Blocks."""
        self._thread.submit(self._session.__aexit__(None, None, None)).result(wait_s)

    def tell(self, wanted: OwnReservation) -> None:
        """As `ReserveSession.tell`."""
        self._say(wanted)

    def release(self, key: str) -> None:
        """As `ReserveSession.release`."""
        self._say(key)

    # ---- parts

    def _say(self, what: OwnReservation | str) -> None:
        if len(self._waiting) >= _QUEUE_COUNT_MAX:
            return
        self._waiting.append(what)
        if not self._is_awaited:
            self._is_awaited = True
            self._thread.soon(self._take)

    def _take(self) -> None:
        """Pass on what waits, and look again a little later (on the session's loop)."""
        while self._waiting:
            what = self._waiting.popleft()
            if isinstance(what, str):
                self._session.release(what)
            else:
                self._session.tell(what)
        asyncio.get_running_loop().call_later(GATHER_S, self._look)

    def _look(self) -> None:
        if not self._waiting:
            self._is_awaited = False
        if self._waiting:  # something may have come between the two
            self._is_awaited = True
            self._take()


@dataclass(frozen=True, slots=True)
class _Said:
    """One thing that every index must hear."""

    key: str
    reservation: pb.Reservation | None
    """None: the key is given back."""
    is_answered: bool = False
    """Somebody waits for what the index says."""

    def alone(self) -> bytes:
        if self.reservation is None:
            return pb.ReserveRequest(release_key=self.key).SerializeToString()
        return pb.ReserveRequest(reserve=self.reservation).SerializeToString()


class _Stream:
    """The Reserve stream to one target."""

    def __init__(self, session: ReserveSession, targets: Targets, target: str) -> None:
        self._session = session
        self._dialer = targets.new_dialer(target)
        self._target = target
        self._queue: deque[_Said] = deque()
        self._queued = asyncio.Event()
        self._takes_groups = False
        self.is_open = False
        self.last_error = f"{target}: not connected yet"

    def send(self, said: _Said) -> bool:
        """Queue a message; False where the stream is not open. A full queue breaks the stream:
        what lives is told anew on the next one."""
        if self.is_open and len(self._queue) >= _QUEUE_COUNT_MAX:
            self.is_open = False
            self._queued.set()
        if not self.is_open:
            return False
        self._queue.append(said)
        if len(self._queue) == 1:
            self._queued.set()
        return True

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        failures = 0
        try:
            while True:
                began = asyncio.get_running_loop().time()
                await self._serve()
                raise_if_cancelled()
                failures += 1
                pause_s = self._session.pause_s(failures)
                if asyncio.get_running_loop().time() - began > 2 * pause_s:
                    failures = 0
                LOG.warning("reservation stream lost", reason=self.last_error)
                # A channel that failed would wait before it connects again; this loop does.
                await self._dialer.close()
                await asyncio.sleep(pause_s)
        finally:
            self.is_open = False
            await self._dialer.close()

    async def _serve(self) -> None:
        """One stream from beginning to end. Each has an epoch of its own: an index that has not
        yet noticed the end of the one before it must not take this one down with it."""
        self._queue, self._queued, self._takes_groups = deque(), asyncio.Event(), False
        epoch = Epoch(secrets.randbelow(U64_MAX) + 1)
        try:
            call = rpc.call(self._dialer.channel(), rpc.INDEX, "Reserve")(self._requests(epoch))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    if response.groups:
                        self._takes_groups = True
                    else:
                        self._session.heard(response)
                self.last_error = f"{self._target}: the index ended the stream"
            finally:
                self.is_open = False
                call.cancel()
        except grpc.aio.AioRpcError as error:
            self.last_error = f"{self._target}: {error.code().name}: {error.details()}"
        except ConfigError as error:
            self.last_error = f"{self._target}: {error}"

    async def _requests(self, epoch: Epoch) -> AsyncIterator[bytes]:
        hello = pb.RouterHello(router=self._session.router, epoch=epoch, groups=True)
        yield pb.ReserveRequest(hello=hello).SerializeToString()
        self.is_open = True  # the Hello has left: only now there is a connection
        self._queue.extendleft(reversed(self._session.opened()))
        while self.is_open:
            while self._queue:
                yield self._next()
            self._queued.clear()
            if self._takes_groups:
                await asyncio.sleep(GATHER_S)
            if not self._queue:
                await self._queued.wait()

    def _next(self) -> bytes:
        """The next message, with those behind it where the index takes groups and nobody waits
        for an answer. What was reserved and given back again within a group is not said at all."""
        first = self._queue.popleft()
        if not self._takes_groups or first.is_answered or not self._queue:
            return first.alone()
        group, reserved, size = pb.ReserveGroup(), {}, 0
        said: _Said | None = first
        while said is not None:
            if said.reservation is not None:
                reserved[said.key] = said.reservation
                size += len(said.reservation.predicted_hashes)
            elif reserved.pop(said.key, None) is None:
                group.release_keys.append(said.key)
            is_full = size > _GROUP_BYTES_MAX or len(reserved) >= _GROUP_COUNT_MAX
            is_over = is_full or not self._queue or self._queue[0].is_answered
            said = None if is_over else self._queue.popleft()
        group.reserve.extend(reserved.values())
        return pb.ReserveRequest(group=group).SerializeToString()


def _message(wanted: OwnReservation, ttl_ms: int) -> pb.Reservation:
    return pb.Reservation(
        key=wanted.key,
        instance=wanted.worker.instance,
        dp_rank=wanted.worker.dp_rank,
        prefill_tokens=wanted.prefill_tokens,
        predicted_hashes=wanted.hashes.astype("<u8", copy=False).tobytes(),
        ttl_ms=ttl_ms,
    )

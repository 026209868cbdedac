"""A router's reservations at every index: one stream a target, all saying the same.

Routers may follow different index replicas, so a reservation goes to each of them, or routers would
herd after all. Reservations die with their stream; one that breaks is opened again and told what
still lives. What must not live here: what a reservation does.
"""

import asyncio
import secrets
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
from kvtier.wire.loop_thread import end, raise_if_cancelled, spawn

LOG = EventLog("kvtier.client")
_QUEUE_COUNT_MAX = 4 * RESERVATIONS_PER_ROUTER_MAX


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
        request = pb.ReserveRequest(reserve=_message(wanted, wanted.ttl_ms))
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
                self._send(pb.ReserveRequest(release_key=wanted.key))

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
        self._send(pb.ReserveRequest(reserve=_message(wanted, wanted.ttl_ms)))

    def release(self, key: str) -> None:
        """Give one back, at every index; returns at once. Unknown keys are no error."""
        if self._live.pop(key, None) is not None:
            self._send(pb.ReserveRequest(release_key=key))

    @property
    def live_count(self) -> int:
        """Reservations that are believed to live."""
        self._forget_ended()
        return len(self._live)

    # ---- parts

    async def _say(
        self,
        request: pb.ReserveRequest,
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

    def _send(self, request: pb.ReserveRequest) -> bool:
        """Queue for every open stream; whether there is any."""
        data = request.SerializeToString()
        sent = [stream.send(data) for stream in self._streams]
        return any(sent)

    def heard(self, response: pb.ReserveResponse) -> None:
        """An index answered (called by the streams)."""
        waiting = self._waiting.get(response.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(
                ReserveResult(response.granted, response.reason, response.worker_prefill_tokens)
            )

    def opened(self) -> list[bytes]:
        """A stream has just opened; returns what it must say first (called by the streams)."""
        self._opened.set()
        self._forget_ended()
        now = asyncio.get_running_loop().time()
        said = []
        for live in self._live.values():
            ttl_ms = max(1, int((live.ends_at - now) * 1000))
            request = pb.ReserveRequest(reserve=_message(live.reservation, ttl_ms))
            said.append(request.SerializeToString())
        return said

    def pause_s(self, failures: int) -> float:
        return self._config.pause_s(failures)

    def _forget_ended(self) -> None:
        now = asyncio.get_running_loop().time()
        for key in [key for key, live in self._live.items() if live.ends_at <= now]:
            del self._live[key]


class _Stream:
    """The Reserve stream to one target."""

    def __init__(self, session: ReserveSession, targets: Targets, target: str) -> None:
        self._session = session
        self._dialer = targets.new_dialer(target)
        self._target = target
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(_QUEUE_COUNT_MAX)
        self.is_open = False
        self.last_error = f"{target}: not connected yet"

    def send(self, data: bytes) -> bool:
        """Queue a message; False where the stream is not open. A full queue breaks the stream:
        what lives is told anew on the next one."""
        if not self.is_open:
            return False
        try:
            self._queue.put_nowait(data)
        except asyncio.QueueFull:
            self.is_open = False
            return False
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
        self._queue = asyncio.Queue(_QUEUE_COUNT_MAX)
        epoch = Epoch(secrets.randbelow(U64_MAX) + 1)
        try:
            call = rpc.call(self._dialer.channel(), rpc.INDEX, "Reserve")(self._requests(epoch))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
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
        hello = pb.RouterHello(router=self._session.router, epoch=epoch)
        yield pb.ReserveRequest(hello=hello).SerializeToString()
        self.is_open = True  # the Hello has left: only now there is a connection
        for data in self._session.opened():
            yield data
        while self.is_open:
            yield await self._queue.get()


def _message(wanted: OwnReservation, ttl_ms: int) -> pb.Reservation:
    return pb.Reservation(
        key=wanted.key,
        instance=wanted.worker.instance,
        dp_rank=wanted.worker.dp_rank,
        prefill_tokens=wanted.prefill_tokens,
        predicted_hashes=wanted.hashes.astype("<u8", copy=False).tobytes(),
        ttl_ms=ttl_ms,
    )

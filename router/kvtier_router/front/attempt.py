"""One try of one request at one worker: hears the answer and relays it as it comes.

A stream goes to the client event by event, in the callback that brought it. An answer in one piece
is held until it is whole (up to a ceiling), so that a worker's death leaves the client untouched.
What must not live here: whether to try again (relay.py), what was asked.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.errors import LimitError
from kvtier.openai.usage import Usage
from kvtier_router.front.streams import StreamFilter
from kvtier_router.web.server import Exchange
from kvtier_router.web.upstream import Loss, ResponseHead, UpstreamConnection, UpstreamError
from kvtier_router.web.values import Headers

_HELD_BYTES_MAX: Final = 1 << 20
"""Of an answer in one piece; the rest of a longer one is relayed as it comes."""
_SSE: Final = "text/event-stream"
_RELAYED: Final = ("content-type", "retry-after", "content-disposition", "openai-processing-ms")


@dataclass(frozen=True, slots=True)
class Streamed:
    """A whole stream went to the client."""

    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Held:
    """An answer that the client has not seen: the caller decides what becomes of it."""

    status: int
    headers: Headers
    body: bytes
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer ended too early."""

    error: UpstreamError
    was_heard: bool
    """Whether the client has bytes of it."""


Outcome = Streamed | Held | Broken


@dataclass(slots=True, eq=False)
class AttemptPlan:
    """How an answer is to be relayed. Once a request: not frozen, which costs a call a field."""

    make_filter: Callable[[], StreamFilter]
    ends_with_done: bool
    """Whether a stream is whole only after [DONE], or an explicit end."""
    headers: Headers
    """To put into the client's header beside those of the worker."""
    first_byte: Callable[[float], None]
    """Told once, with the seconds since the request was sent; not of an error."""


class Attempt:
    """A sink of one answer. `outcome` is set exactly once."""

    def __init__(self, exchange: Exchange, plan: AttemptPlan, clock: Callable[[], float]) -> None:
        self._exchange = exchange
        self._plan = plan
        self._clock = clock
        self._sent_at = clock()
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._heard = False
        self._relays = False
        """Whether body bytes go straight to the client."""
        self._connection: UpstreamConnection | None = None
        self.filter: StreamFilter | None = None
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()

    def attach(self, connection: UpstreamConnection) -> None:
        """The connection that will carry it; a slow client slows it down."""
        self._connection = connection
        self._sent_at = self._clock()
        client = self._exchange.connection
        client.on_pressure = connection.pause
        if client.under_pressure:
            connection.pause(True)

    @property
    def whole(self) -> Streamed | None:
        """The answer, where all of it has gone to the client and only its end is still to come."""
        filtered = self.filter
        return Streamed(filtered.usage) if filtered is not None and filtered.is_done else None

    def abort(self) -> None:
        """Let the worker know at once that nobody listens any more."""
        if self._connection is not None:
            self._connection.abandon(self)
        self.outcome.cancel()

    # What the upstream tells

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        kind = head.headers.get("content-type", "")
        if head.status == 200 and kind.startswith(_SSE):
            self.filter = self._plan.make_filter()

    def on_body(self, data: bytes) -> None:
        if not self._heard:
            self._heard = True
            if self._head is not None and self._head.status < 400:  # an error computed no prompt
                self._plan.first_byte(self._clock() - self._sent_at)
        if self.filter is not None:
            self._stream(self.filter, data)
        elif self._relays:
            self._exchange.send(data)
        else:
            self._hold(data)

    def on_end(self) -> None:
        head = self._head
        assert head is not None
        if self.filter is not None:
            rest = self.filter.end()
            if not self._heard or (self._plan.ends_with_done and not self._whole(head)):
                self._break(UpstreamError(Loss.RESET))
                return
            self._send(rest)
            if not self._exchange.started:  # nothing in it was for the client
                self._start()
            self._set(Streamed(self.filter.usage))
        elif self._relays:
            self._set(Streamed(None))
        else:
            body = b"".join(self._parts)
            self._set(Held(head.status, _relayed(head), body, _retry_after_s(head)))

    def on_lost(self, error: UpstreamError) -> None:
        self._break(error)

    # Inside

    def _whole(self, head: ResponseHead) -> bool:
        """A stream that says where it ends has ended; one that lasts until the connection does may
        have been cut, unless [DONE] stands at its end."""
        filtered = self.filter
        framed = "transfer-encoding" in head.headers or "content-length" in head.headers
        return framed or (filtered is not None and filtered.is_done)

    def _stream(self, filtered: StreamFilter, data: bytes) -> None:
        try:
            passed = filtered.feed(data)
        except LimitError:
            if self._connection is not None:
                self._connection.abandon(self)
            self._break(UpstreamError(Loss.MALFORMED, "an endless event"))
            return
        self._send(passed)

    def _send(self, data: bytes) -> None:
        if not data:
            return
        if not self._exchange.started:
            self._start()
        self._exchange.send(data)

    def _start(self) -> None:
        assert self._head is not None
        headers = [*_relayed(self._head), ("cache-control", "no-cache"), *self._plan.headers]
        self._exchange.start(200, headers)

    def _hold(self, data: bytes) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes <= _HELD_BYTES_MAX:
            return
        assert self._head is not None
        self._relays = True
        self._exchange.start(self._head.status, [*_relayed(self._head), *self._plan.headers])
        self._exchange.send(b"".join(self._parts))
        self._parts.clear()

    def _break(self, error: UpstreamError) -> None:
        whole = self.whole  # lost between [DONE] and the end of its body
        self._set(Broken(error, self._exchange.started) if whole is None else whole)

    def _set(self, outcome: Outcome) -> None:
        self._exchange.connection.on_pressure = None  # the upstream connection is another's soon
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _relayed(head: ResponseHead) -> list[tuple[str, str]]:
    found = head.headers
    return [(name, found[name]) for name in _RELAYED if name in found]


def _retry_after_s(head: ResponseHead) -> float | None:
    text = head.headers.get("retry-after", "")
    return float(text) if text.isdigit() and len(text) < 7 else None

"""What a relayed SSE stream says on its way through: usage, the end, what to resume from.

Sans-I/O: bytes in, bytes for the client out. Only whole events go on, so that whatever happens to
the worker the client never holds half of one. What must not live here: sockets, retries, the
continuation itself (resume.py).
"""

from typing import Final, Protocol

from kvtier.errors import LimitError
from kvtier.openai.sse import DONE, SseEvent, SseParser
from kvtier.openai.usage import Usage, usage_of, without_usage

_USAGE: Final = b'"usage"'
_EVENT_END: Final = b"\n\n"
KEPT_BYTES_MAX: Final = 4 << 20
"""Of one stream, to resume from; a longer one ends with its worker."""


class StreamFilter(Protocol):
    """One answer in the form of a stream, from one worker."""

    @property
    def usage(self) -> Usage | None:
        """The last that the stream said."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether [DONE] went by."""
        ...

    def feed(self, data: bytes) -> bytes:
        """Take what came, return what goes to the client now. LimitError: an endless event."""
        ...

    def end(self) -> bytes:
        """The worker's answer is complete: what is left goes to the client."""
        ...


class PlainFilter:
    """Passes events on as they came; takes out usage that the client did not ask for."""

    def __init__(self, *, wants_usage: bool, keeps: bool) -> None:
        """`keeps`: what was sent is remembered, for a resumption."""
        self._wants_usage = wants_usage
        self._parser = SseParser()
        self._partial = False
        self._keeps = keeps
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.start = b""
        """The first events, for who wants to know the answer's id."""
        self.usage: Usage | None = None
        self.is_done = False

    @property
    def kept(self) -> bytes | None:
        """All that was sent, None where it was not kept (or has become too long)."""
        return b"".join(self._kept) if self._keeps else None

    def feed(self, data: bytes) -> bytes:
        if not self._partial and data.endswith(_EVENT_END) and _USAGE not in data:
            if data.endswith(DONE):
                self.is_done = True
            self._keep(data)
            return data
        passed = b"".join([self._passed(event) for event in self._parser.feed(data)])
        self._partial = not data.endswith(_EVENT_END)
        self._keep(passed)
        return passed

    def end(self) -> bytes:
        passed = b"".join([self._passed(event) for event in self._parser.finish()])
        return passed + self._parser.rest()

    def _passed(self, event: SseEvent) -> bytes:
        data = event.data
        if data is None:
            return event.raw
        if event.is_done:
            self.is_done = True
            return event.raw
        if _USAGE not in data:
            return event.raw
        found = usage_of(data)
        if found is not None:
            self.usage = found
        return event.raw if self._wants_usage else without_usage(event)

    def _keep(self, data: bytes) -> None:
        if not self.start:
            self.start = data
        if not self._keeps:
            return
        self._kept_bytes += len(data)
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._keeps = False
            self._kept.clear()
        else:
            self._kept.append(data)


def events_of(stream: bytes) -> list[SseEvent]:
    """The events of a finished piece of a stream; those of an endless one are left out."""
    parser = SseParser()
    try:
        return [*parser.feed(stream), *parser.finish()]
    except LimitError:
        return []

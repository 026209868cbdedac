"""Server-sent events: writing them, and reading a relayed stream without altering a byte.

What must not live here: sockets; what an event's data means (usage.py).
"""

import re
from dataclasses import dataclass
from typing import Final

from kvtier.errors import CallerError, LimitError
from kvtier.limits import SSE_EVENT_BYTES_MAX

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's API."""
DONE_DATA: Final = b"[DONE]"
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


def event(data: bytes, name: bytes = b"") -> bytes:
    """Return one event with `data`, of any number of lines, and a name where one is given."""
    if b"\n" in name or b"\r" in name:
        raise CallerError("the name of an event has a line end")
    head = b"event: " + name + b"\n" if name else b""
    if b"\n" not in data and b"\r" not in data:
        return head + b"data: " + data + b"\n\n"
    lines = _LINE_END.split(data)
    return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


def comment(text: bytes = b"") -> bytes:
    """Return a comment, which readers skip: keeps an idle connection open."""
    if b"\n" in text or b"\r" in text:
        raise CallerError("a comment has a line end")
    return b": " + text + b"\n\n"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One block of a stream, up to and with the blank line that ends it."""

    raw: bytes
    """As it came: the raw bytes of all events, and the rest, are the stream."""
    data: bytes | None
    """Its data lines joined by line feeds; None where it has none (a comment, say)."""
    name: bytes = b""

    @property
    def is_done(self) -> bool:
        return self.data == DONE_DATA


class SseParser:
    """Cuts a stream into events, whatever the chunks it comes in. Not for sharing.

    An event ends with its blank line; lines end with a line feed, a carriage return or both. A
    carriage return at the very end of a chunk waits for the next byte, which may belong to it.
    """

    def __init__(self, event_bytes_max: int = SSE_EVENT_BYTES_MAX) -> None:
        self._bytes_max = event_bytes_max
        self._buffer = bytearray()
        """The event under way, from its first byte."""
        self._line_start = 0
        self._scanned = 0
        """Bytes of the buffer known to hold no end of the line under way."""
        self._at_start = True
        self._too_long = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take the next bytes; return the events that end in them. O(bytes) over a stream.

        LimitError for an event beyond the ceiling, once those before it are returned: then `rest()`
        has every byte that no event carried, and the parser takes no more.
        """
        is_open = not self._buffer and not self._too_long
        if is_open and len(chunk) <= self._bytes_max and _is_plain(chunk):
            self._at_start = False
            return [SseEvent(chunk, chunk[6:-2])]
        self._buffer += chunk
        found: list[SseEvent] = []
        while not self._too_long and (end := self._block_end()) > 0:
            found.append(self._cut(end))
        if self._too_long and not found:
            raise LimitError(f"an SSE event exceeds {self._bytes_max} bytes")
        return found

    def finish(self) -> list[SseEvent]:
        """Return the event that only waited for the byte after its carriage return, if any."""
        blank_line = len(self._buffer) - self._line_start == 1
        if blank_line and self._buffer.endswith(b"\r") and not self._too_long:
            return [self._cut(len(self._buffer))]
        return []

    def rest(self) -> bytes:
        """Return the bytes of an event that has not ended, and forget them."""
        tail = bytes(self._buffer)
        self._buffer.clear()
        self._line_start = self._scanned = 0
        return tail

    def _block_end(self) -> int:
        """Where the event under way ends, 0 where that has not come yet."""
        while match := _LINE_DONE.search(self._buffer, max(self._line_start, self._scanned)):
            is_blank = match.start() == self._line_start
            self._line_start = end = match.end()
            if end > self._bytes_max:
                break
            if is_blank:
                return end
        self._scanned = max(0, len(self._buffer) - 1)
        self._too_long = max(self._line_start, self._scanned) > self._bytes_max
        return 0

    def _cut(self, end: int) -> SseEvent:
        raw = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._line_start = self._scanned = 0
        text = raw.removeprefix(_BYTE_ORDER_MARK) if self._at_start else raw
        self._at_start = False
        if _is_plain(text):
            return SseEvent(raw, text[6:-2])
        return _event_of(raw, text)


def _is_plain(text: bytes) -> bool:
    """Whether `text` is one event of one data line and nothing else, as engines send them."""
    one_line = text.find(b"\n") == len(text) - 2 and text.endswith(b"\n\n")
    return one_line and text.startswith(b"data: ") and b"\r" not in text


_LINE_DONE: Final = re.compile(rb"\r\n|\n|\r(?=[\s\S])")
"""A line end that the next byte cannot change."""


def _event_of(raw: bytes, text: bytes) -> SseEvent:
    """Read the fields of an event in any spelling that the standard allows."""
    data: list[bytes] = []
    name = b""
    for line in _LINE_END.split(text):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return SseEvent(raw, b"\n".join(data) if data else None, name)

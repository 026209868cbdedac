"""Reads the replies of a Redis (RESP 2) as they arrive, long values into memory of the caller's.

Sans-I/O: the connection asks where bytes go, puts them there and says how many. Only what the data
path asks for exists here: status, error, integer, bulk string; no arrays, no pushes. Twin in tests:
hiredis. What must not live here: sockets, meaning of replies.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

SCRATCH_BYTES: Final = 64 << 10
SHORT_BULK_BYTES_MAX: Final = 16 << 10
"""Longest bulk that is answered as bytes; a longer one was not asked for."""
_DIGITS_MAX: Final = 20


class Sink(Protocol):
    """Takes one bulk string, as `values.ValueSink` does."""

    @property
    def left_bytes(self) -> int: ...

    def begin(self, value_bytes: int) -> None: ...

    def room(self) -> memoryview | None: ...

    def advance(self, count: int) -> None: ...

    def finish(self) -> None: ...


class ErrorReply(str):
    """The text of an error reply."""

    __slots__ = ()


Reply: TypeAlias = "bytes | int | ErrorReply | Sink | None"
"""A status or short bulk, an integer, an error, a sink that has taken its value, nil."""


class ReplyFormatError(Exception):
    """The bytes are not replies to what was asked; the connection is of no use any more."""


class ReplyReader:
    """A machine of constant size: bytes in, replies out, in the order of `expect`."""

    def __init__(self, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._scratch = bytearray(scratch_bytes)
        self._view = memoryview(self._scratch)
        self._begin = 0
        self._end = 0
        self._expected: deque[Sink | None] = deque()
        self._sink: Sink | None = None
        """Whose bulk is arriving."""

    def expect(self, sinks: Sequence[Sink | None]) -> None:
        """One reply each will come; a sink where it is to take a bulk. Mutates."""
        self._expected.extend(sinks)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected and nothing has come."""
        return not self._expected and self._begin == self._end and self._sink is None

    def room(self) -> memoryview:
        """Where the next bytes go, never empty. Valid until `received`."""
        if self._sink is not None and self._begin == self._end and self._sink.left_bytes:
            place = self._sink.room()
            if place is not None:
                return place
            return self._view[: min(len(self._scratch), self._sink.left_bytes)]
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._scratch):
            kept = self._end - self._begin
            self._scratch[:kept] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, kept
        return self._view[self._end :]

    def received(self, count: int) -> list[Reply]:
        """`count` bytes are in `room` now: return the replies that are complete. Mutates.

        Raises ReplyFormatError.
        """
        if self._sink is not None and self._begin == self._end and self._sink.left_bytes:
            self._sink.advance(count)
        else:
            self._end += count
        replies: list[Reply] = []
        while self._step(replies):
            pass
        return replies

    def _step(self, replies: list[Reply]) -> bool:
        """Take the next part out of the scratch; False where it is not complete."""
        if self._sink is not None:
            return self._step_in_bulk(replies)
        if self._begin == self._end:
            return False
        line_end = self._scratch.find(b"\r\n", self._begin, self._end)
        if line_end < 0:
            if self._end - self._begin == len(self._scratch):
                raise ReplyFormatError("a line without an end")
            return False
        if not self._expected:
            raise ReplyFormatError("a reply that nobody asked for")
        kind = self._scratch[self._begin]
        text = bytes(self._view[self._begin + 1 : line_end])
        if kind == 0x24:  # $
            return self._begin_bulk(text, line_end + 2, replies)
        self._begin = line_end + 2
        self._expected.popleft()
        if kind == 0x2B:  # +
            replies.append(text)
        elif kind == 0x3A:  # :
            replies.append(_integer(text))
        elif kind == 0x2D:  # -
            replies.append(ErrorReply(text.decode("ascii", "replace")))
        else:
            raise ReplyFormatError("a reply of an unknown kind")
        return True

    def _begin_bulk(self, text: bytes, after: int, replies: list[Reply]) -> bool:
        length = _integer(text)
        if length < 0:
            if length != -1:
                raise ReplyFormatError("a bulk of negative length")
            self._begin = after
            self._expected.popleft()
            replies.append(None)
            return True
        sink = self._expected[0]
        if sink is None:
            return self._short_bulk(length, after, replies)
        self._begin = after
        self._sink = sink
        sink.begin(length)
        return True

    def _short_bulk(self, length: int, after: int, replies: list[Reply]) -> bool:
        if length > min(SHORT_BULK_BYTES_MAX, len(self._scratch) // 2):
            raise ReplyFormatError("a bulk that is longer than what was asked for")
        if self._end < after + length + 2:
            return False
        if self._scratch[after + length : after + length + 2] != b"\r\n":
            raise ReplyFormatError("a bulk without its end")
        replies.append(bytes(self._view[after : after + length]))
        self._begin = after + length + 2
        self._expected.popleft()
        return True

    def _step_in_bulk(self, replies: list[Reply]) -> bool:
        sink = self._sink
        assert sink is not None
        while sink.left_bytes:
            present = min(self._end - self._begin, sink.left_bytes)
            if not present:
                return False
            place = sink.room()
            if place is not None:
                present = min(present, place.nbytes)
                place[:present] = self._view[self._begin : self._begin + present]
            sink.advance(present)
            self._begin += present
        if self._end - self._begin < 2:
            return False
        if self._scratch[self._begin : self._begin + 2] != b"\r\n":
            raise ReplyFormatError("a bulk without its end")
        self._begin += 2
        self._sink = None
        self._expected.popleft()
        sink.finish()
        replies.append(sink)
        return True


def _integer(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > _DIGITS_MAX:
        raise ReplyFormatError("a number that is none")
    return int(text)

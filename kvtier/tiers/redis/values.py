"""What one Redis value holds, and how it is received straight into a caller's memory.

    block frame (kvtier.core.frame: header of 128 bytes, payload)
    scope, UTF-8
    tail of 12 bytes, little-endian: scope length u16, 0 u16,
      XXH3-64 u64 of the frame's header and of the scope

The whole is written by one SET, so that a reader sees all of it or nothing. A
first writer is recognised by the header alone, GETRANGE 0 127.

What must not live here: sockets, keys, counting.
"""

import struct
from typing import Final

from kvtier.core.checksum import checksum
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    encode_header,
    parse_header,
    verify_copied,
)
from kvtier.errors import CallerError, FrameError, FrameFault, LimitError
from kvtier.limits import NAME_BYTES_MAX
from kvtier.ports import GetRequest, GetResult, GetStatus
from kvtier.tiers.tally import fitting
from kvtier.types import ScopeId

_TAIL: Final = struct.Struct("<HHQ")
TAIL_BYTES: Final = _TAIL.size
TAIL_BYTES_MAX: Final = NAME_BYTES_MAX + TAIL_BYTES
"""Scope included: what GETRANGE -n -1 must fetch to know it."""


def encode_scope(scope: ScopeId) -> bytes:
    """The scope as it stands in a value. Raises CallerError for what cannot stand there."""
    try:
        raw = scope.encode()
    except UnicodeEncodeError as error:
        raise CallerError("a scope is not valid Unicode") from error
    if len(raw) > NAME_BYTES_MAX:
        raise LimitError(f"a scope of {len(raw)} bytes exceeds {NAME_BYTES_MAX}")
    return raw


def value_bytes(payload_bytes: int, scope: bytes) -> int:
    """Length of a whole value."""
    return HEADER_BYTES + payload_bytes + len(scope) + TAIL_BYTES


def surround(header: FrameHeader, scope: bytes) -> tuple[bytes, bytes]:
    """What stands before the payload of a value, and what after it."""
    head = encode_header(header)
    tail = _TAIL.pack(len(scope), 0, checksum(head + scope))
    return head, scope + tail


def parse_tail(head: bytes, tail: bytes) -> ScopeId:
    """The scope that the end of a value says; `tail` is all that follows the payload.

    Raises FrameError for any other bytes.
    """
    if len(tail) < TAIL_BYTES:
        raise FrameError(FrameFault.SHORT, f"{len(tail)} bytes follow the payload")
    scope, end = tail[:-TAIL_BYTES], tail[-TAIL_BYTES:]
    scope_bytes, zero, expected = _TAIL.unpack(end)
    if scope_bytes != len(scope) or zero:
        raise FrameError(FrameFault.LENGTH, f"{len(scope)} bytes of scope, {scope_bytes} declared")
    if checksum(head + scope) != expected:
        raise FrameError(FrameFault.HEADER_CHECKSUM, "the scope was altered")
    try:
        return ScopeId(scope.decode())
    except UnicodeDecodeError as error:
        raise FrameError(FrameFault.HEADER_FIELD, "the scope is not UTF-8") from error


def scope_in(head: bytes, end: bytes) -> ScopeId:
    """The scope of a value of which only the header and the last bytes were fetched."""
    if len(end) < TAIL_BYTES:
        raise FrameError(FrameFault.SHORT, f"{len(end)} bytes are less than a tail")
    scope_bytes, _, _ = _TAIL.unpack(end[-TAIL_BYTES:])
    return parse_tail(head, end[-TAIL_BYTES - scope_bytes :])


class ValueSink:
    """Receives one value and verifies it: the header, then the payload in its place, then the tail.

    The connection asks `room` where the next bytes go and says how many came; bytes that have no
    place are discarded. Nothing is trusted before `result`.
    """

    def __init__(self, request: GetRequest) -> None:
        self.request = request
        self._head = bytearray(HEADER_BYTES)
        self._left_bytes = 0
        """Of the value, still to come."""
        self._part_left = memoryview(b"")
        """Of the header, payload or tail, still to come."""
        self._parts = 0
        self._payload: memoryview | None = None
        self._tail = bytearray()
        self._header: FrameHeader | None = None
        self._outcome: GetResult | None = None
        self._fault: FrameError | None = None

    def begin(self, value_bytes: int) -> None:
        """A value of this length comes. Mutates."""
        self._left_bytes = value_bytes
        self._part_left = memoryview(self._head)
        if value_bytes < HEADER_BYTES + TAIL_BYTES:
            self._reject(FrameError(FrameFault.SHORT, f"{value_bytes} bytes are no value"))

    @property
    def left_bytes(self) -> int:
        """Bytes of the value that have not come yet."""
        return self._left_bytes

    def room(self) -> memoryview | None:
        """Where the next bytes go; None: nowhere, read them into anything."""
        return self._part_left if self._part_left.nbytes else None

    def advance(self, count: int) -> None:
        """`count` more bytes have come, into `room` where there was one. Mutates."""
        self._left_bytes -= count
        if self._part_left.nbytes:
            self._part_left = self._part_left[count:]
            while not self._part_left.nbytes and self._parts < 2 and not self._is_rejected:
                self._parts += 1
                self._next_part()

    @property
    def fault(self) -> FrameError | None:
        """What is wrong with the value, once it has come."""
        return self._fault

    def finish(self) -> None:
        """All has come: verify it. Mutates; O(payload bytes)."""
        if self._is_rejected:
            return
        assert self._payload is not None
        head = bytes(self._head)
        try:
            header = verify_copied(
                head,
                self._payload.nbytes,
                checksum(self._payload),
                FrameExpectation(self.request.name, self.request.payload_bytes),
            )
            scope = parse_tail(head, bytes(self._tail))
        except FrameError as error:
            self._reject(error)
            return
        self._outcome = GetResult(GetStatus.HIT, self._payload, header, scope)

    def result(self) -> GetResult | None:
        """The hit, or the error of a buffer that is too short; None where `fault` says why not."""
        return self._outcome

    @property
    def _is_rejected(self) -> bool:
        return self._fault is not None or self._outcome is not None

    def _reject(self, fault: FrameError) -> None:
        self._fault = fault
        self._part_left = memoryview(b"")

    def _next_part(self) -> None:
        """The header has come (1), or the payload (2): make room for what follows."""
        if self._parts == 1:
            try:
                self._header = parse_header(self._head)
            except FrameError as error:
                self._reject(error)
                return
            rest = self._left_bytes - self._header.payload_bytes
            if not TAIL_BYTES <= rest <= TAIL_BYTES_MAX:
                short = rest < TAIL_BYTES
                fault = FrameFault.SHORT if short else FrameFault.LENGTH
                self._reject(FrameError(fault, f"{rest} bytes after the payload"))
                return
            if self._header.payload_bytes != self._expected_bytes():
                self._reject(FrameError(FrameFault.LENGTH, "not the length of the namespace"))
                return
            self._payload = fitting(self.request, self._header)
            if self._payload is None:
                self._outcome = GetResult(GetStatus.ERROR, reason="buffer_short")
                return
            self._part_left = self._payload
        else:
            self._tail = bytearray(self._left_bytes)
            self._part_left = memoryview(self._tail)

    def _expected_bytes(self) -> int:
        assert self._header is not None
        asked = self.request.payload_bytes
        return self._header.payload_bytes if asked is None else asked


def fault_of(request: GetRequest, value: bytes) -> FrameError | None:
    """What is wrong with a value that was fetched whole; None if it is what was asked for."""
    sink = ValueSink(request)
    sink.begin(len(value))
    at = 0
    while sink.left_bytes:
        place = sink.room()
        count = sink.left_bytes if place is None else place.nbytes
        if place is not None:
            place[:] = value[at : at + count]
        sink.advance(count)
        at += count
    sink.finish()
    return sink.fault

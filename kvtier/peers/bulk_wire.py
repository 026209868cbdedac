"""The bulk channel's form on the wire, and blocking sockets that move it.

A connection begins with a greeting, answered by one reply; then requests and answers alternate. All
integers are little-endian. A get is answered in groups, a put once:

    greeting  magic 8, u8 version, u16 bytes of the token, u16 bytes of the store's name, both
    reply     u8: 0 welcome, else a `Refusal`
    request   `REQUEST`, keys, then of a put: u64 lengths, u64 checksums, scope, payloads
    group     u32 count, u8 statuses; of hits: headers of 128 bytes, payloads, u8 each: 1 where the
              block was still itself when the last of its bytes had gone
    answer    u32 count, u8 statuses

Where both ends have NIXL (`nixl_transport`), five operations more; an end that has none hangs up at
them. Payload then moves between the store and a slot of the caller's memory, never of the store's.
The payloads of one exchange begin at multiples of 64 and are at most `staging.SLOT_BYTES` in all:

    meet      `REQUEST` (payload bytes: those of the description), the agent's description; answered
              by u8 1, and 16 bytes that name the acquaintance; the others come after it
    try       `REQUEST`, `OFFER`; answered by `ANSWER` when zeros lie in the slot
    get       `REQUEST` (the payload's length known), keys, `OFFER`; answered by `ANSWER`, u8
              statuses, headers of hits and u8 each as above, when the payloads lie in the slot
    put       `REQUEST`, keys, `OFFER`, u64 lengths, u64 checksums, scope, when the payloads lie in
              the slot; answered by `ANSWER`, u8 statuses, when they were read
    end       `REQUEST`, `OFFER`: nothing begins any more with this slot up to this generation;
              answered by u8, an `Ending`, at the latest at the deadline

What must not live here: whom to let in, where payload comes from and goes to.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Final

from kvtier.errors import BackendError, DeadlineError, UnavailableError

MAGIC: Final = b"\x89KVTBULK"
VERSION: Final = 1
GREETING: Final = struct.Struct("<8sBHH")
REQUEST: Final = struct.Struct("<BBBBIIIQ32sQH")
"""op, key kind, bytes of a key, 0, codec, blocks, deadline in ms, payload bytes (0: unknown),
namespace, writer, bytes of the scope."""
COUNT: Final = struct.Struct("<I")
TOKEN_BYTES_MAX: Final = 4096
NAME_BYTES_MAX: Final = 1024
GET, PUT = 1, 2
NIXL_GET, NIXL_PUT, NIXL_MEET, NIXL_TRY, NIXL_END = 3, 4, 5, 6, 7
NIXL_CONTROL: Final = frozenset({NIXL_MEET, NIXL_TRY, NIXL_END})
OFFER: Final = struct.Struct("<IQQ")
"""slot, its generation, its address at the caller."""
ANSWER: Final = struct.Struct("<BI")
"""1 where the transfer has ended well, or none was needed; blocks."""
ACQUAINTANCE_BYTES: Final = 16
_TIMEVAL: Final = struct.Struct("@ll")
_PARTS_MAX: Final = 64
"""Buffers of one sendmsg."""
_TLS_PART_BYTES: Final = 1 << 20


class Refusal(IntEnum):
    """Why a connection is not let in."""

    UNAUTHENTICATED = 1
    FORBIDDEN = 2
    OTHER_STORE = 3
    VERSION = 4
    BUSY = 5


class Ending(IntEnum):
    """What is known of the transfers with a slot."""

    ENDED = 0
    RUNNING = 1
    FAILED = 2
    """Ended, but what was sent may still come to lie."""


def with_nixl(allowed: frozenset[int]) -> frozenset[int]:
    """The operations, and those of the same meaning that move payload by NIXL."""
    more = {NIXL_GET} & {op + 2 for op in allowed} | {NIXL_PUT} & {op + 2 for op in allowed}
    return allowed | more | NIXL_CONTROL if more else allowed


class Wire:
    """One connection, used by one thread at a time but for `break_off`.

    Raises UnavailableError when the other end is gone, DeadlineError past `until`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._until = 0.0
        self.met: tuple[object, bytes] | None = None
        """With which agent of ours its caller has met the other end, and the acquaintance."""
        connection.settimeout(None)
        with contextlib.suppress(OSError):  # no TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def until(self, end: float) -> None:
        """Give up what is not done at `end`, a time of `time.monotonic`."""
        self._until = end

    def read(self, count: int) -> bytes:
        """Exactly so many bytes."""
        buffer = bytearray(count)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, into: memoryview) -> None:
        """Fill the memory."""
        at, size = 0, into.nbytes
        while at < size:
            self._allow(socket.SO_RCVTIMEO)
            count = self._tried(partial(self._received, into[at:]))
            if count == 0:
                raise UnavailableError("the connection ended")
            at += count

    def write(self, parts: Sequence[memoryview | bytes]) -> None:
        """Send the parts one after another."""
        pending = [memoryview(part).cast("B") for part in parts if len(part)]
        while pending:
            self._allow(socket.SO_SNDTIMEO)
            sent = self._tried(partial(self._sent, pending))
            while pending and sent >= pending[0].nbytes:
                sent -= pending.pop(0).nbytes
            if sent:
                pending[0] = pending[0][sent:]

    def break_off(self) -> None:
        """Make whatever the thread waits for fail; any thread may call it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _received(self, into: memoryview) -> int:
        if self._is_tls:
            return self._socket.recv_into(into)
        return self._socket.recv_into(into, 0, socket.MSG_WAITALL)

    def _sent(self, pending: Sequence[memoryview]) -> int:
        if self._is_tls:
            return self._socket.send(pending[0][:_TLS_PART_BYTES])
        return self._socket.sendmsg(pending[:_PARTS_MAX])

    def _allow(self, option: int) -> None:
        """Let the next call take until the deadline: in the kernel, so that the socket blocks.

        Not with TLS: Python's takes the end of the kernel's time for a reason to try again.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineError("the peer is too slow")
        seconds = int(left)
        microseconds = max(1, int((left - seconds) * 1e6))
        try:
            if self._is_tls:
                self._socket.settimeout(left)
                return
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, microseconds))
        except OSError as error:
            raise UnavailableError("the connection was closed") from error

    def _tried(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError):
            raise DeadlineError("the peer is too slow") from None
        except (OSError, ValueError) as error:  # ValueError: a TLS connection that was closed
            raise UnavailableError(f"the connection broke: {type(error).__name__}") from error


def read_count(wire: Wire, most: int) -> int:
    """A number of blocks. BackendError for more than can be."""
    (count,) = COUNT.unpack(wire.read(COUNT.size))
    if count > most:
        raise BackendError(f"{count} blocks, {most} were asked for")
    return int(count)

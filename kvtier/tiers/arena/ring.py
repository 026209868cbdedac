"""A ring in a writer's segment, through which payloads come to the store while they are staged.

    control page, 4096 bytes; words on cache lines of their own
         0   8  staged: bytes that the giver ever put into the ring
        64   8  taken: bytes that the taker ever took out of it
       128   4  1: the taker sleeps, whoever stages more must wake it by a message
       192   4  1: the giver waits for room (a futex)
    ring, a multiple of 1024 bytes; positions count for ever, a byte is at its position modulo that

A payload begins at the next multiple of 1024, so that no round of the checksum is cut by the ring's
end. Behind it, at the next multiple of 8, stand the writer's checksum and the payload's first
position xor its label: what both sides call it. Both sides move it in pieces at the same time: a
ring that fits the processor's last cache costs no memory traffic, and nobody is woken for a piece.

The taker trusts nothing here: it never goes beyond the ring, loads each byte once, hashes what it
stored in its own memory, and holds that against the writer's checksum. The native classes never
touch memory outside the buffers, wait no longer than they are told, and refuse to be used by two
threads at once. What must not live here: sockets, whose slots the places are.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, Protocol

from kvtier import _native
from kvtier.core.checksum import checksum
from kvtier.types import BytesLike, Integers

CONTROL_BYTES: Final = 4096
RING_BYTES_MIN: Final = 16 << 10
RING_BYTES_MAX: Final = 16 << 20
"""Half of a usual last-level cache, and what a busy machine stages or takes in one turn. Less than
a core's own cache holds is slower by half: every line wanders from one core's to the other's."""
ALIGNMENT: Final = 1024

_WORD: Final = struct.Struct("<Q")
_FLAG: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<QQ")
_STAGED_AT, _TAKEN_AT, _SLEEPS_AT = 0, 64, 128
_NOWHERE: Final = (1 << 64) - 1


class RingStatus(IntEnum):
    """Why a call came back."""

    DONE = 0
    WAITING = 1
    """The giver's: the ring stays full. The taker's: it stays empty; the giver was told so."""
    WAKE = 2
    """The giver's: the taker sleeps, and this giver is the one to wake it."""
    SLICE = 3
    """The taker's: as many bytes as one call may take."""
    BROKEN = 4
    """The taker's: what the giver says is impossible. Nothing more can be taken."""


class Giver(Protocol):
    """The writer's side."""

    def give(
        self, segment: BytesLike, sources: Sequence[BytesLike], label: int, wait_us: int
    ) -> tuple[bytes, int]:
        """Stage payloads, the first from where the last call ended.

        The checksums (packed u64) of those that are whole now, and a `RingStatus`. ValueError for
        another payload than was begun.
        """
        ...


class Taker(Protocol):
    """The store's side."""

    @property
    def is_between(self) -> bool:
        """Whether no payload is taken in part."""
        ...

    def take(
        self,
        segment: BytesLike,
        slots: BytesLike,
        places: Integers,
        label: int,
        bytes_max: int,
        idle_us: int,
    ) -> tuple[bytes, int]:
        """Take payloads to (offset, size) pairs of the slots, or nowhere: `directory.NOWHERE`.

        Waits `idle_us` for the next bytes, ten times that in all.

        For each that is whole now its checksum as it stands in the slot (of one that went nowhere:
        as declared) and the one that the giver declares, as packed u64, and a `RingStatus`.
        """
        ...


def ring_bytes_in(staging_bytes: int) -> int:
    """How large a ring a staging area of that size has room for; 0: none."""
    room = min((staging_bytes - CONTROL_BYTES) // ALIGNMENT * ALIGNMENT, RING_BYTES_MAX)
    return room if room >= RING_BYTES_MIN else 0


def new_giver(ring_bytes: int) -> Giver:
    return _native.RingGiver(ring_bytes)


def new_taker(ring_bytes: int) -> Taker:
    return _native.RingTaker(ring_bytes)


# The twins: oracles in tests. They look once where the native ones wait.


class PureRingGiver:
    """Twin of `_native.RingGiver`: stages a payload as it finds room, byte for byte the same."""

    def __init__(self, ring_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._end = 0
        self._given = 0
        """Of the payload that was begun, with its trailer."""

    def give(
        self, segment: BytesLike, sources: Sequence[BytesLike], label: int, wait_us: int
    ) -> tuple[bytes, int]:
        memory, checksums = memoryview(segment).cast("B"), []  # type: ignore[arg-type]
        for source in sources:
            begin = -(-self._end // ALIGNMENT) * ALIGNMENT
            whole, own = _with_trailer(bytes(memoryview(source)), begin, label)  # type: ignore[arg-type]
            at = begin + self._given
            room = self._ring_bytes - (at - _WORD.unpack_from(memory, _TAKEN_AT)[0])
            piece = whole[self._given : self._given + max(0, room)]
            if self._given + len(piece) < len(whole):
                piece = piece[: len(piece) // ALIGNMENT * ALIGNMENT]
            _write(memory, self._ring_bytes, at, piece)
            self._given += len(piece)
            is_whole = self._given == len(whole)
            if piece:
                _WORD.pack_into(memory, _STAGED_AT, at + len(piece))
            if is_whole:
                self._end, self._given = begin + len(whole), 0
                checksums.append(own)
            if piece and _FLAG.unpack_from(memory, _SLEEPS_AT)[0]:
                _FLAG.pack_into(memory, _SLEEPS_AT, 0)
                return b"".join(map(_WORD.pack, checksums)), RingStatus.WAKE
            if not is_whole:
                return b"".join(map(_WORD.pack, checksums)), RingStatus.WAITING
        return b"".join(map(_WORD.pack, checksums)), RingStatus.DONE


class PureRingTaker:
    """Twin of `_native.RingTaker`. Takes whole rounds, or all that is left of a payload."""

    def __init__(self, ring_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._end = 0
        self._taken = bytearray()

    @property
    def is_between(self) -> bool:
        return not self._taken

    def take(
        self,
        segment: BytesLike,
        slots: BytesLike,
        places: Integers,
        label: int,
        bytes_max: int,
        idle_us: int,
    ) -> tuple[bytes, int]:
        memory = memoryview(segment).cast("B")  # type: ignore[arg-type]
        _FLAG.pack_into(memory, _SLEEPS_AT, 0)
        pairs: list[bytes] = []
        for offset, size in zip(places[::2], places[1::2], strict=True):
            begin = -(-self._end // ALIGNMENT) * ALIGNMENT
            at, length = begin + len(self._taken), -(-int(size) // 8) * 8 + _TRAILER.size
            staged = _WORD.unpack_from(memory, _STAGED_AT)[0]
            if staged - at > self._ring_bytes:
                return b"".join(pairs), RingStatus.BROKEN
            left = length - len(self._taken)
            there = left if staged - at >= left else max(0, staged - at) // ALIGNMENT * ALIGNMENT
            self._taken += _read(memory, self._ring_bytes, at, there)
            _WORD.pack_into(memory, _TAKEN_AT, at + there)
            if len(self._taken) < length:
                _FLAG.pack_into(memory, _SLEEPS_AT, 1)
                return b"".join(pairs), RingStatus.WAITING
            declared, mark = _TRAILER.unpack_from(self._taken, length - _TRAILER.size)
            if mark != begin ^ label:
                return b"".join(pairs), RingStatus.BROKEN
            payload = bytes(self._taken[: int(size)])
            if int(offset) != _NOWHERE:
                memoryview(slots).cast("B")[int(offset) : int(offset) + len(payload)] = payload  # type: ignore[arg-type]
            seen = declared if int(offset) == _NOWHERE else checksum(payload)
            pairs.append(_TRAILER.pack(seen, declared))
            self._end, self._taken = begin + length, bytearray()
        return b"".join(pairs), RingStatus.DONE


def _with_trailer(payload: bytes, begin: int, label: int) -> tuple[bytes, int]:
    own = checksum(payload)
    padded = payload + bytes(-len(payload) % 8)
    return padded + _TRAILER.pack(own, begin ^ label), own


def _write(memory: memoryview, ring_bytes: int, position: int, piece: bytes) -> None:
    at = position % ring_bytes
    ring = memory[CONTROL_BYTES : CONTROL_BYTES + ring_bytes]
    first = piece[: ring_bytes - at]
    ring[at : at + len(first)] = first
    ring[: len(piece) - len(first)] = piece[len(first) :]


def _read(memory: memoryview, ring_bytes: int, position: int, count: int) -> bytes:
    at = position % ring_bytes
    ring = memory[CONTROL_BYTES : CONTROL_BYTES + ring_bytes]
    first = bytes(ring[at : at + count])
    return first + bytes(ring[: count - len(first)])

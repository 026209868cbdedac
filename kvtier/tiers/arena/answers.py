"""What a read of an arena asks for, and what is wrong with a block that is not given.

What must not live here: state, memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.frame import FrameExpectation, verify_copied
from kvtier.errors import FrameError, FrameFault
from kvtier.ports import GetRequest
from kvtier.tiers.arena.directory import ANY_LENGTH, Read, ReadStatus
from kvtier.tiers.arena.holdings import Held


@dataclass(frozen=True, slots=True)
class Asked:
    """One block of a read, with what was known of it before."""

    request: GetRequest
    held: Held
    target: memoryview


def agree(seen: Sequence[int], declared: Sequence[int | None]) -> bool:
    """Whether what was seen is what was declared, where anything was."""
    return all(want is None or want == got for want, got in zip(declared, seen, strict=True))


def target_of(request: GetRequest, held: Held) -> memoryview:
    """Where the payload goes: into the caller's memory, else into new."""
    if request.into is not None:
        return request.into.cast("B") if request.into.nbytes else memoryview(bytearray())
    return memoryview(bytearray(held.payload_bytes))


def length_of(request: GetRequest) -> int:
    """The length that a block must have, as the directory's operations take it."""
    return ANY_LENGTH if request.payload_bytes is None else request.payload_bytes


def fault_of(request: GetRequest, read: Read, frame: bytes) -> FrameError:
    """What is wrong with a block that was found and not given."""
    if read.status is ReadStatus.PAYLOAD:
        return FrameError(FrameFault.PAYLOAD_CHECKSUM, "the payload was altered")
    expected = FrameExpectation(request.name, request.payload_bytes)
    try:
        verify_copied(frame, read.payload_bytes, read.payload_checksum, expected)
    except FrameError as error:
        return error
    return FrameError(FrameFault.HEADER_FIELD, "the directory's entry was altered")

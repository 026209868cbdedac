"""Segment files: preallocated, appended to by direct I/O, read through the page cache.

Frames stand in runs of one write each: a run starts on a page, its frames on 64 bytes, so that many
small blocks cost no page each. A byte is written once in a segment's life; when the segment goes,
its file goes. All calls block. What must not live here: which segment, which thread, what is live.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.core.block_copy import copy_checksum
from kvtier.core.checksum import checksum
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    FrameName,
    encode_header,
    parse_header,
    verify,
    verify_copied,
)
from kvtier.errors import FrameError, FrameFault
from kvtier.ports import GetRequest
from kvtier.tiers.nvme.cached import copy_cached, is_mapped, present_cached, warm
from kvtier.tiers.nvme.lanes import Call
from kvtier.tiers.nvme.layout import Place, aligned_frame, aligned_pages

_SUFFIX: Final = ".segment"
_STAGE_BYTES: Final = 8 << 20
_STREAMS: Final = 2
_NO_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
RUN_BYTES: Final = _STAGE_BYTES
"""Of one write, but for a frame that is longer."""


class Segment:
    """One file. Its descriptors live until it was retired and nobody holds it any more."""

    def __init__(self, segment_id: int, path: Path, size: int) -> None:
        self.segment_id = segment_id
        self.path = path
        self.size = size
        self.tail = 0
        """Where the next run goes; the loop's."""
        self.failures_count = 0
        """Reads and writes that the disk refused; the loop's."""
        self._reading: list[int] = []
        self._writing = -1
        self._holds = 0
        self._writes = 0
        self._sealed = False
        self._retired = False
        self._lock = threading.Lock()

    def create(self) -> None:
        """Make the file with all its bytes, for its owner only. Raises OSError; then there is none.

        Its descriptors are opened here: what stands in the directory's place later is not followed.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size)
            self._writing = _open_direct(self.path)
        except OSError:
            os.close(descriptor)
            self.path.unlink()
            raise
        self._reading = [descriptor, *(_again(descriptor) for _ in range(_STREAMS))]

    def attach(self) -> None:
        """Open a file that is there, for reading. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._reading = [descriptor, *(_again(descriptor) for _ in range(_STREAMS))]

    def reopen(self) -> None:
        """Open an attached file for appending too. Raises OSError."""
        self._writing = _open_direct(self.path)

    def seal(self) -> None:
        """Take no more writes; those under way end first. A descriptor that is closed while a
        thread is about to use it may be another file's by then."""
        with self._lock:
            self._sealed = True
            self._close_if_unused()

    def hold(self) -> None:
        """Keep it readable, even when it is retired meanwhile."""
        with self._lock:
            self._holds += 1

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close it for reading once it is not held. The file is not removed."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def write(self, run: memoryview, offset: int) -> None:
        """Append whole pages. Raises OSError, also for a write that fell short."""
        with self._lock:
            if self._sealed or self._writing < 0:
                raise OSError(errno.EBADF, "the segment is sealed")
            self._writes += 1
        try:
            written = os.pwrite(self._writing, run, offset)
        finally:
            with self._lock:
                self._writes -= 1
                self._close_if_unused()
        if written != run.nbytes:
            raise OSError(errno.EIO, f"{written} of {run.nbytes} bytes written")

    def read(self, parts: Sequence[memoryview], offset: int, reader: int = 0) -> int:
        """Fill the parts from the disk, and return how many bytes there were.

        The kernel reads ahead, in large pages, where it sees one stream from front to back: readers
        of even and odd numbers have a descriptor each, and what is cached has one of its own.
        """
        return os.preadv(self._reading[1 + reader % _STREAMS], parts, offset)

    def copy_cached(self, head: memoryview, body: memoryview, offset: int) -> int | None:
        """See `kvtier.tiers.nvme.cached.copy_cached`."""
        return copy_cached(self._reading[0], offset, head, body)

    def warm(self, offset: int, size: int, reader: int) -> bool:
        """See `kvtier.tiers.nvme.cached.warm`."""
        return warm(self._reading[1 + reader % _STREAMS], offset, size)

    def has_cached(self, offset: int) -> bool:
        """Whether the page cache has this byte."""
        return present_cached(self._reading[0], offset, [memoryview(bytearray(1))]) == 1

    def _close_if_unused(self) -> None:
        if self._retired and not self._holds:
            while self._reading:
                os.close(self._reading.pop())
        if self._sealed and not self._writes and self._writing >= 0:
            os.close(self._writing)
            self._writing = -1


def segment_path(directory: Path, segment_id: int) -> Path:
    return directory / f"{segment_id:016x}{_SUFFIX}"


def segment_id_of(path: Path) -> int | None:
    """The id in a file name that `segment_path` made; None for any other."""
    stem = path.name.removesuffix(_SUFFIX)
    try:
        segment_id = int(stem, 16)
    except ValueError:
        return None
    return segment_id if path.name == segment_path(path.parent, segment_id).name else None


# Writing


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one payload of a run: where its frame is, if its checksum was as declared."""

    offset: int
    payload_checksum: int
    is_written: bool


@dataclass(frozen=True, slots=True)
class Payload:
    """One payload to write, or (None: it is there already) only to take the checksum of."""

    header: FrameHeader
    """With a checksum of 0, which is taken on the way."""
    view: memoryview
    declared_checksum: int | None
    is_known: bool


@dataclass(frozen=True, slots=True)
class Move:
    """One frame to copy to another segment."""

    name: FrameName
    source: Segment
    place: Place


class Stage:
    """The page-aligned memory that one thread's runs are put together in, and written from.

    What is hashed is what is written: the caller's memory is read once.
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, _STAGE_BYTES))

    def write_run(
        self, segment: Segment | None, offset: int, payloads: Sequence[Payload], call: Call
    ) -> list[Written]:
        """Copy, hash and append what is new, hash what is known. Raises OSError, AbandonedError.

        `segment` may be None where nothing is new.
        """
        size = aligned_pages(sum(aligned_frame(p.view.nbytes) for p in payloads if not p.is_known))
        memory = self._memory if size <= _STAGE_BYTES else memoryview(mmap.mmap(-1, size))
        written: list[Written] = []
        end = 0
        for payload in payloads:
            with call.touching():
                if payload.is_known:
                    written.append(Written(0, checksum(payload.view), is_written=False))
                    continue
                one = _stage_frame(memory[end:], payload, offset + end)
            written.append(one)
            end += aligned_frame(payload.view.nbytes) if one.is_written else 0
        if end:
            padded = aligned_pages(end)
            memory[end:padded] = bytes(padded - end)
            assert segment is not None
            segment.write(memory[:padded], offset)
        return written

    def move_run(self, moves: Sequence[Move], target: Segment, offset: int) -> list[int | None]:
        """Copy frames of one segment to another, verified; their offsets, None for what was wrong.

        They fit into RUN_BYTES together, or are one. Raises OSError.
        """
        size = aligned_pages(sum(aligned_frame(move.place.payload_bytes) for move in moves))
        memory = self._memory if size <= _STAGE_BYTES else memoryview(mmap.mmap(-1, size))
        offsets: list[int | None] = []
        end = 0
        for move in moves:
            frame = memory[end : end + move.place.frame_bytes]
            present = move.source.read([frame], move.place.offset)
            try:
                verify(frame[:present], FrameExpectation(move.name, move.place.payload_bytes))
            except FrameError:
                offsets.append(None)
                continue
            offsets.append(offset + end)
            next_end = end + aligned_frame(move.place.payload_bytes)
            memory[end + frame.nbytes : next_end] = bytes(next_end - end - frame.nbytes)
            end = next_end
        if end:
            padded = aligned_pages(end)
            memory[end:padded] = bytes(padded - end)
            target.write(memory[:padded], offset)
        return offsets


def _stage_frame(memory: memoryview, payload: Payload, offset: int) -> Written:
    end = HEADER_BYTES + payload.view.nbytes
    taken = copy_checksum(memory[HEADER_BYTES:end], payload.view)
    if payload.declared_checksum not in {None, taken}:
        return Written(0, taken, is_written=False)
    header = payload.header
    memory[:HEADER_BYTES] = encode_header(
        FrameHeader(header.name, header.writer_id, header.payload_bytes, taken)
    )
    memory[end : aligned_frame(payload.view.nbytes)] = bytes(
        aligned_frame(payload.view.nbytes) - end
    )
    return Written(offset, taken, is_written=True)


# Reading


@dataclass(frozen=True, slots=True)
class Task:
    """One frame to read, and for whom."""

    segment: Segment
    place: Place
    request: GetRequest


@dataclass(frozen=True, slots=True)
class Found:
    """A verified frame: its header, and its payload in the caller's memory or in memory of its
    own."""

    header: FrameHeader
    payload: memoryview


class ShortBufferError(Exception):
    """The caller's memory is too small for the payload."""


class Reader:
    """One thread's way to read frames, with memory of its own for what the disk may sit on.

    Bytes that wait for the disk go to the reader's memory first: a caller whose deadline passes
    gets its own memory back at once, and the reader's is not used again before its read is over.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._was_cached = True
        """The last frame; so is the next one, mostly."""
        self._memory = memoryview(mmap.mmap(-1, mmap.PAGESIZE))

    def read_frame(self, task: Task, call: Call) -> Found:
        """Read, verify and hand over one frame.

        Raises FrameError where it is not what was asked for, ShortBufferError, OSError where the
        disk fails, AbandonedError once the call is over.
        """
        segment, place, request = task.segment, task.place, task.request
        if request.payload_bytes not in {None, place.payload_bytes}:
            return _refute(segment, place, _expected(request))
        if request.into is None:  # memory that nobody else knows of
            return self._read_into_own(task)
        if request.into.nbytes < place.payload_bytes:
            raise ShortBufferError
        payload = _flat(request.into)[: place.payload_bytes]
        with call.touching():
            found = self._read_cached(task, payload)
        if found is None and segment.warm(place.offset, place.frame_bytes, self._number):
            with call.touching():
                found = self._read_cached(task, payload)
        if found is not None:
            return found
        memory = self._sized(place.frame_bytes)
        present = segment.read([memory], place.offset, self._number)
        header, copied = memory[:HEADER_BYTES], memory[HEADER_BYTES:]
        _require_whole(present, place)
        with call.touching():
            taken = copy_checksum(payload, copied)
        return Found(_verified(task, header, taken), payload)

    def _read_into_own(self, task: Task) -> Found:
        """Into memory that becomes the caller's."""
        segment, place = task.segment, task.place
        payload = memoryview(bytearray(place.payload_bytes))
        found = self._read_cached(task, payload)
        if found is None and segment.warm(place.offset, place.frame_bytes, self._number):
            found = self._read_cached(task, payload)
        if found is not None:
            return found
        header = memoryview(bytearray(HEADER_BYTES))
        present = segment.read(_parts(header, payload), place.offset, self._number)
        _require_whole(present, place)
        return Found(_verified(task, header, checksum(payload)), payload)

    def _read_cached(self, task: Task, payload: memoryview) -> Found | None:
        """Without waiting for the disk; None where the page cache lacks some of it."""
        segment, place = task.segment, task.place
        header = memoryview(bytearray(HEADER_BYTES))
        end = place.offset + place.frame_bytes
        is_doubtful = not self._was_cached and not is_mapped(place.frame_bytes)
        if is_doubtful and not segment.has_cached(end - 1):
            return None  # most likely; to copy half of it for nothing is dear
        taken = segment.copy_cached(header, payload, place.offset)
        self._was_cached = taken is not None
        return None if taken is None else Found(_verified(task, header, taken), payload)

    def _sized(self, size: int) -> memoryview:
        if size > self._memory.nbytes:
            self._memory = memoryview(mmap.mmap(-1, aligned_pages(size)))
        return self._memory[:size]


def _expected(request: GetRequest) -> FrameExpectation:
    return FrameExpectation(request.name, request.payload_bytes)


def _verified(task: Task, header: memoryview, taken: int) -> FrameHeader:
    """The header of a frame that was read whole and whose payload has the checksum `taken`.

    There is one header that is right, and it is cheaper made than taken apart; only another one is
    taken apart, to say what is wrong with it. Raises FrameError.
    """
    place = task.place
    right = FrameHeader(
        task.request.name, place.writer_id, place.payload_bytes, place.payload_checksum
    )
    if taken == place.payload_checksum and header == encode_header(right):
        return right
    return verify_copied(header, place.payload_bytes, taken, _expected(task.request))


def _refute(segment: Segment, place: Place, expected: FrameExpectation) -> Found:
    """A frame of another length than asked for: read its header to say what is wrong."""
    header = memoryview(bytearray(HEADER_BYTES))
    if segment.read([header], place.offset) < HEADER_BYTES:
        raise FrameError(FrameFault.SHORT, "the segment ends within the frame")
    said = parse_header(header)
    verify_copied(header, said.payload_bytes, said.payload_checksum, expected)
    raise FrameError(FrameFault.LENGTH, "the index has another length than the frame")


def _parts(header: memoryview, payload: memoryview) -> list[memoryview]:
    return [header, payload] if payload.nbytes else [header]


def _require_whole(present: int, place: Place) -> None:
    if present < place.frame_bytes:
        detail = f"{present} of {place.frame_bytes} bytes of the frame are there"
        raise FrameError(FrameFault.SHORT, detail)


def _flat(into: memoryview) -> memoryview:
    return into.cast("B") if into.nbytes else memoryview(bytearray())


def _again(descriptor: int) -> int:
    """Another description of the same file, which has a read-ahead of its own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _open_direct(path: Path) -> int:
    """A descriptor for writing past the page cache; through it where the file system must."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
    return os.open(path, flags)

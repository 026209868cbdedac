"""An arena seen from another process of its node: reads without a call, puts through a segment.

`get_many` and `contains` look into shared memory and call nobody: a block that is resident is
copied to the caller's buffer and verified there, in one native call a batch. What is not found,
or changes while it is read, is a miss: the store's own `Acquire` may know more. `put_many` copies
payloads into a ring of the segment while the store takes them out of it; what already stands in
memory from `allocate` is not copied again.

Blocking, safe from several threads; reads run in parallel, everything that talks waits its turn.
Nothing here raises for a store that is gone: reads go on as long as the memory says "serving",
puts are ERROR, and `is_attached` turns false: connect anew. After `close`, UnavailableError.
What must not live here: retries, asyncio, device memory.
"""

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np

from kvtier.core.checks import require_integer
from kvtier.core.frame import FrameExpectation, FrameName, verify_copied
from kvtier.errors import (
    BackendError,
    CallerError,
    DeadlineError,
    FrameError,
    FrameFault,
    UnavailableError,
)
from kvtier.ports import (
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    require_batch,
)
from kvtier.tiers.arena import messages
from kvtier.tiers.arena.directory import (
    ABI_VERSION,
    ANY_LENGTH,
    NATIVE,
    NOWHERE,
    ArenaOperations,
    ReadStatus,
    frame_header_of,
    located,
    packed_names,
    read_fields,
    read_layout,
)
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.arena.memory import Sealing, SharedMemory, attach
from kvtier.tiers.arena.messages import (
    BlockToCommit,
    Granted,
    Hello,
    Kind,
    LeasedBlock,
)
from kvtier.tiers.arena.putting import Put
from kvtier.tiers.arena.ring import (
    CONTROL_BYTES,
    RING_BYTES_MAX,
    RingStatus,
    new_giver,
    ring_bytes_in,
)
from kvtier.tiers.minting import hit, hits
from kvtier.tiers.tally import failed_get, payload_view

_TOUCHES_MAX: Final = 256
_ALIGNMENT: Final = 64
_FDS_COUNT: Final = 3
_WORD_BYTES: Final = 8
ROUSE_BLOCKS_MIN: Final = 8
_ROUSE: Final = messages.pack(Kind.READY, 0, 0)
_ROOM_WAIT_US: Final = 50_000
"""How long the ring may stay full before the store is looked for."""


@dataclass(frozen=True, slots=True)
class ArenaClientConfig:
    """`staging_bytes` of the segment are for `put_many`; the rest is for `allocate`.

    More than the default is not used. Less than 20 KiB are too little: then nothing can be put but
    what stands in the segment.
    """

    segment_bytes: int = CONTROL_BYTES + RING_BYTES_MAX
    staging_bytes: int = CONTROL_BYTES + RING_BYTES_MAX
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        require_integer("segment_bytes", self.segment_bytes, 1, 1 << 46)
        require_integer("staging_bytes", self.staging_bytes, 0, self.segment_bytes)


@dataclass(frozen=True, slots=True)
class AttachedMemory:
    """The three mappings of a session."""

    directory: SharedMemory
    slots: SharedMemory
    segment: SharedMemory

    def close(self) -> None:
        for memory in (self.directory, self.slots, self.segment):
            memory.close()


class ArenaClient:
    """One session with an arena. Make it with `connect_arena`."""

    def __init__(
        self,
        connection: socket.socket,
        memory: AttachedMemory,
        config: ArenaClientConfig,
        clock: Clock = time.monotonic,
        operations: ArenaOperations = NATIVE,
    ) -> None:
        self._connection = connection
        self._memory = memory
        self._config = config
        self._clock = clock
        self._operations = operations
        self._lock = threading.Lock()
        self._tags = itertools.count(1)
        self._touched: list[tuple[int, int]] = []
        self._corrupt: list[tuple[int, int]] = []
        self._allocated = config.staging_bytes
        self._giver = new_giver(self.ring_bytes) if self.ring_bytes else None
        self._attached = True
        self._closed = False

    @property
    def is_attached(self) -> bool:
        """Whether the store was there when it was last spoken to."""
        return self._attached

    def look(self) -> bool:
        """Look whether the store is still there, without waiting; returns `is_attached`.

        A store that was killed leaves its memory as it was: only its connection tells.
        """
        if self._attached and self._lock.acquire(blocking=False):
            try:
                self._connection.settimeout(0)
                if not self._connection.recv(1, socket.MSG_PEEK):
                    self._detach()
            except BlockingIOError:
                pass  # nothing to read: it is there
            except OSError:
                self._detach()
            finally:
                self._lock.release()
        return self._attached

    @property
    def memory(self) -> AttachedMemory:
        """What was mapped: for device transfers that register it, and for tests."""
        return self._memory

    def contains(self, names: Sequence[FrameName]) -> list[bool]:
        """Which blocks are resident. No call."""
        return [one is not None for one in self._find(names)]

    def get_many(self, requests: Sequence[GetRequest]) -> list[GetResult]:
        """Read resident blocks; see `BlockTier.get_many`. No call, no waiting, O(bytes)."""
        require_batch(requests, 0.0)
        self._require_open()
        targets = self._targets(requests)
        names = packed_names([request.name for request in requests])
        lengths = np.array([_length(request) for request in requests], np.uint64)
        memory = self._memory
        try:
            records = self._operations.read(
                memory.directory.view, memory.slots.view, names, lengths, targets
            )
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        results = []
        touched, corrupt = [], []
        fields = list(read_fields(records))
        statuses = [one[0] for one in fields]
        if statuses.count(ReadStatus.HIT) == len(statuses) > 0:  # nearly always
            return self._all_read(requests, targets, fields)
        for i, (request, target) in enumerate(zip(requests, targets, strict=True)):
            status, entry, generation, _, writer_id, size, seen = fields[i]
            if not status:
                payload = target if target.nbytes == size else target[:size]
                results.append(hit(request.name, writer_id, seen, payload))
                touched.append((entry, generation))
                continue
            result = _missed(request, ReadStatus(status), size, seen, records, i)
            if result.status is GetStatus.CORRUPT:
                corrupt.append((entry, generation))
            results.append(result)
        self._tell_used(touched, corrupt)
        return results

    def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """Put blocks; see `BlockTier.put_many`. Copies into the segment while the store works.

        Past the deadline the connection is given up (the store waits for the rest), and the blocks
        without an answer are TIMEOUT; those of a store that is gone are ERROR.
        """
        if len(requests) >= ROUSE_BLOCKS_MIN:
            self.rouse()
        flat = [payload_view(request.payload) for request in requests]
        return self._put(requests, flat, deadline_s)

    def rouse(self) -> None:
        """Tell the store that a put is about to begin: it wakes while the put is prepared. A hint,
        worth its while before puts of ROUSE_BLOCKS_MIN blocks and more; never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._hint(_ROUSE)
            finally:
                self._lock.release()

    def put_flat(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """`put_many` of payloads that are flat views of bytes already: not looked at again."""
        flat = cast("list[memoryview]", [request.payload for request in requests])
        return self._put(requests, flat, deadline_s)

    def _put(
        self, requests: Sequence[PutRequest], payloads: Sequence[memoryview], deadline_s: float
    ) -> list[PutResult]:
        require_batch(requests, deadline_s)
        self._require_open()
        try:
            with self._locked(deadline_s):
                return self._put_whole(requests, payloads, deadline_s)
        except DeadlineError:
            return [PutResult(PutStatus.TIMEOUT)] * len(requests)

    def _put_whole(
        self, requests: Sequence[PutRequest], payloads: Sequence[memoryview], deadline_s: float
    ) -> list[PutResult]:
        """Under the lock. A put that is broken off leaves the store waiting for its payloads, and
        would give it those of the next: so the session is over."""
        try:
            return Put(self, requests, payloads, deadline_s).run()
        except BaseException:
            self._detach()
            raise

    def allocate(self, size_bytes: int) -> memoryview:
        """Writable memory in the segment, aligned, for payloads that are put without a copy.

        Lives as long as the session and is not given back before. Raises BackendError where the
        segment has no room left.
        """
        require_integer("size_bytes", size_bytes, 1, self._config.segment_bytes)
        self._require_open()
        with self._lock:
            start = -(-self._allocated // _ALIGNMENT) * _ALIGNMENT
            if start + size_bytes > self._memory.segment.view.nbytes:
                raise BackendError("the segment has no room left")
            self._allocated = start + size_bytes
        return self._memory.segment.view[start : start + size_bytes]

    def offset_in_segment(self, payload: memoryview) -> int | None:
        """Where in the segment a payload stands; None if it does not."""
        (place,) = self.places_in_segment([payload])
        return None if place == NOWHERE else place

    def places_in_segment(self, payloads: Sequence[memoryview]) -> list[int]:
        """`offset_in_segment` of each; NOWHERE for those that do not stand there."""
        packed = self._operations.offsets(self._memory.segment.view, payloads)
        places: list[int] = np.frombuffer(packed, np.uint64).tolist()
        return places

    @property
    def ring_bytes(self) -> int:
        """Of the ring that payloads from elsewhere go through; 0: there is none."""
        return ring_bytes_in(self._config.staging_bytes)

    @property
    def arena_bytes(self) -> int:
        """Of all slots."""
        return self._memory.slots.view.nbytes

    def give(self, payloads: Sequence[memoryview], tag: int, deadline_s: float) -> None:
        """Stage the payloads of an announced put, under the lock, and wake the store where it has
        gone to sleep. Errors as `send`; CallerError for what is no plain memory."""
        giver, segment = self._giver, self._memory.segment.view
        rest = payloads if giver is not None else ()
        while giver is not None and rest:
            try:
                given, status = giver.give(segment, rest, tag, _ROOM_WAIT_US)
            except (ValueError, TypeError) as error:
                raise CallerError(str(error)) from error
            rest = rest[len(given) // _WORD_BYTES :]
            if status == RingStatus.WAKE:
                self.send(messages.pack(Kind.READY, 0, tag), deadline_s)
            elif rest:
                self._require_there(deadline_s)

    def _require_there(self, deadline_s: float) -> None:
        """Under the lock: raise as `send` where the store is gone or the time is over."""
        try:
            self._wait_until(deadline_s)
            self._connection.settimeout(0)
            if self._connection.recv(1, socket.MSG_PEEK):
                return
        except BlockingIOError:
            return
        except TimeoutError:
            self._detach()
            raise DeadlineError("the arena takes nothing") from None
        except OSError:
            pass
        self._detach()
        raise UnavailableError("the arena is gone")

    def reserve(self, blocks: Sequence[Wanted], ttl_ms: int, deadline_s: float) -> list[Granted]:
        """Take slots for blocks that will be written into the segment and committed."""
        body = self._call(
            lambda tag: messages.pack_reserve(tag, ttl_ms, blocks), len(blocks), deadline_s
        )
        return messages.parse_granted(len(blocks), body)

    def commit(self, blocks: Sequence[BlockToCommit], deadline_s: float) -> list[PutResult]:
        """Have blocks that stand in the segment verified and published."""
        body = self._call(lambda tag: messages.pack_commit(tag, blocks), len(blocks), deadline_s)
        return messages.parse_results(len(blocks), body)

    def abort(self, reservation_ids: Sequence[int], deadline_s: float) -> None:
        """Give reservations up. Their part of the segment is the caller's again."""
        self._call(lambda tag: messages.pack_ids(Kind.ABORT, tag, reservation_ids), 0, deadline_s)

    def lease(
        self, names: Sequence[FrameName], ttl_ms: int, deadline_s: float
    ) -> list[LeasedBlock | None]:
        """Keep resident blocks from being evicted while a device reads them; None: not there."""
        body = self._call(
            lambda tag: messages.pack_lease(tag, ttl_ms, names), len(names), deadline_s
        )
        return messages.parse_leased(len(names), body)

    def leased_view(self, leased: LeasedBlock) -> memoryview:
        """The slot of a leased block, read-only.

        Verify what was transferred and then ask `is_valid`, both before using it.
        """
        view = self._memory.slots.view[leased.slot_offset :]
        return view[: leased.payload_bytes]

    def is_valid(self, leased: Sequence[LeasedBlock]) -> list[bool]:
        """Whether each block was there all along: to be asked at the end of the read. No call."""
        answers = self._operations.unchanged(
            self._memory.directory.view,
            np.array([one.entry for one in leased], np.uint64),
            np.array([one.generation for one in leased], np.uint64),
        )
        return [answer == 1 for answer in answers]

    def release(self, leased: Sequence[LeasedBlock], deadline_s: float) -> None:
        """End leases. Idempotent."""
        ids = [one.lease_id for one in leased]
        self._call(lambda tag: messages.pack_ids(Kind.RELEASE, tag, ids), 0, deadline_s)

    def flush_touches(self) -> None:
        """Tell the store which blocks were read, so that it keeps them; never waits."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush_hints()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the session. Views that were handed out keep their memory. Idempotent."""
        with self._lock:
            self._closed = True
            self._detach()
            self._memory.close()

    def _all_read(
        self,
        requests: Sequence[GetRequest],
        targets: Sequence[memoryview],
        fields: Sequence[tuple[int, int, int, int, int, int, int]],
    ) -> list[GetResult]:
        _, entries, generations, _, writer_ids, sizes, seen = zip(*fields, strict=True)
        self._tell_used(list(zip(entries, generations, strict=True)), [])
        payloads = [
            target if target.nbytes == size else target[:size]
            for target, size in zip(targets, sizes, strict=True)
        ]
        return hits([request.name for request in requests], writer_ids, seen, payloads)

    def _find(self, names: Sequence[FrameName]) -> list[int | None]:
        """Payload lengths of resident blocks."""
        require_batch(names, 0.0)
        self._require_open()
        try:
            records = self._operations.find(self._memory.directory.view, packed_names(names))
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        return [None if one is None else one.payload_bytes for one in located(records)]

    def _targets(self, requests: Sequence[GetRequest]) -> list[memoryview]:
        """Memory for each payload: the caller's, or fresh as long as the block is."""
        without = [request.name for request in requests if request.into is None]
        lengths = iter(self._find(without)) if without else iter(())
        targets = []
        limit = self._memory.slots.view.nbytes
        for request in requests:
            if request.into is not None:
                into = request.into
                targets.append(into.cast("B") if into.nbytes else memoryview(bytearray()))
            else:
                length = next(lengths) or 0
                targets.append(memoryview(bytearray(length if length <= limit else 0)))
        return targets

    def _tell_used(self, touched: list[tuple[int, int]], corrupt: list[tuple[int, int]]) -> None:
        """Note what was read, and tell the store now and then; never waits for another thread."""
        self._touched.extend(touched)
        self._corrupt.extend(corrupt)
        if (corrupt or len(self._touched) >= _TOUCHES_MAX) and self._lock.acquire(blocking=False):
            try:
                self._flush_hints()
            finally:
                self._lock.release()

    def _flush_hints(self) -> None:
        """Send what was noted, under the lock; the newest, where that is too much for a message."""
        touched, self._touched = self._touched[-messages.ITEMS_COUNT_MAX :], []
        corrupt, self._corrupt = self._corrupt[-messages.ITEMS_COUNT_MAX :], []
        if corrupt:
            self._hint(messages.pack_pairs(Kind.CORRUPT, corrupt))
        if touched:
            self._hint(messages.pack_pairs(Kind.TOUCH, touched))

    @contextmanager
    def _locked(self, deadline_s: float) -> Iterator[None]:
        """Have the connection for this thread. DeadlineError where others have it until then."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - self._clock())):
            raise DeadlineError("other threads use the session")
        try:
            yield
        finally:
            self._lock.release()

    def _require_open(self) -> None:
        if self._closed:
            raise UnavailableError("the session is closed")

    def _hint(self, message: bytes) -> None:
        """Send what needs no answer, or leave it where that would wait."""
        if not self._attached:
            return
        try:
            self._connection.settimeout(0)
            self._connection.send(message)
        except BlockingIOError:
            return
        except OSError:
            self._detach()

    def _call(self, message: Callable[[int], bytes], count: int, deadline_s: float) -> bytes:
        """Send a request and return its answer's body.

        DeadlineError or UnavailableError, and then the session is over.
        """
        with self._locked(deadline_s):
            tag = next(self._tags)
            self.send(message(tag), deadline_s)
            answered, answers, body = self.receive(deadline_s)
            if (answered, answers) != (tag, count):
                self._detach()
                raise UnavailableError("the arena answered something else")
            return body

    def new_tag(self) -> int:
        """For a request that is sent under the lock."""
        return next(self._tags)

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send one message under the lock. Errors as `_call`."""
        if not self._attached:
            raise UnavailableError("no session with the arena")
        try:
            self._wait_until(deadline_s)
            self._connection.send(message)
        except TimeoutError:
            self._detach()
            raise DeadlineError("the arena takes no message") from None
        except OSError as error:
            self._detach()
            raise UnavailableError(f"the arena is gone: {error}") from error

    def receive(self, deadline_s: float) -> tuple[int, int, bytes]:
        """The next answer, under the lock: its tag, its count of items, its body."""
        try:
            self._wait_until(deadline_s)
            message = self._connection.recv(messages.MESSAGE_BYTES_MAX)
            head, body = messages.head_of(message)
        except TimeoutError:
            self._detach()
            raise DeadlineError("the arena does not answer") from None
        except (OSError, CallerError) as error:
            self._detach()
            raise UnavailableError(f"the arena is gone: {error}") from error
        if head.kind is not Kind.ANSWER:
            self._detach()
            raise UnavailableError("the arena does not answer what it was asked")
        return head.tag, head.count, body

    def _wait_until(self, deadline_s: float) -> None:
        remaining = deadline_s - self._clock()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)

    def _detach(self) -> None:
        if self._attached:
            self._attached = False
            self._connection.close()


def connect_arena(path: Path, config: ArenaClientConfig | None = None) -> ArenaClient:
    """Open a session with the arena behind a Unix socket. Blocks up to `connect_s`.

    Raises UnavailableError where there is none, or it refuses (another ABI, too many sessions):
    then the caller uses the store's service, or misses.
    """
    config = ArenaClientConfig() if config is None else config
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(config.connect_s)
        connection.connect(str(path))
        ring_bytes = ring_bytes_in(config.staging_bytes)
        hello = Hello(ABI_VERSION, config.segment_bytes, ring_bytes)
        connection.send(messages.pack_hello(hello))
        message, fds, _, _ = socket.recv_fds(connection, messages.MESSAGE_BYTES_MAX, 3)
        memory = _attach_all(message, fds)
    except OSError as error:
        connection.close()
        raise UnavailableError(f"no arena there: {error}") from error
    except (CallerError, BackendError) as error:
        connection.close()
        raise UnavailableError(f"no session with the arena: {error}") from error
    return ArenaClient(connection, memory, config)


def _attach_all(message: bytes, fds: list[int]) -> AttachedMemory:
    """Map what came with a welcome. CallerError or BackendError; the descriptors are closed."""
    unused = deque(fds)
    attached: list[SharedMemory] = []
    try:
        head, body = messages.head_of(message)
        if head.kind is not Kind.WELCOME or len(fds) != _FDS_COUNT:
            raise CallerError(f"refused: {body[:64].decode('ascii', 'replace')}")
        welcome = messages.parse_welcome(body)
        for sealing in (Sealing.OWNER_WRITES, Sealing.OWNER_WRITES, Sealing.OTHERS_WRITE):
            attached.append(attach(unused.popleft(), sealing))
        memory = AttachedMemory(*attached)
        layout = read_layout(memory.directory.view)
        if welcome.epoch != layout.epoch or memory.slots.view.nbytes < layout.slots_bytes:
            raise CallerError("the arena's memory is not what its server says")
    except (CallerError, BackendError):
        for fd in unused:
            os.close(fd)
        for mapped in attached:
            mapped.close()
        raise
    return memory


def _missed(
    request: GetRequest, status: ReadStatus, size: int, seen: int, records: bytes, position: int
) -> GetResult:
    match status:
        case ReadStatus.MISS:
            return GetResult(GetStatus.MISS)
        case ReadStatus.BUFFER_SHORT:
            return GetResult(GetStatus.ERROR, reason="buffer_short")
        case ReadStatus.PAYLOAD:
            return GetResult(GetStatus.CORRUPT, reason=FrameFault.PAYLOAD_CHECKSUM.value)
    expected = FrameExpectation(request.name, request.payload_bytes)
    frame = frame_header_of(records, position)
    try:
        verify_copied(frame, size, seen, expected)
    except FrameError as error:
        return failed_get(error)
    return GetResult(GetStatus.CORRUPT, reason=FrameFault.HEADER_FIELD.value)


def _length(request: GetRequest) -> int:
    return ANY_LENGTH if request.payload_bytes is None else request.payload_bytes

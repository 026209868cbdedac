"""Lets other processes of the node into an arena: sessions, segments, reservations, leases.

A session is one connection of one client. It gets directory and slots to read, and a segment of
its own to write; nothing else of the arena can it ever write. A put is a commit: the store copies
the block out of the segment into a slot, verified, and publishes it. So a writer that stops, dies
or goes on writing touches only its own segment. What a session holds (reservations, leases) dies
with its connection; by time alone a lease ends and a reservation only goes into quarantine.

`ArenaServer`'s methods are plain, for a service to call them by its own protocol; `ArenaListener`
speaks kvtier.tiers.arena.messages on a Unix socket, which also passes the descriptors and tells of
a client's death. Whoever may connect is trusted with everything in the arena: one arena a trust
group, a socket that only its user can reach, and peers of other users refused.
What must not live here: copying (the tier does it), gRPC.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.core.checks import require_integer
from kvtier.core.eviction import PinToken
from kvtier.core.frame import FrameName
from kvtier.errors import BackendError, CallerError, KvtierError, OverloadedError
from kvtier.limits import LEASE_MS_MAX, RESERVATION_TTL_MS_MAX
from kvtier.ports import Clock, PutResult, PutStatus
from kvtier.tiers.arena import messages
from kvtier.tiers.arena.directory import ABI_VERSION
from kvtier.tiers.arena.holdings import Reservation, ReservationState, Wanted
from kvtier.tiers.arena.memory import Sealing, SharedMemory, create
from kvtier.tiers.arena.messages import (
    BlockToCommit,
    Granted,
    Head,
    Kind,
    LeasedBlock,
    Welcome,
)
from kvtier.tiers.arena.taking import Answering, Intake, in_segment
from kvtier.tiers.arena.tier import ArenaTier

_HELLO_S = 5.0
_ANSWER_S = 5.0
_TICK_S = 0.25
_ROUSED_S = 200e-6
"""How long a message that was said to come at once is waited for, rather than sleep."""
_TURN_MESSAGES = 16
"""Messages of one client that are answered before others have their turn."""
_SEGMENT_BYTES_MIN = 1 << 16
_SEGMENT_BYTES_MAX = 1 << 40


@dataclass(frozen=True, slots=True)
class ArenaServerConfig:
    """Ceilings of what clients may take."""

    sessions_max: int = 64
    segment_bytes_max: int = 1 << 30
    segments_bytes_max: int = 4 << 30
    """All sessions together."""
    reservations_max: int = 1024
    """Open or quarantined, of one session."""
    leases_max: int = 1024
    """Of one session."""

    def __post_init__(self) -> None:
        require_integer("sessions_max", self.sessions_max, 1, 1 << 16)
        require_integer(
            "segment_bytes_max", self.segment_bytes_max, _SEGMENT_BYTES_MIN, _SEGMENT_BYTES_MAX
        )
        require_integer("segments_bytes_max", self.segments_bytes_max, 1, _SEGMENT_BYTES_MAX)
        require_integer("reservations_max", self.reservations_max, 0, 1 << 20)
        require_integer("leases_max", self.leases_max, 0, 1 << 20)


@dataclass(slots=True)
class _Lease:
    name: FrameName
    token: PinToken
    expires_s: float


@dataclass(slots=True)
class _Reserved:
    reservation: Reservation
    expires_s: float


@dataclass(slots=True, eq=False)
class Session:
    """One client. Made by `ArenaServer.open_session`, ended by `close_session`."""

    segment: SharedMemory
    intake: Intake
    reserved: dict[int, _Reserved] = field(default_factory=dict)
    leases: dict[int, _Lease] = field(default_factory=dict)
    is_rousing: bool = False
    """Its last message said that a put is about to be announced."""


@dataclass(slots=True)
class ServerStats:
    """What sessions hold now, and what went wrong since the start."""

    sessions: int = 0
    segments_bytes: int = 0
    reservations: int = 0
    quarantined: int = 0
    leases: int = 0
    leases_expired: int = 0
    reservations_expired: int = 0
    refused_sessions: int = 0
    broken_messages: int = 0


class ArenaServer:
    """The plain methods of a session. One event loop's thread, as the tier."""

    def __init__(self, tier: ArenaTier, config: ArenaServerConfig, clock: Clock) -> None:
        self.tier = tier
        self._config = config
        self._clock = clock
        self._sessions: dict[Session, None] = {}
        self._ids = itertools.count(1)
        self._counts = ServerStats()

    def stats(self) -> ServerStats:
        """A snapshot."""
        sessions = list(self._sessions)
        return ServerStats(
            sessions=len(sessions),
            segments_bytes=sum(session.segment.view.nbytes for session in sessions),
            reservations=sum(_reservations_count(session) for session in sessions),
            quarantined=self.tier.quarantined_count,
            leases=sum(len(session.leases) for session in sessions),
            leases_expired=self._counts.leases_expired,
            reservations_expired=self._counts.reservations_expired,
            refused_sessions=self._counts.refused_sessions,
            broken_messages=self._counts.broken_messages,
        )

    def now(self) -> float:
        """The time by which its sessions' times are held."""
        return self._clock()

    def count_broken(self) -> None:
        """Count a connection that was ended for what it said."""
        self._counts.broken_messages += 1

    def open_session(self, abi: int, segment_bytes: int, ring_bytes: int = 0) -> Session:
        """Let a client in, with a writable segment of its own, a part of which may be a ring.

        Raises CallerError for another ABI or an impossible size, OverloadedError past a ceiling,
        BackendError where there is no memory.
        """
        config = self._config
        try:
            if abi != ABI_VERSION:
                raise CallerError(f"abi is {abi}, this arena's is {ABI_VERSION}")
            require_integer(
                "segment_bytes", segment_bytes, _SEGMENT_BYTES_MIN, config.segment_bytes_max
            )
            used = self.stats()
            if used.sessions >= config.sessions_max:
                raise OverloadedError("too many sessions")
            if used.segments_bytes + segment_bytes > config.segments_bytes_max:
                raise OverloadedError("segments take all the memory that they may")
            segment = create("kvtier-segment", segment_bytes, Sealing.OTHERS_WRITE)
            try:
                intake = Intake(self.tier, segment.view, ring_bytes, self._clock)
            except CallerError:
                segment.close()
                raise
        except KvtierError:
            self._counts.refused_sessions += 1
            raise
        session = Session(segment, intake)
        self._sessions[session] = None
        return session

    def close_session(self, session: Session) -> None:
        """End a session whose client is gone: everything that it held is free. Idempotent."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self.tier.abort([held.reservation for held in session.reserved.values()])
        session.reserved.clear()
        session.intake.close()
        for lease in session.leases.values():
            self.tier.unpin(lease.name, lease.token)
        session.leases.clear()
        session.segment.close()

    def reserve(self, session: Session, blocks: Sequence[Wanted], ttl_ms: int) -> list[Granted]:
        """Take slots for blocks that the client is going to write into its segment.

        Says at once which blocks need not be written (DUPLICATE: a block of that name is there)
        and which would not fit.
        """
        require_integer("ttl_ms", ttl_ms, 1, RESERVATION_TTL_MS_MAX)
        expires_s = self._clock() + ttl_ms / 1000
        return [self._reserve(session, block, expires_s) for block in blocks]

    async def commit(
        self, session: Session, blocks: Sequence[BlockToCommit], deadline_s: float
    ) -> list[PutResult]:
        """Copy blocks out of the session's segment, verify and publish them.

        With a reservation the block goes into its slot; one that has expired is refused, and its
        slot is free from then on, since its writer is done.
        """
        payloads = in_segment(session.segment.view, blocks)
        if not any(block.reservation_id for block in blocks):
            return await self._write(blocks, payloads, deadline_s)
        taken = [
            self._take_reservation(session, block) if block.reservation_id else None
            for block in blocks
        ]
        slots = [(i, one) for i, one in enumerate(taken) if isinstance(one, Reservation)]
        filled = await self.tier.write_reserved(
            [reservation for _, reservation in slots],
            [payloads[i] for i, _ in slots],
            [blocks[i].payload_checksum for i, _ in slots],
        )
        direct = [i for i, one in enumerate(taken) if one is None]
        written = await self._write(
            [blocks[i] for i in direct], [payloads[i] for i in direct], deadline_s
        )
        done = {i: one for i, one in enumerate(taken) if isinstance(one, PutResult)}
        done |= {i: result for (i, _), result in zip(slots, filled, strict=True)}
        done |= dict(zip(direct, written, strict=True))
        return [done[i] for i in range(len(blocks))]

    def begin(self, session: Session, tag: int, blocks: list[BlockToCommit]) -> None:
        """Take slots for blocks that are going to come: see `Intake.begin`."""
        left = self._config.reservations_max - _reservations_count(session)
        session.intake.begin(tag, blocks, left)

    async def advance(self, session: Session, answer: Answering) -> None:
        """Take what has come of the blocks that were announced: see `Intake.advance`."""
        await session.intake.advance(answer)

    def abort(self, session: Session, reservation_ids: Sequence[int]) -> None:
        """The client writes these no more: their slots are free. Unknown ids are ignored."""
        for reservation_id in reservation_ids:
            held = session.reserved.pop(reservation_id, None)
            if held is not None:
                self.tier.abort([held.reservation])

    def lease(
        self, session: Session, names: Sequence[FrameName], ttl_ms: int
    ) -> list[LeasedBlock | None]:
        """Keep blocks from being evicted while a device reads them; None for one not there.

        The reader verifies after its transfer, and asks whether the generation is still the same:
        a drop, or the end of the lease, is not waited for.
        """
        require_integer("ttl_ms", ttl_ms, 1, LEASE_MS_MAX)
        expires_s = self._clock() + ttl_ms / 1000
        return [self._lease(session, name, expires_s) for name in names]

    def release(self, session: Session, lease_ids: Sequence[int]) -> None:
        """End leases. Idempotent: unknown ids are ignored."""
        for lease_id in lease_ids:
            lease = session.leases.pop(lease_id, None)
            if lease is not None:
                self.tier.unpin(lease.name, lease.token)

    def expire(self) -> None:
        """End leases whose time is over, and quarantine such reservations. O(held by sessions)."""
        now = self._clock()
        for session in self._sessions:
            over = [i for i, lease in session.leases.items() if lease.expires_s <= now]
            self._counts.leases_expired += len(over)
            self.release(session, over)
            for held in session.reserved.values():
                is_over = held.expires_s <= now
                if is_over and held.reservation.state is ReservationState.OPEN:
                    self._counts.reservations_expired += 1
                    self.tier.quarantine(held.reservation)

            self._counts.reservations_expired += session.intake.expire(now)

    async def _write(
        self, blocks: Sequence[BlockToCommit], payloads: Sequence[memoryview], deadline_s: float
    ) -> list[PutResult]:
        wanted = [block.wanted for block in blocks]
        declared = [block.payload_checksum for block in blocks]
        return await self.tier.write_many(wanted, payloads, declared, deadline_s)

    def _reserve(self, session: Session, block: Wanted, expires_s: float) -> Granted:
        if self.tier.held(block.name) is not None:
            return Granted(0, PutResult(PutStatus.DUPLICATE))
        if len(session.reserved) >= self._config.reservations_max:
            return Granted(0, PutResult(PutStatus.REFUSED, "reservations_max"))
        (taken,) = self.tier.reserve_many([block])
        if not isinstance(taken, Reservation):
            return Granted(0, PutResult(PutStatus.REFUSED, taken))
        reservation_id = next(self._ids)
        session.reserved[reservation_id] = _Reserved(taken, expires_s)
        return Granted(reservation_id, PutResult(PutStatus.STORED))

    def _take_reservation(self, session: Session, block: BlockToCommit) -> Reservation | PutResult:
        held = session.reserved.get(block.reservation_id)
        if held is None:
            return PutResult(PutStatus.ERROR, "no_reservation")
        reservation = held.reservation
        wanted = reservation.wanted
        asked = block.wanted
        if (wanted.name, wanted.payload_bytes) != (asked.name, asked.payload_bytes):
            return PutResult(PutStatus.ERROR, "other_reservation")
        del session.reserved[block.reservation_id]
        if reservation.state is not ReservationState.OPEN:
            self.tier.abort([reservation])
            return PutResult(PutStatus.ERROR, "expired")
        return reservation

    def _lease(self, session: Session, name: FrameName, expires_s: float) -> LeasedBlock | None:
        held = self.tier.held(name)
        if held is None or len(session.leases) >= self._config.leases_max:
            return None
        token = self.tier.pin(name)
        if token is None:
            return None
        lease_id = next(self._ids)
        session.leases[lease_id] = _Lease(name, token, expires_s)
        self.tier.touch([name])
        return LeasedBlock(
            lease_id,
            held.entry,
            held.generation,
            held.slot.offset,
            held.payload_bytes,
            held.payload_checksum,
        )


class ArenaListener:
    """Serves sessions on a Unix socket, one task a connection."""

    def __init__(self, server: ArenaServer, path: Path) -> None:
        self._server = server
        self._path = path
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen, on the running loop. The path must not exist, its folder be the user's alone."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            mask = os.umask(0o177)
            try:
                listening.bind(str(self._path))
            finally:
                os.umask(mask)
            listening.listen()
        except OSError as error:
            listening.close()
            raise BackendError(f"no socket for the arena: {error}") from error
        listening.setblocking(False)
        self._socket = listening
        self._start(self._accept(listening))
        self._start(self._tick())

    async def close(self) -> None:
        """End every session and stop listening. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._server.expire()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # out of descriptors: those who wait stay in the queue
                await asyncio.sleep(_TICK_S)
                continue
            self._start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        session = None
        try:
            connection.setblocking(False)
            async with asyncio.timeout(_HELLO_S):
                session = await self._welcome(connection)
            for turn in itertools.count():
                if session is None:
                    return
                if turn % _TURN_MESSAGES == 0:
                    await asyncio.sleep(0)  # a socket that always has more never lets go
                message = _at_once(connection) if session.is_rousing else None
                if message is None:
                    message = await asyncio.get_running_loop().sock_recv(
                        connection, messages.MESSAGE_BYTES_MAX
                    )
                if not message:
                    return
                for answer in await self._answers(session, connection, message):
                    await _send(connection, answer)
        except (OSError, TimeoutError):
            return  # the client is gone, or does not take its answers
        except KvtierError:
            self._server.count_broken()
        finally:
            connection.close()
            if session is not None:
                self._server.close_session(session)

    async def _welcome(self, connection: socket.socket) -> Session | None:
        message = await asyncio.get_running_loop().sock_recv(connection, messages.MESSAGE_BYTES_MAX)
        if not message:
            return None
        head, body = messages.head_of(message)
        if head.kind is not Kind.HELLO or _peer_uid(connection) not in {os.geteuid(), 0}:
            raise CallerError("not a hello of a user who may come in")
        hello = messages.parse_hello(body)
        try:
            session = self._server.open_session(hello.abi, hello.segment_bytes, hello.ring_bytes)
        except KvtierError as error:
            reason = type(error).__name__.encode()
            await _send(connection, messages.pack(Kind.REFUSED, 0, 0, reason))
            return None
        tier = self._server.tier
        fds = [tier.directory_memory.fd, tier.slots_memory.fd, session.segment.fd]
        welcome = Welcome(ABI_VERSION, tier.layout.epoch, hello.segment_bytes)
        try:
            socket.send_fds(connection, [messages.pack_welcome(welcome)], fds)
        except OSError:
            self._server.close_session(session)
            raise
        return session

    async def _answers(
        self, session: Session, connection: socket.socket, message: bytes
    ) -> list[bytes]:
        """Do what a message says; the answers that could not be sent at once."""
        head, body = messages.head_of(message)
        session.is_rousing = False
        if head.kind not in {Kind.BEGIN, Kind.READY}:
            answer = await self._answer(session, head, body)
            return [] if answer is None else [answer]
        if head.kind is Kind.BEGIN:
            self._server.begin(session, head.tag, messages.parse_commit(head.count, body))
        else:
            session.is_rousing = not session.intake.is_expecting
        unsent: list[bytes] = []

        def send(tag: int, results: list[PutResult]) -> None:
            packed = messages.pack_results(tag, results)
            try:
                connection.send(packed)
            except OSError:  # the client is gone, or has not taken the last ones
                unsent.append(packed)

        await self._server.advance(session, send)
        return unsent

    async def _answer(self, session: Session, head: Head, body: bytes) -> bytes | None:
        match head.kind:
            case Kind.COMMIT:
                return await self._commit(session, head, body)
            case Kind.RESERVE:
                ttl_ms, blocks = messages.parse_reserve(head.count, body)
                granted = self._server.reserve(session, blocks, ttl_ms)
                return messages.pack_granted(head.tag, granted)
            case Kind.LEASE:
                ttl_ms, names = messages.parse_lease(head.count, body)
                leased = self._server.lease(session, names, ttl_ms)
                return messages.pack_leased(head.tag, leased)
            case Kind.ABORT:
                self._server.abort(session, messages.parse_ids(head.count, body))
                return messages.pack(Kind.ANSWER, 0, head.tag)
            case Kind.RELEASE:
                self._server.release(session, messages.parse_ids(head.count, body))
                return messages.pack(Kind.ANSWER, 0, head.tag)
            case Kind.TOUCH:
                self._server.tier.touch_entries(messages.parse_pairs(head.count, body))
                return None
            case Kind.CORRUPT:
                for entry, generation in messages.parse_pairs(head.count, body):
                    self._server.tier.recheck(entry, generation)
                return None
        raise CallerError(f"a client does not say {head.kind.name}")

    async def _commit(self, session: Session, head: Head, body: bytes) -> bytes:
        blocks = messages.parse_commit(head.count, body)
        deadline_s = self._server.now() + _ANSWER_S
        results = await self._server.commit(session, blocks, deadline_s)
        return messages.pack_results(head.tag, results)


def _reservations_count(session: Session) -> int:
    return len(session.reserved) + session.intake.reservations_count


def _at_once(connection: socket.socket) -> bytes | None:
    """The next message of a client that said it would come at once; None if it does not."""
    end_s = time.monotonic() + _ROUSED_S
    while time.monotonic() < end_s:
        try:
            return connection.recv(messages.MESSAGE_BYTES_MAX)
        except BlockingIOError:
            continue
    return None


async def _send(connection: socket.socket, message: bytes) -> None:
    with contextlib.suppress(BlockingIOError):  # a client that takes its answers makes none wait
        connection.send(message)
        return
    async with asyncio.timeout(_ANSWER_S):
        await asyncio.get_running_loop().sock_sendall(connection, message)


def _peer_uid(connection: socket.socket) -> int:
    layout = struct.Struct("iII")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    uid: int = layout.unpack(credentials)[1]
    return uid

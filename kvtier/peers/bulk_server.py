"""The far end of the bulk channel: lets in who may, and moves payload between sockets and slots.

A thread a connection: the kernel copies from and into the slots themselves, and nothing else of the
store waits for it. What blocks are where, and what becomes of them, is decided on the event loop.
What must not live here: credentials, roles, tiers (the service has them).
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameName, KeyKind, frame_names
from kvtier.errors import CallerError, KvtierError, LimitError
from kvtier.limits import PAYLOAD_BYTES_MAX, STORE_DEADLINE_MS_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.peers import bulk_wire as form
from kvtier.ports import BlockOwner, GetStatus, PutResult
from kvtier.store.gates import grouped
from kvtier.types import Fingerprint, ScopeId
from kvtier.wire import blocks

CONNECTIONS_MAX: Final = 64
GROUP_BLOCKS: Final = 256
GROUP_BYTES: Final = 32 << 20
"""Payload that is lent, or reserved, for one connection at a time."""
HANDSHAKE_S: Final = 5.0
STALL_S: Final = 5.0
"""How long one payload may take to come or go."""
IDLE_S: Final = 300.0
_DIGEST_BYTES_MAX: Final = 32
_UNKNOWN_BYTES: Final = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks that are being sent. `give_back` must be told the end of it."""

    statuses: Sequence[GetStatus]
    headers: bytes
    """128 bytes a hit."""
    payloads: Sequence[memoryview]
    """One a hit."""
    back: Callable[[], Coroutine[Any, Any, bytes]]
    """For the loop: lets go, and says 1 for each hit that was still itself."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for blocks that are coming."""

    views: Sequence[memoryview | None]
    """One a block; None: its bytes are thrown away."""
    settle: Callable[[Sequence[int], Sequence[int]], Coroutine[Any, Any, list[PutResult]]]
    """For the loop: publishes, by the checksums that were seen and declared."""
    abandon: Callable[[], Coroutine[Any, Any, None]]
    """For the loop: instead of `settle`, when nobody writes any more."""


class BulkStore(Protocol):
    """What the server asks of the store; all on the event loop."""

    async def lend(
        self, names: Sequence[FrameName], payload_bytes: int | None, deadline_s: float
    ) -> Lent: ...

    async def make_room(
        self, names: Sequence[FrameName], lengths: Sequence[int], owner: BlockOwner
    ) -> Room: ...


class Doorkeeper(Protocol):
    """Whom the server lets in. Called on threads."""

    def context(self) -> ssl.SSLContext | None:
        """TLS for a connection that begins now; None: plain text."""
        ...

    def admit(self, token: str, uris: Sequence[str], store: str) -> frozenset[int] | form.Refusal:
        """Which operations are allowed to a caller with this token and these names in its
        certificate, who wants to talk to `store`."""
        ...


class BulkServer:
    """See the module. Belongs to one event loop; `close` it."""

    def __init__(self, store: BulkStore, door: Doorkeeper, listener: socket.socket) -> None:
        """The listener is bound and listens; it is the server's from now on."""
        self._store = store
        self._door = door
        self._listener = listener
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, "kvtier-bulk-server")
        self._wires: set[form.Wire] = set()
        self._connections = 0
        self._accepting = self._loop.create_task(self._accept())

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    async def close(self) -> None:
        """End every connection at once. Idempotent."""
        self._accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting
        self._listener.close()
        for wire in tuple(self._wires):
            wire.break_off()
        await asyncio.to_thread(self._threads.shutdown)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.05)  # no more descriptors: others must end first
                continue
            if self._connections >= CONNECTIONS_MAX:
                connection.close()
                continue
            self._connections += 1
            wire = form.Wire(connection)
            self._wires.add(wire)
            serving = self._loop.run_in_executor(self._threads, self._serve, connection, wire)
            serving.add_done_callback(partial(self._ended, wire))

    def _ended(self, wire: form.Wire, _: asyncio.Future[None]) -> None:
        self._connections -= 1
        self._wires.discard(wire)

    # On a connection's thread

    def _serve(self, connection: socket.socket, plain: form.Wire) -> None:
        wire = plain
        try:
            wire, uris = self._secured(connection, plain)
            allowed = self._greeted(wire, uris)
            while allowed:
                wire.until(time.monotonic() + IDLE_S)
                self._request(wire, allowed)
        except (KvtierError, OSError, ValueError, CancelledError):
            return  # the other end hears that the connection is gone
        finally:
            wire.close()
            plain.close()
            self._wires.discard(wire)

    def _secured(self, connection: socket.socket, plain: form.Wire) -> tuple[form.Wire, list[str]]:
        context = self._door.context()
        if context is None:
            return plain, []
        connection.settimeout(HANDSHAKE_S)
        secured = context.wrap_socket(connection, server_side=True)
        wire = form.Wire(secured)
        self._wires.add(wire)
        names = (secured.getpeercert() or {}).get("subjectAltName", ())
        uris = [str(pair[1]) for pair in names if len(pair) == 2 and pair[0] == "URI"]
        return wire, uris

    def _greeted(self, wire: form.Wire, uris: Sequence[str]) -> frozenset[int]:
        wire.until(time.monotonic() + HANDSHAKE_S)
        head = form.GREETING.unpack(wire.read(form.GREETING.size))
        magic, version, token_bytes, name_bytes = head
        if magic != form.MAGIC:
            raise CallerError("not the bulk channel")
        if token_bytes > form.TOKEN_BYTES_MAX or name_bytes > form.NAME_BYTES_MAX:
            raise LimitError("a greeting that is too long")
        token = wire.read(token_bytes).decode("ascii", "replace")
        name = wire.read(name_bytes).decode("utf-8", "replace")
        answer: frozenset[int] | form.Refusal = form.Refusal.VERSION
        if version == form.VERSION:
            answer = self._door.admit(token, uris, name)
        if isinstance(answer, form.Refusal):
            wire.write([bytes([answer])])
            return frozenset()
        wire.write([b"\0"])
        return answer

    def _request(self, wire: form.Wire, allowed: frozenset[int]) -> None:
        fields = form.REQUEST.unpack(wire.read(form.REQUEST.size))
        op, kind, key_bytes, _, codec_id, count, ms, payload_bytes, namespace = fields[:9]
        writer_id, scope_bytes = fields[9:]
        if op not in allowed or kind not in KeyKind.__members__.values():
            raise CallerError("an operation that is not allowed, or none")
        if not 0 < count <= TIER_BATCH_BLOCKS_MAX or not 0 < key_bytes <= _DIGEST_BYTES_MAX:
            raise LimitError("too many blocks, or keys that are too long")
        if payload_bytes > PAYLOAD_BYTES_MAX or scope_bytes > form.NAME_BYTES_MAX:
            raise LimitError("a length that cannot be")
        wire.until(time.monotonic() + STALL_S)
        keys = wire.read(count * key_bytes)
        names = frame_names(KeyKind(kind), keys, key_bytes, Fingerprint(namespace), codec_id)
        deadline_s = time.monotonic() + min(max(ms, 1), STORE_DEADLINE_MS_MAX) / 1000
        if op == form.GET:
            self._give(wire, names, payload_bytes or None, deadline_s)
        else:
            self._take(wire, names, (writer_id, scope_bytes))

    def _give(
        self,
        wire: form.Wire,
        names: Sequence[FrameName],
        payload_bytes: int | None,
        deadline_s: float,
    ) -> None:
        sizes = [payload_bytes or _UNKNOWN_BYTES] * len(names)
        for run in grouped(sizes, GROUP_BLOCKS, GROUP_BYTES):
            some = [names[i] for i in run]
            lent = self._on_loop(self._store.lend(some, payload_bytes, deadline_s))
            statuses = blocks.get_statuses(lent.statuses)
            valid = b""
            try:
                head = form.COUNT.pack(len(statuses)) + statuses + lent.headers
                wire.until(time.monotonic() + STALL_S * (1 + len(lent.payloads)))
                wire.write([head, *lent.payloads])
            finally:
                valid = self._on_loop(lent.back())
            wire.write([valid])

    def _take(self, wire: form.Wire, names: Sequence[FrameName], writer: tuple[int, int]) -> None:
        count = len(names)
        lengths = blocks.lengths_from(wire.read(8 * count), count)
        declared = blocks.u64s_from("checksums", wire.read(8 * count), count)
        scope = blocks.scope_from(wire.read(writer[1]).decode())
        owner = BlockOwner(writer[0], ScopeId(scope))
        results: list[PutResult] = []
        for run in grouped(lengths, GROUP_BLOCKS, GROUP_BYTES):
            some, sizes = [names[i] for i in run], [lengths[i] for i in run]
            room = self._on_loop(self._store.make_room(some, sizes, owner))
            is_settled = False
            try:
                seen = [
                    self._filled(wire, view, size)
                    for view, size in zip(room.views, sizes, strict=True)
                ]
                is_settled = True
                results += self._on_loop(room.settle(seen, [declared[i] for i in run]))
            finally:
                if not is_settled:
                    self._on_loop(room.abandon())
        statuses = blocks.put_statuses(result.status for result in results)
        wire.write([form.COUNT.pack(len(statuses)) + statuses])

    def _filled(self, wire: form.Wire, view: memoryview | None, size: int) -> int:
        """Receive one payload; the checksum of what is in memory now."""
        wire.until(time.monotonic() + STALL_S)
        if view is not None:
            wire.read_into(view)
            return checksum(view)
        while size:
            part = min(size, _UNKNOWN_BYTES)
            wire.read(part)
            size -= part
        return 0

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

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
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameName, KeyKind, frame_names
from kvtier.errors import CallerError, KvtierError, LimitError
from kvtier.limits import PAYLOAD_BYTES_MAX, STORE_DEADLINE_MS_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.peers import bulk_wire as form
from kvtier.peers.lending import BulkStore, Lent, Room
from kvtier.peers.nixl_server import Asked, Guest, NixlEnd
from kvtier.ports import BlockOwner, PutResult
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

    def __init__(
        self,
        store: BulkStore,
        door: Doorkeeper,
        listener: socket.socket,
        nixl: NixlEnd | None = None,
    ) -> None:
        """The listener is bound and listens; it and the end of NIXL are the server's from now on.

        Without NIXL its operations are none.
        """
        self._nixl = nixl
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
        if self._nixl is not None:
            self._nixl.stop()
        for wire in tuple(self._wires):
            wire.break_off()
        await asyncio.to_thread(self._threads.shutdown)
        if self._nixl is not None:
            await asyncio.to_thread(self._nixl.close)

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
        guest = None if self._nixl is None else self._nixl.guest()
        try:
            wire, uris = self._secured(connection, plain)
            allowed = self._greeted(wire, uris)
            if guest is not None:
                allowed = form.with_nixl(allowed)
            while allowed:
                wire.until(time.monotonic() + IDLE_S)
                self._request(wire, allowed, guest)
        except (KvtierError, OSError, ValueError, CancelledError):
            return  # the other end hears that the connection is gone
        finally:
            if guest is not None:
                guest.leave()
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

    def _request(self, wire: form.Wire, allowed: frozenset[int], guest: Guest | None) -> None:
        fields = form.REQUEST.unpack(wire.read(form.REQUEST.size))
        op, kind, key_bytes, _, codec_id, count, ms, payload_bytes, namespace = fields[:9]
        writer_id, scope_bytes = fields[9:]
        deadline_s = time.monotonic() + min(max(ms, 1), STORE_DEADLINE_MS_MAX) / 1000
        if guest is not None and op in allowed & form.NIXL_CONTROL:
            wire.until(time.monotonic() + STALL_S)
            guest.control(wire, op, payload_bytes, deadline_s)
            return
        if op not in allowed or kind not in KeyKind.__members__.values():
            raise CallerError("an operation that is not allowed, or none")
        if not 0 < count <= TIER_BATCH_BLOCKS_MAX or not 0 < key_bytes <= _DIGEST_BYTES_MAX:
            raise LimitError("too many blocks, or keys that are too long")
        if payload_bytes > PAYLOAD_BYTES_MAX or scope_bytes > form.NAME_BYTES_MAX:
            raise LimitError("a length that cannot be")
        wire.until(time.monotonic() + STALL_S)
        keys = wire.read(count * key_bytes)
        names = frame_names(KeyKind(kind), keys, key_bytes, Fingerprint(namespace), codec_id)
        if op == form.GET:
            self._give(wire, names, payload_bytes or None, deadline_s)
        elif op == form.PUT:
            self._take(wire, names, (writer_id, scope_bytes))
        elif guest is not None:
            asked = Asked(names, payload_bytes, deadline_s)
            if op == form.NIXL_GET:
                lend = partial(self._lent, names, payload_bytes, deadline_s)
                guest.give(wire, lend, self._on_loop, asked)
            else:
                room = partial(self._room, names)
                guest.take(wire, room, self._on_loop, asked, (writer_id, scope_bytes))

    def _lent(self, names: Sequence[FrameName], payload_bytes: int, deadline_s: float) -> Lent:
        return self._on_loop(self._store.lend(names, payload_bytes, deadline_s))

    def _room(self, names: Sequence[FrameName], lengths: Sequence[int], owner: BlockOwner) -> Room:
        return self._on_loop(self._store.make_room(names, lengths, owner))

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

"""`PeerTransport` over the bulk channel: pooled connections, payload straight into its memory.

Blocking sockets on threads of its own, because that way the kernel copies once, into where the
payload belongs, and the checksum follows while the bytes are in a cache. A cancelled call breaks
its connection off and waits for the thread: nothing writes into a caller's memory afterwards.
What must not live here: the form on the wire (`bulk_wire`), whom to ask (`tier`).
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

from kvtier.core.checksum import checksum
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    parse_header,
    verify_copied,
)
from kvtier.errors import (
    BackendError,
    ConfigError,
    DeadlineError,
    ForbiddenError,
    FrameError,
    KvtierError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.limits import PAYLOAD_BYTES_MAX, PEERS_COUNT_MAX, STORE_DEADLINE_MS_MAX
from kvtier.peers import bulk_wire as form
from kvtier.ports import GetRequest, GetResult, GetStatus, PeerPlace, PutRequest, PutResult
from kvtier.sections import DialConfig, Reach, parse_address
from kvtier.security.tokens import TokenSource
from kvtier.tiers.tally import failed_get, payload_view
from kvtier.wire import blocks

THREADS: Final = 8
"""Calls at once, to all peers."""
IDLE_MAX: Final = 4
"""Connections of one peer that are kept."""
_CONNECT_S: Final = 2.0
_TRASH_BYTES: Final = 1 << 20
_REFUSALS: Final[dict[int, Callable[[str], KvtierError]]] = {
    form.Refusal.UNAUTHENTICATED: UnauthenticatedError,
    form.Refusal.FORBIDDEN: ForbiddenError,
    form.Refusal.OTHER_STORE: UnavailableError,
    form.Refusal.BUSY: OverloadedError,
}

T = TypeVar("T")


class BulkTransport:
    """See the module. Belongs to one event loop."""

    def __init__(self, dial: DialConfig) -> None:
        """`dial` has the credentials; its targets are not used. Connects nothing."""
        self._dial = replace(dial, targets=())
        self._token = TokenSource(dial.token_file) if dial.token_file is not None else None
        self._threads = ThreadPoolExecutor(THREADS, "kvtier-bulk")
        self._idle: dict[PeerPlace, list[form.Wire]] = {}
        self._busy: set[form.Wire] = set()
        self._is_open = True

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        """See `PeerTransport.get_many`."""
        if not requests:
            return []
        first = requests[0].name
        request = form.REQUEST.pack(
            form.GET, first.key_kind, len(first.key), 0, first.codec_id, len(requests),
            _ms(deadline_s), requests[0].payload_bytes or 0, first.namespace, 0, 0,
        )  # fmt: skip
        keys = b"".join(r.name.key for r in requests)
        return await self.call(peer, deadline_s, lambda wire: _get(wire, [request, keys], requests))

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        """See `PeerTransport.put_many`."""
        if not requests:
            return []
        payloads = [payload_view(request.payload) for request in requests]
        first, owner = requests[0].name, requests[0].owner
        scope = owner.scope.encode()
        request = form.REQUEST.pack(
            form.PUT, first.key_kind, len(first.key), 0, first.codec_id, len(requests),
            _ms(deadline_s), 0, first.namespace, owner.writer_id, len(scope),
        )  # fmt: skip
        keys = b"".join(r.name.key for r in requests)
        lengths = blocks.u64s(payload.nbytes for payload in payloads)
        declared = [request.payload_checksum for request in requests]

        def put(wire: form.Wire) -> list[PutResult]:
            sums = blocks.u64s(
                checksum(payload) if known is None else known
                for payload, known in zip(payloads, declared, strict=True)
            )
            wire.write([request, keys, lengths, sums, scope, *payloads])
            count = form.read_count(wire, len(requests))
            if count != len(requests):
                raise BackendError("the store answered for other blocks")
            return [PutResult(status) for status in blocks.put_statuses_from(wire.read(count))]

        return await self.call(peer, deadline_s, put)

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        self._is_open = False
        for wire in self._busy:
            wire.break_off()
        for wires in self._idle.values():
            for wire in wires:
                wire.close()
        self._idle.clear()
        await asyncio.to_thread(self._threads.shutdown)

    async def call(self, peer: PeerPlace, deadline_s: float, work: Callable[[form.Wire], T]) -> T:
        """Run work on a thread with a connection of the pool; one that was closed is replaced.

        The work is begun again then: it must bear that. Cancelled, it is broken off and waited for.
        """
        if not self._is_open:
            raise UnavailableError("the transport is closed")
        if not peer.bulk_address:
            raise UnavailableError(f"{peer.instance} has no bulk channel")
        idle = self._idle.setdefault(peer, [])
        while idle:
            wire = idle.pop()
            try:
                return await self._worked(peer, wire, deadline_s, work)
            except UnavailableError:
                continue  # it may have gone while nobody used it
        wire = await self._on_thread(
            None, lambda: self._connected(peer, min(deadline_s, time.monotonic() + _CONNECT_S))
        )
        return await self._worked(peer, wire, deadline_s, work)

    async def _worked(
        self, peer: PeerPlace, wire: form.Wire, deadline_s: float, work: Callable[[form.Wire], T]
    ) -> T:
        wire.until(deadline_s)
        self._busy.add(wire)
        is_whole = False
        try:
            result = await self._on_thread(wire, lambda: work(wire))
            is_whole = True
        finally:
            self._busy.discard(wire)
            idle = self._idle.get(peer, [])
            if is_whole and self._is_open and len(idle) < IDLE_MAX:
                self._keep(peer, wire)
            else:
                wire.close()
        return result

    def _keep(self, peer: PeerPlace, wire: form.Wire) -> None:
        """Keep a connection for the next call; those of peers that nobody asks any more go."""
        self._idle.setdefault(peer, []).append(wire)
        if len(self._idle) > PEERS_COUNT_MAX:
            for idle in self._idle.pop(next(iter(self._idle))):
                idle.close()

    async def _on_thread(self, wire: form.Wire | None, work: Callable[[], T]) -> T:
        """Cancelled, the work is broken off and waited for all the same: it uses our memory."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                if wire is not None:
                    wire.break_off()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled() and running.exception() is None:
                left = running.result()
                if isinstance(left, form.Wire):
                    left.close()
            raise

    def _connected(self, peer: PeerPlace, end: float) -> form.Wire:
        """A connection that was let in. On a thread."""
        address = parse_address(peer.bulk_address)
        is_far = address.reach is Reach.NETWORK
        if is_far and self._dial.tls is None and not self._dial.insecure:
            raise UnavailableError(f"{peer.bulk_address} is another machine, and there is no TLS")
        left = max(0.001, end - time.monotonic())
        try:
            plain = socket.create_connection((address.host, address.port), left)
            try:
                plain.settimeout(left)
                connection = self._secured(plain, address.host)
            except BaseException:
                plain.close()
                raise
        except TimeoutError:
            raise DeadlineError(f"{peer.bulk_address} does not answer") from None
        except OSError as error:
            raise UnavailableError(f"{peer.bulk_address}: {type(error).__name__}") from error
        wire = form.Wire(connection)
        try:
            wire.until(end)
            self._greet(wire, peer)
        except BaseException:
            wire.close()
            raise
        return wire

    def _secured(self, plain: socket.socket, host: str) -> socket.socket:
        tls = self._dial.tls
        if tls is None:
            return plain
        try:
            context = ssl.create_default_context(
                cafile=None if tls.ca_file is None else str(tls.ca_file)
            )
            if tls.cert_file is not None and tls.key_file is not None:
                context.load_cert_chain(tls.cert_file, tls.key_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"TLS files: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context.wrap_socket(plain, server_hostname=host)

    def _greet(self, wire: form.Wire, peer: PeerPlace) -> None:
        token = b"" if self._token is None else self._token.source.get().encode()
        name = peer.instance.encode()
        head = form.GREETING.pack(form.MAGIC, form.VERSION, len(token), len(name))
        wire.write([head, token, name])
        [reply] = wire.read(1)
        if reply:
            refused = _REFUSALS.get(reply, UnavailableError)
            raise refused(f"{peer.bulk_address} refuses the connection ({reply})")


def _get(
    wire: form.Wire, question: Sequence[bytes], requests: Sequence[GetRequest]
) -> list[GetResult]:
    """Ask, and take the groups of the answer. On a thread."""
    wire.write(question)
    results: list[GetResult] = []
    while len(results) < len(requests):
        count = form.read_count(wire, len(requests) - len(results))
        if count == 0:
            raise BackendError("a group without blocks")
        group = requests[len(results) : len(results) + count]
        statuses = blocks.get_statuses_from(wire.read(count))
        hits = statuses.count(GetStatus.HIT)
        headers = memoryview(wire.read(hits * HEADER_BYTES))
        taken: list[GetResult] = []
        position = 0
        for request, status in zip(group, statuses, strict=True):
            if status is GetStatus.HIT:
                header = headers[position * HEADER_BYTES :][:HEADER_BYTES]
                taken.append(_payload(wire, request, header))
                position += 1
            else:
                taken.append(GetResult(status))
        valid = iter(wire.read(hits))
        results += [
            one if status is not GetStatus.HIT or next(valid) else GetResult(GetStatus.MISS)
            for one, status in zip(taken, statuses, strict=True)
        ]
    return results


def _payload(wire: form.Wire, request: GetRequest, raw: memoryview) -> GetResult:
    """Receive one payload where it belongs and check it there; what is wrong is thrown away."""
    try:
        header = parse_header(raw)
    except FrameError as error:
        # Nobody knows how many bytes follow: the connection is of no use any more.
        raise BackendError(f"a header that is none: {error}") from error
    target = _target(request, header)
    if target is None:
        _throw_away(wire, header.payload_bytes)
        if request.into is not None and request.payload_bytes is None:
            return GetResult(GetStatus.ERROR, reason="buffer_short")
        return _faulty(request, header, raw)
    wire.read_into(target)
    expected = FrameExpectation(request.name, request.payload_bytes)
    try:
        verified = verify_copied(raw, target.nbytes, checksum(target), expected)
    except FrameError as error:
        return failed_get(error)
    return GetResult(GetStatus.HIT, target, verified)


def _target(request: GetRequest, header: FrameHeader) -> memoryview | None:
    """Memory for a payload; None where it is not what was asked for or does not fit."""
    if header.name != request.name or header.payload_bytes > PAYLOAD_BYTES_MAX:
        return None
    if request.payload_bytes not in {None, header.payload_bytes}:
        return None
    if request.into is None:
        return memoryview(bytearray(header.payload_bytes))
    if request.into.nbytes < header.payload_bytes:
        return None
    return (
        request.into.cast("B")[: header.payload_bytes] if request.into.nbytes else memoryview(b"")
    )


def _faulty(request: GetRequest, header: FrameHeader, raw: memoryview) -> GetResult:
    expected = FrameExpectation(request.name, request.payload_bytes)
    try:
        verify_copied(raw, header.payload_bytes, header.payload_checksum, expected)
    except FrameError as error:
        return failed_get(error)
    return GetResult(GetStatus.ERROR, reason="buffer_short")


def _throw_away(wire: form.Wire, count: int) -> None:
    trash = memoryview(bytearray(min(count, _TRASH_BYTES)))
    while count:
        part = trash[: min(count, trash.nbytes)]
        wire.read_into(part)
        count -= part.nbytes


def _ms(deadline_s: float) -> int:
    left_s = max(0.001, deadline_s - time.monotonic())
    return min(STORE_DEADLINE_MS_MAX, max(1, int(1000 * left_s)))

"""The bulk channel of this store: who is let in, and how blocks get into and out of its slots.

What must not live here: sockets and the form on the wire (`kvtier.peers`).
"""

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from kvtier.core.frame import FrameHeader, FrameName, encode_header
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import STORE_DEADLINE_MS_MAX
from kvtier.peers import bulk_wire as form
from kvtier.peers.bulk_server import BulkServer
from kvtier.peers.lending import Lent, Room
from kvtier.peers.nixl_server import NixlEnd
from kvtier.ports import (
    BlockOwner,
    GetRequest,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
)
from kvtier.sections import ListenConfig, parse_address
from kvtier.security import ANYONE, AccessRole, Denial, Policy, Principal
from kvtier.security.roles import from_uri
from kvtier.security.tokens import TokenBook
from kvtier.store import ReadOptions, SharedTier
from kvtier.tiers.arena.holdings import Held, Prepared, Wanted
from kvtier.wire import rpc
from kvtier_services.store.service import Parts

_LOCAL_READS: Final = ReadOptions(shared=SharedTier.SKIP)
_METHODS: Final = {
    form.GET: f"/{rpc.STORE.full_name}/Get",
    form.PUT: f"/{rpc.STORE.full_name}/Put",
}
_TOO_LONG: Final = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
_BACKLOG: Final = 128


@contextlib.asynccontextmanager
async def served_bulk(
    listen: ListenConfig, port: int, policy: Policy, parts: Parts, nixl: NixlEnd | None = None
) -> AsyncIterator[int]:
    """Serve the channel on the host that the service listens on, while entered; yields the port.

    What the service asks of its callers this asks too: TLS, certificates, tokens. The end of NIXL
    is closed with it. ConfigError for a port that is taken.
    """
    host = parse_address(listen.bind).host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    server = BulkServer(StoreBulk(parts), Door(listen, policy, parts.instance), listener, nixl)
    try:
        yield server.port
    finally:
        await server.close()


class Door:
    """`Doorkeeper` by the section and the policy of the service."""

    def __init__(self, listen: ListenConfig, policy: Policy, instance: str) -> None:
        """Reads the tokens file. ConfigError where it is no good."""
        self._listen = listen
        self._policy = policy
        self._instance = instance
        self._book = TokenBook(listen.tokens_file) if listen.tokens_file is not None else None
        self._certificates = listen.tls is not None and listen.tls.ca_file is not None

    def context(self) -> ssl.SSLContext | None:
        """See `Doorkeeper`: of the newest files. ssl.SSLError or OSError while they are no good."""
        tls = self._listen.tls
        if tls is None or tls.cert_file is None or tls.key_file is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.ca_file is not None:
            context.load_verify_locations(tls.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def admit(self, token: str, uris: Sequence[str], store: str) -> frozenset[int] | form.Refusal:
        """See `Doorkeeper`."""
        principal = self._principal(token, uris)
        if principal is None:
            return form.Refusal.UNAUTHENTICATED
        allowed = frozenset(
            op for op, method in _METHODS.items() if self._policy.allows(principal, method)
        )
        if not allowed:
            return form.Refusal.FORBIDDEN
        return allowed if store in ("", self._instance) else form.Refusal.OTHER_STORE

    def _principal(self, token: str, uris: Sequence[str]) -> Principal | None:
        """Who calls; None where nothing that was shown says so, or two things say different."""
        certified = _certified(uris) if self._certificates else None
        if self._book is None:
            return certified if self._certificates else ANYONE
        if not token:
            return certified
        claim = self._book.find(token)
        if isinstance(claim, Denial):
            return None
        if certified is not None and (certified.name, certified.role) != (claim.name, claim.role):
            return None
        return claim


def _certified(uris: Sequence[str]) -> Principal | None:
    ours = [uri for uri in uris if uri.startswith("kvtier:")]
    if len(ours) != 1:
        return None
    try:
        principal = from_uri(ours[0])
    except CallerError:
        return None
    return None if principal.role is AccessRole.LOCAL else principal


class StoreBulk:
    """`BulkStore` over the parts of the service."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def lend(
        self, names: Sequence[FrameName], payload_bytes: int | None, deadline_s: float
    ) -> Lent:
        """See `BulkStore`. Slots are sent in place, held against eviction; the rest is read."""
        arena, store = self._parts.arena, self._parts.store
        there: dict[int, Held] = {}
        for i, name in enumerate(names):
            held = arena.held(name)
            if held is not None and payload_bytes in {None, held.payload_bytes}:
                there[i] = held
        resident = [names[i] for i in there]
        arena.hold(resident)
        stack = contextlib.AsyncExitStack()
        try:
            rest = [i for i in range(len(names)) if i not in there]
            longest = payload_bytes or arena.payload_bytes_max
            await stack.enter_async_context(self._parts.staging.room(longest * len(rest)))
            asked = [GetRequest(names[i], None, payload_bytes) for i in rest]
            read = await store.get_many(asked, deadline_s, _LOCAL_READS) if asked else []
        except BaseException:
            arena.let_go(resident)
            await stack.aclose()
            raise
        arena.touch(resident)
        store.touch(resident)
        found = dict(zip(rest, read, strict=True))
        statuses, headers, payloads = [], [], []
        for i, name in enumerate(names):
            if i in there:
                held = there[i]
                statuses.append(GetStatus.HIT)
                headers.append(_header(name, held))
                start = held.slot.offset
                payloads.append(arena.slots_memory.view[start : start + held.payload_bytes])
                continue
            result = found[i]
            statuses.append(result.status)
            if result.is_hit:
                assert result.payload is not None
                assert result.header is not None
                headers.append(encode_header(result.header))
                payloads.append(result.payload)
        return Lent(
            statuses,
            b"".join(headers),
            payloads,
            partial(self._back, names, there, statuses, stack),
        )

    async def _back(
        self,
        names: Sequence[FrameName],
        there: dict[int, Held],
        statuses: Sequence[GetStatus],
        stack: contextlib.AsyncExitStack,
    ) -> bytes:
        arena = self._parts.arena
        valid = bytes(
            i not in there or arena.held(names[i]) is there[i]
            for i, status in enumerate(statuses)
            if status is GetStatus.HIT
        )
        arena.let_go([names[i] for i in there])
        await stack.aclose()
        return valid

    async def make_room(
        self, names: Sequence[FrameName], lengths: Sequence[int], owner: BlockOwner
    ) -> Room:
        """See `BulkStore`. In the slots themselves, where there are enough and nothing is there."""
        arena = self._parts.arena
        if max(lengths, default=0) <= arena.payload_bytes_max:
            wanted = [
                Wanted(name, length, owner) for name, length in zip(names, lengths, strict=True)
            ]
            prepared = arena.prepare(wanted)
            if prepared is not None:
                views = [arena.writable(one) for one in prepared.reservations]
                return Room(
                    views,
                    partial(self._publish, prepared),
                    partial(self._abort, prepared),
                )
        return await self._staged(names, lengths, owner)

    async def _abort(self, prepared: Prepared) -> None:
        self._parts.arena.abort(prepared.reservations)

    async def _publish(
        self, prepared: Prepared, seen: Sequence[int], declared: Sequence[int]
    ) -> list[PutResult]:
        answered: list[PutResult] = []
        self._parts.arena.publish_filled(prepared, list(seen), list(declared), answered.extend)
        return answered

    async def _staged(
        self, names: Sequence[FrameName], lengths: Sequence[int], owner: BlockOwner
    ) -> Room:
        longest = self._parts.arena.payload_bytes_max
        kept = [length if length <= longest else None for length in lengths]
        stack = contextlib.AsyncExitStack()
        await stack.enter_async_context(
            self._parts.staging.room(sum(length for length in kept if length is not None))
        )
        views = [None if length is None else memoryview(bytearray(length)) for length in kept]

        async def settle(seen: Sequence[int], declared: Sequence[int]) -> list[PutResult]:
            async with stack:
                puts = [
                    PutRequest(name, view, owner, one)
                    for name, view, one in zip(names, views, declared, strict=True)
                    if view is not None
                ]
                end = self._parts.clock() + STORE_DEADLINE_MS_MAX / 1000
                done = iter(await self._parts.store.put_many(puts, end))
                return [_TOO_LONG if view is None else next(done) for view in views]

        return Room(views, settle, stack.aclose)


def _header(name: FrameName, held: Held) -> bytes:
    return encode_header(
        FrameHeader(name, held.writer_id, held.payload_bytes, held.payload_checksum)
    )

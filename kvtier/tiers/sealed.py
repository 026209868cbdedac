"""Any tier with its payloads sealed by AES-256-GCM, with a key for each scope.

For tiers whose bytes others may read: disks, a shared Redis. What lies below is a frame like any
other, whose payload is

    key id (8 bytes)   nonce (12)   ciphertext   tag (16)

so name, namespace, length and both checksums are checked before anything is opened. The tag covers
name, label and writer as well: a block that was moved to another name does not open. In clear stand
the prefix key (a salted hash), the namespace, the length, the writer's id and the scope's label,
which stands for the scope without naming it. A block whose key was erased is a miss and is dropped.

Each sealing draws a nonce, so the tier below finds every second writer divergent; who wrote the
same bytes again is found out by opening the first copy. Random nonces allow 2**32 blocks a key.
What must not live here: where keys come from (`scope_keys`), backends.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier.core.checksum import checksum
from kvtier.core.eviction import PinToken
from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import BackendError, DeadlineError, FrameFault, LimitError, OverloadedError
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.ports import (
    BlockOwner,
    BlockTier,
    ByNames,
    ByScope,
    GetRequest,
    GetResult,
    GetStatus,
    LocalTier,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
    Selection,
    TierStats,
    require_batch,
)
from kvtier.tiers.scope_keys import KEY_ID_BYTES, ScopeKeys
from kvtier.tiers.tally import Tally, payload_view
from kvtier.types import ScopeId, Tier

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_HEAD_BYTES: Final = KEY_ID_BYTES + _NONCE_BYTES
SEAL_BYTES: Final = _HEAD_BYTES + _TAG_BYTES
"""How much longer a payload is below."""
_STEP_BYTES: Final = 4 << 20
"""Sealed or opened at a time before other work of the event loop: below a millisecond."""
_BINDING: Final = struct.Struct("<HIQ")

_GROUP_BYTES: Final = 64 << 20
"""Sealed payloads that are in memory for one call."""
_UNKNOWN_BYTES: Final = 1 << 20
"""What a payload of unknown length counts for."""

T = TypeVar("T", bound=BlockTier)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A hit below, opened or not."""

    result: GetResult
    is_stale: bool = False
    """Its copy is of no use to anybody: drop it."""


class SealedTier(Generic[T]):
    """`BlockTier` over another one; the observer is that of the tier below.

    Cipher work is done on the event loop, in steps: the library holds Python's lock while it works,
    at some 10 GB/s.
    """

    def __init__(self, inner: T, keys: ScopeKeys) -> None:
        self._inner = inner
        self._keys = keys
        self._tally = Tally()

    @property
    def tier(self) -> Tier:
        return self._inner.tier

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`. Blocks whose key was erased count until they are dropped."""
        return await self._inner.contains(names, deadline_s)

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. Opens from the lower tier's memory into the caller's."""
        require_batch(requests, deadline_s)
        results: list[GetResult] = []
        for some in _groups(requests, _size_of_get):
            results += await self._get(some, deadline_s)
        self._tally.count_gets(results)
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`. Seals into memory of its own."""
        require_batch(requests, deadline_s)
        for request in requests:
            payload_view(request.payload)
        results: list[PutResult] = []
        for some in _groups(requests, _size_of_put):
            results += await self._put(some, deadline_s)
        self._tally.count_puts(requests, results)
        return results

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`."""
        if isinstance(selection, ByScope):
            selection = ByScope(self._keys.label(selection.scope))
        return await self._inner.drop(selection, deadline_s)

    def stats(self) -> TierStats:
        """What the tier below holds, with the outcomes that this one gave."""
        held = self._inner.stats()
        found = self._tally.removals[RemovalCause.CORRUPT]  # dropped from the tier below
        removals = Counter(held.removals)
        removals[RemovalCause.CORRUPT] += found
        removals[RemovalCause.DROPPED] -= found
        return dataclasses.replace(
            held,
            gets=dict(self._tally.gets),
            puts=dict(self._tally.puts),
            removals=removals,
            corrupt=Counter(held.corrupt) + self._tally.corrupt,
            payload_bytes_read=self._tally.payload_bytes_read,
            payload_bytes_written=self._tally.payload_bytes_written,
        )

    async def close(self) -> None:
        """Close the tier below."""
        await self._inner.close()

    # Sealing

    async def _put(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        views = [payload_view(request.payload) for request in requests]
        sealed = await self._sealed(requests, views)
        below = [request for request in sealed if isinstance(request, PutRequest)]
        given = iter(await self._inner.put_many(below, deadline_s))
        results = [one if isinstance(one, PutResult) else next(given) for one in sealed]
        for i, result in enumerate(results):
            if result.status is PutStatus.DIVERGENT:
                results[i] = await self._compared(requests[i], views[i], sealed[i], deadline_s)
        return results

    async def _sealed(
        self, requests: Sequence[PutRequest], views: Sequence[memoryview]
    ) -> list[PutRequest | PutResult]:
        """What to put below, or the result where nothing is."""
        sealed: list[PutRequest | PutResult] = []
        since_bytes = 0
        for request, view in zip(requests, views, strict=True):
            sealed.append(self._seal(request, view))
            since_bytes += view.nbytes
            if since_bytes >= _STEP_BYTES:
                since_bytes = 0
                await asyncio.sleep(0)
        return sealed

    def _seal(self, request: PutRequest, view: memoryview) -> PutRequest | PutResult:
        if view.nbytes > PAYLOAD_BYTES_MAX - SEAL_BYTES:
            return PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
        if request.payload_checksum not in {None, checksum(view)}:
            return PutResult(PutStatus.CORRUPT)
        try:
            key = self._keys.sealing_key(request.owner.scope)
        except LimitError:
            return PutResult(PutStatus.REFUSED, Refusal.FULL)
        label = self._keys.label(request.owner.scope)
        memory = memoryview(bytearray(view.nbytes + SEAL_BYTES))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        memory[:KEY_ID_BYTES] = key.key_id
        memory[KEY_ID_BYTES:_HEAD_BYTES] = nonce
        binding = _binding(request.name, label, request.owner.writer_id)
        AESGCM(key.key).encrypt_into(nonce, view, binding, memory[_HEAD_BYTES:])
        return dataclasses.replace(
            request,
            payload=memory,
            owner=BlockOwner(request.owner.writer_id, label),
            payload_checksum=None,
        )

    async def _compared(
        self,
        request: PutRequest,
        view: memoryview,
        sealed: PutRequest | PutResult,
        deadline_s: float,
    ) -> PutResult:
        """What a put is told that found a copy below: the same bytes, others, or of no use."""
        (first,) = await self._get([GetRequest(request.name)], deadline_s)
        if first.payload is not None:
            same = first.payload == view
            return PutResult(PutStatus.DUPLICATE if same else PutStatus.DIVERGENT)
        if first.status is GetStatus.TIMEOUT:
            return PutResult(PutStatus.TIMEOUT)
        if first.status is GetStatus.ERROR or isinstance(sealed, PutResult):
            return PutResult(PutStatus.ERROR, first.reason)
        (again,) = await self._inner.put_many([sealed], deadline_s)  # the first was of no use
        return again

    # Opening

    async def _get(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        below = [_request_below(request) for request in requests]
        results: list[GetResult] = []
        stale: list[FrameName] = []
        since_bytes = 0
        for request, given in zip(
            requests, await self._inner.get_many(below, deadline_s), strict=True
        ):
            opened = self._open(request, given)
            results.append(opened.result)
            if opened.is_stale:
                stale.append(request.name)
            since_bytes += 0 if given.payload is None else given.payload.nbytes
            if since_bytes >= _STEP_BYTES:
                since_bytes = 0
                await asyncio.sleep(0)
        if stale:
            await self._drop_stale(stale, deadline_s)
        return results

    def _open(self, request: GetRequest, given: GetResult) -> _Opened:
        if given.payload is None or given.header is None:
            return _Opened(given)
        below = given.payload
        size = below.nbytes - SEAL_BYTES
        if size < 0:
            return self._refused(FrameFault.SHORT)
        if request.into is not None and request.into.nbytes < size:
            return _Opened(GetResult(GetStatus.ERROR, reason="buffer_short"))
        key = self._keys.opening_key(given.scope)
        if key is None or below[:KEY_ID_BYTES] != key.key_id:
            return _Opened(GetResult(GetStatus.MISS), is_stale=True)
        payload = _target(request, size)
        nonce = below[KEY_ID_BYTES:_HEAD_BYTES]
        binding = _binding(request.name, given.scope, given.header.writer_id)
        try:
            AESGCM(key.key).decrypt_into(nonce, below[_HEAD_BYTES:], binding, payload)
        except InvalidTag:
            payload[:] = bytes(size)  # what it was opened to was never sealed
            return self._refused(FrameFault.PAYLOAD_CHECKSUM)
        header = FrameHeader(request.name, given.header.writer_id, size, checksum(payload))
        return _Opened(GetResult(GetStatus.HIT, payload, header, key.scope))

    def _refused(self, fault: FrameFault) -> _Opened:
        self._tally.corrupt[fault] += 1
        self._tally.removals[RemovalCause.CORRUPT] += 1
        return _Opened(GetResult(GetStatus.CORRUPT, reason=fault.value), is_stale=True)

    async def _drop_stale(self, names: Sequence[FrameName], deadline_s: float) -> None:
        with contextlib.suppress(BackendError, DeadlineError, OverloadedError):
            await self._inner.drop(ByNames(tuple(dict.fromkeys(names))), deadline_s)


class SealedLocalTier(SealedTier[LocalTier]):
    """`LocalTier` over another one."""

    def names(self) -> list[FrameName]:
        """See `LocalTier.names`."""
        return self._inner.names()

    def coldest(self, count: int) -> list[FrameName]:
        """See `LocalTier.coldest`."""
        return self._inner.coldest(count)

    def pin(self, name: FrameName) -> PinToken | None:
        """See `LocalTier.pin`."""
        return self._inner.pin(name)

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """See `LocalTier.unpin`."""
        self._inner.unpin(name, token)


def _groups(requests: Sequence[R], size_of: Callable[[R], int]) -> Iterator[Sequence[R]]:
    """The requests in order, so many at a time as fit into _GROUP_BYTES; at least one call."""
    begin = size = 0
    for at, request in enumerate(requests):
        if at > begin and size + size_of(request) > _GROUP_BYTES:
            yield requests[begin:at]
            begin, size = at, 0
        size += size_of(request)
    yield requests[begin:]


def _size_of_put(request: PutRequest) -> int:
    return payload_view(request.payload).nbytes


def _size_of_get(request: GetRequest) -> int:
    if request.into is not None:
        return request.into.nbytes
    return _UNKNOWN_BYTES if request.payload_bytes is None else request.payload_bytes


def _request_below(request: GetRequest) -> GetRequest:
    size = request.payload_bytes
    return GetRequest(request.name, None, None if size is None else size + SEAL_BYTES)


def _target(request: GetRequest, size: int) -> memoryview:
    if request.into is None:
        return memoryview(bytearray(size))
    return request.into.cast("B")[:size] if request.into.nbytes else memoryview(bytearray())


def _binding(name: FrameName, label: ScopeId, writer_id: int) -> bytes:
    """What the tag covers beside the payload; every part has a fixed length or is the last."""
    head = _BINDING.pack(name.key_kind, name.codec_id, writer_id)
    return head + name.namespace + label.encode() + b"\0" + name.key

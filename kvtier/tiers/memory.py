"""The tier of one process's own memory: no sharing, no persistence, every promise of the port.

The plainest tier there is, for tests, for demos and to hold the others against.
What must not live here: shared memory (kvtier.tiers.arena), faults (kvtier.tiers.faulty).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.checks import require_integer
from kvtier.core.checksum import checksum
from kvtier.core.eviction import LruPolicy, PinToken, Policy
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    FrameName,
    encode_header,
    parse_header,
    verify_copied,
)
from kvtier.errors import DeadlineError, FrameError
from kvtier.ports import (
    ByNames,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
    Selection,
    TierObserver,
    TierStats,
    require_batch,
)
from kvtier.tiers.residents import Residents
from kvtier.tiers.tally import (
    Holding,
    Tally,
    failed_get,
    fitting,
    is_selected,
    payload_view,
    require_open,
)
from kvtier.types import ScopeId, Tier

_TIER_BYTES_MAX = 1 << 50


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """`bytes_max` bounds frames (headers included), not Python's own overhead."""

    bytes_max: int
    tier: Tier = Tier.DRAM

    def __post_init__(self) -> None:
        require_integer("bytes_max", self.bytes_max, 0, _TIER_BYTES_MAX)


@dataclass(slots=True)
class _Held:
    frame: bytearray
    writer_id: int
    scope: ScopeId


class MemoryTier:
    """`LocalTier` over a dict of frames. Copies on the event loop's thread; O(bytes) a call."""

    def __init__(
        self,
        config: MemoryConfig,
        policy: Policy[FrameName] | None = None,
        observer: TierObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._residents = Residents(
            config.tier, LruPolicy() if policy is None else policy, observer, clock
        )
        self._clock = clock
        self._held: dict[FrameName, _Held] = {}
        self._bytes = 0
        self._tally = Tally()
        self._is_open = True

    @property
    def tier(self) -> Tier:
        return self._config.tier

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`."""
        require_batch(names, deadline_s)
        require_open(self._is_open)
        self._require_time(deadline_s)
        return [name in self._held for name in names]

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. Copies each payload once."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        results = [self._get(request, deadline_s) for request in requests]
        self._tally.count_gets(results)
        hits = [r.name for r, result in zip(requests, results, strict=True) if result.is_hit]
        self._residents.touch(hits)
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`. Copies each payload once."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        payloads = [payload_view(request.payload) for request in requests]
        results = [
            self._put(request, payload, deadline_s)
            for request, payload in zip(requests, payloads, strict=True)
        ]
        # Stored one by one the head would be the oldest; a touch of all restores the chain's order.
        self._residents.touch([request.name for request in requests])
        self._tally.count_puts(requests, results)
        return results

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`."""
        require_batch(selection.names if isinstance(selection, ByNames) else (), deadline_s)
        require_open(self._is_open)
        self._require_time(deadline_s)
        if isinstance(selection, ByNames):
            names = [name for name in dict.fromkeys(selection.names) if name in self._held]
        else:
            names = [
                name
                for name, held in self._held.items()
                if is_selected(selection, name, held.writer_id, held.scope)
            ]
        self._remove(names, RemovalCause.DROPPED)
        return len(names)

    def stats(self) -> TierStats:
        """See `BlockTier.stats`."""
        pinned = self._residents.pinned_count
        return self._tally.stats(
            Holding(len(self._held), self._bytes, self._config.bytes_max, pinned)
        )

    async def close(self) -> None:
        """Forget every block."""
        self._is_open = False
        self._held.clear()
        self._bytes = 0

    def names(self) -> list[FrameName]:
        """See `LocalTier.names`."""
        return list(self._held)

    def coldest(self, count: int) -> list[FrameName]:
        """See `LocalTier.coldest`."""
        return self._residents.coldest(count)

    def pin(self, name: FrameName) -> PinToken | None:
        """See `LocalTier.pin`."""
        return self._residents.pin(name) if name in self._held else None

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """See `LocalTier.unpin`."""
        self._residents.unpin(name, token)

    def frame_memory(self, name: FrameName) -> memoryview | None:
        """The very memory of a frame, to damage it in a test; None if it is not there."""
        held = self._held.get(name)
        return None if held is None else memoryview(held.frame)

    def _get(self, request: GetRequest, deadline_s: float) -> GetResult:
        if self._clock() >= deadline_s:
            return GetResult(GetStatus.TIMEOUT)
        held = self._held.get(request.name)
        if held is None:
            return GetResult(GetStatus.MISS)
        try:
            return self._verified(request, held)
        except FrameError as error:
            self._tally.corrupt[error.fault] += 1
            self._remove([request.name], RemovalCause.CORRUPT)
            return failed_get(error)

    def _verified(self, request: GetRequest, held: _Held) -> GetResult:
        frame = memoryview(held.frame)
        payload = frame[HEADER_BYTES:]
        target = fitting(request, parse_header(frame))
        if target is None:
            return GetResult(GetStatus.ERROR, reason="buffer_short")
        present = min(target.nbytes, payload.nbytes)
        target[:present] = payload[:present]
        header = verify_copied(
            frame[:HEADER_BYTES],
            payload.nbytes,
            checksum(target),
            FrameExpectation(request.name, request.payload_bytes),
        )
        return GetResult(GetStatus.HIT, target, header, held.scope)

    def _put(self, request: PutRequest, payload: memoryview, deadline_s: float) -> PutResult:
        if self._clock() >= deadline_s:
            return PutResult(PutStatus.TIMEOUT)
        kept = self._kept_first(request, payload)
        if kept is not None:
            return kept
        frame_bytes = HEADER_BYTES + payload.nbytes
        if frame_bytes > self._config.bytes_max:
            return PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
        frame = bytearray(frame_bytes)
        frame[HEADER_BYTES:] = payload
        written = checksum(memoryview(frame)[HEADER_BYTES:])
        if request.payload_checksum not in {None, written}:
            return PutResult(PutStatus.CORRUPT)
        if not self._make_room(frame_bytes):
            return PutResult(PutStatus.REFUSED, Refusal.FULL)
        header = FrameHeader(request.name, request.owner.writer_id, payload.nbytes, written)
        frame[:HEADER_BYTES] = encode_header(header)
        self._publish(request, frame)
        return PutResult(PutStatus.STORED)

    def _kept_first(self, request: PutRequest, payload: memoryview) -> PutResult | None:
        """The outcome where a block of that name is there; None, and none there, otherwise."""
        held = self._held.get(request.name)
        if held is None:
            return None
        offered = checksum(payload)
        if request.payload_checksum not in {None, offered}:
            return PutResult(PutStatus.CORRUPT)
        try:
            first = parse_header(held.frame)
        except FrameError as error:
            self._tally.corrupt[error.fault] += 1
            self._remove([request.name], RemovalCause.CORRUPT)
            return None
        same = (first.payload_bytes, first.payload_checksum) == (payload.nbytes, offered)
        return PutResult(PutStatus.DUPLICATE if same else PutStatus.DIVERGENT)

    def _publish(self, request: PutRequest, frame: bytearray) -> None:
        self._held[request.name] = _Held(frame, request.owner.writer_id, request.owner.scope)
        self._bytes += len(frame)
        self._residents.store([request.name], [request.retention])

    def _make_room(self, frame_bytes: int) -> bool:
        """Evict until a frame fits; False where what is left is pinned. Nothing is reserved."""
        while self._bytes + frame_bytes > self._config.bytes_max:
            victims = self._residents.coldest(1)
            if not victims:
                return False
            self._remove(victims, RemovalCause.EVICTED)
        return True

    def _remove(self, names: Sequence[FrameName], cause: RemovalCause) -> None:
        for name in names:
            self._bytes -= len(self._held.pop(name).frame)
        self._tally.removals[cause] += len(names)
        self._residents.remove(names, cause)

    def _require_time(self, deadline_s: float) -> None:
        if self._clock() >= deadline_s:
            raise DeadlineError("the deadline had passed before the call")

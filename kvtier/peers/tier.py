"""`PeerTier`: the stores of other nodes as a tier that is only read.

Each block is asked of a store that the index names, and of a second one where that fails. Whatever
goes wrong costs a miss and is counted: a peer that is slow, gone, lying or mistaken for another,
and an index that cannot be asked.
What must not live here: the wire (`grpc_transport`), who has what (`finding`), keeping copies.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvtier.core.frame import HEADER_BYTES, FrameName
from kvtier.core.health import Outcome
from kvtier.errors import ConfigError, FrameFault, KvtierError
from kvtier.limits import PEER_DROPS_MAX, PEERS_COUNT_MAX
from kvtier.peers.finding import Finder, Places
from kvtier.peers.standing import Peer, PeerPolicy, PeerView
from kvtier.ports import (
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PeerPlace,
    PeerTransport,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    Selection,
    TierStats,
    require_batch,
)
from kvtier.store.gates import ByteGate
from kvtier.tiers.tally import Holding, Tally, payload_view, require_open
from kvtier.types import Fingerprint, InstanceId, Tier

DROPPED_S: Final = 60.0
"""How long a block that was dropped here is not taken from a peer again: an operator who drops at
every store one after the other has so long."""
_MISS: Final = GetResult(GetStatus.MISS)
_UNKNOWN_BYTES: Final = 1 << 20
"""What a block counts for whose length nobody says."""
_FAULTS: Final = {fault.value: fault for fault in FrameFault}

_Kind: TypeAlias = tuple[Fingerprint, int, int, int, int | None]
"""What all blocks of one call to a peer share: namespace, kind, codec, key and payload length."""


@dataclass(slots=True)
class _Wanted:
    """The blocks of one call, by position."""

    requests: Sequence[GetRequest]
    places: Sequence[Places]
    results: list[GetResult]
    tried: dict[int, set[InstanceId]] = field(default_factory=dict)


class PeerTier:
    """`BlockTier` over other stores. Belongs to one event loop; `close` it."""

    def __init__(
        self,
        finder: Finder,
        transport: PeerTransport,
        clock: Clock,
        policy: PeerPolicy | None = None,
    ) -> None:
        """The finder and the transport are the tier's from now on: it closes them."""
        self._finder = finder
        self._transport = transport
        self._clock = clock
        self._policy = policy or PeerPolicy()
        self._gate = ByteGate(self._policy.bytes_max)
        self._peers: dict[InstanceId, Peer] = {}
        self._dropped: OrderedDict[FrameName | Fingerprint | int, float] = OrderedDict()
        self._tally = Tally()
        self._is_open = True
        self.failures = 0
        """Calls to peers that ended without an answer."""
        self.unanswered = 0
        """Reads for which no index could say in time who has the blocks."""
        self.corrupt = 0
        """Bad copies that peers gave."""

    @property
    def tier(self) -> Tier:
        return Tier.PEER

    @property
    def in_flight_bytes(self) -> int:
        """On their way from all peers."""
        return self._gate.used_bytes

    @property
    def questions(self) -> int:
        """Calls to the index."""
        return self._finder.questions

    def peers(self) -> list[PeerView]:
        """Every other store that was ever asked, as it stands now."""
        now = self._clock()
        return [peer.view(now) for peer in self._peers.values()]

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`: what the index says, of peers that may be called."""
        require_batch(names, deadline_s)
        require_open(self._is_open)
        now = self._clock()
        places = await self._finder.find(names, deadline_s)
        return [
            not self._was_dropped(name, now) and any(self._peer(p, now).may_call(now) for p in some)
            for name, some in zip(names, places, strict=True)
        ]

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`. A block that no peer gives is a MISS, or CORRUPT."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        try:
            places = await self._finder.find([r.name for r in requests], deadline_s)
        except KvtierError:
            self.unanswered += 1
            places = [()] * len(requests)
        wanted = _Wanted(requests, places, [_MISS] * len(requests))
        now = self._clock()
        pending = [
            i for i, r in enumerate(requests) if places[i] and not self._was_dropped(r.name, now)
        ]
        for _ in range(self._policy.tries_max):
            if not pending or self._clock() >= deadline_s:
                break
            pending = await self._round(wanted, pending, deadline_s)
        self._finder.forget([requests[i].name for i in pending])
        self._tally.count_gets(wanted.results)
        return wanted.results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """Refuses everything: each store keeps what its own writers put."""
        require_batch(requests, deadline_s)
        require_open(self._is_open)
        for request in requests:
            payload_view(request.payload)
        return [PutResult(PutStatus.REFUSED, Refusal.READ_ONLY)] * len(requests)

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """Drops nothing, for the copies are others', but brings none of them back for a while.

        Not so for a scope, which names of blocks do not tell: drop it everywhere, and once again.
        """
        require_batch(selection.names if isinstance(selection, ByNames) else (), deadline_s)
        require_open(self._is_open)
        until = self._clock() + DROPPED_S
        match selection:
            case ByNames():
                for name in selection.names:
                    self._note_drop(name, until)
            case ByNamespace():
                self._note_drop(selection.namespace, until)
            case ByWriter():
                self._note_drop(selection.writer_id, until)
            case ByScope():
                pass
        return 0

    def stats(self) -> TierStats:
        """See `BlockTier.stats`: it holds nothing; bytes are those under way."""
        return self._tally.stats(Holding(0, self._gate.used_bytes, self._policy.bytes_max))

    async def close(self) -> None:
        """End every call and connection."""
        if self._is_open:
            self._is_open = False
            await self._finder.close()
            await self._transport.close()

    # Rounds

    async def _round(self, wanted: _Wanted, pending: Sequence[int], deadline_s: float) -> list[int]:
        """Ask each block of one peer that was not asked yet; which are still to be had."""
        groups = self._assigned(wanted, pending)
        calls = [
            self._call(peer, wanted, positions, deadline_s)
            for (peer, _), positions in groups.items()
        ]
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
        asked = [i for positions in groups.values() for i in positions]
        return sorted(i for i in asked if not wanted.results[i].is_hit)

    def _assigned(
        self, wanted: _Wanted, pending: Sequence[int]
    ) -> dict[tuple[Peer, _Kind], list[int]]:
        """Which blocks go to whom: as few peers as can be, the quickest of those first."""
        now = self._clock()
        open_places: dict[int, list[Peer]] = {}
        coverage: dict[Peer, int] = {}
        for i in pending:
            tried = wanted.tried.setdefault(i, set())
            peers = [
                self._peer(place, now) for place in wanted.places[i] if place.instance not in tried
            ]
            open_places[i] = [peer for peer in peers if peer.may_call(now)]
            for peer in open_places[i]:
                coverage[peer] = coverage.get(peer, 0) + 1
        mean_bytes = _size_bytes(wanted.requests, pending) / max(1, len(pending))

        def cost(peer: Peer) -> float:
            """Seconds a block, what it is busy with included."""
            speed, blocks = peer.speed(now), coverage[peer]
            size_bytes = peer.gate.used_bytes + blocks * mean_bytes
            return speed.seconds(1.0, size_bytes) / blocks

        order = {peer: rank for rank, peer in enumerate(sorted(coverage, key=cost))}
        groups: dict[tuple[Peer, _Kind], list[int]] = {}
        for i, peers in open_places.items():
            if peers:
                best = min(peers, key=order.__getitem__)
                wanted.tried[i].add(best.place.instance)
                groups.setdefault((best, _kind(wanted.requests[i])), []).append(i)
        return groups

    async def _call(
        self, peer: Peer, wanted: _Wanted, positions: Sequence[int], deadline_s: float
    ) -> None:
        """One call; its outcome is in the results, in the peer's standing, and never raised."""
        size_bytes = _size_bytes(wanted.requests, positions)
        end_s = min(deadline_s, self._clock() + self._policy.call_s)
        try:
            async with asyncio.timeout(max(0.0, end_s - self._clock())) as waiting:
                async with self._gate.room(size_bytes), peer.gate.room(size_bytes):
                    waiting.reschedule(None)
                    results = await self._transported(peer, wanted, positions, end_s)
        except TimeoutError:
            return  # too much is on its way already
        for i, result in zip(positions, results, strict=True):
            if result.is_hit or wanted.results[i].status is not GetStatus.CORRUPT:
                wanted.results[i] = result

    async def _transported(
        self, peer: Peer, wanted: _Wanted, positions: Sequence[int], end_s: float
    ) -> list[GetResult]:
        asked = [wanted.requests[i] for i in positions]
        misses = [_MISS] * len(asked)
        began = self._clock()
        permit = peer.acquire(began)
        if permit is None:
            return misses
        peer.used_at = began
        outcome = Outcome.CANCELLED
        try:
            try:
                results = await self._transport.get_many(peer.place, asked, end_s)
            except (KvtierError, ConfigError):
                outcome = Outcome.FAILURE
                return misses
            in_trouble = all(r.status in {GetStatus.TIMEOUT, GetStatus.ERROR} for r in results)
            outcome = Outcome.FAILURE if in_trouble else Outcome.SUCCESS
        finally:
            now = self._clock()
            peer.ended(permit, outcome, now - began, now)
            self.failures += outcome is Outcome.FAILURE
        return self._judged(peer, asked, results, now - began)

    def _judged(
        self,
        peer: Peer,
        asked: Sequence[GetRequest],
        results: Sequence[GetResult],
        elapsed_s: float,
    ) -> list[GetResult]:
        """Count what a peer gave; only HIT, CORRUPT and MISS are left."""
        now = self._clock()
        hits = [r for r in results if r.is_hit]
        size_bytes = sum(r.payload.nbytes for r in hits if r.payload is not None)
        corrupt = [r for r in results if r.status is GetStatus.CORRUPT]
        peer.hits += len(hits)
        peer.misses += len(results) - len(hits) - len(corrupt)
        peer.payload_bytes += size_bytes
        if hits:
            peer.measured(size_bytes, elapsed_s, now)
        if corrupt:
            peer.lied(len(corrupt), now)
            self.corrupt += len(corrupt)
            for result in corrupt:
                self._tally.corrupt[_FAULTS.get(result.reason, FrameFault.HEADER_FIELD)] += 1
        return [
            result
            if result.status is GetStatus.CORRUPT
            or (result.header is not None and not self._is_unwanted(result.header.writer_id, now))
            else _MISS
            for result in results
        ]

    # Pieces

    def _peer(self, place: PeerPlace, now: float) -> Peer:
        """What is known of a store; another address under its name is another life of it."""
        peer = self._peers.get(place.instance)
        if peer is None or peer.place != place:
            peer = Peer(place, self._policy, now)
            self._peers[place.instance] = peer
            if len(self._peers) > PEERS_COUNT_MAX:
                oldest = min(self._peers, key=lambda name: self._peers[name].used_at)
                del self._peers[oldest]
        return peer

    def _note_drop(self, what: FrameName | Fingerprint | int, until: float) -> None:
        self._dropped[what] = until
        self._dropped.move_to_end(what)
        if len(self._dropped) > PEER_DROPS_MAX:
            self._dropped.popitem(last=False)

    def _was_dropped(self, name: FrameName, now: float) -> bool:
        if not self._dropped:
            return False
        return now < max(self._dropped.get(name, 0.0), self._dropped.get(name.namespace, 0.0))

    def _is_unwanted(self, writer_id: int, now: float) -> bool:
        return bool(self._dropped) and now < self._dropped.get(writer_id, 0.0)


def _kind(request: GetRequest) -> _Kind:
    name = request.name
    return (
        name.namespace, name.key_kind, name.codec_id, len(name.key), request.payload_bytes
    )  # fmt: skip


def _size_bytes(requests: Sequence[GetRequest], positions: Sequence[int]) -> int:
    return sum(HEADER_BYTES + (requests[i].payload_bytes or _UNKNOWN_BYTES) for i in positions)

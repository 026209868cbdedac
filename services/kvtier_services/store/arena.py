"""The arena as its clients meet it: what they put, read and lease goes through the store's planner.

Clients of shared memory talk to `kvtier.tiers.arena.server`, which knows nothing of quotas, lower
tiers and pins. `GovernedArena` is the tier that it talks to; the store itself works on the same
memory through `put_many` and `RawPins`, which go past the planner that called them.
What must not live here: sessions, gRPC.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtier.core.eviction import PinToken, RankedPolicy, Removal
from kvtier.core.frame import FrameName
from kvtier.errors import KvtierError
from kvtier.ports import PutRequest, PutResult, PutStatus
from kvtier.store import TieredStore
from kvtier.tiers.arena.holdings import STORED, Answer, Place, Prepared, Wanted
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape, ArenaTier
from kvtier.tiers.tally import payload_view


class HeldPolicy(RankedPolicy[FrameName]):
    """Priorities and LRU, not offering what is held. A hold costs nothing until it would be
    offered: only then the name is pinned aside, as pins of LRU do."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[FrameName, int] = {}
        self._aside_pins: dict[FrameName, PinToken] = {}

    def hold(self, names: Sequence[FrameName]) -> None:
        """Keep names out of `victims` until as many `let_go`."""
        for name in names:
            self._held[name] = self._held.get(name, 0) + 1

    def let_go(self, names: Sequence[FrameName]) -> None:
        """Undo one `hold` of each."""
        for name in names:
            count = self._held.pop(name, 1) - 1
            if count:
                self._held[name] = count
            elif name in self._aside_pins:
                super().unpin(name, self._aside_pins.pop(name))

    def victims(self, count: int, now: float) -> list[FrameName]:
        """See `Policy.victims`."""
        while True:
            chosen = super().victims(count, now)
            held = [name for name in chosen if name in self._held]
            if not held:
                return chosen
            for name in held:
                self._aside_pins[name] = super().pin(name)

    def on_removed(self, keys: Iterable[FrameName], removal: Removal = Removal.EVICTED) -> None:
        """See `Policy.on_removed`."""
        gone = list(keys)
        for name in gone:
            self._aside_pins.pop(name, None)
        super().on_removed(gone, removal)


@dataclass(frozen=True, slots=True)
class RawPins:
    """Pins in the arena alone: for the store, which keeps its own books of them."""

    arena: "GovernedArena"

    def pin(self, name: FrameName) -> PinToken | None:
        return ArenaTier.pin(self.arena, name)

    def unpin(self, name: FrameName, token: PinToken) -> None:
        ArenaTier.unpin(self.arena, name, token)


class GovernedArena(ArenaTier):
    """`ArenaTier` for clients. Before `govern` and after `release` it refuses what they put."""

    def __init__(self, config: ArenaConfig, shape: ArenaShape | None = None) -> None:
        """See `ArenaTier`."""
        self._holds = HeldPolicy()
        super().__init__(config, replace(shape or ArenaShape(), policy=self._holds))
        self.store: TieredStore | None = None
        self._leased: dict[tuple[FrameName, PinToken], int] = {}

    @property
    def payload_bytes_max(self) -> int:
        """Longest payload that it could hold at all."""
        return self._config.slab_bytes

    def govern(self, store: TieredStore) -> None:
        """Let clients in, by the books of this store."""
        self.store = store

    def release(self) -> None:
        """Refuse what clients put from here on; they read on until the arena is closed."""
        self.store = None

    # The store's own

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`: the store's, which has planned it already."""
        payloads = [payload_view(request.payload) for request in requests]
        wanted = [
            Wanted(request.name, payload.nbytes, request.owner, request.retention)
            for request, payload in zip(requests, payloads, strict=True)
        ]
        declared = [request.payload_checksum for request in requests]
        return await super().write_many(wanted, payloads, declared, deadline_s)

    # Clients'

    async def write_many(
        self,
        wanted: Sequence[Wanted],
        payloads: Sequence[memoryview],
        declared: Sequence[int | None],
        deadline_s: float,
    ) -> list[PutResult]:
        """Blocks that a client put: published, then taken into the books.

        That way round a block costs the planner less than half of what a planned put costs. For a
        moment there may be more in the arena than the planner plans with; the arena's own eviction
        bounds that.
        """
        if self.store is None:
            return [PutResult(PutStatus.ERROR, "closed")] * len(wanted)
        results = await super().write_many(wanted, payloads, declared, deadline_s)
        return self._adopted_of(wanted, results)

    def prepare(self, wanted: Sequence[Wanted]) -> Prepared | None:
        """See `ArenaTier.prepare`: nothing before `govern` and after `release`."""
        return None if self.store is None else super().prepare(wanted)

    def publish_filled(
        self,
        prepared: Prepared,
        seen: Sequence[int],
        declared: Sequence[int | None],
        answer: Answer,
    ) -> None:
        """Blocks for which a client had slots taken: published, then taken into the books."""
        answered: list[PutResult] = []

        def answering(results: list[PutResult]) -> None:
            answered.extend(results)
            answer(results)

        super().publish_filled(prepared, seen, declared, answering)
        wanted = [one.wanted for one in prepared.reservations]
        if all(result is STORED for result in answered):  # nearly always
            self._adopted(wanted, seen, answered)
        else:
            self._adopted_of(wanted, answered)

    def begin(self, wanted: Sequence[Wanted]) -> list[Place]:
        """See `ArenaTier.begin`: nothing before `govern` and after `release`."""
        return [None] * len(wanted) if self.store is None else super().begin(wanted)

    def settle(
        self,
        wanted: Sequence[Wanted],
        places: Sequence[Place],
        seen: Sequence[int],
        declared: Sequence[int | None],
    ) -> list[PutResult]:
        """Blocks for which a client had taken slots: published, then taken into the books."""
        results = super().settle(wanted, places, seen, declared)
        return self._adopted_of(wanted, results)

    def _adopted_of(self, wanted: Sequence[Wanted], results: list[PutResult]) -> list[PutResult]:
        """Have the planner know those that were stored."""
        kept = [
            (one, held.payload_checksum)
            for one, result in zip(wanted, results, strict=True)
            if result.status is PutStatus.STORED and (held := self.held(one.name)) is not None
        ]
        return self._adopted([one for one, _ in kept], [seen for _, seen in kept], results)

    def _adopted(
        self, wanted: Sequence[Wanted], seen: Sequence[int], results: list[PutResult]
    ) -> list[PutResult]:
        """Have the planner know what was stored. What it does not keep has been stored all the
        same: a block may vanish at any time."""
        if self.store is not None:
            try:
                self.store.adopt(wanted, seen)
            except KvtierError:
                return [PutResult(PutStatus.ERROR, "closed")] * len(results)
        return results

    def touch_entries(self, located: Iterable[tuple[int, int]]) -> None:
        """Blocks that were read in place: they count as used everywhere."""
        names = [name for name in map(self._name_at, located) if name is not None]
        self.touch(names)
        if self.store is not None:
            self.store.touch(names)

    def pin(self, name: FrameName) -> PinToken | None:
        """A lease of the arena's own server: neither the arena nor the planner evicts the block."""
        if self.store is None:
            return None
        token = super().pin(name)
        if token is not None:
            self.store.hold((name,))
            self._leased[name, token] = self._leased.get((name, token), 0) + 1
        return token

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """End of a lease. Harmless when it has ended."""
        super().unpin(name, token)
        count = self._leased.pop((name, token), 0)
        if count > 1:
            self._leased[name, token] = count - 1
        if count and self.store is not None:
            self.store.let_go((name,))

    def hold(self, names: Sequence[FrameName]) -> None:
        """Keep blocks from being evicted by anybody, until as many `let_go`; cheaper than pins."""
        self._holds.hold(names)
        if self.store is not None:
            self.store.hold(names)

    def let_go(self, names: Sequence[FrameName]) -> None:
        """Undo one `hold` of each."""
        self._holds.let_go(names)
        if self.store is not None:
            self.store.let_go(names)

"""Tells the index what this store holds: one holder per namespace, tiers dram and nvme.

Also speaks for the shared Redis where this store was elected to (`kvtier.tiers.redis.holder`).
Blocks named by a foreign engine's digests are told by the prefix hashes that came with their puts,
and not at all where none did: those are remembered in memory only, so what a restarted store finds
on its disk of such blocks is told when they are announced again.
What must not live here: what tiers hold, how events reach the index (`kvtier.publisher`).
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvtier.core.event_messages import FenceReason
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.frame import FrameName, KeyKind
from kvtier.limits import STORE_DIGESTS_MAX, STORE_NAMESPACES_MAX
from kvtier.ports import RemovalCause
from kvtier.publisher import Publisher, PublisherStats
from kvtier.sections import DialConfig
from kvtier.store import TierWatch
from kvtier.telemetry.logs import EventLog
from kvtier.tiers.redis.caretaker import RedisCaretaker
from kvtier.tiers.redis.holder import (
    Began,
    Completed,
    Ended,
    HolderEvent,
    Removed,
    Standing,
    Stored,
)
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier, Trust

LOG = EventLog("kvtier_services.store")
_HASH_BYTES = 8
_TIERS = (Tier.DRAM, Tier.NVME)


@dataclass(frozen=True, slots=True)
class Identity:
    """How this store describes itself to an index."""

    instance: InstanceId
    node: NodeId
    zone: str
    grpc_address: str
    capacities: tuple[TierCapacity, ...]
    bulk_address: str = ""

    def holder(self, namespace: Fingerprint) -> HolderInfo:
        """The holder of one namespace of this store."""
        return HolderInfo(
            kind=HolderKind.STORE,
            instance=self.instance,
            node=self.node,
            namespace=namespace,
            zone=self.zone,
            addresses=Addresses(grpc=self.grpc_address, bulk=self.bulk_address),
            capacities=self.capacities,
        )

    def shared(self, holder_id: str, namespace: Fingerprint) -> HolderInfo:
        """The holder of one namespace of the shared Redis."""
        return replace(
            self.holder(namespace),
            kind=HolderKind.SHARED,
            instance=InstanceId(f"redis:{holder_id}"),
            addresses=Addresses(),
            capacities=(),
        )


class DigestHashes:
    """Prefix hashes of blocks that are named by engine digests. Bounded; the oldest go first."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[FrameName, int] = OrderedDict()

    def learn(self, names: Sequence[FrameName], hashes: Sequence[int]) -> list[FrameName]:
        """Remember what came with a put; which names were new. What was said first is kept."""
        new = []
        for name, prefix_hash in zip(names, hashes, strict=True):
            if name.key_kind is not KeyKind.ENGINE_DIGEST:
                continue
            if name not in self._hashes:
                self._hashes[name] = prefix_hash
                new.append(name)
            self._hashes.move_to_end(name)
        return new

    def surplus(self) -> list[FrameName]:
        """Names beyond the ceiling, the oldest: to be forgotten."""
        count = max(0, len(self._hashes) - STORE_DIGESTS_MAX)
        return list(itertools.islice(self._hashes, count))

    def forget(self, names: Sequence[FrameName]) -> None:
        for name in names:
            self._hashes.pop(name, None)

    def hash_of(self, name: FrameName) -> int | None:
        """By what an index knows a block; None where nobody has said so."""
        if name.key_kind is KeyKind.PREFIX_KEY:
            return int.from_bytes(name.key[:_HASH_BYTES], "little")
        return self._hashes.get(name)

    def column(self, names: Sequence[FrameName]) -> npt.NDArray[np.uint64]:
        """The prefix hashes of blocks; those that are not known are left out."""
        found = bytearray()
        for name in names:
            if name.key_kind is KeyKind.PREFIX_KEY:
                found += name.key[:_HASH_BYTES]
            elif (known := self._hashes.get(name)) is not None:
                found += known.to_bytes(_HASH_BYTES, "little")
        return np.frombuffer(bytes(found), "<u8").astype(np.uint64, copy=False)


class Announcer:
    """`StoreListener` that publishes. Made before the tiers, named once the port is known."""

    def __init__(self, dial: DialConfig, hashes: DigestHashes, fenced: Callable[[], None]) -> None:
        """`fenced` is called, on any thread, when another process speaks for this store."""
        self._dial = dial
        self._hashes = hashes
        self._fenced = fenced
        self._identity: Identity | None = None
        self._early: dict[tuple[Fingerprint, Tier], dict[FrameName, None]] = {}
        self._publishers: dict[Fingerprint, Publisher] = {}
        self.unannounced_namespaces = 0

    def name(self, identity: Identity) -> None:
        """Begin to publish, with what tiers held before."""
        self._identity = identity
        early, self._early = self._early, {}
        for (_, tier), names in early.items():
            self.on_stored(tier, tuple(names))

    def on_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        """See `StoreListener`."""
        for namespace, some in _by_namespace(names).items():
            if self._identity is None:
                self._early.setdefault((namespace, tier), {}).update(dict.fromkeys(some))
                continue
            publisher = self._publisher(namespace)
            if publisher is not None:
                publisher.store(tier, 0, self._hashes.column(some))

    def on_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """See `StoreListener`."""
        for namespace, some in _by_namespace(names).items():
            if self._identity is None:
                early = self._early.get((namespace, tier), {})
                for name in some:
                    early.pop(name, None)
                continue
            publisher = self._publishers.get(namespace)
            if publisher is not None:
                publisher.remove(tier, self._hashes.column(some))

    def hashes_of(self, names: Sequence[FrameName]) -> list[int]:
        """What the index calls blocks; 0 where nobody has said so."""
        return [self._hashes.hash_of(name) or 0 for name in names]

    def learn(self, names: Sequence[FrameName], hashes: Sequence[int], watch: TierWatch) -> None:
        """Prefix hashes of blocks named by engine digests; those that are held are told now."""
        for name in self._hashes.learn(names, hashes):
            for tier in _TIERS:
                if watch.holds(tier, name):
                    self.on_stored(tier, (name,))
        surplus = self._hashes.surplus()
        for name in surplus:
            for tier in _TIERS:
                if watch.holds(tier, name):
                    self.on_removed(tier, (name,), RemovalCause.LOST)
        self._hashes.forget(surplus)

    def stats(self) -> list[PublisherStats]:
        return [publisher.stats() for publisher in self._publishers.values()]

    async def close(self) -> None:
        """Flush, say goodbye and end every publisher."""
        publishers = list(self._publishers.values())
        self._publishers.clear()
        await asyncio.gather(*(asyncio.to_thread(p.close) for p in publishers))

    # PublisherListener

    def fenced(self, reason: FenceReason) -> None:
        LOG.error("another store speaks for this one", reason=reason.value)
        self._fenced()

    def refused(self, target: str, reason: str) -> None:
        LOG.warning("an index refuses this store", target=target, reason=reason)

    def _publisher(self, namespace: Fingerprint) -> Publisher | None:
        assert self._identity is not None
        publisher = self._publishers.get(namespace)
        if publisher is None and self._dial.targets:
            if len(self._publishers) >= STORE_NAMESPACES_MAX:
                self.unannounced_namespaces += 1
                return None
            info = self._identity.holder(namespace)
            publisher = Publisher(info, self._dial, listener=self).start()
            self._publishers[namespace] = publisher
        return publisher


class SharedAnnouncer:
    """Speaks for the shared Redis while this store is the one that was elected to."""

    def __init__(self, dial: DialConfig, identity: Identity, caretaker: RedisCaretaker) -> None:
        self._dial = dial
        self._identity = identity
        self._caretaker = caretaker
        self._holder_id: str | None = None
        self._trust = Trust.DEGRADED
        """EXACT once the first census of the term is complete."""
        self._publishers: dict[Fingerprint, Publisher] = {}

    @property
    def standing(self) -> Standing:
        return self._caretaker.standing()

    async def run(self, look_s: float) -> None:
        """Look after the belief, and announce, until cancelled; then `close` it."""
        while True:
            await self._caretaker.look()
            events = self._caretaker.poll()
            if any(isinstance(event, Completed) for event in events):
                self._trust = Trust.EXACT
            for event in events:
                await self._take(event)
            await asyncio.sleep(look_s)

    async def close(self) -> None:
        """Take back what was announced, and give the lock to another store."""
        await self._end()
        await self._caretaker.close()

    async def _take(self, event: HolderEvent) -> None:
        match event:
            case Began():
                trust = self._trust
                await self._end()
                self._holder_id, self._trust = event.holder_id, trust
            case Stored():
                publisher = self._publisher(event.namespace)
                if publisher is not None:
                    publisher.store(Tier.REDIS, 0, np.array(event.hashes, np.uint64))
                    publisher.start()  # only now: its first snapshot has all that is known
            case Removed():
                publisher = self._publishers.get(event.namespace)
                if publisher is not None:
                    publisher.remove(Tier.REDIS, np.array(event.hashes, np.uint64))
            case Ended():
                await self._end()
            case Completed():
                for namespace in event.emptied:
                    emptied = self._publisher(namespace)
                    if emptied is not None:
                        emptied.start()
                for publisher in self._publishers.values():
                    publisher.set_trust(Trust.EXACT)
                LOG.info("announcing the shared redis", namespaces=len(self._publishers))

    def _publisher(self, namespace: Fingerprint) -> Publisher | None:
        publisher = self._publishers.get(namespace)
        full = len(self._publishers) >= STORE_NAMESPACES_MAX
        if publisher is None and self._dial.targets and self._holder_id is not None and not full:
            info = self._identity.shared(self._holder_id, namespace)
            publisher = Publisher(info, self._dial)
            if self._trust is not Trust.EXACT:
                publisher.set_trust(self._trust)
            self._publishers[namespace] = publisher
        return publisher

    async def _end(self) -> None:
        """Publish no more. An index forgets the holder until the next announcer has begun."""
        publishers = list(self._publishers.values())
        self._publishers.clear()
        self._holder_id, self._trust = None, Trust.DEGRADED
        await asyncio.gather(*(asyncio.to_thread(p.close) for p in publishers))


def _by_namespace(names: Sequence[FrameName]) -> dict[Fingerprint, list[FrameName]]:
    found: dict[Fingerprint, list[FrameName]] = {}
    for name in names:
        found.setdefault(name.namespace, []).append(name)
    return found

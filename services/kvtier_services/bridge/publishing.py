"""Speaks for the engine's ranks: a publisher each while the engine is within reach.

What must not live here: how events reach the index (`kvtier.publisher`), what is published.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.core.event_messages import FenceReason
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.model_card import ModelCard
from kvtier.core.workers import Load
from kvtier.publisher import Publisher, PublisherStats
from kvtier.sections import DialConfig
from kvtier.telemetry.logs import EventLog
from kvtier.types import HolderKind, InstanceId, NodeId, Tier
from kvtier_services.bridge.config import BridgeConfig

LOG: Final = EventLog("kvtier_services.bridge")


@dataclass(frozen=True, slots=True)
class Identity:
    """How the engine is described to an index."""

    config: BridgeConfig
    card: ModelCard
    host: str

    def holder(self, rank: int) -> HolderInfo:
        """One rank of the engine."""
        config, engine = self.config, self.config.engine
        capacity = TierCapacity(Tier.GPU, engine.blocks, engine.blocks * engine.block_bytes)
        return HolderInfo(
            kind=HolderKind.WORKER,
            instance=InstanceId(config.instance or engine.http),
            node=NodeId(config.node or self.host),
            namespace=config.model.fingerprint(engine, self.card),
            card=self.card,
            dp_rank=rank,
            zone=config.zone,
            store=config.store,
            addresses=Addresses(http=engine.http),
            role=config.role,
            engine=engine.kind.value,
            engine_version=engine.version,
            capacities=(capacity,) if engine.blocks else (),
            block_bytes=engine.block_bytes,
        )


class Speaker:
    """Publishers of ranks that are in the fleet. `join` and `leave` are the follower's; they do not
    wait for the network."""

    def __init__(self, identity: Identity, dial: DialConfig, fenced: Callable[[], None]) -> None:
        """`fenced` is called, on any thread, when another process speaks for this engine."""
        self._identity = identity
        self._dial = dial
        self._fenced = fenced
        self._publishers: dict[int, Publisher] = {}
        self._loads: dict[int, Load] = {}
        self._leaving: list[threading.Thread] = []

    def check(self) -> None:
        """Whether a publisher can be made at all. ConfigError: now, not when the engine appears."""
        Publisher(self._identity.holder(0), self._dial)

    def join(self, rank: int) -> Publisher:
        """A publisher with an epoch of its own."""
        publisher = Publisher(self._identity.holder(rank), self._dial, listener=self).start()
        if rank in self._loads:
            publisher.set_load(self._loads[rank])
        self._publishers[rank] = publisher
        return publisher

    def set_load(self, rank: int, load: Load) -> None:
        """What a rank is doing, in the fleet or not."""
        self._loads[rank] = load
        publisher = self._publishers.get(rank)
        if publisher is not None:
            publisher.set_load(load)

    def leave(self, rank: int) -> None:
        """Say goodbye: every index forgets the rank."""
        publisher = self._publishers.pop(rank, None)
        if publisher is None:
            return
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        thread = threading.Thread(target=publisher.close, name=f"leave {rank}", daemon=True)
        thread.start()
        self._leaving.append(thread)

    def stats(self) -> list[PublisherStats]:
        return [publisher.stats() for publisher in list(self._publishers.values())]

    def close(self) -> None:
        """Say goodbye for all ranks, and wait for it."""
        for rank in list(self._publishers):
            self.leave(rank)
        for thread in self._leaving:
            thread.join()

    # PublisherListener

    def fenced(self, reason: FenceReason) -> None:
        """See `PublisherListener`."""
        LOG.error("another bridge speaks for this engine", reason=reason.value)
        self._fenced()

    def refused(self, target: str, reason: str) -> None:
        """See `PublisherListener`."""
        LOG.warning("an index refuses this engine", target=target, reason=reason)

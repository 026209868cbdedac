"""Tells the index who this worker is; what it holds and does is told by the core, through the same
publisher. What must not live here: how events reach the index (`kvtier.publisher`)."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.core.event_messages import FenceReason
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.model_card import ModelCard
from kvtier.publisher import Publisher
from kvtier.sections import DialConfig
from kvtier.telemetry.logs import EventLog
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Role, Tier

LOG = EventLog("kvtier_services.worker")


@dataclass(frozen=True, slots=True)
class Identity:
    """How this worker describes itself."""

    instance: InstanceId
    node: NodeId
    zone: str
    store: str
    """Instance of the store that it is attached to; empty: none."""
    http_address: str
    card: ModelCard
    namespace: Fingerprint
    blocks_count: int
    block_bytes: int
    version: str
    role: Role = Role.BOTH

    def holder(self) -> HolderInfo:
        """The description that a Hello carries."""
        capacity = TierCapacity(Tier.GPU, self.blocks_count, self.blocks_count * self.block_bytes)
        return HolderInfo(
            kind=HolderKind.WORKER,
            instance=self.instance,
            node=self.node,
            namespace=self.namespace,
            card=self.card,
            zone=self.zone,
            store=self.store,
            addresses=Addresses(http=self.http_address),
            engine="kvtier",
            engine_version=self.version,
            role=self.role,
            capacities=(capacity,),
            block_bytes=self.block_bytes,
        )


class Listener:
    """`PublisherListener`: another process that speaks for this worker ends it."""

    def __init__(self, fenced: Callable[[], None]) -> None:
        self._fenced = fenced

    def fenced(self, reason: FenceReason) -> None:
        """See `PublisherListener`."""
        LOG.error("another process speaks for this worker", reason=reason.value)
        self._fenced()

    def refused(self, target: str, reason: str) -> None:
        """See `PublisherListener`."""
        LOG.warning("an index refuses this worker", target=target, reason=reason)


def new_publisher(
    identity: Identity, dial: DialConfig, fenced: Callable[[], None]
) -> Publisher | None:
    """A publisher that is not started; None where there is no index to tell."""
    if not dial.targets:
        return None
    return Publisher(identity.holder(), dial, None, Listener(fenced))

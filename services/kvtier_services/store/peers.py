"""The stores of other nodes, as this store reads them: what is built of the configuration.

What must not live here: what is asked of whom (`kvtier.peers`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvtier.client.calls import ClientConfig
from kvtier.client.client import IndexClient
from kvtier.peers import BulkFirst, BulkTransport, Finder, GrpcTransport, PeerPolicy, PeerTier
from kvtier.peers.finding import FinderPolicy, HashOf
from kvtier.peers.nixl_agent import Exposure
from kvtier.peers.nixl_server import NixlEnd
from kvtier.peers.nixl_transport import NixlTransport, WhenCold
from kvtier.ports import Clock, PeerTransport
from kvtier.sections import DialConfig
from kvtier.telemetry.logs import EventLog
from kvtier.types import InstanceId
from kvtier_services.store.config import PeersSection, PeerWay, StoreConfig

LOG = EventLog("kvtier_services.store")


@contextlib.asynccontextmanager
async def opened_peers(
    config: StoreConfig, instance: InstanceId, clock: Clock, hash_of: HashOf
) -> AsyncIterator[PeerTier | None]:
    """The tier, while entered; None where it is off or nobody could say who has what.

    Whoever gets it closes it. ConfigError for unsafe or missing credentials.
    """
    section = config.peers
    if not section.enabled or not config.index.targets:
        yield None
        return
    ask_s = section.ask_ms / 1000
    async with IndexClient(config.index, ClientConfig(deadline_s=ask_s)) as index:
        finder = Finder(index, instance, clock, hash_of, FinderPolicy(ask_s=ask_s))
        policy = PeerPolicy(
            call_s=section.deadline_ms / 1000,
            bytes_max=section.bytes_max,
            peer_bytes_max=section.peer_bytes_max,
        )
        dial = section.dial(config.index)
        yield PeerTier(finder, _transport(section, dial), clock, policy)


async def opened_nixl(section: PeersSection) -> NixlEnd | None:
    """This store's own end of NIXL, for others; None where it is off. Takes seconds.

    ConfigError where the extra is not installed, BackendError where UCX does not start.
    """
    if section.transport is not PeerWay.NIXL:
        return None
    LOG.warning("nixl_is_not_authenticated", trusted_network=section.trusted_network)
    return await asyncio.to_thread(NixlEnd, _exposure(section))


def _transport(section: PeersSection, dial: DialConfig) -> PeerTransport:
    """The best way that both ends have."""
    grpc = GrpcTransport(dial)
    if section.transport is PeerWay.GRPC:
        return grpc
    bulk = BulkFirst(BulkTransport(dial), grpc)
    if section.transport is PeerWay.BULK:
        return bulk
    return BulkFirst(NixlTransport(dial, _exposure(section), WhenCold.REFUSE), bulk)


def _exposure(section: PeersSection) -> Exposure:
    return Exposure.ANY if section.trusted_network else Exposure.LOOPBACK

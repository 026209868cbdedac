"""The stores of other nodes, as this store reads them: what is built of the configuration.

What must not live here: what is asked of whom (`kvtier.peers`).
"""

import contextlib
from collections.abc import AsyncIterator

from kvtier.client.calls import ClientConfig
from kvtier.client.client import IndexClient
from kvtier.peers import BulkFirst, BulkTransport, Finder, GrpcTransport, PeerPolicy, PeerTier
from kvtier.peers.finding import FinderPolicy, HashOf
from kvtier.ports import Clock
from kvtier.types import InstanceId
from kvtier_services.store.config import StoreConfig


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
        transport = BulkFirst(BulkTransport(dial), GrpcTransport(dial))
        yield PeerTier(finder, transport, clock, policy)

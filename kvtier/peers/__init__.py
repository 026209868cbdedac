"""The stores of other nodes as a tier: found through the index, read, verified, never trusted.

From below: `finding` (who has what, remembered for a moment), `standing` (what is known of one
peer), the ways there (`grpc_transport`, `bulk_transport` over `bulk_wire`, `nixl_transport` over
`staging` and `nixl_agent`, `fallback`), `tier`; and the far end of the last two, `bulk_server` with
`nixl_server`.
What must not live here: what moves up and stays (`kvtier.store`), who may call (`kvtier.security`).
"""

from kvtier.peers.bulk_transport import BulkTransport
from kvtier.peers.fallback import BulkFirst
from kvtier.peers.finding import Finder, PeerIndex
from kvtier.peers.grpc_transport import GrpcTransport
from kvtier.peers.standing import PeerPolicy, PeerView
from kvtier.peers.tier import PeerTier

__all__ = [
    "BulkFirst",
    "BulkTransport",
    "Finder",
    "GrpcTransport",
    "PeerIndex",
    "PeerPolicy",
    "PeerTier",
    "PeerView",
]

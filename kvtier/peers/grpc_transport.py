"""`PeerTransport` over the service that every store has: chunks on gRPC streams, one a batch.

Each peer has a connection of its own; peers that are not used are let go. Credentials are those of
the section that the store dials the index with, or of one of its own.
What must not live here: whom to ask, breakers, bounds (`tier`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from kvtier.client.store_link import Pauses, StoreLink
from kvtier.errors import UnavailableError
from kvtier.limits import PEERS_COUNT_MAX, STORE_DEADLINE_MS_MAX
from kvtier.ports import GetRequest, GetResult, PeerPlace, PutRequest, PutResult
from kvtier.sections import DialConfig, Reach, parse_address
from kvtier.tiers.tally import payload_view
from kvtier.wire import blocks
from kvtier.wire import messages as pb

_PAUSES = Pauses(0.05, 0.5)


class GrpcTransport:
    """See the module. Belongs to one event loop."""

    def __init__(self, dial: DialConfig) -> None:
        """`dial` has the credentials; its targets are not used. Connects nothing."""
        self._dial = replace(dial, targets=())
        self._links: OrderedDict[str, StoreLink] = OrderedDict()

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        """See `PeerTransport.get_many`."""
        if not requests:
            return []
        head = pb.GetBlocksRequest(
            names=blocks.names_to([request.name for request in requests]),
            payload_bytes=requests[0].payload_bytes or 0,
            deadline_ms=_ms(deadline_s),
            skip_shared=True,
            framed=True,
            store=peer.instance,
        )
        link = await self._link(peer)
        return await link.get_many(requests, head, _left_s(deadline_s))

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        """See `PeerTransport.put_many`."""
        if not requests:
            return []
        payloads = [payload_view(request.payload) for request in requests]
        sums = [request.payload_checksum for request in requests]
        known = [one for one in sums if one is not None]
        owner = requests[0].owner
        head = pb.PutHead(
            names=blocks.names_to([request.name for request in requests]),
            lengths=blocks.u64s(payload.nbytes for payload in payloads),
            checksums=blocks.u64s(known) if len(known) == len(sums) else b"",
            writer=pb.BlockWriter(writer_id=owner.writer_id, scope=owner.scope),
            deadline_ms=_ms(deadline_s),
            store=peer.instance,
        )
        link = await self._link(peer)
        return await link.put_many(head, payloads, _left_s(deadline_s))

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            await link.close()

    async def _link(self, peer: PeerPlace) -> StoreLink:
        """The connection to a peer. ConfigError where its address is none."""
        address = peer.grpc_address
        if address.startswith("unix:") or parse_address(address).port == 0:
            raise UnavailableError(f"{peer.instance} tells no address that can be reached")
        link = self._links.get(address)
        if link is None:
            link = StoreLink(self._dial_to(address), _PAUSES)
            self._links[address] = link
        self._links.move_to_end(address)
        if len(self._links) > PEERS_COUNT_MAX:
            _, idle = self._links.popitem(last=False)
            await idle.close()
        return link

    def _dial_to(self, address: str) -> DialConfig:
        """Without TLS a token stays on this machine, whatever an index says of addresses."""
        is_far = parse_address(address).reach is Reach.NETWORK
        dial = replace(self._dial, targets=(address,))
        if is_far and dial.tls is None and not dial.insecure:
            raise UnavailableError(f"{address} is another machine, and there is no TLS")
        return dial


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - monotonic())


def _ms(deadline_s: float) -> int:
    return min(STORE_DEADLINE_MS_MAX, max(1, int(1000 * _left_s(deadline_s))))

"""The bulk channel where a peer has one and it works, gRPC everywhere else.

What must not live here: either of the two.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvtier.errors import UnavailableError
from kvtier.limits import PEERS_COUNT_MAX
from kvtier.ports import (
    GetRequest,
    GetResult,
    PeerPlace,
    PeerTransport,
    PutRequest,
    PutResult,
)

AGAIN_S: Final = 15.0
"""A bulk channel that could not be used is tried again after so long."""

T = TypeVar("T")


class BulkFirst:
    """`PeerTransport` over two others, which are its own from now on."""

    def __init__(self, bulk: PeerTransport, plain: PeerTransport) -> None:
        self._bulk = bulk
        self._plain = plain
        self._without: OrderedDict[PeerPlace, float] = OrderedDict()

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        """See `PeerTransport.get_many`."""
        return await self._either(peer, lambda way: way.get_many(peer, requests, deadline_s))

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        """See `PeerTransport.put_many`."""
        return await self._either(peer, lambda way: way.put_many(peer, requests, deadline_s))

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        await self._bulk.close()
        await self._plain.close()

    async def _either(self, peer: PeerPlace, call: Callable[[PeerTransport], Awaitable[T]]) -> T:
        if peer.bulk_address and time.monotonic() >= self._without.get(peer, 0.0):
            try:
                return await call(self._bulk)
            except UnavailableError:
                self._without[peer] = time.monotonic() + AGAIN_S
                self._without.move_to_end(peer)
                if len(self._without) > PEERS_COUNT_MAX:
                    self._without.popitem(last=False)
        return await call(self._plain)

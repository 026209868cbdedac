"""Answers to Locate: which stores hold blocks, for a store of another node that looks for them.

What must not live here: what is held where (the core), gRPC (service.py).
"""

import itertools
from typing import Final

import numpy as np

from kvtier.core.checks import require_digest
from kvtier.core.prefix_index import LocateTerms
from kvtier.limits import LOCATE_STORES_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.types import Fingerprint, HolderId
from kvtier.wire import convert
from kvtier.wire import messages as pb
from kvtier_services.index.state import IndexState

_BESIDES: Final = 1
"""The store that asks may be among those that are found, and is not told."""


class Locator:
    """Answers over one state, which it never changes."""

    def __init__(self, state: IndexState) -> None:
        self._state = state
        self._turns = itertools.count()

    def answer(self, request: pb.LocateRequest) -> pb.LocateResponse:
        """Stores that can be reached. CallerError and its like for a bad question."""
        require_digest("namespace", request.namespace)
        hashes = convert.u64_column("hashes", request.hashes, TIER_BATCH_BLOCKS_MAX)
        terms = LocateTerms(LOCATE_STORES_MAX + _BESIDES, next(self._turns) & 0xFFFF)
        found = self._state.fleet.locate(hashes, Fingerprint(request.namespace), terms)
        numbers: dict[int, int] = {}
        stores: list[pb.StoreRef] = []
        for holder in np.unique(found.holders).tolist():
            info = self._state.fleet.record(HolderId(holder)).info
            if info.instance == request.instance or not info.addresses.grpc:
                continue
            numbers[holder] = len(stores)
            stores.append(
                pb.StoreRef(
                    instance=info.instance,
                    node=info.node,
                    zone=info.zone,
                    grpc_address=info.addresses.grpc,
                    bulk_address=info.addresses.bulk,
                )
            )
        at = iter(found.holders.tolist())
        told = [
            [numbers[one] for one in itertools.islice(at, count) if one in numbers]
            for count in found.counts.tolist()
        ]
        told = [some[:LOCATE_STORES_MAX] for some in told]
        return pb.LocateResponse(
            stores=stores,
            counts=bytes(map(len, told)),
            holders=np.array(list(itertools.chain.from_iterable(told)), "<u4").tobytes(),
        )

"""Answers to Match: queries in, one serialized response out.

A response is put together from serialized parts, which protobuf allows: the description of each
worker is serialized once and reused until the worker or its trust changes, so that naming many
workers costs next to nothing. What must not live here: what matches (the core), gRPC (service.py).
"""

from array import array
from collections.abc import Callable
from typing import Final

from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import Pool
from kvtier.core.prefix_index import MatchResult
from kvtier.errors import CallerError, ForbiddenError, LimitError
from kvtier.limits import MATCH_QUERIES_MAX
from kvtier.security.guard import caller
from kvtier.security.roles import AccessRole
from kvtier.types import HolderId, Trust
from kvtier.wire import convert
from kvtier.wire import messages as pb
from kvtier_services.index.metrics import IndexMetrics
from kvtier_services.index.state import IndexState

TOKEN_MATCH_ROLES: Final = frozenset({AccessRole.ROUTER, AccessRole.OPERATOR, AccessRole.LOCAL})
"""Who may ask by tokens, about any scope. By hashes one can ask only about what one can name."""


class Answerer:
    """Answers matches over one state, which it never changes."""

    def __init__(
        self,
        state: IndexState,
        metrics: IndexMetrics,
        clock: Callable[[], float],
        index_epoch: int,
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._clock = clock
        self._head = pb.MatchResponse(index_epoch=index_epoch).SerializeToString()
        self._workers: dict[HolderId, tuple[tuple[HolderInfo, Trust], bytes]] = {}
        """Serialized descriptions; holder numbers are reused, so there are HOLDERS_COUNT_MAX."""
        self._pools: dict[bytes, Pool] = {}

    def answer(self, request: pb.MatchRequest) -> bytes:
        """A MatchResponse in bytes. CallerError and its like for a bad query."""
        if len(request.queries) > MATCH_QUERIES_MAX:
            raise LimitError(f"{len(request.queries)} queries exceed {MATCH_QUERIES_MAX}")
        began = self._clock()
        parts = [self._head]
        numbers: dict[HolderId, int] = {}
        for query in request.queries:
            for result in self._results(query):
                parts.append(self._part(result, numbers))
        parts += map(self._worker, numbers)
        self._metrics.match_took(self._clock() - began)
        return b"".join(parts)

    def _results(self, query: pb.MatchQuery) -> list[MatchResult]:
        """One result for a query by hashes, one per chain for a query by tokens."""
        fleet = self._state.fleet
        if not query.served_name:
            pool = self._pool(query.pool) if query.pool else None
            return [fleet.match(convert.query_hashes(query), pool)]
        if caller().role not in TOKEN_MATCH_ROLES:
            raise ForbiddenError("only routers and operators match by tokens")
        tokens = convert.query_tokens(query)
        name = query.adapter or query.served_name
        matched = fleet.match_tokens(name, tokens, query.scope_salt or None)
        return [result for _, result in matched]

    def _pool(self, name: bytes) -> Pool:
        pools = self._state.fleet.pools()
        known = self._pools.get(name)
        if known is None or known not in pools:
            self._pools = {convert.pool_name(pool): pool for pool in pools}
            known = self._pools.get(name)
        if known is None:
            raise CallerError("the pool is not known")
        return known

    def _part(self, result: MatchResult, numbers: dict[HolderId, int]) -> bytes:
        """One result of a response; workers that are new get the next numbers."""
        workers = [numbers.setdefault(holder, len(numbers)) for holder in result.workers.tolist()]
        self._metrics.matched(result)
        return pb.MatchResponse(
            results=[
                pb.MatchResult(
                    workers=array("I", workers).tobytes(),
                    tokens=result.tokens.tobytes(),
                    run_offsets=result.run_offsets.tobytes(),
                    run_sources=result.run_sources.tobytes(),
                    run_blocks=result.run_blocks.tobytes(),
                    queried_blocks=result.blocks_queried,
                )
            ]
        ).SerializeToString()

    def _worker(self, holder: HolderId) -> bytes:
        """The description of a worker as the part of a response that it is."""
        described = self._state.described(holder)
        known = self._workers.get(holder)
        if known is not None and known[0] is described:
            return known[1]
        info, trust = described
        ref = pb.WorkerRef(
            instance=info.instance,
            dp_rank=info.dp_rank,
            trust=convert.trust_to(trust),
            block_tokens=info.card.block_tokens if info.card is not None else 0,
        )
        part = pb.MatchResponse(workers=[ref]).SerializeToString()
        self._workers[holder] = (described, part)
        return part

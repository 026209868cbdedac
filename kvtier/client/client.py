"""`IndexClient`: ask, watch and reserve at the index, from asyncio.

A router that asks for each request embeds an `IndexReplica` instead: microseconds, not a call.
What must not live here: connections (`calls`), the form of answers (`results`).
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.client.calls import ClientConfig, Targets
from kvtier.client.reservations import ReserveSession
from kvtier.client.results import (
    FleetChange,
    FleetChangeKind,
    IndexStats,
    Match,
    change_from,
    matches_from,
    places_from,
    stats_from,
)
from kvtier.core.event_columns import Hashes, as_hashes
from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import Pool
from kvtier.errors import BackendError, CallerError, KvtierError, LimitError
from kvtier.limits import MATCH_BLOCKS_MAX, MATCH_QUERIES_MAX, PROMPT_TOKENS_MAX, TOKEN_ID_MAX
from kvtier.ports import PeerPlace
from kvtier.publisher import Publisher, PublisherConfig, PublisherListener
from kvtier.sections import DialConfig
from kvtier.types import Fingerprint
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import raise_if_cancelled
from kvtier.wire.status import error_of


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as tokens; the index computes its chains, one for each pool behind the name.

    `scope_salt` as the router computed it; empty for none. `adapter` names a LoRA of the model.
    """

    served_name: str
    tokens: Sequence[int] | npt.NDArray[np.uint32]
    scope_salt: str = ""
    adapter: str = ""


class IndexClient:
    """Calls whichever index answers. An async context manager; belongs to one event loop.

    Every method raises errors of `kvtier.errors` only, and every call ends at its deadline.
    """

    def __init__(self, dial: DialConfig, config: ClientConfig | None = None) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        self._dial = dial
        self._config = config or ClientConfig()
        self._targets = Targets(dial, self._config)

    async def match(
        self, hashes: Hashes, pool: Pool | None = None, *, deadline_s: float | None = None
    ) -> Match:
        """Longest unbroken prefix of one chain per worker, of one pool or of all."""
        return (await self.match_many([hashes], pool, deadline_s=deadline_s))[0]

    async def match_many(
        self,
        queries: Sequence[Hashes],
        pool: Pool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> tuple[Match, ...]:
        """One match a query, in one call. LimitError above MATCH_QUERIES_MAX queries."""
        if len(queries) > MATCH_QUERIES_MAX:
            raise LimitError(f"{len(queries)} queries exceed {MATCH_QUERIES_MAX}")
        name = convert.pool_name(pool) if pool is not None else b""
        request = pb.MatchRequest(
            queries=[pb.MatchQuery(hashes=_packed(one), pool=name) for one in queries]
        )
        return await self._match(request, len(queries), deadline_s)

    async def match_tokens(
        self, prompt: TokenPrompt, *, deadline_s: float | None = None
    ) -> tuple[Match, ...]:
        """One match for each chain behind the served name; compare tokens, never blocks.

        Only routers and operators may ask this (ForbiddenError): it names another's scope.
        """
        query = pb.MatchQuery(
            tokens=_packed_tokens(prompt.tokens),
            served_name=prompt.served_name,
            scope_salt=prompt.scope_salt,
            adapter=prompt.adapter,
        )
        return await self._match(pb.MatchRequest(queries=[query]), None, deadline_s)

    async def locate(
        self, namespace: Fingerprint, hashes: Hashes, instance: str, deadline_s: float
    ) -> tuple[tuple[PeerPlace, ...], ...]:
        """Which other stores than `instance` hold each block, as a hint; for stores."""
        request = pb.LocateRequest(namespace=namespace, hashes=_packed(hashes), instance=instance)
        response = await self._ask("Locate", request, deadline_s)
        return places_from(response, len(hashes))

    async def stats(self, *, deadline_s: float | None = None) -> IndexStats:
        """Counters and sizes of the index that answers. Operators only."""
        response = await self._ask("Stats", pb.StatsRequest(), deadline_s)
        return stats_from(response, asyncio.get_running_loop().time())

    async def watch_fleet(self, models: Sequence[str] = ()) -> AsyncIterator[FleetChange]:
        """Holders as they join, change, hide, resume and leave; without end.

        Begins with everybody known, then CURRENT. When the stream breaks, INTERRUPTED comes once,
        and everybody anew from the next index that answers. Raises only what trying again cannot
        mend: UnauthenticatedError, ForbiddenError, CallerError.
        """
        failures, is_told = 0, False
        for target in itertools.cycle(self._targets.in_order()):
            try:
                async for change in self._watch(target, models):
                    failures, is_told = 0, True
                    yield change
            except KvtierError as error:
                if not error.retryable and not isinstance(error, BackendError):
                    raise
            raise_if_cancelled()
            failures += 1
            if is_told:
                is_told = False
                yield FleetChange(FleetChangeKind.INTERRUPTED)
            await asyncio.sleep(self._config.pause_s(failures))

    def reservations(self, router: str) -> ReserveSession:
        """One life of a router, to reserve with: `async with client.reservations(name) as it`."""
        return ReserveSession(self._targets, router, self._config)

    def publisher(
        self,
        info: HolderInfo,
        config: PublisherConfig | None = None,
        listener: PublisherListener | None = None,
    ) -> Publisher:
        """A publisher to the same targets with the same credentials; not started yet."""
        return Publisher(info, self._dial, config, listener)

    async def close(self) -> None:
        """End all calls at once."""
        await self._targets.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- parts

    async def _ask(self, name: str, request: Any, deadline_s: float | None) -> Any:
        wanted_s = self._config.deadline_s if deadline_s is None else deadline_s
        if not 0 < wanted_s < float("inf"):
            raise CallerError(f"deadline_s: want a finite duration, got {wanted_s}")
        return await self._targets.ask(name, request, wanted_s)

    async def _match(
        self, request: pb.MatchRequest, results_count: int | None, deadline_s: float | None
    ) -> tuple[Match, ...]:
        response = await self._ask("Match", request, deadline_s)
        matches = matches_from(response)
        if results_count is not None and len(matches) != results_count:
            raise BackendError(f"{len(matches)} results for {results_count} queries")
        return matches

    async def _watch(self, target: str, models: Sequence[str]) -> AsyncIterator[FleetChange]:
        dialer = self._targets.new_dialer(target)
        try:
            call = rpc.call(dialer.channel(), rpc.INDEX, "WatchFleet")(
                pb.WatchFleetRequest(models=models)
            )
            while (event := await call.read()) is not grpc.aio.EOF:
                change = change_from(event, asyncio.get_running_loop().time())
                if change is not None:
                    yield change
        except grpc.aio.AioRpcError as error:
            raise error_of(error, target) from error
        finally:
            await dialer.close()


def _packed(hashes: Hashes) -> bytes:
    packed = as_hashes(hashes)
    if len(packed) > MATCH_BLOCKS_MAX:
        raise LimitError(f"hashes: {len(packed)} exceed {MATCH_BLOCKS_MAX}")
    return packed.astype("<u8", copy=False).tobytes()


def _packed_tokens(tokens: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    if len(tokens) > PROMPT_TOKENS_MAX:
        raise LimitError(f"tokens: {len(tokens)} exceed {PROMPT_TOKENS_MAX}")
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise CallerError("tokens: want a one-dimensional uint32 array")
        return tokens.astype("<u4", copy=False).tobytes()
    packed = as_hashes(tokens)  # checks that they are integers
    if len(packed) and int(packed.max()) > TOKEN_ID_MAX:
        raise CallerError(f"tokens: {int(packed.max())} exceeds {TOKEN_ID_MAX}")
    return packed.astype("<u4").tobytes()

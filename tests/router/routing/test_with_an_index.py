"""Brains on a real index: what one reserves the other sees, and what an index is asked remotely."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.client import ClientConfig, IndexClient, Match
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import Adapter
from kvtier.core.workers import WorkerName
from kvtier.errors import NotFoundError
from kvtier.publisher import Publisher, PublisherConfig
from kvtier.replica import IndexReplica, ReplicaConfig
from kvtier.sections import DialConfig
from kvtier.types import InstanceId, Source, Tier
from kvtier_router.routing import RouteAsk, RouteDecision, Router, RoutingConfig, Usage
from kvtier_router.routing.remote import RemoteFleet
from kvtier_router.routing.values import Knowledge
from tests.harness.waiting import eventually_async
from tests.support.live_index import DEADLINE_S, LiveIndex
from tests.support.raw_publisher import CARD, worker_info
from tests.support.virtual_fleet import words

QUICK = PublisherConfig(coalesce_s=0.001, reconnect_s_min=0.005, reconnect_s_max=0.05)
PATIENT = ClientConfig(deadline_s=DEADLINE_S, reconnect_s_min=0.005, reconnect_s_max=0.05)
PROMPT = words("prompt", 40 * CARD.block_tokens)
CHAIN = prefix_hashes(chain_root(CARD.pool, None, None), PROMPT, CARD.block_tokens)
NAME = CARD.served_name


@pytest.fixture
def index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=5_000) as running:
        yield running


@asynccontextmanager
async def workers(client: IndexClient, *names: str) -> AsyncIterator[list[Publisher]]:
    """Publishers; the first of them holds 30 blocks of the prompt."""
    publishers = [client.publisher(worker_info(name), QUICK).start() for name in names]
    try:
        publishers[0].store(Tier.GPU, 0, CHAIN[:30])
        for publisher in publishers:
            assert await asyncio.to_thread(publisher.flush, DEADLINE_S)
        yield publishers
    finally:
        for publisher in publishers:
            await asyncio.to_thread(publisher.close)


@asynccontextmanager
async def brain(index: LiveIndex, client: IndexClient, name: str) -> AsyncIterator[Router]:
    dial = DialConfig(targets=(index.target,))
    replica = IndexReplica(dial, ReplicaConfig(router=name, index_bytes_max=64 << 20))
    with replica:
        assert await asyncio.to_thread(replica.wait_complete, DEADLINE_S)
        async with client.reservations(name) as session:
            yield Router(RoutingConfig(router=name), replica, session, draw=Random(1).random)


async def test_what_one_router_reserves_draws_siblings_through_another(index: LiveIndex) -> None:
    fresh = words("fresh", 20 * CARD.block_tokens)
    async with (
        IndexClient(DialConfig(targets=(index.target,)), PATIENT) as client,
        workers(client, "w1", "w2", "w3"),
        brain(index, client, "router-1") as one,
        brain(index, client, "router-2") as other,
    ):

        async def knows_all() -> bool:
            routers = (one, other)
            return all(r.serves(NAME) and len(r.workers()) == 3 for r in routers)

        await eventually_async(knows_all, DEADLINE_S, "both routers know three workers")
        held = one.route(RouteAsk(NAME, PROMPT))
        assert held.worker == WorkerName(InstanceId("w1"), 0)
        assert held.matched_tokens == {Source.GPU: 30 * CARD.block_tokens}
        first = one.route(RouteAsk(NAME, fresh))
        seen: list[RouteDecision] = []

        async def is_drawn() -> bool:
            seen.append(other.explain(RouteAsk(NAME, fresh)))
            return Source.PREDICTED in seen[-1].matched_tokens

        await eventually_async(is_drawn, DEADLINE_S, "the other router sees the prediction")
        assert seen[-1].worker == first.worker
        first.placement.first_token(0.1)
        first.placement.finished(Usage())
        held.placement.finished(Usage())

        async def is_released() -> bool:
            one.tick()
            return sum(report.waiting_prefill_tokens for report in other.workers()) == 0

        await eventually_async(is_released, DEADLINE_S, "the other router sees the release")


@pytest.mark.parametrize("again", [(b"b" * 32, 1), (b"a" * 32, 2)])
async def test_an_adapter_reloaded_under_its_name_gives_no_old_hits(
    index: LiveIndex, again: tuple[bytes, int]
) -> None:
    """`again` is what it is after the reload: other weights, or the same name loaded anew."""
    lives = [Adapter("lora", b"a" * 32, 1), Adapter("lora", *again)]
    cards = [replace(CARD, adapters=(adapter,)) for adapter in lives]
    chains = [
        prefix_hashes(chain_root(CARD.pool, None, adapter.ref), PROMPT, CARD.block_tokens)
        for adapter in lives
    ]
    ask = RouteAsk("lora", PROMPT)
    async with (
        IndexClient(DialConfig(targets=(index.target,)), PATIENT) as client,
        workers(client, "plain"),
        brain(index, client, "router-1") as router,
    ):

        async def matched(tokens_count: int) -> bool:
            if not router.serves("lora"):
                return False
            decision = router.explain(ask)
            known = decision.worker == WorkerName(InstanceId("w1"), 0)
            return known and decision.matched_tokens.get(Source.GPU, 0) == tokens_count

        first = client.publisher(worker_info("w1", card=cards[0]), QUICK).start()
        first.store(Tier.GPU, 0, chains[0][:30])
        await eventually_async(lambda: matched(30 * CARD.block_tokens), DEADLINE_S, "it hits")
        await asyncio.to_thread(first.close)
        second = client.publisher(worker_info("w1", card=cards[1]), QUICK).start()
        # Blocks of the old weights are still there, and a few of the new ones.
        second.store(Tier.GPU, 0, chains[0][:30])
        second.store(Tier.GPU, 0, chains[1][:2])
        try:
            await eventually_async(lambda: matched(2 * CARD.block_tokens), DEADLINE_S, "anew only")
        finally:
            await asyncio.to_thread(second.close)


class Silent:
    """A RemoteMatcher that never answers."""

    async def match_many(
        self,
        queries: Sequence[npt.NDArray[np.uint64]],
        pool: Pool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Sequence[Match]:
        await asyncio.Event().wait()
        return ()


async def test_an_index_that_is_not_embedded_is_asked_and_does_without_when_late(
    index: LiveIndex,
) -> None:
    async with (
        IndexClient(DialConfig(targets=(index.target,)), PATIENT) as client,
        workers(client, "w1", "w2"),
    ):
        fleet = RemoteFleet(asyncio.get_running_loop().time)
        following = asyncio.create_task(fleet.follow(client))
        router = Router(RoutingConfig(), fleet, clock=asyncio.get_running_loop().time)
        try:
            with pytest.raises(NotFoundError):
                await router.route_remote(RouteAsk("nobody", PROMPT), client)

            async def knows_all() -> bool:
                return router.serves(NAME) and len(router.workers()) == 2

            await eventually_async(knows_all, DEADLINE_S, "the router knows two workers")
            decision = await router.route_remote(RouteAsk(NAME, PROMPT), client, DEADLINE_S)
            assert decision.worker == WorkerName(InstanceId("w1"), 0)
            assert decision.reused_tokens == 30 * CARD.block_tokens
            assert decision.knowledge is Knowledge.FRESH
            late = await router.route_remote(RouteAsk(NAME, PROMPT), Silent(), 0.001)
            assert late.knowledge is Knowledge.HASHED
            assert "did not answer" in late.cause
            assert router.stats.remote_misses == 1
            for done in (decision, late):
                done.placement.finished(Usage())
            assert router.in_flight_count == 0
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

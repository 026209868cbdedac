"""What a publisher thinks of its own knowledge, at a real index service."""

import asyncio
from pathlib import Path

import numpy as np

from kvtier.core.fleet import HolderInfo
from kvtier.core.model_card import ModelCard
from kvtier.publisher import Publisher, PublisherConfig
from kvtier.sections import DialConfig
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier, Trust
from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import HolderView, channel_to, fleet_view, start_index

INFO = HolderInfo(
    kind=HolderKind.WORKER,
    instance=InstanceId("w0"),
    node=NodeId("n0"),
    namespace=Fingerprint(b"n" * 32),
    card=ModelCard(("tiny",), "org/tiny", "r1", b"t" * 32, None, 16),
)
DEADLINE_S = 45.0


async def test_a_doubt_shows_at_the_index_until_it_is_taken_back(tmp_path: Path) -> None:
    with ProcessRunner("publisher-trust", tmp_path) as runner:
        index = await start_index(runner)
        # Heartbeats come too late for this test: what is news is said at once.
        config = PublisherConfig(heartbeat_s=60.0, coalesce_s=0.0)
        publisher = Publisher(INFO, DialConfig(targets=(index.address,)), config)
        publisher.set_trust(Trust.DEGRADED)
        await asyncio.to_thread(publisher.start)
        async with channel_to(index.address) as channel:

            async def shown(trust: int, reason: str, count: int) -> HolderView | None:
                view = (await fleet_view(channel)).get("w0")
                if view is None or (view.trust, view.reason) != (trust, reason):
                    return None
                held = view.shards.get(0, {}).get(Tier.GPU, np.empty(0))
                return view if len(held) == count else None

            publisher.store(Tier.GPU, 0, [1, 2])
            await eventually_async(
                lambda: shown(pb.TRUST_DEGRADED, "source", 2), DEADLINE_S, "the doubt is shown"
            )
            publisher.store(Tier.GPU, 2, [3])
            publisher.set_trust(Trust.EXACT)
            await eventually_async(
                lambda: shown(pb.TRUST_EXACT, "", 3), DEADLINE_S, "the doubt is gone"
            )
            publisher.set_trust(Trust.DEGRADED)
            await eventually_async(
                lambda: shown(pb.TRUST_DEGRADED, "source", 3), DEADLINE_S, "it is back"
            )
        await asyncio.to_thread(publisher.close)

"""Publisher, index and replica together, over real connections that are cut, reset and frozen."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.client import IndexClient, TokenPrompt, blocking
from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.publisher import Publisher, PublisherConfig, StreamState
from kvtier.replica import IndexReplica, OwnReservation, ReplicaConfig, Reserved, WorkerName
from kvtier.sections import DialConfig
from kvtier.types import HolderId, HolderKind, InstanceId, Tier, Trust
from tests.harness.proxy import Admission, Direction, Faults, Flow, TcpProxy
from tests.harness.waiting import eventually
from tests.support.live_index import DEADLINE_S, LiveIndex
from tests.support.raw_publisher import CARD, worker_info

QUICK = PublisherConfig(
    coalesce_s=0.001, reconnect_s_min=0.005, reconnect_s_max=0.05, digest_interval_s=0.05
)
REPLICA = ReplicaConfig(
    index_bytes_max=64 << 20, settle_s=DEADLINE_S, reconnect_s_min=0.005, reconnect_s_max=0.05
)
W1 = WorkerName(InstanceId("w1"), 0)
Hashes = npt.NDArray[np.uint64]


def span(first: int, last: int) -> Hashes:
    return np.arange(first, last + 1, dtype=np.uint64)


@pytest.fixture
def index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=2_000) as running:
        yield running


@pytest.fixture
def other_index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=2_000) as running:
        yield running


def dial(*indexes: LiveIndex) -> DialConfig:
    return DialConfig(targets=tuple(one.target for one in indexes))


def through(*proxies: TcpProxy) -> DialConfig:
    return DialConfig(targets=tuple(f"127.0.0.1:{proxy.port}" for proxy in proxies))


def publish(where: DialConfig, info: HolderInfo | None = None) -> Publisher:
    return Publisher(info or worker_info("w1"), where, QUICK)


class Engine(threading.Thread):
    """Stores and evicts chains until told to stop; `held` is what its GPU then has."""

    def __init__(self, publisher: Publisher, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.held: Counter[int] = Counter()
        self.steps = 0
        self._publisher = publisher
        self._random = random.Random(seed)
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(0.0005):
            self._step()
            self.steps += 1

    def _step(self) -> None:
        if self._random.random() < 0.6 or len(self.held) < 100:
            first = self._random.randrange(1, 20_000)
            chain = span(first, first + self._random.randrange(1, 64))
            self._publisher.store(Tier.GPU, first - 1, chain)
            self.held.update(chain.tolist())
        else:
            gone = self._random.sample(sorted(self.held), 50)
            self._publisher.remove(Tier.GPU, np.array(gone, np.uint64))
            self.held.subtract(gone)
            self.held = +self.held

    def work(self, steps: int) -> None:
        """Wait until that many more steps are done."""
        until = self.steps + steps
        eventually(lambda: self.steps >= until, DEADLINE_S, "the engine works")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def converged(index: LiveIndex, engine: Engine) -> None:
    eventually(
        lambda: index.held("w1", Tier.GPU) == engine.held and index.trust("w1") is Trust.EXACT,
        DEADLINE_S,
        "the index holds what the engine holds",
    )


def until_live(publisher: Publisher) -> None:
    eventually(
        lambda: all(one.state is StreamState.LIVE for one in publisher.stats().streams),
        DEADLINE_S,
        "every stream is live",
    )


def until_welcomed(publisher: Publisher, times: int) -> None:
    eventually(
        lambda: publisher.stats().streams[0].welcomed >= times, DEADLINE_S, f"{times} welcomes"
    )


def tokens(replica: IndexReplica, hashes: Hashes) -> dict[str, int]:
    match = replica.match(hashes)
    return {
        match.holders[HolderId(holder)].info.instance: count
        for holder, count in zip(
            match.result.workers.tolist(), match.result.tokens.tolist(), strict=True
        )
    }


# ---- recovery


def test_an_index_killed_twice_under_load_converges_and_so_does_its_replica(
    index: LiveIndex,
) -> None:
    with publish(dial(index)) as publisher, IndexReplica(dial(index), REPLICA) as replica:
        engine = Engine(publisher)
        engine.start()
        for _ in range(2):
            engine.work(100)
            index.stop()
            engine.work(100)
            index.start()
        engine.work(50)
        engine.stop()
        converged(index, engine)
        (view,) = eventually(replica.holders, DEADLINE_S, "the replica knows the worker")
        eventually(
            lambda: replica_holds(replica) == engine.held,
            DEADLINE_S,
            "the replica holds what the engine holds",
        )
        assert view.name == W1


def replica_holds(replica: IndexReplica) -> Counter[int]:
    (view,) = replica.holders()
    return Counter(replica.snapshot(view.holder, Tier.GPU).hashes.tolist())


def test_a_stall_of_more_than_a_lease_costs_no_snapshot() -> None:
    with (
        LiveIndex(lease_ms=300) as index,
        TcpProxy(("127.0.0.1", index.port)) as proxy,
        publish(through(proxy)) as publisher,
    ):
        publisher.store(Tier.GPU, 0, span(1, 64))
        assert publisher.flush(DEADLINE_S)
        snapshots = publisher.stats().snapshots_begun
        proxy.cut()
        eventually(lambda: index.is_hidden("w1"), DEADLINE_S, "the lease ends")
        assert index.held("w1", Tier.GPU)
        publisher.store(Tier.GPU, 64, span(65, 70))
        proxy.heal()
        eventually(lambda: not index.is_hidden("w1"), DEADLINE_S, "it is back")
        assert publisher.flush(DEADLINE_S)
        assert len(index.held("w1", Tier.GPU)) == 70
        assert publisher.stats().snapshots_begun == snapshots
        assert index.trust("w1") is Trust.EXACT


@pytest.mark.parametrize("direction", list(Direction))
def test_a_cut_in_one_direction_heals_without_loss(index: LiveIndex, direction: Direction) -> None:
    with TcpProxy(("127.0.0.1", index.port)) as proxy, publish(through(proxy)) as publisher:
        until_live(publisher)
        engine = Engine(publisher)
        engine.start()
        engine.work(50)
        proxy.set(direction, Faults(flow=Flow.HOLD))
        engine.work(100)
        eventually(lambda: proxy.counters(direction).bytes_held, DEADLINE_S, "bytes are held")
        proxy.heal()
        engine.stop()
        converged(index, engine)


def test_a_connection_that_is_reset_again_and_again_loses_nothing(index: LiveIndex) -> None:
    with TcpProxy(("127.0.0.1", index.port)) as proxy, publish(through(proxy)) as publisher:
        engine = Engine(publisher)
        engine.start()
        for number in range(5):
            until_welcomed(publisher, number + 1)
            engine.work(30)
            assert proxy.reset() >= 1
        engine.stop()
        converged(index, engine)
        assert publisher.stats().streams[0].failures >= 5


def test_a_killed_publisher_is_hidden_and_nothing_of_it_is_matched() -> None:
    with (
        LiveIndex(lease_ms=300) as index,
        TcpProxy(("127.0.0.1", index.port)) as proxy,
        publish(through(proxy)) as publisher,
        IndexReplica(dial(index), REPLICA) as replica,
    ):
        publisher.store(Tier.GPU, 0, span(1, 8))
        assert publisher.flush(DEADLINE_S)
        eventually(lambda: tokens(replica, span(1, 8)), DEADLINE_S, "it is matched")
        proxy.admit(Admission.RESET)
        proxy.reset()
        eventually(lambda: index.is_hidden("w1"), DEADLINE_S, "the index hides it")
        eventually(lambda: not tokens(replica, span(1, 8)), DEADLINE_S, "the replica too")


def test_a_frozen_index_loses_nothing_and_nobody() -> None:
    with LiveIndex(lease_ms=400) as index, publish(dial(index)) as publisher:
        engine = Engine(publisher)
        engine.start()
        engine.work(50)
        index.freeze(1.0)
        engine.work(50)
        engine.stop()
        converged(index, engine)
        assert not index.is_hidden("w1")


# ---- two indexes


def test_a_replica_that_changes_its_index_changes_no_answer(
    index: LiveIndex, other_index: LiveIndex
) -> None:
    with publish(dial(index, other_index)) as publisher:
        publisher.store(Tier.GPU, 0, span(1, 64))
        assert publisher.flush(DEADLINE_S)
        with IndexReplica(dial(index, other_index), REPLICA) as replica:
            assert replica.wait_complete(DEADLINE_S)
            pictures = replica.stats().pictures
            first = index if replica.lag.target == index.target else other_index
            answers: list[dict[str, int]] = []
            first.stop()

            def has_changed_over() -> bool:
                answers.append(tokens(replica, span(1, 64)))
                return replica.stats().pictures > pictures

            eventually(has_changed_over, DEADLINE_S, "the other index is followed")
            answers.append(tokens(replica, span(1, 64)))
            assert all(answer == {"w1": 1024} for answer in answers)


def test_routers_on_different_indexes_see_each_others_reservations(
    index: LiveIndex, other_index: LiveIndex
) -> None:
    mine = replace(REPLICA, router="router-1")
    theirs = replace(REPLICA, router="router-2")
    with (
        publish(dial(index, other_index)) as publisher,
        IndexReplica(dial(index), mine) as here,
        IndexReplica(dial(other_index), theirs) as there,
    ):
        publisher.store(Tier.GPU, 0, span(1, 2))
        assert publisher.flush(DEADLINE_S)
        for replica in (here, there):
            eventually(replica.holders, DEADLINE_S, "the worker is known")
        reserve_and_release(here, there, dial(index, other_index))


def reserve_and_release(here: IndexReplica, there: IndexReplica, where: DialConfig) -> None:
    wanted = OwnReservation("k", W1, 100, 60_000, span(1001, 1004))
    with blocking.IndexClient(where) as client, client.reservations("router-1") as session:
        here.reserve_local(wanted)
        assert here.reserved(W1) == Reserved(100, 1)
        assert session.reserve(wanted, deadline_s=DEADLINE_S).is_granted
        eventually(
            lambda: there.reserved(W1) == Reserved(100, 1), DEADLINE_S, "the other router sees it"
        )
        assert tokens(there, span(1001, 1004)) == {"w1": 64}
        echoed = here.stats().messages + 2
        eventually(lambda: here.stats().messages >= echoed, DEADLINE_S, "the echo has come")
        assert here.reserved(W1) == Reserved(100, 1)
        here.release_local("k")
        session.release("k")
        for replica in (here, there):
            eventually(
                lambda replica=replica: replica.reserved(W1) == Reserved(0, 0),  # type: ignore[misc]
                DEADLINE_S,
                "it is given back everywhere",
            )


# ---- identity


def test_a_contradiction_in_a_pool_is_refused_and_names_both_values(index: LiveIndex) -> None:
    other_card = replace(CARD, tokenizer_digest=b"x" * 32)
    with publish(dial(index)) as publisher:
        assert publisher.flush(DEADLINE_S)
        until_live(publisher)
        with publish(dial(index), worker_info("w2", card=other_card)) as refused:
            eventually(
                lambda: refused.stats().streams[0].state is StreamState.REFUSED,
                DEADLINE_S,
                "the second is refused",
            )
            reason = refused.stats().streams[0].last_error
            assert (b"t" * 32).hex()[:8] in reason
            assert (b"x" * 32).hex()[:8] in reason
        assert index.holder("w2") is None
        assert index.holder("w1") is not None


async def test_two_block_sizes_behind_one_name_are_both_matched(index: LiveIndex) -> None:
    wide = replace(CARD, block_tokens=32)
    prompt = list(range(128))
    with (
        publish(dial(index)) as narrow_one,
        publish(dial(index), worker_info("w2", card=wide)) as wide_one,
    ):
        for publisher, pool in ((narrow_one, CARD.pool), (wide_one, wide.pool)):
            hashes = prefix_hashes(chain_root(pool, None, None), prompt, pool.block_tokens)
            publisher.store(Tier.GPU, 0, hashes[: len(hashes) // 2])
            assert publisher.flush(DEADLINE_S)
        async with IndexClient(dial(index)) as client:
            matches = await client.match_tokens(TokenPrompt("chat", prompt), deadline_s=DEADLINE_S)
        found = {
            match.worker(row).name.instance: int(match.tokens[row])
            for match in matches
            for row in range(len(match))
        }
        assert found == {"w1": 64, "w2": 64}


def test_a_store_and_its_worker_are_matched_together(index: LiveIndex) -> None:
    store = HolderInfo(
        kind=HolderKind.STORE,
        instance=InstanceId("store-of-w1"),
        node=worker_info("w1").node,
        namespace=worker_info("w1").namespace,
    )
    with (
        publish(dial(index)) as gpu,
        publish(dial(index), store) as dram,
        IndexReplica(dial(index), REPLICA) as replica,
    ):
        gpu.store(Tier.GPU, 0, span(1, 4))
        dram.store(Tier.DRAM, 4, span(5, 10))
        assert gpu.flush(DEADLINE_S)
        assert dram.flush(DEADLINE_S)
        eventually(
            lambda: tokens(replica, span(1, 12)) == {"w1": 160}, DEADLINE_S, "both are counted"
        )

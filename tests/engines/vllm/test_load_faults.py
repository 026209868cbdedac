"""A store that fails while a load of the vLLM connector is under way: real processes, no vLLM.

The store's answers pass through a proxy that holds them back; that it has brought the blocks into
its memory meanwhile shows that the load is under way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvtier.client.store_blocking import BlockStoreClient
from kvtier.core.identity import EngineIdentity, KvDtype, Pool
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.pages import KvPages
from kvtier.engines.vllm.scheduling import LoadOrder, SaveOrder
from kvtier.engines.vllm.transfers import LoadEnd, Transfers
from kvtier.sections import DialConfig
from kvtier.types import Tier
from tests.harness.processes import ProcessRunner
from tests.harness.proxy import NO_FAULTS, Direction, Faults, Flow, TcpProxy
from tests.harness.waiting import eventually
from tests.support.spoiling import spoil_store
from tests.support.store_cluster import MIB, StoreProcess, store_launch

LAYERS, HEADS, TOKENS, HEAD_DIM, BLOCKS = 4, 2, 32, 64, 32
FACTS = EngineFacts(
    Pool("m", "r", TOKENS), KvDtype.FLOAT32, LAYERS, HEADS, HEAD_DIM, 1, bytes(32),
    EngineIdentity("vllm", "0.32.0", "sha256_cbor", "seed"),
)  # fmt: skip
DIGESTS = tuple(i.to_bytes(32, "big") for i in range(12))
PATIENT_S = 120.0
"""Deadline of a load that is to end by a fault, on any machine."""


@dataclass(slots=True)
class Engine:
    """The worker's half of the connector, over caches of its own."""

    caches: dict[str, torch.Tensor]
    transfers: Transfers

    def load(self, digests: tuple[bytes, ...], first_block: int = 0) -> None:
        blocks = tuple(range(first_block, first_block + len(digests)))
        self.transfers.load(LoadOrder("r", digests, blocks))

    def end(self) -> LoadEnd:
        """How the load ended."""
        ends: list[LoadEnd] = []

        def has_ended() -> bool:
            ends.extend(self.transfers.ended())
            return bool(ends)

        eventually(has_ended, 60, "the load ends")
        return ends[0]


def engine(seed: int, target: str, deadline_s: float = PATIENT_S) -> Engine:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)
    caches = {f"layers.{n}": torch.randn(shape, generator=generator) for n in range(LAYERS)}
    client = BlockStoreClient(DialConfig((target,)))
    pages = KvPages(caches, FACTS.spec(0))
    return Engine(caches, Transfers(pages, FACTS, 0, client, deadline_s, 64 * MIB))


@dataclass(slots=True)
class Rig:
    store: StoreProcess
    proxy: TcpProxy
    data_dir: Path
    saved: Engine
    loading: Engine

    def are_in(self, tier: Tier) -> bool:
        names = self.saved.transfers._names(DIGESTS, SaveOrder(DIGESTS, ()))
        with BlockStoreClient(DialConfig((self.store.socket,))) as client:
            return all(tier in found for found in client.contains(names))


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A load is under way, and what the store says of it is held back."""
    data_dir = tmp_path / "store"
    with ProcessRunner("vllm-load-faults", tmp_path) as runner:
        launch, port = store_launch(
            runner, data_dir, dram={"bytes_max": 16 * MIB, "slab_bytes": MIB, "blocks_max": 4096}
        )
        store = StoreProcess(runner.start(launch), port, data_dir / "run")
        saved = engine(1, store.socket)
        saved.transfers.save(SaveOrder(DIGESTS, tuple(range(len(DIGESTS)))))
        with TcpProxy(("127.0.0.1", port)) as proxy:
            loading = engine(2, proxy.address, getattr(request, "param", PATIENT_S))
            rig = Rig(store, proxy, data_dir, saved, loading)
            eventually(lambda: rig.are_in(Tier.NVME), 60, "the blocks are on disk")
            store.process.terminate()
            store.process.wait(60)
            store.process.spawn()
            store.process.wait_ready()

            def has_connected() -> bool:
                loading.load(DIGESTS[:1])
                return loading.end().leading_blocks == 1

            eventually(has_connected, 60, "a load succeeds")
            proxy.set(Direction.TO_CLIENT, Faults(flow=Flow.HOLD))
            loading.load(DIGESTS[1:], first_block=1)
            eventually(lambda: rig.are_in(Tier.DRAM), 60, "the store serves the load")
            yield rig
            proxy.set(Direction.TO_CLIENT, NO_FAULTS)
            for one in (loading, saved):
                one.transfers.close()


def test_a_store_that_is_killed_ends_a_load_at_once_and_touches_no_cache(rig: Rig) -> None:
    before = {name: layer.clone() for name, layer in rig.loading.caches.items()}
    assert not rig.loading.transfers.ended()
    rig.store.process.kill()
    rig.proxy.reset()
    assert rig.loading.end().leading_blocks == 0
    assert all(torch.equal(layer, before[name]) for name, layer in rig.loading.caches.items())


@pytest.mark.parametrize("rig", [5.0], indirect=True)
def test_a_store_that_does_not_answer_costs_the_deadline_and_the_next_load_works(rig: Rig) -> None:
    assert rig.loading.end().leading_blocks == 0
    rig.proxy.set(Direction.TO_CLIENT, NO_FAULTS)

    def loads() -> bool:
        rig.loading.load(DIGESTS)
        return rig.loading.end().leading_blocks == len(DIGESTS)

    eventually(loads, 60, "a load after it")
    for name, layer in rig.loading.caches.items():
        assert torch.equal(layer[: len(DIGESTS)], rig.saved.caches[name][: len(DIGESTS)])


def test_blocks_that_are_corrupted_meanwhile_are_not_loaded_and_touch_no_cache(rig: Rig) -> None:
    before = {name: layer.clone() for name, layer in rig.loading.caches.items()}
    assert not rig.loading.transfers.ended()
    assert spoil_store(rig.store.process.pid, rig.data_dir) > len(DIGESTS)
    rig.proxy.set(Direction.TO_CLIENT, NO_FAULTS)
    assert rig.loading.end().leading_blocks == 0
    assert all(torch.equal(layer, before[name]) for name, layer in rig.loading.caches.items())

"""Worker side of the vLLM connector: every load ends, and only verified bytes reach the cache."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.core.frame import FrameName
from kvtier.core.identity import EngineIdentity, KvDtype, Pool
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.pages import KvPages
from kvtier.engines.vllm.scheduling import LoadOrder, SaveOrder
from kvtier.engines.vllm.transfers import CHUNK_BLOCKS, LoadEnd, Transfers
from kvtier.errors import ForbiddenError
from kvtier.ports import GetResult, GetStatus, PutResult, PutStatus
from tests.harness.waiting import eventually

LAYERS, HEADS, TOKENS, HEAD_DIM, BLOCKS = 2, 2, 4, 8, 64
FACTS = EngineFacts(
    Pool("m", "r", TOKENS),
    KvDtype.FLOAT32,
    LAYERS,
    HEADS,
    HEAD_DIM,
    1,
    bytes(32),
    EngineIdentity("vllm", "0.32.0", "sha256_cbor", "seed"),
)


class FakeClient:
    """A store in a dictionary; `statuses` and `error` say how it fails."""

    def __init__(self) -> None:
        self.held: dict[FrameName, bytes] = {}
        self.statuses: dict[bytes, GetStatus] = {}
        self.error: Exception | None = None
        self.puts: list[tuple[int, ...]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def get_many(
        self,
        names: Sequence[FrameName],
        into: Sequence[Any] | None = None,
        terms: Any = None,
        *,
        deadline_s: float | None = None,
    ) -> list[GetResult]:
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        assert into is not None
        results = []
        for name, row in zip(names, into, strict=True):
            status = self.statuses.get(name.key, GetStatus.HIT)
            if name not in self.held:
                status = GetStatus.MISS
            row[:] = 0xEE  # unspecified after anything but a hit
            if status is GetStatus.HIT:
                row[:] = np.frombuffer(self.held[name], np.uint8)
            results.append(GetResult(status))
        return results

    def put_many(
        self,
        names: Sequence[FrameName],
        payloads: Sequence[Any],
        terms: Any = None,
        *,
        deadline_s: float | None = None,
    ) -> list[PutResult]:
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.puts.append(tuple(terms.prefix_hashes))
        for name, payload in zip(names, payloads, strict=True):
            self.held[name] = bytes(payload)
        return [PutResult(PutStatus.STORED)] * len(names)

    def close(self) -> None:
        self.is_closed = True


def caches(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)
    return {f"layers.{n}": torch.randn(shape, generator=generator) for n in range(LAYERS)}


class Rig:
    def __init__(self, seed: int, client: FakeClient, staging_bytes: int = 4 << 20) -> None:
        self.caches = caches(seed)
        pages = KvPages(self.caches, FACTS.spec(0))
        self.block_bytes = pages.block_bytes
        self.transfers = Transfers(pages, FACTS, 0, client, 5.0, staging_bytes)

    def load(self, order: LoadOrder) -> LoadEnd:
        self.transfers.load(order)
        found: list[LoadEnd] = []

        def has_ended() -> bool:
            found.extend(self.transfers.ended())
            return bool(found)

        eventually(has_ended, 30, "the load ends")
        assert len(found) == 1
        return found[0]


def names(count: int) -> tuple[bytes, ...]:
    return tuple(i.to_bytes(32, "big") for i in range(count))


def saved(count: int) -> tuple[FakeClient, Rig]:
    """A store with blocks that one engine saved."""
    client = FakeClient()
    rig = Rig(1, client)
    rig.transfers.save(SaveOrder(names(count), tuple(range(count)), tuple(range(count))))
    eventually(lambda: rig.transfers.counts.saved == count, 30, "the save")
    rig.transfers.close()
    return client, rig


def test_what_one_engine_saved_another_loads_byte_for_byte_over_several_chunks() -> None:
    count = 2 * CHUNK_BLOCKS + 3
    client, first = saved(count)
    assert [hashes for puts in client.puts for hashes in puts] == list(range(count))
    second = Rig(2, client)
    ids = tuple(reversed(range(count)))
    end = second.load(LoadOrder("r", names(count), ids))
    assert end.leading_blocks == count
    for name, layer in second.caches.items():
        assert torch.equal(layer[list(ids)], first.caches[name][:count])
    second.transfers.close()
    assert client.is_closed


@pytest.mark.parametrize("status", [s for s in GetStatus if s is not GetStatus.HIT])
def test_a_block_that_is_no_hit_ends_the_load_and_touches_no_cache(status: GetStatus) -> None:
    client, first = saved(6)
    client.statuses[names(6)[4]] = status
    second = Rig(2, client)
    before = {name: layer.clone() for name, layer in second.caches.items()}
    end = second.load(LoadOrder("r", names(6), tuple(range(10, 16))))
    assert end.leading_blocks == 4
    for name, layer in second.caches.items():
        assert torch.equal(layer[10:14], first.caches[name][:4])
        assert torch.equal(layer[14:], before[name][14:])
    second.transfers.close()


@pytest.mark.parametrize("error", [ForbiddenError("no"), RuntimeError("a bug")])
def test_a_load_that_breaks_off_ends_with_nothing_and_the_next_one_works(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = saved(2)
    rig = Rig(2, client)
    client.error = error
    assert rig.load(LoadOrder("r", names(2), (0, 1))).leading_blocks == 0
    assert any("load" in record.getMessage() for record in caplog.records)
    client.error = None
    assert rig.load(LoadOrder("r", names(2), (0, 1))).leading_blocks == 2
    rig.transfers.close()


def test_blocks_may_be_overwritten_as_soon_as_a_save_returns() -> None:
    client = FakeClient()
    rig = Rig(1, client)
    want = [layer[3].clone() for layer in rig.caches.values()]
    client.gate.clear()
    rig.transfers.save(SaveOrder(names(1), (3,)))
    for layer in rig.caches.values():
        layer.zero_()
    client.gate.set()
    eventually(lambda: rig.transfers.counts.saved == 1, 30, "the save")
    (payload,) = client.held.values()
    assert payload == torch.stack(want).view(torch.uint8).numpy().tobytes()
    rig.transfers.close()


def test_saves_beyond_the_staging_memory_are_dropped_and_counted_and_memory_comes_back() -> None:
    client = FakeClient()
    probe = Rig(1, client)
    probe.transfers.close()
    rig = Rig(1, client, staging_bytes=CHUNK_BLOCKS * probe.block_bytes)
    client.gate.clear()
    rig.transfers.save(SaveOrder(names(2), (0, 1)))
    rig.transfers.save(SaveOrder(names(1), (2,)))
    assert rig.transfers.counts.dropped == 1
    client.gate.set()
    eventually(lambda: rig.transfers.counts.saved == 2, 30, "the save")
    rig.transfers.save(SaveOrder(names(1), (2,)))
    eventually(lambda: rig.transfers.counts.saved == 3, 30, "the save after it")
    rig.transfers.close()


def test_an_adapter_has_a_namespace_of_its_own() -> None:
    client = FakeClient()
    rig = Rig(1, client)
    for adapter in (None, b"a" * 32, b"b" * 32):
        rig.transfers.save(SaveOrder(names(1), (0,), adapter=adapter))
    eventually(lambda: rig.transfers.counts.saved == 3, 30, "the saves")
    assert len({name.namespace for name in client.held}) == 3
    rig.transfers.close()

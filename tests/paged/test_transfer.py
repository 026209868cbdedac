"""Blocks between pool and host: in place, staged by a thread, staged on CUDA (skipped without)."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.core.identity import KvDtype
from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.engines.transformers.tiny import tiny_llama
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry, LayerGroup
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Slice
from kvtier.paged.transfer import BlockTransfer, Landing, Saving, ThreadCarrier

SHAPE = KvGeometry(3, 2, 8, KvDtype.FLOAT32, 4, (LayerGroup((1,)), LayerGroup((0, 2), 8)))

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: transfers over the bus are not tested"
)
DEVICES = ["cpu", "staged", pytest.param("cuda", marks=[needs_cuda, pytest.mark.device])]


@pytest.fixture
def carrier() -> Iterator[ThreadCarrier]:
    made = ThreadCarrier()
    yield made
    made.close()


def opened(device: str, carrier: ThreadCarrier, slots: int = 4) -> BlockTransfer:
    pool = KvPool(SHAPE, [6, 7], "cpu" if device == "staged" else device)
    return BlockTransfer(pool, slots, carrier if device == "staged" else None)


def pattern(seed: int, count: int) -> bytes:
    drawn = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=drawn).numpy().data)


def landed(transfer: BlockTransfer, blocks: list[int], group: int = 0) -> Landing:
    landing = transfer.landing(blocks, group)
    assert landing is not None
    for at, block in enumerate(blocks):
        landing.memory(at)[:] = pattern(block, transfer.pool.geometry.block_bytes(group))
    return landing


def saved(transfer: BlockTransfer, blocks: list[int], group: int = 0) -> Saving:
    for layer in SHAPE.groups[group].layers:
        transfer.before_layer(layer)
    saving = transfer.save(blocks, group)
    assert saving is not None
    saving.join()
    return saving


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [0, 1])
def test_what_was_loaded_is_what_is_saved(device: str, group: int, carrier: ThreadCarrier) -> None:
    transfer = opened(device, carrier)
    size = SHAPE.block_bytes(group)
    landed(transfer, [5, 0], group).restore(2)
    saving = saved(transfer, [0, 5], group)
    assert saving.done
    assert bytes(saving.memory(0)) == pattern(0, size)
    assert bytes(saving.memory(1)) == pattern(5, size)
    saving.release()
    assert transfer.in_place is (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_arrived_is_restored(device: str, carrier: ThreadCarrier) -> None:
    transfer = opened(device, carrier)
    landing = landed(transfer, [1, 2, 3])
    landing.restore(2)
    saving = saved(transfer, [1, 2])
    assert bytes(saving.memory(0)) == pattern(1, SHAPE.block_bytes(0))
    assert bytes(saving.memory(1)) == pattern(2, SHAPE.block_bytes(0))


def test_in_place_nothing_is_copied() -> None:
    transfer = BlockTransfer(KvPool(SHAPE, [6, 7]), 4)
    landed(transfer, [2]).restore(1)
    assert not transfer.is_restoring
    assert bytes(transfer.pool.block_memory(2)) == pattern(2, SHAPE.block_bytes(0))


def test_slots_are_taken_and_given_back(carrier: ThreadCarrier) -> None:
    transfer = opened("staged", carrier)
    assert transfer.room() == 4
    landing = landed(transfer, [0, 1, 2])
    assert transfer.room() == 1
    assert transfer.save([3, 4]) is None
    assert transfer.landing([3, 4]) is None
    assert transfer.room(1) == 4
    landing.restore(3)
    transfer.before_layer(1)
    assert not transfer.is_restoring
    assert transfer.room() == 4
    saving = saved(transfer, [0, 1, 2, 3])
    assert transfer.room() == 0
    saving.release()
    transfer.landing([3])
    nothing = transfer.landing([1, 2])
    assert nothing is not None
    nothing.restore(0)
    assert not transfer.is_restoring
    assert transfer.room() == 3


@needs_cuda
@pytest.mark.device
def test_a_step_that_waits_for_layers_reads_what_was_loaded() -> None:
    runner = TransformersRunner(tiny_llama().to("cuda"), "m", "r", 4)
    first, second = (KvPool(runner.geometry, [8], "cuda") for _ in range(2))
    tokens = list(range(20))
    expected = runner.step(first, [Slice(tokens, 0, [[0, 1, 2, 3, 4]])])
    saving = BlockTransfer(first, 4).save([0, 1, 2, 3])
    assert saving is not None
    saving.join()
    loading = BlockTransfer(second, 4)
    landing = loading.landing([7, 5, 3, 1])
    assert landing is not None
    for at in range(4):
        landing.memory(at)[:] = saving.memory(at)
    landing.restore(4)
    part = Slice(tokens[16:], 16, [[7, 5, 3, 1, 0]])
    late = runner.step(second, [part], loading.before_layer)
    torch.testing.assert_close(late, expected, rtol=1e-3, atol=1e-3)


@needs_cuda
@pytest.mark.device
def test_a_pool_on_a_device_has_no_host_memory() -> None:
    with pytest.raises(CallerError):
        KvPool(SHAPE, [6, 7], "cuda").block_memory(0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda transfer: transfer.save([]),
        lambda transfer: transfer.save([0, 0]),
        lambda transfer: transfer.save([6]),
        lambda transfer: transfer.save([-1]),
        lambda transfer: transfer.landing([0, 1, 2, 3, 4]),
        lambda transfer: transfer.landing([0], 2),
        lambda transfer: BlockTransfer(KvPool(SHAPE, [1, 1]), 0),
    ],
)
def test_batches_that_are_none_are_refused(
    wrong: Callable[[BlockTransfer], object], carrier: ThreadCarrier
) -> None:
    with pytest.raises(CallerError):
        wrong(opened("staged", carrier))

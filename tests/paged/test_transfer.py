"""Blocks between pool and host: in place on a CPU, staged on CUDA (skipped without a device)."""

from collections.abc import Callable

import pytest
import torch

from kvtier.core.identity import KvDtype
from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.engines.transformers.tiny import tiny_llama
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry, LayerGroup
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Slice
from kvtier.paged.transfer import BlockTransfer

SHAPE = KvGeometry(3, 2, 8, KvDtype.FLOAT32, 4, (LayerGroup((1,)), LayerGroup((0, 2), 8)))

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: transfers over the bus are not tested"
)
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_cuda, pytest.mark.device])]


def pattern(seed: int, count: int) -> bytes:
    drawn = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=drawn).numpy().data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [0, 1])
def test_what_was_loaded_is_what_is_saved(device: str, group: int) -> None:
    transfer = BlockTransfer(KvPool(SHAPE, [6, 7], device), 4)
    size = SHAPE.block_bytes(group)
    for at, block in enumerate([5, 0, 3]):
        transfer.load_memory(block, at, group)[:] = pattern(block, size)
    transfer.load([5, 0, 3], group).wait()
    ticket = transfer.save([3, 5, 1], group)
    ticket.wait()
    assert ticket.done
    assert bytes(ticket.memory(0)) == pattern(3, size)
    assert bytes(ticket.memory(1)) == pattern(5, size)
    assert bytes(ticket.memory(2)) == bytes(size)


def test_on_a_cpu_nothing_is_copied() -> None:
    pool = KvPool(SHAPE, [6, 7])
    transfer = BlockTransfer(pool, 4)
    assert transfer.in_place
    transfer.load_memory(2, 0)[:] = b"\x05" * SHAPE.block_bytes(0)
    assert bytes(pool.block_memory(2)) == b"\x05" * SHAPE.block_bytes(0)


@needs_cuda
@pytest.mark.device
def test_a_step_after_the_fence_reads_what_was_loaded() -> None:
    runner = TransformersRunner(tiny_llama().to("cuda"), "m", "r", 4)
    first, second = (KvPool(runner.geometry, [8], "cuda") for _ in range(2))
    tokens = list(range(20))
    expected = runner.step(first, [Slice(tokens, 0, [[0, 1, 2, 3, 4]])])
    saving, loading = BlockTransfer(first, 4), BlockTransfer(second, 4)
    ticket = saving.save([0, 1, 2, 3])
    ticket.wait()
    for at, block in enumerate([7, 5, 3, 1]):
        loading.load_memory(block, at)[:] = ticket.memory(at)
    loading.load([7, 5, 3, 1])
    loading.fence()
    late = runner.step(second, [Slice(tokens[16:], 16, [[7, 5, 3, 1, 0]])])
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
        lambda transfer: transfer.save([0, 1, 2, 3, 4]),
        lambda transfer: transfer.load([0], 2),
        lambda transfer: BlockTransfer(KvPool(SHAPE, [1, 1]), 0),
    ],
)
def test_batches_that_are_none_are_refused(wrong: Callable[[BlockTransfer], object]) -> None:
    with pytest.raises(CallerError):
        wrong(BlockTransfer(KvPool(SHAPE, [6, 7]), 4))

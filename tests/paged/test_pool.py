"""The pool's bytes: views, zero-copy memory, copies."""

import numpy as np
import pytest
import torch

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.blocks import BlockCopy
from kvtier.paged.geometry import KvGeometry, LayerGroup, one_group
from kvtier.paged.group_blocks import BlockId
from kvtier.paged.pool import KvPool, blocks_of_budget

HYBRID = KvGeometry(3, 2, 4, KvDtype.FLOAT32, 4, (LayerGroup((1,)), LayerGroup((0, 2), 8)))


def test_a_block_is_layers_of_keys_then_values_of_tokens_of_heads() -> None:
    pool = KvPool(HYBRID, [3, 5])
    keys, values = pool.layer(2)
    keys[4, 1, 0] = torch.tensor([1.0, 2, 3, 4])
    values[4, 3, 1] = torch.tensor([5.0, 6, 7, 8])
    block = np.frombuffer(pool.block_memory(4, 1), np.float32).reshape(2, 2, 4, 2, 4)
    assert block[1, 0, 1, 0].tolist() == [1, 2, 3, 4]
    assert block[1, 1, 3, 1].tolist() == [5, 6, 7, 8]
    assert np.count_nonzero(block) == 8


def test_what_a_tier_writes_into_a_block_is_what_the_model_reads() -> None:
    pool = KvPool(HYBRID, [3, 5])
    memory = pool.block_memory(1, 0)
    assert len(memory) == HYBRID.block_bytes(0)
    memory[:] = np.arange(len(memory) // 4, dtype=np.float32).tobytes()
    keys, values = pool.layer(1)
    assert keys[1].flatten().tolist() == list(range(32))
    assert values[1].flatten().tolist() == list(range(32, 64))
    assert float(keys[0].abs().sum() + keys[2].abs().sum()) == 0


def test_a_layer_slice_is_a_contiguous_part_of_its_block() -> None:
    pool = KvPool(HYBRID, [3, 5])
    pool.layer_memory(2, 2)[:] = b"\x07" * HYBRID.slice_bytes
    block = bytes(pool.block_memory(2, 1))
    assert block == bytes(HYBRID.slice_bytes) + b"\x07" * HYBRID.slice_bytes


def test_rows_are_the_pools_memory_in_block_order() -> None:
    pool = KvPool(HYBRID, [3, 5])
    block, place, kv, token = 3, 1, 1, 2
    row = ((block * 2 + place) * 2 + kv) * 4 + token
    pool.token_rows(1)[row] = 9.0
    assert pool.layer(2).values[block, token].flatten().tolist() == [9.0] * 8
    assert float(pool.slice_rows(1)[row // 4].sum()) == 72.0


def test_copies_are_made_in_their_order() -> None:
    pool = KvPool(one_group(1, 1, 8, KvDtype.FLOAT32, 4), [4])
    pool.block_memory(0)[:] = b"\x01" * 256
    copies = [BlockCopy(0, BlockId(0), BlockId(1)), BlockCopy(0, BlockId(1), BlockId(2))]
    pool.copy_blocks(copies)
    assert bytes(pool.block_memory(2)) == b"\x01" * 256
    assert bytes(pool.block_memory(3)) == bytes(256)


def test_a_budget_is_shared_by_what_a_sequence_needs_of_each_group() -> None:
    counts = blocks_of_budget(HYBRID, 1 << 20, 64)
    assert counts[0] / counts[1] == pytest.approx(16 / 3, rel=0.02)
    used = sum(count * HYBRID.block_bytes(group) for group, count in enumerate(counts))
    assert 0.97 * (1 << 20) < used <= 1 << 20
    assert blocks_of_budget(HYBRID, 1, 64) == [1, 1]


def test_what_is_no_pool_or_no_block_is_refused() -> None:
    pool = KvPool(HYBRID, [3, 5])
    for block, group in ((3, 0), (-1, 0), (5, 1)):
        with pytest.raises(CallerError):
            pool.block_memory(block, group)
    with pytest.raises(CallerError):
        KvPool(HYBRID, [3])
    with pytest.raises(CallerError):
        KvPool(HYBRID, [3, 0])
    with pytest.raises(CallerError, match="int8"):
        KvPool(one_group(1, 1, 8, KvDtype.INT8, 4), [4])

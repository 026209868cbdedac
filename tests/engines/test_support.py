"""What the transformers engine runs, and what it refuses by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BartConfig,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from kvtier.core.identity import KvDtype
from kvtier.engines.transformers.runner import TransformersRunner, load_runner
from kvtier.engines.transformers.sources import resolve, weights_digest
from kvtier.engines.transformers.support import kv_geometry, rope_digest
from kvtier.engines.transformers.tiny import tiny_config, tiny_llama
from kvtier.errors import CallerError


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV3Config, "multi-head latent attention"),
        (MambaConfig, "state-space"),
        (Gemma2Config, "soft-capped"),
        (BartConfig, "encoder-decoder"),
        (Qwen3NextConfig, "linear_attention"),
        (Llama4TextConfig, "chunked"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    config: Callable[[], PretrainedConfig], reason: str
) -> None:
    with pytest.raises(CallerError, match=reason):
        kv_geometry(config(), KvDtype.FLOAT32, 16)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(rope_type: str) -> None:
    config = tiny_config()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(CallerError, match=rope_type):
        kv_geometry(config, KvDtype.FLOAT32, 16)


def test_sinks_are_refused_at_start() -> None:
    config = GptOssConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(CallerError, match="s_aux"):
        TransformersRunner(GptOssForCausalLM(config), "m", "r", 4)


def test_layers_are_grouped_by_how_far_they_look_back() -> None:
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, hidden_size=32)
    assert [group.window for group in kv_geometry(config, KvDtype.FLOAT32, 4).groups] == [None]
    config = MistralConfig(num_hidden_layers=2, sliding_window=7)
    (group,) = kv_geometry(config, KvDtype.FLOAT32, 4).groups
    assert (group.layers, group.window) == ((0, 1), 7)


def test_rope_is_told_apart_by_its_digest() -> None:
    near, far = tiny_config(), tiny_config(rope_theta=5e5)
    far.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert rope_digest(near) == rope_digest(tiny_config())
    assert rope_digest(near) != rope_digest(far)


def test_the_tiny_model_is_written_once_and_loads_as_it_was_made(tmp_path: Path) -> None:
    source = resolve("tiny", tmp_path)
    assert resolve("tiny", tmp_path) == source
    runner = load_runner(source.directory, source.model_id, source.revision, 16)
    written = runner.geometry
    assert TransformersRunner(tiny_llama(), "tiny", "r", 16).geometry == written
    assert runner.eos_token_ids == (256, 258)
    assert runner.vocab_size == 259
    assert weights_digest(source.directory) == source.revision


def test_another_weight_is_another_revision(tmp_path: Path) -> None:
    source = resolve("tiny", tmp_path)
    weights = source.directory / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert resolve(str(source.directory)).revision != source.revision


@pytest.mark.parametrize("name", ["", "nowhere", "./a/b", "/no/such/place"])
def test_names_that_lead_nowhere_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CallerError):
        resolve(name or str(tmp_path), tmp_path)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CallerError):
        load_runner(tmp_path, "m", "r", 16)
    with pytest.raises(CallerError):
        load_runner(tmp_path, "m", "r", 16, dtype=KvDtype.INT8)


def test_half_precision_keeps_its_kv_in_half_precision() -> None:
    runner = TransformersRunner(tiny_llama().to(torch.bfloat16), "m", "r", 16)
    assert runner.geometry.dtype is KvDtype.BFLOAT16

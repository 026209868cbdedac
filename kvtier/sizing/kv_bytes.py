"""How many bytes of KV a token of a model needs, by its kind of attention.

MHA, GQA and MQA keep a key and a value a KV head: `2 * layers * kv_heads * head_dim * element`.
MLA (DeepSeek-V2, arXiv:2405.04434) keeps one compressed vector and the rotated part of the key:
`layers * (kv_lora_rank + qk_rope_head_dim) * element`, on every rank, whatever the tensor
parallelism. A layer with a window keeps no more than the window's tokens of a sequence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier.core.checks import require_integer
from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.limits import HEAD_DIM_MAX, HEADS_COUNT_MAX, LAYERS_COUNT_MAX

CONFIG_BYTES_MAX = 1 << 20


class Attention(StrEnum):
    """What a token leaves behind in a layer."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that its KV depends on."""

    name: str
    attention: Attention
    layers: int
    kv_heads: int
    """1 for MLA: one compressed vector."""
    head_dim: int
    """Of keys and values; for MLA `kv_lora_rank + qk_rope_head_dim`."""
    parameters: float | None = None
    """How many weights it has; None where nobody said."""
    windowed_layers: int = 0
    window: int = 0
    """Tokens that the windowed layers look back."""

    def __post_init__(self) -> None:
        require_integer("layers", self.layers, 1, LAYERS_COUNT_MAX)
        require_integer("kv_heads", self.kv_heads, 1, HEADS_COUNT_MAX)
        require_integer("head_dim", self.head_dim, 1, HEAD_DIM_MAX)
        require_integer("windowed_layers", self.windowed_layers, 0, self.layers)

    def layer_bytes(self, dtype: KvDtype) -> int:
        """Bytes that one token leaves in one layer, over all ranks of a plain split."""
        vectors = 1 if self.attention is Attention.MLA else 2
        return vectors * self.kv_heads * self.head_dim * dtype.element_bytes

    def token_bytes(self, dtype: KvDtype) -> int:
        """Bytes that one more token of a long sequence needs: layers without a window."""
        return (self.layers - self.windowed_layers) * self.layer_bytes(dtype)

    def window_bytes(self, dtype: KvDtype) -> int:
        """Bytes that the layers with a window need for a sequence, at most."""
        return self.windowed_layers * self.window * self.layer_bytes(dtype)

    def copies(self, tensor_parallel: int) -> float:
        """How often a worker of so many ranks keeps the same KV: heads are not cut in parts."""
        return max(1.0, tensor_parallel / self.kv_heads)

    def formula(self, dtype: KvDtype) -> str:
        """The arithmetic of `token_bytes`, for people."""
        layers = self.layers - self.windowed_layers
        parts = [str(layers), str(self.head_dim), str(dtype.element_bytes)]
        if self.attention is not Attention.MLA:
            parts[1:1] = [str(self.kv_heads)]
            parts.insert(0, "2")
        return f"{' x '.join(parts)} = {self.token_bytes(dtype):,} B"


def _kind(heads: int, kv_heads: int) -> Attention:
    if kv_heads == heads:
        return Attention.MHA
    return Attention.MQA if kv_heads == 1 else Attention.GQA


def _dense(
    name: str, layers: int, heads: tuple[int, int], head_dim: int, parameters: float
) -> ModelShape:
    """`heads`: of queries, of keys and values."""
    return ModelShape(name, _kind(*heads), layers, heads[1], head_dim, parameters)


KNOWN = {
    shape.name: shape
    for shape in (
        _dense("smollm2-135m", 30, (9, 3), 64, 0.135e9),
        _dense("gpt2", 12, (12, 12), 64, 0.124e9),
        _dense("falcon-7b", 32, (71, 1), 64, 7.2e9),
        _dense("mistral-7b", 32, (32, 8), 128, 7.25e9),
        _dense("qwen2.5-7b", 28, (28, 4), 128, 7.6e9),
        _dense("qwen3-32b", 64, (64, 8), 128, 32.8e9),
        _dense("llama-3.1-8b", 32, (32, 8), 128, 8.0e9),
        _dense("llama-3.1-70b", 80, (64, 8), 128, 70.6e9),
        _dense("llama-3.1-405b", 126, (128, 8), 128, 405.9e9),
        ModelShape("deepseek-v3", Attention.MLA, 61, 1, 512 + 64, 671e9),
    )
}
"""Shapes that need no file, by the name that `--model` takes."""


def shape_of(model: str) -> ModelShape:
    """A known name, or a `config.json` (or its folder) as Hugging Face models have it.

    CallerError for anything else, and for a file that does not say what is needed.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise CallerError(
            f"model {model!r:.200} is neither a config.json nor one of {', '.join(KNOWN)}"
        )
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise CallerError(f"{path}: above {CONFIG_BYTES_MAX} bytes, no model's configuration")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CallerError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CallerError(f"{path}: want an object")
    text = config.get("text_config")
    return _from_config(path.parent.name or model, text if isinstance(text, dict) else config)


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    layers = _number(config, "num_hidden_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_head")
    rank = config.get("kv_lora_rank")
    if rank is not None:
        width = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        return ModelShape(name, Attention.MLA, layers, 1, width)
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _number(config, "num_key_value_heads")
    elif config.get("multi_query"):
        kv_heads = 1
    if config.get("head_dim") is not None:
        head_dim = _number(config, "head_dim")
    else:
        head_dim = _number(config, "hidden_size", "n_embd") // heads
    windowed = _windowed(config, layers)
    window = _number(config, "sliding_window") if windowed else 0
    kind = _kind(heads, kv_heads)
    return ModelShape(name, kind, layers, kv_heads, head_dim, None, windowed, window)


def _windowed(config: Mapping[str, Any], layers: int) -> int:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return layers
    return sum(kind == "sliding_attention" for kind in kinds)


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            require_integer(name, value, 1, 1 << 30)
            return int(value)
    raise CallerError(f"the model's configuration has no {' or '.join(names)}")

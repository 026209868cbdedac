"""What a model's configuration says of its KV, or why this engine does not run the model.

Refusals name what is missing, at start, before weights are read. What must not live here: weights,
steps.
"""

import hashlib
import json
from typing import Final

from transformers import PretrainedConfig

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry, LayerGroup

_FULL: Final = "full_attention"
_SLIDING: Final = "sliding_attention"

_STATE_SPACE: Final = ("mamba", "rwkv", "jamba", "bamba", "zamba", "recurrent_gemma", "falcon_h1",
                       "xlstm", "nemotron_h", "lfm2", "granitemoehybrid")  # fmt: skip

_REFUSED_FIELDS: Final = {
    "kv_lora_rank": "multi-head latent attention (MLA): one latent instead of keys and values",
    "attn_logit_softcapping": "soft-capped attention logits",
    "num_kv_shared_layers": "layers that share another layer's KV",
    "attention_chunk_size": "chunked attention",
    "alibi": "ALiBi position biases",
}
"""Fields that, where they are set to anything but none, zero or false, decide the KV otherwise."""

_REFUSED_ROPES: Final = {"dynamic", "longrope"}
"""Their angles change with a sequence's length: a block is no function of its prefix."""


def kv_geometry(config: PretrainedConfig, dtype: KvDtype, block_tokens: int) -> KvGeometry:
    """The geometry of a model's KV; pure. Raises CallerError for what this engine does not run."""
    refuse(config)
    layers_count: int = config.num_hidden_layers
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    windows = _windows(config, layers_count)
    groups = tuple(
        LayerGroup(tuple(i for i, window in enumerate(windows) if window == wanted), wanted)
        for wanted in sorted(set(windows), key=lambda window: (window is not None, window or 0))
    )
    return KvGeometry(layers_count, kv_heads, head_dim, dtype, block_tokens, groups)


def refuse(config: PretrainedConfig) -> None:
    """Raise CallerError where the model's attention is not what the paged pool keeps. Pure."""
    name: str = config.model_type
    if any(name.startswith(prefix) for prefix in _STATE_SPACE):
        raise CallerError(f"{name}: state-space layers have no KV blocks")
    if config.is_encoder_decoder:
        raise CallerError(f"{name}: an encoder-decoder has cross-attention, which is not cached")
    for field, meaning in _REFUSED_FIELDS.items():
        if getattr(config, field, None):
            raise CallerError(f"{name}: {meaning} ({field}) is not supported")
    for layer_type in sorted(set(getattr(config, "layer_types", None) or ())):
        if layer_type not in {_FULL, _SLIDING}:
            raise CallerError(f"{name}: layers of type {layer_type} are not supported")
    rope_type = _rope(config).get("rope_type")
    if rope_type in _REFUSED_ROPES:
        raise CallerError(f"{name}: {rope_type} rope depends on the length of the sequence")


def rope_digest(config: PretrainedConfig) -> bytes:
    """SHA-256 over rope and its scaling, as far as the configuration tells. Pure."""
    fields = {
        "rope": _rope(config),
        "partial": getattr(config, "partial_rotary_factor", None),
        "positions": getattr(config, "max_position_embeddings", None),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).digest()


def eos_token_ids(*configs: PretrainedConfig | None) -> tuple[int, ...]:
    """The tokens that end an answer, of the first configuration that names any."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _windows(config: PretrainedConfig, layers_count: int) -> list[int | None]:
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * layers_count
    if _SLIDING in layer_types and window is None:
        raise CallerError(f"{config.model_type}: sliding layers without a window")
    return [window if layer_type == _SLIDING else None for layer_type in layer_types]


def _rope(config: PretrainedConfig) -> dict[str, object]:
    rope = getattr(config, "rope_parameters", None)
    return dict(rope) if isinstance(rope, dict) else {}

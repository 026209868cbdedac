"""Models for vLLM servers that nobody would talk to.

What must not live here: models with a purpose.
"""

from pathlib import Path

from safetensors.torch import save_file

from kvtier.engines.transformers.tiny import tiny_llama, write_byte_tokenizer

CONTEXT_TOKENS = 2048
TOKEN_IDS = range(250)
"""That stand for something."""


def write_model_of_even_heads(directory: Path) -> None:
    """Random weights, four query heads on two of 64 dimensions: SmolLM2 has three, for no pair."""
    model = tiny_llama(hidden_size=256, intermediate_size=512, dtype="float32")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    tied = "lm_head.weight"
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != tied}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(directory, CONTEXT_TOKENS)

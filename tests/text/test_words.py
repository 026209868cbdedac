"""Text that is tokenised word by word has the tokens that the tokenizer gives it."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from kvtier.limits import WORD_CHARS_MAX, WORDS_COUNT_MAX
from kvtier.text import SpecialTokens, TextModel
from kvtier.text.words import NativeWords, words_of
from tests.support.text_models import byte_level_bpe, metaspace_bpe, word_piece, write_model

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
WITH_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUNCTUATION = r"[\p{P}\p{S}]+|\p{L}+|\p{N}|\s+"
WITH_GAPS = r"\p{L}+|\p{N}+"


def byte_level(**options: bool) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def splitting(expression: str, behavior: str = "isolated") -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), behavior)
    return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])


def cut_by(pre_tokenizer: PreTokenizer) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def with_nfc() -> Tokenizer:
    tokenizer = cut_by(splitting(QWEN_2))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_lowercase() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_a_suffix() -> Tokenizer:
    tokenizer = byte_level_bpe()
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    tokenizer.model = models.BPE(vocabulary, [], end_of_word_suffix="</w>")
    return tokenizer


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])
BY_WORDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": byte_level_bpe,
    "llama 3": lambda: cut_by(splitting(LLAMA_3)),
    "qwen 2": with_nfc,
    "upper and lower case": lambda: cut_by(splitting(WITH_CASES)),
    "single digits": lambda: cut_by(DIGITS),
    "punctuation": lambda: cut_by(splitting(PUNCTUATION)),
    "gaps between words": lambda: cut_by(splitting(WITH_GAPS)),
}
NOT_BY_WORDS: dict[str, Callable[[], Tokenizer]] = {
    "lower case": with_lowercase,
    "word pieces": lambda: word_piece(["<s>"]),
    "metaspace": lambda: metaspace_bpe("first", ["<s>"]),
    "a prefix space": lambda: cut_by(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "merged splits": lambda: cut_by(splitting(LLAMA_3, "merged_with_previous")),
    "a class that is not known": lambda: cut_by(splitting(r"\p{Han}+|\P{Han}+")),
    "white space": lambda: cut_by(pre_tokenizers.Whitespace()),
    "a suffix": with_a_suffix,
    "normalised tokens": lambda: byte_level_bpe([AddedToken("<s>", normalized=True)]),
}
TEXTS = st.one_of(
    st.text(st.characters(max_codepoint=127), max_size=60),
    st.lists(
        st.sampled_from(
            [
                *("the", " quick", "Brown", "FOX's", "I'LL", "we'Ve", "x1234567y", "a/b//c", "é"),
                *(
                    " ",
                    "  ",
                    "   ",
                    "\n",
                    "\r\n",
                    "\n\n",
                    "\t",
                    "\x0b",
                    "\x0c",
                    "\x1c",
                    "\x1f",
                    "\x7f",
                ),
                *("!", "?!", "...", "$%^", "_", "[x]", "\\n", "<|im_end|>", "<|im_start|>", "\x00"),
            ]
        ),
        max_size=30,
    ).map("".join),
)


@cache
def model_of(name: str) -> tuple[TextModel, Tokenizer]:
    tokenizer = {**BY_WORDS, **NOT_BY_WORDS}[name]()
    with TemporaryDirectory() as folder:
        return TextModel.load(write_model(Path(folder), tokenizer)), tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", BY_WORDS)
@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_words_have_the_tokens_of_the_whole_text(name: str, text: str) -> None:
    model, tokenizer = model_of(name)
    assert model.looks_up_words
    assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(tokenizer, text)


@pytest.mark.parametrize("name", NOT_BY_WORDS)
@given(text=TEXTS)
@settings(max_examples=10, deadline=None)
def test_other_tokenizers_are_left_to_themselves(name: str, text: str) -> None:
    model, _ = model_of(name)
    assert not model.looks_up_words
    # as saved and read again: what a configuration adds is part of it
    assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(reread(name), text)


@cache
def reread(name: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(model_of(name)[1].to_str())
    named = [AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<unk>")]
    tokenizer.add_special_tokens([t for t in named if t.content not in added(tokenizer)])
    return tokenizer


def added(tokenizer: Tokenizer) -> set[str]:
    return {token.content for token in tokenizer.get_added_tokens_decoder().values()}


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_smollm2_has_its_tokens_word_by_word(smollm2_directory: Path, text: str) -> None:
    model, tokenizer = smollm2_of(smollm2_directory)
    assert model.looks_up_words
    assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(tokenizer, text)


@cache
def smollm2_of(directory: Path) -> tuple[TextModel, Tokenizer]:
    return TextModel.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_more_words_than_the_table_holds_and_longer_ones_keep_their_tokens(
    tiny_directory: Path,
) -> None:
    model = TextModel.load(tiny_directory)
    tokenizer = Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    numbers = " ".join(f"{n:x}" for n in range(WORDS_COUNT_MAX, WORDS_COUNT_MAX + 40_000))
    for text in (numbers, "x" * (WORD_CHARS_MAX * 3), numbers[:1000]):
        assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(tokenizer, text)


def ignoring_merges() -> Tokenizer:
    """As Llama 3: a word that is a token is taken whole, whatever its merges would give."""
    tokenizer = cut_by(splitting(LLAMA_3))
    parts = json.loads(tokenizer.to_str())
    parts["model"]["ignore_merges"] = True
    parts["model"]["vocab"]["\u0120zyx"] = max(parts["model"]["vocab"].values()) + 1
    return Tokenizer.from_str(json.dumps(parts))


@pytest.mark.parametrize("name", ["gpt-2", "llama 3", "qwen 2", "single digits"])
def test_well_known_expressions_are_cut_natively_and_alike(name: str) -> None:
    tokenizer = BY_WORDS[name]()
    parts = json.loads(tokenizer.to_str())
    words = words_of(tokenizer, parts)
    assert isinstance(words, NativeWords)
    text = "It's 12345 of  them:\r\n\r\n\tWE'LL see... 'tis \n x_y  "
    found = words.encode(text, 0, 7)
    assert found is not None
    assert found.tolist() == [7, *whole(tokenizer, text)]
    assert words.encode("caf\u00e9") is None
    assert words.encode("x" * 1000) is None


def test_a_word_that_is_a_token_is_taken_whole_where_merges_are_ignored() -> None:
    tokenizer = ignoring_merges()
    words = words_of(tokenizer, json.loads(tokenizer.to_str()))
    assert isinstance(words, NativeWords)
    found = words.encode("a zyx b")
    assert found is not None
    assert found.tolist() == whole(tokenizer, "a zyx b")
    assert tokenizer.token_to_id("\u0120zyx") in found.tolist()

"""Cutting a text at added tokens never changes its tokens, whatever the tokenizer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from kvtier.text import ChatOptions, Ending, SpecialTokens, TextConfig, TextModel
from tests.support import text_models
from tests.support.chat_templates import SPECIAL_TOKENS

PLAIN = [AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<|a|>", "<|a|><|b|>")]
NESTED = [AddedToken(t, normalized=False) for t in ("<a", "<a>", "a>", ">", "<a><a>b", "b<")]
NORMALIZED = [AddedToken(token, normalized=True) for token in ("<S>", "</s>", "<|A|>")]
STRIPPING = [
    AddedToken("<s>", normalized=False),
    AddedToken("<l>", normalized=False, lstrip=True),
    AddedToken("<r>", normalized=False, rstrip=True),
    AddedToken("\n", normalized=False),
    AddedToken(" <sp>", normalized=False),
]
WORDS = [AddedToken("<s>", normalized=False), AddedToken("w", normalized=False, single_word=True)]


def with_dropout() -> Tokenizer:
    tokenizer = text_models.byte_level_bpe(PLAIN)
    tokenizer.model.dropout = 0.5
    return tokenizer


def with_prefix_space() -> Tokenizer:
    tokenizer = text_models.byte_level_bpe(PLAIN)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_normalised_tokens() -> Tokenizer:
    tokenizer = text_models.byte_level_bpe(NORMALIZED)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def with_strip() -> Tokenizer:
    tokenizer = text_models.word_piece([*PLAIN, *NORMALIZED])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    return tokenizer


CUTTING: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: text_models.byte_level_bpe(PLAIN),
    "byte-level with a prefix space": with_prefix_space,
    "tokens inside tokens": lambda: text_models.byte_level_bpe(NESTED),
    "tokens that strip": lambda: text_models.byte_level_bpe(STRIPPING),
    "metaspace first": lambda: text_models.metaspace_bpe("first", PLAIN),
    "metaspace always": lambda: text_models.metaspace_bpe("always", PLAIN),
    "metaspace that strips": lambda: text_models.metaspace_bpe("first", STRIPPING),
    "prepending normaliser": lambda: text_models.prepending_bpe(PLAIN),
    "word pieces": lambda: text_models.word_piece(PLAIN),
    "word pieces, some normalised": lambda: text_models.word_piece([*PLAIN, *NORMALIZED]),
    "stripping normaliser": with_strip,
    "unigram": lambda: text_models.unigram(PLAIN),
}
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "normalised tokens only": with_normalised_tokens,
    "single words": lambda: text_models.byte_level_bpe(WORDS),
    "no added tokens": lambda: text_models.byte_level_bpe([]),
}
FRAGMENTS = st.sampled_from(
    [
        *("<s>", "</s>", "<|a|>", "<|b|>", "<a", "<a>", "a>", ">", "b", "b<", "<l>", "<r>", "w"),
        *(" <sp>", "<S>", "<|A|>", "<", "|", " ", "  ", "\n", "\n\n", "\t", "\u3000", "\u200b"),
        *("the quick", " brown fox", "İ", "e\u0301", "ﬁ", "日本", "😀", "'ll", "12:30", "\x00"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=24).map("".join)


@cache
def model_of(name: str) -> tuple[TextModel, Tokenizer]:
    tokenizer = {**CUTTING, **WHOLE}[name]()
    with TemporaryDirectory() as directory:
        model = TextModel.load(text_models.write_model(Path(directory), tokenizer, None, BARE))
    return model, tokenizer


BARE = {"bos_token": None, "eos_token": None, "unk_token": None}


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", [*CUTTING, *WHOLE])
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_segments_give_the_tokens_of_the_whole_text(name: str, text: str) -> None:
    model, tokenizer = model_of(name)
    for _ in range(2):  # from the tokenizer, then from the cache
        ids = model.encode(text, SpecialTokens.OMIT)
        assert ids.dtype == np.uint32
        assert ids.tolist() == whole(tokenizer, text)


@pytest.mark.parametrize("name", [*CUTTING, *WHOLE])
@given(parts=st.lists(TEXTS, min_size=1, max_size=3), repeats=st.integers(100, 600))
@settings(max_examples=6, deadline=None)
def test_long_texts_have_the_tokens_of_the_whole_text_as_they_grow(
    name: str, parts: list[str], repeats: int
) -> None:
    model, tokenizer = model_of(name)
    text = ""
    for part in parts:
        text += (part + "<|a|>the quick<s>") * repeats
        assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(tokenizer, text)


def test_a_long_chat_that_goes_on_is_found_in_a_few_pieces(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    history = [{"role": "user", "content": f"message {index} " * 20} for index in range(200)]
    for stop in (199, 200):
        before = model.cache_stats()
        model.encode_chat(history[:stop])
    after = model.cache_stats()
    assert after.misses - before.misses <= 2
    assert after.hits - before.hits < 80  # of 400 segments


@pytest.mark.parametrize("name", CUTTING)
def test_tokenizers_that_look_for_raw_tokens_first_use_the_cache(name: str) -> None:
    model, _ = model_of(name)
    assert model.cuts_texts
    before = model.cache_stats()
    for _ in range(2):
        model.encode(f"{name}<s>one<s>two", SpecialTokens.OMIT)
    if name == "tokens inside tokens":
        return  # it has no `<s>`
    assert model.cache_stats().hits - before.hits >= 3


@pytest.mark.parametrize("name", WHOLE)
def test_tokenizers_whose_pieces_depend_on_each_other_do_not_use_the_cache(name: str) -> None:
    model, _ = model_of(name)
    assert not model.cuts_texts
    model.encode("one<s>two", SpecialTokens.OMIT)
    assert model.cache_stats().entries == 0


def test_a_tokenizer_that_drops_merges_at_random_does_not_use_the_cache(tmp_path: Path) -> None:
    model = TextModel.load(text_models.write_model(tmp_path, with_dropout(), None))
    assert not model.cuts_texts


def test_split_special_tokens_does_not_use_the_cache(tmp_path: Path) -> None:
    config = {"split_special_tokens": True}
    directory = text_models.write_model(tmp_path, text_models.byte_level_bpe(), None, config)
    model = TextModel.load(directory)
    assert not model.cuts_texts
    assert model.encode("<|im_start|>", SpecialTokens.OMIT).size > 1


@given(
    turns=st.lists(
        TEXTS | st.sampled_from(["<|im_start|>", "{{ x }}", "<|im_end|>\n"]), min_size=1, max_size=5
    )
)
@settings(max_examples=30, deadline=None)
def test_a_chat_of_smollm2_has_the_tokens_of_its_rendered_text(
    smollm2_directory: Path, turns: list[str]
) -> None:
    model = loaded(smollm2_directory)
    reference = Tokenizer.from_file(str(smollm2_directory / "tokenizer.json"))
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(turns)
    ]
    for stop in range(1, len(messages) + 1):
        chat = messages[:stop]
        rendered = model.render_chat(chat)
        assert model.encode_chat(chat).tolist() == whole(reference, rendered)


@cache
def loaded(directory: Path) -> TextModel:
    return TextModel.load(directory)


def test_a_longer_chat_tokenises_its_new_messages_only(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    history = [{"role": "user", "content": f"message {index}"} for index in range(40)]
    model.encode_chat(history)
    before = model.cache_stats()
    model.encode_chat([*history, {"role": "user", "content": "one more"}])
    after = model.cache_stats()
    assert after.misses - before.misses <= 2


def test_one_scope_finds_nothing_of_another(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    chat = [{"role": "user", "content": "a secret of ours"}]
    first = model.encode_chat(chat, scope="a")
    before = model.cache_stats()
    assert model.encode_chat(chat, scope="b").tolist() == first.tolist()
    assert model.cache_stats().hits == before.hits
    model.encode_chat(chat, scope="a")
    assert model.cache_stats().hits > before.hits


@pytest.mark.parametrize("cache_bytes", [0, 1000, 20_000])
def test_the_cache_never_holds_more_than_it_may(tiny_directory: Path, cache_bytes: int) -> None:
    model = TextModel.load(tiny_directory, TextConfig(segment_cache_bytes=cache_bytes))
    texts = [f"<|im_start|>number {index}{'x' * index}" for index in range(200)]
    expected = [model.encode(text, SpecialTokens.OMIT).tolist() for text in texts]
    assert model.cache_stats().bytes <= cache_bytes
    assert [model.encode(text, SpecialTokens.OMIT).tolist() for text in texts] == expected
    if cache_bytes == 20_000:
        assert model.cache_stats().evictions > 0


def test_one_long_segment_does_not_empty_the_cache(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory, TextConfig(segment_cache_bytes=40_000))
    model.encode("<|im_start|>kept", SpecialTokens.OMIT)
    model.encode("<|im_start|>" + "long " * 10_000, SpecialTokens.OMIT)
    before = model.cache_stats()
    model.encode("<|im_start|>kept", SpecialTokens.OMIT)
    assert model.cache_stats().hits == before.hits + 1


def test_cached_ids_cannot_be_changed_by_whoever_got_them(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    ids = model.encode("<|im_start|>shared", SpecialTokens.OMIT)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 7


def test_thousands_of_added_tokens_are_found_longest_first(tmp_path: Path) -> None:
    names = [f"<unused{index}>" for index in range(3000)] + ["\n" * n for n in range(1, 32)]
    tokens = [AddedToken(name, normalized=False) for name in (*names, *SPECIAL_TOKENS)]
    tokenizer = text_models.byte_level_bpe(tokens)
    model = TextModel.load(text_models.write_model(tmp_path, tokenizer))
    text = "".join(
        f"{'x' * (index % 3)}{name}{'y' * (index % 2)}" for index, name in enumerate(names)
    )
    assert model.encode(text, SpecialTokens.OMIT).tolist() == whole(tokenizer, text)
    assert model.cuts_texts


def test_a_closed_chat_is_a_prefix_of_the_chat_that_goes_on(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    chat = [{"role": "user", "content": "hello"}]
    closed = model.encode_chat(chat, ChatOptions(ending=Ending.CLOSED)).tolist()
    assert model.encode_chat(chat).tolist()[: len(closed)] == closed

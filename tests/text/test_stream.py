"""Incremental text equals the whole text, however it is cut, and never ends inside a character."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvtier.errors import CallerError, LimitError
from kvtier.limits import STOP_STRING_CHARS_MAX, STOP_STRINGS_COUNT_MAX
from kvtier.text import SpecialTokens, TextModel
from kvtier.text.stream import Detokenizer, StopStrings, TextStream


def byte_decode(ids: Sequence[int]) -> str:
    """Tokens are bytes; 256 and above are special and have no text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def fallback_tokenizer() -> Tokenizer:
    """A tokenizer as Llama 2 has it: words with a space mark, and bytes for everything else."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    vocab |= {"▁Hello": 256, "▁world": 257, "!": 258, "▁": 259, "<unk>": 260}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


FALLBACK = fallback_tokenizer()


def fallback_decode(ids: Sequence[int]) -> str:
    return FALLBACK.decode(list(ids))


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> TextModel:
    return TextModel.load(tiny_directory)


def pieces(decode: object, ids: Sequence[int]) -> list[str]:
    assert callable(decode)
    stream = Detokenizer(decode)
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(st.text(max_size=40))
@example("héllo wörld 👩‍👩‍👧 日本語 \ufffd end")
@example("\ufffd" * 40)
def test_valid_utf8_comes_out_as_it_is_and_in_whole_characters(text: str) -> None:
    out = pieces(byte_decode, text.encode())
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(out)


@given(st.lists(st.integers(0, 259), max_size=60))
def test_any_bytes_come_out_as_the_whole_decodes(ids: list[int]) -> None:
    assert "".join(pieces(byte_decode, ids)) == byte_decode(ids)


@given(st.text(alphabet="aé日👩 ", max_size=20))
def test_bytes_that_stand_for_rare_characters_come_out_whole(text: str) -> None:
    ids = [256, 257, *text.encode(), 257, 258]
    out = pieces(fallback_decode, ids)
    assert "".join(out) == fallback_decode(ids) == f"Hello world{text} world!"
    assert not any("\ufffd" in piece for piece in out)


def test_a_piece_is_handed_out_as_soon_as_it_is_certain() -> None:
    stream = Detokenizer(byte_decode)
    assert [stream.push(b) for b in "aé".encode()] == ["a", "", "é"]
    assert stream.push(0xC3) == ""
    assert stream.finish() == "\ufffd"


def test_a_space_before_a_word_survives_special_tokens_before_it() -> None:
    assert pieces(fallback_decode, [256, 257, 258]) == ["Hello", " world", "!", ""]


def test_endless_tokens_without_text_or_with_broken_text_keep_the_window_short() -> None:
    seen = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal seen
        seen = max(seen, len(ids))
        return byte_decode(ids)

    ids = [300] * 500 + [0xFF] * 500 + list(b"end")
    assert "".join(pieces(decode, ids)) == "\ufffd" * 500 + "end"
    assert seen < 200


# Real tokenizers


@given(data=st.data())
@settings(max_examples=60)
def test_any_tokens_of_a_real_tokenizer_come_out_as_the_whole_decodes(
    data: st.DataObject, tiny: TextModel
) -> None:
    ids = data.draw(st.lists(st.integers(0, tiny.vocabulary_size - 1), max_size=40))
    assert "".join(pieces(tiny.decode, ids)) == tiny.decode(ids)


@given(text=st.text(alphabet="a é日👩\n<s>", max_size=30))
@example(text="it's gone; 日本語のテキスト emoji 😀😀 and   spaces")
@settings(max_examples=60)
def test_encoded_text_comes_out_in_whole_characters(text: str, tiny: TextModel) -> None:
    ids = [int(i) for i in tiny.encode(text, SpecialTokens.OMIT)]
    out = pieces(tiny.decode, ids)
    assert "".join(out) == tiny.decode(ids)
    assert not any("\ufffd" in piece for piece in out)


def test_smollm2_streams_what_it_decodes(smollm2_directory: Path) -> None:
    model = TextModel.load(smollm2_directory)
    text = "Hello, wörld! 日本語 👩‍👩‍👧 def f(x):\n    return x  # done"
    ids = [int(i) for i in model.encode(text)]
    out = pieces(model.decode, ids)
    assert "".join(out) == model.decode(ids) == text
    assert not any("\ufffd" in piece for piece in out)
    assert len([piece for piece in out if piece]) > 10, "text comes while tokens come"


# Stop strings


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Look at every beginning of the text: the first that ends in a stop string ends the text."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


ALPHABET = st.text(alphabet="abc", max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)


@given(st.lists(ALPHABET, max_size=8), STOPS)
@example(["ab", "cd"], ["bc", "abcd"])
def test_the_text_before_a_stop_string_does_not_depend_on_the_pieces(
    cut: list[str], stops: list[str]
) -> None:
    matcher, out, stopped = StopStrings(stops), "", False
    for piece in cut:
        passed = matcher.push(piece)
        out += passed.text
        if passed.stopped:
            stopped = True
            break
    if not stopped:
        out += matcher.finish()
    assert (out, stopped) == naive_stop("".join(cut), stops)


@given(st.lists(ALPHABET, max_size=8), STOPS)
def test_text_is_held_back_no_longer_than_a_stop_string(cut: list[str], stops: list[str]) -> None:
    matcher, given_text, out = StopStrings(stops), "", ""
    for piece in cut:
        given_text += piece
        passed = matcher.push(piece)
        out += passed.text
        if passed.stopped:
            return
        held = given_text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_strings_that_mean_nothing_or_too_much_are_refused() -> None:
    with pytest.raises(CallerError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(LimitError):
        StopStrings(["a"] * (STOP_STRINGS_COUNT_MAX + 1))
    with pytest.raises(LimitError):
        StopStrings(["a" * (STOP_STRING_CHARS_MAX + 1)])


# Both together


@given(st.text(alphabet="aé日\n", max_size=16), st.lists(st.text("aé日\n", min_size=1, max_size=3)))
def test_a_text_stream_ends_where_the_whole_text_would(text: str, stops: list[str]) -> None:
    stops = stops[:STOP_STRINGS_COUNT_MAX]
    stream, out = TextStream(byte_decode, stops), ""
    for token in text.encode():
        out += stream.push(token)
        if stream.stopped:
            break
    out += stream.finish()
    assert (out, stream.stopped) == naive_stop(text, stops)


def test_a_stream_counts_the_characters_that_a_stop_string_holds_back() -> None:
    stream = TextStream(byte_decode, ["bcd"])
    assert [stream.push(b) for b in b"abc"] == ["a", "", ""]
    assert stream.chars_count == 3
    assert stream.finish() == "bc"


def test_a_stop_string_may_end_in_the_last_unfinished_character() -> None:
    stream = TextStream(byte_decode, ["\ufffd"])
    assert (stream.push(0x61), stream.push(0xC3)) == ("a", "")
    assert (stream.finish(), stream.stopped) == ("", True)

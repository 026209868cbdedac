"""Tokens of ASCII text word by word, for byte-level BPEs: a table instead of a tokenizer run.

Such a tokenizer (GPT-2's, Llama 3's, Qwen's) cuts text into words by a regular expression and turns
each word into tokens by itself. In ASCII its classes are plain (`\\p{L}` is A-Z and a-z), so `re`
cuts the same words, several times faster than the library's own pass over all of it, and most words
have been seen before. Whatever is not known to be the same is left to the tokenizer: other
characters, other regular expressions, and every tokenizer whose probe text comes out differently.

The three expressions that most models have are cut natively (`_native.Words`), and words that were
not seen before merged there; any other one by `re`, the twin.

The table is shared by all tenants: what it could give away is a microsecond a word, which the
library's own word cache gives away as well.
What must not live here: added tokens, which are cut off before (segments.py).
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Final, Protocol

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import Model

from kvtier import _native
from kvtier.limits import WORD_CHARS_MAX, WORDS_COUNT_MAX
from kvtier.text.segment_cache import TokenIds

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS: Final = r"\p{N}|\P{N}+"
_CUTS: Final = {
    (_GPT2,): ("gpt-2", 0),
    (_SINGLE_DIGITS, _GPT2): ("gpt-2", 1),
    (_LLAMA_3,): ("llama-3", 3),
    (_LLAMA_3.replace("{1,3}", ""),): ("llama-3", 1),
}
"""What the native side calls the expressions that it knows."""
_CLASSES: Final = {
    r"\p{L}": "A-Za-z",
    r"\p{N}": "0-9",
    r"\p{Nd}": "0-9",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
    r"\p{P}": r"!-#%-*,-/:;?@\[-\]_{}",
    r"\p{S}": r"$+<=>\^`|~",
}
"""Unicode's classes within ASCII, as they stand inside brackets."""
_CLASS: Final = re.compile(r"\\p\{\w+\}")
_BYTE_CHARS: Final = {
    code: chr(256 + code) if code < 33 else chr(code) if code < 127 else chr(289)
    for code in range(128)
}
"""The character that a byte-level vocabulary has for each ASCII byte."""
_ASCII_IDENTITIES: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normalisers that leave ASCII as it is."""


_NO_TOKEN: Final = 2**32 - 1


class WordTokens(Protocol):
    """The words of one tokenizer and their tokens. Safe to share between threads."""

    def encode(self, text: str, start: int = 0, head: int | None = None) -> TokenIds | None:
        """Return `head`, if any, and the tokens of `text` from `start` on; None where only the
        tokenizer can tell them."""
        ...


class NativeWords:
    """WordTokens in one native call."""

    def __init__(self, words: _native.Words) -> None:
        self._words = words

    def encode(self, text: str, start: int = 0, head: int | None = None) -> TokenIds | None:
        found = self._words.encode(text, start, head)
        return None if found is None else np.frombuffer(found, np.uint32)


class Words:
    """WordTokens for any known expression; the native one's twin."""

    def __init__(self, model: Model, stages: tuple[re.Pattern[str], ...]) -> None:
        """`stages` cut a text one after the other, each the pieces of the one before."""
        self._model = model
        self._stages = stages
        self._table: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, start: int = 0, head: int | None = None) -> TokenIds | None:
        tokens = self._encode(text[start:])
        if tokens is None:
            return None
        return np.array(tokens if head is None else [head, *tokens], dtype=np.uint32)

    def _encode(self, text: str) -> list[int] | None:
        if not text.isascii():
            return None
        pieces = [text]
        for stage in self._stages:
            pieces = (
                stage.findall(pieces[0])
                if len(pieces) == 1
                else [word for piece in pieces for word in stage.findall(piece)]
            )
        if sum(map(len, pieces)) != len(text):
            return None  # the expression leaves something between its words
        table = self._table
        try:
            return list(chain.from_iterable([table[word] for word in pieces]))
        except KeyError:
            return list(chain.from_iterable([self._tokens(word) for word in pieces]))

    def _tokens(self, word: str) -> tuple[int, ...]:
        known = self._table.get(word)
        if known is not None:
            return known
        found = self._model.tokenize(word.translate(_BYTE_CHARS))
        tokens = tuple(token.id for token in found)
        if len(word) <= WORD_CHARS_MAX:
            if len(self._table) >= WORDS_COUNT_MAX:
                self._table = {}
            self._table[word] = tokens
        return tokens


def words_of(tokenizer: Tokenizer, parts: Mapping[str, object]) -> WordTokens | None:
    """Return the words of `tokenizer`, which `parts` (tokenizer.json) describes.

    None where it is no byte-level BPE of a known kind, or gives a probe text other tokens.
    """
    normalizer = parts.get("normalizer")
    match normalizer:
        case None:
            pass
        case {"type": str(kind)} if kind in _ASCII_IDENTITIES:
            pass
        case _:
            return None
    match parts.get("model"):
        case {"type": "BPE", "dropout": None | 0, **rest} if not (
            rest.get("continuing_subword_prefix") or rest.get("end_of_word_suffix")
        ):
            pass
        case _:
            return None
    expressions = _expressions(parts.get("pre_tokenizer"))
    stages = None if expressions is None else _compiled(expressions)
    if expressions is None or stages is None:
        return None
    native = _native_words(tuple(expressions), parts.get("model"))
    if native is not None and _agree(native, tokenizer):
        return native
    words = Words(tokenizer.model, stages)
    return words if _agree(words, tokenizer) else None


def _native_words(expressions: tuple[str, ...], model: object) -> NativeWords | None:
    """The native words of a byte-level BPE; None for an expression that is not known there, or a
    model that cannot be read."""
    cut = _CUTS.get(expressions)
    match model:
        case {"vocab": dict(vocabulary), "merges": list(merges), **rest} if cut is not None:
            pass
        case _:
            return None
    ids = {token: number for token, number in vocabulary.items() if isinstance(token, str)}
    triples: list[int] = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2:
            return None
        triples += [ids.get(part, _NO_TOKEN) for part in (*pair, "".join(pair))]
    if _NO_TOKEN in triples:
        return None
    whole = None
    if rest.get("ignore_merges"):
        chars = {ord(char): code for code, char in _BYTE_CHARS.items()}
        words = {
            token: token.translate(chars) for token in ids if chars.keys() >= {*map(ord, token)}
        }
        whole = {word.encode(): ids[token] for token, word in words.items()}
    single = [ids.get(_BYTE_CHARS[code], _NO_TOKEN) for code in range(128)]
    columns = np.array(single, np.uint32), np.array(triples, np.uint32)
    return NativeWords(_native.Words(*cut, *columns, whole))


def _expressions(part: object) -> list[str] | None:
    """The expressions by which a pre-tokeniser cuts, one after the other; None if not known.

    Its last stage must be byte-level: that is what maps bytes to the vocabulary's characters.
    """
    match part:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            pass
        case _:
            parts = [part]
    expressions: list[str] = []
    for index, each in enumerate(parts):
        is_last = index == len(parts) - 1
        match each:
            case {"type": "ByteLevel", "add_prefix_space": False, **rest} if is_last:
                if rest.get("use_regex", True):
                    expressions.append(_GPT2)
            case {
                "type": "Split",
                "pattern": {"Regex": str(expression)},
                "behavior": "Isolated",
                "invert": False,
            } if not is_last:
                expressions.append(expression)
            case {"type": "Digits", "individual_digits": bool(single)} if not is_last:
                expressions.append(_SINGLE_DIGITS if single else r"\p{N}+|\P{N}+")
            case _:
                return None
    return expressions


def _compiled(expressions: list[str]) -> tuple[re.Pattern[str], ...] | None:
    try:
        compiled = tuple(re.compile(_in_ascii(each), re.ASCII) for each in expressions)
    except (re.error, KeyError):
        return None
    return None if any(pattern.groups for pattern in compiled) else compiled


def _in_ascii(expression: str) -> str:
    """`expression` for ASCII subjects; KeyError for a class that is not known."""
    expression = expression.replace(r"\P{N}", "[^0-9]")
    written, inside, at = [], False, 0
    while at < len(expression):
        if found := _CLASS.match(expression, at):
            members = _CLASSES[found.group()]
            written.append(members if inside else f"[{members}]")
            at = found.end()
            continue
        step = 2 if expression[at] == "\\" else 1
        char = expression[at : at + step]
        inside = char == "[" or (inside and char != "]")
        written.append(char)
        at += step
    return "".join(written)


def _agree(words: WordTokens, tokenizer: Tokenizer) -> bool:
    """Whether both give the same tokens for a text with every pair of ASCII characters in it."""
    characters = [chr(code) for code in range(128)]
    pairs = "".join(one + two for one in characters for two in characters)
    phrases = " I'LL we've DON'T x=1234567;\r\n\r\n\t if  (a):\n    b  \n" * 2
    for probe in (phrases, pairs, pairs[::-1], phrases[::-1]):
        found = words.encode(probe)
        known = tokenizer.encode(probe, add_special_tokens=False).ids
        if found is not None and found.tolist() != known:
            return False
    return True

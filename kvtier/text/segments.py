"""Where a text may be cut so that the tokens of the pieces are the tokens of the whole.

A tokenizer of the `tokenizers` library first looks for its added tokens in the raw text, leftmost
and longest first; what stands between two of them is normalised, split and tokenised by itself. So
a cut right before such a token is exact, if the token is taken as it stands: not after
normalisation (`normalized`), not with the white space around it (`lstrip`, `rstrip`), not depending
on its neighbours (`single_word`). A segment begins with its token, so that rules about the start of
the text (Metaspace's `first`) apply to the first segment only, as in the whole. Where any of this
is in doubt there are no boundaries, and every text is one segment.

What must not live here: the cache of segments (segment_cache.py), tokenizers themselves (model.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvtier.errors import CallerError
from kvtier.limits import ADDED_TOKENS_COUNT_MAX

_NORMALIZERS: Final = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    }
)
_PRE_TOKENIZERS: Final = frozenset(
    {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Delimiter", "Digits"),
        *("FixedLength", "Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts"),
        *("Whitespace", "WhitespaceSplit"),
    }
)
STRIDE_CHARS: Final = 8192
_MODELS: Final = frozenset({"BPE", "WordPiece", "WordLevel", "Unigram"})


@dataclass(frozen=True, slots=True)
class AddedTokenRule:
    """An added token as far as the search for it goes."""

    content: str
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool

    @property
    def cuts(self) -> bool:
        """Whether a text may be cut before it: found in the raw text, taken as it stands."""
        plain = not (self.normalized or self.lstrip or self.rstrip or self.single_word)
        return plain and not self.content[0].isspace()


class Boundaries:
    """The places where texts of one tokenizer may be cut. Immutable."""

    def __init__(self, tokens: Iterable[AddedTokenRule]) -> None:
        """Of a tokenizer whose other parts all work on one piece at a time."""
        known = [token for token in tokens if token.content]
        raw = [token for token in known if not token.normalized]
        self._any_normalized = len(raw) < len(known)
        sound = len(raw) <= ADDED_TOKENS_COUNT_MAX and not any(token.single_word for token in raw)
        self._cutting = frozenset(token.content for token in raw if token.cuts) if sound else None
        self._every_match_cuts = sound and all(token.cuts for token in raw)
        contents = [token.content for token in raw] if self._cutting else []
        self._pattern = re.compile(longest_first(contents)) if contents else None
        firsts = {content[0] for content in contents}
        apart = firsts.isdisjoint(char for content in contents for char in content[1:])
        self._can_start_anywhere = apart and self._every_match_cuts

    @property
    def any(self) -> bool:
        """Whether texts can be cut at all."""
        return self._pattern is not None

    @property
    def are_all_tokens(self) -> bool:
        """Whether a segment can hold no added token but the one that it begins with."""
        return self._every_match_cuts and not self._any_normalized

    def head(self, segment: str) -> str:
        """The added token that `segment` begins with, empty where it is the start of a text."""
        match = self._pattern.match(segment) if self._pattern is not None else None
        return match.group() if match is not None else ""

    def strides(self, text: str) -> list[str]:
        """Cut a long `text` at the first boundary after every STRIDE_CHARS; all but the last piece.

        The pieces of a text are those of every longer text that begins with it, so that a chat that
        goes on is found again in a few large pieces. Empty for short texts, and where a search that
        starts in the middle could meet the inside of a token.
        """
        if self._pattern is None or not self._can_start_anywhere:
            return []
        pieces, start = [], 0
        while len(text) - start > STRIDE_CHARS:
            match = self._pattern.search(text, start + STRIDE_CHARS)
            if match is None:
                break
            pieces.append(text[start : match.start()])
            start = match.start()
        return pieces

    def split(self, text: str) -> list[str]:
        """Cut `text` into segments that give it back when joined. O(characters)."""
        if self._pattern is None:
            return [text] if text else []
        cuts = [0]
        if self._every_match_cuts:
            cuts += [match.start() for match in self._pattern.finditer(text)]
        else:
            cutting = self._cutting or frozenset()
            matches = self._pattern.finditer(text)
            cuts += [match.start() for match in matches if match.group() in cutting]
        cuts.append(len(text))
        return [text[start:stop] for start, stop in pairwise(cuts) if stop > start]


NO_BOUNDARIES: Final = Boundaries(())


def boundaries_of(
    tokenizer: Mapping[str, object], tokens: Sequence[AddedTokenRule], splits_special_tokens: bool
) -> Boundaries:
    """Return the boundaries of the tokenizer that `tokenizer` (tokenizer.json) describes.

    None where it has a part that is not known to work on one piece at a time, or a random one.
    """
    known = (
        _types(tokenizer.get("normalizer"), "normalizers") <= _NORMALIZERS
        and _types(tokenizer.get("pre_tokenizer"), "pretokenizers") <= _PRE_TOKENIZERS
        and _model_is_known(tokenizer.get("model"))
    )
    if not known or splits_special_tokens:
        return NO_BOUNDARIES
    return Boundaries(tokens)


def _types(part: object, nested: str) -> set[str]:
    """The types in a component of tokenizer.json and in the components inside it."""
    if part is None:
        return set()
    if not isinstance(part, dict):
        return {"?"}
    found = {str(part.get("type"))}
    inner = part.get(nested, ())
    for each in inner if isinstance(inner, list) else ():
        found |= _types(each, nested)
    return found


def _model_is_known(model: object) -> bool:
    if not isinstance(model, dict):
        return False
    return model.get("type", "BPE") in _MODELS and not model.get("dropout")


def longest_first(words: Iterable[str]) -> str:
    """A pattern that matches, at any place, the longest of `words` that stands there.

    Words are woven into a tree by their common beginnings, so that thousands of them cost a few
    comparisons a place instead of one each.
    """
    tree: _Tree = _Tree()
    for word in words:
        if not word:
            raise CallerError("an added token is empty")
        tree.insert(word)
    return tree.pattern()


class _Tree:
    """Words by their first characters."""

    __slots__ = ("_children", "_ends")

    def __init__(self) -> None:
        self._children: dict[str, _Tree] = {}
        self._ends = False

    def insert(self, word: str) -> None:
        node = self
        for char in word:
            node = node._children.setdefault(char, _Tree())
        node._ends = True

    def pattern(self) -> str:
        """What matches the longest rest of a word below this node."""
        node, prefix = self, ""
        while len(node._children) == 1 and not node._ends:
            (char, node), *_ = node._children.items()
            prefix += re.escape(char)
        if not node._children:
            return prefix
        branches = "|".join(
            re.escape(char) + child.pattern() for char, child in sorted(node._children.items())
        )
        return f"{prefix}(?:{branches}){'?' if node._ends else ''}"

"""Text that grows token by token: incremental detokenisation and stop strings.

Neither looks at the whole text again: both keep a short window, so that a stream of n tokens costs
O(n). What must not live here: tokenizers, templates, asyncio, HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import STOP_STRING_CHARS_MAX, STOP_STRINGS_COUNT_MAX

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text. Bytes that are not (yet) UTF-8 become U+FFFD, special tokens nothing."""

REPLACEMENT: Final = "\ufffd"
_HELD_CHARS_MAX: Final = 16
"""An unfinished character is at most three bytes, each perhaps a U+FFFD of its own, and a decoder
that falls back to bytes spoils the few bytes before as well."""
_WINDOW_TOKENS_MAX: Final = 64


class Detokenizer:
    """Turns a growing sequence of tokens into text pieces that never end inside a character.

    A decoder may look back (a space depends on the token before), so each piece is the difference
    of two decodings that begin at the same earlier token (the scheme of Hugging Face TGI).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._settled = 0
        """Tokens of the window whose text was handed out before."""
        self._base_chars = 0
        """Length of the text of the settled tokens."""
        self._sent_chars = 0
        """Characters handed out beyond that."""

    def push(self, token_id: int) -> str:
        """Add a token; return the new text, empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        unfinished = len(text) - len(whole)
        if unfinished > _HELD_CHARS_MAX:
            whole = text[:-_HELD_CHARS_MAX]
        piece = self._take(whole)
        if not unfinished and len(text) > self._base_chars:
            self._settle()
        elif len(self._window) - self._settled > _WINDOW_TOKENS_MAX:
            piece += self._overflow(text)
        return piece

    def finish(self) -> str:
        """Return the text that is still held back: a character that nothing will complete now."""
        return self._take(self._decode(self._window)) if self._window else ""

    def _take(self, text: str) -> str:
        piece = text[self._base_chars + self._sent_chars :]
        self._sent_chars += len(piece)
        return piece

    def _settle(self) -> None:
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._base_chars = len(self._decode(self._window))
        self._sent_chars = 0

    def _overflow(self, text: str) -> str:
        """Bound the window when tokens add no text, or no valid text, for very long."""
        if len(text) <= self._base_chars:
            del self._window[self._settled :]
            return ""
        piece = self._take(text)
        self._settle()
        return piece


@dataclass(frozen=True, slots=True)
class Passed:
    """Text that may go out, and whether a stop string ended it."""

    text: str
    stopped: bool


class StopStrings:
    """Finds the stop string that is complete first, across pieces, and holds back its beginnings.

    Of several that end with the same character the longest counts. What is handed out depends on
    the text alone, not on how it was cut into pieces. Raises CallerError for an empty string and
    LimitError beyond the ceilings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > STOP_STRINGS_COUNT_MAX:
            raise LimitError(f"{len(stops)} stop strings, at most {STOP_STRINGS_COUNT_MAX}")
        for stop in stops:
            if not stop:
                raise CallerError("a stop string is empty")
            if len(stop) > STOP_STRING_CHARS_MAX:
                raise LimitError(f"a stop string is longer than {STOP_STRING_CHARS_MAX} characters")
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Passed:
        """Add text; return what is certain to stand before any stop string."""
        if not self._stops:
            return Passed(text, stopped=False)
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            return Passed(text[: min(found)[1]], stopped=True)
        hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return Passed(text[: len(text) - hold], stopped=False)

    def finish(self) -> str:
        """Return the text held back: the beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """Both together: tokens in, text out until a stop string is complete.

    `chars_count` counts the decoded characters, those that are held back by a stop string included:
    where the text of the next token begins.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self.stopped = False
        self.chars_count = 0

    def push(self, token_id: int) -> str:
        """Add a token; return text that may go out. Once `stopped`, nothing more is wanted."""
        return self._pass(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """The sequence ended: return what was held back. May still find a stop string."""
        if self.stopped:
            return ""
        text = self._pass(self._detokenizer.finish())
        return text if self.stopped else text + self._stops.finish()

    def _pass(self, piece: str) -> str:
        self.chars_count += len(piece)
        passed = self._stops.push(piece)
        self.stopped = self.stopped or passed.stopped
        return passed.text

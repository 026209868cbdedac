"""What the endpoint needs of a model's text; `kvtier.text.TextModel` has it.

What must not live here: a tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvtier.text import ChatOptions, SpecialTokens, TokenIds


class Texts(Protocol):
    """A model's tokenizer and chat template. Called from several threads at once."""

    def encode(
        self, text: str, special_tokens: SpecialTokens = SpecialTokens.ADD, scope: str = ""
    ) -> TokenIds:
        """Return the token ids of a prompt; CallerError where there are none for it."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: ChatOptions,
        scope: str = "",
    ) -> TokenIds:
        """Return the token ids of a rendered chat; CallerError where the template refuses it."""
        ...

    def decode(self, ids: Sequence[int], special_tokens: SpecialTokens = SpecialTokens.OMIT) -> str:
        """Return the text of `ids`, U+FFFD for bytes that are no character."""
        ...

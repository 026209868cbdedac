"""Pseudo-tokens for models whose tokenizer nobody knows: what routing needs is sameness.

The pseudo-token i of a text is its UTF-8 bytes 4i to 4i+3 read as a little-endian u32; up to three
bytes at the end are left out. So equal texts have equal pseudo-tokens, a prefix of a text gives a
prefix of its pseudo-tokens, different windows never collide, and their number is near that of real
tokens (about four bytes each in English). They say nothing of the engine's blocks: a router may use
them for affinity, never for a match with what an engine published.

What must not live here: real tokenizers (model.py).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from kvtier.errors import CallerError, LimitError
from kvtier.limits import RENDERED_CHARS_MAX
from kvtier.text.messages import require_plain
from kvtier.text.segment_cache import TokenIds

WINDOW_BYTES: Final = 4
HASHED_TEXT_DIGEST: Final = hashlib.sha256(b"kvtier.hashed-text.v1").digest()
"""Stands for a tokenizer digest where pseudo-tokens stand for tokens."""


def pseudo_tokens(text: str) -> TokenIds:
    """Return the pseudo-tokens of `text`; CallerError for lone surrogates. O(bytes)."""
    if len(text) > RENDERED_CHARS_MAX:
        raise LimitError(f"text of {len(text)} chars exceeds {RENDERED_CHARS_MAX}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise CallerError("text holds a lone surrogate") from None
    return np.frombuffer(encoded, dtype="<u4", count=len(encoded) // WINDOW_BYTES)


def chat_pseudo_tokens(
    messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None
) -> TokenIds:
    """Return the pseudo-tokens of tools and messages, one after the other in JSON.

    A history that is continued keeps its pseudo-tokens, but for the last window. LimitError where
    they are nested too deep or too long.
    """
    require_plain("messages", messages)
    require_plain("tools", tools)
    lines = [json.dumps(item, ensure_ascii=False) for item in (*(tools or ()), *messages)]
    return pseudo_tokens("\n".join(lines))

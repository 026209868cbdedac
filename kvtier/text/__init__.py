"""Text of a model without the model: chat templates, tokenizers, and a cache of segments.

`TextModel.load(directory)` renders and encodes; `pseudo_tokens` stands in where no tokenizer is
known. Imports neither torch nor transformers. What must not live here: HTTP and requests
(kvtier.openai).
"""

from kvtier.text.hashed import HASHED_TEXT_DIGEST, chat_pseudo_tokens, pseudo_tokens
from kvtier.text.model import (
    ChatOptions,
    SpecialTokens,
    TextConfig,
    TextDigests,
    TextModel,
    ToolsWhenNone,
)
from kvtier.text.segment_cache import CacheStats, TokenIds
from kvtier.text.template import Ending

__all__ = [
    "HASHED_TEXT_DIGEST",
    "CacheStats",
    "ChatOptions",
    "Ending",
    "SpecialTokens",
    "TextConfig",
    "TextDigests",
    "TextModel",
    "TokenIds",
    "ToolsWhenNone",
    "chat_pseudo_tokens",
    "pseudo_tokens",
]

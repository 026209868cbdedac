"""What a model makes of text: chat template and tokenizer of one model directory, with a cache.

Imports neither torch nor transformers: a router starts in well under a second.
What must not live here: HTTP, requests (kvtier.openai), block hashes (kvtier.core.keys).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

from kvtier.errors import CallerError, ConfigError, LimitError
from kvtier.limits import RENDERED_CHARS_MAX, SEGMENT_CACHE_BYTES_MAX
from kvtier.text.clock import LocalTime, local_time
from kvtier.text.files import AddedTokenSpec, ModelFiles, read_model_files
from kvtier.text.messages import chat_messages, require_plain
from kvtier.text.segment_cache import CacheStats, SegmentCache, TokenIds
from kvtier.text.segments import AddedTokenRule, boundaries_of
from kvtier.text.template import ChatTemplate, ContentFormat, Ending, TemplateInput
from kvtier.text.words import words_of

_NO_ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType({})


class SpecialTokens(Enum):
    """Whether tokens that the tokenizer puts around a text (`<s>` and the like) are wanted."""

    ADD = "add"
    """For a prompt that is plain text."""
    OMIT = "omit"
    """For a rendered chat, which has them in its text."""


class ToolsWhenNone(Enum):
    """Whether tools are shown to a model whose request says `tool_choice: "none"`."""

    RENDER = "render"
    """As vLLM does unless told otherwise."""
    LEAVE_OUT = "leave_out"
    """As SGLang does."""


@dataclass(frozen=True, slots=True)
class TextConfig:
    """How texts of a model are handled."""

    segment_cache_bytes: int = 64 << 20
    """Tokens of text segments seen before that are kept."""
    tools_when_none: ToolsWhenNone = ToolsWhenNone.RENDER
    now: LocalTime = local_time
    """What a template's `strftime_now` prints."""

    def __post_init__(self) -> None:
        if not 0 <= self.segment_cache_bytes <= SEGMENT_CACHE_BYTES_MAX:
            raise ConfigError(
                f"segment_cache_bytes is {self.segment_cache_bytes}, "
                f"not 0 to {SEGMENT_CACHE_BYTES_MAX}"
            )


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat request says beyond its messages and matters for its prompt."""

    tools: list[object] | None = None
    tool_choice: object = None
    """As in the request; only "none" matters to a prompt."""
    documents: list[object] | None = None
    template_arguments: Mapping[str, object] = field(default_factory=lambda: _NO_ARGUMENTS)
    """`chat_template_kwargs` of the request."""
    ending: Ending = Ending.GENERATION_PROMPT


@dataclass(frozen=True, slots=True)
class TextDigests:
    """What a model card says of text (`kvtier.core.model_card.ModelCard`)."""

    tokenizer: bytes
    chat_template: bytes | None


class TextModel:
    """Chat template and tokenizer of one model. Safe to share between threads."""

    def __init__(self, files: ModelFiles, config: TextConfig = TextConfig()) -> None:
        """Of files already read; ConfigError where they are no tokenizer or template."""
        self._tokenizer = _tokenizer(files)
        self._variables = dict(files.special_tokens)
        self._tools_when_none = config.tools_when_none
        self._templates = {
            name: ChatTemplate(source, config.now) for name, source in files.templates.items()
        }
        rules = _rules(self._tokenizer)
        self._boundaries = boundaries_of(files.tokenizer, rules, files.splits_special_tokens)
        by_words = self._boundaries.are_all_tokens
        self._words = words_of(self._tokenizer, files.tokenizer) if by_words else None
        self._heads: dict[str, int | None] = {}
        self._cache = SegmentCache(config.segment_cache_bytes)
        self._affixes = _affixes(files.tokenizer)
        self.digests = TextDigests(files.tokenizer_digest(), files.template_digest())
        self.vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = files.eos_token_ids or self._ids_of(files.special_tokens, "eos_token")
        """Where generation ends; empty where the model's files do not say."""

    @staticmethod
    def load(directory: Path, config: TextConfig = TextConfig()) -> "TextModel":
        """Read a model directory. Blocks for as long as the tokenizer takes to build (0.3 s)."""
        return TextModel(read_model_files(directory), config)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def cuts_texts(self) -> bool:
        """Whether segments are tokenised apart and remembered; else every text is done anew."""
        return self._boundaries.any

    @property
    def looks_up_words(self) -> bool:
        """Whether ASCII text is tokenised word by word from a table."""
        return self._words is not None

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions = ChatOptions()
    ) -> str:
        """Return the prompt text of OpenAI `messages` by the model's own template.

        Messages are values as `json.loads` gives them, and stay as they are. What they hold is
        text to the template, never a template; text that spells a special token becomes that token,
        as in every engine. CallerError where there is no template or it refuses them.
        """
        tools = options.tools
        if options.tool_choice == "none" and self._tools_when_none is ToolsWhenNone.LEAVE_OUT:
            tools = None
        require_plain("tools", tools)
        require_plain("documents", options.documents)
        template = self._template_for(tools)
        arguments = dict(options.template_arguments)
        require_plain("chat_template_kwargs", arguments)
        return template.render(
            TemplateInput(
                messages=chat_messages(messages, template.content_format),
                tools=tools,
                documents=options.documents,
                variables=self._variables | arguments,
                ending=options.ending,
            )
        )

    def encode(
        self, text: str, special_tokens: SpecialTokens = SpecialTokens.ADD, scope: str = ""
    ) -> TokenIds:
        """Return the token ids of `text`, equal to those of the tokenizer run over all of it.

        Segments that `scope` (of a tenant) has sent before come from the cache. CallerError for
        lone surrogates, LimitError beyond RENDERED_CHARS_MAX.
        """
        if len(text) > RENDERED_CHARS_MAX:
            raise LimitError(f"text of {len(text)} chars exceeds {RENDERED_CHARS_MAX}")
        if special_tokens is SpecialTokens.OMIT:
            return self._plain(text, scope)
        if self._affixes is None:
            return self._run(text, SpecialTokens.ADD)
        prefix, suffix = self._affixes
        ids = self._plain(text, scope)
        return np.concatenate((prefix, ids, suffix)) if prefix.size or suffix.size else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        options: ChatOptions = ChatOptions(),
        scope: str = "",
    ) -> TokenIds:
        """Return the token ids of `render_chat(messages, options)`."""
        return self.encode(self.render_chat(messages, options), SpecialTokens.OMIT, scope)

    def decode(self, ids: Sequence[int], special_tokens: SpecialTokens = SpecialTokens.OMIT) -> str:
        """Return the text of `ids`; special tokens appear in it only with `ADD`.

        CallerError for an id that is no u32; ids that the tokenizer does not know have no text.
        """
        try:
            return self._tokenizer.decode(
                list(ids), skip_special_tokens=special_tokens is SpecialTokens.OMIT
            )
        except (OverflowError, TypeError) as error:
            raise CallerError("token ids hold what is no u32") from error

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its own text, None where there is none."""
        return self._tokenizer.token_to_id(token)

    def cache_stats(self) -> CacheStats:
        """Return what the segment cache holds and did."""
        return self._cache.stats()

    def _template_for(self, tools: list[object] | None) -> ChatTemplate:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if "default" not in self._templates:
            raise CallerError("the model has no chat template")
        return self._templates["default"]

    def content_format(self, tools: list[object] | None = None) -> ContentFormat:
        """How the template that `tools` select reads content in parts."""
        return self._template_for(tools).content_format

    def _plain(self, text: str, scope: str) -> TokenIds:
        if not self._boundaries.any:
            return self._run(text, SpecialTokens.OMIT)
        strides = self._boundaries.strides(text)
        pieces = [self._stride(stride, scope) for stride in strides]
        pieces += self._segments(text[sum(map(len, strides)) :] if strides else text, scope)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint32)

    def _stride(self, text: str, scope: str) -> TokenIds:
        """Many segments that were met together before."""
        [ids] = self._cache.get(scope, [text])
        if ids is None:
            ids = np.concatenate(self._segments(text, scope))
            self._cache.put(scope, text, ids)
        return ids

    def _segments(self, text: str, scope: str) -> list[TokenIds]:
        segments = self._boundaries.split(text)
        return [
            self._new_segment(segment, scope) if ids is None else ids
            for segment, ids in zip(segments, self._cache.get(scope, segments), strict=True)
        ]

    def _new_segment(self, segment: str, scope: str) -> TokenIds:
        ids = self._tokens_of(segment)
        self._cache.put(scope, segment, ids)
        return ids

    def _tokens_of(self, segment: str) -> TokenIds:
        if self._words is not None:
            head = self._boundaries.head(segment)
            tokens = self._words.encode(segment, len(head), self._head_id(head))
            if tokens is not None:
                return tokens
        return self._run(segment, SpecialTokens.OMIT)

    def _head_id(self, head: str) -> int | None:
        """The id of an added token that segments begin with; remembered, as there are few."""
        if head not in self._heads:
            self._heads[head] = self.token_id(head) if head else None
        return self._heads[head]

    def _run(self, text: str, special_tokens: SpecialTokens) -> TokenIds:
        # A batch of one, without offsets: twice as fast as `encode`, and it works without the
        # interpreter's lock, so that a router's streams go on.
        try:
            [encoding] = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=special_tokens is SpecialTokens.ADD
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise CallerError("text holds a lone surrogate") from error
        return np.array(encoding.ids, dtype=np.uint32)

    def _ids_of(self, special_tokens: Mapping[str, str], name: str) -> tuple[int, ...]:
        token_id = self.token_id(special_tokens[name]) if name in special_tokens else None
        return () if token_id is None else (token_id,)


def _tokenizer(files: ModelFiles) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(f"tokenizer.json is no tokenizer: {str(error)[:200]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for spec in files.added_tokens:
        token = _added_token(spec)
        if spec.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if spec.id is not None and tokenizer.token_to_id(spec.content) != spec.id:
            raise ConfigError(f"added token {spec.id} of tokenizer_config.json gets another id")
    tokenizer.encode_special_tokens = files.splits_special_tokens
    return tokenizer


def _added_token(spec: AddedTokenSpec) -> AddedToken:
    return AddedToken(
        spec.content,
        special=spec.special,
        normalized=spec.normalized,
        lstrip=spec.lstrip,
        rstrip=spec.rstrip,
        single_word=spec.single_word,
    )


def _rules(tokenizer: Tokenizer) -> list[AddedTokenRule]:
    tokens = tokenizer.get_added_tokens_decoder().values()
    return [
        AddedTokenRule(
            token.content, token.normalized, token.lstrip, token.rstrip, token.single_word
        )
        for token in tokens
    ]


def _affixes(tokenizer: Mapping[str, object]) -> tuple[TokenIds, TokenIds] | None:
    """Ids that the post-processor puts before and after one text; None where that is not plain."""
    before: list[int] = []
    after: list[int] = []
    for part in _post_processors(tokenizer.get("post_processor")):
        match part:
            case {"type": "ByteLevel"}:  # moves offsets only
                continue
            case {
                "type": "TemplateProcessing",
                "single": list(pieces),
                "special_tokens": dict(table),
            }:
                if before or after or not _collect(pieces, table, before, after):
                    return None
            case _:
                return None
    return np.array(before, dtype=np.uint32), np.array(after, dtype=np.uint32)


def _post_processors(part: object) -> list[object]:
    match part:
        case None:
            return []
        case {"type": "Sequence", "processors": list(parts)}:
            return parts
    return [part]


def _collect(
    pieces: list[object], table: Mapping[str, object], before: list[int], after: list[int]
) -> bool:
    """Put the ids of a template's special tokens into the list of their side of the text."""
    side = before
    for piece in pieces:
        match piece:
            case {"Sequence": {"id": "A"}} if side is before:
                side = after
            case {"SpecialToken": {"id": str(name)}}:
                match table.get(name):
                    case {"ids": list(ids)}:
                        side += ids
                    case _:
                        return False
            case _:
                return False
    return side is after

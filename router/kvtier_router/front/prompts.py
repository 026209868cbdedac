"""The tokens of a request's prompt, as its model will see them, or text units where no tokenizer is
known.

Long texts are tokenised in a thread, two at a time, so that they hold up nobody. What must not live
here: the tokenizers themselves (kvtier.text), block hashes.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.openai.requests import ChatRequest, CompletionRequest, Prompt
from kvtier.text.hashed import chat_pseudo_tokens, pseudo_tokens
from kvtier.text.model import ChatOptions, SpecialTokens, TextModel
from kvtier.text.template import Ending
from kvtier_router.front.calls import Call
from kvtier_router.routing.values import PromptKind

TokenIds = npt.NDArray[np.uint32]

_EMPTY: Final[TokenIds] = np.empty(0, np.uint32)
_EMPTY.setflags(write=False)
_INLINE_BYTES_MAX: Final = 48 << 10
_THREADS: Final = 2


class Texts(Protocol):
    """Finds the text model of a served name."""

    def find(self, served_name: str) -> TextModel | None: ...


class NamedTexts:
    """Text models by served name; `*` is for every name without one of its own."""

    def __init__(self, models: Mapping[str, TextModel]) -> None:
        self._models = dict(models)

    def find(self, served_name: str) -> TextModel | None:
        return self._models.get(served_name) or self._models.get("*")


@dataclass(frozen=True, slots=True, eq=False)
class PromptTokens:
    """A prompt in tokens. `model` is there where they are the model's own."""

    tokens: TokenIds
    kind: PromptKind
    model: TextModel | None = None
    others: tuple[int, ...] = ()
    """Token counts of the prompts after the first, where a request has several."""

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens of the request: not the first prompt of several."""
        return not self.others

    @property
    def prompts_count(self) -> int:
        return 1 + len(self.others)

    @property
    def total_count(self) -> int:
        """Tokens of all prompts."""
        return len(self.tokens) + sum(self.others)

    @property
    def longest_count(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(self.tokens), *self.others) if self.others else len(self.tokens)


NO_PROMPT: Final = PromptTokens(_EMPTY, PromptKind.TEXT)


class PromptReader:
    """Tokenises requests."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._gate = asyncio.Semaphore(_THREADS)

    async def read(self, call: Call, scope: str) -> PromptTokens:
        """The prompt of a call, empty where its API has none. CallerError for a bad one.

        Segments seen before are remembered by `scope`: no tenant can time another's.
        """
        match call.view:
            case ChatRequest() as chat:
                model = self._texts.find(call.model)
                return await self._in_time(call, lambda: _chat(chat, model, scope))
            case CompletionRequest() as completion:
                model = self._texts.find(call.model)
                return await self._in_time(call, lambda: _completion(completion, model, scope))
        return NO_PROMPT

    async def _in_time(self, call: Call, work: Callable[[], PromptTokens]) -> PromptTokens:
        if len(call.raw) <= _INLINE_BYTES_MAX:
            return work()
        async with self._gate:
            return await asyncio.to_thread(work)


def _chat(chat: ChatRequest, model: TextModel | None, scope: str) -> PromptTokens:
    if model is None or not model.has_chat_template:
        return PromptTokens(chat_pseudo_tokens(chat.messages, chat.tools), PromptKind.TEXT)
    options = ChatOptions(
        tools=list[object](chat.tools) if chat.tools is not None else None,
        tool_choice=chat.given("tool_choice"),
        documents=list[object](chat.documents) if chat.documents is not None else None,
        template_arguments=chat.template_arguments,
        ending=_ending(chat),
    )
    return PromptTokens(model.encode_chat(chat.messages, options, scope), PromptKind.TOKENS, model)


def _ending(chat: ChatRequest) -> Ending:
    if chat.continue_final_message:
        return Ending.CONTINUED
    return Ending.GENERATION_PROMPT if chat.add_generation_prompt else Ending.CLOSED


def _completion(completion: CompletionRequest, model: TextModel | None, scope: str) -> PromptTokens:
    """The first prompt, and how long the others of a list are: those share their beginning with it
    or nothing, so they are not routed by."""
    first, *others = completion.prompts
    is_text = model is None and not isinstance(first, list)
    return PromptTokens(
        _tokens(first, model, scope),
        PromptKind.TEXT if is_text else PromptKind.TOKENS,
        model,
        tuple(
            [
                len(other) if isinstance(other, list) else len(_tokens(other, model, scope))
                for other in others
            ]
        ),
    )


def _tokens(prompt: Prompt, model: TextModel | None, scope: str) -> TokenIds:
    if isinstance(prompt, list):
        return np.array(prompt, dtype=np.uint32)
    if model is None:
        return pseudo_tokens(prompt)
    return model.encode(prompt, SpecialTokens.ADD, scope)

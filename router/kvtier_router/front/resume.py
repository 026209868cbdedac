"""Going on with a stream whose worker died: from the prompt and what the client already has.

Sans-I/O. The next worker gets prompt and text so far as token ids, on `/v1/completions`; its events
are put into the shape, id and role of the stream that the client is reading. What must not live
here: retries and budgets (relay.py), sockets.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.errors import CallerError
from kvtier.openai.requests import CompletionRequest
from kvtier.openai.sse import DONE, SseEvent, SseParser, event
from kvtier.openai.usage import Usage, usage_of
from kvtier.text.model import SpecialTokens, TextModel
from kvtier_router.front.calls import Api, Call
from kvtier_router.front.prompts import PromptTokens
from kvtier_router.front.streams import events_of
from kvtier_router.routing.values import PromptKind

_NOT_CONTINUED: Final = (
    "tools",
    "functions",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "logprobs",
    "top_logprobs",
    "echo",
    "suffix",
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "modalities",
    "audio",
)
"""With one of these the rest of an answer is more than the continuation of its text."""
_CHAT_ONLY: Final = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "max_completion_tokens",
        "stream_options",
        "reasoning_effort",
        "store",
        "metadata",
        "service_tier",
        "cache_salt",
        "prompt",
        "model",
        "max_tokens",
        "n",
        "logprobs",
    }
)
_DELTA_KEYS: Final = frozenset({"role", "content"})
_TAIL_TOKENS: Final = 16
"""Of the prompt, to see whether text reads the same after it."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""Of `/v1/completions` without max_tokens, by the API."""


def may_resume(call: Call, prompt: PromptTokens) -> bool:
    """Whether the stream of this call could go on elsewhere: text, one choice, known tokens."""
    view = call.view
    if view is None or not call.stream or not call.speaks_tokens:
        return False
    if prompt.kind is not PromptKind.TOKENS or prompt.model is None or view.choices_count != 1:
        return False
    if isinstance(view, CompletionRequest) and len(view.prompts) != 1:
        return False
    return not any(view.given(name) for name in _NOT_CONTINUED)


class StreamBudget:
    """How many streams may go on elsewhere: as many as began, up to those that are on their way.

    A worker that dies takes all its streams with it at once, which is more than retries may ever
    be; what its streams cost elsewhere is no more than what they cost where they were.
    """

    __slots__ = ("_left", "_on_their_way")

    def __init__(self) -> None:
        self._on_their_way = 0
        self._left = 0

    def began(self) -> None:
        """Count a stream; it earns the budget one."""
        self._on_their_way += 1
        self._left = min(self._left + 1, self._on_their_way)

    def ended(self) -> None:
        """A stream is over, however."""
        self._on_their_way -= 1

    def take(self) -> bool:
        """Whether a stream may go on now; mutates if so."""
        self._left = min(self._left, self._on_their_way)
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Resumption:
    """How to go on. `body` is that of a `/v1/completions` request without model and salt."""

    body: dict[str, object]
    tokens: list[int]
    """Prompt and answer so far."""
    sent_tokens: int
    shape: "Shape"
    finished: bool
    """The answer was complete but for its last events: no worker is needed."""
    finish_told: bool
    """Whether the client was told why it ended."""
    needs_ceiling: bool
    """The request set no ceiling, and the context's length must take its place."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the client's chunks look like."""

    api: Api
    frame: Mapping[str, object]
    """A chunk without choices and usage."""
    wants_usage: bool
    prompt_tokens: int
    """As the client is told."""
    sent_tokens: int

    def chunk(self, text: str, finish: object, stop: object) -> bytes:
        """An event with `text`."""
        choice: dict[str, object]
        if self.api is Api.CHAT:
            delta = {"content": text} if text else {}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        if stop is not None:
            choice["stop_reason"] = stop
        return self._event({**self.frame, "choices": [choice]})

    def usage_chunk(self, completion_tokens: int, cached_tokens: int | None) -> bytes:
        """The event that tells the whole answer's usage."""
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }
        if cached_tokens is not None:
            usage["prompt_tokens_details"] = {
                "cached_tokens": min(cached_tokens, self.prompt_tokens)
            }
        return self._event({**self.frame, "choices": [], "usage": usage})

    @staticmethod
    def _event(chunk: dict[str, object]) -> bytes:
        return event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode())


def resumption(call: Call, prompt: PromptTokens, sent: bytes) -> Resumption | None:
    """What is needed to go on after `sent`; None where it cannot be done faithfully.

    O(sent). The text so far is tokenised by itself, so that it never merges with the prompt; text
    that does not survive encoding and decoding is not continued.
    """
    if call.view is None or prompt.model is None or not may_resume(call, prompt):
        return None
    read = _Sent()
    if not all(read.take(found) for found in events_of(sent)) or read.frame is None:
        return None
    text = "".join(read.texts)
    tokens = _faithful(prompt, prompt.model, text)
    if tokens is None:
        return None
    ceiling = _ceiling(call)
    left = None if ceiling is None else ceiling - len(tokens)
    body = {name: v for name, v in call.view.body.items() if name not in _CHAT_ONLY}
    if left is not None:
        body["max_tokens"] = left
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    everything = [*prompt.tokens.tolist(), *tokens]
    body["prompt"] = everything
    shape = Shape(call.api, read.frame, call.wants_usage, prompt.count, len(tokens))
    finished = read.finished or (left is not None and left <= 0)
    return Resumption(
        body=body,
        tokens=everything,
        sent_tokens=len(tokens),
        shape=shape,
        finished=finished,
        finish_told=read.finished,
        needs_ceiling=left is None,
    )


def _ceiling(call: Call) -> int | None:
    view = call.view
    if view is None:
        return None
    for name in ("max_completion_tokens", "max_tokens"):
        value = view.given(name)
        if isinstance(value, int):
            return value
    return DEFAULT_COMPLETION_TOKENS if call.api is Api.COMPLETIONS else None


def _faithful(prompt: PromptTokens, model: TextModel, text: str) -> list[int] | None:
    """Tokens that stand for `text` after the prompt, None where they would read differently."""
    if not text:
        return []
    before = prompt.tokens[-_TAIL_TOKENS:].tolist()
    try:
        tokens: list[int] = model.encode(text, SpecialTokens.OMIT).tolist()
        whole = model.decode([*before, *tokens], SpecialTokens.ADD)
        same = whole == model.decode(before, SpecialTokens.ADD) + text
    except CallerError:
        return None
    return tokens if same else None


class _Sent:
    """Reads back what the client has."""

    def __init__(self) -> None:
        self.frame: Mapping[str, object] | None = None
        self.texts: list[str] = []
        self.finished = False

    def take(self, found: SseEvent) -> bool:
        """Whether the event is one of plain text."""
        if found.data is None:
            return True
        try:
            chunk = json.loads(found.data)
        except ValueError:
            return False
        if not isinstance(chunk, dict) or "error" in chunk:
            return False
        if self.frame is None:
            kept = {k: v for k, v in chunk.items() if k not in ("choices", "usage")}
            self.frame = kept
        choices = chunk.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            return False
        return all(self._choice(choice) for choice in choices)

    def _choice(self, choice: object) -> bool:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs"):
            return False
        if choice.get("finish_reason") is not None:
            self.finished = True
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if any(v is not None and k not in _DELTA_KEYS for k, v in delta.items()):
                return False
            text = delta.get("content")
        else:
            text = choice.get("text")
        if text is not None and not isinstance(text, str):
            return False
        self.texts.append(text or "")
        return True


class ResumedFilter:
    """Puts the events of a `/v1/completions` stream into the shape of the client's stream."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._parser = SseParser()
        self._kept: list[bytes] = []
        self.usage: Usage | None = None
        self.is_done = False

    @property
    def kept(self) -> bytes | None:
        """What was sent since the worker before died."""
        return b"".join(self._kept)

    def feed(self, data: bytes) -> bytes:
        passed = b"".join([self._passed(found) for found in self._parser.feed(data)])
        self._kept.append(passed)
        return passed

    def end(self) -> bytes:
        return b""

    def _passed(self, found: SseEvent) -> bytes:
        if found.data is None:
            return b""
        if found.is_done:
            self.is_done = True
            return self._last()
        told = usage_of(found.data)
        if told is not None:
            self.usage = told
        try:
            chunk = json.loads(found.data)
            if "error" in chunk:
                return found.raw
            parts = [
                self._shape.chunk(
                    str(choice.get("text") or ""),
                    choice.get("finish_reason"),
                    choice.get("stop_reason"),
                )
                for choice in chunk.get("choices") or ()
            ]
        except (ValueError, AttributeError, TypeError):
            return b""
        return b"".join(parts)

    def _last(self) -> bytes:
        if not self._shape.wants_usage:
            return DONE
        more = self.usage.completion_tokens if self.usage is not None else 0
        cached = self.usage.cached_tokens if self.usage is not None else None
        return self._shape.usage_chunk(self._shape.sent_tokens + more, cached) + DONE


def last_events(resumed: Resumption) -> bytes:
    """The end of a stream whose worker died between its last token and [DONE]."""
    shape = resumed.shape
    why = b"" if resumed.finish_told else shape.chunk("", "length", None)
    usage = shape.usage_chunk(resumed.sent_tokens, None) if shape.wants_usage else b""
    return why + usage + DONE

"""What routing and serving read of OpenAI requests: typed views over the parsed body.

A view checks a value when it is asked for it and keeps the body as it came, so that a router can
relay what it does not understand; null means absent everywhere. Whoever serves a request names the
parameters that it implements (`refuse_others`), so that none is ignored in silence.
What must not live here: HTTP headers, tokenising (kvtier.text), sampling.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, TypeVar

from kvtier.errors import LimitError
from kvtier.limits import (
    CHAT_MESSAGES_COUNT_MAX,
    CHOICES_COUNT_MAX,
    NAME_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    PROMPTS_COUNT_MAX,
    TOKEN_ID_MAX,
)
from kvtier.openai.errors import Fault, ParameterError, unsupported
from kvtier.openai.strict_json import JsonObject, parse_object

Prompt: TypeAlias = str | list[int]
"""Text, or token ids."""


class ToolChoice(Enum):
    """How much a request leaves the calling of tools to the model."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"
    """One function, by name."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`stream_options` of a request."""

    include_usage: bool = False
    continuous_usage: bool = False
    """`continuous_usage_stats`: usage in every chunk, as vLLM has it."""


class RequestView:
    """What requests of every kind have. Reading never changes the body."""

    def __init__(self, body: JsonObject) -> None:
        """`body` is a parsed request; `parse` makes a view of bytes."""
        self.body = body

    def given(self, param: str) -> object:
        """The value of a parameter as it came, None where it is absent or null."""
        return self.body.get(param)

    @property
    def model(self) -> str:
        """The name of the model; ParameterError where there is none."""
        name = self._text("model")
        if not name:
            raise ParameterError(Fault.MISSING, "model", "you must provide a model parameter")
        return name

    @property
    def stream(self) -> bool:
        return self._flag("stream")

    @property
    def stream_options(self) -> StreamOptions:
        options = self._object("stream_options")
        if options is None:
            return StreamOptions()
        flags = RequestView(options)
        return StreamOptions(flags._flag("include_usage"), flags._flag("continuous_usage_stats"))

    @property
    def user(self) -> str | None:
        return self._text("user")

    @property
    def cache_salt(self) -> str | None:
        """What separates this request's cached blocks from others of its tenant."""
        return self._text("cache_salt")

    @property
    def priority(self) -> int:
        """Of the request within its tenant; lower goes first, as in vLLM."""
        return self.integer("priority", -(2**31), 2**31 - 1) or 0

    @property
    def choices_count(self) -> int:
        """`n`: how many answers to make."""
        return self.integer("n", 1, CHOICES_COUNT_MAX) or 1

    def integer(self, param: str, least: int, most: int) -> int | None:
        """Return an integer of `least` to `most`, None where it is absent."""
        value = self.given(param)
        if value is None:
            return None
        if type(value) is not int:
            raise _wrong_type(param, "an integer")
        if not least <= value <= most:
            raise ParameterError(Fault.VALUE, param, f"{param} is {value}, not {least} to {most}")
        return value

    def number(self, param: str, least: float, most: float) -> float | None:
        """Return a number of `least` to `most`, None where it is absent."""
        value = self.given(param)
        if value is None:
            return None
        if type(value) not in (int, float) or not isinstance(value, int | float):
            raise _wrong_type(param, "a number")
        if not least <= value <= most:
            raise ParameterError(Fault.VALUE, param, f"{param} is not {least} to {most}")
        return float(value)

    def refuse_others(self, implemented: Collection[str], neutral: Mapping[str, object]) -> None:
        """Refuse parameters that are not `implemented`, unless null or of their `neutral` value.

        `neutral` has the values with which a parameter asks for nothing (`frequency_penalty: 0`).
        """
        for param, value in self.body.items():
            if param in implemented or value is None:
                continue
            if param in neutral and _same(neutral[param], value):
                continue
            raise unsupported(param[:NAME_BYTES_MAX])

    def _text(self, param: str) -> str | None:
        value = self.given(param)
        if value is None:
            return None
        if not isinstance(value, str):
            raise _wrong_type(param, "a string")
        if len(value.encode()) > NAME_BYTES_MAX:
            raise ParameterError(Fault.VALUE, param, f"{param} exceeds {NAME_BYTES_MAX} bytes")
        return value

    def _flag(self, param: str) -> bool:
        value = self.given(param)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise _wrong_type(param, "a boolean")
        return value

    def _object(self, param: str) -> JsonObject | None:
        value = self.given(param)
        if value is not None and not isinstance(value, dict):
            raise _wrong_type(param, "an object")
        return value

    def _objects(self, param: str) -> list[JsonObject] | None:
        value = self.given(param)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _wrong_type(param, "an array of objects")
        return value

    def _tokens_max(self, param: str) -> int | None:
        return self.integer(param, 0, PROMPT_TOKENS_MAX)


class ChatRequest(RequestView):
    """A body of `/v1/chat/completions`."""

    @property
    def messages(self) -> list[JsonObject]:
        """The messages, each an object with a role that is a string; at least one."""
        messages = self._objects("messages")
        if not messages:
            raise ParameterError(Fault.MISSING, "messages", "messages is missing or empty")
        if len(messages) > CHAT_MESSAGES_COUNT_MAX:
            raise LimitError(f"{len(messages)} messages exceed {CHAT_MESSAGES_COUNT_MAX}")
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise _wrong_type(f"messages[{index}].role", "a string")
        return messages

    @property
    def tools(self) -> list[JsonObject] | None:
        return self._objects("tools")

    @property
    def tool_choice(self) -> ToolChoice:
        """AUTO where there are tools and nothing else is said."""
        value = self.given("tool_choice")
        match value:
            case None:
                return ToolChoice.AUTO if self.tools else ToolChoice.NONE
            case "none" | "auto" | "required":
                return ToolChoice(value)
            case {"function": {"name": str()}}:
                return ToolChoice.NAMED
        raise ParameterError(Fault.VALUE, "tool_choice", "tool_choice is no choice of the API")

    @property
    def documents(self) -> list[JsonObject] | None:
        return self._objects("documents")

    @property
    def template_arguments(self) -> JsonObject:
        """`chat_template_kwargs`, as engines take them."""
        return self._object("chat_template_kwargs") or {}

    @property
    def add_generation_prompt(self) -> bool:
        return self.given("add_generation_prompt") is None or self._flag("add_generation_prompt")

    @property
    def continue_final_message(self) -> bool:
        return self._flag("continue_final_message")

    @property
    def completion_tokens_max(self) -> int | None:
        """`max_completion_tokens`, or its old name `max_tokens`; None where neither is given."""
        newer = self._tokens_max("max_completion_tokens")
        return self._tokens_max("max_tokens") if newer is None else newer


class CompletionRequest(RequestView):
    """A body of `/v1/completions`."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts in order, at least one: texts, or lists of token ids."""
        value = self.given("prompt")
        if value is None:
            raise ParameterError(Fault.MISSING, "prompt", "prompt is missing")
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise _wrong_type("prompt", "a string, an array of strings or of token ids")
        if type(value[0]) is int:
            return [_token_ids(value)]
        if len(value) > PROMPTS_COUNT_MAX:
            raise LimitError(f"{len(value)} prompts exceed {PROMPTS_COUNT_MAX}")
        return [item if isinstance(item, str) else _token_ids(item) for item in value]

    @property
    def completion_tokens_max(self) -> int | None:
        """`max_tokens`; None where it is absent (the API's default is 16)."""
        return self._tokens_max("max_tokens")

    @property
    def suffix(self) -> str | None:
        value = self.given("suffix")
        if value is not None and not isinstance(value, str):
            raise _wrong_type("suffix", "a string")
        return value

    @property
    def echo(self) -> bool:
        return self._flag("echo")


class ResponseRequest(RequestView):
    """A body of `/v1/responses`, as far as routing goes."""

    @property
    def previous_response_id(self) -> str | None:
        """The answer that this request goes on from, on whichever worker holds it."""
        return self._text("previous_response_id")


V = TypeVar("V", bound=RequestView)


def parse(view: type[V], body: bytes) -> V:
    """Return `body` as a `view`; CallerError where it is no JSON object. O(bytes)."""
    return view(parse_object(body))


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise _wrong_type("prompt", "a string, an array of strings or of token ids")
    if len(value) > PROMPT_TOKENS_MAX:
        raise LimitError(f"a prompt of {len(value)} tokens exceeds {PROMPT_TOKENS_MAX}")
    if set(map(type, value)) != {int}:
        raise _wrong_type("prompt", "an array of integers")
    if min(value) < 0 or max(value) > TOKEN_ID_MAX:
        raise ParameterError(Fault.VALUE, "prompt", "a token id is not 0 to 2**32 - 1")
    return value


def _same(neutral: object, value: object) -> bool:
    """Equal, but for true and 1, or false and 0."""
    return neutral == value and isinstance(neutral, bool) == isinstance(value, bool)


def _wrong_type(param: str, wanted: str) -> ParameterError:
    return ParameterError(Fault.TYPE, param, f"{param} is not {wanted}")

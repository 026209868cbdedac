"""Chat templates: Jinja in a bounded sandbox, with what templates of the Hub expect to find there.

Renders what transformers' `apply_chat_template` renders (a property test holds it to that), minus
what only Python callers can pass: functions as tools, media objects, batches.
What must not live here: the shape of OpenAI messages (messages.py), tokens (model.py).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import do_center, do_indent
from jinja2.filters import do_format as jinja_format
from jinja2.filters import do_replace as jinja_replace
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace, pass_eval_context

from kvtier.errors import CallerError, ConfigError, LimitError
from kvtier.limits import RENDERED_CHARS_MAX, TEMPLATE_CHARS_MAX
from kvtier.text.budget import (
    ADDED,
    BUDGET,
    JOINED,
    METERED,
    BoundedEnvironment,
    Budget,
    added,
    check_format,
    check_indent,
    check_replace,
    joined,
    metered,
    require_length,
)
from kvtier.text.clock import LocalTime, local_time

_REASON_CHARS_MAX: Final = 200
_WRITTEN: Final = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that a request's template arguments cannot replace."""
_CONTINUED_TAG: Final = "KVTIER_CONTINUED_MESSAGE_ENDS_HERE "
_REASONING_NAMES: Final = ("reasoning_content", "thinking", "reasoning")
_REASONING_SET: Final = frozenset(_REASONING_NAMES)

TemplateErrors: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a run can raise when template and messages do not fit each other."""


class ContentFormat(Enum):
    """How a template reads the content of a message that came in parts."""

    TEXT = "text"
    """As one text: parts are joined before."""
    PARTS = "parts"
    """As a list: it loops over the parts itself."""


class Ending(Enum):
    """How a rendered chat ends."""

    GENERATION_PROMPT = "generation_prompt"
    """With the header of the answer that is asked for."""
    CLOSED = "closed"
    """With the end of the last message."""
    CONTINUED = "continued"
    """In the middle of the last message, which the model goes on with."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What one run of a template sees: JSON values only, which it cannot change."""

    messages: list[dict[str, object]]
    tools: list[object] | None = None
    documents: list[object] | None = None
    variables: Mapping[str, object] | None = None
    """Special tokens and the request's template arguments, the latter winning."""
    ending: Ending = Ending.GENERATION_PROMPT


class ChatTemplate:
    """One compiled chat template. Immutable and safe to share between threads."""

    def __init__(self, source: str, now: LocalTime = local_time) -> None:
        """Compile `source`; ConfigError where it is no template."""
        if len(source) > TEMPLATE_CHARS_MAX:
            raise LimitError(f"chat template of {len(source)} chars exceeds {TEMPLATE_CHARS_MAX}")
        self.source = source
        environment = _environment(now)
        try:
            self._template: Template = environment.from_string(source)
            self.content_format = _content_format(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        except TemplateErrors as error:
            raise ConfigError(f"chat template does not compile: {type(error).__name__}") from error

    def render(self, chat: TemplateInput) -> str:
        """Return the text of `chat`, which is not changed.

        CallerError where the template refuses it or fails on it, LimitError where it spends more
        than limits.py lets it.
        """
        messages = [_with_reasoning(message) for message in chat.messages]
        if chat.ending is Ending.CONTINUED:
            return self._continued(chat, messages)
        return self._run(chat, messages)

    def _run(self, chat: TemplateInput, messages: list[dict[str, object]]) -> str:
        variables = dict(chat.variables or {})
        clash = next((name for name in _WRITTEN if name in variables), None)
        if clash is not None:
            raise CallerError(f"template argument {clash!r} is not the caller's to set")
        variables |= {
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.documents,
            "add_generation_prompt": chat.ending is Ending.GENERATION_PROMPT,
        }
        token = BUDGET.set(Budget())
        try:
            return _bounded_join(self._template.generate(variables))
        except LimitError:
            raise
        except _RaisedError as error:
            reason = str(error.message or "")[:_REASON_CHARS_MAX]
            raise CallerError(f"chat template refuses the messages: {reason}") from None
        except TemplateErrors as error:
            what = type(error).__name__
            raise CallerError(f"chat template fails on the messages: {what}") from error
        finally:
            BUDGET.reset(token)

    def _continued(self, chat: TemplateInput, messages: list[dict[str, object]]) -> str:
        """Render with a tag behind the last message's text and cut there."""
        if not messages:
            raise CallerError("there is no final message to continue")
        final, text = _tagged(messages[-1])
        rendered = self._run(chat, [*messages[:-1], final])
        tag = _CONTINUED_TAG.strip()
        if tag not in rendered or text.strip() not in rendered:
            raise CallerError("chat template leaves out text of the final message to continue")
        cut = rendered.rindex(tag)
        if rendered.startswith(_CONTINUED_TAG, cut):
            return rendered[:cut]
        return rendered[:cut].rstrip()  # the template trims messages


def _bounded_join(pieces: Iterator[str]) -> str:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > RENDERED_CHARS_MAX:
            require_length(length)
        parts.append(piece)
    return "".join(parts)


def _with_reasoning(message: dict[str, object]) -> dict[str, object]:
    """Give a message's reasoning every name that templates read it by; others as they are."""
    if _REASONING_SET.isdisjoint(message):
        return message
    reasoning = next(
        (message[name] for name in _REASONING_NAMES if message.get(name) is not None), None
    )
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tagged(message: dict[str, object]) -> tuple[dict[str, object], str]:
    """A copy of `message` with the tag behind its last text, and that text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUED_TAG}, content
    if isinstance(content, list):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                tagged = {**part, "text": part["text"] + _CONTINUED_TAG}
                parts = [*content[:index], tagged, *content[index + 1 :]]
                return {**message, "content": parts}, part["text"]
    raise CallerError("the final message has no text to continue")


# What templates find in the sandbox


class _RaisedError(TemplateError):
    """A template called `raise_exception`."""


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`: marks what a model said; renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _body(self, caller: Macro) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """`namespace()` without names that begin with an underscore."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *rest = args
        attributes: dict[str, object] = dict(*rest, **kwargs)
        for name in attributes:
            _check_namespace_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_namespace_name(name)
        super().__setitem__(name, value)


def _check_namespace_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace cannot have names that begin with an underscore")


class _TemplateDict:
    """`dict(…)` and `dict.fromkeys(…)`, but not the class itself."""

    def __call__(
        self,
        items: Mapping[str, object] | Iterable[tuple[str, object]] = (),
        /,
        **more: object,
    ) -> dict[str, object]:
        return dict(items, **more)

    def fromkeys(self, keys: Iterable[str], value: object = None) -> dict[str, object]:
        return dict.fromkeys(keys, value)


def _environment(now: LocalTime) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters |= {
        "tojson": _to_json,
        "center": _center,
        "indent": _indent,
        "format": _format,
        "replace": _replace,
        METERED: metered,
        JOINED: joined,
        ADDED: added,
    }
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_of(now),
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedError(message)


def _strftime_of(now: LocalTime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        return now().strftime(format)

    return strftime_now


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape HTML."""
    check_indent(indent)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _center(value: str, width: int = 80) -> str:
    require_length(width)
    return do_center(value, width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_indent(width)
    return do_indent(value, width, first, blank)


def _format(value: str, *args: object, **kwargs: object) -> str:
    check_format(str(value))
    return jinja_format(value, *args, **kwargs)


@pass_eval_context
def _replace(context: EvalContext, value: str, old: str, new: str, count: int | None = None) -> str:
    check_replace(str(value), old, new)
    return jinja_replace(context, value, old, new, count)


def _content_format(tree: nodes.Template) -> ContentFormat:
    """PARTS where the template loops over some message's content, by that name."""
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        while isinstance(source, nodes.Filter) and source.node is not None:
            source = source.node
        match source:
            case nodes.Getattr(attr="content") | nodes.Name(name="content"):
                return ContentFormat.PARTS
            case nodes.Getitem(arg=nodes.Const(value="content")):
                return ContentFormat.PARTS
    return ContentFormat.TEXT

"""OpenAI chat messages as chat templates expect them. Nothing of the caller's is changed.

What must not live here: HTTP bodies (kvtier.openai), templates (template.py).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from kvtier.errors import CallerError, LimitError
from kvtier.limits import CHAT_MESSAGES_COUNT_MAX, JSON_DEPTH_MAX
from kvtier.text.template import ContentFormat

_MEDIA_TYPES: Final = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "file": "file",
}
"""Part types of the API, and how templates call them."""
_ONLY_TEXT: Final = {str}
_TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text", "refusal"})


def chat_messages(
    messages: Sequence[Mapping[str, object]], content_format: ContentFormat
) -> list[dict[str, object]]:
    """Return `messages` as a template of `content_format` reads them.

    Fields that are null are left out. Content in parts becomes one text, joined by line feeds, or
    stays a list with short media types. Tool-call arguments that are a JSON object in a string
    become that object. CallerError for what is no message; LimitError for too many or too deep.
    O(values), not O(characters).
    """
    if not isinstance(messages, list | tuple):
        raise CallerError(f"messages is a {type(messages).__name__}, not a list")
    if not messages:
        raise CallerError("messages is empty")
    if len(messages) > CHAT_MESSAGES_COUNT_MAX:
        raise LimitError(f"{len(messages)} messages exceed {CHAT_MESSAGES_COUNT_MAX}")
    return [_message(index, each, content_format) for index, each in enumerate(messages)]


def _message(
    index: int, message: Mapping[str, object], content_format: ContentFormat
) -> dict[str, object]:
    if not isinstance(message, dict):
        raise CallerError(f"messages[{index}] is a {type(message).__name__}, not an object")
    if not isinstance(message.get("role"), str):
        raise CallerError(f"messages[{index}].role is not a string")
    if set(map(type, message.values())) == _ONLY_TEXT:
        return message
    plain = {name: value for name, value in message.items() if value is not None}
    for name, value in plain.items():
        if type(value) is str:
            continue
        require_plain(f"messages[{index}].{name}", value)
        if name == "content":
            plain[name] = _content(f"messages[{index}].content", value, content_format)
        elif name == "tool_calls":
            plain[name] = _tool_calls(f"messages[{index}].tool_calls", value)
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    return plain


def _content(where: str, content: object, content_format: ContentFormat) -> object:
    if not isinstance(content, list):
        raise CallerError(f"{where} is a {type(content).__name__}, not a string or list")
    parts = [_part(f"{where}[{index}]", part) for index, part in enumerate(content)]
    if content_format is ContentFormat.PARTS:
        return parts
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text")
        if not isinstance(text, str):
            raise CallerError(
                f"{where}[{index}] is of type {part['type']!r}: the model's template takes text"
            )
        texts.append(text)
    return "\n".join(texts)


def _part(where: str, part: object) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise CallerError(f"{where} is a {type(part).__name__}, not an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise CallerError(f"{where}.type is not a string")
    if kind in _TEXT_TYPES:
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise CallerError(f"{where}.text is not a string")
        return {"type": "text", "text": text}
    if kind not in _MEDIA_TYPES:
        raise CallerError(f"{where} is of an unknown type")
    return {"type": _MEDIA_TYPES[kind]}


def _tool_calls(where: str, calls: object) -> list[object]:
    if not isinstance(calls, list):
        raise CallerError(f"{where} is a {type(calls).__name__}, not a list")
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> object:
    if not isinstance(call, dict):
        raise CallerError(f"{where} is a {type(call).__name__}, not an object")
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {**call, "function": {**function, "arguments": {}}}
    if isinstance(arguments, str):
        return {**call, "function": {**function, "arguments": _arguments(where, arguments)}}
    return call


def _arguments(where: str, text: str) -> object:
    """The object that `text` is in JSON, or `text` where it is none: templates print either."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(parsed, dict):
        return text
    require_plain(f"{where}.function.arguments", parsed)
    return parsed


def require_plain(where: str, value: object) -> None:
    """Refuse what is not made of JSON values or is nested deeper than JSON_DEPTH_MAX. O(values)."""
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, dict):
            if not all(type(key) is str for key in item):
                raise CallerError(f"{where} has a key that is not a string")
            children: Sequence[object] = list(item.values())
        elif isinstance(item, list):
            children = item
        elif item is None or type(item) in (str, int, float, bool):
            continue
        else:
            raise CallerError(f"{where} holds a {type(item).__name__}, which is not JSON")
        if depth > JSON_DEPTH_MAX:
            raise LimitError(f"{where} is nested deeper than {JSON_DEPTH_MAX}")
        waiting += [(child, depth + 1) for child in children]

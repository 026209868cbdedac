"""Rows of a batch: what each asks for, in one form, whatever it was read from.

A row is a request of OpenAI's batch API (`custom_id`, `method`, `url`, `body`), or an object with
`prompt` or `messages`, an optional `custom_id` or `id`, and any other field of a request. What must
not live here: files, sending.
"""

import array
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import BATCH_ROW_BYTES_MAX, NAME_BYTES_MAX
from kvtier.openai.strict_json import parse_object

Json: TypeAlias = Mapping[str, object]

_ENVELOPE: Final = frozenset({"custom_id", "method", "url", "body"})


class Url(StrEnum):
    """What is asked for."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch."""

    custom_id: str
    url: Url
    body: Json

    def line(self) -> bytes:
        """As it is kept on disk, without the end of the line."""
        told = {"custom_id": self.custom_id, "url": self.url.value, "body": self.body}
        return json.dumps(told, separators=(",", ":")).encode()


def row_of(fields: Json, number: int, defaults: Json) -> Row:
    """The row that an object of the input says; `defaults` are fields for what its body lacks.

    CallerError for what is no request, or wants a stream.
    """
    enveloped = "body" in fields
    body = fields["body"] if enveloped else _without_names(fields)
    if not isinstance(body, Mapping):
        raise CallerError("body is not an object")
    if enveloped and not _ENVELOPE.issuperset(fields):
        raise CallerError(f"unknown fields beside body: {sorted({*fields} - _ENVELOPE)}")
    if enveloped and str(fields.get("method", "POST")).upper() != "POST":
        raise CallerError("method is not POST")
    body = {**defaults, **body}
    if body.get("stream"):
        raise CallerError("a batch streams nothing: leave stream out")
    row = Row(_name_of(fields, number), _url_of(fields.get("url"), body), body)
    try:
        prompt_bytes(row)
        row.line()
    except UnicodeEncodeError:
        raise CallerError("a text has a lone surrogate") from None
    except TypeError as error:
        raise CallerError(f"not what JSON can say: {error}") from None
    return row


def parsed_row(line: bytes, number: int, defaults: Json) -> Row:
    """`row_of` of a line of JSON. CallerError, LimitError."""
    return row_of(parse_object(line, BATCH_ROW_BYTES_MAX), number, defaults)


def kept_row(line: bytes) -> Row:
    """The row of a line that `Row.line` made."""
    told = json.loads(line)
    return Row(told["custom_id"], Url(told["url"]), told["body"])


def prompt_bytes(row: Row) -> bytes:
    """The text that decides which blocks of a cache a row can use, in the order of the prompt.

    Equal beginnings of prompts give equal beginnings of these bytes. CallerError for no prompt.
    """
    head = f"{row.body.get('model', '')}\0".encode()
    if row.url is Url.COMPLETIONS:
        return head + _prompt(row.body.get("prompt"))
    messages = row.body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise CallerError("messages is not a list of messages")
    parts = [head, _dumped(row.body["tools"]) if row.body.get("tools") else b""]
    for message in messages:
        if not isinstance(message, dict):
            raise CallerError("a message is not an object")
        content = message.get("content")
        text = content.encode() if isinstance(content, str) else _dumped(content)
        others = {k: v for k, v in message.items() if k not in {"role", "content"}}
        parts += [f"\0{message.get('role')}\0".encode(), text, _dumped(others) if others else b""]
    return b"".join(parts)


def _prompt(prompt: object) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            try:
                return array.array("I", prompt).tobytes()
            except OverflowError:
                raise CallerError("prompt has a token that is none") from None
        return _prompt(prompt[0])
    raise CallerError("prompt is neither a text nor a list of tokens")


def _name_of(fields: Json, number: int) -> str:
    name = fields.get("custom_id", fields.get("id"))
    if name is None:
        return f"row-{number}"
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise CallerError("custom_id is not a text")
    if len(str(name).encode()) > NAME_BYTES_MAX:
        raise LimitError(f"custom_id is longer than {NAME_BYTES_MAX} bytes")
    return str(name)


def _without_names(fields: Json) -> Json:
    return {k: v for k, v in fields.items() if k not in {"custom_id", "id"} and v is not None}


def _url_of(told: object, body: Json) -> Url:
    if told is None:
        return Url.CHAT if "messages" in body else Url.COMPLETIONS
    try:
        return Url(str(told))
    except ValueError:
        raise CallerError(f"url {told!r} is none of {', '.join(Url)}") from None


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()

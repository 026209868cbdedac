"""Token usage in answers: read from bodies and stream events, and taken out again.

What must not live here: the counting of tokens.
"""

import json
from dataclasses import dataclass
from typing import Final

from kvtier.openai.sse import DONE_DATA, SseEvent, event

_MENTION: Final = b'"usage"'
_NULL_AT_END: Final = b',"usage":null}'


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer says it cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Of the prompt, read from a cache; None where the engine does not say."""
    reused_tokens: int | None = None
    """Of the prompt, that the answering worker did not compute, where it says so beside: another
    one had computed some of them for this request."""


def usage_of(body: bytes) -> Usage | None:
    """Return the usage in a JSON answer or in an event's data; None where there is none.

    Understands chat, completions and embeddings (`prompt_tokens`) and responses (`input_tokens`).
    Never raises: an engine's answer is not ours to refuse.
    """
    if _MENTION not in body:
        return None
    answer = _parsed(body)
    if answer is None:
        return None
    inner = answer.get("response")  # events of /v1/responses carry the whole answer
    usage = answer.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    return _usage(usage) if isinstance(usage, dict) else None


def without_usage(found: SseEvent) -> bytes:
    """Return the bytes of a stream event for a client that did not ask for usage.

    Empty for an event that has nothing else; the event as it came where it has no usage.
    """
    data = found.data
    if data is None or data == DONE_DATA or _MENTION not in data:
        return found.raw
    if data.endswith(_NULL_AT_END) and data.count(_MENTION) == 1:
        return event(data[: -len(_NULL_AT_END)] + b"}", found.name)
    chunk = _parsed(data)
    if chunk is None or "usage" not in chunk:
        return found.raw
    usage = chunk.pop("usage")
    if usage is not None and not chunk.get("choices"):
        return b""
    text = json.dumps(chunk, separators=(",", ":"))  # in ASCII: an engine may send half an emoji
    return event(text.encode(), found.name)


def _parsed(body: bytes) -> dict[str, object] | None:
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _usage(usage: dict[str, object]) -> Usage | None:
    prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    if prompt is None:
        return None
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = reused = None
    if isinstance(details, dict):
        cached, reused = _count(details.get("cached_tokens")), _count(details.get("reused_tokens"))
    completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
    return Usage(prompt, completion or 0, cached, reused)


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None

"""A request as the front sees it: which API, what is read of it, and what goes upstream.

What must not live here: tokenising (prompts.py), relaying (relay.py).
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier.errors import CallerError
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.openai.errors import Fault, ParameterError
from kvtier.openai.requests import (
    ChatRequest,
    CompletionRequest,
    RequestView,
    ResponseRequest,
    parse,
)

OUTPUT_TOKENS: Final = 256
"""Expected of a request that sets no ceiling."""
_OUTPUT_SHARE: Final = 4096
"""Nobody expects more of an answer, whatever ceiling the request sets."""


class Api(StrEnum):
    """Which part of the API a path is."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    OTHER = "other"
    """Relayed by load alone."""


PATHS: Final = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/embeddings": Api.EMBEDDINGS,
    "/v1/responses": Api.RESPONSES,
}


@dataclass(slots=True, eq=False)
class Call:
    """One request, read as far as the router needs. `raw` is the body as it came. Nobody changes
    it; not frozen because that costs a call a field and request."""

    api: Api
    method: str
    path: str
    """With its query."""
    content_type: str
    raw: bytes
    view: RequestView | None
    """None for a body that is no JSON object (an upload, or none at all)."""
    model: str
    """Empty where the request names none."""
    stream: bool = False
    wants_usage: bool = True
    """Whether the client asked for usage in a stream; nothing is taken out where it did."""
    output_tokens: int = OUTPUT_TOKENS
    client_salt: str | None = None
    previous_response_id: str | None = None

    @property
    def speaks_tokens(self) -> bool:
        """Whether it is one of the APIs whose streams end with [DONE]."""
        return self.api in (Api.CHAT, Api.COMPLETIONS)


def read_call(api: Api, method: str, path: str, content_type: str, raw: bytes) -> Call:
    """Read what routing needs of a request; CallerError in terms of the API for a wrong one."""
    match api:
        case Api.CHAT:
            chat = parse(ChatRequest, raw)
            _ = chat.messages, chat.choices_count
            return _call(api, path, raw, chat, chat.completion_tokens_max)
        case Api.COMPLETIONS:
            completion = parse(CompletionRequest, raw)
            _ = completion.choices_count
            if completion.given("prompt") is None:
                raise ParameterError(Fault.MISSING, "prompt", "prompt is missing")
            return _call(api, path, raw, completion, completion.completion_tokens_max)
        case Api.EMBEDDINGS:
            view = parse(RequestView, raw)
            if view.given("input") is None and view.given("messages") is None:
                raise ParameterError(Fault.MISSING, "input", "input is missing")
            return _call(api, path, raw, view, 0)
        case Api.RESPONSES if method == "POST":
            response = parse(ResponseRequest, raw)
            ceiling = response.integer("max_output_tokens", 0, PROMPT_TOKENS_MAX)
            return _call(api, path, raw, response, ceiling)
    return _other(method, path, content_type, raw)


def _call(api: Api, path: str, raw: bytes, view: RequestView, ceiling: int | None) -> Call:
    stream = view.stream
    speaks_usage = api in (Api.CHAT, Api.COMPLETIONS)
    wants = view.stream_options.include_usage or view.stream_options.continuous_usage
    previous = view.previous_response_id if isinstance(view, ResponseRequest) else None
    choices = view.choices_count if speaks_usage else 1
    expected = OUTPUT_TOKENS if ceiling is None else min(ceiling, _OUTPUT_SHARE)
    return Call(
        api=api,
        method="POST",
        path=path,
        content_type="application/json",
        raw=raw,
        view=view,
        model=view.model,
        stream=stream,
        wants_usage=wants or not (stream and speaks_usage),
        output_tokens=min(expected * choices, PROMPT_TOKENS_MAX),
        client_salt=view.cache_salt,
        previous_response_id=previous,
    )


def _other(method: str, path: str, content_type: str, raw: bytes) -> Call:
    view = None
    is_json = content_type.partition(";")[0].strip().lower() in ("application/json", "")
    if raw and is_json:
        view = parse(RequestView, raw)
    return Call(
        api=Api.OTHER,
        method=method,
        path=path,
        content_type=content_type,
        raw=raw,
        view=view,
        model=view.model if view is not None else "",
        stream=view.stream if view is not None else False,
        output_tokens=0,
        client_salt=view.cache_salt if view is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Amendment:
    """What the router changes in a body on its way to a worker."""

    model: str
    salt: str | None
    """Takes the place of what the client gave."""


def upstream_body(call: Call, amendment: Amendment) -> bytes:
    """The body to send: as it came but for model, salt and usage. O(bytes).

    Mostly two fields are put before the last brace, which is safe because the parsed body has none
    of that name; only where one has to be replaced is the body written anew.
    """
    if call.view is None:
        return call.raw
    body = call.view.body
    added: dict[str, object] = {}
    if amendment.salt is not None:
        added["cache_salt"] = amendment.salt
    if not call.wants_usage:
        options = body.get("stream_options")
        known = options if isinstance(options, dict) else {}
        added["stream_options"] = {**known, "include_usage": True}
    if amendment.model != call.model and call.model:
        added["model"] = amendment.model
    if not added and "cache_salt" not in body:
        return call.raw
    if "cache_salt" in body or not body or any(name in body for name in added):
        kept = {name: value for name, value in body.items() if name != "cache_salt"}
        return json.dumps({**kept, **added}, ensure_ascii=False).encode()
    end = call.raw.rindex(b"}")
    fields = json.dumps(added, separators=(",", ":"))[1:]
    return call.raw[:end] + b"," + fields.encode()


def require_json(content_type: str) -> None:
    """Refuse a body that says it is something else; no type at all counts as JSON."""
    media = content_type.partition(";")[0].strip().lower()
    if media not in ("", "application/json") and not media.endswith("+json"):
        raise CallerError(f"content-type {media[:100]!r} is not application/json")

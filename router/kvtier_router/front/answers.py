"""Answers that the router gives by itself, in the API's own shape.

What must not live here: when they are given.
"""

import json
from collections.abc import Sequence
from math import ceil
from typing import Final

from kvtier.errors import CallerError, KvtierError, NotFoundError, UnauthenticatedError
from kvtier.openai.errors import ModelUnknownError, error_object
from kvtier.openai.sse import event
from kvtier_router.web.upstream import UpstreamError
from kvtier_router.web.values import JSON, Headers, Refused, Reply

_SENTENCES: Final = {
    Refused.CONNECTIONS: "too many connections",
    Refused.CLIENT_CONNECTIONS: "too many connections of one client",
    Refused.MALFORMED: "the request is not HTTP/1.1",
    Refused.HEADER_BYTES: "the header is too long",
    Refused.HEADER_TIME: "the header took too long",
    Refused.BODY_BYTES: "the body is too long",
    Refused.BODIES_BYTES: "too much is being uploaded at once",
    Refused.BODY_TIME: "the body took too long",
    Refused.UPLOAD_RATE: "the body comes too slowly",
    Refused.STALLED_READER: "the answer is not read",
    Refused.PIPELINE: "too many requests at once on one connection",
}
_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable_error"}
_RETRY_AFTER_S: Final = 1.0


def json_reply(status: int, value: object, headers: Headers = ()) -> Reply:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    return Reply(status, body, (JSON, *headers))


def refusal(status: int, reason: Refused) -> Reply:
    """What the HTTP server says of itself."""
    kind = _TYPES.get(status, "invalid_request_error")
    shown = {"message": _SENTENCES[reason], "type": kind, "param": None, "code": reason.value}
    extra = (("retry-after", "1"),) if status in _TYPES else ()
    return json_reply(status, {"error": shown}, extra)


def error_answer(error: KvtierError, headers: Headers = ()) -> Reply:
    """The answer to a request that failed. Internal errors are not described."""
    extra = list(headers)
    if error.retryable:
        extra.append(("retry-after", str(retry_after_s(error))))
    if isinstance(error, UnauthenticatedError):
        extra.append(("www-authenticate", "Bearer"))
    return json_reply(error.http_status, {"error": described(error)}, extra)


def error_event(error: KvtierError) -> bytes:
    """The last event of a stream that cannot go on."""
    return event(json.dumps({"error": described(error)}).encode())


def described(error: KvtierError) -> dict[str, str | None]:
    """The error object of the API."""
    shown = error_object(error)
    if isinstance(error, UpstreamError):
        shown |= {"type": "server_error", "code": "upstream_failed", "message": "the worker failed"}
    return shown


def retry_after_s(error: KvtierError) -> int:
    """Whole seconds after which to try again."""
    wanted = getattr(error, "retry_after_s", _RETRY_AFTER_S)
    return max(1, min(3600, ceil(float(wanted))))


def translated(error: KvtierError, model: str) -> KvtierError:
    """The same error in the API's words: a name that nobody serves is an unknown model."""
    if isinstance(error, NotFoundError):
        return ModelUnknownError(f"The model {model[:200]!r} does not exist")
    return error


def model_list(names: Sequence[str], created: int) -> dict[str, object]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [model_object(name, created) for name in names]}


def model_object(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "kvtier"}


def method_error(allowed: str) -> Reply:
    """405 with what is allowed."""
    error = error_object(CallerError(f"method not allowed, only {allowed}"))
    return json_reply(405, {"error": error}, (("allow", allowed),))


def not_found(path: str) -> Reply:
    error = error_object(CallerError(f"Invalid URL ({path[:200]})"))
    return json_reply(404, {"error": error})

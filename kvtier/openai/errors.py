"""Errors as OpenAI's API shows them, made from the one error tree.

    CallerError
    ├── ParameterError     a parameter of the request is wrong, unknown or not supported
    └── ModelUnknownError  no such model here

What must not live here: HTTP libraries; who answers what (router and worker).
"""

import json
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier.errors import (
    CallerError,
    ForbiddenError,
    KvtierError,
    LimitError,
    OverloadedError,
    UnauthenticatedError,
)

_MESSAGE_CHARS_MAX: Final = 1000


class Fault(Enum):
    """What is wrong with a parameter: the `code` of an error object."""

    MISSING = "missing_required_parameter"
    TYPE = "invalid_type"
    VALUE = "invalid_value"
    UNKNOWN = "unknown_parameter"
    UNSUPPORTED = "unsupported_parameter"
    CONTEXT = "context_length_exceeded"


class ParameterError(CallerError):
    """A parameter of a request is wrong; `param` names it as the API does."""

    def __init__(self, fault: Fault, param: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.param = param


class ModelUnknownError(CallerError):
    """A request names a model that is not served here."""

    http_status = 404


def unsupported(param: str, detail: str = "") -> ParameterError:
    """The error for a parameter that is not implemented."""
    message = f"Parameter '{param}' is not supported" + (f": {detail}" if detail else ".")
    return ParameterError(Fault.UNSUPPORTED, param, message)


def unknown(param: str) -> ParameterError:
    """The error for a parameter that the API does not have."""
    return ParameterError(Fault.UNKNOWN, param, f"Unrecognized request argument: '{param}'.")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An answer that is an error, ready to be sent by any HTTP library."""

    status: int
    body: bytes
    """JSON, `{"error": {…}}`."""
    retryable: bool
    """Whether the same request may succeed later: a Retry-After header is in place."""


def error_reply(error: KvtierError) -> ErrorReply:
    """Return the answer that tells a client of `error`.

    The message of an internal error is not shown: it is for the log.
    """
    body = json.dumps({"error": error_object(error)}, ensure_ascii=False).encode("utf-8", "replace")
    return ErrorReply(error.http_status, body, error.retryable)


def error_object(error: KvtierError) -> dict[str, str | None]:
    """Return the value of `error` in an OpenAI error body or in an SSE error event."""
    shown = error.http_status != 500
    message = str(error) if shown and str(error) else "The server had an error."
    param = error.param if isinstance(error, ParameterError) else None
    kind, code = _kind(error)
    return {
        "message": message[:_MESSAGE_CHARS_MAX],
        "type": kind,
        "param": param,
        "code": code,
    }


def _kind(error: KvtierError) -> tuple[str, str | None]:
    """`type` and `code` of an error object."""
    match error:
        case ParameterError():
            return "invalid_request_error", error.fault.value
        case ModelUnknownError():
            return "invalid_request_error", "model_not_found"
        case LimitError():
            return "invalid_request_error", "request_too_large"
        case CallerError():
            return "invalid_request_error", None
        case UnauthenticatedError():
            return "invalid_request_error", "invalid_api_key"
        case ForbiddenError():
            return "permission_error", None
        case OverloadedError():
            return "rate_limit_error", "rate_limit_exceeded"
        case _ if error.http_status == 503:
            return "service_unavailable_error", None
        case _ if error.http_status == 504:
            return "timeout_error", "timeout"
    return "server_error", None

"""Every error of the tree has an OpenAI error body."""

import json

import pytest

from kvtier import errors
from kvtier.errors import (
    CallerError,
    DeadlineError,
    ForbiddenError,
    KvtierError,
    LimitError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.openai.errors import (
    Fault,
    ModelUnknownError,
    ParameterError,
    error_reply,
    unknown,
    unsupported,
)

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KvtierError) and kind is not errors.FrameError
]


@pytest.mark.parametrize("kind", PLAIN)
def test_every_error_has_a_body_of_the_api(kind: type[KvtierError]) -> None:
    reply = error_reply(kind("what happened"))
    [(top, error)] = json.loads(reply.body).items()
    assert top == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert reply.status == kind.http_status
    assert reply.retryable == kind.retryable


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (CallerError("x"), 400, "invalid_request_error", None),
        (LimitError("x"), 413, "invalid_request_error", "request_too_large"),
        (UnauthenticatedError("x"), 401, "invalid_request_error", "invalid_api_key"),
        (ForbiddenError("x"), 403, "permission_error", None),
        (ModelUnknownError("x"), 404, "invalid_request_error", "model_not_found"),
        (OverloadedError("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnavailableError("x"), 503, "service_unavailable_error", None),
        (DeadlineError("x"), 504, "timeout_error", "timeout"),
        (KvtierError("x"), 500, "server_error", None),
    ],
)
def test_status_type_and_code_are_those_of_the_api(
    error: KvtierError, status: int, kind: str, code: str | None
) -> None:
    reply = error_reply(error)
    body = json.loads(reply.body)["error"]
    assert (reply.status, body["type"], body["code"]) == (status, kind, code)


def test_a_wrong_parameter_is_named_in_the_body() -> None:
    for error, code in (
        (unsupported("logit_bias"), "unsupported_parameter"),
        (unknown("logit_bias"), "unknown_parameter"),
        (ParameterError(Fault.VALUE, "logit_bias", "bad"), "invalid_value"),
    ):
        reply = error_reply(error)
        body = json.loads(reply.body)["error"]
        assert (reply.status, body["param"], body["code"]) == (400, "logit_bias", code)


def test_the_message_of_an_internal_error_is_not_shown() -> None:
    assert b"secret" not in error_reply(KvtierError("secret")).body


def test_long_and_broken_messages_do_not_break_the_body() -> None:
    for text in ("x" * 100_000, "\ud800", 'quote " and\nline'):
        body = error_reply(CallerError(text)).body
        assert len(body) < 5000
        assert json.loads(body)["error"]["message"]

"""What the endpoint adds to `kvtier.openai.errors`: refusals of HTTP itself, and the answers.

What must not live here: when to raise them.
"""

from typing import Final

from aiohttp import web

from kvtier.errors import CallerError, KvtierError
from kvtier.openai.errors import error_reply

RETRY_AFTER_S: Final = 1


class PathError(CallerError):
    """There is no such path."""

    http_status = 404


class MethodError(CallerError):
    """The path has other methods."""

    http_status = 405


class MediaTypeError(CallerError):
    """The body is not plain JSON."""

    http_status = 415


class HeadTimeoutError(CallerError):
    """The head of a request did not arrive in time."""

    http_status = 408


class BodyTimeoutError(CallerError):
    """The body did not arrive in time."""

    http_status = 408


def error_response(error: KvtierError) -> web.Response:
    """A whole answer that says `error`; where trying again may help, when to."""
    reply = error_reply(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if reply.retryable else {}
    if reply.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=reply.body, status=reply.status, headers=headers, content_type="application/json"
    )

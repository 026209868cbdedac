"""Answers under `/ui`: the page's files, and its feed as JSON.

The page is three files of our own, read once. Its headers let it load nothing from elsewhere, run
nothing that is not in its file, and be framed by nobody. What must not live here: what is shown.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final
from urllib.parse import parse_qsl

from kvtier.errors import CallerError
from kvtier_router.front import answers
from kvtier_router.ui.feed import Asked, Feed
from kvtier_router.web.values import Headers, Reply

_QUERY_CHARS_MAX: Final = 1_024
_TEXT_CHARS_MAX: Final = 200
_NUMBER_DIGITS_MAX: Final = 12
_PAGE_ROWS: Final = 100
_FILES: Final = {
    "": ("index.html", "text/html; charset=utf-8"),
    "app.js": ("app.js", "text/javascript; charset=utf-8"),
    "charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "style.css": ("style.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy of every answer. The last two make it an error to turn text into HTML."""
_GUARDS: Final[Headers] = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("x-frame-options", "DENY"),
)


class Pages:
    """See the module."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def answer(self, path: str, query: str) -> Reply:
        """The answer to a GET of `path`, which is what follows `/ui/`. CallerError for a query
        that cannot be read; NotFoundError for a request that is not kept."""
        if path in _FILES:
            name, kind = _FILES[path]
            headers = (("content-type", kind), ("cache-control", "no-cache"), *_GUARDS)
            return Reply(200, _file(name), headers)
        found = await self._values(path, _parsed(query))
        if found is None:
            return answers.not_found(f"/ui/{path}")
        return answers.json_reply(200, found, (("cache-control", "no-store"), *_GUARDS))

    async def _values(self, path: str, told: Mapping[str, str]) -> Mapping[str, object] | None:
        match path:
            case "feed":
                return self._feed.overview(_number(told, "point"), _number(told, "event"))
            case "fleet":
                return self._feed.fleet(_asked(told))
            case "requests":
                return await self._feed.requests(_asked(told))
            case "request":
                return self._feed.request(_number(told, "number"))
        return None


@cache
def _file(name: str) -> bytes:
    return (files("kvtier_router.ui") / "static" / name).read_bytes()


def _asked(told: Mapping[str, str]) -> Asked:
    return Asked(
        limit=_number(told, "limit") or _PAGE_ROWS,
        offset=_number(told, "offset"),
        before=_number(told, "before"),
        text=told.get("text", "")[:_TEXT_CHARS_MAX],
        only=told.get("only", ""),
    )


def _parsed(query: str) -> dict[str, str]:
    if len(query) > _QUERY_CHARS_MAX:
        raise CallerError("the query is too long")
    try:
        return dict(parse_qsl(query, max_num_fields=16))
    except ValueError as error:
        raise CallerError(f"query: {error}") from error


def _number(told: Mapping[str, str], name: str) -> int:
    text = told.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _NUMBER_DIGITS_MAX):
        raise CallerError(f"{name} is a number without sign")
    return int(text)

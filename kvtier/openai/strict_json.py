"""Request bodies as JSON, read strictly and within ceilings.

Refused: what is not UTF-8, NaN and infinities (also as `1e999`), lone surrogates, deep nesting,
numbers of thousands of digits, millions of values, anything but an object at the top. Of equal keys
the last counts, as in JSON parsers generally. What must not live here: what requests mean
(requests.py).
"""

import gc
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn, TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import (
    JSON_BRACKETS_COUNT_MAX,
    JSON_COMMAS_COUNT_MAX,
    JSON_DEPTH_MAX,
    REQUEST_BYTES_MAX,
)

JsonObject: TypeAlias = dict[str, object]
_Container: TypeAlias = dict[str, object] | list[object]

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_EXPONENT: Final = re.compile(rb"[eE]\+?[0-9]{3}")
_RUN: Final = b"0" * 200
_DIGITS: Final = bytes(48 if chr(byte).isdecimal() and byte < 128 else 32 for byte in range(256))
"""Makes each digit a 0 and all else blank."""
_LONG_BYTES: Final = 256 << 10


def parse_object(body: bytes, bytes_max: int = REQUEST_BYTES_MAX) -> JsonObject:
    """Return the JSON object in `body`; CallerError or LimitError for anything else. O(bytes)."""
    if len(body) > bytes_max:
        raise LimitError(f"request body of {len(body)} bytes exceeds {bytes_max}")
    brackets_count = body.count(b"{") + body.count(b"[")
    _require_few(brackets_count, body)
    with _without_collector(body):
        value = _parse(body)
    if not isinstance(value, dict):
        raise CallerError("request body is not a JSON object")
    if brackets_count > JSON_DEPTH_MAX:
        _require_depth(value)
    if _SURROGATE.search(body) is not None:
        _require_unicode(value)
    return value


def _parse(body: bytes) -> object:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise CallerError(f"request body is not UTF-8 at byte {error.start}") from None
    try:
        parsed: object = _decoder(body).decode(text)
    except json.JSONDecodeError as error:
        raise CallerError(f"request body is not JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise LimitError(f"request body is nested deeper than {JSON_DEPTH_MAX}") from None
    except ValueError:
        raise CallerError("request body has a number that is not finite or too long") from None
    return parsed


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text[:20])
    return value


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)


_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)
_FAST_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def _decoder(body: bytes) -> json.JSONDecoder:
    """One that asks about each float costs a microsecond for each: where there may be millions, it
    is taken only where one of them may be too large, by its exponent or its digits."""
    if len(body) <= _LONG_BYTES or _EXPONENT.search(body) or _RUN in body.translate(_DIGITS):
        return _DECODER
    return _FAST_DECODER


def _require_few(brackets_count: int, body: bytes) -> None:
    """LimitError for more values than a request may have. What is counted in texts as well is so
    much that they would be too long for any model."""
    if brackets_count > JSON_BRACKETS_COUNT_MAX or body.count(b",") > JSON_COMMAS_COUNT_MAX:
        raise LimitError(
            f"request body has more than {JSON_BRACKETS_COUNT_MAX} objects and arrays or "
            f"{JSON_COMMAS_COUNT_MAX} values"
        )


@contextmanager
def _without_collector(body: bytes) -> Iterator[None]:
    """Parsing makes no garbage, and looking for it at every few hundred new containers takes most
    of a long body's time."""
    if len(body) <= _LONG_BYTES or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _require_depth(value: _Container) -> None:
    level: list[_Container] = [value]
    for _ in range(JSON_DEPTH_MAX):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    raise LimitError(f"request body is nested deeper than {JSON_DEPTH_MAX}")


def _children(value: _Container) -> list[_Container]:
    """The containers directly inside a container."""
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    return [item for item in value if isinstance(item, dict | list)]


def _require_unicode(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CallerError("request body has a lone surrogate") from None

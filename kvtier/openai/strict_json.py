"""Request bodies as JSON, read strictly and within ceilings.

Refused: what is not UTF-8, NaN and infinities (also as `1e999`), lone surrogates, deep nesting,
numbers of thousands of digits, anything but an object at the top. Of equal keys the last counts, as
in JSON parsers generally. What must not live here: what requests mean (requests.py).
"""

import json
import math
import re
from typing import Final, NoReturn, TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import JSON_DEPTH_MAX, REQUEST_BYTES_MAX

JsonObject: TypeAlias = dict[str, object]
_Container: TypeAlias = dict[str, object] | list[object]

_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes, bytes_max: int = REQUEST_BYTES_MAX) -> JsonObject:
    """Return the JSON object in `body`; CallerError or LimitError for anything else. O(bytes)."""
    if len(body) > bytes_max:
        raise LimitError(f"request body of {len(body)} bytes exceeds {bytes_max}")
    value = _parse(body)
    if not isinstance(value, dict):
        raise CallerError("request body is not a JSON object")
    if body.count(b"{") + body.count(b"[") > JSON_DEPTH_MAX:
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
        parsed: object = _DECODER.decode(text)
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

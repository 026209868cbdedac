"""Canonical CBOR, writing only: what an outsider needs to recompute an engine's hashes.

RFC 8949, section 4.2.1: definite lengths, every head in its shortest form. What must not live here:
reading CBOR, floats, maps, tags: no engine hashes them.
"""

from typing import TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import ENCODING_DEPTH_MAX

Cbor: TypeAlias = "int | bytes | str | tuple[Cbor, ...] | None"

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in range(5))
_NULL = b"\xf6"
_ARGUMENT_MAX = 2**64 - 1


def canonical_cbor(value: Cbor) -> bytes:
    """Return the one canonical encoding of `value`.

    Raises CallerError for a type without one (a boolean included), for an integer outside -2^64 to
    2^64 - 1 and for a text with a lone surrogate, LimitError past ENCODING_DEPTH_MAX. O(bytes).
    """
    parts: list[bytes] = []
    _write(value, parts, depth=0)
    return b"".join(parts)


def _write(value: Cbor, parts: list[bytes], depth: int) -> None:
    if depth > ENCODING_DEPTH_MAX:
        raise LimitError(f"values are nested deeper than {ENCODING_DEPTH_MAX}")
    if value is None:
        parts.append(_NULL)
    elif type(value) is int:
        parts.append(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value))
    elif type(value) is bytes:
        parts += (_head(_BYTES, len(value)), value)
    elif isinstance(value, str):
        raw = _utf8(value)
        parts += (_head(_TEXT, len(raw)), raw)
    elif isinstance(value, tuple):
        parts.append(_head(_ARRAY, len(value)))
        for item in value:
            _write(item, parts, depth + 1)
    else:
        raise CallerError(f"a {type(value).__name__} has no canonical CBOR here")


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major | argument])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << (8 * size):
            return bytes([major | code]) + argument.to_bytes(size, "big")
    raise CallerError(f"an integer past {_ARGUMENT_MAX} has no CBOR head")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise CallerError("text holds a lone surrogate and has no UTF-8 form") from None

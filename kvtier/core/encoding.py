"""Canonical encoding of typed, tagged, length-prefixed fields: identity digests are taken of it.

    message := domain length u8 | domain ASCII | record
    record  := field count u16 | field *            fields in strictly ascending order of tag
    field   := field tag u16 | value
    value   := type tag u8 | length u32 | content   all integers little-endian

    | type | tag | Python              | content                                           |
    |------|-----|---------------------|---------------------------------------------------|
    | absent  | 0 | `None`           | empty                                             |
    | text    | 1 | `str`            | UTF-8, not normalised; lone surrogates are refused |
    | bytes   | 2 | `bytes`          | as they are                                       |
    | u64     | 3 | `int` >= 0       | 8 bytes                                           |
    | i64     | 4 | `int` < 0        | 8 bytes, two's complement, always negative        |
    | range   | 5 | `range` (step 1, not empty) | start u64, stop u64                    |
    | symbol  | 6 | `Symbol`         | UTF-8 of an enum's stable name                    |
    | list    | 7 | `tuple`          | value *                                           |
    | record  | 8 | `dict[int, Value]` | record                                          |

Every value has exactly one encoding and every encoding one value: type tag and length stand before
the content, so that no content can be read as the end of one field and the start of the next,
absent differs from empty, and text differs from bytes or a symbol of the same letters. `decode`
refuses everything that `encode` would not have written.

What must not live here: the meaning of fields (identity.py, model_card.py, scopes.py) and other
people's encodings (cbor.py).
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvtier.errors import CallerError, LimitError
from kvtier.limits import ENCODING_BYTES_MAX, ENCODING_DEPTH_MAX

U64_MAX: Final = 2**64 - 1
I64_MIN: Final = -(2**63)
FIELD_TAG_MAX: Final = 2**16 - 1

_ABSENT, _TEXT, _BYTES, _U64, _I64, _RANGE, _SYMBOL, _LIST, _RECORD = range(9)
_COUNT = struct.Struct("<H")
_VALUE_HEAD = struct.Struct("<BI")
_FIELD_TAG = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Symbol:
    """Member of an enum by its stable name; never equal to a text of the same letters."""

    name: str


Value: TypeAlias = (
    "str | bytes | int | range | Symbol | tuple[Value, ...] | Mapping[int, Value] | None"
)


def encode(domain: str, fields: Mapping[int, Value]) -> bytes:
    """Return the one encoding of `fields` (field tag to value) under `domain`.

    Tags are 1 to 65,535; the mapping's own order does not matter. The domain keeps messages of
    different purposes apart: two messages are equal bytes only if domain and fields are equal.
    Raises CallerError for a type or value that has no encoding, LimitError past ENCODING_BYTES_MAX
    or ENCODING_DEPTH_MAX. O(bytes).
    """
    if not isinstance(fields, Mapping):
        raise CallerError(f"fields are a {type(fields).__name__}, not a mapping")
    message = _domain_prefix(domain) + _record(fields, depth=0)
    if len(message) > ENCODING_BYTES_MAX:
        raise LimitError(f"message of {len(message)} bytes exceeds {ENCODING_BYTES_MAX}")
    return message


def digest(domain: str, fields: Mapping[int, Value]) -> bytes:
    """Return the 32-byte SHA-256 of `encode(domain, fields)`."""
    return hashlib.sha256(encode(domain, fields)).digest()


def decode(domain: str, message: bytes) -> dict[int, Value]:
    """Return the fields of a message of `domain`: `decode(d, encode(d, x)) == x`.

    Raises CallerError for anything that `encode` does not produce: another domain, a truncation,
    trailing bytes, tags out of order, lengths or contents that are not the canonical ones.
    """
    if type(message) is not bytes:
        raise CallerError(f"message is a {type(message).__name__}, not bytes")
    if len(message) > ENCODING_BYTES_MAX:
        raise LimitError(f"message of {len(message)} bytes exceeds {ENCODING_BYTES_MAX}")
    prefix = _domain_prefix(domain)
    if message[: len(prefix)] != prefix:
        raise CallerError(f"message is not of the domain {domain!r}")
    reader = _Reader(message[len(prefix) :])
    fields = reader.record(depth=0)
    reader.expect_end()
    return fields


def _domain_prefix(domain: str) -> bytes:
    if not isinstance(domain, str) or not domain.isascii() or not 1 <= len(domain) <= 255:
        raise CallerError(f"domain {domain!r} is not 1 to 255 ASCII characters")
    return bytes([len(domain)]) + domain.encode("ascii")


def _record(fields: Mapping[int, Value], depth: int) -> bytes:
    if len(fields) > FIELD_TAG_MAX:
        raise LimitError(f"{len(fields)} fields exceed {FIELD_TAG_MAX}")
    for tag in fields:
        if type(tag) is not int or not 1 <= tag <= FIELD_TAG_MAX:
            raise CallerError(f"field tag {tag!r} is not an integer of 1 to {FIELD_TAG_MAX}")
    parts = [_COUNT.pack(len(fields))]
    for tag in sorted(fields):
        parts.append(_FIELD_TAG.pack(tag))
        parts.append(_value(fields[tag], depth))
    return b"".join(parts)


def _value(value: Value, depth: int) -> bytes:
    if depth > ENCODING_DEPTH_MAX:
        raise LimitError(f"values are nested deeper than {ENCODING_DEPTH_MAX}")
    type_tag, content = _typed_content(value, depth)
    if len(content) > ENCODING_BYTES_MAX:
        raise LimitError(f"value of {len(content)} bytes exceeds {ENCODING_BYTES_MAX}")
    return _VALUE_HEAD.pack(type_tag, len(content)) + content


def _typed_content(value: Value, depth: int) -> tuple[int, bytes]:
    match value:
        case None:
            return _ABSENT, b""
        case bool():  # an int to Python, ambiguous to a reader
            raise CallerError("a boolean has no encoding: use a Symbol")
        case Symbol():
            return _SYMBOL, _utf8(value.name)
        case str():
            return _TEXT, _utf8(value)
        case bytes():
            return _BYTES, value
        case int():
            return _integer(value)
        case range():
            return _RANGE, _span(value)
        case tuple():
            return _LIST, b"".join(_value(item, depth + 1) for item in value)
        case Mapping():
            return _RECORD, _record(value, depth + 1)
    raise CallerError(f"a {type(value).__name__} has no encoding")


def _integer(value: int) -> tuple[int, bytes]:
    if not I64_MIN <= value <= U64_MAX:
        raise CallerError(f"integer {value} is outside {I64_MIN} to {U64_MAX}")
    if value < 0:
        return _I64, value.to_bytes(8, "little", signed=True)
    return _U64, value.to_bytes(8, "little")


def _span(value: range) -> bytes:
    # Python holds all empty ranges equal, so an empty one would have many encodings.
    if value.step != 1 or not 0 <= value.start < value.stop <= U64_MAX:
        raise CallerError(f"{value!r} is not a non-empty ascending range of u64")
    return value.start.to_bytes(8, "little") + value.stop.to_bytes(8, "little")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise CallerError("text holds a lone surrogate and has no UTF-8 form") from None


class _Reader:
    """Walks one record or list; every read checks what is left."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def record(self, depth: int) -> dict[int, Value]:
        (count,) = _COUNT.unpack(self._take(_COUNT.size))
        fields: dict[int, Value] = {}
        last_tag = 0
        for _ in range(count):
            (tag,) = _FIELD_TAG.unpack(self._take(_FIELD_TAG.size))
            if tag <= last_tag:
                raise CallerError(f"field tag {tag} stands after {last_tag}")
            fields[tag] = self._value(depth)
            last_tag = tag
        return fields

    def expect_end(self) -> None:
        if self._at != len(self._data):
            raise CallerError(f"{len(self._data) - self._at} bytes follow the encoding")

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) != count:
            raise CallerError("the encoding is truncated")
        self._at += count
        return piece

    def _value(self, depth: int) -> Value:
        if depth > ENCODING_DEPTH_MAX:
            raise LimitError(f"values are nested deeper than {ENCODING_DEPTH_MAX}")
        type_tag, length = _VALUE_HEAD.unpack(self._take(_VALUE_HEAD.size))
        content = self._take(length)
        if type_tag == _LIST:
            return _Reader(content)._items(depth + 1)
        if type_tag == _RECORD:
            inner = _Reader(content)
            fields = inner.record(depth + 1)
            inner.expect_end()
            return fields
        return _scalar(type_tag, content)

    def _items(self, depth: int) -> tuple[Value, ...]:
        items: list[Value] = []
        while self._at < len(self._data):
            items.append(self._value(depth))
        return tuple(items)


def _scalar(type_tag: int, content: bytes) -> Value:
    if type_tag == _TEXT:
        return _text(content)
    if type_tag == _BYTES:
        return content
    if type_tag == _SYMBOL:
        return Symbol(_text(content))
    if type_tag == _ABSENT and not content:
        return None
    if type_tag == _U64 and len(content) == 8:
        return int.from_bytes(content, "little")
    if type_tag == _I64 and len(content) == 8 and content[7] & 0x80:
        return int.from_bytes(content, "little", signed=True)
    if type_tag == _RANGE and len(content) == 16:
        start, stop = int.from_bytes(content[:8], "little"), int.from_bytes(content[8:], "little")
        if start < stop:
            return range(start, stop)
    raise CallerError(f"type tag {type_tag} with {len(content)} bytes is not a canonical value")


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise CallerError("text is not UTF-8") from None

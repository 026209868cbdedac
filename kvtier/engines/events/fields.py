"""Typed fields of one event, whatever shape it came in. Each raises UnreadableError.

What must not live here: the names of an engine's fields.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np

from kvtier.core.checks import require_text
from kvtier.core.encoding import U64_MAX
from kvtier.core.engine_events import EngineHash, EventFault, U32Array
from kvtier.engines.events.payload import Plain, UnreadableError
from kvtier.errors import CallerError
from kvtier.limits import (
    BLOCK_TOKENS_MAX,
    ENGINE_EVENT_BLOCKS_MAX,
    ENGINE_HASH_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    TOKEN_ID_MAX,
)

Fields = Mapping[str, Plain]
"""A field that is not there is None, as it is where it has its default."""

NO_TOKENS: Final[U32Array] = np.empty(0, np.uint32)
_I64_MIN: Final = -(2**63)


def bad_field() -> UnreadableError:
    return UnreadableError(EventFault.FIELD)


def as_list(value: Plain) -> list[Plain]:
    if not isinstance(value, list):
        raise bad_field()
    return value


def as_text(value: Plain) -> str | None:
    """A text without surrogates that is not longer than a name; None stays None."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise bad_field()
    try:
        require_text("field", value)
    except CallerError:
        raise bad_field() from None
    return value


def as_integer(value: Plain, most: int) -> int:
    """0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise bad_field()
    return value


def as_block_tokens(value: Plain) -> int:
    """Tokens of a block; 0 is what placeholders have."""
    return as_integer(value, BLOCK_TOKENS_MAX)


def as_group(value: Plain) -> int:
    return 0 if value is None else as_integer(value, TOKEN_ID_MAX)


def as_hash(value: Plain) -> EngineHash:
    """An integer of 64 bits, signed or not, a digest, or a digest in hex."""
    match value:
        case bool():
            raise bad_field()
        case int() if 0 <= value <= U64_MAX:
            return EngineHash(value.to_bytes(8, "big"))
        case int() if _I64_MIN <= value < 0:
            return EngineHash(value.to_bytes(8, "big", signed=True))
        case bytes() if 8 <= len(value) <= ENGINE_HASH_BYTES_MAX:
            return EngineHash(value)
        case str() if 16 <= len(value) <= 2 * ENGINE_HASH_BYTES_MAX:
            try:
                return EngineHash(bytes.fromhex(value))
            except ValueError:
                raise bad_field() from None
    raise bad_field()


def as_hashes(value: Plain) -> tuple[EngineHash, ...]:
    listed = as_list(value)
    if len(listed) > ENGINE_EVENT_BLOCKS_MAX:
        raise UnreadableError(EventFault.TOO_LARGE)
    return tuple(map(as_hash, listed))


def as_parent(value: Plain) -> EngineHash | None:
    return None if value is None else as_hash(value)


def as_tokens(value: Plain) -> U32Array:
    """Token ids. Of pairs of neighbours, which EAGLE makes of them, the first ones."""
    listed: Sequence[Plain] = as_list(value)
    if len(listed) > PROMPT_TOKENS_MAX:
        raise UnreadableError(EventFault.TOO_LARGE)
    if listed and isinstance(listed[0], list):
        listed = [_first(pair) for pair in listed]
    try:
        packed = array("I", cast("list[int]", listed))  # raises for whatever is none
    except (TypeError, OverflowError):
        raise bad_field() from None
    return np.frombuffer(packed, np.uint32) if packed else NO_TOKENS


def _first(pair: Plain) -> Plain:
    match pair:
        case [int(first), int()]:
            return first
    raise bad_field()

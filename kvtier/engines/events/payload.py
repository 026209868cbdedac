"""msgpack and JSON to plain values; the only importer of msgpack. Bounded by the payload's length.

What must not live here: what the values mean.
"""

import json
from typing import TypeAlias

import msgpack

from kvtier.core.engine_events import EventFault
from kvtier.limits import ENGINE_PAYLOAD_BYTES_MAX

Plain: TypeAlias = object
"""None, bool, int, float, str, bytes, list, dict, or an extension that nobody here knows."""


class UnreadableError(ValueError):
    """Some bytes, or a value in them, is not what it should be. Never leaves this package."""

    def __init__(self, fault: EventFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


def from_msgpack(payload: bytes) -> Plain:
    """One value. Text that is no UTF-8 is kept with surrogates, to be refused where it matters."""
    _check_size(payload)
    try:
        value: Plain = msgpack.unpackb(
            payload, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise UnreadableError(EventFault.MALFORMED) from None
    return value


def from_json(payload: bytes) -> Plain:
    """One value."""
    _check_size(payload)
    try:
        value: Plain = json.loads(payload)
    except (ValueError, RecursionError):
        raise UnreadableError(EventFault.MALFORMED) from None
    return value


def _check_size(payload: bytes) -> None:
    if len(payload) > ENGINE_PAYLOAD_BYTES_MAX:
        raise UnreadableError(EventFault.TOO_LARGE)

"""Checks of arguments that several core modules share; each returns nothing or raises CallerError.

What must not live here: checks of one module's own rules.
"""

from kvtier.errors import CallerError, LimitError
from kvtier.limits import NAME_BYTES_MAX

DIGEST_BYTES = 32


def require_name(what: str, value: str) -> None:
    """Refuse what is not a non-empty text of at most NAME_BYTES_MAX bytes without surrogates."""
    require_text(what, value)
    if not value:
        raise CallerError(f"{what} is empty")


def require_text(what: str, value: str) -> None:
    """Refuse what is not a text of at most NAME_BYTES_MAX bytes without surrogates."""
    if not isinstance(value, str):
        raise CallerError(f"{what} is a {type(value).__name__}, not a text")
    try:
        length = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise CallerError(f"{what} holds a lone surrogate") from None
    if length > NAME_BYTES_MAX:
        raise LimitError(f"{what} of {length} bytes exceeds {NAME_BYTES_MAX}")


def require_digest(what: str, value: bytes) -> None:
    """Refuse what is not 32 bytes."""
    if type(value) is not bytes:
        raise CallerError(f"{what} is a {type(value).__name__}, not bytes")
    if len(value) != DIGEST_BYTES:
        raise CallerError(f"{what} has {len(value)} bytes, not {DIGEST_BYTES}")


def require_integer(what: str, value: int, least: int, most: int) -> None:
    """Refuse what is not an integer (a boolean is not) of `least` to `most`, both included."""
    if type(value) is not int:
        raise CallerError(f"{what} is a {type(value).__name__}, not an integer")
    if value < least:
        raise CallerError(f"{what} is {value}, less than {least}")
    if value > most:
        raise LimitError(f"{what} is {value}, more than {most}")

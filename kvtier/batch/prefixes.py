"""Prefixes of prompts as short keys: what begins alike lies together when keys are sorted.

A prompt's text is cut at fixed places (every 128 bytes at first, further apart later). The key has
4 bytes for each place: a checksum of all text before it. So keys in order are a walk through the
tree of prefixes, with 80 times less to sort than texts. Equal checksums of different texts cost
order and never a result. Pure. What must not live here: reading, sorting, requests' fields.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_STEP: Final = 128
_GROWTH: Final = 8
"""A piece is no shorter than an eighth of what is before it."""
_TEXT_BYTES_MAX: Final = 4 << 20
"""What lies behind is not looked at."""
_PLACE_BYTES: Final = 4


def _places() -> Iterator[int]:
    end = 0
    while end < _TEXT_BYTES_MAX:
        end += max(_STEP, end // _GROWTH // _STEP * _STEP)
        yield end


PLACES: Final = tuple(_places())
"""Where texts are cut: bytes from the beginning, ascending."""
_PIECES: Final = tuple(pairwise((0, *PLACES)))


def key_of(text: bytes) -> bytes:
    """The key of a text; 4 bytes for each whole piece, empty for a text shorter than one. O(n)."""
    parts, value = bytearray(), 0
    for start, end in _PIECES:
        if end > len(text):
            break
        value = zlib.crc32(text[start:end], value)
        parts += value.to_bytes(_PLACE_BYTES, "big")
    return bytes(parts)


def depth_of(key: bytes) -> int:
    """Bytes of text that a key stands for."""
    return PLACES[len(key) // _PLACE_BYTES - 1] if key else 0


def shared_bytes(one: bytes, other: bytes) -> int:
    """Bytes of text at the beginning that two keys have in common."""
    most = min(len(one), len(other))
    at = next((at for at in range(most) if one[at] != other[at]), most)
    return depth_of(one[: at // _PLACE_BYTES * _PLACE_BYTES])


def pieces_of(key: bytes) -> Iterator[tuple[int, int]]:
    """(name, bytes) of each piece, shallowest first; equal names: equal text up to its end."""
    for at in range(0, len(key), _PLACE_BYTES):
        level = at // _PLACE_BYTES
        start, end = _PIECES[level]
        yield level << 32 | int.from_bytes(key[at : at + _PLACE_BYTES], "big"), end - start


@dataclass(slots=True)
class Walk(Generic[T]):
    """Who first brings each prefix, in a walk through prompts in order of their keys. Mutable.

    A prompt should wait for the first that has the prefix which it shares: sent side by side, both
    would be computed. The stack of a walk through a tree; amortised O(1) a prompt.
    """

    _stack: list[tuple[int, T]] = field(default_factory=list)
    """(depth, who brought the text up to there), deeper ones later."""

    def enter(self, shared: int, depth: int, who: T) -> T | None:
        """Take the next prompt, which shares `shared` bytes with the one before it.

        Returns who brings the last of those bytes first; None where nothing is shared.
        """
        above: tuple[int, T] | None = None
        while self._stack and self._stack[-1][0] > shared:
            above = self._stack.pop()
        covered = self._stack[-1][0] if self._stack else 0
        if above is not None and covered < shared:
            self._stack.append((shared, above[1]))
        first = self._stack[-1][1] if self._stack else None
        if depth > shared:
            self._stack.append((depth, who))
        return first

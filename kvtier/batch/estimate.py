"""What a cache would have found of prompts that come in some order: estimates, by their texts.

A least recently used cache of so many bytes of text, by pieces of prefixes (`prefixes.py`); memory
is bounded by its capacity. What must not live here: what was measured.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.batch.prefixes import pieces_of


@dataclass(slots=True)
class TextCache:
    """One cache and what it has found so far. Mutable."""

    bytes_max: int
    text_bytes: int = 0
    """Of all prompts."""
    found_bytes: int = 0
    """Of those, what was there as an unbroken prefix."""
    _held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _held_bytes: int = 0

    def take(self, key: bytes, text_bytes: int) -> None:
        """Look a prompt up, then keep it; what is least recently used goes, deepest first."""
        self.text_bytes += text_bytes
        pieces = list(pieces_of(key))
        for name, size in pieces:
            if name not in self._held:
                break
            self.found_bytes += size
        for name, size in reversed(pieces):
            if name not in self._held:
                self._held_bytes += size
                self._held[name] = size
            self._held.move_to_end(name)
        while self._held_bytes > self.bytes_max:
            _, size = self._held.popitem(last=False)
            self._held_bytes -= size


@dataclass(slots=True)
class Engines:
    """Engines that each have a cache of their own, and requests dealt out in turn. Mutable."""

    caches: Sequence[TextCache]
    _next: int = 0

    def take(self, key: bytes, text_bytes: int) -> None:
        """The next engine's turn."""
        self.caches[self._next].take(key, text_bytes)
        self._next = (self._next + 1) % len(self.caches)

    @property
    def found_bytes(self) -> int:
        """Of all of them."""
        return sum(cache.found_bytes for cache in self.caches)

"""Prefill halves of split requests: computed, and answered only once their blocks are below.

Another worker is about to load them, so an answer says how much of the prompt's beginning the tiers
below are known to have. A wait ends when nothing of it is being written any more, when the store is
known not to take it, or at its deadline. What must not live here: the order of writes (`saving`),
clocks, HTTP.
"""

from dataclasses import dataclass

from kvtier_services.worker.l2.saving import SaveBook, block_name
from kvtier_services.worker.requests import Stored, TokenDelta
from kvtier_services.worker.sequences import Request


@dataclass(slots=True)
class _Settling:
    names: list[tuple[bytes, ...]]
    """Of each whole block of the prompt, head first: what it is called in each layer group."""
    delta: TokenDelta
    ended_at: float
    until: float


class Prefills:
    """Whose blocks are awaited. Not thread-safe; the engine's thread owns it."""

    def __init__(
        self, saves: SaveBook, groups_count: int, block_tokens: int, wait_s: float
    ) -> None:
        """`wait_s`: how long an answer waits, at most, for blocks that are being written."""
        self._saves = saves
        self._groups = range(groups_count)
        self._block_tokens = block_tokens
        self._wait_s = wait_s
        self._computing: set[int] = set()
        self._settling: dict[int, _Settling] = {}

    @property
    def is_busy(self) -> bool:
        """Whether writes must not wait for company."""
        return bool(self._computing or self._settling)

    def begin(self, request: Request) -> None:
        """A prefill half was submitted."""
        self._computing.add(request.number)

    def computed(self, request: Request, delta: TokenDelta, now: float) -> None:
        """Its prompt is computed; `delta` is what it will be answered with."""
        self._computing.discard(request.number)
        keys = request.chain.keys[: request.prompt_count // self._block_tokens]
        names = [tuple(block_name(group, key) for group in self._groups) for key in keys]
        self._settling[request.number] = _Settling(names, delta, now, now + self._wait_s)

    def cancel(self, number: int) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._computing.discard(number)
        self._settling.pop(number, None)

    def deadlines(self) -> list[float]:
        """When `take` has something at the latest."""
        return [one.until for one in self._settling.values()]

    def take(self, now: float) -> list[tuple[int, TokenDelta]]:
        """Those whose wait is over, by number. O(blocks awaited). Mutates."""
        over = [n for n, one in self._settling.items() if self._is_over(one, now)]
        return [(number, self._told(self._settling.pop(number), now)) for number in over]

    # ---- parts

    def _is_over(self, one: _Settling, now: float) -> bool:
        if now >= one.until or self._saves.is_paused(now):
            return True
        pending = self._saves.is_pending
        return not any(pending(name) for names in reversed(one.names) for name in names)

    def _told(self, one: _Settling, now: float) -> TokenDelta:
        blocks = 0
        for names in one.names:
            if not all(self._saves.knows(name) for name in names):
                break
            blocks += 1
        stored = Stored(blocks * self._block_tokens, now - one.ended_at)
        delta = one.delta
        return TokenDelta(delta.tokens, delta.finish, delta.cached, stored)

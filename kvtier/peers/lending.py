"""What the ends of a channel ask of the store whose blocks they move.

What must not live here: sockets, NIXL, and how the store does it.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.core.frame import FrameName
from kvtier.ports import BlockOwner, GetStatus, PutResult


@dataclass(frozen=True, slots=True)
class Lent:
    """Blocks that are being sent. `give_back` must be told the end of it."""

    statuses: Sequence[GetStatus]
    headers: bytes
    """128 bytes a hit."""
    payloads: Sequence[memoryview]
    """One a hit."""
    back: Callable[[], Coroutine[Any, Any, bytes]]
    """For the loop: lets go, and says 1 for each hit that was still itself."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for blocks that are coming."""

    views: Sequence[memoryview | None]
    """One a block; None: its bytes are thrown away."""
    settle: Callable[[Sequence[int], Sequence[int]], Coroutine[Any, Any, list[PutResult]]]
    """For the loop: publishes, by the checksums that were seen and declared."""
    abandon: Callable[[], Coroutine[Any, Any, None]]
    """For the loop: instead of `settle`, when nobody writes any more."""


class BulkStore(Protocol):
    """What the server asks of the store; all on the event loop."""

    async def lend(
        self, names: Sequence[FrameName], payload_bytes: int | None, deadline_s: float
    ) -> Lent: ...

    async def make_room(
        self, names: Sequence[FrameName], lengths: Sequence[int], owner: BlockOwner
    ) -> Room: ...

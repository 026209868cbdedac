"""When a lower tier may be called, and how many bytes may be under way.

What must not live here: calls.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

from kvtier.core.health import Breaker, BreakerPolicy, BreakerState, Outcome, Permit
from kvtier.core.planner import Verdict


class TierGuard:
    """The two breakers of one lower tier, and the verdict that the planner gets of them.

    Reads: open means DOWN until a probe has passed. Writes: open means READ_ONLY, and once it has
    cooled the next write is the probe.
    """

    def __init__(self, policy: BreakerPolicy) -> None:
        self._reads = Breaker(policy)
        self._writes = Breaker(policy)

    @property
    def tripped_count(self) -> int:
        return self._reads.tripped_count + self._writes.tripped_count

    def verdict(self, now: float) -> Verdict:
        """What the tier is good for."""
        if self._reads.state(now) is not BreakerState.CLOSED:
            return Verdict.DOWN
        if self._writes.state(now) is BreakerState.OPEN:
            return Verdict.READ_ONLY
        return Verdict.OPEN

    def is_down(self, now: float) -> bool:
        """Whether the tier is not to be called but for probes."""
        return self._reads.state(now) is not BreakerState.CLOSED

    def is_probe_due(self, now: float) -> bool:
        """Whether a read should be tried to see whether the tier is back."""
        return self._reads.state(now) is BreakerState.HALF_OPEN

    def read(self, now: float) -> Permit | None:
        """Leave to read; None: do not."""
        return self._reads.acquire(now)

    def write(self, now: float) -> Permit | None:
        """Leave to write; None: do not."""
        return self._writes.acquire(now)

    def read_ended(self, permit: Permit, outcome: Outcome, elapsed_s: float, now: float) -> None:
        self._reads.report(permit, outcome, elapsed_s, now)

    def write_ended(self, permit: Permit, outcome: Outcome, elapsed_s: float, now: float) -> None:
        self._writes.report(permit, outcome, elapsed_s, now)


class ByteGate:
    """Bytes that may be under way at once: first come, first served, cancel-safe.

    What is larger than all of it waits until nothing else is under way.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @contextlib.asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """Hold so many bytes while entered."""
        size = min(size_bytes, self._bytes_max)
        if self._waiting or self.used_bytes + size > self._bytes_max:
            await self._turn(size)
        else:
            self.used_bytes += size
        try:
            yield
        finally:
            self._give_back(size)

    async def _turn(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give_back(size)  # it was our turn already
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove((size, turn))
                self._wake()
            raise

    def _give_back(self, size: int) -> None:
        self.used_bytes -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if self.used_bytes + size > self._bytes_max:
                return
            self._waiting.popleft()
            if not turn.done():
                self.used_bytes += size
                turn.set_result(None)


def grouped(sizes: Sequence[int], blocks_max: int, bytes_max: int) -> list[range]:
    """Positions of the sizes in runs of at most so many blocks and, but for one, bytes."""
    runs: list[range] = []
    start = run_bytes = 0
    for i, size in enumerate(sizes):
        if i > start and (i - start >= blocks_max or run_bytes + size > bytes_max):
            runs.append(range(start, i))
            start, run_bytes = i, 0
        run_bytes += size
    if len(sizes) > start:
        runs.append(range(start, len(sizes)))
    return runs

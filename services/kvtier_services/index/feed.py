"""Fan-out of changes to followers (index replicas) and watchers, bounded per receiver.

A change is serialized once, whoever receives it. A receiver that cannot keep up is cut off and told
so, instead of growing a queue: it takes a new snapshot, which is cheaper than endless memory.

What must not live here: what a change means (state.py), gRPC (service.py).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kvtier.errors import OverloadedError, UnavailableError


class Receiver:
    """One follower or watcher: a bounded queue of serialized messages."""

    def __init__(self, queued_bytes_max: int) -> None:
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._queued_bytes_max = queued_bytes_max
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.lagged = False
        self.closed = False
        self._finished = False
        self._stopped: UnavailableError | None = None

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def offer(self, message: bytes) -> None:
        """Queue a change; over the bound the receiver is cut off and its queue dropped."""
        if self.lagged or self.closed:
            return
        if self._queued_bytes + len(message) > self._queued_bytes_max and self._queue:
            self.lagged = True
            self._queue.clear()
            self._queued_bytes = 0
        else:
            self._queue.append(message)
            self._queued_bytes += len(message)
            self._drained.clear()
        self._wake.set()

    async def room(self) -> None:
        """Wait until half of the bound is free (for what is sent at its own pace)."""
        while self._queued_bytes > self._queued_bytes_max // 2 and not self.closed:
            self._drained.clear()
            await self._drained.wait()

    def finish(self) -> None:
        """End after what is queued now."""
        self._finished = True
        self._wake.set()

    def stop(self, reason: UnavailableError) -> None:
        """End at once, and say why."""
        self._stopped = reason
        self._queue.clear()
        self._queued_bytes = 0
        self._wake.set()

    def close(self) -> None:
        """End at once."""
        self.closed = True
        self._wake.set()
        self._drained.set()

    async def messages(self, idle_s: float) -> AsyncIterator[bytes | None]:
        """Every queued message in order; None whenever nothing came for `idle_s`.

        Ends when closed; OverloadedError when this receiver was cut off, UnavailableError when it
        was stopped.
        """
        while not self.closed:
            while self._queue:
                message = self._queue.popleft()
                self._queued_bytes -= len(message)
                if self._queued_bytes <= self._queued_bytes_max // 2:
                    self._drained.set()
                yield message
            if self._stopped is not None:
                raise self._stopped
            if self.lagged:
                raise OverloadedError("this receiver fell too far behind: take a new snapshot")
            if self._finished:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(idle_s):
                    await self._wake.wait()
            except TimeoutError:
                yield None

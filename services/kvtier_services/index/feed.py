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
        async for group in self.groups(idle_s, 0.0, 0):
            yield group[0] if group else None

    async def groups(
        self, idle_s: float, gather_s: float, bytes_max: int
    ) -> AsyncIterator[list[bytes]]:
        """As `messages`, with what is queued in groups of at most `bytes_max`, or of one message;
        empty whenever nothing came for `idle_s`.

        The first after a pause is given at once; what comes within `gather_s` of it waits for the
        end of that time, so that many changes wake their receiver once.
        """
        while not self.closed:
            while self._queue:
                yield self._take(bytes_max)
                if gather_s and not self._queue:
                    await asyncio.sleep(gather_s)
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
                yield []

    def _take(self, bytes_max: int) -> list[bytes]:
        """The next message, with those after it that fit."""
        group: list[bytes] = []
        size = 0
        while self._queue and (not group or size + len(self._queue[0]) <= bytes_max):
            group.append(self._queue.popleft())
            size += len(group[-1])
        self._queued_bytes -= size
        if self._queued_bytes <= self._queued_bytes_max // 2:
            self._drained.set()
        return group

"""How a batch is read: looked up in memory, shared among the reader threads, verified there.

What must not live here: what a result means for the ledger (the tier), writing.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvtier.errors import FrameError, OverloadedError
from kvtier.tiers.nvme.lanes import AbandonedError, Call, Lane
from kvtier.tiers.nvme.segments import Found, Reader, ShortBufferError, Task

_AHEAD_BYTES: Final = 16 << 20
"""How much of a batch the kernel is asked to fetch before it is needed."""
_SHARE_BYTES: Final = 512 << 10
"""Less than this is not worth a second thread."""


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """The disk refused; the error number says how."""

    error: int


Outcome: TypeAlias = Found | FrameError | ReadFailure | ShortBufferError
"""What became of one task that was done in time."""


@dataclass(slots=True)
class Batch:
    """Tasks that threads take one by one, and their outcomes; None: not done."""

    tasks: Sequence[Task]
    call: Call
    outcomes: list[Outcome | None] = field(init=False)
    _next: "itertools.count[int]" = field(default_factory=itertools.count)
    _asked: int = 0

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.tasks)

    def work(self, reader: Reader) -> None:
        """In a thread: do tasks until none is left or the call is over."""
        while (position := next(self._next)) < len(self.tasks):
            try:
                outcome = self._do(position, reader)
            except AbandonedError:
                return
            self.outcomes[position] = outcome

    def _do(self, position: int, reader: Reader) -> Outcome:
        task = self.tasks[position]
        try:
            return reader.read_frame(task, self.call, lambda: self._fetch_ahead(position))
        except (FrameError, ShortBufferError) as error:
            return error
        except OSError as error:
            return ReadFailure(error.errno or 0)

    def _fetch_ahead(self, position: int) -> None:
        """Ask for this task's bytes and those of the next ones: the disk is better busy than idle.
        Two threads may ask for the same, which the kernel does not mind."""
        asked_bytes = 0
        for at in range(position, len(self.tasks)):
            task = self.tasks[at]
            asked_bytes += task.place.frame_bytes
            if asked_bytes > _AHEAD_BYTES and at > position:
                return
            if at >= self._asked:
                task.segment.fetch_ahead(task.place.offset, task.place.frame_bytes)
                self._asked = at + 1


class ReaderLane:
    """The reader threads, each with a reader of its own."""

    def __init__(self, threads_count: int) -> None:
        self._lane = Lane("kvtier-nvme-read", threads_count)
        self._readers = [Reader() for _ in range(threads_count)]

    async def read(self, tasks: Sequence[Task], timeout_s: float) -> list[Outcome | None]:
        """Do what can be done in time. Afterwards no thread touches the callers' memory.

        Segments are held until the threads are done with them. Raises OverloadedError.
        """
        batch = Batch(tasks, Call())
        size = sum(task.place.frame_bytes for task in tasks)
        shares = max(1, min(self._lane.threads_count, len(tasks), size // _SHARE_BYTES))
        held = {task.segment for task in tasks}
        for segment in held:
            segment.hold()
        left = shares
        futures: set[asyncio.Future[None]] = set()

        def done(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                for segment in held:
                    segment.let_go()

        try:
            for _ in range(shares):
                future = self._lane.submit(lambda: self._work(batch))
                future.add_done_callback(done)
                futures.add(future)
        except OverloadedError:
            for _ in range(shares - len(futures)):
                done(None)
            if not futures:
                raise
        try:
            await asyncio.wait(futures, timeout=timeout_s)
        finally:
            await batch.call.abandon()
        return list(batch.outcomes)

    async def close(self, timeout_s: float) -> bool:
        """See `Lane.close`."""
        return await self._lane.close(timeout_s)

    def _work(self, batch: Batch) -> None:
        reader = self._readers.pop()
        try:
            batch.work(reader)
        finally:
            self._readers.append(reader)

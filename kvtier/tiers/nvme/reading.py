"""How a batch is read: looked up in memory, shared among the reader threads, verified there.

What must not live here: what a result means for the ledger (the tier), writing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from kvtier.errors import FrameError, OverloadedError
from kvtier.tiers.nvme.lanes import AbandonedError, Call, Lane
from kvtier.tiers.nvme.segments import Found, Reader, ShortBufferError, Task

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
    """Tasks by what lies where, their outcomes (None: not done), and the shares of the threads.

    A share is a stretch of tasks in the order in which they lie on the disk: read from one end to
    the other the kernel reads ahead by itself, in large pages, and gives them back faster later.
    """

    tasks: Sequence[Task]
    call: Call
    shares: list[Sequence[int]]
    outcomes: list[Outcome | None] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.tasks)

    def work(self, share: Sequence[int], reader: Reader) -> None:
        """In a thread: do a share, or as much of it as until the call is over."""
        for position in share:
            try:
                self.outcomes[position] = self._do(position, reader)
            except AbandonedError:
                return

    def _do(self, position: int, reader: Reader) -> Outcome:
        try:
            return reader.read_frame(self.tasks[position], self.call)
        except (FrameError, ShortBufferError) as error:
            return error
        except OSError as error:
            return ReadFailure(error.errno or 0)


def shared_out(tasks: Sequence[Task], threads_count: int) -> list[Sequence[int]]:
    """Positions of the tasks as they lie on the disk, cut into shares of about the same size."""
    order = sorted(
        range(len(tasks)),
        key=lambda at: (tasks[at].segment.segment_id, tasks[at].place.offset),
    )
    size = sum(task.place.frame_bytes for task in tasks)
    count = max(1, min(threads_count, len(tasks), size // _SHARE_BYTES))
    shares: list[list[int]] = [[] for _ in range(count)]
    before_bytes = 0
    for position in order:
        shares[min(count - 1, before_bytes * count // max(1, size))].append(position)
        before_bytes += tasks[position].place.frame_bytes
    return [share for share in shares if share]


class ReaderLane:
    """The reader threads, each with a reader of its own."""

    def __init__(self, threads_count: int) -> None:
        self._lane = Lane("kvtier-nvme-read", threads_count)
        self._readers = [Reader(number) for number in range(threads_count)]

    async def read(self, tasks: Sequence[Task], timeout_s: float) -> list[Outcome | None]:
        """Do what can be done in time. Afterwards no thread touches the callers' memory.

        Segments are held until the threads are done with them. Raises OverloadedError.
        """
        batch = Batch(tasks, Call(), shared_out(tasks, self._lane.threads_count))
        held = {task.segment for task in tasks}
        for segment in held:
            segment.hold()
        left = len(batch.shares)
        futures: set[asyncio.Future[None]] = set()

        def done(_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                for segment in held:
                    segment.let_go()

        try:
            for share in batch.shares:
                future = self._lane.submit(partial(self._work, batch, share))
                future.add_done_callback(done)
                futures.add(future)
        except OverloadedError:
            for _ in range(len(batch.shares) - len(futures)):
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

    def _work(self, batch: Batch, share: Sequence[int]) -> None:
        reader = self._readers.pop()
        try:
            batch.work(share, reader)
        finally:
            self._readers.append(reader)

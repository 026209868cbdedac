"""Threads for calls that block, and who may touch a caller's memory meanwhile.

A disk may not answer for as long as it likes. So whatever blocks runs on a lane, the event loop
waits for it only until the call's deadline, and a thread touches memory of the caller's only inside
`Call.touching`, where it never blocks. Threads are daemons: one that is stuck ends with the process
and holds up nothing but its lane.
What must not live here: files, blocks.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from kvtier.errors import OverloadedError, UnavailableError
from kvtier.limits import NVME_JOBS_MAX

T = TypeVar("T")


class AbandonedError(Exception):
    """Raised in a thread whose call is over: stop, touch nothing."""


class Call:
    """One call's loan of its caller's memory to threads, which ends when the call does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._inside = 0
        self._abandoned = False
        self._left: asyncio.Future[None] | None = None

    def touching(self) -> Self:
        """In a thread: `with call.touching():` the caller's memory may be touched. It raises
        AbandonedError where the call is over."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            left = self._left if not self._inside else None
        if left is not None:
            _from_thread(self._loop, _resolve, left)

    async def abandon(self) -> None:
        """On the loop: end the loan; returns once no thread is inside. Cancelled or not, it waits:
        a thread inside only copies memory."""
        with self._lock:
            self._abandoned = True
            if not self._inside:
                return
            self._left = self._loop.create_future()
        cancelled: asyncio.CancelledError | None = None
        while not self._left.done():
            try:
                await asyncio.shield(self._left)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


class _Job(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()

    def run(self) -> None:
        try:
            result = self.function()
        except Exception as error:  # noqa: BLE001 - outermost edge of a thread: the loop raises it
            _from_thread(self.loop, _fail, self.future, error)
        else:
            _from_thread(self.loop, _give, self.future, result)


class Lane:
    """Threads that take jobs in the order in which they were submitted, one lane a purpose."""

    def __init__(self, name: str, threads_count: int) -> None:
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._is_open = True
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(threads_count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads_count(self) -> int:
        return len(self._threads)

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on a thread. Its exception is the future's, which may be left alone.

        Raises OverloadedError when NVME_JOBS_MAX jobs wait, UnavailableError after `close`.
        """
        if not self._is_open:
            raise UnavailableError("the tier is closed")
        if self._jobs.qsize() >= NVME_JOBS_MAX:
            raise OverloadedError(f"{NVME_JOBS_MAX} disk operations wait")
        job = _Job(function)
        job.future.add_done_callback(_retrieved)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job.future

    async def close(self, timeout_s: float) -> bool:
        """Take no more jobs; False where a thread is stuck past the timeout, and is left behind."""
        if self._is_open:
            self._is_open = False
            for _ in self._threads:
                self._jobs.put(None)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        for thread in self._threads:
            remaining = max(0.0, deadline_s - asyncio.get_running_loop().time())
            await asyncio.get_running_loop().run_in_executor(None, thread.join, remaining)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: T) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():  # nobody waits any more
            raise


def _give(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _resolve(future: asyncio.Future[None]) -> None:
    _give(future, None)


def _retrieved(future: asyncio.Future[T]) -> None:
    """Keep asyncio from complaining of failures of jobs that nobody waits for any more."""
    if not future.cancelled():
        future.exception()

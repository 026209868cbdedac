"""An event loop on a thread of its own, for gRPC in a process whose other threads are busy.

An engine that holds its thread for a second, or a router whose loop is full, delays nothing that
runs here for longer than the interpreter takes to switch threads. What must not live here: calls.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvtier.errors import UnavailableError
from kvtier.telemetry.logs import EventLog

T = TypeVar("T")

_JOIN_S = 5.0
_OBEY_S = 0.2
_DRAIN_S = 0.02


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended.

    grpc.aio can swallow a cancellation (it does while it prepares a call that fails at the same
    moment), and so can redis-py (it sends under `asyncio.wait_for`, which does in Python 3.11),
    hence again and again until obeyed: what a task does at its end must be over in 200 ms, or be
    somebody else's.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_OBEY_S)


def spawn(work: Coroutine[Any, Any, None], log: EventLog) -> asyncio.Task[None]:
    """A task that runs for ever; its failure, which only a bug can bring about, is logged."""

    def tell(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.exception("a task failed", error)

    task = asyncio.create_task(work)
    task.add_done_callback(tell)
    return task


def raise_if_cancelled() -> None:
    """CancelledError if this task was cancelled and a call of grpc.aio swallowed that.

    Every loop that opens calls anew asks this between two of them.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class LoopThread:
    """One daemon thread with one loop. Methods may be called from any other thread.

    All gRPC of a process belongs on one loop: grpc.aio has one poller a process, which wakes every
    loop that ever used it for each event, and hands those of a closed loop to whoever is left.
    """

    def __init__(
        self,
        name: str,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self._name = name
        self._new_loop = new_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()

    @property
    def is_running(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        with self._guard:
            if self._loop is not None:
                return
            loop = self._new_loop()
            started = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(loop, started), name=self._name, daemon=True
            )
            self._thread.start()
            started.wait(_JOIN_S)
            self._loop = loop

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Run a plain call on the loop, without waiting; does nothing once stopped."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(call, *args)
            except RuntimeError:
                if not loop.is_closed():
                    raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop. UnavailableError when the thread does not run."""
        loop = self._loop
        if loop is None:
            work.close()
            raise UnavailableError(f"{self._name} does not run")
        return asyncio.run_coroutine_threadsafe(work, loop)

    def stop(self) -> None:
        """Cancel what runs, end the loop and join the thread. Idempotent."""
        with self._guard:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_JOIN_S)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(end(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
            # Events of calls that have just ended are on their way from gRPC's poller.
            loop.run_until_complete(asyncio.sleep(_DRAIN_S))
            loop.close()

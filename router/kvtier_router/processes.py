"""Several router processes that share one port: started, restarted when they die, stopped together.

Each process binds the port with SO_REUSEPORT and the kernel deals out connections. A child notices
its parent's death by a pipe that ends. What must not live here: what a process serves.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_RESTART_S_MIN: Final = 1.0
_LOOK_S: Final = 0.2
_WAIT_S: Final = 0.05
_FAILED: Final = 70
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

RunOne = Callable[[int, int], int]
"""(number of the process, descriptor that ends with the parent) -> exit status."""


def supervise(count: int, run_one: RunOne) -> int:
    """Run `count` processes until a signal asks to stop; then stop them and return 0.

    A second signal kills. A process that ends by itself is started again, at most once a second.
    Where all end at once with an error at the start, so does this. Blocks.
    """
    family = _Family(count, run_one)
    with _signals(family.stop):
        return family.run()


class _Family:
    def __init__(self, count: int, run_one: RunOne) -> None:
        self._run_one = run_one
        self._count = count
        self._pids: dict[int, int] = {}
        self._started_at: dict[int, float] = {}
        self._signals = 0
        self._read_end, self._write_end = os.pipe()
        self._parent = os.getpid()

    def stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._parent:
            return
        self._signals += 1
        kind = signal.SIGTERM if self._signals == 1 else signal.SIGKILL
        for pid in tuple(self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)

    def run(self) -> int:
        for number in range(self._count):
            self._start(number)
        failures = 0
        while self._pids:
            number, status, lived_s = self._next_end()
            if number < 0:
                continue
            if self._signals:
                continue
            failures = failures + 1 if lived_s < _RESTART_S_MIN and status else 0
            if failures >= self._count:
                self.stop(signal.SIGTERM, None)
                return 1
            self._pause(_RESTART_S_MIN - lived_s)
            self._start(number)
        return 0

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._signals and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _start(self, number: int) -> None:
        """Start a process, unless a signal has asked to stop."""
        # A signal that comes now waits until the parent knows the child and the child is itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        if self._signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            return
        self._started_at[number] = time.monotonic()
        pid = os.fork()
        if pid:
            self._pids[pid] = number
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            return
        status = _FAILED
        try:
            for kind in _STOPPING:
                signal.signal(kind, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
            os.close(self._write_end)
            status = self._run_one(number, self._read_end)
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _next_end(self) -> tuple[int, int, float]:
        """(number, status, seconds lived) of a process that ended; number -1: none of ours."""
        pid, status = 0, 0
        try:
            # Looked for again and again: a signal that comes just before a wait without an end
            # would not be acted upon before the wait's end.
            while not pid:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    time.sleep(_WAIT_S)
        except ChildProcessError:
            self._pids.clear()
            return -1, 0, 0.0
        number = self._pids.pop(pid, -1)
        lived_s = time.monotonic() - self._started_at.get(number, 0.0)
        return number, os.waitstatus_to_exitcode(status), lived_s


@contextlib.contextmanager
def _signals(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

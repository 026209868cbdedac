"""A command of ours under a pseudo-terminal: keys in, frames out.

What must not live here: what a command should show.
"""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.harness.processes import clean_environment
from tests.harness.waiting import NeverHappenedError

_CONTROLLED = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
"""Makes the terminal on its standard input its own, so that Ctrl-C is a signal, and goes on."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """One run of a command; `frame` is what it drew last."""

    def __init__(self, argv: Sequence[str], columns: int, lines: int) -> None:
        self._master, slave = os.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.output = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CONTROLLED, *argv],
            stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env=clean_environment(),
        )  # fmt: skip

    @property
    def modes(self) -> list[Any]:
        """How the terminal is set now."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, lines: int) -> None:
        """Another window size; the foreground process hears of it."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def frame(self) -> list[str]:
        """The lines of the last whole frame; none before the first."""
        text = self.output.decode(errors="replace")
        frames = [one for one in text.split("\x1b[H")[1:] if "q: end" in one]
        if not frames:
            return []
        lines = _ESCAPE.sub("", frames[-1]).replace("\r", "").split("\n")
        return [line for line in lines if line != "q: end"]

    def until(self, part: str, deadline_s: float = 45.0) -> list[str]:
        """Read until the last frame shows `part`; that frame."""
        end = time.monotonic() + deadline_s
        while True:
            found = self.frame()
            if any(part in line for line in found):
                return found
            if time.monotonic() > end or not self._read(0.1):
                text = self.output[-2000:].decode(errors="replace")
                raise NeverHappenedError(f"no frame with {part!r}; the last output is {text!r}")

    def while_showing(
        self, condition: Callable[[list[str]], bool], deadline_s: float = 45.0
    ) -> None:
        """Read for as long as the last frame meets a condition."""
        end = time.monotonic() + deadline_s
        while condition(self.frame()):
            if time.monotonic() > end or not self._read(0.1):
                raise NeverHappenedError(f"the frame stays {self.frame()}")

    def status(self, deadline_s: float = 45.0) -> int:
        """Read to the end; the exit status, negative for a signal."""
        end = time.monotonic() + deadline_s
        while self._process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        while self._read(0.0, wants_some=True):
            pass
        return self._process.wait(20)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        os.close(self._master)
        os.close(self._slave)

    def _read(self, wait_s: float, *, wants_some: bool = False) -> bool:
        """Take in what there is; False at the end (or where there was nothing, if it matters)."""
        ready, _, _ = select.select([self._master], [], [], wait_s)
        if not ready:
            return not wants_some
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:
            return False
        self.output += data
        return bool(data)


@contextmanager
def terminal(argv: Sequence[str], columns: int = 80, lines: int = 24) -> Iterator[Terminal]:
    """The command while entered; ended afterwards if it still runs."""
    found = Terminal(argv, columns, lines)
    try:
        yield found
    finally:
        found.close()

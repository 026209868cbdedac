"""Processes of the index service bench: started, measured by the kernel's own counters, ended.

What must not live here: what is sent to them.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

START_S_MAX: Final = 60.0
END_S_MAX: Final = 15.0
_PORT: Final = re.compile(rb"\bport=(\d+)")
_ACCESS: Final = b" event=request "
"""In lines that a router writes for every request: no last words."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_CLI: Final = "import sys; from kvtier.cli import main; sys.exit(main(sys.argv[1:]))"


class BenchError(RuntimeError):
    """A process did not do what the bench relies on."""


class Program:
    """One child process that says `port=N` on its standard error once it serves (or is ready)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._tail: deque[bytes] = deque(maxlen=20)
        self._port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> "Program":
        """Run this Python with `arguments`; returns without waiting for anything."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stderr=asyncio.subprocess.PIPE
        )
        return cls(process)

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if _ACCESS not in line:
                self._tail.append(line)
            found = _PORT.search(line)
            if found is not None and not self._port.done():
                self._port.set_result(int(found[1]))
        if not self._port.done():
            said = b"".join(self._tail).decode(errors="replace")
            self._port.set_exception(BenchError(f"a process ended before it was ready:\n{said}"))

    async def port(self) -> int:
        """Wait until it is ready; its port."""
        async with asyncio.timeout(START_S_MAX):
            return await asyncio.shield(self._port)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system time of all its threads so far, to the nanosecond.

        The clock of another process by number: `clock_getcpuclockid(3)` does the same arithmetic.
        """
        return time.clock_gettime(~self.pid << 3 | 2)

    def rss_mib(self) -> float:
        resident = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(resident) * _PAGE_BYTES / 2**20

    def last_words(self) -> str:
        """How it ended and what it said last; empty while it runs."""
        status = self._process.returncode
        if status is None:
            return ""
        return f"exit status {status}:\n{b''.join(self._tail).decode(errors='replace')}"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL and wait for the end. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._ended()

    async def stop(self) -> None:
        """Ask it to end, then kill it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            async with asyncio.timeout(END_S_MAX):
                await self._ended()
        except TimeoutError:
            await self.kill()

    async def _ended(self) -> None:
        await self._process.wait()
        await self._reading
        if self._port.done() and not self._port.cancelled():
            self._port.exception()  # seen: nobody may be waiting for it


@contextlib.asynccontextmanager
async def running(arguments: Sequence[str]) -> AsyncIterator[Program]:
    """A process while entered."""
    program = await Program.start(arguments)
    try:
        yield program
    finally:
        await program.stop()


def index_arguments(port: int = 0, *flags: str) -> list[str]:
    """`kvtier index` as an operator starts it."""
    return ["-c", _CLI, "index", "--bind", f"127.0.0.1:{port}", *flags]


def module_arguments(name: str, *flags: str) -> list[str]:
    return ["-P", "-m", f"kvtier.bench.{name}", *flags]

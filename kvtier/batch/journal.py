"""Results as a journal: a row that is in the file is done, and is in the file once.

Lines are appended and made durable in groups; a row's place in the window is free again when its
line is durable. So whatever ends the process or the machine, only rows of the window are computed
again. What must not live here: requests, summaries of anything but the lines.
"""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from kvtier.batch.answers import Outcome, Totals
from kvtier.errors import BackendError
from kvtier.limits import BATCH_ROW_BYTES_MAX, BATCH_WINDOW_MAX

_LINE: Final = re.compile(rb'\{"id": "batch_req_(\d{10})", ')
_LINE_BYTES_MAX: Final = 2 * BATCH_ROW_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a journal holds when it is opened."""

    done: bytearray
    """A bit a row of the input."""
    totals: Totals
    cut_bytes: int
    """Of a last line that was not whole; taken off."""


def line_of(number: int, custom_id: str, outcome: Outcome) -> bytes:
    """One line of results, in the form of OpenAI's batch API. Pure."""
    told = {
        "id": f"batch_req_{number:010d}",
        "custom_id": custom_id,
        "response": outcome.response,
        "error": outcome.error,
    }
    return json.dumps(told).encode() + b"\n"


def is_done(done: bytearray, number: int) -> bool:
    """Whether a row's bit is set."""
    return bool(done[number >> 3] >> (number & 7) & 1)


def recover(path: Path, rows: int) -> Recovered:
    """Read what is there, cut off what was being written when the writer ended. Blocks; O(file).

    BackendError where the file is not one of this batch, or is damaged further from its end than
    a crash can reach.
    """
    done, totals, whole = bytearray((rows + 7) >> 3), Totals(), 0
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        while line := file.readline(_LINE_BYTES_MAX):
            outcome = _read(line, rows)
            if outcome is None:
                break
            number, read = outcome
            if is_done(done, number):
                raise BackendError(f"{path}: row {number} is there twice, at byte {whole}")
            done[number >> 3] |= 1 << (number & 7)
            totals.add(read)
            whole += len(line)
        size = file.seek(0, os.SEEK_END)
        if _lines_behind(file, whole) > BATCH_WINDOW_MAX:
            raise BackendError(f"{path} is damaged at byte {whole}")
        file.truncate(whole)
        os.fsync(file.fileno())
    return Recovered(done, totals, size - whole)


def _read(line: bytes, rows: int) -> tuple[int, Outcome] | None:
    """(row, outcome) of a line; None for one that is not whole."""
    found = _LINE.match(line)
    if found is None or not line.endswith(b"\n") or int(found[1]) >= rows:
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return int(found[1]), Outcome(told["response"], told["error"])


def _lines_behind(file: BinaryIO, offset: int) -> int:
    file.seek(offset)
    count = 0
    while part := file.read(1 << 20):
        count += part.count(b"\n")
        if count > BATCH_WINDOW_MAX:
            break
    return count


@dataclass(slots=True)
class Journal:
    """Appends lines; one task writes what has gathered, all of it with one sync."""

    _file: BinaryIO
    _thread: ThreadPoolExecutor
    _waiting: list[tuple[bytes, asyncio.Future[None]]] = field(default_factory=list)
    _some: asyncio.Event = field(default_factory=asyncio.Event)

    async def append(self, line: bytes) -> None:
        """Return once the line is durable. BackendError: the disk does not take it."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        self._some.set()
        await written

    async def keep_writing(self) -> None:
        """Write until cancelled, or until the disk fails."""
        while True:
            await self._some.wait()
            self._some.clear()
            waiting, self._waiting = self._waiting, []
            try:
                lines = b"".join(line for line, _ in waiting)
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, lines)
            except OSError as error:
                for _, written in waiting:
                    if not written.done():
                        written.set_exception(BackendError(f"results: {error.strerror}"))
                return
            for _, written in waiting:
                if not written.done():
                    written.set_result(None)

    def _write(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        os.fdatasync(self._file.fileno())


@contextlib.asynccontextmanager
async def journal_of(path: Path) -> AsyncIterator[Journal]:
    """A journal that is written while entered."""
    # A write that is under way ends before its file is closed.
    with path.open("ab", buffering=0) as file, ThreadPoolExecutor(1, "journal") as thread:
        journal = Journal(file, thread)
        writing = asyncio.create_task(journal.keep_writing())
        try:
            yield journal
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

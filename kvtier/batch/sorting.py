"""Sorting more than memory holds: runs on disk, merged. What must not live here: what is sorted."""

import heapq
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final

from kvtier.errors import BackendError
from kvtier.limits import BATCH_RUNS_COUNT_MAX

Entry = tuple[bytes, bytes]
"""(key, what goes with it); ordered by both."""

_HEAD: Final = struct.Struct("<HH")
_ENTRY_BYTES: Final = 200
"""Of two short byte strings and their tuple, besides their bytes."""
_BUFFER_BYTES: Final = 256 << 10


class ExternalSort:
    """Takes entries in any order and gives them in order; holds at most `memory_bytes` of them.

    Runs are files in `folder`, which is the caller's, to be emptied by the caller.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._held: list[Entry] = []
        self._held_bytes = 0
        self._runs: list[Path] = []
        self._made = 0

    def add(self, key: bytes, payload: bytes) -> None:
        """Take an entry; key and payload of at most 65,535 bytes. BackendError: the disk."""
        self._held.append((key, payload))
        self._held_bytes += len(key) + len(payload) + _ENTRY_BYTES
        if self._held_bytes > self._memory_bytes:
            self._held.sort()
            self._write(iter(self._held))
            self._held, self._held_bytes = [], 0

    def ordered(self) -> Iterator[Entry]:
        """All entries in order; once. BackendError: the disk."""
        self._held.sort()
        while len(self._runs) > BATCH_RUNS_COUNT_MAX:
            some, self._runs = self._runs[:BATCH_RUNS_COUNT_MAX], self._runs[BATCH_RUNS_COUNT_MAX:]
            with ExitStack() as stack:
                self._write(heapq.merge(*(_read(stack, path) for path in some)))
            for path in some:
                path.unlink()
        with ExitStack() as stack:
            yield from heapq.merge(*(_read(stack, path) for path in self._runs), self._held)

    def _write(self, entries: Iterator[Entry]) -> None:
        path = self._folder / f"run-{self._made:06d}"
        self._made += 1
        try:
            with path.open("wb", buffering=_BUFFER_BYTES) as file:
                for key, payload in entries:
                    file.write(_HEAD.pack(len(key), len(payload)) + key + payload)
        except OSError as error:
            raise BackendError(f"{path}: {error.strerror}") from error
        self._runs.append(path)


def _read(stack: ExitStack, path: Path) -> Iterator[Entry]:
    try:
        file = stack.enter_context(path.open("rb", buffering=_BUFFER_BYTES))
    except OSError as error:
        raise BackendError(f"{path}: {error.strerror}") from error
    return chain.from_iterable(iter(lambda: _next(file, path), ()))


def _next(file: BinaryIO, path: Path) -> tuple[Entry, ...]:
    """The next entry; empty at the end."""
    head = file.read(_HEAD.size)
    if not head:
        return ()
    if len(head) == _HEAD.size:
        key_bytes, payload_bytes = _HEAD.unpack(head)
        body = file.read(key_bytes + payload_bytes)
        if len(body) == key_bytes + payload_bytes:
            return ((body[:key_bytes], body[key_bytes:]),)
    raise BackendError(f"{path} ends in the midst of an entry")

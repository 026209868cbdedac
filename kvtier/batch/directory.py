"""The directory of one batch: what is to be sent in which order, and who works on it.

    LOCK           held by the process that works on it
    rows.jsonl     every row, as it was read
    order.bin      which row is sent when, and how much of its prompt is that of the one before it
    plan.json      written last: the two are whole
    results.jsonl  one line a finished row, the journal at the same time (`journal.py`)
    summary.json   written at the end

What must not live here: sending, the journal.
"""

import array
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from kvtier.batch.estimate import Engines, TextCache
from kvtier.batch.prefixes import depth_of, key_of, shared_bytes
from kvtier.batch.rows import Row, kept_row, prompt_bytes
from kvtier.batch.settings import BatchConfig, EstimateSection, Order
from kvtier.batch.sorting import ExternalSort
from kvtier.errors import BackendError, CallerError, LimitError, UnavailableError
from kvtier.limits import BATCH_ROWS_MAX

RESULTS: Final = "results.jsonl"
SUMMARY: Final = "summary.json"
_VERSION: Final = 1
_ROW: Final = struct.Struct("<IQI")
_ENTRY: Final = struct.Struct("<IQIII")
_ENTRIES_AT_ONCE: Final = 4096
_NAME_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the plan: which, where it lies in rows.jsonl, how it is related."""

    number: int
    """Of the row in the input, from 0."""
    offset: int
    length: int
    shared: int
    """Bytes of its prompt that are also those of the entry before it."""
    depth: int
    """Bytes of its prompt that were looked at."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done; estimates are of text that a cache would have found, in bytes."""

    rows: int
    source: str
    """Digest of what the rows were read from, and with which settings."""
    text_bytes: int
    found_grouped: int
    """One cache of all engines and stores, rows as they are sent."""
    found_input_order: int
    """The same cache, rows as they stand in the input."""
    found_engines_alone: int
    """Each engine its own cache and nothing else, rows of the input dealt out in turn."""


class HeldError(UnavailableError):
    """Another process works on the directory."""


class BatchDirectory:
    """See the module."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the directory for oneself; made on first use. HeldError."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(self.root / "LOCK", flags, 0o600)
        except OSError as error:
            raise BackendError(f"{self.root}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise HeldError(f"another process works on {self.root}") from None
        finally:
            os.close(lock)

    def plan(self) -> Plan | None:
        """The plan; None where rows have not been read to their end yet."""
        try:
            told = json.loads((self.root / "plan.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BackendError(f"{self.root / 'plan.json'} cannot be read") from error
        if told.pop("version", None) != _VERSION:
            raise CallerError(f"{self.root} is of another version of kvtier")
        return Plan(**told)

    def prepare(self, rows: Iterator[Row], config: BatchConfig, source: str) -> Plan:
        """Read all rows, put them in order, write the plan. Blocks; memory: `sort_memory_bytes`,
        8 bytes a row, and what estimates hold.

        Nothing of an earlier, broken reading is used. CallerError for a bad row or two rows of
        one name; BackendError: the disk.
        """
        runs = self.root / "runs"
        try:
            shutil.rmtree(runs, ignore_errors=True)
            runs.mkdir(mode=0o700)
            plan = _Preparing(self.root, runs, config).plan(rows, source)
            shutil.rmtree(runs, ignore_errors=True)
            self.replace("plan.json", {"version": _VERSION, **asdict(plan)})
        except OSError as error:
            raise BackendError(f"{self.root}: {error.strerror}") from error
        return plan

    def entries(self) -> Iterator[Entry]:
        """The plan in order. BackendError where it cannot be read."""
        try:
            with (self.root / "order.bin").open("rb") as file:
                while part := file.read(_ENTRY.size * _ENTRIES_AT_ONCE):
                    for fields in _ENTRY.iter_unpack(part):
                        yield Entry(*fields)
        except (OSError, struct.error) as error:
            raise BackendError(f"{self.root / 'order.bin'}: {error}") from error

    def opened(self) -> BinaryIO:
        """The file of rows, for `row`."""
        return (self.root / "rows.jsonl").open("rb", buffering=0)

    def replace(self, name: str, told: Mapping[str, object]) -> None:
        """Write a small JSON file, whole or not at all, and durably. OSError."""
        made = self.root / f".{name}"
        with made.open("w", encoding="utf-8") as file:
            file.write(json.dumps(told, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        made.replace(self.root / name)
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def row_at(file: BinaryIO, entry: Entry) -> Row:
    """The row of an entry. Blocks; threads may share the file. BackendError: it is not there."""
    line = os.pread(file.fileno(), entry.length, entry.offset)
    if len(line) != entry.length:
        raise BackendError("rows.jsonl ends before its rows do")
    return kept_row(line)


def digest_of(config: BatchConfig, files: Mapping[str, tuple[int, int]]) -> str:
    """Names what a plan was made from: the files with sizes and times, and what shapes rows."""
    shaped = [config.body, config.model, config.order.value, asdict(config.estimate)]
    told = json.dumps([shaped, sorted(files.items())])
    return hashlib.sha256(told.encode()).hexdigest()


class _Preparing:
    """One reading of all rows."""

    def __init__(self, root: Path, runs: Path, config: BatchConfig) -> None:
        self._root = root
        self._order = config.order
        self._sort = ExternalSort(runs, config.sort_memory_bytes)
        self._names = array.array("Q")
        self._caches = _Caches(config.estimate)

    def plan(self, rows: Iterator[Row], source: str) -> Plan:
        count = self._spool(rows)
        _require_different(self._names)
        with (self._root / "order.bin").open("wb") as file:
            for entry in self._related():
                file.write(_ENTRY.pack(*entry))
            _synced(file)
        caches = self._caches
        return Plan(
            rows=count,
            source=source,
            text_bytes=caches.whole.text_bytes,
            found_grouped=caches.grouped.found_bytes,
            found_input_order=caches.whole.found_bytes,
            found_engines_alone=caches.engines.found_bytes,
        )

    def _spool(self, rows: Iterator[Row]) -> int:
        offset, number = 0, -1
        with (self._root / "rows.jsonl").open("wb") as file:
            for number, row in enumerate(rows):
                if number >= BATCH_ROWS_MAX:
                    raise LimitError(f"more than {BATCH_ROWS_MAX} rows")
                line, text = row.line(), prompt_bytes(row)
                file.write(line + b"\n")
                key = key_of(text)
                self._caches.come(key, len(text))
                place = number.to_bytes(4, "big") if self._order is Order.INPUT else key
                self._sort.add(place, _ROW.pack(number, offset, len(line)))
                self._names.append(_named(row.custom_id))
                offset += len(line) + 1
            _synced(file)
        return number + 1

    def _related(self) -> Iterator[tuple[int, int, int, int, int]]:
        before = b""
        for key, payload in self._sort.ordered():
            number, offset, length = _ROW.unpack(payload)
            if self._order is Order.INPUT:
                yield number, offset, length, 0, 0
                continue
            self._caches.grouped.take(key, 0)
            yield number, offset, length, shared_bytes(before, key), depth_of(key)
            before = key


class _Caches:
    """What estimates are made with."""

    def __init__(self, section: EstimateSection) -> None:
        worker = int(section.worker_tokens * section.token_bytes)
        store = int(section.store_tokens * section.token_bytes)
        self.whole = TextCache(section.workers * worker + store)
        self.grouped = TextCache(section.workers * worker + store)
        self.engines = Engines([TextCache(worker) for _ in range(section.workers)])

    def come(self, key: bytes, text_bytes: int) -> None:
        """A row, in the order of the input."""
        self.whole.take(key, text_bytes)
        self.engines.take(key, text_bytes)


def _named(custom_id: str) -> int:
    digest = hashlib.blake2b(custom_id.encode(), digest_size=_NAME_BYTES).digest()
    return int.from_bytes(digest, "little")


def _require_different(names: "array.array[int]") -> None:
    """CallerError where two rows have one name; O(n log n), 24 bytes a row at most."""
    digests = np.frombuffer(names, dtype=np.uint64) if names else np.zeros(0, dtype=np.uint64)
    order = np.argsort(digests, kind="stable")
    same = np.flatnonzero(digests[order][1:] == digests[order][:-1])
    if same.size:
        one, other = (int(order[same[0] + at]) for at in range(2))
        raise CallerError(f"rows {one} and {other} (from 0) have the same custom_id")


def _synced(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

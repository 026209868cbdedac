"""What outlives a bridge: what each rank holds, how far its events were taken, and known keys.

One SQLite file. Everything of one moment is written in one transaction, so that a bridge that is
killed goes on from a moment that was. Each row carries a checksum keyed by the identity of model
and engine: a row of another identity, or with a flipped bit, is not taken. A rank with one bad row
begins anew; a file that cannot be read is thrown away. Bounded by `file_bytes_max`.

What must not live here: what rows mean.
"""

import contextlib
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtier.core.engine_events import EngineHash, Place
from kvtier.core.engine_holdings import ResidentRow
from kvtier.core.engine_sequence import Doubt, Position
from kvtier.errors import BackendError, UnavailableError
from kvtier.telemetry.logs import EventLog
from kvtier.types import PrefixKey

LOG: Final = EventLog("kvtier_services.bridge")
FILE: Final = "bridge.sqlite3"
_LOCK: Final = "LOCK"
_PAGE_BYTES: Final = 4096
_SUM_BYTES: Final = 8
_SEQ_BYTES: Final = 8
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS known (
  at INTEGER PRIMARY KEY AUTOINCREMENT, name BLOB UNIQUE, prefix_key BLOB, sum BLOB);
CREATE TABLE IF NOT EXISTS residents (
  rank INTEGER, medium TEXT, ownership TEXT, cache_group INTEGER, name BLOB,
  copies INTEGER, prefix_key BLOB, sum BLOB,
  PRIMARY KEY (rank, medium, ownership, cache_group, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS positions (
  rank INTEGER PRIMARY KEY, seq BLOB, fingerprint BLOB, doubts TEXT, count INTEGER, sum BLOB);
"""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank held, and after which message."""

    position: Position
    rows: tuple[ResidentRow, ...]


@dataclass(slots=True)
class RankDelta:
    """What changed of one rank since it was saved last."""

    position: Position | None
    is_cleared: bool
    rows: list[ResidentRow] = field(default_factory=list)


@dataclass(slots=True)
class MemoryCounts:
    saves: int = 0
    failures: int = 0
    """Saves that failed: nothing is saved any more until a bridge begins anew."""
    bad_rows: int = 0
    discards: int = 0
    """Files, or states of a rank, that were not taken over."""


class BridgeMemory:
    """One file of one bridge; used by one thread."""

    def __init__(self, connection: sqlite3.Connection | None, identity: bytes) -> None:
        self._connection = connection
        self._key = hashlib.sha256(identity).digest()
        self._counted: dict[int, dict[tuple[Place, EngineHash], None]] = {}
        self.counts = MemoryCounts()

    @property
    def is_kept(self) -> bool:
        """Whether anything outlives this process."""
        return self._connection is not None

    # ---- reading

    def known(self) -> Iterator[tuple[EngineHash, PrefixKey]]:
        """Known keys, the least lately learnt first."""
        for name, key, checksum in self._rows(
            "SELECT name, prefix_key, sum FROM known ORDER BY at"
        ):
            if checksum == self._sum("known", name, key):
                yield EngineHash(name), PrefixKey(key)
            else:
                self.counts.bad_rows += 1

    def rank(self, rank: int) -> RankState | None:
        """What a rank held; None where nothing, or nothing whole, is remembered."""
        found = self._rows(
            "SELECT seq, fingerprint, doubts, count, sum FROM positions WHERE rank = ?", (rank,)
        )
        if not found:
            return None
        seq, fingerprint, doubts, count, checksum = found[0]
        rows = [row for row in self._residents(rank) if row is not None]
        is_whole = checksum == self._sum("position", rank, seq, fingerprint, doubts, count)
        if not is_whole or len(rows) != count:
            self.counts.discards += 1
            LOG.warning("what a rank held is not whole on disk", rank=rank)
            self._forget(rank)
            return None
        self._counted[rank] = {(row.place, row.name): None for row in rows}
        said = frozenset(Doubt(word) for word in doubts.split(",") if word)
        return RankState(Position(int.from_bytes(seq, "big"), fingerprint, said), tuple(rows))

    def _residents(self, rank: int) -> Iterator[ResidentRow | None]:
        for medium, ownership, group, name, copies, key, checksum in self._rows(
            "SELECT medium, ownership, cache_group, name, copies, prefix_key, sum FROM residents "
            "WHERE rank = ?",
            (rank,),
        ):
            if checksum == self._sum("r", rank, medium, ownership, group, name, copies, key):
                place = Place(medium, ownership, group)
                yield ResidentRow(place, EngineHash(name), copies, PrefixKey(key))
            else:
                self.counts.bad_rows += 1
                yield None

    def _rows(self, query: str, arguments: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
        if self._connection is None:
            return []
        try:
            return self._connection.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            self._fail(error)
            return []

    # ---- writing

    def save(
        self, known: Mapping[EngineHash, PrefixKey | None], ranks: Mapping[int, RankDelta]
    ) -> None:
        """Write what changed, of one moment, in one transaction. Blocks for milliseconds."""
        if self._connection is None:
            return
        try:
            with self._connection as connection:
                connection.executemany(
                    "DELETE FROM known WHERE name = ?",
                    [(name,) for name, key in known.items() if key is None],
                )
                connection.executemany(
                    "REPLACE INTO known (name, prefix_key, sum) VALUES (?, ?, ?)",
                    [
                        (name, key, self._sum("known", name, key))
                        for name, key in known.items()
                        if key is not None
                    ],
                )
                for rank, delta in ranks.items():
                    self._save_rank(connection, rank, delta)
            self.counts.saves += 1
        except (sqlite3.Error, OverflowError) as error:
            self._fail(error)

    def _save_rank(self, connection: sqlite3.Connection, rank: int, delta: RankDelta) -> None:
        counted = self._counted.setdefault(rank, {})
        if delta.is_cleared or delta.position is None:
            counted.clear()
            connection.execute("DELETE FROM residents WHERE rank = ?", (rank,))
        if delta.position is None:
            connection.execute("DELETE FROM positions WHERE rank = ?", (rank,))
            return
        gone = [row for row in delta.rows if row.key is None]
        kept = [row for row in delta.rows if row.key is not None]
        connection.executemany(
            "DELETE FROM residents WHERE rank = ? AND medium = ? AND ownership = ? AND "
            "cache_group = ? AND name = ?",
            [(rank, *_place(row.place), row.name) for row in gone],
        )
        connection.executemany(
            "REPLACE INTO residents VALUES (?, ?, ?, ?, ?, ?, ?, ?)", self._written(rank, kept)
        )
        for row in gone:
            counted.pop((row.place, row.name), None)
        counted.update(((row.place, row.name), None) for row in kept)
        at = delta.position
        said = (
            rank,
            at.seq.to_bytes(_SEQ_BYTES, "big"),
            at.fingerprint,
            ",".join(sorted(at.doubts)),
            len(counted),
        )
        connection.execute(
            "REPLACE INTO positions VALUES (?, ?, ?, ?, ?, ?)",
            (*said, self._sum("position", *said)),
        )

    def _written(self, rank: int, rows: Iterable[ResidentRow]) -> Iterator[tuple[object, ...]]:
        for row in rows:
            values = (rank, *_place(row.place), row.name, row.copies, row.key)
            yield (*values, self._sum("r", *values))

    def _forget(self, rank: int) -> None:
        self.save({}, {rank: RankDelta(None, is_cleared=True)})

    # ---- parts

    def begin(self, identity: bytes, bytes_max: int) -> None:
        """Prepare the file; what it holds of another identity is forgotten. sqlite3.Error."""
        connection = self._connection
        assert connection is not None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {bytes_max // 4}")
        connection.execute(f"PRAGMA max_page_count = {bytes_max // _PAGE_BYTES}")
        connection.executescript(_SCHEMA)
        found = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchall()
        if found != [(identity,)]:
            if found:
                self.counts.discards += 1
                LOG.warning("the file is of another model or engine and begins anew")
            with connection:
                for table in ("known", "residents", "positions"):
                    connection.execute(f"DELETE FROM {table}")  # noqa: S608 (names of ours)
                connection.execute("REPLACE INTO meta VALUES ('identity', ?)", (identity,))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fail(self, error: Exception) -> None:
        """Keep nothing rather than something that may not be whole."""
        self.counts.failures += 1
        LOG.error("nothing outlives this bridge any more", reason=str(error))
        self.close()

    def _sum(self, *values: object) -> bytes:
        message = hashlib.blake2b(digest_size=_SUM_BYTES, key=self._key)
        for value in values:
            raw = value if isinstance(value, bytes) else str(value).encode("utf-8")
            message.update(len(raw).to_bytes(4, "little") + raw)
        return message.digest()


@contextlib.contextmanager
def open_memory(directory: Path | None, identity: bytes, bytes_max: int) -> Iterator[BridgeMemory]:
    """The memory of a bridge; one without a directory remembers nothing.

    UnavailableError where another bridge has the directory, BackendError where it cannot be made.
    """
    if directory is None:
        yield BridgeMemory(None, identity)
        return
    with _owned(directory):
        memory = _opened(directory / FILE, identity, bytes_max)
        try:
            yield memory
        finally:
            memory.close()


def _opened(path: Path, identity: bytes, bytes_max: int) -> BridgeMemory:
    try:
        return _begun(path, identity, bytes_max)
    except sqlite3.Error as error:
        LOG.error("the file cannot be read and is thrown away", reason=str(error))
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    try:
        memory = _begun(path, identity, bytes_max)
    except sqlite3.Error as error:
        raise BackendError(f"{path}: {error}") from error
    memory.counts.discards += 1
    return memory


def _begun(path: Path, identity: bytes, bytes_max: int) -> BridgeMemory:
    connection = sqlite3.connect(path, check_same_thread=False)
    memory = BridgeMemory(connection, identity)
    try:
        memory.begin(identity, bytes_max)
    except sqlite3.Error:
        connection.close()
        raise
    return memory


@contextlib.contextmanager
def _owned(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(directory / _LOCK, flags, 0o600)
    except OSError as error:
        raise BackendError(f"data_dir {directory}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(f"another bridge has {directory}") from error
        yield
    finally:
        os.close(lock)


def _place(place: Place) -> tuple[str, str, int]:
    return place.medium, place.ownership, place.group

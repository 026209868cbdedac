"""The index on disk: RocksDB through rocksdict, which is imported here and nowhere else.

It is read once, at the start, and written by batches of changes: memory answers every call. There
is no write-ahead log: rocksdict writes it with Python's lock held, so a disk that does not answer
would stop the whole process, and a batch that is flushed needs none. `save` returns when the
changes are in a table file that was synced. All calls block; opening holds Python's lock as well.
What must not live here: payloads (docs/measurements/nvme.md says why), what a change means.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    ChecksumType,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    RdictIter,
    WriteBatch,
    WriteOptions,
)

from kvtier.errors import BackendError

_BATCH_CHANGES_MAX = 4096
"""Changes of one batch: Python's lock is held for about a microsecond each."""
_MIB = 1 << 20


class CatalogFullError(BackendError):
    """The file system has no space left: free some and open the catalog again."""


class CatalogDamagedError(BackendError):
    """Its files are not what it wrote: start a new one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What could be read. Not whole: some keys are missing, and the files must not be written."""

    entries: dict[bytes, bytes]
    is_whole: bool


class Catalog:
    """A map of bytes on disk. One thread at a time."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        """Open or create it; `bytes_max` is that of the tier, which scales its buffers.

        Raises CatalogFullError, CatalogDamagedError or BackendError.
        """
        self.path = path
        self._write = WriteOptions()
        self._write.disable_wal = True  # type: ignore[method-assign,assignment]
        self._write.no_slowdown = True
        try:
            self._db = Rdict(str(path), _options(bytes_max), access_type=AccessType.read_write())
        except Exception as error:
            raise _translated(error) from error

    def load(self) -> Loaded:
        """Read all entries. What a damaged table file hides is left out; O(entries)."""
        entries: dict[bytes, bytes] = {}
        if self._walk(entries, backwards=False):
            return Loaded(entries, is_whole=True)
        self._walk(entries, backwards=True)
        return Loaded(entries, is_whole=False)

    def save(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Set or (None) remove entries, and sync. After an error some may be there: save all again
        once it is open again, in this or a new catalog."""
        items = iter(changes.items())
        try:
            while batch := _batch(items):
                self._write_batch(batch)
            self._db.flush(wait=True)
        except Exception as error:
            raise _translated(error) from error

    def close(self) -> None:
        """Give the files back. Raises BackendError where RocksDB does."""
        try:
            self._db.close()
        except Exception as error:
            raise _translated(error) from error

    def _write_batch(self, batch: WriteBatch) -> None:
        failure = self._written(batch)
        if failure is None:
            return
        if "Incomplete" not in str(failure):
            raise failure
        self._db.flush(wait=True)  # its buffers are full
        self._db.write(batch, self._write)

    def _written(self, batch: WriteBatch) -> BackendError | None:
        try:
            self._db.write(batch, self._write)
        except Exception as error:  # noqa: BLE001 - outermost edge of rocksdict, which has no types
            return _translated(error)
        return None

    def _walk(self, entries: dict[bytes, bytes], *, backwards: bool) -> bool:
        """Add entries from one end until the other, or until what cannot be read: then False."""
        cursor: RdictIter = self._db.iter()
        step = cursor.prev if backwards else cursor.next
        try:
            (cursor.seek_to_last if backwards else cursor.seek_to_first)()
            while cursor.valid():
                entries[cursor.key()] = cursor.value()
                step()
            cursor.status()
        except Exception as error:
            if _is_damage(str(error)):
                return False
            raise _translated(error) from error
        return True


def _batch(items: Iterator[tuple[bytes, bytes | None]]) -> WriteBatch | None:
    batch = WriteBatch(raw_mode=True)
    for key, value in islice(items, _BATCH_CHANGES_MAX):
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    return batch if batch.len() else None


def _options(bytes_max: int) -> Options:
    """Small files and buffers, since entries are a thousandth of the blocks or less."""
    buffer_bytes = max(64 << 10, min(bytes_max // 256, 16 * _MIB))
    table = BlockBasedOptions()
    table.set_checksum_type(ChecksumType.xxh3())
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(4)
    options.set_compaction_style(DBCompactionStyle.universal())  # levels would keep small files
    options.set_max_background_jobs(2)
    options.set_max_open_files(64)
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(max(64 << 10, min(bytes_max // 256, _MIB)))
    options.set_manifest_preallocation_size(16 << 10)
    options.set_max_manifest_file_size(max(64 << 10, min(bytes_max // 256, 16 * _MIB)))
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    options.set_is_fd_close_on_exec(True)
    options.set_paranoid_checks(True)
    return options


def _is_damage(text: str) -> bool:
    """A file that is gone is damage too: only its owner deletes any."""
    kinds = ("Corruption", "Invalid argument", "NotFound", "Not implemented")
    return text.startswith(kinds) or "No such file" in text


def _translated(error: Exception) -> BackendError:
    """rocksdict raises bare Exceptions: their text is all there is."""
    if isinstance(error, BackendError):
        return error
    text = f"the index: {error}"
    if "No space left" in text:
        return CatalogFullError(text)
    return CatalogDamagedError(text) if _is_damage(str(error)) else BackendError(text)

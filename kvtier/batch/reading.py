"""Rows out of files, one after another: JSON lines and Parquet. Memory: a row, or a row group.

What must not live here: what rows mean (`rows.py`).
"""

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, Self, cast

from kvtier.batch.rows import Json, Row, parsed_row, row_of
from kvtier.errors import BackendError, CallerError, ConfigError
from kvtier.limits import BATCH_ROW_BYTES_MAX

_PARQUET: Final = (".parquet", ".pq")
_PARQUET_ROWS: Final = 256


class _Batch(Protocol):
    def to_pylist(self) -> list[dict[str, object]]: ...


class _ParquetFile(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def iter_batches(self, batch_size: int) -> Iterator[_Batch]: ...


class _Parquet(Protocol):
    def ParquetFile(self, path: Path) -> _ParquetFile: ...


def read_rows(paths: Iterable[Path], defaults: Json) -> Iterator[Row]:
    """The rows of all files in order. CallerError, which names file and row, for a bad one;
    BackendError for what cannot be read."""
    number = 0
    for path in paths:
        is_table = path.suffix in _PARQUET
        kind = "row" if is_table else "line"
        for at, row in enumerate(_table(path) if is_table else _lines(path), 1):
            if isinstance(row, bytes) and not row.strip():
                continue
            try:
                if isinstance(row, bytes):
                    yield parsed_row(row, number, defaults)
                else:
                    yield row_of(row, number, defaults)
            except CallerError as error:
                raise CallerError(f"{path}, {kind} {at}: {error}") from error
            number += 1


def rows_of(fields: Iterable[Json], defaults: Json) -> Iterator[Row]:
    """The rows of objects from anywhere, such as a data set of Ray. CallerError names the row."""
    for number, row in enumerate(fields):
        try:
            yield row_of(row, number, defaults)
        except CallerError as error:
            raise CallerError(f"row {number}: {error}") from error


def _lines(path: Path) -> Iterator[bytes | Json]:
    try:
        with path.open("rb") as file:
            while line := file.readline(BATCH_ROW_BYTES_MAX + 1):
                if len(line) > BATCH_ROW_BYTES_MAX:
                    raise CallerError(f"{path}: a line is longer than {BATCH_ROW_BYTES_MAX} bytes")
                yield line
    except OSError as error:
        raise BackendError(f"{path}: {error.strerror}") from error


def _table(path: Path) -> Iterator[bytes | Json]:
    try:
        parquet = cast("_Parquet", importlib.import_module("pyarrow.parquet"))
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                yield from map(plain, batch.to_pylist())
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: {error}") from error


def plain(row: Mapping[str, object]) -> dict[str, object]:
    """A row of a table as JSON has it: without numpy's types, and without the fields that a table
    has for every row and this one does not (null; NaN where pandas made the table). Pure."""
    found = ((name, _plain(value)) for name, value in row.items())
    return {name: value for name, value in found if value is not None}


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        value = cast("object", value.tolist())
    if isinstance(value, dict):
        return plain(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value

"""Rows of a data set of Ray as rows of a batch. Needs no Ray itself.

What must not live here: which data set.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

from kvtier.batch.reading import rows_of
from kvtier.batch.rows import Json, Row


class Dataset(Protocol):
    """What is asked of a `ray.data.Dataset`."""

    def iter_rows(self) -> Iterable[Mapping[str, object]]:
        """Its rows, a few at a time."""
        ...


def dataset_rows(dataset: Dataset, defaults: Json) -> Iterator[Row]:
    """The rows of a data set. CallerError names the row."""
    return rows_of((plain(row) for row in dataset.iter_rows()), defaults)


def plain(row: Mapping[str, object]) -> dict[str, object]:
    """A row without numpy's types and without fields that are not set. Pure."""
    return {name: _plain(value) for name, value in row.items() if value is not None}


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        value = cast("object", value.tolist())
    if isinstance(value, dict):
        return plain(value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value

"""Rows of a data set of Ray as rows of a batch. Needs no Ray itself.

What must not live here: which data set.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from kvtier.batch.reading import plain, rows_of
from kvtier.batch.rows import Json, Row


class Dataset(Protocol):
    """What is asked of a `ray.data.Dataset`."""

    def iter_rows(self) -> Iterable[Mapping[str, object]]:
        """Its rows, a few at a time."""
        ...


def dataset_rows(dataset: Dataset, defaults: Json) -> Iterator[Row]:
    """The rows of a data set. CallerError names the row."""
    return rows_of(map(plain, dataset.iter_rows()), defaults)

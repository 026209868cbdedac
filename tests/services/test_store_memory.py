"""Payloads of a batch are the flat memory of each."""

import numpy as np
import pytest

from kvtier.client.store_memory import (
    Payload,
    all_readable,
    all_writable,
    readable,
    writable,
)
from kvtier.errors import CallerError

BATCHES: list[list[Payload]] = [
    [],
    [b"abc", bytearray(b"de"), memoryview(b"f")],
    [np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.uint8)[2:5]],
    [np.arange(8, dtype=np.uint8), np.arange(8, dtype=np.uint8)[::2]],
    [np.arange(6, dtype=np.float32).reshape(2, 3), b"x"],
    [b"", bytearray(b"y")],
    [memoryview(b"abcd").cast("H"), b"z"],
    [np.zeros((2, 2), np.uint8), b"z"],
]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_reads_as_each_of_it_does(batch: list[Payload]) -> None:
    views = all_readable(batch)
    assert [bytes(view) for view in views] == [bytes(readable(one)) for one in batch]
    assert all(view.format == "B" and view.ndim == 1 for view in views)


def test_a_batch_is_filled_in_place() -> None:
    targets: list[Payload | None] = [bytearray(2), np.zeros(3, np.uint8)]
    for view in all_writable(targets):
        assert view is not None
        view[:] = b"x" * view.nbytes
    assert [bytes(readable(one)) for one in targets if one is not None] == [b"xx", b"xxx"]
    mixed = all_writable([None, bytearray(2), np.zeros(2, np.float32)])
    assert [None if view is None else view.nbytes for view in mixed] == [None, 2, 8]


@pytest.mark.parametrize("bad", [b"constant", np.zeros(8, np.uint8)[::2], "text", 7])
def test_one_that_cannot_be_filled_refuses_the_batch(bad: Payload) -> None:
    with pytest.raises(CallerError):
        writable(bad)
    with pytest.raises(CallerError):
        all_writable([bytearray(3), bad])


@pytest.mark.parametrize("bad", [np.array([object()]), "text", 7])
def test_one_without_bytes_refuses_the_batch(bad: Payload) -> None:
    with pytest.raises(CallerError):
        all_readable([b"abc", bad])

"""A numbered batch as its plain bytes: the twin of the native index's own reader.

The native index reads a `PublishRequest` that holds a `Batch` in place, because that is what most
bytes on an index's wire are. Plain means: every field at most once, in the order of its number,
nothing unknown, lengths of at most 32 bits. What is not plain may still be right; the general
parser of `kvtier.wire` decides. What must not live here: every other message.
"""

from typing import Final, NamedTuple

from kvtier.core.event_columns import PackedBatch

_BATCH_TAG: Final = 2 << 3 | 2
_SEQ_TAG: Final = 1 << 3 | 0
_COLUMN_TAGS: Final = tuple(number << 3 | 2 for number in range(2, 7))
_SEQ_BITS: Final = 64
_LENGTH_BITS: Final = 32


class BatchMessage(NamedTuple):
    """What stands in the bytes, columns not yet checked against each other."""

    seq: int
    columns: PackedBatch


class _NotPlainError(Exception):
    pass


def read_batch_message(data: bytes) -> BatchMessage | None:
    """The batch in the bytes of a request; None where they are not plain. O(bytes)."""
    try:
        return _read(data)
    except _NotPlainError:
        return None


def _read(data: bytes) -> BatchMessage:
    if data[:1] != bytes([_BATCH_TAG]):
        raise _NotPlainError
    batch, end = _column(data, 1)
    if end != len(data):
        raise _NotPlainError
    seq, at = 0, 0
    if batch[:1] == bytes([_SEQ_TAG]):
        seq, at = _varint(batch, 1, _SEQ_BITS)
    columns = []
    for tag in _COLUMN_TAGS:
        column = b""
        if batch[at : at + 1] == bytes([tag]):
            column, at = _column(batch, at + 1)
        columns.append(column)
    if at != len(batch):
        raise _NotPlainError
    return BatchMessage(seq, PackedBatch(*columns))


def _varint(data: bytes, at: int, bits: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, bits, 7):
        if at == len(data):
            raise _NotPlainError
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if value >> bits:
            raise _NotPlainError
        if byte < 0x80:
            return value, at
    raise _NotPlainError


def _column(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _varint(data, at, _LENGTH_BITS)
    if size > len(data) - at:
        raise _NotPlainError
    return data[at : at + size], at + size

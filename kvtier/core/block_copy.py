"""Copies of block bytes: verified ones (copied and checksummed in one pass), gather and scatter.

All work on C-contiguous memory, release the GIL and refuse areas that overlap. What must not live
here: what the bytes mean (kvtier.core.frame), who owns them, torch (pass a tensor's numpy view).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier import _native, limits
from kvtier.core.checks import require_integer
from kvtier.core.checksum import pure_checksum
from kvtier.errors import CallerError, LimitError
from kvtier.types import BytesLike, Integers


def copy_checksum(destination: BytesLike, source: BytesLike) -> int:
    """Copies `source` over `destination`, of equal size; returns the checksum of what was stored.

    Each byte of the source is read once and what is hashed is what was stored, so that a source
    written meanwhile by another process cannot give a good checksum with other bytes. Calls of
    256 KiB and more store past the CPU's caches where the destination is 16-byte aligned. Raises
    CallerError for read-only destinations, other sizes and overlaps; then nothing was written.
    """
    try:
        return _native.copy_checksum(destination, source)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error


def copy_checksum_many(
    destination: BytesLike,
    destination_offsets: Integers,
    source: BytesLike,
    source_offsets: Integers,
    length: int,
    threads: int = 1,
) -> npt.NDArray[np.uint64]:
    """Copies blocks of `length` bytes between two buffers in one call; returns their checksums.

    Offsets are in bytes, one pair a block. Otherwise as `copy_checksum`; nothing is written unless
    all arguments are good. Result: u64[n], read-only. `threads` share the blocks.
    """
    _refuse_large_batch("source_offsets", source_offsets)
    require_integer("threads", threads, 1, limits.COPY_THREADS_MAX)
    try:
        checksums = _native.copy_checksum_many(
            destination, destination_offsets, source, source_offsets, length, threads
        )
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error
    return np.frombuffer(checksums, np.uint64)


def copy_checksum_pairs(
    destinations: Sequence[BytesLike], sources: Sequence[BytesLike], threads: int = 1
) -> npt.NDArray[np.uint64]:
    """Copies each source over the destination at its position in one call; returns their checksums.

    For blocks that lie in buffers of their own, of any sizes. Otherwise as `copy_checksum_many`.
    """
    _refuse_large_batch("sources", sources)
    require_integer("threads", threads, 1, limits.COPY_THREADS_MAX)
    try:
        checksums = _native.copy_checksum_pairs(destinations, sources, threads)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error
    return np.frombuffer(checksums, np.uint64)


def gather_blocks(out: BytesLike, pool: BytesLike, block_ids: Integers, block_bytes: int) -> None:
    """Writes the pool's blocks `block_ids` one after another into `out`, which they fill exactly.

    The pool is a whole number of blocks; an id may come more than once. Raises CallerError for ids
    outside the pool, other sizes, overlaps and a read-only `out`; then nothing was written.
    """
    _refuse_large_batch("block_ids", block_ids)
    try:
        _native.gather_blocks(out, pool, block_ids, block_bytes)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error


def scatter_blocks(pool: BytesLike, block_ids: Integers, data: BytesLike, block_bytes: int) -> None:
    """Writes `data`, block by block, over the pool's blocks `block_ids`; mirrors `gather_blocks`.

    An id that comes twice is refused: which of its blocks would win is nobody's intent.
    """
    _refuse_large_batch("block_ids", block_ids)
    try:
        _native.scatter_blocks(pool, block_ids, data, block_bytes)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error


def _refuse_large_batch(argument: str, items: Integers | Sequence[BytesLike]) -> None:
    try:
        count = len(items)
    except TypeError as error:
        raise CallerError(f"{argument}: {error}") from error
    if count > limits.BATCH_COPIES_MAX:
        raise LimitError(f"{argument}: {count} exceed {limits.BATCH_COPIES_MAX}")


# The twins: oracles in tests.


def pure_copy_checksum(destination: BytesLike, source: BytesLike) -> int:
    """Twin of `_native.copy_checksum`."""
    return _pure_run([(_flat(destination), _flat(source))])[0]


def pure_copy_checksum_many(
    destination: BytesLike,
    destination_offsets: Sequence[int],
    source: BytesLike,
    source_offsets: Sequence[int],
    length: int,
) -> bytes:
    """Twin of `_native.copy_checksum_many`."""
    if len(destination_offsets) != len(source_offsets):
        raise ValueError("destination_offsets: not as many as source_offsets")
    pairs = [
        (_slice(destination, to, length), _slice(source, start, length))
        for to, start in zip(destination_offsets, source_offsets, strict=True)
    ]
    return np.array(_pure_run(pairs), np.uint64).tobytes()


def pure_copy_checksum_pairs(
    destinations: Sequence[BytesLike], sources: Sequence[BytesLike]
) -> bytes:
    """Twin of `_native.copy_checksum_pairs`."""
    if len(destinations) != len(sources):
        raise ValueError("destinations: not as many as sources")
    pairs = [(_flat(to), _flat(start)) for to, start in zip(destinations, sources, strict=True)]
    return np.array(_pure_run(pairs), np.uint64).tobytes()


def pure_gather_blocks(
    out: BytesLike, pool: BytesLike, block_ids: Sequence[int], block_bytes: int
) -> None:
    """Twin of `_native.gather_blocks`."""
    blocks = _flat(pool).reshape(-1, block_bytes)
    if any(not 0 <= block < len(blocks) for block in block_ids):
        raise ValueError("block_ids: an id is outside the pool")
    target = _flat(out)
    if len(target) != len(block_ids) * block_bytes or np.shares_memory(target, blocks):
        raise ValueError("out: another size, or overlaps the pool")
    target[:] = blocks[np.array(block_ids, np.int64)].reshape(-1)


def pure_scatter_blocks(
    pool: BytesLike, block_ids: Sequence[int], data: BytesLike, block_bytes: int
) -> None:
    """Twin of `_native.scatter_blocks`."""
    blocks = _flat(pool).reshape(-1, block_bytes)
    if any(not 0 <= block < len(blocks) for block in block_ids):
        raise ValueError("block_ids: an id is outside the pool")
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("block_ids: an id is twice")
    given = _flat(data)
    if len(given) != len(block_ids) * block_bytes or np.shares_memory(given, blocks):
        raise ValueError("data: another size, or overlaps the pool")
    blocks[np.array(block_ids, np.int64)] = given.reshape(-1, block_bytes)


def _flat(buffer: BytesLike) -> npt.NDArray[np.uint8]:
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("a buffer is not contiguous")
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def _slice(buffer: BytesLike, offset: int, length: int) -> npt.NDArray[np.uint8]:
    flat = _flat(buffer)
    if length < 0 or not 0 <= offset <= len(flat) - length:
        raise ValueError("an offset is outside its buffer")
    return flat[offset : offset + length]


def _pure_run(pairs: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]) -> list[int]:
    for position, (to, start) in enumerate(pairs):
        others = [other for other, _ in pairs[:position]] + [source for _, source in pairs]
        if len(to) != len(start) or not to.flags.writeable:
            raise ValueError("a destination has another size or is read-only")
        if any(np.shares_memory(to, other) for other in others):
            raise ValueError("a destination overlaps another area")
    for to, start in pairs:
        to[:] = start
    return [pure_checksum(to) for to, _ in pairs]

"""The verified copies, gather and scatter of kvtier._native against their twins; nasty input."""

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native, limits
from kvtier.core import block_copy
from kvtier.errors import CallerError, LimitError
from kvtier.types import BytesLike

U8: TypeAlias = npt.NDArray[np.uint8]

DATA: U8 = np.frombuffer(random.Random(11).randbytes(3 << 20), np.uint8)
KIB = 1024
STREAMED = 256 * KIB
"""From this size on a call stores past the caches: another code path."""


@pytest.fixture(params=_native.CHECKSUM_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def zeros(size: int) -> U8:
    return np.zeros(size, np.uint8)


def assert_copied(path: str, size: int, source_start: int, destination_start: int) -> None:
    """Copies between unaligned starts: bytes, checksum and all bytes around must be right."""
    area = zeros(destination_start + size + 80)
    source = DATA[source_start : source_start + size]
    found = _native.copy_checksum(area[destination_start : destination_start + size], source, path)
    assert found == xxhash.xxh3_64_intdigest(source.tobytes())
    assert np.array_equal(area[destination_start : destination_start + size], source)
    assert not area[:destination_start].any()
    assert not area[destination_start + size :].any()


def test_every_size_up_to_two_rounds_is_copied_and_hashed(path: str) -> None:
    for size in range(2200):
        assert_copied(path, size, size % 67, size % 71)


@pytest.mark.parametrize("extra", [0, 1, 63, 64, 65, 1023, 1024])
def test_every_alignment_of_a_streamed_destination_is_right(path: str, extra: int) -> None:
    for start in range(65):
        assert_copied(path, STREAMED + extra, start // 3, start)


@settings(max_examples=60)
@given(
    size=st.integers(0, 2 * STREAMED),
    source_start=st.integers(0, 100),
    destination_start=st.integers(0, 100),
    path=st.sampled_from(_native.CHECKSUM_PATHS),
)
def test_any_copy_is_right_and_touches_nothing_else(
    size: int, source_start: int, destination_start: int, path: str
) -> None:
    assert_copied(path, size, source_start, destination_start)


@settings(max_examples=60)
@given(
    length=st.integers(0, 600),
    offsets=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 4000)), max_size=5),
    threads=st.integers(1, 3),
    path=st.sampled_from(_native.CHECKSUM_PATHS),
)
def test_many_copies_do_what_the_twin_does_or_refuse_what_it_refuses(
    length: int, offsets: list[tuple[int, int]], threads: int, path: str
) -> None:
    to_offsets = [to for to, _ in offsets]
    from_offsets = [start for _, start in offsets]
    source, here, there = DATA[:4000], zeros(4000), zeros(4000)
    try:
        expected = block_copy.pure_copy_checksum_many(
            there, to_offsets, source, from_offsets, length
        )
    except ValueError:
        with pytest.raises(ValueError, match=r"offsets: |destination: "):
            _native.copy_checksum_many(
                here, to_offsets, source, from_offsets, length, threads, path
            )
        assert not here.any()
        return
    found = _native.copy_checksum_many(
        here, np.array(to_offsets, np.int64), source, from_offsets, length, threads, path
    )
    assert found == expected
    assert np.array_equal(here, there)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 3000), max_size=6), threads=st.integers(1, 4))
def test_pairs_do_what_the_twin_does(sizes: list[int], threads: int) -> None:
    sources = [DATA[position : position + size] for position, size in enumerate(sizes)]
    here = [bytearray(size) for size in sizes]
    there = [bytearray(size) for size in sizes]
    expected = block_copy.pure_copy_checksum_pairs(there, sources)
    assert _native.copy_checksum_pairs(here, sources, threads) == expected
    assert here == there


def test_a_batch_of_blocks_on_several_threads_is_right() -> None:
    block, count = 64 * KIB, 32
    order = random.Random(3).sample(range(count), count)
    out = zeros(block * count)
    found = block_copy.copy_checksum_many(
        out, [block * i for i in range(count)], DATA, [block * i for i in order], block, threads=4
    )
    for position, chosen in enumerate(order):
        expected = DATA[block * chosen : block * (chosen + 1)]
        assert np.array_equal(out[block * position : block * (position + 1)], expected)
        assert found[position] == xxhash.xxh3_64_intdigest(expected.tobytes())
    assert not found.flags.writeable


def test_wrapper_copies_and_checks_like_the_native_function() -> None:
    out = bytearray(5000)
    expected = xxhash.xxh3_64_intdigest(DATA[:5000].tobytes())
    assert block_copy.copy_checksum(out, DATA[:5000]) == expected
    assert out == DATA[:5000].tobytes()
    twin = bytearray(5000)
    assert block_copy.pure_copy_checksum(twin, DATA[:5000]) == expected
    assert twin == out
    assert block_copy.copy_checksum_pairs([out], [DATA[:5000]]).tolist() == [expected]
    assert block_copy.copy_checksum_pairs([], []).tolist() == []


def test_bad_destinations_are_refused_before_anything_is_written() -> None:
    shared = np.arange(100, dtype=np.uint8)
    before = shared.copy()
    copy = _native.copy_checksum
    with pytest.raises(ValueError, match=r"destination: .*writable"):
        copy(b"12345678", b"abcdefgh")
    with pytest.raises(ValueError, match=r"destination: .*writable"):
        copy(DATA[:8], b"abcdefgh")
    with pytest.raises(ValueError, match="destination: 3 bytes for a source of 4"):
        copy(bytearray(3), b"abcd")
    with pytest.raises(ValueError, match=r"destination: .*contiguous"):
        copy(zeros(16)[::2], b"abcdefgh")
    with pytest.raises(ValueError, match=r"source: .*contiguous"):
        copy(bytearray(8), zeros(16)[::2])
    for start, end in ((0, 50), (1, 51), (49, 99)):
        with pytest.raises(ValueError, match="destination: overlaps the source"):
            copy(shared[start:end], shared[:50])
    with pytest.raises(TypeError, match="source: "):
        copy(bytearray(3), "abc")  # type: ignore[arg-type]
    assert np.array_equal(shared, before)
    assert copy(shared[50:], shared[:50]) == xxhash.xxh3_64_intdigest(before[:50].tobytes())


@pytest.mark.parametrize("dtype", ["O", [("number", "i8"), ("Object", "O")]])
def test_python_objects_are_neither_written_over_nor_copied(dtype: npt.DTypeLike) -> None:
    objects: npt.NDArray[np.void] = np.zeros(2, dtype)
    size = objects.nbytes
    for call in (
        lambda: block_copy.copy_checksum(objects, bytes(size)),
        lambda: block_copy.copy_checksum(bytearray(size), objects),
        lambda: block_copy.copy_checksum_pairs([objects], [bytes(size)]),
        lambda: block_copy.copy_checksum_many(objects, [0], bytes(size), [0], size),
        lambda: block_copy.gather_blocks(objects, bytes(size), [0], size),
        lambda: block_copy.scatter_blocks(objects, [0], bytes(size), size),
    ):
        with pytest.raises(CallerError, match="objects"):
            call()


def test_a_field_may_be_named_as_one_likes() -> None:
    target = np.zeros(1, [("O", "i8")])
    block_copy.copy_checksum(target, bytes([5]) + bytes(7))
    assert target["O"][0] == 5


def test_overlaps_within_a_batch_are_refused() -> None:
    area = zeros(1000)
    many = _native.copy_checksum_many
    with pytest.raises(ValueError, match="destination: two blocks overlap"):
        many(area, [0, 99], DATA, [0, 500], 100)
    with pytest.raises(ValueError, match="destination: two blocks overlap"):
        many(area, [300, 300], DATA, [0, 500], 100)
    with pytest.raises(ValueError, match="destination: overlaps the source"):
        many(area, [0, 100], area, [500, 99], 100)
    one = bytearray(10)
    with pytest.raises(ValueError, match="destination: two blocks overlap"):
        _native.copy_checksum_pairs([one, one], [b"a" * 10, b"b" * 10])
    assert not area.any()
    many(area, [0, 100], area, [200, 200], 100)
    assert not area.any()


def test_offsets_outside_the_buffers_are_refused() -> None:
    area = zeros(1000)
    for to, start in ((901, 0), (0, len(DATA) - 99), (2**63, 0), (0, 2**64 - 50), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="_offsets: "):
            _native.copy_checksum_many(area, [to], DATA, [start], 100)
    with pytest.raises(ValueError, match="destination_offsets: 1 for 2 source_offsets"):
        _native.copy_checksum_many(area, [0], DATA, [0, 100], 100)
    for length in (-1, 1001, 2**70):
        with pytest.raises(ValueError, match="length: outside"):
            _native.copy_checksum_many(area, [0], DATA, [0], length)
    for threads in (0, 65, -1):
        with pytest.raises(ValueError, match="threads: outside"):
            _native.copy_checksum_many(area, [0], DATA, [0], 8, threads)
    for wrong in ("8", 8.0, None, True):
        with pytest.raises(TypeError, match="length: "):
            _native.copy_checksum_many(area, [0], DATA, [0], wrong)  # type: ignore[arg-type]
    assert not area.any()


def test_offsets_that_lie_in_the_destination_itself_do_no_harm() -> None:
    # The array of offsets is overwritten by the copy it directs: it was read before.
    area = zeros(1600)
    offsets = area[:16].view(np.uint64)
    offsets[:] = [0, 800]
    source = DATA[:1600]
    found = np.frombuffer(_native.copy_checksum_many(area, offsets, source, [0, 800], 800))
    assert len(found) == 2
    assert np.array_equal(area, source)


def test_pairs_of_other_sizes_counts_and_types_are_refused() -> None:
    pairs = _native.copy_checksum_pairs
    with pytest.raises(ValueError, match="destinations: 1 for 0 sources"):
        pairs([bytearray(1)], [])
    with pytest.raises(ValueError, match="destinations: 2 bytes for a source of 1 at position 1"):
        pairs([bytearray(1), bytearray(2)], [b"a", b"b"])
    with pytest.raises(ValueError, match=r"destinations: .*writable"):
        pairs([b"a"], [b"b"])
    wrong: tuple[object, ...] = (b"abc", None, 5, {}, ["x"], [None])
    for sources in wrong:
        with pytest.raises((TypeError, ValueError), match=r"(sources|destinations): "):
            pairs([], sources)  # type: ignore[arg-type]


def test_wrappers_raise_caller_errors() -> None:
    calls: list[Callable[[], object]] = [
        lambda: block_copy.copy_checksum(b"read-only", b"read-only"),
        lambda: block_copy.copy_checksum_many(bytearray(8), [9], b"12345678", [0], 8),
        lambda: block_copy.copy_checksum_many(bytearray(8), [0], b"12345678", 0, 8),  # type: ignore[arg-type]
        lambda: block_copy.copy_checksum_pairs([b"a"], [b"b"]),
        lambda: block_copy.gather_blocks(bytearray(8), bytes(8), [1], 8),
        lambda: block_copy.gather_blocks(bytearray(8), bytes(8), None, 8),  # type: ignore[arg-type]
        lambda: block_copy.scatter_blocks(bytearray(8), [0, 0], bytes(8), 4),
    ]
    for call in calls:
        with pytest.raises(CallerError):
            call()
    too_many = np.zeros(limits.BATCH_COPIES_MAX + 1, np.uint32)
    with pytest.raises(LimitError):
        block_copy.gather_blocks(bytearray(0), bytes(8), too_many, 8)


def refused(call: Callable[[], None]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


@settings(max_examples=80)
@given(
    block_bytes=st.sampled_from([1, 7, 64, 5000]),
    pool_blocks=st.integers(0, 12),
    block_ids=st.lists(st.integers(0, 12), max_size=8),
    as_array=st.booleans(),
)
def test_gather_and_scatter_do_what_the_twins_do(
    block_bytes: int, pool_blocks: int, block_ids: list[int], as_array: bool
) -> None:
    ids: BytesLike | Sequence[int] = np.array(block_ids, np.int32) if as_array else block_ids
    size = block_bytes * len(block_ids)
    pool = DATA[: pool_blocks * block_bytes]
    here, there = bytearray(size), bytearray(size)
    outside = refused(lambda: block_copy.pure_gather_blocks(there, pool, block_ids, block_bytes))
    assert refused(lambda: _native.gather_blocks(here, pool, ids, block_bytes)) == outside
    assert here == there
    data = DATA[-size:] if size else zeros(0)
    pool_here, pool_there = bytearray(pool.tobytes()), bytearray(pool.tobytes())
    bad = refused(lambda: block_copy.pure_scatter_blocks(pool_there, block_ids, data, block_bytes))
    assert refused(lambda: _native.scatter_blocks(pool_here, ids, data, block_bytes)) == bad
    assert pool_here == pool_there


def test_large_gather_and_scatter_are_inverse() -> None:
    block, count = 20_000, 60
    pool = DATA[: block * count]
    ids = random.Random(5).sample(range(count), count)
    out = zeros(block * count)
    _native.gather_blocks(out, pool, ids, block)
    assert np.array_equal(out.reshape(count, block), pool.reshape(count, block)[ids])
    back = zeros(block * count)
    _native.scatter_blocks(back, np.array(ids, np.uint32), out, block)
    assert np.array_equal(back, pool)


def test_bad_gathers_and_scatters_are_refused() -> None:
    pool = zeros(100)
    with pytest.raises(ValueError, match="block_ids: an item exceeds 9"):
        _native.gather_blocks(zeros(10), pool, [10], 10)
    with pytest.raises(ValueError, match="block_ids: an item is negative"):
        _native.scatter_blocks(pool, [-1], zeros(10), 10)
    with pytest.raises(ValueError, match="block_ids: a block id is twice"):
        _native.scatter_blocks(pool, [3, 3], zeros(20), 10)
    with pytest.raises(ValueError, match="out: 19 bytes for 2 blocks of 10"):
        _native.gather_blocks(zeros(19), pool, [1, 2], 10)
    with pytest.raises(ValueError, match="pool: its size is no multiple"):
        _native.gather_blocks(zeros(7), pool, [1], 7)
    with pytest.raises(ValueError, match="out: overlaps the pool"):
        _native.gather_blocks(pool[:10], pool, [1], 10)
    with pytest.raises(ValueError, match="data: overlaps the pool"):
        _native.scatter_blocks(pool, [1], pool[5:15], 10)
    with pytest.raises(ValueError, match=r"pool: .*writable"):
        _native.scatter_blocks(bytes(100), [1], zeros(10), 10)
    with pytest.raises(ValueError, match="block_ids: the pool is empty"):
        _native.gather_blocks(zeros(10), b"", [0], 10)
    for block_bytes in (0, -1, 2**63):
        with pytest.raises(ValueError, match="block_bytes: outside"):
            _native.gather_blocks(zeros(0), pool, [], block_bytes)
    for ids in (None, 1.0, "1", [1.5], np.array([1.0])):
        with pytest.raises(TypeError, match="block_ids: "):
            _native.gather_blocks(zeros(10), pool, ids, 10)  # type: ignore[arg-type]

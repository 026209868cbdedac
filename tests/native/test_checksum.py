"""kvtier._native.checksum against the xxhash wheel and its twin, on every path of this CPU."""

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.checksum import checksum, pure_checksum
from kvtier.errors import CallerError

DATA = random.Random(7).randbytes(20_000)


@pytest.fixture(params=_native.CHECKSUM_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_fixed_vectors_are_met(path: str) -> None:
    assert _native.checksum(b"", path) == 0x2D06800538D394C2
    assert _native.checksum(b"abc", path) == 0x78AF5F94892F3950
    assert _native.checksum(bytes(range(256)) * 8, path) == 0xDD420471FF96BD00


def test_every_length_up_to_two_rounds_agrees_with_xxhash(path: str) -> None:
    for size in range(2200):
        assert _native.checksum(DATA[:size], path) == xxhash.xxh3_64_intdigest(DATA[:size])


def test_every_alignment_agrees_with_xxhash(path: str) -> None:
    view = memoryview(DATA)
    for start in range(70):
        expected = xxhash.xxh3_64_intdigest(DATA[start : start + 5000])
        assert _native.checksum(view[start : start + 5000], path) == expected


@settings(max_examples=50)
@given(data=st.binary(max_size=4000), path=st.sampled_from(_native.CHECKSUM_PATHS))
def test_checksum_equals_its_twin(data: bytes, path: str) -> None:
    assert _native.checksum(data, path) == pure_checksum(data)


def test_twin_agrees_with_xxhash_at_every_branch() -> None:
    sizes = [
        *range(0, 300, 7),
        1,
        2,
        3,
        4,
        8,
        9,
        16,
        17,
        128,
        129,
        240,
        241,
        1024,
        1025,
        2048,
        3073,
    ]
    for size in sizes:
        assert pure_checksum(DATA[:size]) == xxhash.xxh3_64_intdigest(DATA[:size])


def test_any_array_is_hashed_as_its_bytes() -> None:
    values = np.arange(600, dtype=np.float16).reshape(20, 30)
    expected = xxhash.xxh3_64_intdigest(values.tobytes())
    assert _native.checksum(values) == expected
    assert _native.checksum(values.data) == expected
    assert _native.checksum(bytearray(values.tobytes())) == expected
    assert checksum(values) == expected


def test_what_is_no_contiguous_buffer_is_refused() -> None:
    for buffer in (np.arange(10)[::2], np.zeros((4, 4)).T, memoryview(b"abcdef")[::2]):
        with pytest.raises(ValueError, match=r"buffer: .*contiguous"):
            _native.checksum(buffer)
    for wrong in ("text", 5, None, [1, 2]):
        with pytest.raises(TypeError, match="buffer: "):
            _native.checksum(wrong)  # type: ignore[arg-type]
        with pytest.raises(CallerError, match="buffer: "):
            checksum(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="path: "):
        _native.checksum(b"", "crc")


def test_released_memoryview_is_refused() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ValueError, match="buffer: "):
        _native.checksum(view)

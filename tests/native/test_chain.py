"""kvtier._native.prefix_chain against its twin, on every path of this processor; nasty input."""

import array
import hashlib
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.keys import pure_prefix_chain, pure_prefix_chain_hashes

ROOT = bytes(range(32))

# Recompute: sha256(bytes(range(32)) + struct.pack("<16I", *range(16))), then the same from its
# digest with range(16, 32), then with range(32, 48) and b"image-7" behind the tokens.
VECTOR = (
    "5d3128ecb23511bb8fc8b33f3dfa0703c04dbbef88c7b142d3810cc6ec9d9e56"
    "f16e4edb031447ea793edb3058fda698dfafdef4807df9a00665075bcf463012"
    "d63afa1bf9fb23ff4d0fd55a8429743a2d88336e21781119c173a4168e5cd5fd"
)  # fmt: skip


@pytest.fixture(params=_native.SHA256_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_fixed_vector_is_met(path: str) -> None:
    keys, hashes = _native.prefix_chain(ROOT, list(range(50)), 16, {2: b"image-7"}, path)
    assert keys.hex() == VECTOR
    assert hashes == keys[0:8] + keys[32:40] + keys[64:72]


def test_every_message_length_around_a_sha_chunk_agrees_with_hashlib(path: str) -> None:
    for extra_bytes in range(200):
        extra = bytes(extra_bytes)
        expected = hashlib.sha256(ROOT + struct.pack("<I", 7) + extra).digest()
        assert _native.prefix_chain(ROOT, [7], 1, {0: extra}, path)[0] == expected


@settings(max_examples=60)
@given(
    root=st.binary(min_size=32, max_size=32),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    block_tokens=st.integers(1, 40),
    extras=st.dictionaries(st.integers(0, 8), st.binary(max_size=100), max_size=4),
    path=st.sampled_from(_native.SHA256_PATHS),
)
def test_chain_equals_its_twin(
    root: bytes, tokens: list[int], block_tokens: int, extras: dict[int, bytes], path: str
) -> None:
    begun = -(-len(tokens) // block_tokens)
    extras = {block: extra for block, extra in extras.items() if block < begun}
    expected = pure_prefix_chain(root, tokens, block_tokens, extras)
    assert _native.prefix_chain(root, tokens, block_tokens, extras, path) == expected
    array_of_tokens = np.array(tokens, dtype=np.uint32)
    assert _native.prefix_chain(root, array_of_tokens, block_tokens, extras, path) == expected
    hashes = pure_prefix_chain_hashes(root, tokens, block_tokens, extras)
    assert _native.prefix_chain_hashes(root, tokens, block_tokens, extras, path) == hashes


@pytest.mark.parametrize("dtype", ["u4", "i4", "u8", "i8", "<u4"])
def test_every_integer_array_gives_the_chain_of_the_list(dtype: str) -> None:
    tokens = [(i * 7919) % 2**31 for i in range(1000)]
    expected = _native.prefix_chain(ROOT, tokens, 16)
    assert _native.prefix_chain(ROOT, np.array(tokens, dtype=dtype), 16) == expected


def test_readonly_unaligned_and_standard_library_arrays_are_read_in_place() -> None:
    tokens = list(range(100, 164))
    expected = pure_prefix_chain(ROOT, tokens, 16)
    packed = struct.pack("<64I", *tokens)
    unaligned = np.frombuffer(b"x" + packed, dtype=np.uint32, offset=1)
    assert not unaligned.flags.aligned
    readonly = np.frombuffer(packed, dtype=np.uint32)
    assert not readonly.flags.writeable
    for given_tokens in (
        unaligned,
        readonly,
        memoryview(array.array("I", tokens)),
        memoryview(array.array("q", tokens)),
        tuple(tokens),
        [int(token) for token in tokens],
    ):
        assert _native.prefix_chain(ROOT, given_tokens, 16) == expected
    numpy_items: list[int] = list(np.array(tokens))
    assert _native.prefix_chain(ROOT, numpy_items, 16) == expected
    for root in (bytearray(ROOT), memoryview(ROOT), np.frombuffer(ROOT, dtype=np.uint8)):
        assert _native.prefix_chain(root, tokens, 16) == expected


def test_top_token_is_hashed_and_one_more_is_refused() -> None:
    top = 2**32 - 1
    assert _native.prefix_chain(ROOT, [top], 1) == pure_prefix_chain(ROOT, [top], 1)
    for too_large in ([top + 1], [2**63], [2**64], [2**200], np.array([0, top + 1])):
        with pytest.raises(ValueError, match="tokens: an item exceeds 4294967295"):
            _native.prefix_chain(ROOT, too_large, 1)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [-(2**70)], np.array([0, -1], dtype=np.int32), np.array([3, -9], dtype=np.int64)],
    ids=repr,
)
def test_negative_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="tokens: an item is negative"):
        _native.prefix_chain(ROOT, tokens, 1)


@pytest.mark.parametrize(
    "tokens",
    [
        [1.0],
        ["1"],
        [None],
        [True],
        None,
        7,
        "12",
        b"12345678",
        {1, 2},
        range(4),
        np.array([1.0]),
        np.array([1, 2], dtype=np.uint8),
        np.array([1, 2], dtype=np.int16),
        np.array([True, False]),
        np.array([1, 2], dtype=">u4"),
        np.array([1, 2], dtype=object),
        np.array([1 + 2j]),
        np.zeros(2, dtype=[("a", "<u4")]),
        np.array(["2026-01-01"], dtype="M8[s]"),
    ],
    ids=repr,
)
def test_what_is_no_integer_array_is_refused(tokens: list[int]) -> None:
    with pytest.raises((TypeError, ValueError), match="tokens: "):
        _native.prefix_chain(ROOT, tokens, 1)


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(64, dtype=np.uint32)[::2],
        np.arange(64, dtype=np.uint32)[::-1],
        np.arange(64, dtype=np.uint32).reshape(8, 8),
        np.array(5, dtype=np.uint32),
    ],
    ids=["strided", "reversed", "2-D", "0-D"],
)
def test_arrays_of_another_shape_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"tokens: .*(contiguous|dimension)"):
        _native.prefix_chain(ROOT, tokens, 1)


def test_bad_roots_sizes_extras_and_paths_are_refused() -> None:
    for root in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="root: 32 bytes"):
            _native.prefix_chain(root, [1], 1)
    for block_tokens in (0, -1, 2**20 + 1, 2**80):
        with pytest.raises(ValueError, match="block_tokens: outside"):
            _native.prefix_chain(ROOT, [1], block_tokens)
    for block in (-1, 2, 2**80):
        with pytest.raises(ValueError, match="extras: a block index"):
            _native.prefix_chain(ROOT, [1, 2, 3], 2, {block: b""})
    with pytest.raises(ValueError, match="path: "):
        _native.prefix_chain(ROOT, [1], 1, None, "quantum")


def test_arguments_of_a_wrong_type_are_refused() -> None:
    wrong: list[tuple[object, ...]] = [
        ("root", [1], 1),
        (ROOT, [1], 1.0),
        (ROOT, [1], "1"),
        (ROOT, [1], 1, [b""]),
        (ROOT, [1], 1, {"0": b""}),
        (ROOT, [1], 1, {0: "text"}),
        (ROOT, [1], 1, {0: bytearray(b"x")}),
        (ROOT, [1], 1, None, 3),
    ]
    for arguments in wrong:
        with pytest.raises(TypeError):
            _native.prefix_chain(*arguments)  # type: ignore[arg-type]


def test_extras_of_the_unfinished_block_are_ignored_with_it() -> None:
    without = _native.prefix_chain(ROOT, [1, 2], 2)
    assert _native.prefix_chain(ROOT, [1, 2, 3], 2, {1: b"x"}) == without


class Item:
    """Runs code of its own where an int is asked for."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __index__(self) -> int:
        if not self.tokens:
            raise RuntimeError("no index today")
        self.tokens.clear()
        return 5


def test_item_that_shrinks_its_own_list_does_no_harm() -> None:
    tokens: list[int] = [1, 2, 3, 4]
    tokens[1] = Item(tokens)  # type: ignore[call-overload]
    assert _native.prefix_chain(ROOT, tokens, 4) == pure_prefix_chain(ROOT, [1, 5, 3, 4], 4)
    assert tokens == []


def test_error_of_an_item_reaches_the_caller() -> None:
    tokens: list[int] = [Item([])]  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="no index today"):
        _native.prefix_chain(ROOT, tokens, 1)


def test_buffer_is_released_after_the_call() -> None:
    tokens = array.array("I", range(64))
    with memoryview(tokens) as view:
        _native.prefix_chain(ROOT, view, 16)
    tokens.append(1)  # a BufferError if an export had leaked
    assert len(tokens) == 65


def test_threads_at_once_get_the_result_of_one() -> None:
    tokens = np.arange(200_000, dtype=np.uint32)
    expected = _native.prefix_chain(ROOT, tokens, 16)
    results: list[tuple[bytes, bytes]] = []
    threads = [
        threading.Thread(target=lambda: results.append(_native.prefix_chain(ROOT, tokens, 16)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4

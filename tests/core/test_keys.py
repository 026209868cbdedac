"""kvtier.core.keys: the public chain functions and what they refuse."""

import hashlib
import struct
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core.keys import (
    KEY_BYTES,
    prefix_hash,
    prefix_hashes,
    prefix_keys,
    pure_prefix_chain,
)
from kvtier.errors import CallerError, LimitError
from kvtier.types import Integers

ROOT = hashlib.sha256(b"a pool").digest()


def recomputed(root: bytes, tokens: list[int], block_tokens: int) -> list[bytes]:
    """The chain as the module's docstring states it, in the few lines an outsider needs."""
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        packed = struct.pack(f"<{block_tokens}I", *tokens[start : start + block_tokens])
        root = hashlib.sha256(root + packed).digest()
        keys.append(root)
    return keys


def test_keys_and_hashes_are_what_an_outsider_recomputes() -> None:
    tokens = list(range(70))
    found = prefix_keys(ROOT, tokens, 16)
    expected = recomputed(ROOT, tokens, 16)
    assert len(found) == 4
    assert [found.key(block) for block in range(4)] == expected
    assert [found.hash(block) for block in range(4)] == [
        int.from_bytes(key[:8], "little") for key in expected
    ]
    assert prefix_hash(expected[1]) == found.hash(1)


def test_result_arrays_are_contiguous_and_readonly() -> None:
    found = prefix_keys(ROOT, list(range(64)), 16)
    assert found.keys.shape == (4, KEY_BYTES)
    assert found.keys.dtype == np.uint8
    assert found.hashes.shape == (4,)
    assert found.hashes.dtype == np.uint64
    only_hashes = prefix_hashes(ROOT, list(range(64)), 16)
    assert only_hashes.tolist() == found.hashes.tolist()
    for flags in (found.keys.flags, found.hashes.flags, only_hashes.flags):
        assert flags.c_contiguous
        assert flags.aligned
        assert not flags.writeable


@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=120),
    block_tokens=st.integers(1, 20),
    cut=st.integers(0, 120),
)
def test_resuming_from_a_parent_key_continues_the_chain(
    tokens: list[int], block_tokens: int, cut: int
) -> None:
    whole = prefix_keys(ROOT, tokens, block_tokens)
    cut_blocks = min(cut, len(whole))
    parent = whole.key(cut_blocks - 1) if cut_blocks else ROOT
    rest = prefix_keys(parent, tokens[cut_blocks * block_tokens :], block_tokens)
    assert np.array_equal(rest.keys, whole.keys[cut_blocks:])
    assert np.array_equal(rest.hashes, whole.hashes[cut_blocks:])
    assert np.array_equal(whole.hashes, prefix_hashes(ROOT, tokens, block_tokens))


def test_one_changed_token_changes_its_block_and_all_after_it() -> None:
    tokens = np.arange(160, dtype=np.uint32)
    before = prefix_hashes(ROOT, tokens, 16)
    tokens[40] += 1
    after = prefix_hashes(ROOT, tokens, 16)
    assert (before == after).tolist() == [True] * 2 + [False] * 8


def test_extras_change_their_block_and_all_after_it() -> None:
    tokens = list(range(64))
    plain = prefix_hashes(ROOT, tokens, 16)
    extras: Mapping[int, bytes] = MappingProxyType({1: b"image"})
    tagged = prefix_hashes(ROOT, tokens, 16, extras)
    assert (plain == tagged).tolist() == [True, False, False, False]
    keys, _ = pure_prefix_chain(ROOT, tokens, 16, {1: b"image"})
    assert prefix_keys(ROOT, tokens, 16, extras).keys.tobytes() == keys
    assert np.array_equal(prefix_hashes(ROOT, tokens, 16, {1: memoryview(b"image")}), tagged)


def test_empty_and_short_prompts_have_no_blocks() -> None:
    prompts: list[Integers] = [[], (), np.array([], dtype=np.uint32), list(range(15))]
    for tokens in prompts:
        found = prefix_keys(ROOT, tokens, 16)
        assert len(found) == 0
        assert found.keys.shape == (0, KEY_BYTES)
        assert prefix_hashes(ROOT, tokens, 16).shape == (0,)


def test_a_prompt_of_a_million_tokens_is_hashed() -> None:
    tokens = np.arange(1_000_000, dtype=np.uint32)
    found = prefix_keys(ROOT, tokens, 16)
    assert len(found) == 62_500
    parent = found.key(62_498)
    packed = struct.pack("<16I", *range(999_984, 1_000_000))
    assert found.key(62_499) == hashlib.sha256(parent + packed).digest()


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        5,
        "text",
        b"bytes of tokens!",
        [-1],
        [2**32],
        [0.5],
        [True],
        np.array([1.5]),
        np.array([-1]),
        np.array([2**32]),
        np.array([[1, 2]]),
        np.array(3),
        np.arange(10)[::2],
    ],
    ids=repr,
)
def test_bad_tokens_are_a_caller_error_that_names_them(tokens: list[int]) -> None:
    with pytest.raises(CallerError, match=r"^tokens: "):
        prefix_keys(ROOT, tokens, 1)
    with pytest.raises(CallerError, match=r"^tokens: "):
        prefix_hashes(ROOT, tokens, 1)


def test_other_bad_arguments_are_caller_errors() -> None:
    with pytest.raises(CallerError, match=r"^root: "):
        prefix_keys(b"short", [1], 1)
    for block_tokens in (0, -3, 1.5, None):
        with pytest.raises(CallerError, match=r"^block_tokens: "):
            prefix_keys(ROOT, [1], block_tokens)  # type: ignore[arg-type]
    for extras in ({9: b"x"}, {-1: b"x"}, {0: "x"}, {0: 5}, {"0": b"x"}, [b"x"], 5):
        with pytest.raises(CallerError, match=r"^extras: "):
            prefix_keys(ROOT, [1], 1, extras)  # type: ignore[arg-type]
    for key in (b"short", "x" * 32, bytearray(32), None):
        with pytest.raises(CallerError, match=r"^key: "):
            prefix_hash(key)  # type: ignore[arg-type]


def test_ceilings_are_limit_errors() -> None:
    with pytest.raises(LimitError, match=r"^block_tokens: "):
        prefix_keys(ROOT, [1], limits.BLOCK_TOKENS_MAX + 1)
    with pytest.raises(LimitError, match=r"^extras: "):
        prefix_keys(ROOT, [1], 1, {0: bytes(limits.EXTRAS_BYTES_MAX + 1)})
    too_many = np.zeros(limits.PROMPT_TOKENS_MAX + 1, dtype=np.uint32)
    with pytest.raises(LimitError, match=r"^tokens: "):
        prefix_hashes(ROOT, too_many, 16)

"""The prefix-key chain: 32-byte names of blocks, and their 8-byte hashes, from token ids.

    key_i = SHA-256(key_{i-1} || tokens of block i as u32 little-endian || extras_i)
    key_{-1} = root

What must not live here: the root (kvtier.core.identity computes it) and how extras are encoded (the
caller does that); both are bytes to this module.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvtier import _native, limits
from kvtier.errors import CallerError, LimitError
from kvtier.types import BytesLike, Integers, PrefixHash, PrefixKey

KEY_BYTES = 32
HASH_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PrefixKeys:
    """Keys and hashes of consecutive blocks; both arrays are contiguous and read-only.

    keys: u8[n, 32]. hashes: u64[n], the first 8 bytes of each key read as little-endian.
    """

    keys: npt.NDArray[np.uint8]
    hashes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.hashes)

    def key(self, block: int) -> PrefixKey:
        """The key of one block as bytes."""
        return PrefixKey(self.keys[block].tobytes())

    def hash(self, block: int) -> PrefixHash:
        """The hash of one block as an int."""
        return PrefixHash(int(self.hashes[block]))


def prefix_keys(
    root: bytes, tokens: Integers, block_tokens: int, extras: Mapping[int, BytesLike] | None = None
) -> PrefixKeys:
    """Keys and hashes of the full blocks of `tokens`; mutates nothing.

    `root` is the pool's root, or the key of the block before the first token: then the chain
    resumes there. `extras` maps a block's position in `tokens` to encoded bytes; absent means
    empty, and extras of the last, unfinished block are ignored with it. Releases the GIL for all
    but short prompts. O(tokens). Raises CallerError for what is not a token array, for tokens
    outside u32 and for extras of blocks that do not exist, LimitError beyond a ceiling.
    """
    checked = _checked(tokens, block_tokens, extras)
    try:
        keys, hashes = _native.prefix_chain(root, tokens, block_tokens, checked)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error
    blocks = len(hashes) // HASH_BYTES
    return PrefixKeys(
        keys=np.ndarray((blocks, KEY_BYTES), np.uint8, keys),
        hashes=np.ndarray((blocks,), np.uint64, hashes),
    )


def prefix_hashes(
    root: bytes, tokens: Integers, block_tokens: int, extras: Mapping[int, BytesLike] | None = None
) -> npt.NDArray[np.uint64]:
    """As `prefix_keys`, but only the hashes, which is what a router needs: u64[n], read-only."""
    checked = _checked(tokens, block_tokens, extras)
    try:
        hashes = _native.prefix_chain_hashes(root, tokens, block_tokens, checked)
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error
    return np.ndarray((len(hashes) // HASH_BYTES,), np.uint64, hashes)


def prefix_hash(key: bytes) -> PrefixHash:
    """The hash of a key: its first 8 bytes as little-endian u64."""
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise CallerError(f"key: {KEY_BYTES} bytes are needed, not {key!r:.80}")
    return PrefixHash(int.from_bytes(key[:HASH_BYTES], "little"))


def _checked(
    tokens: Integers, block_tokens: int, extras: Mapping[int, BytesLike] | None
) -> dict[int, bytes] | None:
    """Holds the arguments against the ceilings; returns extras as the native side takes them."""
    try:
        tokens_count = len(tokens)
    except TypeError as error:
        raise CallerError(f"tokens: {error}") from error
    if tokens_count > limits.PROMPT_TOKENS_MAX:
        raise LimitError(f"tokens: {tokens_count} exceed {limits.PROMPT_TOKENS_MAX}")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise CallerError(f"block_tokens: a positive int is needed, not {block_tokens!r}")
    if block_tokens > limits.BLOCK_TOKENS_MAX:
        raise LimitError(f"block_tokens: {block_tokens} exceeds {limits.BLOCK_TOKENS_MAX}")
    if extras is None:
        return None
    if not isinstance(extras, Mapping):
        raise CallerError(f"extras: a mapping is needed, not a {type(extras).__name__}")
    return {block: _checked_extra(block, extra) for block, extra in extras.items()}


def _checked_extra(block: int, extra: BytesLike) -> bytes:
    if not isinstance(extra, bytes | bytearray | memoryview | np.ndarray):
        raise CallerError(f"extras: block {block} has a {type(extra).__name__}, not bytes")
    encoded = bytes(extra)
    if len(encoded) > limits.EXTRAS_BYTES_MAX:
        raise LimitError(
            f"extras: block {block} has {len(encoded)} bytes, more than {limits.EXTRAS_BYTES_MAX}"
        )
    return encoded


def pure_prefix_chain(
    root: BytesLike, tokens: Integers, block_tokens: int, extras: dict[int, bytes] | None = None
) -> tuple[bytes, bytes]:
    """Twin of `_native.prefix_chain`, its oracle in tests: keys and hashes, one after another."""
    key = bytes(root)
    if len(key) != KEY_BYTES:
        raise ValueError("root: 32 bytes are needed")
    if block_tokens < 1:
        raise ValueError("block_tokens: a positive int is needed")
    values = _pure_tokens(tokens)
    blocks_begun = -(-len(values) // block_tokens)
    given = extras or {}
    if any(not 0 <= block < blocks_begun for block in given):
        raise ValueError("extras: a block index lies outside the blocks of the tokens")
    keys: list[bytes] = []
    for block in range(len(values) // block_tokens):
        message = hashlib.sha256(key)
        for token in values[block * block_tokens : (block + 1) * block_tokens]:
            message.update(token.to_bytes(4, "little"))
        message.update(given.get(block, b""))
        key = message.digest()
        keys.append(key)
    return b"".join(keys), b"".join(key[:HASH_BYTES] for key in keys)


def pure_prefix_chain_hashes(
    root: BytesLike, tokens: Integers, block_tokens: int, extras: dict[int, bytes] | None = None
) -> bytes:
    """Twin of `_native.prefix_chain_hashes`."""
    return pure_prefix_chain(root, tokens, block_tokens, extras)[1]


def _pure_tokens(tokens: Integers) -> list[int]:
    if isinstance(tokens, list | tuple):
        if any(
            not isinstance(token, int | np.integer) or isinstance(token, bool) for token in tokens
        ):
            raise TypeError("tokens: an item is not an int")
        values = [int(token) for token in tokens]
    else:
        array = np.asarray(memoryview(tokens))  # type: ignore[arg-type]
        if array.dtype.kind not in "iu" or array.itemsize not in {4, 8} or not array.dtype.isnative:
            raise TypeError("tokens: 4- or 8-byte integers are needed")
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("tokens: a contiguous array of one dimension is needed")
        values = [int(token) for token in array]
    if any(not 0 <= token <= limits.TOKEN_ID_MAX for token in values):
        raise ValueError("tokens: an item is outside u32")
    return values

"""The prefix hashes of a request's blocks, for the index: as many as its tokens have whole blocks.

What must not live here: vLLM's own digests, which name the bytes.
"""

from collections.abc import Sequence
from typing import overload

import numpy as np

from kvtier.core.keys import prefix_keys


class PrefixHashes(Sequence[int]):
    """Hashes of a list of tokens that grows; each block is hashed once, when it is asked for."""

    def __init__(self, root: bytes, tokens: Sequence[int], block_tokens: int) -> None:
        """`tokens` is read anew at each question and may only grow."""
        self._key = root
        self._keys: list[bytes] = []
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._hashes: list[int] = []

    def __len__(self) -> int:
        self._catch_up()
        return len(self._hashes)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        self._catch_up()
        return self._hashes[at]

    def key(self, at: int) -> bytes:
        """The whole prefix key of a block. IndexError for one that is not whole yet."""
        self._catch_up()
        return self._keys[at]

    def _catch_up(self) -> None:
        done = len(self._hashes) * self._block_tokens
        whole = len(self._tokens) // self._block_tokens * self._block_tokens
        if done >= whole:
            return
        new = np.asarray(self._tokens[done:whole], np.uint32)
        keys = prefix_keys(self._key, new, self._block_tokens)
        self._keys += [bytes(keys.key(block)) for block in range(len(keys))]
        self._key = self._keys[-1]
        self._hashes += keys.hashes.tolist()

from collections.abc import Sequence
from typing import TypeAlias

from kvtier.types import BytesLike

_Integers: TypeAlias = BytesLike | Sequence[int]

ABI_VERSION: int

# What this processor can run, best first: the values of a `path` argument, beside "best".
SHA256_PATHS: tuple[str, ...]
CHECKSUM_PATHS: tuple[str, ...]

def prefix_chain(
    root: BytesLike,
    tokens: _Integers,
    block_tokens: int,
    extras: dict[int, bytes] | None = None,
    path: str = "best",
) -> tuple[bytes, bytes]: ...
def prefix_chain_hashes(
    root: BytesLike,
    tokens: _Integers,
    block_tokens: int,
    extras: dict[int, bytes] | None = None,
    path: str = "best",
) -> bytes: ...
def checksum(buffer: BytesLike, path: str = "best") -> int: ...

from collections.abc import Sequence

from kvtier.types import BytesLike, Integers

ABI_VERSION: int
SANITIZED: bool

# What this processor can run, best first: the values of a `path` argument, beside "best".
SHA256_PATHS: tuple[str, ...]
CHECKSUM_PATHS: tuple[str, ...]

def prefix_chain(
    root: BytesLike,
    tokens: Integers,
    block_tokens: int,
    extras: dict[int, bytes] | None = None,
    path: str = "best",
) -> tuple[bytes, bytes]: ...
def prefix_chain_hashes(
    root: BytesLike,
    tokens: Integers,
    block_tokens: int,
    extras: dict[int, bytes] | None = None,
    path: str = "best",
) -> bytes: ...
def checksum(buffer: BytesLike, path: str = "best") -> int: ...
def copy_checksum(destination: BytesLike, source: BytesLike, path: str = "best") -> int: ...
def copy_checksum_many(
    destination: BytesLike,
    destination_offsets: Integers,
    source: BytesLike,
    source_offsets: Integers,
    length: int,
    threads: int = 1,
    path: str = "best",
) -> bytes: ...
def copy_checksum_pairs(
    destinations: Sequence[BytesLike],
    sources: Sequence[BytesLike],
    threads: int = 1,
    path: str = "best",
) -> bytes: ...
def gather_blocks(
    out: BytesLike, pool: BytesLike, block_ids: Integers, block_bytes: int
) -> None: ...
def scatter_blocks(
    pool: BytesLike, block_ids: Integers, data: BytesLike, block_bytes: int
) -> None: ...

class SlotAllocator:
    def __init__(self, slots_count: int) -> None: ...
    def allocate(self, count: int) -> bytes | None: ...
    def allocate_up_to(self, count: int) -> bytes: ...
    def free(self, slots: Integers) -> None: ...
    def quarantine(self, slots: Integers) -> None: ...
    def release_quarantine(self, slots: Integers) -> None: ...
    @property
    def slots_count(self) -> int: ...
    @property
    def free_count(self) -> int: ...
    @property
    def used_count(self) -> int: ...
    @property
    def quarantined_count(self) -> int: ...

from collections.abc import Sequence
from typing import TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.types import BytesLike, Integers

_T = TypeVar("_T")

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
def copy_from_file(descriptor: int, offset: int, head: BytesLike, body: BytesLike) -> int: ...
def copy_from_file_cached(
    descriptor: int, offset: int, head: BytesLike, body: BytesLike
) -> int | None: ...
def warm_from_file(descriptor: int, offset: int, size: int) -> bool: ...
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

_Counts: TypeAlias = tuple[int, int, int, int, int]
"""stored, removed, unknown, refused, evicted"""

class _IndexStats(TypedDict):  # shape of a plain dict; no class at runtime
    blocks: int
    holdings: int
    predicted: int
    pages: int
    tickets: int
    bytes: int
    evicted: int
    matches: int
    blocks_queried: int
    blocks_found: int
    holders: list[tuple[int, bool, tuple[int, int, int, int], int]]

class MatchResult:
    @property
    def blocks_queried(self) -> int: ...
    @property
    def blocks_found(self) -> int: ...
    @property
    def workers(self) -> npt.NDArray[np.uint32]: ...
    @property
    def tokens(self) -> npt.NDArray[np.uint64]: ...
    @property
    def run_offsets(self) -> npt.NDArray[np.uint32]: ...
    @property
    def run_sources(self) -> npt.NDArray[np.uint8]: ...
    @property
    def run_blocks(self) -> npt.NDArray[np.uint32]: ...
    def __len__(self) -> int: ...

class PrefixIndex:
    def __init__(
        self,
        bytes_max: int,
        holders_max: int,
        shards_max: int,
        block_tokens_max: int,
        batch_events_max: int,
        batch_blocks_max: int,
        match_blocks_max: int,
        copies_max: int,
        tickets_per_worker_max: int,
    ) -> None: ...
    def add_holder(
        self,
        holder: int,
        kind: int,
        node: int,
        namespaces: Sequence[int],
        pool: int,
        block_tokens: int,
    ) -> None: ...
    def remove_holder(self, holder: int) -> None: ...
    def hide(self, holder: int) -> None: ...
    def resume(self, holder: int) -> None: ...
    def holders(self) -> list[int]: ...
    def apply(
        self,
        holder: int,
        shard: int,
        kinds: Integers,
        tiers: Integers,
        lengths: Integers,
        parents: Integers,
        hashes: Integers,
    ) -> _Counts: ...
    def apply_messages(
        self, holder: int, shard: int, seq: int, messages: list[bytes], room_blocks: int
    ) -> tuple[int, int, int, int, int, int, int]: ...
    def store(
        self, holder: int, tier: int, shard: int, hashes: Integers, parent: int = 0
    ) -> _Counts: ...
    def remove(self, holder: int, tier: int, shard: int, hashes: Integers) -> _Counts: ...
    def clear(self, holder: int, tier: int | None = None, shard: int | None = None) -> int: ...
    def match(self, hashes: Integers, pool: int = -1) -> MatchResult: ...
    def match_many(self, queries: Sequence[Integers], pool: int = -1) -> list[MatchResult]: ...
    def locate(
        self, hashes: Integers, namespace: int, most: int, turn: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]: ...
    def snapshot(
        self, holder: int, tier: int, shard: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]: ...
    def load(
        self, holder: int, tier: int, shard: int, hashes: Integers, run_lengths: Integers
    ) -> _Counts: ...
    def digest(self, holder: int, tier: int, shard: int) -> tuple[int, int]: ...
    def predict(self, worker: int, hashes: Integers, ticket: int, expires_at: float) -> bool: ...
    def release(self, ticket: int) -> bool: ...
    def expire(self, now: float) -> int: ...
    def stats(self) -> _IndexStats: ...

ARENA_ABI_VERSION: int

def arena_publish(directory: BytesLike, names: bytes, blocks: bytes) -> bytes: ...
def arena_remove(directory: BytesLike, entries: Integers, names: bytes) -> None: ...
def arena_find(directory: BytesLike, names: bytes) -> bytes: ...
def arena_unchanged(directory: BytesLike, entries: Integers, generations: Integers) -> bytes: ...
def arena_offsets(segment: BytesLike, payloads: Sequence[BytesLike]) -> bytes: ...
def arena_read(
    directory: BytesLike,
    slots: BytesLike,
    names: bytes,
    lengths: Integers,
    destinations: Sequence[BytesLike],
) -> bytes: ...

class RingGiver:
    def __init__(self, ring_bytes: int) -> None: ...
    def give(
        self, segment: BytesLike, sources: Sequence[BytesLike], label: int, wait_us: int
    ) -> tuple[bytes, int]: ...

class RingTaker:
    def __init__(self, ring_bytes: int) -> None: ...
    @property
    def is_between(self) -> bool: ...
    def take(
        self,
        segment: BytesLike,
        slots: BytesLike,
        places: Integers,
        label: int,
        bytes_max: int,
        idle_us: int,
    ) -> tuple[bytes, int]: ...

def instances(kind: type[_T], columns: tuple[object, ...], count: int) -> list[_T]: ...

class Words:
    def __init__(
        self,
        cut: str,
        digits: int,
        bytes: Integers,
        merges: Integers,
        whole: dict[bytes, int] | None = None,
    ) -> None: ...
    def encode(self, text: str, start: int = 0, head: int | None = None) -> bytes | None: ...

class Scorer:
    def __init__(
        self,
        slots: Integers,
        holders: Integers,
        fixed: npt.NDArray[np.float64],
        ranking: Integers,
        weights: npt.NDArray[np.float64],
        groups: Sequence[tuple[Integers, int, int]],
    ) -> None: ...
    def set_speeds(
        self,
        token_s: npt.NDArray[np.float64],
        pair_s: npt.NDArray[np.float64],
        latency_s: npt.NDArray[np.float64],
        byte_s: npt.NDArray[np.float64],
    ) -> None: ...
    def begin(self) -> None: ...
    def add(self, group: int, result: MatchResult) -> None: ...
    def decide(
        self,
        columns: npt.NDArray[np.float64],
        foreign: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        asked: tuple[float, float, float, float],
        hashes: Integers,
        group: int,
    ) -> tuple[
        int,
        float,
        float,
        float,
        float,
        float,
        float,
        tuple[float, float, float, float, float, float],
        bytes,
    ]: ...

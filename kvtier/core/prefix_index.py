"""The map from prefix hashes to holders: who could serve which prefix, and from where.

Public types, the Protocol that the native index and its oracle (kvtier.core.naive_index) share, and
the thin front of the native one. Soft state: hints, never truth. What must not live here: epochs
and sequences (kvtier.core.events), which worker to choose (kvtier.core.scoring), clocks.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier import _native, limits
from kvtier.errors import CallerError
from kvtier.types import HolderId, HolderKind, Integers, Source, Tier

ANY_POOL: Final = -1
"""Match workers of every pool."""

Packed: TypeAlias = Integers
"""A one-dimensional C-contiguous array of exactly the stated unsigned type, or its little-endian
bytes: both read in place, may be read-only, and must not change during the call. Or a list or
tuple of ints, which is copied."""


@dataclasses.dataclass(frozen=True, slots=True)
class HolderSpec:
    """What a holder is. `node`, `namespaces` and `pool` are small ints that the caller interned.

    A WORKER has one namespace per shard (rank); a STORE (one per store and namespace) and a SHARED
    holder have exactly one. Only a worker's pool and block_tokens count.
    """

    kind: HolderKind
    node: int
    namespaces: tuple[int, ...]
    pool: int
    block_tokens: int


TIERS_OF_KIND: Final = {
    HolderKind.WORKER: (Tier.GPU,),
    HolderKind.STORE: (Tier.DRAM, Tier.NVME),
    HolderKind.SHARED: (Tier.REDIS,),
}
"""Where a holder of a kind may hold blocks."""


class EventColumns(Protocol):
    """n events as columns; `kvtier.core.event_columns.EventBatch` is one.

    kinds: u8[n], EventKind. tiers: u8[n]. lengths: u32[n], blocks of each event, 0 for clears.
    parents: u64[n], the hash before a store's first block, 0 for none or unknown: a hint where to
    place blocks, never needed for a match. hashes: u64[sum(lengths)].
    """

    @property
    def kinds(self) -> Packed: ...
    @property
    def tiers(self) -> Packed: ...
    @property
    def lengths(self) -> Packed: ...
    @property
    def parents(self) -> Packed: ...
    @property
    def hashes(self) -> Packed: ...


class ApplyResult(NamedTuple):
    """What a change did, in copies of blocks. A tuple: one is made for every event batch."""

    stored: int = 0
    removed: int = 0
    unknown: int = 0
    """Removes of blocks that were not held."""
    refused: int = 0
    """Stores of a block of which COPIES_COUNT_MAX copies are counted already."""
    evicted: int = 0
    """Copies of any holder that the byte budget pushed out; see HolderStats.truncated."""


class AppliedRun(NamedTuple):
    """What a run of messages did; counts as in `ApplyResult`, of all of them."""

    messages: int = 0
    """How many of them were applied: none of the others has changed anything."""
    events: int = 0
    stored: int = 0
    removed: int = 0
    unknown: int = 0
    refused: int = 0
    evicted: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All that one (holder, tier, shard) holds.

    hashes: u64[n], a block as often as it is held. run_lengths: u32[r], adding up to n: each run is
    a piece of one chain in chain order where the index still knows it. An importer may cut runs.
    """

    hashes: npt.NDArray[np.uint64]
    run_lengths: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True)
class LocateTerms:
    """How many stores of each block to name, and at which one to begin: callers that take another
    `turn` each time do not all go to the same store."""

    stores_max: int
    turn: int = 0


class Located(NamedTuple):
    """Which stores hold the blocks of a query, one after another.

    counts: u32[blocks], how many are named of each block. holders: u32[sum(counts)].
    """

    counts: npt.NDArray[np.uint32]
    holders: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True)
class Digest:
    """count: copies held. xor: over the distinct hashes held; both 0 where nothing is."""

    count: int
    xor: int


@dataclasses.dataclass(frozen=True, slots=True)
class HolderStats:
    """One holder. copies: by Tier. truncated: copies lost to the byte budget since the holding was
    last loaded or cleared; above 0 the index knows less than the holder has."""

    holder: HolderId
    hidden: bool
    copies: tuple[int, int, int, int]
    truncated: int


@dataclasses.dataclass(frozen=True, slots=True)
class IndexStats:
    """Gauges of now, and counters since the start (evicted, matches, blocks_queried, blocks_found).

    blocks: distinct, predicted ones included. holdings: copies of all holders. predicted: copies of
    the predicted layer. pages: pieces of chains that blocks lie in. bytes: native memory.
    blocks_found: sum of the longest prefixes.
    """

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
    holders: tuple[HolderStats, ...]


class MatchResult(Protocol):
    """n workers by ascending holder as a struct of arrays, read-only; each has at least one block.

    Row i: worker workers[i] has tokens[i] tokens, in runs run_offsets[i] to run_offsets[i + 1] - 1:
    run_blocks[r] blocks from run_sources[r] (a Source), one run after the other from block 0.
    Each access makes a view of native memory: keep the array, not the attribute, in a loop.
    """

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
    @property
    def blocks_queried(self) -> int: ...
    @property
    def blocks_found(self) -> int:
        """The longest prefix of any worker."""
        ...

    def __len__(self) -> int:
        """How many workers have a prefix."""
        ...


def runs_of(result: MatchResult, row: int) -> list[tuple[Source, int]]:
    """The runs of one row as (source, blocks); for display and tests, not for hot loops."""
    start, end = (int(offset) for offset in result.run_offsets[row : row + 2])
    sources, blocks = result.run_sources[start:end], result.run_blocks[start:end]
    return [
        (Source(int(source)), int(count)) for source, count in zip(sources, blocks, strict=True)
    ]


class PrefixIndex(Protocol):
    """Who holds which blocks. Safe to call from many threads; bad input raises CallerError.

    Holdings are counted per (holder, tier, shard). Parents need not be resident: a prefix is
    evaluated when it is asked for, over the query's own chain.
    """

    def add_holder(self, holder: HolderId, spec: HolderSpec) -> None:
        """Adds a visible holder that holds nothing."""
        ...

    def remove_holder(self, holder: HolderId) -> None:
        """Forgets a holder with all that it holds and all that is predicted for it. O(pages)."""
        ...

    def hide(self, holder: HolderId) -> None:
        """Makes a holder invisible to match at once; what it holds stays and may change."""
        ...

    def resume(self, holder: HolderId) -> None:
        """Makes a holder visible again."""
        ...

    def holders(self) -> list[HolderId]:
        """All holders, ascending, hidden ones included."""
        ...

    def apply(self, holder: HolderId, shard: int, batch: EventColumns) -> ApplyResult:
        """Applies a batch in order; a batch that is refused changes nothing. O(blocks)."""
        ...

    def apply_messages(
        self, holder: HolderId, shard: int, seq: int, messages: list[bytes], room_blocks: int
    ) -> AppliedRun:
        """Applies serialized batches numbered `seq`, `seq + 1` and so on, as they came off a wire.

        Stops before the first that is not plain (see `batch_message`), has another number or would
        be refused by `apply`; and after the one that makes stored copies exceed `room_blocks`
        (below 0: after one message). A long run may be cut for no other reason than its length, but
        not before its first message. O(blocks).
        """
        ...

    def store(
        self, holder: HolderId, tier: Tier, shard: int, hashes: Packed, parent: int = 0
    ) -> ApplyResult:
        """Adds a copy of each block."""
        ...

    def remove(self, holder: HolderId, tier: Tier, shard: int, hashes: Packed) -> ApplyResult:
        """Takes a copy of each block away; what is not held is counted and ignored."""
        ...

    def clear(self, holder: HolderId, tier: Tier | None = None, shard: int | None = None) -> int:
        """Drops all copies of a tier and shard, of all where None; returns how many. O(pages)."""
        ...

    def match(self, hashes: Packed, pool: int = ANY_POOL) -> MatchResult:
        """The longest unbroken prefix of `hashes` (u64) per visible worker; mutates no holding.

        A block counts for a worker when all its shards hold it on their GPUs, when it is predicted
        for the worker, or when every shard finds it in L2 under its own namespace: the stores of
        its node, stores of other nodes, shared holders. Each block is told at its cheapest Source;
        of L2, at the dearest of its shards' cheapest ones.
        """
        ...

    def match_many(self, queries: Sequence[Packed], pool: int = ANY_POOL) -> Sequence[MatchResult]:
        """One match a query; changes may come between two of them."""
        ...

    def locate(self, hashes: Packed, namespace: int, terms: LocateTerms) -> Located:
        """Which visible stores of a namespace hold each block, in any of their tiers. O(blocks)."""
        ...

    def snapshot(self, holder: HolderId, tier: Tier, shard: int) -> Snapshot:
        """What is held now, predicted blocks excluded; mutates nothing. O(pages + blocks)."""
        ...

    def load(self, holder: HolderId, tier: Tier, shard: int, snapshot: Snapshot) -> ApplyResult:
        """Replaces what is held; matches run meanwhile and may see a part. O(pages + blocks)."""
        ...

    def digest(self, holder: HolderId, tier: Tier, shard: int) -> Digest:
        """Count and xor of what is held, predicted blocks excluded. O(1)."""
        ...

    def predict(self, worker: HolderId, hashes: Packed, ticket: int, expires_at: float) -> bool:
        """Expects blocks on a worker's GPU until the ticket (u64) is released or expires.

        Replaces what the ticket predicted before, if anything. A layer of its own: never in a
        snapshot, digest or a holder's count, and a real holding wins over it. False, and nothing is
        predicted, where predictions have a quarter of the byte budget already: they are hints.
        """
        ...

    def release(self, ticket: int) -> bool:
        """Ends a prediction; False where the ticket is unknown, which is no error."""
        ...

    def expire(self, now: float) -> int:
        """Ends predictions with expires_at <= now, oldest first; returns how many tickets ended.

        Bounded work: call again until it returns 0.
        """
        ...

    def stats(self) -> IndexStats:
        """Gauges and counters. O(holders)."""
        ...


@contextlib.contextmanager
def _caller_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise CallerError(str(error)) from error


class NativePrefixIndex:
    """PrefixIndex over kvtier._native. `bytes_max`: ceiling of native memory; above it the pages
    least recently stored to go first, and the holders that lose blocks tell so in stats()."""

    __slots__ = ("_native",)

    def __init__(self, bytes_max: int = limits.INDEX_BYTES_MAX) -> None:
        if type(bytes_max) is not int or bytes_max > limits.INDEX_BYTES_MAX:
            raise CallerError(f"bytes_max is {bytes_max}, more than {limits.INDEX_BYTES_MAX}")
        with _caller_errors():
            self._native = _native.PrefixIndex(
                bytes_max=bytes_max,
                holders_max=limits.HOLDERS_COUNT_MAX,
                shards_max=limits.SHARDS_COUNT_MAX,
                block_tokens_max=limits.BLOCK_TOKENS_MAX,
                batch_events_max=limits.BATCH_EVENTS_MAX,
                batch_blocks_max=limits.BATCH_BLOCKS_MAX,
                match_blocks_max=limits.MATCH_BLOCKS_MAX,
                copies_max=limits.COPIES_COUNT_MAX,
                tickets_per_worker_max=limits.RESERVATIONS_PER_WORKER_MAX,
            )

    def add_holder(self, holder: HolderId, spec: HolderSpec) -> None:
        with _caller_errors():
            self._native.add_holder(
                holder, spec.kind, spec.node, spec.namespaces, spec.pool, spec.block_tokens
            )

    def remove_holder(self, holder: HolderId) -> None:
        with _caller_errors():
            self._native.remove_holder(holder)

    def hide(self, holder: HolderId) -> None:
        with _caller_errors():
            self._native.hide(holder)

    def resume(self, holder: HolderId) -> None:
        with _caller_errors():
            self._native.resume(holder)

    def holders(self) -> list[HolderId]:
        return [HolderId(holder) for holder in self._native.holders()]

    def apply(self, holder: HolderId, shard: int, batch: EventColumns) -> ApplyResult:
        try:
            counts = self._native.apply(
                holder, shard, batch.kinds, batch.tiers, batch.lengths, batch.parents, batch.hashes
            )
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        return ApplyResult(*counts)

    def apply_messages(
        self, holder: HolderId, shard: int, seq: int, messages: list[bytes], room_blocks: int
    ) -> AppliedRun:
        try:
            run = self._native.apply_messages(holder, shard, seq, messages, room_blocks)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        return AppliedRun(*run)

    def store(
        self, holder: HolderId, tier: Tier, shard: int, hashes: Packed, parent: int = 0
    ) -> ApplyResult:
        with _caller_errors():
            return ApplyResult(*self._native.store(holder, tier, shard, hashes, parent))

    def remove(self, holder: HolderId, tier: Tier, shard: int, hashes: Packed) -> ApplyResult:
        with _caller_errors():
            return ApplyResult(*self._native.remove(holder, tier, shard, hashes))

    def clear(self, holder: HolderId, tier: Tier | None = None, shard: int | None = None) -> int:
        with _caller_errors():
            return self._native.clear(holder, tier, shard)

    def match(self, hashes: Packed, pool: int = ANY_POOL) -> MatchResult:
        try:
            return self._native.match(hashes, pool)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error

    def match_many(self, queries: Sequence[Packed], pool: int = ANY_POOL) -> Sequence[MatchResult]:
        with _caller_errors():
            return self._native.match_many(queries, pool)

    def locate(self, hashes: Packed, namespace: int, terms: LocateTerms) -> Located:
        try:
            columns = self._native.locate(hashes, namespace, terms.stores_max, terms.turn)
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        return Located(*columns)

    def snapshot(self, holder: HolderId, tier: Tier, shard: int) -> Snapshot:
        with _caller_errors():
            return Snapshot(*self._native.snapshot(holder, tier, shard))

    def load(self, holder: HolderId, tier: Tier, shard: int, snapshot: Snapshot) -> ApplyResult:
        with _caller_errors():
            counts = self._native.load(holder, tier, shard, snapshot.hashes, snapshot.run_lengths)
            return ApplyResult(*counts)

    def digest(self, holder: HolderId, tier: Tier, shard: int) -> Digest:
        with _caller_errors():
            return Digest(*self._native.digest(holder, tier, shard))

    def predict(self, worker: HolderId, hashes: Packed, ticket: int, expires_at: float) -> bool:
        with _caller_errors():
            return self._native.predict(worker, hashes, ticket, expires_at)

    def release(self, ticket: int) -> bool:
        with _caller_errors():
            return self._native.release(ticket)

    def expire(self, now: float) -> int:
        with _caller_errors():
            return self._native.expire(now)

    def stats(self) -> IndexStats:
        stats = self._native.stats()
        holders = tuple(
            HolderStats(HolderId(holder), hidden, copies, truncated)
            for holder, hidden, copies, truncated in stats["holders"]
        )
        return IndexStats(
            blocks=stats["blocks"],
            holdings=stats["holdings"],
            predicted=stats["predicted"],
            pages=stats["pages"],
            tickets=stats["tickets"],
            bytes=stats["bytes"],
            evicted=stats["evicted"],
            matches=stats["matches"],
            blocks_queried=stats["blocks_queried"],
            blocks_found=stats["blocks_found"],
            holders=holders,
        )

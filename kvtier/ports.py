"""What the store asks of the places that keep blocks: the port that every tier speaks.

A tier keeps *frames* (kvtier.core.frame) and is a place of copies, never of truth: it may lose any
block at any time, and gives back exactly the bytes that were put under a name, or says why not.
Rules that hold for every method of every tier:

- **Batches.** One call is one batch (at most limits.TIER_BATCH_BLOCKS_MAX blocks) and one round of
  I/O, never one round trip a block. Blocks of a call are one request's, in chain order, head first;
  that order feeds eviction. A name may stand twice in a batch. Results stand in request order and
  are never fewer than the requests.
- **Deadlines.** `deadline_s` is a time of `time.monotonic`, finite. When it has passed, whatever is
  not done is TIMEOUT and the call returns; a tier that cannot stop its I/O goes on with memory of
  its own and throws the result away.
- **Buffers.** Once a call has returned or raised (cancellation included), nothing writes into a
  caller's buffer, nothing reads a caller's payload, and nothing that was not reported STORED
  becomes visible later because of that call. Until then the buffers are the tier's.
- **Failures.** A miss is not an error. What goes wrong with one block is in that block's result;
  `get_many` and `put_many` raise only for the caller's mistakes (CallerError, before anything is
  done) and after `close` (UnavailableError). `contains` and `drop` have no place for a block's
  failure and raise BackendError, OverloadedError or DeadlineError. Foreign exceptions never pass.
- **Concurrency.** All methods are called on one event loop; any number of calls may be in flight.

What must not live here: anything that runs. Writing policies, promotion and quotas are the store's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from kvtier.core.checks import require_integer
from kvtier.core.encoding import U64_MAX
from kvtier.core.eviction import PinToken, Retention
from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import CallerError, FrameFault, LimitError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.types import BytesLike, Fingerprint, InstanceId, NodeId, ScopeId, Tier

Clock: TypeAlias = Callable[[], float]
"""Seconds of `time.monotonic`, or of the clock of a test."""

NO_SCOPE: Final = ScopeId("")


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """Who answers for a block: the writer (part of its frame) and the scope it was put for."""

    writer_id: int
    scope: ScopeId = NO_SCOPE

    def __post_init__(self) -> None:
        require_integer("writer_id", self.writer_id, 0, U64_MAX)


class GetStatus(StrEnum):
    """How one block of a get ended; the label of the tiers' read metrics. Only HIT has bytes."""

    HIT = "hit"
    """Every check of the frame passed, over the very memory that is handed out."""
    MISS = "miss"
    CORRUPT = "corrupt"
    """A copy was there and is not what was asked for: it is dropped and counted. A miss."""
    TIMEOUT = "timeout"
    """Not known by the deadline. A miss."""
    ERROR = "error"
    """The backend failed, or its breaker is open; `reason` says which. A miss."""


@dataclass(frozen=True, slots=True)
class GetRequest:
    """One block that is asked for.

    `into` is writable, C-contiguous memory of the caller's for the payload, whose contents are
    unspecified after anything but a HIT; None: the tier gives memory of its own. `payload_bytes` is
    the length that the namespace says, None where a codec makes it vary: then the payload must fit
    into `into`. A frame of another length is CORRUPT, one that does not fit an ERROR.
    """

    name: FrameName
    into: memoryview | None = None
    payload_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.payload_bytes is not None:
            require_integer("payload_bytes", self.payload_bytes, 0, U64_MAX)
        if self.into is None:
            return
        if self.into.readonly or not self.into.c_contiguous:
            raise CallerError("into must be writable and C-contiguous")
        if self.into.nbytes:
            try:
                self.into.cast("B")
            except (TypeError, ValueError) as error:
                raise CallerError(f"into is not of a plain type: {error}") from error
        if self.payload_bytes is not None and self.into.nbytes != self.payload_bytes:
            raise CallerError(f"into has {self.into.nbytes} bytes, the block {self.payload_bytes}")


@dataclass(frozen=True, slots=True)
class GetResult:
    """What became of one `GetRequest`.

    On a HIT, `payload` is the verified bytes (`into` or a part of it, or memory that is the
    caller's from now on), `header` its frame's header and `scope` as put. `reason` is a short
    fixed word, fit for a metric label, for CORRUPT (the frame's fault) and ERROR.
    """

    status: GetStatus
    payload: memoryview | None = None
    header: FrameHeader | None = None
    scope: ScopeId = NO_SCOPE
    reason: str = ""

    @property
    def is_hit(self) -> bool:
        return self.status is GetStatus.HIT


class PutStatus(StrEnum):
    """How one block of a put ended. STORED, DUPLICATE and DIVERGENT leave a block to be read."""

    STORED = "stored"
    """Written whole, verified, published."""
    DUPLICATE = "duplicate"
    """The same bytes were there already."""
    DIVERGENT = "divergent"
    """Other bytes were there already: the first are kept, and it is counted (GPU KV is not
    bit-identical across runs; whether that is an alarm is the namespace's business)."""
    REFUSED = "refused"
    """The tier has no room or no right to take it; `reason` says why."""
    CORRUPT = "corrupt"
    """The payload does not have the checksum that its source declared. Nothing was published."""
    TIMEOUT = "timeout"
    ERROR = "error"


class Refusal(StrEnum):
    """Reasons of PutStatus.REFUSED that every tier shares."""

    FULL = "full"
    """And nothing may be evicted."""
    TOO_LONG = "too_long"
    """This tier could never hold it."""
    READ_ONLY = "read_only"
    """Out of disk, or out of its budget of writes."""


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One block to keep. The caller leaves `payload` unchanged until the call returns.

    `payload_checksum` is given where it is known from a verified frame (promotion, demotion): the
    written bytes are held against it. `retention` is for policies with priorities.
    """

    name: FrameName
    payload: BytesLike
    owner: BlockOwner
    payload_checksum: int | None = None
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one `PutRequest`; `reason` as in `GetResult`, or a `Refusal`."""

    status: PutStatus
    reason: str = ""

    @property
    def is_held(self) -> bool:
        """Whether the tier has a block of that name now (perhaps the first writer's)."""
        return self.status in {PutStatus.STORED, PutStatus.DUPLICATE, PutStatus.DIVERGENT}


@dataclass(frozen=True, slots=True)
class ByNames:
    """Exactly these blocks."""

    names: tuple[FrameName, ...]


@dataclass(frozen=True, slots=True)
class ByNamespace:
    """Every block of a namespace."""

    namespace: Fingerprint


@dataclass(frozen=True, slots=True)
class ByWriter:
    """Every block that a writer wrote: what to do about a poisoned one."""

    writer_id: int


@dataclass(frozen=True, slots=True)
class ByScope:
    """Every block that was put for a scope."""

    scope: ScopeId


Selection: TypeAlias = ByNames | ByNamespace | ByWriter | ByScope


class RemovalCause(StrEnum):
    """Why a block left a tier."""

    EVICTED = "evicted"
    DROPPED = "dropped"
    CORRUPT = "corrupt"
    LOST = "lost"
    """The backend lost it by itself (a Redis that evicts, a disk that was replaced)."""


class TierObserver(Protocol):
    """Told of every change of what a tier holds, on the event loop, after it happened.

    The observer returns at once, never raises and calls nothing of the tier.
    """

    def on_tier_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        """These blocks can be read from now on."""
        ...

    def on_tier_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        """These blocks can no longer be read."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters since the tier was opened, and what it holds now."""

    blocks: int
    bytes: int
    """As counted against `bytes_max`: headers and rounding included."""
    bytes_max: int
    blocks_pinned: int
    blocks_reserved: int
    """Being written, or quarantined because their writer is silent; part of `bytes`."""
    gets: Mapping[GetStatus, int]
    puts: Mapping[PutStatus, int]
    removals: Mapping[RemovalCause, int]
    corrupt: Mapping[FrameFault, int]
    payload_bytes_read: int
    payload_bytes_written: int

    @property
    def divergent_puts(self) -> int:
        return self.puts.get(PutStatus.DIVERGENT, 0)


class BlockTier(Protocol):
    """One place of copies. The module's docstring says what holds for all methods."""

    @property
    def tier(self) -> Tier:
        """Which tier the blocks count for in events and metrics."""
        ...

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """Say which blocks are there, without reading or touching them: a hint, nothing more.

        Raises BackendError, OverloadedError or DeadlineError when it cannot be said.
        """
        ...

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """Read the blocks, verify each frame (the name, its length, both checksums), touch them.

        A copy that fails its check is dropped before the call returns.
        """
        ...

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """Write the blocks in two phases: reserve, write, verify what was written, publish.

        Publishing is one atomic step a block; failure at any point leaves a miss, and no
        reservation. First writer wins. Makes room by evicting what is not pinned. A payload that
        is not a contiguous buffer or exceeds PAYLOAD_BYTES_MAX is a CallerError for the call.
        """
        ...

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """Remove the selected blocks and return how many there were.

        A put that is in flight may publish afterwards. May walk all names unless the selection is
        `ByNames`. Raises BackendError, OverloadedError or DeadlineError: then some may be left, and
        calling again is safe.
        """
        ...

    def stats(self) -> TierStats:
        """What it holds and did. Does no I/O; works after `close`."""
        ...

    async def close(self) -> None:
        """Give everything back. Idempotent; calls in flight end with TIMEOUT or ERROR outcomes."""
        ...


@dataclass(frozen=True, slots=True)
class LandingSlot:
    """Memory in DRAM for one payload, that nobody can find yet."""

    token: int
    memory: memoryview


class Landing(Protocol):
    """DRAM that lower tiers read into, so that what comes up is copied once.

    Every slot is published or given back, once, after the read into it has ended.
    """

    def reserve(
        self, blocks: Sequence[tuple[FrameName, int, Retention]]
    ) -> Sequence[LandingSlot | None]:
        """A slot for each of these payload lengths; None where there is no room. May evict."""
        ...

    def publish(
        self, slots: Sequence[LandingSlot], arrived: Sequence[tuple[FrameHeader, ScopeId]]
    ) -> list[PutResult]:
        """Publish slots whose tier called them a HIT: its header is true of what is in the slot.

        Where a block of that name has come meanwhile the first is kept.
        """
        ...

    def give_back(self, slots: Sequence[LandingSlot]) -> None:
        """Free slots that were not published, and that nobody writes any more. Idempotent."""
        ...


class LocalTier(BlockTier, Protocol):
    """A tier whose directory is in this process, so that the store can plan over it."""

    def names(self) -> list[FrameName]:
        """Every block that can be read now, in no order. O(blocks)."""
        ...

    def coldest(self, count: int) -> list[FrameName]:
        """The blocks that would go next, at most `count` and perhaps fewer; pinned ones do not."""
        ...

    def pin(self, name: FrameName) -> PinToken | None:
        """Keep a block from being evicted (not from being dropped); None if it is not there."""
        ...

    def unpin(self, name: FrameName, token: PinToken) -> None:
        """Undo one `pin`. Harmless when the block is gone."""
        ...


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """The store of another node, and where it can be reached, as an index tells of it: a hint."""

    instance: InstanceId
    node: NodeId
    grpc_address: str
    bulk_address: str = ""
    """Of its channel for bulk data; empty where it has none."""


class PeerTransport(Protocol):
    """Moves blocks between this process and the stores of other nodes.

    Batches, buffers and concurrency as the module says; all blocks of a call are of one namespace,
    kind, codec and length of key and payload. Raises UnavailableError where the peer cannot be
    reached or is another store than the one that is meant, DeadlineError, OverloadedError,
    BackendError for what no store says, UnauthenticatedError and ForbiddenError: then nothing is
    known of any block.
    """

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        """Read blocks from the tiers of the peer alone: it asks nobody else.

        A HIT's frame header names the block that was asked for, and its checksum is that of the
        bytes as they arrived.
        """
        ...

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        """Give blocks of one owner to the peer, as any writer does."""
        ...

    async def close(self) -> None:
        """End all calls and connections. Idempotent."""
        ...


def require_batch(requests: Sequence[object], deadline_s: float) -> None:
    """Refuse a batch past TIER_BATCH_BLOCKS_MAX and a deadline that is not a finite time."""
    if len(requests) > TIER_BATCH_BLOCKS_MAX:
        raise LimitError(f"{len(requests)} blocks in a batch, at most {TIER_BATCH_BLOCKS_MAX}")
    if not math.isfinite(deadline_s):
        raise CallerError(f"deadline_s is {deadline_s}, not a finite time")

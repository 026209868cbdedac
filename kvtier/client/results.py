"""What the index answers, as frozen values: arrays are views of the answer, protobuf stays behind.

What must not live here: calls.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.workers import HolderView, WorkerName
from kvtier.errors import BackendError, CallerError
from kvtier.limits import HOLDERS_COUNT_MAX
from kvtier.ports import PeerPlace
from kvtier.types import HOLDER_TIERS, InstanceId, NodeId, Source, Tier, Trust
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb

_RUNS_COUNT_MAX: Final = HOLDERS_COUNT_MAX * 64


@dataclass(frozen=True, slots=True)
class MatchedWorker:
    """A worker that has a prefix, as its index knows it."""

    name: WorkerName
    trust: Trust
    block_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest unbroken prefix of one chain on each worker that has any.

    Row i is about `worker(i)`: `tokens[i]` tokens, in runs `run_offsets[i]` to
    `run_offsets[i + 1] - 1`, each `run_blocks[r]` blocks from `run_sources[r]`, from block 0 on.
    """

    tokens: npt.NDArray[np.uint64]
    run_offsets: npt.NDArray[np.uint32]
    run_sources: npt.NDArray[np.uint8]
    run_blocks: npt.NDArray[np.uint32]
    blocks_queried: int
    index_epoch: int
    _rows: npt.NDArray[np.uint32]
    _known: tuple[MatchedWorker, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def worker(self, row: int) -> MatchedWorker:
        return self._known[int(self._rows[row])]

    @property
    def workers(self) -> tuple[MatchedWorker, ...]:
        """All rows' workers. O(rows)."""
        return tuple(self._known[number] for number in self._rows.tolist())

    def tokens_of(self, name: WorkerName) -> int:
        """Tokens that one worker has; 0 where it has none. O(rows)."""
        for row, worker in enumerate(self.workers):
            if worker.name == name:
                return int(self.tokens[row])
        return 0

    def runs(self, row: int) -> list[tuple[Source, int]]:
        """(source, blocks) of one row; for display, not for hot loops."""
        start, end = int(self.run_offsets[row]), int(self.run_offsets[row + 1])
        pairs = zip(
            self.run_sources[start:end].tolist(), self.run_blocks[start:end].tolist(), strict=True
        )
        return [(Source(source), blocks) for source, blocks in pairs]


def matches_from(response: pb.MatchResponse) -> tuple[Match, ...]:
    """Every result of an answer. BackendError where its columns contradict each other."""
    known = tuple(
        MatchedWorker(
            WorkerName(InstanceId(ref.instance), ref.dp_rank),
            convert.trust_from(ref.trust),
            ref.block_tokens,
        )
        for ref in response.workers
    )
    try:
        return tuple(_match(result, known, response.index_epoch) for result in response.results)
    except CallerError as error:
        raise BackendError(f"the index answered nonsense: {error}") from error


def _match(result: pb.MatchResult, known: tuple[MatchedWorker, ...], epoch: int) -> Match:
    rows = convert.u32_column("workers", result.workers, HOLDERS_COUNT_MAX)
    offsets = convert.u32_column("run_offsets", result.run_offsets, HOLDERS_COUNT_MAX + 1)
    tokens = convert.u64_column("tokens", result.tokens, HOLDERS_COUNT_MAX)
    blocks = convert.u32_column("run_blocks", result.run_blocks, _RUNS_COUNT_MAX)
    sources = np.frombuffer(result.run_sources, np.uint8)
    if not len(rows) == len(tokens) == len(offsets) - 1:
        raise CallerError(f"{len(rows)} workers, {len(tokens)} tokens, {len(offsets)} offsets")
    if len(sources) != len(blocks) or int(offsets[-1]) != len(blocks):
        raise CallerError(f"{len(sources)} sources, {len(blocks)} runs, {offsets[-1]} as last")
    if len(rows) and (int(rows.max()) >= len(known) or np.any(offsets[1:] < offsets[:-1])):
        raise CallerError("a worker that is not listed, or runs that go back")
    if len(sources) and int(sources.max()) > max(Source):
        raise CallerError("a source that this version does not know")
    return Match(tokens, offsets, sources, blocks, result.queried_blocks, epoch, rows, known)


class FleetChangeKind(StrEnum):
    """What happened to a holder."""

    JOINED = "joined"
    CHANGED = "changed"
    HIDDEN = "hidden"
    RESUMED = "resumed"
    LEFT = "left"
    CURRENT = "current"
    """Everybody known when the watch began has been told."""
    INTERRUPTED = "interrupted"
    """The stream broke: forget all that was told; everybody is told anew, up to CURRENT."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One event of a watch; `holder` is None for CURRENT and INTERRUPTED."""

    kind: FleetChangeKind
    holder: HolderView | None = None


_KINDS: Final = {
    pb.FleetEvent.KIND_JOINED: FleetChangeKind.JOINED,
    pb.FleetEvent.KIND_CHANGED: FleetChangeKind.CHANGED,
    pb.FleetEvent.KIND_HIDDEN: FleetChangeKind.HIDDEN,
    pb.FleetEvent.KIND_RESUMED: FleetChangeKind.RESUMED,
    pb.FleetEvent.KIND_LEFT: FleetChangeKind.LEFT,
    pb.FleetEvent.KIND_CURRENT: FleetChangeKind.CURRENT,
}


def change_from(event: pb.FleetEvent, now: float) -> FleetChange | None:
    """One event; None for a kind that this version does not know. BackendError for nonsense."""
    kind = _KINDS.get(event.kind)
    if kind is None or kind is FleetChangeKind.CURRENT:
        return None if kind is None else FleetChange(kind)
    return FleetChange(kind, _view(event.holder, now))


def _view(message: pb.Holder, now: float) -> HolderView:
    try:
        return holders.view_from(message, convert.info_from(message.hello), now)
    except CallerError as error:
        raise BackendError(f"the index described a holder that cannot be: {error}") from error


@dataclass(frozen=True, slots=True)
class TierCount:
    """What one holder keeps in one tier; `bytes` is 0 where block sizes are unknown."""

    tier: Tier
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HolderStats:
    """One holder with its blocks per tier and its event counters by verdict."""

    view: HolderView
    tiers: tuple[TierCount, ...]
    events: Mapping[str, int]
    last_seq: int


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Counters and sizes of one index process."""

    index_epoch: int
    blocks: int
    holdings: int
    index_bytes: int
    nodes: int
    queried_blocks: int
    matched_blocks: int
    position: int
    followers: int
    events: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[HolderStats, ...] = ()


def stats_from(response: pb.StatsResponse, now: float) -> IndexStats:
    """BackendError where a holder or tier cannot be."""
    return IndexStats(
        index_epoch=response.index_epoch,
        blocks=response.blocks,
        holdings=response.holdings,
        index_bytes=response.index_bytes,
        nodes=response.nodes,
        queried_blocks=response.queried_blocks,
        matched_blocks=response.matched_blocks,
        position=response.position,
        followers=response.followers,
        events=MappingProxyType({one.name: one.count for one in response.events}),
        holders=tuple(_holder_stats(one, now) for one in response.holders),
    )


def _holder_stats(message: pb.HolderStats, now: float) -> HolderStats:
    if any(one.tier > max(HOLDER_TIERS) for one in message.tiers):
        raise BackendError("the index counted blocks in a tier that does not exist")
    return HolderStats(
        view=_view(message.holder, now),
        tiers=tuple(TierCount(Tier(one.tier), one.blocks, one.bytes) for one in message.tiers),
        events=MappingProxyType({one.name: one.count for one in message.events}),
        last_seq=message.last_seq,
    )


def places_from(
    response: pb.LocateResponse, blocks_count: int
) -> tuple[tuple[PeerPlace, ...], ...]:
    """Stores per block. BackendError where the columns do not fit together."""
    stores = [
        PeerPlace(InstanceId(ref.instance), NodeId(ref.node), ref.grpc_address, ref.bulk_address)
        for ref in response.stores
    ]
    counts = response.counts
    if len(counts) != blocks_count or len(response.holders) != 4 * sum(counts):
        raise BackendError(f"columns of {len(counts)} blocks, {blocks_count} were asked for")
    holders = np.frombuffer(response.holders, "<u4").tolist()
    if holders and max(holders) >= len(stores):
        raise BackendError("the index names a store that it does not tell of")
    at = iter(holders)
    return tuple(
        tuple(stores[number] for number in itertools.islice(at, count)) for count in counts
    )

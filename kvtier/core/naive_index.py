"""The prefix index as one would write it first: plain dicts, every question answered by looking.

The oracle of the native index in tests: the same interface, the same answers, no byte budget and no
locks. What must not live here: anything clever.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier import limits
from kvtier.core.batch_message import read_batch_message
from kvtier.core.event_columns import EventKind
from kvtier.core.prefix_index import (
    ANY_POOL,
    TIERS_OF_KIND,
    AppliedRun,
    ApplyResult,
    Digest,
    EventColumns,
    HolderSpec,
    HolderStats,
    IndexStats,
    Located,
    LocateTerms,
    Packed,
    Snapshot,
)
from kvtier.errors import CallerError, LimitError
from kvtier.types import HOLDER_TIERS, HolderId, HolderKind, Source, Tier

U32_MOST = 2**32 - 2


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NaiveMatchResult:
    """See kvtier.core.prefix_index.MatchResult."""

    workers: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint64]
    run_offsets: npt.NDArray[np.uint32]
    run_sources: npt.NDArray[np.uint8]
    run_blocks: npt.NDArray[np.uint32]
    blocks_queried: int
    blocks_found: int

    def __len__(self) -> int:
        return len(self.workers)


@dataclasses.dataclass(slots=True)
class _Holder:
    spec: HolderSpec
    hidden: bool = False
    held: dict[tuple[Tier, int], Counter[int]] = dataclasses.field(default_factory=dict)
    predicted: Counter[int] = dataclasses.field(default_factory=Counter)

    def has(self, tier: Tier, shard: int, block: int) -> bool:
        return self.held.get((tier, shard), Counter())[block] > 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Ticket:
    worker: HolderId
    hashes: list[int]
    expires_at: float


class NaivePrefixIndex:
    """PrefixIndex without speed. One thread at a time."""

    def __init__(self) -> None:
        self._holders: dict[HolderId, _Holder] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._matches = 0
        self._blocks_queried = 0
        self._blocks_found = 0

    def add_holder(self, holder: HolderId, spec: HolderSpec) -> None:
        _require_range("holder", holder, limits.HOLDERS_COUNT_MAX - 1)
        _require_range("kind", spec.kind, max(HolderKind))
        _require_range("node", spec.node, U32_MOST)
        _require_range("pool", spec.pool, U32_MOST)
        _require_range("block_tokens", spec.block_tokens, limits.BLOCK_TOKENS_MAX)
        if spec.block_tokens == 0:
            raise CallerError("block_tokens must be at least 1, got 0")
        most = limits.SHARDS_COUNT_MAX if spec.kind == HolderKind.WORKER else 1
        if not 1 <= len(spec.namespaces) <= most:
            raise CallerError(f"namespaces must have 1 to {most} entries")
        for namespace in spec.namespaces:
            _require_range("namespace", namespace, U32_MOST)
        if holder in self._holders:
            raise CallerError(f"holder {holder} is there already")
        self._holders[holder] = _Holder(spec)

    def remove_holder(self, holder: HolderId) -> None:
        self._holder(holder)
        del self._holders[holder]
        self._tickets = {
            number: ticket for number, ticket in self._tickets.items() if ticket.worker != holder
        }

    def hide(self, holder: HolderId) -> None:
        self._holder(holder).hidden = True

    def resume(self, holder: HolderId) -> None:
        self._holder(holder).hidden = False

    def holders(self) -> list[HolderId]:
        return sorted(self._holders)

    def apply(self, holder: HolderId, shard: int, batch: EventColumns) -> ApplyResult:
        self._shard(holder, shard)
        events = self._checked(holder, batch)
        parts = []
        for kind, tier, hashes in events:
            if kind == EventKind.STORE:
                parts.append(self._store(holder, Tier(tier), shard, hashes))
            elif kind == EventKind.REMOVE:
                parts.append(self._remove(holder, Tier(tier), shard, hashes))
            else:
                level = Tier(tier) if kind == EventKind.CLEAR_TIER else None
                parts.append(ApplyResult(removed=self.clear(holder, level, shard)))
        return ApplyResult(
            stored=sum(part.stored for part in parts),
            removed=sum(part.removed for part in parts),
            unknown=sum(part.unknown for part in parts),
            refused=sum(part.refused for part in parts),
        )

    def apply_messages(
        self, holder: HolderId, shard: int, seq: int, messages: list[bytes], room_blocks: int
    ) -> AppliedRun:
        self._shard(holder, shard)
        _integers("seq", [seq], 64)
        if any(type(data) is not bytes for data in messages):
            raise CallerError("messages: items must be bytes")
        run = AppliedRun()
        for data in messages:
            message = read_batch_message(data)
            if message is None or message.seq != seq + run.messages:
                break
            if any(tier > max(HOLDER_TIERS) for tier in message.columns.tiers):
                break
            try:
                result = self.apply(holder, shard, message.columns)
            except CallerError:
                break
            counts = (a + b for a, b in zip(run[2:], result, strict=True))
            run = AppliedRun(run.messages + 1, run.events + message.columns.events_count, *counts)
            if room_blocks < 0 or run.stored > room_blocks:
                break
        return run

    def store(
        self, holder: HolderId, tier: Tier, shard: int, hashes: Packed, parent: int = 0
    ) -> ApplyResult:
        _integers("parent", [parent], 64)
        self._shard(holder, shard)
        self._tier(holder, tier)
        blocks = _integers("hashes", hashes, 64)
        _require_range("blocks", len(blocks), limits.BATCH_BLOCKS_MAX)
        return self._store(holder, tier, shard, blocks)

    def remove(self, holder: HolderId, tier: Tier, shard: int, hashes: Packed) -> ApplyResult:
        self._shard(holder, shard)
        self._tier(holder, tier)
        blocks = _integers("hashes", hashes, 64)
        _require_range("blocks", len(blocks), limits.BATCH_BLOCKS_MAX)
        return self._remove(holder, tier, shard, blocks)

    def clear(self, holder: HolderId, tier: Tier | None = None, shard: int | None = None) -> int:
        state = self._holder(holder)
        if tier is not None:
            self._tier(holder, tier)
        if shard is not None:
            self._shard(holder, shard)
        gone = [
            key
            for key in state.held
            if (tier is None or key[0] == tier) and (shard is None or key[1] == shard)
        ]
        return sum(state.held.pop(key).total() for key in gone)

    def match(self, hashes: Packed, pool: int = ANY_POOL) -> NaiveMatchResult:
        query = _integers("hashes", hashes, 64)
        _require_range("blocks", len(query), limits.MATCH_BLOCKS_MAX)
        if pool != ANY_POOL:
            _require_range("pool", pool, U32_MOST)
        rows = []
        for holder in sorted(self._holders):
            state = self._holders[holder]
            spec = state.spec
            wanted = pool in (ANY_POOL, spec.pool)
            if spec.kind == HolderKind.WORKER and wanted and not state.hidden:
                runs = self._runs(state, query)
                if runs:
                    rows.append((holder, spec.block_tokens, runs))
        lengths = [sum(count for _, count in runs) for _, _, runs in rows]
        found = max(lengths, default=0)
        self._matches += 1
        self._blocks_queried += len(query)
        self._blocks_found += found
        runs_flat = [run for _, _, runs in rows for run in runs]
        return NaiveMatchResult(
            workers=np.array([holder for holder, _, _ in rows], np.uint32),
            tokens=np.array(
                [row[1] * blocks for row, blocks in zip(rows, lengths, strict=True)], np.uint64
            ),
            run_offsets=np.cumsum([0, *(len(runs) for _, _, runs in rows)]).astype(np.uint32),
            run_sources=np.array([source for source, _ in runs_flat], np.uint8),
            run_blocks=np.array([count for _, count in runs_flat], np.uint32),
            blocks_queried=len(query),
            blocks_found=found,
        )

    def match_many(
        self, queries: Sequence[Packed], pool: int = ANY_POOL
    ) -> Sequence[NaiveMatchResult]:
        return [self.match(query, pool) for query in queries]

    def locate(self, hashes: Packed, namespace: int, terms: LocateTerms) -> Located:
        query = _integers("hashes", hashes, 64)
        _require_range("blocks", len(query), limits.MATCH_BLOCKS_MAX)
        _require_range("namespace", namespace, U32_MOST)
        _require_range("most", terms.stores_max, U32_MOST)
        _integers("turn", [terms.turn], 64)
        stores = [
            (holder, state)
            for holder, state in sorted(self._holders.items())
            if state.spec.kind == HolderKind.STORE
            and state.spec.namespaces == (namespace,)
            and not state.hidden
        ]
        found = []
        for block in query:
            there = [
                holder
                for holder, state in stores
                if state.has(Tier.DRAM, 0, block) or state.has(Tier.NVME, 0, block)
            ]
            first = terms.turn % len(there) if there else 0
            found.append((there[first:] + there[:first])[: terms.stores_max])
        return Located(
            np.array([len(some) for some in found], np.uint32),
            np.array([holder for some in found for holder in some], np.uint32),
        )

    def snapshot(self, holder: HolderId, tier: Tier, shard: int) -> Snapshot:
        self._shard(holder, shard)
        self._tier(holder, tier)
        held = self._holder(holder).held.get((tier, shard), Counter())
        hashes = np.array(list(held.elements()), np.uint64)
        runs = [len(hashes)] if len(hashes) else []
        return Snapshot(hashes, np.array(runs, np.uint32))

    def load(self, holder: HolderId, tier: Tier, shard: int, snapshot: Snapshot) -> ApplyResult:
        hashes = _integers("hashes", snapshot.hashes, 64)
        lengths = _integers("run_lengths", snapshot.run_lengths, 32)
        if sum(lengths) != len(hashes):
            raise CallerError(f"run_lengths add up to {sum(lengths)}, not {len(hashes)}")
        self._shard(holder, shard)
        self._tier(holder, tier)
        self.clear(holder, tier, shard)
        return self._store(holder, tier, shard, hashes)

    def digest(self, holder: HolderId, tier: Tier, shard: int) -> Digest:
        self._shard(holder, shard)
        self._tier(holder, tier)
        held = self._holder(holder).held.get((tier, shard), Counter())
        xor = 0
        for block in held:
            xor ^= block
        return Digest(held.total(), xor)

    def predict(self, worker: HolderId, hashes: Packed, ticket: int, expires_at: float) -> bool:
        _integers("ticket", [ticket], 64)
        blocks = _integers("hashes", hashes, 64)
        _require_range("blocks", len(blocks), limits.MATCH_BLOCKS_MAX)
        if not math.isfinite(expires_at):
            raise CallerError("expires_at must be finite")
        state = self._holder(worker)
        if state.spec.kind != HolderKind.WORKER:
            raise CallerError(f"holder {worker} is no worker")
        others = sum(
            known.worker == worker and number != ticket for number, known in self._tickets.items()
        )
        if others >= limits.RESERVATIONS_PER_WORKER_MAX:
            raise LimitError(f"worker {worker} has {others} tickets already")
        self.release(ticket)
        self._tickets[ticket] = _Ticket(worker, blocks, expires_at)
        state.predicted.update(blocks)
        return True

    def release(self, ticket: int) -> bool:
        _integers("ticket", [ticket], 64)
        gone = self._tickets.pop(ticket, None)
        if gone is None:
            return False
        self._holders[gone.worker].predicted.subtract(gone.hashes)
        return True

    def expire(self, now: float) -> int:
        if math.isnan(now):
            raise CallerError("now must be a number")
        gone = [number for number, ticket in self._tickets.items() if ticket.expires_at <= now]
        for number in gone:
            self.release(number)
        return len(gone)

    def stats(self) -> IndexStats:
        blocks: set[int] = set()
        rows = []
        for holder in sorted(self._holders):
            state = self._holders[holder]
            copies = [0, 0, 0, 0]
            for (tier, _), held in state.held.items():
                copies[tier] += held.total()
                blocks.update(held)
            blocks.update(block for block, count in state.predicted.items() if count)
            rows.append(
                HolderStats(holder, state.hidden, (copies[0], copies[1], copies[2], copies[3]), 0)
            )
        return IndexStats(
            blocks=len(blocks),
            holdings=sum(sum(row.copies) for row in rows),
            predicted=sum(state.predicted.total() for state in self._holders.values()),
            pages=0,
            tickets=len(self._tickets),
            bytes=0,
            evicted=0,
            matches=self._matches,
            blocks_queried=self._blocks_queried,
            blocks_found=self._blocks_found,
            holders=tuple(rows),
        )

    def _runs(self, worker: _Holder, query: list[int]) -> list[tuple[Source, int]]:
        runs: list[tuple[Source, int]] = []
        for block in query:
            source = self._source(worker, block)
            if source is None:
                break
            if runs and runs[-1][0] == source:
                runs[-1] = (source, runs[-1][1] + 1)
            else:
                runs.append((source, 1))
        return runs

    def _source(self, worker: _Holder, block: int) -> Source | None:
        """From where a worker could get a block most cheaply; None where it must recompute."""
        shards = range(len(worker.spec.namespaces))
        if all(worker.has(Tier.GPU, shard, block) for shard in shards):
            return Source.GPU
        if worker.predicted[block] > 0:
            return Source.PREDICTED
        cheapest = [
            min(self._l2_sources(worker.spec.node, namespace, block), default=None)
            for namespace in worker.spec.namespaces
        ]
        found = [source for source in cheapest if source is not None]
        return max(found) if len(found) == len(cheapest) else None

    def _l2_sources(self, node: int, namespace: int, block: int) -> list[Source]:
        sources = []
        for state in self._holders.values():
            if state.hidden or state.spec.namespaces != (namespace,):
                continue
            if state.spec.kind == HolderKind.SHARED and state.has(Tier.REDIS, 0, block):
                sources.append(Source.REDIS)
            if state.spec.kind == HolderKind.STORE:
                near = state.spec.node == node
                if state.has(Tier.DRAM, 0, block):
                    sources.append(Source.DRAM if near else Source.PEER)
                if state.has(Tier.NVME, 0, block):
                    sources.append(Source.NVME if near else Source.PEER)
        return sources

    def _store(self, holder: HolderId, tier: Tier, shard: int, hashes: list[int]) -> ApplyResult:
        held = self._holders[holder].held.setdefault((tier, shard), Counter())
        stored = 0
        for block in hashes:
            if held[block] < limits.COPIES_COUNT_MAX:
                held[block] += 1
                stored += 1
        return ApplyResult(stored=stored, refused=len(hashes) - stored)

    def _remove(self, holder: HolderId, tier: Tier, shard: int, hashes: list[int]) -> ApplyResult:
        held = self._holders[holder].held.setdefault((tier, shard), Counter())
        removed = 0
        for block in hashes:
            if block in held:
                removed += 1
                held[block] -= 1
                if held[block] == 0:
                    del held[block]
        return ApplyResult(removed=removed, unknown=len(hashes) - removed)

    def _holder(self, holder: HolderId) -> _Holder:
        if holder not in self._holders:
            raise CallerError(f"unknown holder {holder}")
        return self._holders[holder]

    def _shard(self, holder: HolderId, shard: int) -> None:
        _require_range("shard", shard, len(self._holder(holder).spec.namespaces) - 1)

    def _tier(self, holder: HolderId, tier: int) -> None:
        if tier not in TIERS_OF_KIND[self._holder(holder).spec.kind]:
            raise CallerError(f"holder {holder} has no tier {tier}")

    def _checked(self, holder: HolderId, batch: EventColumns) -> list[tuple[int, int, list[int]]]:
        """The events of a batch as (kind, tier, hashes)."""
        kinds = _integers("kinds", batch.kinds, 8)
        tiers = _integers("tiers", batch.tiers, 8)
        lengths = _integers("lengths", batch.lengths, 32)
        parents = _integers("parents", batch.parents, 64)
        hashes = _integers("hashes", batch.hashes, 64)
        if not len(kinds) == len(tiers) == len(lengths) == len(parents):
            raise CallerError("kinds, tiers, lengths and parents must be equally long")
        _require_range("events", len(kinds), limits.BATCH_EVENTS_MAX)
        _require_range("blocks", len(hashes), limits.BATCH_BLOCKS_MAX)
        if sum(lengths) != len(hashes):
            raise CallerError(f"lengths add up to {sum(lengths)}, not {len(hashes)}")
        events = []
        start = 0
        for kind, tier, length in zip(kinds, tiers, lengths, strict=True):
            _require_range("kinds", kind, max(EventKind))
            if kind != EventKind.CLEAR_ALL:
                self._tier(holder, tier)
            if kind >= EventKind.CLEAR_TIER and length:
                raise CallerError(f"a clear has no blocks, got {length}")
            events.append((kind, tier, hashes[start : start + length]))
            start += length
        return events


def _require_range(what: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 0 <= value <= most:
        raise CallerError(f"{what} must be 0 to {most}, got {value}")


def _integers(what: str, values: Packed, bits: int) -> list[int]:
    """Values of an array argument; see kvtier.core.prefix_index.Packed."""
    dtype = np.dtype(f"<u{bits // 8}")
    if isinstance(values, (bytes, bytearray, memoryview)):
        if len(values) * memoryview(values).itemsize % dtype.itemsize:
            raise CallerError(f"{what}: whole items of {dtype} are needed")
        values = np.frombuffer(values, dtype)
    if isinstance(values, np.ndarray):
        if values.dtype != dtype or values.ndim != 1 or not values.flags.c_contiguous:
            raise CallerError(f"{what} must be a contiguous array of {dtype}")
        return [int(value) for value in values]
    if not isinstance(values, (list, tuple)):
        raise CallerError(f"{what} must be an array, list or tuple")
    for value in values:
        if not isinstance(value, int) or not 0 <= value < 2**bits:
            raise CallerError(f"{what}: items must be ints of {bits} bits")
    return list(values)

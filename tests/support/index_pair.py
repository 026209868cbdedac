"""The native index and its oracle side by side: every change goes to both and must answer alike."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.naive_index import NaivePrefixIndex
from kvtier.core.prefix_index import (
    ANY_POOL,
    TIERS_OF_KIND,
    AppliedRun,
    EventColumns,
    HolderSpec,
    Located,
    LocateTerms,
    MatchResult,
    NativePrefixIndex,
    Packed,
    PrefixIndex,
    runs_of,
)
from kvtier.errors import CallerError
from kvtier.types import HolderId, HolderKind, Source, Tier
from kvtier.wire import convert
from kvtier.wire import messages as pb

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns of any kind of buffer, broken ones too."""

    kinds: Packed
    tiers: Packed
    lengths: Packed
    parents: Packed
    hashes: Packed


Lane = tuple[HolderId, Tier, int]
Event = tuple[EventKind, Tier, int, Sequence[int]]
"""kind, tier, parent, hashes"""


def worker(node: int = 0, namespaces: tuple[int, ...] = (0,), pool: int = 0) -> HolderSpec:
    return HolderSpec(HolderKind.WORKER, node, namespaces, pool, 16)


def store(node: int = 0, namespace: int = 0) -> HolderSpec:
    return HolderSpec(HolderKind.STORE, node, (namespace,), 0, 16)


def shared(namespace: int = 0) -> HolderSpec:
    return HolderSpec(HolderKind.SHARED, 0, (namespace,), 0, 16)


def batch(*events: Event) -> EventBatch:
    return EventBatch(
        kinds=np.array([event[0] for event in events], np.uint8),
        tiers=np.array([event[1] for event in events], np.uint8),
        lengths=np.array([len(event[3]) for event in events], np.uint32),
        parents=np.array([event[2] for event in events], np.uint64),
        hashes=np.array([block for event in events for block in event[3]], np.uint64),
    )


def message(seq: int, *events: Event) -> bytes:
    """The events as a publisher serializes them."""
    return pb.PublishRequest(batch=convert.batch_to(batch(*events), seq)).SerializeToString()


Rows = dict[int, tuple[int, list[tuple[Source, int]]]]


def rows(result: MatchResult) -> Rows:
    """worker -> (tokens, runs), in the order of the result."""
    return {
        int(number): (int(result.tokens[row]), runs_of(result, row))
        for row, number in enumerate(result.workers)
    }


def per_block(located: Located) -> list[list[int]]:
    """The stores of each block."""
    at = iter(located.holders.tolist())
    return [list(itertools.islice(at, count)) for count in located.counts.tolist()]


@dataclasses.dataclass(slots=True)
class IndexPair:
    """Calls both, compares what they say, and returns it."""

    native: NativePrefixIndex = dataclasses.field(default_factory=NativePrefixIndex)
    naive: NaivePrefixIndex = dataclasses.field(default_factory=NaivePrefixIndex)
    specs: dict[HolderId, HolderSpec] = dataclasses.field(default_factory=dict)

    def both(self, call: Callable[[PrefixIndex], T]) -> T | None:
        """The answer of both, or None where both refuse."""
        answers: list[T | None] = []
        for index in (self.native, self.naive):
            try:
                answers.append(call(index))
            except CallerError:
                answers.append(None)
        assert answers[0] == answers[1]
        return answers[0]

    def add(self, holder: int, spec: HolderSpec) -> None:
        def call(index: PrefixIndex) -> bool:
            index.add_holder(HolderId(holder), spec)
            return True

        if self.both(call):
            self.specs[HolderId(holder)] = spec

    def remove_holder(self, holder: int) -> None:
        self.both(lambda index: index.remove_holder(HolderId(holder)))
        self.specs.pop(HolderId(holder), None)

    def store(self, lane: Lane, blocks: Sequence[int]) -> None:
        self.both(lambda index: index.store(*lane, blocks))

    def remove(self, lane: Lane, blocks: Sequence[int]) -> None:
        self.both(lambda index: index.remove(*lane, blocks))

    def apply(self, lane: Lane, events: EventColumns) -> None:
        self.both(lambda index: index.apply(lane[0], lane[2], events))

    def apply_messages(
        self, lane: Lane, seq: int, messages: list[bytes], room_blocks: int
    ) -> AppliedRun | None:
        return self.both(
            lambda index: index.apply_messages(lane[0], lane[2], seq, messages, room_blocks)
        )

    def clear(self, lane: Lane) -> None:
        self.both(lambda index: index.clear(*lane))

    def predict(self, worker: HolderId, blocks: Sequence[int], ticket: int, at: float) -> None:
        self.both(lambda index: index.predict(worker, blocks, ticket, at))

    def lanes(self) -> list[Lane]:
        return [
            (holder, tier, shard)
            for holder, spec in self.specs.items()
            for tier in TIERS_OF_KIND[spec.kind]
            for shard in range(len(spec.namespaces))
        ]

    def match(self, query: Sequence[int], pool: int = ANY_POOL) -> Rows:
        hashes = np.array(query, np.uint64)
        native, naive = self.native.match(hashes, pool), self.naive.match(hashes, pool)
        assert rows(native) == rows(naive)
        assert list(native.workers) == sorted(native.workers)
        assert native.blocks_queried == naive.blocks_queried == len(query)
        assert native.blocks_found == naive.blocks_found
        return rows(native)

    def locate(self, query: Sequence[int], namespace: int, terms: LocateTerms) -> None:
        """Both name as many stores of each block, and only such as hold it."""
        answers: list[list[list[int]]] = []
        everybody = dataclasses.replace(terms, stores_max=1 << 16)
        indexes: tuple[PrefixIndex, PrefixIndex] = (self.native, self.naive)
        for index in indexes:
            try:
                some = per_block(index.locate(query, namespace, terms))
                all_of = per_block(index.locate(query, namespace, everybody))
            except CallerError:
                answers.append([])
                continue
            assert all(set(a) <= set(b) for a, b in zip(some, all_of, strict=True))
            assert all(len(set(a)) == len(a) for a in some)
            sizes = [[len(one)] for one in some]
            answers.append([*map(sorted, all_of), *sizes])
        assert answers[0] == answers[1]

    def check(self) -> None:
        """Everything that can be told without a query agrees."""
        native, naive = self.native.stats(), self.naive.stats()
        assert dataclasses.replace(native, pages=0, bytes=0) == naive
        assert (native.pages == 0) == (native.blocks == 0)
        assert self.native.holders() == self.naive.holders()
        for lane in self.lanes():
            assert self.native.digest(*lane) == self.naive.digest(*lane)
            snapshot = self.native.snapshot(*lane)
            expected = self.naive.snapshot(*lane)
            assert Counter(snapshot.hashes.tolist()) == Counter(expected.hashes.tolist())
            assert int(snapshot.run_lengths.sum()) == len(snapshot.hashes)

    def copied(self) -> NativePrefixIndex:
        """A fresh native index, filled from snapshots of this one."""
        copy = NativePrefixIndex()
        hidden = {row.holder for row in self.native.stats().holders if row.hidden}
        for holder, spec in self.specs.items():
            copy.add_holder(holder, spec)
            if holder in hidden:
                copy.hide(holder)
        for lane in self.lanes():
            copy.load(*lane, self.native.snapshot(*lane))
        return copy

"""Bad input to the prefix index is refused by a CallerError, changes and crashes nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from kvtier import limits
from kvtier.core.event_columns import EventKind
from kvtier.core.naive_index import NaivePrefixIndex
from kvtier.core.prefix_index import (
    HolderSpec,
    NativePrefixIndex,
    PrefixIndex,
    Snapshot,
)
from kvtier.errors import CallerError
from kvtier.types import HolderId, HolderKind, Tier
from tests.support.index_pair import Columns, batch, shared, store, worker

ZERO = HolderId(0)
MANY = np.arange(8, dtype=np.uint64)

BAD_HASHES: dict[str, object] = {
    "signed": MANY.astype(np.int64),
    "narrow": MANY.astype(np.uint32),
    "float": MANY.astype(np.float64),
    "bytes of an array": MANY.astype(np.uint8),
    "big-endian": MANY.astype(">u8"),
    "objects": np.array([1, 2], dtype=object),
    "strided": MANY[::2],
    "two-dimensional": MANY.reshape(2, 4),
    "scalar": np.uint64(3),
    "odd bytes": b"1234567",
    "negative": [-1],
    "too large": [2**64],
    "huge": [10**40],
    "texts": ["a"],
    "floats": [1.0],
    "none": None,
    "text": "abcdefgh",
    "set": {1, 2},
    "generator": (block for block in [1]),
}


@pytest.fixture(params=[NativePrefixIndex, NaivePrefixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made = cast(PrefixIndex, request.param())
    made.add_holder(ZERO, worker(namespaces=(0, 1)))
    made.add_holder(HolderId(1), store())
    made.add_holder(HolderId(2), shared())
    made.store(ZERO, Tier.GPU, 0, [1, 2, 3])
    made.store(ZERO, Tier.GPU, 1, [1, 2, 3])
    return made


def refused(index: PrefixIndex, call: Callable[[], object]) -> None:
    before = (index.stats().blocks, index.stats().holdings, index.digest(ZERO, Tier.GPU, 0))
    with pytest.raises(CallerError):
        call()
    assert (index.stats().blocks, index.stats().holdings, index.digest(ZERO, Tier.GPU, 0)) == before
    assert index.match([1, 2, 3]).tokens.tolist() == [48]


@pytest.mark.parametrize("bad", BAD_HASHES.values(), ids=BAD_HASHES.keys())
def test_hashes_of_a_wrong_form_are_refused_everywhere(index: PrefixIndex, bad: object) -> None:
    hashes = cast(Any, bad)
    column = np.zeros(1, np.uint8)
    columns = (column, column, np.ones(1, np.uint32), np.zeros(1, np.uint64))
    refused(index, lambda: index.match(hashes))
    refused(index, lambda: index.match_many([[1], hashes]))
    refused(index, lambda: index.store(ZERO, Tier.GPU, 0, hashes))
    refused(index, lambda: index.remove(ZERO, Tier.GPU, 0, hashes))
    refused(index, lambda: index.predict(ZERO, hashes, 1, 1.0))
    refused(index, lambda: index.apply(ZERO, 0, Columns(*columns, hashes)))
    lengths = np.ones(1, np.uint32)
    refused(index, lambda: index.load(ZERO, Tier.GPU, 0, Snapshot(hashes, lengths)))


@pytest.mark.parametrize("holder", [-1, 3, limits.HOLDERS_COUNT_MAX, 2**40, 2**70, "0", None])
def test_unknown_holders_are_refused_everywhere(index: PrefixIndex, holder: object) -> None:
    number = cast(HolderId, holder)
    refused(index, lambda: index.remove_holder(number))
    refused(index, lambda: index.hide(number))
    refused(index, lambda: index.resume(number))
    refused(index, lambda: index.apply(number, 0, batch()))
    refused(index, lambda: index.store(number, Tier.GPU, 0, []))
    refused(index, lambda: index.remove(number, Tier.GPU, 0, []))
    refused(index, lambda: index.clear(number))
    refused(index, lambda: index.snapshot(number, Tier.GPU, 0))
    refused(index, lambda: index.digest(number, Tier.GPU, 0))
    refused(index, lambda: index.predict(number, [], 1, 1.0))


def test_a_float_is_no_holder() -> None:
    native = NativePrefixIndex()
    native.add_holder(ZERO, worker())
    with pytest.raises(CallerError):
        native.hide(cast(HolderId, 0.0))


@pytest.mark.parametrize("shard", [-1, 2, 2**40, "0", None])
def test_shards_out_of_range_are_refused(index: PrefixIndex, shard: object) -> None:
    number = cast(int, shard)
    refused(index, lambda: index.apply(ZERO, number, batch()))
    refused(index, lambda: index.store(ZERO, Tier.GPU, number, []))
    refused(index, lambda: index.remove(ZERO, Tier.GPU, number, []))
    refused(index, lambda: index.snapshot(ZERO, Tier.GPU, number))
    refused(index, lambda: index.digest(ZERO, Tier.GPU, number))
    if shard is not None:
        refused(index, lambda: index.clear(ZERO, None, number))


@pytest.mark.parametrize(
    ("holder", "tier"),
    [(0, 1), (0, 3), (0, 4), (0, -1), (1, 0), (1, 3), (2, 0), (2, 2), (2, 2**40)],
)
def test_tiers_that_a_holder_has_not_are_refused(
    index: PrefixIndex, holder: int, tier: int
) -> None:
    number, level = HolderId(holder), cast(Tier, tier)
    refused(index, lambda: index.store(number, level, 0, [9]))
    refused(index, lambda: index.remove(number, level, 0, [9]))
    refused(index, lambda: index.clear(number, level))
    refused(index, lambda: index.digest(number, level, 0))
    if 0 <= tier < 256:
        refused(index, lambda: index.apply(number, 0, batch((EventKind.STORE, level, 0, [9]))))


@pytest.mark.parametrize(
    "spec",
    [
        HolderSpec(HolderKind.WORKER, 0, (), 0, 16),
        HolderSpec(HolderKind.WORKER, 0, tuple(range(limits.SHARDS_COUNT_MAX + 1)), 0, 16),
        HolderSpec(HolderKind.STORE, 0, (0, 1), 0, 16),
        HolderSpec(HolderKind.SHARED, 0, (), 0, 16),
        HolderSpec(cast(HolderKind, 3), 0, (0,), 0, 16),
        HolderSpec(HolderKind.WORKER, -1, (0,), 0, 16),
        HolderSpec(HolderKind.WORKER, 2**32, (0,), 0, 16),
        HolderSpec(HolderKind.WORKER, 0, (-1,), 0, 16),
        HolderSpec(HolderKind.WORKER, 0, (0,), -1, 16),
        HolderSpec(HolderKind.WORKER, 0, (0,), 0, 0),
        HolderSpec(HolderKind.WORKER, 0, (0,), 0, limits.BLOCK_TOKENS_MAX + 1),
        HolderSpec(HolderKind.WORKER, 0, cast(Any, ("a",)), 0, 16),
    ],
)
def test_impossible_holders_are_refused(index: PrefixIndex, spec: HolderSpec) -> None:
    refused(index, lambda: index.add_holder(HolderId(9), spec))
    assert index.holders() == [0, 1, 2]


def test_a_holder_is_added_once_and_within_the_ceiling(index: PrefixIndex) -> None:
    refused(index, lambda: index.add_holder(ZERO, worker()))
    refused(index, lambda: index.add_holder(HolderId(-1), worker()))
    refused(index, lambda: index.add_holder(HolderId(limits.HOLDERS_COUNT_MAX), worker()))
    index.add_holder(HolderId(limits.HOLDERS_COUNT_MAX - 1), worker())
    assert index.holders()[-1] == limits.HOLDERS_COUNT_MAX - 1


@pytest.mark.parametrize(
    "columns",
    [
        ([0, 0], [0], [1], [0], [7]),
        ([0], [0, 0], [1], [0], [7]),
        ([0], [0], [1, 0], [0], [7]),
        ([0], [0], [1], [], [7]),
        ([0], [0], [2], [0], [7]),
        ([0], [0], [0], [0], [7]),
        ([0], [0], [2**32 - 1], [0], [7]),
        ([0, 0], [0, 0], [2**31, 2**31], [0, 0], []),
        ([4], [0], [1], [0], [7]),
        ([0, 2], [0, 0], [1, 1], [0, 0], [7, 8]),
        ([0, 3], [0, 0], [1, 1], [0, 0], [7, 8]),
        ([0, 0], [0, 1], [1, 1], [0, 0], [7, 8]),
        ([0, 0], [0, 200], [1, 1], [0, 0], [7, 8]),
        ([0], [0], [1], [-1], [7]),
        ([0], [256], [1], [0], [7]),
        ([0], [0], [2**32], [0], [7]),
    ],
)
def test_a_batch_with_one_bad_event_changes_nothing(
    index: PrefixIndex, columns: tuple[list[int], ...]
) -> None:
    refused(index, lambda: index.apply(ZERO, 0, Columns(*columns)))


def test_calls_beyond_a_ceiling_are_refused(index: PrefixIndex) -> None:
    events = limits.BATCH_EVENTS_MAX + 1
    empty = Columns(bytes(events), bytes(events), bytes(4 * events), bytes(8 * events), b"")
    blocks = bytes(8 * (limits.BATCH_BLOCKS_MAX + 1))
    refused(index, lambda: index.apply(ZERO, 0, empty))
    refused(index, lambda: index.store(ZERO, Tier.GPU, 0, blocks))
    refused(index, lambda: index.remove(ZERO, Tier.GPU, 0, blocks))
    refused(index, lambda: index.match(bytes(8 * (limits.MATCH_BLOCKS_MAX + 1))))


@pytest.mark.parametrize("pool", [-2, 2**32, 2**70, "0", None])
def test_impossible_pools_are_refused(index: PrefixIndex, pool: object) -> None:
    refused(index, lambda: index.match([1], cast(int, pool)))


def test_impossible_predictions_are_refused(index: PrefixIndex) -> None:
    refused(index, lambda: index.predict(HolderId(1), [1], 1, 1.0))
    refused(index, lambda: index.predict(ZERO, [1], -1, 1.0))
    refused(index, lambda: index.predict(ZERO, [1], 2**64, 1.0))
    refused(index, lambda: index.predict(ZERO, [1], 1, float("nan")))
    refused(index, lambda: index.predict(ZERO, [1], 1, float("inf")))
    refused(index, lambda: index.release(-1))
    refused(index, lambda: index.expire(float("nan")))
    assert index.stats().tickets == 0


def test_a_worker_has_at_most_so_many_tickets(index: PrefixIndex) -> None:
    for ticket in range(limits.RESERVATIONS_PER_WORKER_MAX):
        index.predict(ZERO, [], ticket, 1.0)
    refused(index, lambda: index.predict(ZERO, [1], limits.RESERVATIONS_PER_WORKER_MAX, 1.0))
    index.predict(ZERO, [1], 0, 2.0)
    assert index.stats().tickets == limits.RESERVATIONS_PER_WORKER_MAX


def test_a_snapshot_whose_runs_do_not_add_up_is_refused(index: PrefixIndex) -> None:
    hashes = np.array([1, 2], np.uint64)
    for lengths in ([], [1], [3], [2**32 - 1], [1, 2]):
        snapshot = Snapshot(hashes, np.array(lengths, np.uint32))
        refused(index, partial(index.load, ZERO, Tier.GPU, 0, snapshot))


@pytest.mark.parametrize("bytes_max", [0, -1, 1000, limits.INDEX_BYTES_MAX + 1, 2**70, 1e9, None])
def test_a_byte_budget_that_cannot_work_is_refused(bytes_max: object) -> None:
    with pytest.raises(CallerError):
        NativePrefixIndex(cast(int, bytes_max))


def test_read_only_unaligned_and_packed_buffers_are_taken(index: PrefixIndex) -> None:
    array = np.array([1, 2, 3], np.uint64)
    array.flags.writeable = False
    packed = array.tobytes()
    unaligned = memoryview(b"x" + packed)[1:]
    for query in (array, packed, bytearray(packed), memoryview(packed), unaligned, (1, 2, 3)):
        assert index.match(query).tokens.tolist() == [48]

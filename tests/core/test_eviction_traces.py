"""Hit rates on traces: against the project's own gates and against libcachesim, hit by hit."""

import random
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import libcachesim
import pytest

from kvtier.core.eviction import (
    LruPolicy,
    Policy,
    PriorityPolicy,
    S3FifoConfig,
    S3FifoPolicy,
    TouchOrder,
)
from kvtier.core.replay import CacheReplay, ReplayCounts
from kvtier.core.trace import MOONCAKE_BLOCK_TOKENS, TraceRow, parse_trace_row

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake/conversation_trace.jsonl"
CLAIRVOYANT = {1_000: 0.191, 5_000: 0.341, 10_000: 0.366}
"""What no policy can exceed on this trace (workload study, row MIN)."""


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    if not TRACE.exists():
        pytest.skip("the Mooncake conversation trace is not beside this checkout (shared/traces)")
    with TRACE.open("rb") as lines:
        return [parse_trace_row(line) for line in lines]


def replay(rows: Iterable[TraceRow], policy: Policy[int], capacity: int | None) -> ReplayCounts:
    cache = CacheReplay(policy, capacity_blocks=capacity, block_tokens=MOONCAKE_BLOCK_TOKENS)
    for row in rows:
        cache.request(row.hash_ids, row.input_tokens, row.timestamp / 1000)
    return cache.counts


@pytest.mark.parametrize(
    ("capacity", "rate"), [(5_000, 0.1118), (10_000, 0.2116), (30_000, 0.3257), (None, 0.3664)]
)
def test_lru_suffix_first_has_the_known_prefix_hit_rate_on_the_conversation_trace(
    rows: list[TraceRow], capacity: int | None, rate: float
) -> None:
    counts = replay(rows, LruPolicy(), capacity)
    assert counts.requests == 12_031
    assert counts.blocks == 288_500
    assert round(counts.prefix_hit_rate, 4) == rate
    assert counts.prefix_blocks == counts.resident_blocks  # no block ever outlives its prefix


def test_infinite_cache_has_the_known_token_hit_rate(rows: list[TraceRow]) -> None:
    assert round(replay(rows, LruPolicy(), None).token_hit_rate, 4) == 0.3736


def test_priority_without_priorities_is_lru_suffix_first(rows: list[TraceRow]) -> None:
    assert replay(rows, PriorityPolicy(), 5_000) == replay(rows, LruPolicy(), 5_000)


@pytest.mark.parametrize("capacity", [1_000, 5_000, 10_000])
def test_no_policy_exceeds_the_clairvoyant_bound(rows: list[TraceRow], capacity: int) -> None:
    s3fifo: S3FifoPolicy[int] = S3FifoPolicy(S3FifoConfig(capacity))
    for policy in (LruPolicy[int](), s3fifo):
        assert 0.04 < replay(rows, policy, capacity).prefix_hit_rate <= CLAIRVOYANT[capacity]


def hits_here(ids: Iterable[int], policy: Policy[int], capacity: int) -> list[bool]:
    """One id a request, in the order of libcachesim: look up, make room, store."""
    hits = []
    for i in ids:
        hits.append(i in policy)
        if hits[-1]:
            policy.on_touched((i,), 0.0)
        else:
            policy.on_removed(policy.victims(max(0, len(policy) + 1 - capacity), 0.0))
            policy.on_stored((i,), 0.0)
    return hits


def hits_there(ids: Iterable[int], cache: "libcachesim.CacheBase") -> list[bool]:
    request = libcachesim.Request()
    request.obj_size = 1
    hits = []
    for i in ids:
        request.obj_id = i + 1
        hits.append(bool(cache.get(request)))
    return hits


def zipf(count: int, keys: int) -> list[int]:
    weights = [1 / (rank + 1) ** 0.9 for rank in range(keys)]
    return random.Random(7).choices(range(keys), weights, k=count)


def lru(capacity: int) -> Policy[int]:
    return LruPolicy(TouchOrder.HEAD_FIRST)


def s3fifo(capacity: int) -> Policy[int]:
    return S3FifoPolicy(S3FifoConfig(capacity))


# libcachesim refuses every object where its small queue is a single object, hence from 37 up.
SAME = pytest.mark.parametrize(
    ("ours", "theirs"), [(lru, libcachesim.LRU), (s3fifo, libcachesim.S3FIFO)]
)


@SAME
@pytest.mark.parametrize("capacity", [37, 300, 1_000])
def test_every_hit_equals_that_of_libcachesim_on_a_zipf_trace(
    ours: Callable[[int], Policy[int]],
    theirs: Callable[..., "libcachesim.CacheBase"],
    capacity: int,
) -> None:
    ids = zipf(40_000, 3_000)
    hits = hits_here(ids, ours(capacity), capacity)
    assert hits == hits_there(ids, theirs(capacity, hashpower=16))
    assert 0.1 < sum(hits) / len(hits) < 0.9


@SAME
def test_every_hit_equals_that_of_libcachesim_on_the_conversation_trace(
    rows: list[TraceRow],
    ours: Callable[[int], Policy[int]],
    theirs: Callable[..., "libcachesim.CacheBase"],
) -> None:
    ids = list(chain.from_iterable(row.hash_ids for row in rows))
    hits = hits_here(ids, ours(5_000), 5_000)
    assert hits == hits_there(ids, theirs(5_000, hashpower=18))
    assert sum(hits) > 30_000

"""Replay of requests against one cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.eviction import LruPolicy, PriorityPolicy
from kvtier.core.replay import CacheReplay, Hit
from kvtier.errors import CallerError


def test_request_is_looked_up_before_it_is_stored() -> None:
    cache = CacheReplay(LruPolicy[int](), capacity_blocks=None, block_tokens=4)
    assert cache.request([1, 1], 8, 0.0) == Hit(0, 0, 0)
    assert cache.request([1, 2], 7, 0.0) == Hit(1, 1, 4)
    assert cache.request([1, 2], 7, 0.0) == Hit(2, 2, 7)


def test_resident_block_behind_a_hole_is_no_prefix_hit() -> None:
    cache = CacheReplay(LruPolicy[int](), capacity_blocks=None, block_tokens=1)
    cache.request([1, 2], 2, 0.0)
    assert cache.request([1, 3, 2], 3, 0.0) == Hit(1, 2, 1)


def test_of_a_chain_longer_than_the_cache_the_head_is_kept() -> None:
    cache = CacheReplay(LruPolicy[int](), capacity_blocks=2, block_tokens=1)
    cache.request([1, 2, 3], 3, 0.0)
    assert cache.request([1, 2, 3], 3, 0.0).prefix_blocks == 2


def test_keys_that_do_not_fit_the_tokens_are_refused() -> None:
    cache = CacheReplay(LruPolicy[int](), capacity_blocks=2, block_tokens=4)
    with pytest.raises(CallerError, match="do not hold"):
        cache.request([1, 2], 4, 0.0)
    with pytest.raises(CallerError, match="capacity_blocks"):
        CacheReplay(LruPolicy[int](), capacity_blocks=0, block_tokens=4)
    with pytest.raises(CallerError, match="block_tokens"):
        CacheReplay(LruPolicy[int](), capacity_blocks=1, block_tokens=0)


@given(
    requests=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=60),
    capacity=st.integers(1, 14),
)
def test_hits_equal_those_of_a_list_kept_by_hand(requests: list[list[int]], capacity: int) -> None:
    # Keys are whole prefixes, as chain hashes are.
    chains = [[tuple(path[: i + 1]) for i in range(len(path))] for path in requests]
    lru: CacheReplay[tuple[int, ...]] = CacheReplay(
        LruPolicy(), capacity_blocks=capacity, block_tokens=1
    )
    priority: CacheReplay[tuple[int, ...]] = CacheReplay(
        PriorityPolicy(), capacity_blocks=capacity, block_tokens=1
    )
    recent: list[tuple[int, ...]] = []
    for keys in chains:
        expected = sum(key in recent for key in keys)
        for cache in (lru, priority):
            assert cache.request(keys, len(keys), 0.0) == Hit(expected, expected, expected)
        recent = [key for key in recent if key not in keys] + keys[::-1]
        recent = recent[max(0, len(recent) - capacity) :]
    assert lru.counts == priority.counts
    assert lru.counts.blocks == sum(map(len, requests))

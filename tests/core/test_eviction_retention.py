"""From priorities of token ranges to priorities of blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core.eviction import (
    PRIORITY_DEFAULT,
    RequestShape,
    Retention,
    RetentionPlan,
    TokenRange,
    retention_of_blocks,
)
from kvtier.errors import CallerError, LimitError


def test_ranges_that_fill_blocks_give_each_block_its_priority() -> None:
    plan = RetentionPlan((TokenRange(0, 8, 80), TokenRange(8, 12, 10)))
    blocks = retention_of_blocks(plan, RequestShape(16, 16, 4), 0.0)
    assert [b.priority for b in blocks] == [80, 80, 10, 35]


def test_block_in_two_ranges_takes_the_higher_priority() -> None:
    plan = RetentionPlan((TokenRange(0, 6, 80), TokenRange(6, 8, 10)))
    blocks = retention_of_blocks(plan, RequestShape(8, 8, 4), 0.0)
    assert [b.priority for b in blocks] == [80, 80]


def test_tokens_in_no_range_count_as_the_default_in_a_shared_block() -> None:
    plan = RetentionPlan((TokenRange(0, 2, 10),))
    assert retention_of_blocks(plan, RequestShape(4, 4, 4), 0.0) == [Retention(PRIORITY_DEFAULT)]


def test_of_equal_priorities_the_longer_duration_wins() -> None:
    plan = RetentionPlan((TokenRange(0, 2, 80, 1000), TokenRange(2, 4, 80, 9000)))
    assert retention_of_blocks(plan, RequestShape(4, 4, 4), 100.0) == [Retention(80, 109.0)]
    forever = RetentionPlan((TokenRange(0, 2, 80), TokenRange(2, 4, 80, 9000)))
    assert retention_of_blocks(forever, RequestShape(4, 4, 4), 100.0) == [Retention(80)]


def test_generated_tokens_have_the_decode_priority() -> None:
    plan = RetentionPlan((TokenRange(0, None, 10),), decode_priority=60, decode_duration_ms=500)
    blocks = retention_of_blocks(plan, RequestShape(6, 13, 4), 1.0)
    decoded = Retention(60, 1.5)
    assert blocks == [Retention(10), decoded, decoded, decoded]


def test_range_beyond_the_prompt_does_not_reach_generated_tokens() -> None:
    plan = RetentionPlan((TokenRange(4, 100, 90), TokenRange(200, None, 100)))
    blocks = retention_of_blocks(plan, RequestShape(8, 12, 4), 0.0)
    assert [b.priority for b in blocks] == [35, 90, 35]


def test_empty_request_has_no_blocks() -> None:
    assert retention_of_blocks(RetentionPlan(), RequestShape(0, 0, 4), 0.0) == []


@pytest.mark.parametrize(
    "ranges",
    [
        (TokenRange(0, 5, 1), TokenRange(4, 8, 2)),
        (TokenRange(4, 8, 2), TokenRange(0, 5, 1)),
        (TokenRange(0, None, 1), TokenRange(100, 101, 2)),
        (TokenRange(3, 4, 1), TokenRange(3, 4, 1)),
    ],
)
def test_overlapping_ranges_are_refused(ranges: tuple[TokenRange, ...]) -> None:
    with pytest.raises(CallerError, match="overlap"):
        RetentionPlan(ranges)


def test_values_out_of_bounds_are_refused() -> None:
    with pytest.raises(CallerError, match="priority is 101"):
        TokenRange(0, 1, 101)
    with pytest.raises(CallerError, match="priority is -1"):
        RetentionPlan(decode_priority=-1)
    with pytest.raises(CallerError, match="duration_ms is -5"):
        TokenRange(0, 1, 50, -5)
    with pytest.raises(CallerError, match="empty"):
        TokenRange(4, 4, 50)
    with pytest.raises(CallerError, match="negative"):
        TokenRange(-1, 4, 50)
    with pytest.raises(CallerError, match="prompt_tokens is 5"):
        RequestShape(5, 4, 4)
    with pytest.raises(CallerError, match="block_tokens is 0"):
        RequestShape(1, 1, 0)
    with pytest.raises(LimitError):
        RequestShape(1, limits.PROMPT_TOKENS_MAX + 1, 16)
    with pytest.raises(LimitError, match="RETENTION_RANGES_MAX"):
        RetentionPlan(
            tuple(TokenRange(i, i + 1, 1) for i in range(limits.RETENTION_RANGES_MAX + 1))
        )


@given(
    cuts=st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(sorted),
    priorities=st.lists(st.integers(0, 100), min_size=8, max_size=8),
    gaps=st.lists(st.booleans(), min_size=8, max_size=8),
    prompt=st.integers(0, 40),
    generated=st.integers(0, 10),
    block_tokens=st.integers(1, 9),
    decode=st.integers(0, 100),
)
def test_each_block_has_the_highest_priority_of_its_tokens(
    cuts: list[int],
    priorities: list[int],
    gaps: list[bool],
    prompt: int,
    generated: int,
    block_tokens: int,
    decode: int,
) -> None:
    ranges = tuple(
        TokenRange(start, end, priority)
        for start, end, priority, gap in zip(cuts, cuts[1:], priorities, gaps, strict=False)
        if not gap
    )
    of_token = [35] * prompt + [decode] * generated
    for r in ranges:
        for i in range(r.start, min(r.end or 0, prompt)):
            of_token[i] = r.priority
    total = prompt + generated
    blocks = retention_of_blocks(
        RetentionPlan(ranges, decode_priority=decode),
        RequestShape(prompt, total, block_tokens),
        0.0,
    )
    assert [b.priority for b in blocks] == [
        max(of_token[i : i + block_tokens]) for i in range(0, total, block_tokens)
    ]

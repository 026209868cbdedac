"""How long and how dearly blocks are kept: priorities with duration over ranges of tokens.

The meaning is TensorRT-LLM's KvCacheRetentionConfig (priority 0 to 100, 35 by default, ranges of
prompt tokens that do not overlap, fall back to 35 after the duration). What must not live here: the
order of eviction that follows from it (see `priority`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvtier.errors import CallerError, LimitError
from kvtier.limits import BLOCK_TOKENS_MAX, PROMPT_TOKENS_MAX, RETENTION_RANGES_MAX

PRIORITY_DEFAULT: Final = 35
PRIORITY_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Retention:
    """What one block is worth, and until when (seconds of the caller's clock; None: for good)."""

    priority: int = PRIORITY_DEFAULT
    expires_at: float | None = None

    def __post_init__(self) -> None:
        _check_priority(self.priority)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start, end) of a prompt (end None: to its end) and their worth."""

    start: int
    end: int | None
    priority: int
    duration_ms: int | None = None

    def __post_init__(self) -> None:
        _check_priority(self.priority)
        _check_duration(self.duration_ms)
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise CallerError(f"token range [{self.start}, {self.end}) is empty or negative")


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What a request asks for its prompt (by ranges) and for the tokens that it generates.

    Raises CallerError where ranges overlap. Ranges may be given in any order.
    """

    ranges: tuple[TokenRange, ...] = ()
    decode_priority: int = PRIORITY_DEFAULT
    decode_duration_ms: int | None = None

    def __post_init__(self) -> None:
        _check_priority(self.decode_priority)
        _check_duration(self.decode_duration_ms)
        if len(self.ranges) > RETENTION_RANGES_MAX:
            raise LimitError(
                f"{len(self.ranges)} token ranges exceed RETENTION_RANGES_MAX "
                f"({RETENTION_RANGES_MAX})"
            )
        ordered = sorted(self.ranges, key=lambda r: r.start)
        for before, after in pairwise(ordered):
            if before.end is None or before.end > after.start:
                raise CallerError(
                    f"token ranges [{before.start}, {before.end}) and "
                    f"[{after.start}, {after.end}) overlap"
                )


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How many tokens of a request are prompt, how many there are in all, and the block size."""

    prompt_tokens: int
    total_tokens: int
    block_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens <= self.total_tokens:
            raise CallerError(
                f"prompt_tokens is {self.prompt_tokens}, total_tokens {self.total_tokens}"
            )
        if self.total_tokens > PROMPT_TOKENS_MAX:
            raise LimitError(f"total_tokens {self.total_tokens} exceeds {PROMPT_TOKENS_MAX}")
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise CallerError(
                f"block_tokens is {self.block_tokens}, must be 1 to {BLOCK_TOKENS_MAX}"
            )


def retention_of_blocks(plan: RetentionPlan, shape: RequestShape, now: float) -> list[Retention]:
    """Map a plan to the request's blocks, the last one perhaps partial. Pure.

    A block takes the highest priority among its tokens (tokens in no range count as 35), and of
    equal priorities the one that lasts longer. Ranges beyond the prompt cover nothing there: the
    rest is generated and has the decode priority. O(blocks + ranges log ranges).
    """
    block_tokens = shape.block_tokens
    blocks: list[Retention | None] = [None] * -(-shape.total_tokens // block_tokens)
    for start, end, worth in _spans(plan, shape, now):
        for i in range(start // block_tokens, -(-end // block_tokens)):
            held = blocks[i]
            if held is None or _rank(worth) > _rank(held):
                blocks[i] = worth
    return [worth for worth in blocks if worth is not None]


def _spans(
    plan: RetentionPlan, shape: RequestShape, now: float
) -> Iterator[tuple[int, int, Retention]]:
    """Non-empty, disjoint spans [start, end) that cover all tokens of the request, in order."""
    default = Retention()
    at = 0
    for r in sorted(plan.ranges, key=lambda r: r.start):
        start = min(r.start, shape.prompt_tokens)
        end = shape.prompt_tokens if r.end is None else min(r.end, shape.prompt_tokens)
        if at < start:
            yield at, start, default
        if start < end:
            yield start, end, _worth(r.priority, r.duration_ms, now)
            at = end
        else:
            at = max(at, start)
    if at < shape.prompt_tokens:
        yield at, shape.prompt_tokens, default
    if shape.prompt_tokens < shape.total_tokens:
        decode = _worth(plan.decode_priority, plan.decode_duration_ms, now)
        yield shape.prompt_tokens, shape.total_tokens, decode


def _worth(priority: int, duration_ms: int | None, now: float) -> Retention:
    return Retention(priority, None if duration_ms is None else now + duration_ms / 1000)


def _rank(worth: Retention) -> tuple[int, float]:
    return worth.priority, float("inf") if worth.expires_at is None else worth.expires_at


def _check_priority(priority: int) -> None:
    if not 0 <= priority <= PRIORITY_MAX:
        raise CallerError(f"priority is {priority}, must be 0 to {PRIORITY_MAX}")


def _check_duration(duration_ms: int | None) -> None:
    if duration_ms is not None and duration_ms < 0:
        raise CallerError(f"duration_ms is {duration_ms}, must not be negative")

"""How much to load of a prefix of a model with windows: pure, on what was found and what it costs.

A sequence that goes on after block m needs, of a group with full attention, every block before m;
of a group with a window, only those that the next token can still read. So a cut is possible where
each group has what it needs, whatever is missing before, and a longer cut may need fewer bytes.
What must not live here: measuring (`advisor`), models without windows (`core.costs.split`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvtier.core.costs import LoadPolicy, Speeds
from kvtier.paged.geometry import window_start
from kvtier.types import Source
from kvtier_services.worker.l2.port import LoadRun


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One layer group's blocks."""

    block_bytes: int
    window: int | None = None
    """In tokens."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What follows the blocks of L1."""

    prompt_tokens: int
    l1_blocks: int
    block_tokens: int
    below: tuple[tuple[Source | None, ...], ...]
    """For each group, from where its blocks could come; the same number for all."""


def cheapest(
    gap: Gap, groups: Sequence[GroupShape], speeds: Speeds, policy: LoadPolicy
) -> tuple[int, tuple[LoadRun, ...]]:
    """(blocks to bring in, loads) that take the least time with the computing of the rest; (0, ())
    where computing all is as fast. O(blocks of all groups)."""
    count = len(gap.below[0])
    load_s = np.zeros(count + 1)
    for source in {s for group in gap.below for s in group if s is not None}:
        sizes = sum(_bytes(gap, groups, g, source) for g in range(len(groups)))
        terms = speeds.loads[source]
        load_s += np.where(sizes > 0, terms.first_s + terms.second_s * sizes, 0.0)
    for group in range(len(groups)):
        load_s[_missing(gap, groups, group) > 0] = np.inf
    held = (gap.l1_blocks + np.arange(count + 1)) * gap.block_tokens
    rest = (gap.prompt_tokens - held).astype(np.float64)
    compute_s = speeds.prefill.first_s * rest
    compute_s += speeds.prefill.second_s * rest * (held + rest / 2.0)
    cut = int(np.argmin(load_s + compute_s))
    if not cut:
        return 0, ()
    recompute_s = float(compute_s[0] - compute_s[cut])
    return cut, _runs(gap, groups, cut, policy.deadline_s(float(load_s[cut]), recompute_s))


def _starts(gap: Gap, groups: Sequence[GroupShape], group: int) -> NDArray[np.int64]:
    """First block after L1's that each cut needs of a group."""
    window = groups[group].window
    cuts = range(len(gap.below[group]) + 1)
    firsts = [
        window_start((gap.l1_blocks + cut) * gap.block_tokens, window, gap.block_tokens)
        for cut in cuts
    ]
    return np.maximum(0, np.array(firsts, np.int64) - gap.l1_blocks)


def _within(
    gap: Gap, groups: Sequence[GroupShape], group: int, of: list[bool]
) -> NDArray[np.int64]:
    """How many of the blocks that each cut needs of a group are marked."""
    sums = np.concatenate([[0], np.cumsum(np.array(of, np.int64))]).astype(np.int64)
    return sums - sums[np.minimum(_starts(gap, groups, group), np.arange(len(sums)))]


def _bytes(gap: Gap, groups: Sequence[GroupShape], group: int, source: Source) -> NDArray[np.int64]:
    of = [one is source for one in gap.below[group]]
    return _within(gap, groups, group, of) * groups[group].block_bytes


def _missing(gap: Gap, groups: Sequence[GroupShape], group: int) -> NDArray[np.int64]:
    return _within(gap, groups, group, [one is None for one in gap.below[group]])


def _runs(
    gap: Gap, groups: Sequence[GroupShape], cut: int, deadline_s: float
) -> tuple[LoadRun, ...]:
    """The loads of a cut, each with its part of the time."""
    spans: list[tuple[int, Source, int]] = []
    for group in range(len(groups)):
        start = int(_starts(gap, groups, group)[cut])
        for source, same in groupby(gap.below[group][start:cut]):
            assert source is not None, "the cut is possible"
            spans.append((group, source, len(list(same))))
    total = sum(count * groups[group].block_bytes for group, _, count in spans)
    return tuple(
        LoadRun(source, count, deadline_s * count * groups[group].block_bytes / total, group)
        for group, source, count in spans
    )

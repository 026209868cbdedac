"""How much of a prefix to load: `core.costs` fed with what this worker measures itself.

What must not live here: the clock, transfers, steps (both are told to it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvtier.core.costs import (
    BookPolicy,
    CostBook,
    LoadPolicy,
    LoadSample,
    PrefillSample,
    Prefix,
    Priors,
    Run,
    Speeds,
    split,
)
from kvtier.core.estimates import Tuning
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.types import HolderId, Source
from kvtier_services.worker.l2.port import LoadRun, RunOutcome

_SELF = HolderId(0)
PATIENT = LoadPolicy(overlap=0.0, deadline_multiple=1000.0, deadline_floor_s=0.01)
"""Compute of a request waits for its loads: blocks are verified whole, so no layer of one can be
used before its last byte is there. What overlaps is other requests' compute, and that is not this
request's gain. A load is given up when recomputing would have been done (twice the time at worst):
what is predicted is too small a part of that to be impatient about."""

FADING = Tuning(half_life_s=30.0)
"""A tier that was slow once, while its store restarted say, is tried again within a minute or two:
a wrong guess costs one prompt at most twice its time, never being asked costs all of them."""


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """What is known of one prompt when it is admitted."""

    prompt_tokens: int
    l1_blocks: int
    below: tuple[Source, ...]
    """From where the blocks after those of L1 could come, in order, without a gap."""


class Advisor:
    """Learns how fast this worker computes and loads, and decides by it. Not thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        policy: LoadPolicy = PATIENT,
        priors: Priors | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._policy = policy
        self._book = CostBook(BookPolicy(priors=priors or Priors(), transfers=FADING))

    def runs(self, found: PrefixFound, now: float) -> tuple[LoadRun, ...]:
        """The loads to begin for a request; empty where recomputing is as good. Mutates nothing."""
        whole_blocks = (found.prompt_tokens - 1) // self._block_tokens
        below = found.below[: max(0, whole_blocks - found.l1_blocks)]
        if not below:
            return ()
        runs = [Run(source, len(list(same))) for source, same in groupby(below)]
        if found.l1_blocks:
            runs.insert(0, Run(Source.GPU, found.l1_blocks))
        prefix = Prefix(tuple(runs), found.prompt_tokens, self._block_tokens, self._block_bytes)
        plan = split(prefix, self.speeds(now), self._policy)
        return tuple(
            LoadRun(load.source, load.blocks_count, load.deadline_s) for load in plan.loads
        )

    def speeds(self, now: float) -> Speeds:
        """What is believed now."""
        return self._book.speeds(_SELF, now)

    def prefill_s(self, tokens_count: int, context_tokens: int, now: float) -> float:
        """Predicted seconds to compute tokens after others."""
        return self.speeds(now).predict_prefill_s(tokens_count, context_tokens)

    def computed(self, sample: PrefillSample, now: float) -> None:
        """Learn from a stretch of prefill."""
        if 0 < sample.tokens_count <= PROMPT_TOKENS_MAX:
            self._book.observe_prefill(_SELF, sample, now)

    def loaded(self, runs: Sequence[RunOutcome], now: float) -> None:
        """Learn from a load. Misses say nothing, a late run says how slow it is at least."""
        for run in runs:
            if not run.arrived_blocks and not run.was_late:
                continue
            blocks = run.arrived_blocks or run.asked_blocks
            sample = LoadSample(blocks * self._block_bytes, run.seconds)
            self._book.observe_load(_SELF, run.source, sample, now)

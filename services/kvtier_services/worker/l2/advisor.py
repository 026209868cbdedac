"""How much of a prefix to load: `core.costs` fed with what this worker measures itself.

What must not live here: the clock, transfers, steps (both are told to it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

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
    head_to_compute,
    planned_loads,
    split,
)
from kvtier.core.estimates import Tuning
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.types import HolderId, Source
from kvtier_services.worker.l2.port import LoadRun, RunOutcome
from kvtier_services.worker.l2.windowed import Gap, GroupShape, cheapest

_SELF = HolderId(0)
_HEAD_GAIN_MIN = 0.15
"""Computing while loading pays from so much of the load's time on: predictions err by less."""
PATIENT = LoadPolicy(overlap=0.0, deadline_multiple=1000.0, deadline_floor_s=0.01)
"""How many blocks are worth loading is decided as if nothing overlapped: what computing does faster
is not loaded, even where it would hide. What does overlap is the head of the gap, which is computed
while its tail is loaded (`head_to_compute`), and other requests' compute, which is not this
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
    below: tuple[tuple[Source | None, ...], ...]
    """For each layer group, from where the blocks after those of L1 could come."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What to do about the blocks after those of L1."""

    head_blocks: int = 0
    """To compute, while those after them are loaded."""
    blocks_count: int = 0
    """By how many blocks the loads bring the sequence on."""
    runs: tuple[LoadRun, ...] = ()
    """Group after group; empty where recomputing is as good."""


_COMPUTE = Intent()


class Advisor:
    """Learns how fast this worker computes and loads, and decides by it. Not thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        groups: Sequence[GroupShape],
        policy: LoadPolicy = PATIENT,
        priors: Priors | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._groups = tuple(groups)
        self._policy = policy
        self._book = CostBook(BookPolicy(priors=priors or Priors(), transfers=FADING))

    def intend(self, found: PrefixFound, now: float) -> Intent:
        """What to load for a request. Mutates nothing."""
        room = (found.prompt_tokens - 1) // self._block_tokens - found.l1_blocks
        if room <= 0:
            return _COMPUTE
        if len(self._groups) > 1 or self._groups[0].window is not None:
            below = tuple(group[:room] for group in found.below)
            gap = Gap(found.prompt_tokens, found.l1_blocks, self._block_tokens, below)
            count, runs = cheapest(gap, self._groups, self.speeds(now), self._policy)
            return Intent(0, count, runs)
        return self._intend_plain(found, leading(found.below[0][:room]), now)

    def _intend_plain(self, found: PrefixFound, count: int, now: float) -> Intent:
        """Of a model whose layers all have full attention."""
        if not count:
            return _COMPUTE
        below = [source for source in found.below[0][:count] if source is not None]
        speeds = self.speeds(now)
        prefix = self._prefix(found, below, 0)
        plan = split(prefix, speeds, self._policy)
        head = head_to_compute(prefix, speeds, plan, _HEAD_GAIN_MIN)
        loaded = below[: plan.blocks_count - found.l1_blocks] if plan.loads else []
        if len(loaded) <= head:
            return _COMPUTE
        loads = planned_loads(self._prefix(found, loaded, head), speeds, self._policy)
        runs = tuple(LoadRun(one.source, one.blocks_count, one.deadline_s) for one in loads)
        return Intent(head, len(loaded) - head, runs)

    def _prefix(self, found: PrefixFound, below: Sequence[Source], head: int) -> Prefix:
        """L1's blocks and those below; the first `head` of these will have been computed."""
        runs = [Run(source, len(list(same))) for source, same in groupby(below[head:])]
        if found.l1_blocks + head:
            runs.insert(0, Run(Source.GPU, found.l1_blocks + head))
        block_bytes = self._groups[0].block_bytes
        return Prefix(tuple(runs), found.prompt_tokens, self._block_tokens, block_bytes)

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

    def loaded(self, runs: Sequence[RunOutcome], group: int, now: float) -> None:
        """Learn from a load. Misses say nothing, a late run says how slow it is at least."""
        for run in runs:
            if run.seconds <= 0 or (not run.arrived_blocks and not run.was_late):
                continue
            blocks = run.arrived_blocks or run.asked_blocks
            sample = LoadSample(blocks * self._groups[group].block_bytes, run.seconds)
            self._book.observe_load(_SELF, run.source, sample, now)


def leading(sources: Sequence[Source | None]) -> int:
    """How many blocks from the first on could come from somewhere. Pure."""
    return sum(1 for _ in takewhile(lambda source: source is not None, sources))

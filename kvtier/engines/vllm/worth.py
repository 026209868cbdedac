"""Whether loading blocks is faster than computing them, by what this engine measures of both.

Seconds of a load are `fixed + per block`, of a step `fixed + per token`; both are learnt, and what
is not renewed fades towards a prior, so that a store once slow is tried again.
What must not live here: clocks, requests (scheduling.py).
"""

from typing import Final

from kvtier.core.estimates import Terms, Tuning, TwoTermEstimate

LOAD_PRIOR: Final = Terms(0.002, 0.001)
STEP_PRIOR: Final = Terms(0.001, 1 / 5_000)
_LOADS: Final = Tuning(half_life_s=30.0)
_STEPS: Final = Tuning(half_life_s=600.0)
STEP_TOKENS_MIN: Final = 128
"""Smaller steps say little about prefill: what they cost is the decoding beside it."""


class Worth:
    """Learns from steps and loads. One thread; `now` is monotonic seconds."""

    def __init__(self, block_tokens: int, now: float) -> None:
        self._block_tokens = block_tokens
        self._load = TwoTermEstimate(LOAD_PRIOR, _LOADS, now)
        self._step = TwoTermEstimate(STEP_PRIOR, _STEPS, now)
        self._begun: dict[int, tuple[float, int]] = {}
        self._ended_at = 0.0
        self._has_computed = False

    def is_worth_it(self, blocks: int, now: float) -> bool:
        """Whether so many blocks are in place sooner by a load than by computing them.

        True as long as nothing was computed here: the first load also attaches to the store, and a
        prior says nothing of how slow this engine is. The first prompt that misses teaches it.
        """
        return not self._has_computed or self.load_s(blocks, now) < self.compute_s(blocks, now)

    def load_s(self, blocks: int, now: float) -> float:
        """Predicted seconds of a load."""
        return self._load.terms(LOAD_PRIOR, now).seconds(1, blocks)

    def compute_s(self, blocks: int, now: float) -> float:
        """Predicted seconds of a prefill."""
        tokens = blocks * self._block_tokens
        return self._step.terms(STEP_PRIOR, now).seconds(1, tokens)

    def step_begun(self, number: int, tokens: int, now: float) -> None:
        """A step was handed to the workers; numbers grow."""
        self._begun[number] = now, tokens

    def step_ended(self, number: int, now: float) -> None:
        """A step is over, and those before it; steps may be begun before others are over.

        A number that was not begun, or is over, says nothing.
        """
        if number not in self._begun:
            return
        begun_at, tokens = self._begun[number]
        for old in [one for one in self._begun if one <= number]:
            del self._begun[old]
        seconds = now - max(begun_at, self._ended_at)
        self._ended_at = now
        if tokens >= STEP_TOKENS_MIN and seconds > 0:
            self._has_computed = True
            self._step.observe((1, tokens), seconds, STEP_PRIOR, now)

    def loaded(self, blocks: int, seconds: float, now: float) -> None:
        """A load brought so many blocks in so many seconds; of a late one, what it brought."""
        self._load.observe((1, blocks), seconds, LOAD_PRIOR, now)

"""How long steps take, and how much prefill one may carry without stalling those that decode.

What must not live here: clocks, which request gets the tokens.
"""

from dataclasses import dataclass

from kvtier.core.costs import PrefillSample
from kvtier_services.worker.l2.advisor import Advisor

_SMOOTHING = 0.2
_TYPICAL_TOKENS = 32
_SAMPLE_TOKENS_MIN = 8
_CHUNK_TOKENS_MIN = 8
"""A prefill advances by so many tokens a step in any case. Late in a long prompt a step reads more
KV than it computes, whatever its chunk: a larger floor there would stall those that decode."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that was done."""

    decodes_count: int
    prefill_tokens: int
    context_tokens: int
    """Before the prefill's tokens, on average."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PacePolicy:
    """See `BatchSection`."""

    stall_ratio_max: float = 2.0
    stall_s_min: float = 0.010


class Pace:
    """Learns from steps. Prefill speed is kept in the advisor. Not thread-safe."""

    def __init__(self, policy: PacePolicy, advisor: Advisor) -> None:
        self._policy = policy
        self._advisor = advisor
        self._decode_s: float | None = None

    @property
    def decode_step_s(self) -> float:
        """Usual time of a step that only decodes; 0 before the first."""
        return self._decode_s or 0.0

    def learn(self, step: StepRecord, now: float) -> None:
        """Take in one step; mutates."""
        if not step.prefill_tokens:
            if step.decodes_count:
                before = self._decode_s
                if before is None:
                    self._decode_s = step.seconds
                else:
                    self._decode_s = before + _SMOOTHING * (step.seconds - before)
            return
        if step.prefill_tokens < _SAMPLE_TOKENS_MIN:
            return
        own = step.seconds - (self.decode_step_s if step.decodes_count else 0.0)
        seconds = max(own, 0.1 * step.seconds)
        sample = PrefillSample(step.prefill_tokens, step.context_tokens, seconds)
        self._advisor.computed(sample, now)

    def prefill_tokens_max(self, context_tokens: int, now: float) -> int:
        """Tokens of prefill, after so many earlier ones, that a step with decodes may carry."""
        stall_s = max(
            (self._policy.stall_ratio_max - 1.0) * self.decode_step_s, self._policy.stall_s_min
        )
        token_s = self._advisor.prefill_s(_TYPICAL_TOKENS, context_tokens, now) / _TYPICAL_TOKENS
        return max(_CHUNK_TOKENS_MIN, int(stall_s / token_s))

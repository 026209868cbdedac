"""What a phase of the demo came to, and whether that is what it promised. Pure.

What must not live here: requests, printing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Final

from kvtier.local.demo.client import Answer

GPU: Final = "gpu"
"""L1: the worker's own pool, wherever that is."""
NEAR_TIE_GAP: Final = 1e-4
"""Two continuations so close that the order of additions decides are not held apart."""
_HIT_SHARE_MIN: Final = 0.5
"""Of the first prompt of a phase, from the tiers it names; what is left may be recomputed by
choice: that can be faster than loading all."""


class Same(StrEnum):
    """How an answer compares with the one of cache-off."""

    YES = "yes"
    NEAR_TIE = "near tie"
    """They part where the two best continuations are closer than NEAR_TIE_GAP."""
    NO = "NO"


class Computed(StrEnum):
    """Which requests of a phase that names no tier must find nothing."""

    FIRST = "first"
    """The others may find what it left."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase and what it names."""

    name: str
    tiers: tuple[str, ...]
    """Where the prompt of its first request has to come from; none: it is computed."""
    computed: Computed = Computed.FIRST


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What a phase came to."""

    phase: Phase
    answers: tuple[Answer, ...]
    same: tuple[Same, ...] = field(default=())
    """One a request, once cache-off has answered too."""

    @property
    def ttft_first_s(self) -> float:
        return self.answers[0].ttft_s

    @property
    def ttft_median_s(self) -> float:
        return median(one.ttft_s for one in self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.answers)

    @property
    def reused(self) -> dict[str, int]:
        """Prompt tokens of all requests by tier."""
        total: dict[str, int] = {}
        for one in self.answers:
            for tier, count in one.reused.items():
                total[tier] = total.get(tier, 0) + count
        return total

    @property
    def computed(self) -> int:
        return self.prompt_tokens - sum(self.reused.values())

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed / self.prompt_tokens

    @property
    def identical(self) -> Same:
        """The worst of its answers."""
        for verdict in (Same.NO, Same.NEAR_TIE):
            if verdict in self.same:
                return verdict
        return Same.YES

    def complaint(self) -> str:
        """What it promised and did not keep; empty where it kept all."""
        first = self.answers[0]
        if Same.NO in self.same:
            number = self.same.index(Same.NO) + 1
            return f"{self.phase.name}: answer {number} differs from cache-off"
        if not self.phase.tiers:
            held = self.answers if self.phase.computed is Computed.ALL else (first,)
            reused = sum(sum(one.reused.values()) for one in held)
            return f"{self.phase.name}: {reused} tokens were reused" if reused else ""
        hit = sum(first.reused.get(tier, 0) for tier in self.phase.tiers)
        if hit < _HIT_SHARE_MIN * first.prompt_tokens:
            wanted = " or ".join(self.phase.tiers)
            return (
                f"{self.phase.name}: {hit} of {first.prompt_tokens} tokens of its first "
                f"prompt came from {wanted}, by tier: {dict(first.reused)}"
            )
        return ""


def compared(answer: Answer, cache_off: Answer) -> Same:
    """Whether an answer is that of cache-off, token by token."""
    pairs = zip(answer.tokens, cache_off.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a.piece != b.piece), None)
    if at is None:
        if len(answer.tokens) == len(cache_off.tokens):
            return Same.YES if answer.text == cache_off.text else Same.NO
        at = min(len(answer.tokens), len(cache_off.tokens))
    if at < len(cache_off.tokens) and cache_off.tokens[at].gap < NEAR_TIE_GAP:
        return Same.NEAR_TIE
    return Same.NO


def judged(results: Sequence[PhaseResult]) -> list[PhaseResult]:
    """Every phase with its answers held against those of the last one, cache-off."""
    off = results[-1].answers
    return [
        PhaseResult(
            one.phase,
            one.answers,
            tuple(compared(mine, other) for mine, other in zip(one.answers, off, strict=True)),
        )
        for one in results
    ]

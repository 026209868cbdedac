"""What became of rows, and the sums of it. What must not live here: sending, files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Json = Mapping[str, object]

_OK: Final = 200
_OWN_CACHE: Final = "gpu"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row's end, in the words of OpenAI's batch API."""

    response: Json | None
    """status_code, request_id, body; None where there was no answer."""
    error: Json | None
    """code and message; None where there was one."""

    @property
    def is_well(self) -> bool:
        """Whether the model answered."""
        return self.response is not None and self.response.get("status_code") == _OK

    @property
    def usage(self) -> Json:
        """The answer's own count of tokens; empty where it has none."""
        return _table(_table(self.response, "body"), "usage")


@dataclass(slots=True)
class Totals:
    """Sums over finished rows. Mutable."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    """Cached tokens by tier, where workers tell."""

    def add(self, outcome: Outcome) -> None:
        """Take one more row."""
        self.rows += 1
        self.failed += not outcome.is_well
        usage = outcome.usage
        self.prompt_tokens += _count(usage, "prompt_tokens")
        self.completion_tokens += _count(usage, "completion_tokens")
        self.cached_tokens += _count(_table(usage, "prompt_tokens_details"), "cached_tokens")
        for tier in _table(_table(usage, "kvtier"), "cached_tokens"):
            found = _count(_table(_table(usage, "kvtier"), "cached_tokens"), tier)
            if found:
                self.by_tier[tier] = self.by_tier.get(tier, 0) + found

    @property
    def own_cache_tokens(self) -> int:
        """Cached tokens that were in the engine's own cache; 0 where workers do not tell."""
        return self.by_tier.get(_OWN_CACHE, 0)


def _table(told: Json | None, name: str) -> Json:
    found = None if told is None else told.get(name)
    return found if isinstance(found, Mapping) else {}


def _count(told: Json, name: str) -> int:
    found = told.get(name)
    return found if type(found) is int and found > 0 else 0

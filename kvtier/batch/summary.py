"""What a batch came to: counts, hit rate, and what it saved against doing otherwise.

Counts are what answers said. What is called an estimate is computed from the rows' texts and a
cache of the sizes that the settings give, and scaled by the tokens that were counted. What must
not live here: sending.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvtier.batch.answers import Totals
from kvtier.batch.directory import Plan
from kvtier.batch.settings import BatchConfig

_LINE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run of a batch."""

    plan: Plan
    totals: Totals
    rows_before: int
    """Done by earlier runs."""
    took_s: float


def summary_of(run: Run, config: BatchConfig) -> dict[str, object]:
    """The content of summary.json. Pure."""
    plan, totals = run.plan, run.totals
    tokens = totals.prompt_tokens
    share = tokens / plan.text_bytes if plan.text_bytes else 0.0
    by_order = round(plan.found_input_order * share)
    alone = round(plan.found_engines_alone * share)
    return {
        "rows": totals.rows,
        "failed": totals.failed,
        "rows_of_earlier_runs": run.rows_before,
        "took_s": round(run.took_s, 3),
        "order": config.order.value,
        "prompt_tokens": tokens,
        "completion_tokens": totals.completion_tokens,
        "cached_tokens": totals.cached_tokens,
        "hit_rate": round(totals.cached_tokens / tokens, 4) if tokens else 0.0,
        "cached_tokens_by_tier": dict(sorted(totals.by_tier.items())),
        "beyond_own_cache_tokens": (
            totals.cached_tokens - totals.own_cache_tokens if totals.by_tier else 0
        ),
        "estimates": {
            "workers": config.estimate.workers,
            "worker_tokens": config.estimate.worker_tokens,
            "store_tokens": config.estimate.store_tokens,
            "grouped_cached_tokens": round(plan.found_grouped * share),
            "input_order_cached_tokens": by_order,
            "engines_alone_cached_tokens": alone,
            "saved_against_input_order_tokens": totals.cached_tokens - by_order,
            "saved_against_engines_alone_tokens": totals.cached_tokens - alone,
        },
    }


@dataclass(slots=True)
class Progress:
    """A line now and then. Mutable."""

    _rows: int
    _done: int
    _tell: Callable[[str], None]
    _failed: int = 0
    _told_at: float = field(default_factory=time.monotonic)

    def done(self, *, failed: bool) -> None:
        """One more row is done."""
        self._done += 1
        self._failed += failed
        if time.monotonic() - self._told_at > _LINE_S or self._done == self._rows:
            self._told_at = time.monotonic()
            errors = f", {self._failed} failed" if self._failed else ""
            self._tell(f"{self._done} of {self._rows} rows done{errors}")

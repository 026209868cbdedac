"""What a choice would be, without anybody being placed.

What must not live here: the choice itself (choosing.py, router.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvtier.core.costs import FREE_SOURCES, SpeedTable
from kvtier.core.identity import Pool
from kvtier.core.row_scoring import RowPick
from kvtier.core.workers import WorkerName
from kvtier.types import Source
from kvtier_router.routing.choosing import Choice
from kvtier_router.routing.fleet import Table
from kvtier_router.routing.roster import Floats, Member
from kvtier_router.routing.values import Basis, Knowledge, Policy, Prefilled, Usage


class NoPlacement:
    """The placement of what was only explained."""

    key = ""

    def first_token(self, ttft_s: float, cached_tokens: int | None = None) -> None: ...

    def finished(self, usage: Usage) -> None: ...

    def failed(self, kind: object, retry_after_s: float | None = None) -> None: ...


class Chosen(NamedTuple):
    """A choice that may be placed."""

    pick: RowPick
    speeds: SpeedTable
    basis: Basis


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """The row that would be chosen, and what it costs. Fleet columns are those of the moment."""

    table: Table
    choice: Choice
    pick: RowPick
    held: Floats
    """Tokens, (rows, sources)."""
    policy: Policy
    knowledge: Knowledge
    decoding_count: float
    """Sequences that decode there."""

    @property
    def member(self) -> Member:
        return self.table.members[self.choice.row]

    @property
    def pool(self) -> Pool:
        return self.table.group(self.choice.row).pool

    @property
    def held_tokens(self) -> float:
        """Prompt tokens that it has or could get."""
        return float(self.held[self.choice.row].sum())

    @property
    def cost_s(self) -> float | None:
        """Its cost, and the time that computing takes from each who decodes there; None where
        another policy than the cost decided."""
        if self.choice.decision is None:
            return None
        costs, row = self.choice.decision.costs, self.choice.row
        return float(costs.total_s[row] + self.decoding_count * costs.compute_s[row])


def credit(table: Table, prefilled: Prefilled, held: Floats) -> None:
    """Add to `held` what a prefill half left in a store, as far as the index has not told of it:
    near for workers of that store, at peer cost for those of others. Mutates; again, it adds
    nothing. O(rows) Python: only of requests that are split."""
    for row, member in enumerate(table.members):
        if not member.store or table.group(row).pool != prefilled.pool:
            continue
        if member.view is None or member.view.info.namespace != prefilled.namespace:
            continue
        source = Source.DRAM if member.store == prefilled.store else Source.PEER
        missing = prefilled.tokens - float(np.sum(held[row]))
        held[row, source] += max(missing, 0.0)


def loaded_from(held: Sequence[float], member: Member) -> tuple[Source | None, int]:
    """The one source that is loaded from, with its bytes; None where there are several."""
    loaded = [source for source in Source if source not in FREE_SOURCES and held[source] > 0]
    if len(loaded) != 1:
        return None, 0
    return loaded[0], int(held[loaded[0]] * member.kv_bytes_per_token)


def held_of_worker(table: Table, held: Floats | None, worker: WorkerName) -> float:
    """Tokens in the row of one worker; 0 where it or the table has none. O(rows) Python."""
    rows = [row for row, member in enumerate(table.members) if member.name == worker]
    return 0.0 if held is None else float(held[rows].sum())

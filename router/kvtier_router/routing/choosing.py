"""From a table and what is known of one request to the row that serves it.

What must not live here: the index (router.py asks it), reservations (placing.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Final

import numpy as np

from kvtier.client import Match
from kvtier.core.costs import SOURCES_COUNT, FloatArray, SpeedTable
from kvtier.core.prefix_index import MatchResult
from kvtier.core.row_scoring import RowPick, costs_of
from kvtier.core.scoring import Ask, Decision, Weights, candidates, decide
from kvtier.errors import UnavailableError
from kvtier.types import PrefixHash
from kvtier_router.routing.config import RoutingConfig
from kvtier_router.routing.fleet import Table
from kvtier_router.routing.roster import Bools, Floats, Ints, Member, Roster
from kvtier_router.routing.standing import Standing
from kvtier_router.routing.values import Candidate, RouteAsk

ROUNDS_COUNT_MAX: Final = 4096
"""Names whose turn in round robin is remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A row, and the costs where there are any."""

    row: int
    decision: Decision | None
    """None where another policy than the cost decided."""


def picked(
    table: Table, choice: Choice, speeds: SpeedTable, prompt_tokens: int, *, is_split: bool
) -> RowPick:
    """A choice as native scoring tells it. Where no cost decided, and of a split request
    (`is_split`), its parts are those of a whole prefill."""
    row, fleet, decision = choice.row, table.fleet, choice.decision
    gpu, predicted, dram, nvme, peer, redis = fleet.held_tokens[row].tolist()
    held = (gpu, predicted, dram, nvme, peer, redis)
    queued = float(fleet.queued_tokens[row])
    ttft_s, reused = 0.0, 0.0
    if decision is not None:
        costs = decision.costs
        ttft_s, reused = float(costs.ttft_s[row]), float(costs.reused_tokens[row])
        if not is_split:
            parts = float(costs.queue_s[row]), float(costs.load_s[row]), float(costs.compute_s[row])
            return RowPick(row, queued, *parts, ttft_s, reused, held)
    token_s, pair_s = float(speeds.prefill_token_s[row]), float(speeds.prefill_pair_s[row])
    queue_s = token_s * (queued + float(fleet.reserved_tokens[row]))
    compute_s = prompt_tokens * (token_s + pair_s * prompt_tokens / 2.0)
    return RowPick(row, queued, queue_s, 0.0, compute_s, ttft_s, reused, held)


def nothing_held(table: Table) -> Floats:
    """Where no index is asked: (rows, sources)."""
    return np.zeros((len(table), SOURCES_COUNT))


def held_of(table: Table, matches: Sequence[tuple[int, Match]]) -> Floats:
    """What a remote index found, by row. O(matched workers) Python."""
    held = nothing_held(table)
    for number, match in matches:
        rows = {
            member.name: row
            for row, member in enumerate(table.members)
            if table.group_of[row] == number
        }
        block_tokens = table.groups[number].pool.block_tokens
        for at in range(len(match)):
            row = rows.get(match.worker(at).name)
            if row is not None:
                for source, blocks in match.runs(at):
                    held[row, source] += blocks * block_tokens
    return held


def scatter(table: Table, group: int, result: MatchResult, held: Floats) -> None:
    """Add what one chain's match found to `held`, (rows, sources) in tokens. O(runs), vectorised.

    Workers that came after the table was made are passed over.
    """
    if len(result) == 0:
        return
    rows = table.rows_by_holder[group].take(result.workers, mode="clip")
    sources, tokens = (
        result.run_sources,
        result.run_blocks * float(table.groups[group].pool.block_tokens),
    )
    if len(sources) == len(rows):  # one run a worker, the common case: no row comes twice
        if rows.min() < 0:
            known = rows >= 0
            rows, sources, tokens = rows[known], sources[known], tokens[known]
        held[rows, sources] += tokens
        return
    per_run = np.repeat(rows, np.diff(result.run_offsets))
    known = per_run >= 0
    where = (per_run * SOURCES_COUNT + sources)[known]
    held += np.bincount(where, tokens[known], held.size).reshape(held.shape)


def foreign_tokens(table: Table, by_holder: Ints) -> Floats:
    """What other routers have on their way to each row."""
    missing = max(table.holder_max, 0) + 1 - len(by_holder)
    if missing > 0:
        by_holder = np.append(by_holder, np.zeros(missing, np.int64))
    tokens = by_holder[table.holders].astype(np.float64)
    return tokens if table.has_all_holders else tokens * table.has_holder


def fill(
    table: Table, roster: Roster, speeds: SpeedTable, foreign: Floats | None, now: float
) -> None:
    """Bring the columns of a table's fleet up to date, all but matches, age and eligibility."""
    fleet, slots = table.fleet, table.slots
    since_s = now - roster.queued_at[slots]
    drained = roster.queued_beyond[slots] - since_s / speeds.prefill_token_s
    fleet.queued_tokens = np.maximum(drained, 0.0)
    own = roster.own_tokens[slots]
    fleet.reserved_tokens = own if foreign is None else own + foreign
    fleet.decoding_count = roster.own_decoding[slots] + roster.other_running[slots]
    fleet.pinned_tokens = roster.own_kv_tokens[slots] + roster.other_kv_tokens[slots]
    fleet.ramp = roster.ramp[slots]
    fleet.recent_tokens = roster.recent_tokens[slots]


class Eligibility:
    """Who may serve a request. Gives up its wishes one by one before it gives up."""

    def __init__(self, roster: Roster, standing: Standing) -> None:
        self._roster = roster
        self._standing = standing

    def mask(self, table: Table, ask: RouteAsk, shut: frozenset[int], now: float) -> Bools:
        """Rows that may serve `ask`; `shut` are slots whose breaker has just said no. Shared:
        do not write to it.

        UnavailableError, with the states of all, where there is none.
        """
        roster = self._roster
        is_troubled = self._standing.update(now)
        mask, is_any_open = table.open_rows(ask.stage, roster)
        if is_any_open and not (is_troubled or shut or table.is_adapter or ask.excluded):
            return mask
        if not is_any_open:  # hidden ones: their events are silent, they may well be alive
            mask = np.array([not (m.is_gone or m.is_draining) for m in table.members])
            mask = mask & table.roles[ask.stage]
        if is_troubled:
            mask = self._standing.let_through(table, mask, now)
        if shut:
            mask = mask & ~np.isin(table.slots, list(shut))
        if not mask.any():
            raise UnavailableError(self._why_nobody(table, ask, now))
        if table.is_adapter:
            mask = _if_any(mask & table.loaded, mask)
        if ask.excluded:
            tried = np.array([member.name in ask.excluded for member in table.members])
            mask = _if_any(mask & ~tried, mask)
        return mask

    def state(self, table: Table, row: int, ask: RouteAsk, now: float) -> str:
        """Why a row is no candidate; `candidate` where it is one."""
        member = table.members[row]
        if member.is_draining:
            return "draining"
        if member.is_hidden:
            return "hidden"
        if not table.roles[ask.stage][row]:
            return "role"
        if member.name in ask.excluded:
            return "excluded"
        return self._standing.trouble(member.slot, now) or "candidate"

    def state_of(self, member: Member, now: float) -> str:
        """The same of a worker by itself."""
        if member.is_draining:
            return "draining"
        if member.is_hidden:
            return "hidden"
        return self._standing.trouble(member.slot, now) or "candidate"

    def _why_nobody(self, table: Table, ask: RouteAsk, now: float) -> str:
        states = [self.state(table, row, ask, now) for row in range(len(table))]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        return f"no worker of {table.name!r} can be asked now: {counts}"


def _if_any(wish: Bools, otherwise: Bools) -> Bools:
    return wish if wish.any() else otherwise


class Chooser:
    """The policies. Remembers whose turn it is; draws from `draw`, uniform in [0, 1)."""

    def __init__(self, roster: Roster, config: RoutingConfig, draw: Callable[[], float]) -> None:
        self._roster = roster
        self._config = config
        self._draw = draw
        self._turns: dict[str, int] = {}

    def by_cost(self, table: Table, ask: Ask, speeds: SpeedTable) -> Choice:
        """The least cost; the columns of the table's fleet must be up to date."""
        decision = decide(ask, table.fleet, speeds, self._draw(), self._config.weights)
        return Choice(decision.chosen, decision)

    def draw(self) -> float:
        return self._draw()

    def thinned(self, table: Table, ask: Ask, mask: Bools) -> tuple[Bools, float]:
        """Of `mask`, who takes part after canary shares and slow start, with a fresh draw."""
        table.fleet.eligible = mask
        table.fleet.ramp = self._roster.ramp[table.slots]
        return candidates(ask, table.fleet, self._draw())

    def by_hash(self, table: Table, ask: Ask, key: PrefixHash) -> Choice:
        """Bounded-load hashing: the same key, the same worker, while its load permits."""
        mask, _ = candidates(ask, table.fleet, _uniform(key))
        return Choice(table.hashing.choose(key, self._loads(table), mask), None)

    def by_session(self, table: Table, ask: Ask, session_id: str) -> Choice:
        """The same session, the same worker, whatever its load."""
        digest = sha256(session_id.encode("utf-8", "surrogatepass")).digest()
        key = PrefixHash(int.from_bytes(digest[:8], "little"))
        mask, _ = candidates(ask, table.fleet, _uniform(key))
        return Choice(table.hashing.choose(key, np.zeros(len(table)), mask), None)

    def round_robin(self, table: Table, ask: Ask) -> Choice:
        mask, _ = candidates(ask, table.fleet, self._draw())
        rows = np.flatnonzero(mask)
        turn = self._turns.get(table.name, -1)
        if len(self._turns) >= ROUNDS_COUNT_MAX and turn < 0:
            self._turns = {}
        after = rows[rows > turn]
        row = int(after[0] if len(after) else rows[0])
        self._turns[table.name] = row
        return Choice(row, None)

    def least_loaded(self, table: Table, ask: Ask) -> Choice:
        mask, u = candidates(ask, table.fleet, self._draw())
        fleet = table.fleet
        loads = np.where(mask, self._loads(table), inf)
        tied = np.flatnonzero(loads <= loads.min())
        waiting = (fleet.queued_tokens + fleet.reserved_tokens)[tied]
        tied = tied[waiting <= waiting.min()]
        return Choice(int(tied[int(u * len(tied))]), None)

    def random(self, table: Table, ask: Ask) -> Choice:
        mask, u = candidates(ask, table.fleet, self._draw())
        rows = np.flatnonzero(mask)
        return Choice(int(rows[int(u * len(rows))]), None)

    def _loads(self, table: Table) -> FloatArray:
        loads: FloatArray = self._roster.own_requests[table.slots]
        loads += self._roster.other_running[table.slots]
        return loads


def _uniform(key: int) -> float:
    """A number in [0, 1) that depends on the key alone: canaries and slow starts stick as well."""
    mixed = (key * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return (mixed >> 11) / 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What rows of an explanation are made of."""

    table: Table
    choice: Choice
    states: tuple[str, ...]
    names: dict[int, str]
    """Sources by number."""
    held: Floats
    """Tokens, (rows, sources)."""


class DecisionBasis:
    """A Basis: references to what a decision computed, which nothing changes afterwards."""

    __slots__ = ("_choice", "_held", "_names", "_table")

    def __init__(self, table: Table, choice: Choice, held: Floats, names: dict[int, str]) -> None:
        self._table = table
        self._choice = choice
        self._held = held
        self._names = names

    @property
    def rows_count(self) -> int:
        """See Basis."""
        return len(self._table)

    def rows(self, most: int) -> tuple[Candidate, ...]:
        """See Basis. The state of a row says only whether it took part."""
        decision, chosen = self._choice.decision, self._choice.row
        if decision is None:
            wanted, takes_part = [chosen], np.zeros(len(self._table), np.bool_)
            takes_part[chosen] = True
        else:
            total_s = decision.costs.total_s
            wanted = np.argsort(total_s, kind="stable")[: max(1, most)].tolist()
            wanted += [chosen] if chosen not in wanted else []
            takes_part = np.isfinite(total_s)
        states = tuple("candidate" if takes else "no candidate" for takes in takes_part.tolist())
        told = Explanation(self._table, self._choice, states, self._names, self._held)
        return rows_of(told, wanted)


class RowBasis:
    """A Basis of native scoring: what `DecisionBasis` keeps, made of its bytes when asked."""

    __slots__ = ("_names", "_pick", "_table", "_weights")

    def __init__(
        self, table: Table, pick: RowPick, weights: Weights, names: dict[int, str]
    ) -> None:
        self._table = table
        self._pick = pick
        self._weights = weights
        self._names = names

    @property
    def rows_count(self) -> int:
        """See Basis."""
        return len(self._table)

    def rows(self, most: int) -> tuple[Candidate, ...]:
        """See Basis."""
        costs, held = costs_of(self._pick)
        best_s, weights = float(costs.total_s.min()), self._weights
        band_s = max(weights.tie_absolute_s, weights.tie_relative * best_s)
        tied = tuple(np.flatnonzero(costs.total_s <= best_s + band_s).tolist())
        pool = int(self._table.fleet.pool[self._pick.row])
        decision = Decision(self._pick.row, None, tied, pool, costs)
        choice = Choice(self._pick.row, decision)
        return DecisionBasis(self._table, choice, held, self._names).rows(most)


def rows_of(told: Explanation, wanted: Sequence[int] | None = None) -> tuple[Candidate, ...]:
    """The wanted rows in their order; every worker's, in the order of the table, where it is None.
    O(rows) Python."""
    table, decision = told.table, told.choice.decision
    held = told.held
    tied = frozenset(decision.tied) if decision is not None else frozenset()
    rows = []
    for row in range(len(table)) if wanted is None else wanted:
        member = table.members[row]
        parts = dict.fromkeys(
            ("queue_s", "load_s", "compute_s", "decode_s", "adapter_s", "ttft_s", "total_s"), 0.0
        )
        reused = 0.0
        if decision is not None:
            costs = decision.costs
            parts = {name: float(getattr(costs, name)[row]) for name in parts}
            reused = float(costs.reused_tokens[row])
        rows.append(
            Candidate(
                worker=member.name,
                pool=table.group(row).pool,
                state=told.states[row],
                chosen=row == told.choice.row,
                tied=row in tied,
                matched_tokens={
                    told.names[source]: int(held[row, source]) for source in told.names
                },
                reused_tokens=reused,
                **parts,
            )
        )
    return tuple(rows)

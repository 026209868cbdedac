"""`Router`: asks the index, weighs cache against load, reserves, and learns from answers.

One router is one process's brain for one event loop. What must not live here: HTTP, tokenising,
retries (the front asks again with `excluded`), and the policies themselves (choosing.py).
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Final

import numpy as np

from kvtier.client import Match
from kvtier.core.costs import SpeedTable
from kvtier.core.health import Permit
from kvtier.core.identity import chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.row_scoring import Counted, RowAsk, RowPick
from kvtier.core.scoring import Ask
from kvtier.core.workers import Load, WorkerName
from kvtier.errors import KvtierError, NotFoundError, UnavailableError
from kvtier.replica import ReplicaLook
from kvtier.types import Role, Source, Trust
from kvtier_router.routing.affinity import PrefixHeat
from kvtier_router.routing.choosing import (
    Choice,
    Chooser,
    DecisionBasis,
    Eligibility,
    Explanation,
    RowBasis,
    fill,
    foreign_tokens,
    held_of,
    nothing_held,
    picked,
    rows_of,
    scatter,
)
from kvtier_router.routing.comparing import (
    Chosen,
    Compared,
    NoPlacement,
    credit,
    held_of_worker,
    loaded_from,
)
from kvtier_router.routing.config import RoutingConfig
from kvtier_router.routing.fleet import FleetView, Group, Table
from kvtier_router.routing.learning import Expectation, SpeedBooks, TokenAudits
from kvtier_router.routing.placing import RESERVED_S_MIN, Desk, Intent, Placements
from kvtier_router.routing.pools import Pools
from kvtier_router.routing.ports import Hashes, IndexSource, RemoteMatcher
from kvtier_router.routing.roster import Bools, Floats, Ints, Member, Roster
from kvtier_router.routing.standing import Standing
from kvtier_router.routing.values import (
    Basis,
    Clock,
    Delivery,
    Knowledge,
    ModelReport,
    Placement,
    Policy,
    PromptKind,
    ReservationSink,
    RouteAsk,
    RouteDecision,
    WorkerReport,
)

MATCH_DEADLINE_S: Final = 0.005
ATTEMPTS_COUNT_MAX: Final = 8
"""Times that a choice is made anew because a breaker or a change of picture came between."""
_ROOTS_COUNT_MAX: Final = 4096
_SOURCE_NAMES: Final = {int(source): source.name.lower() for source in Source}
_SOURCES: Final = tuple(Source)
_NO_HASHES: Final[Hashes] = np.empty(0, np.uint64)
_NO_TOKENS: Final[Ints] = np.empty(0, np.int64)

_root = lru_cache(maxsize=_ROOTS_COUNT_MAX)(chain_root)


@dataclass(slots=True, eq=False)
class _Case:
    """One ask with all that is looked up for it. Not frozen: made for every request, and a frozen
    one costs a call a field."""

    ask: RouteAsk
    now: float
    table: Table
    look: ReplicaLook | None
    knowledge: Knowledge
    cause: str
    hashes: tuple[Hashes, ...]
    """By group; empty where a chain has no block or is not wanted."""
    chain: tuple[Hashes, int] | None
    """The first of `hashes` that has blocks, with its group."""

    @property
    def prompt_tokens(self) -> int:
        return max(len(self.ask.tokens), 1)


@dataclass(slots=True)
class RouterStats:
    """Counters since the start."""

    decisions: int = 0
    unavailable: int = 0
    by_knowledge: dict[Knowledge, int] = field(default_factory=lambda: dict.fromkeys(Knowledge, 0))
    prompt_tokens: int = 0
    matched_tokens: int = 0
    remote_misses: int = 0
    """Matches that the remote index did not answer in time."""


class Router:
    """See the module and `RoutingBrain`, which it is. Belongs to one thread; nothing waits, but
    `route_remote`, which waits for its index up to a deadline."""

    def __init__(
        self,
        config: RoutingConfig,
        source: IndexSource | None = None,
        sink: ReservationSink | None = None,
        clock: Clock = time.monotonic,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._source = source
        self._roster = Roster()
        self._standing = Standing(self._roster, config)
        self._books = SpeedBooks(config.speeds)
        self._fleet = FleetView(self._roster, config, (self._standing, self._books))
        self._audits = TokenAudits(config.mismatch_share_max, config.hit_mismatch_share_max)
        self._eligibility = Eligibility(self._roster, self._standing)
        self._chooser = Chooser(self._roster, config, draw or secrets.SystemRandom().random)
        self._heat: dict[str, PrefixHeat] = {}
        desk = Desk(
            self._roster,
            self._fleet,
            self._standing,
            self._books,
            self._audits,
            config,
            clock,
            Pools(source, clock),
            source,
            sink,
        )
        self._placements = Placements(desk, f"{config.router}/{secrets.token_hex(4)}")
        self.stats = RouterStats()

    # ---- RoutingBrain

    def route(self, ask: RouteAsk) -> RouteDecision:
        """See RoutingBrain. O(prompt) in native code, O(workers) vectorised."""
        case = self._prepare(ask)
        for _ in range(ATTEMPTS_COUNT_MAX):
            if self._scores_rows(case):
                if self._match_rows(case):
                    return self._conclude(case, None)
            else:
                held = self._match(case)
                if held is not None:
                    return self._conclude(case, held)
            case = self._prepare(ask)
        return self._conclude(case, nothing_held(case.table))

    async def route_remote(
        self, ask: RouteAsk, matcher: RemoteMatcher, deadline_s: float = MATCH_DEADLINE_S
    ) -> RouteDecision:
        """As `route`, with a match of an index that this process does not embed, for fleets too
        large to hold. What does not answer in time does not count: the prompt is hashed."""
        case = self._prepare(ask)
        matches: list[tuple[int, Match]] = []
        if case.knowledge is Knowledge.FRESH:
            try:
                async with asyncio.timeout(deadline_s):
                    matches = await self._ask_remote(case, matcher, deadline_s)
            except (KvtierError, TimeoutError) as error:
                self.stats.remote_misses += 1
                reason = f"the index did not answer: {error or 'deadline'}"
                case = replace(case, knowledge=Knowledge.HASHED, cause=reason)
        self._look()
        if self._fleet.table(ask.served_name) is not case.table:  # somebody came or went meanwhile
            case, matches = self._prepare(ask), []
        return self._conclude(case, held_of(case.table, matches))

    async def _ask_remote(
        self, case: _Case, matcher: RemoteMatcher, deadline_s: float
    ) -> list[tuple[int, Match]]:
        """A match for each chain that has blocks, all at once."""
        wanted = [number for number, hashes in enumerate(case.hashes) if len(hashes)]
        found = await asyncio.gather(
            *(
                matcher.match_many(
                    [case.hashes[number]], case.table.groups[number].pool, deadline_s=deadline_s
                )
                for number in wanted
            )
        )
        return [(number, matches[0]) for number, matches in zip(wanted, found, strict=True)]

    def explain(self, ask: RouteAsk) -> RouteDecision:
        """See RoutingBrain. O(workers) Python."""
        case = self._prepare(ask)
        it = self._compare(case)
        states = tuple(
            self._eligibility.state(case.table, row, ask, case.now)
            for row in range(len(case.table))
        )
        basis = DecisionBasis(case.table, it.choice, it.held, _SOURCE_NAMES)
        decision = self._decision(case, it.pick, NoPlacement(), basis)
        told = Explanation(case.table, it.choice, states, _SOURCE_NAMES, it.held)
        return replace(decision, candidates=rows_of(told))

    @property
    def roster(self) -> Roster:
        """Every worker, to look at."""
        return self._roster

    def compare(self, ask: RouteAsk) -> Compared:
        """What would be chosen, with its cost; places nothing. Raises what `route` does."""
        return self._compare(self._prepare(ask))

    def held_by(self, ask: RouteAsk, worker: WorkerName) -> float:
        """Tokens of a prompt that a worker has or could get, as the index says now. O(workers)."""
        case = self._prepare(ask)
        return held_of_worker(case.table, self._match(case), worker)

    def has_roles(self, name: str) -> bool:
        """Whether a worker behind a name runs only one half of requests. NotFoundError."""
        self._look()
        return self._fleet.table(name).has_roles

    def models(self) -> tuple[ModelReport, ...]:
        """See RoutingBrain."""
        self._look()
        now = self._clock()
        return tuple(self._model(self._fleet.table(name), now) for name in self._fleet.names())

    def serves(self, name: str) -> bool:
        """Whether a name can be asked for now. O(1) for known ones."""
        self._look()
        try:
            self._fleet.table(name)
        except (NotFoundError, UnavailableError):
            return False
        return True

    def workers(self, only: Sequence[WorkerName] | None = None) -> tuple[WorkerReport, ...]:
        """See RoutingBrain."""
        look, now = self._look(), self._clock()
        self._standing.update(now)
        roster = self._roster
        wanted = roster.members() if only is None else [roster.find(name) for name in only]
        return tuple(
            self._worker(member, look, now)
            for member in wanted
            if member is not None and not member.is_gone
        )

    def worker_names(self) -> tuple[WorkerName, ...]:
        """See RoutingBrain."""
        self._look()
        return tuple(member.name for member in self._roster.members() if not member.is_gone)

    def troubled(self) -> dict[WorkerName, str]:
        """See RoutingBrain."""
        now = self._clock()
        self._standing.update(now)
        found: dict[WorkerName, str] = {}
        for member in self._roster.members():
            trouble = "draining" if member.is_draining else self._standing.trouble(member.slot, now)
            if trouble and not member.is_gone:
                found[member.name] = trouble
        return found

    def drain(self, worker: WorkerName) -> None:
        """See RoutingBrain."""
        self._set_draining(worker, True)

    def undrain(self, worker: WorkerName) -> None:
        """See RoutingBrain."""
        self._set_draining(worker, False)

    def unreported(self) -> Sequence[tuple[WorkerName, str]]:
        """See RoutingBrain."""
        self._look()
        return self._fleet.unreported()

    def take_load(self, worker: WorkerName, load: Load | None) -> None:
        """See RoutingBrain."""
        self._fleet.take_load(worker, load, self._look(), self._clock())

    def tick(self) -> None:
        """See RoutingBrain."""
        now = self._clock()
        self._look()
        self._placements.tick(now)
        self._books.tick(now)
        self._fleet.tick(now)

    @property
    def in_flight_count(self) -> int:
        """Placements that have not ended."""
        return len(self._placements)

    # ---- one decision

    def _look(self) -> ReplicaLook | None:
        """What the index says now, taken over into the view of the fleet."""
        if self._source is None:
            return None
        look = self._source.look()
        self._fleet.sync(look, self._clock())
        self._placements.watch_index(look.trust)
        return look

    def _prepare(self, ask: RouteAsk) -> _Case:
        now = self._clock()
        self._placements.tick(now)
        look = self._look()
        table = self._fleet.table(ask.served_name)
        knowledge, cause = self._knowledge(ask, table, look)
        hashes: tuple[Hashes, ...] = ()
        chain = None
        if knowledge is not Knowledge.LOAD_ONLY:
            hashes = tuple([_hashes(group, ask) for group in table.groups])
            for number, one in enumerate(hashes):
                if len(one):
                    chain = one, number
                    break
            else:
                knowledge, cause, hashes = Knowledge.LOAD_ONLY, "shorter than a block", ()
        return _Case(ask, now, table, look, knowledge, cause, hashes, chain)

    def _knowledge(
        self, ask: RouteAsk, table: Table, look: ReplicaLook | None
    ) -> tuple[Knowledge, str]:
        """The rung of the ladder for one ask, and why it is not the first."""
        config = self._config
        if config.policy is not Policy.CACHE_AWARE:
            return Knowledge.LOAD_ONLY, f"policy {config.policy.value}"
        if ask.kind is PromptKind.TEXT:
            return Knowledge.HASHED, "no tokenizer is known"
        if look is None:
            return Knowledge.HASHED, "no index is configured"
        if table.holder_max < 0:
            return Knowledge.HASHED, "no index speaks of these workers"
        if self._audits.is_tokens_suspect(table.groups[0].pool):
            return Knowledge.HASHED, "the workers tokenise differently"
        if look.trust is Trust.EXACT:
            return Knowledge.FRESH, ""
        if look.age_s <= config.stale_s_max:
            return Knowledge.STALE, f"the index was heard {look.age_s:.1f} s ago"
        return Knowledge.HASHED, "the index is silent for too long"

    def _scores_rows(self, case: _Case) -> bool:
        """Whether native scoring decides: what is rare is left to its twin."""
        return (
            self._config.policy is Policy.CACHE_AWARE
            and case.knowledge is not Knowledge.HASHED
            and case.ask.stage is not Role.DECODE
        )

    def _match_rows(self, case: _Case) -> bool:
        """Let the table's scorer know what each row holds; false where the picture has changed
        meanwhile and all must be looked up anew."""
        scorer, source = case.table.scorer, self._source
        scorer.begin()
        if source is None:
            return True
        for number, hashes in enumerate(case.hashes):
            if len(hashes):
                found = source.match(hashes, case.table.groups[number].pool)
                if found.holders is not self._fleet.seen:
                    return False
                scorer.add(number, found.result)
        return True

    def _match(self, case: _Case) -> Floats | None:
        """What each row holds, (rows, sources) in tokens; None where the picture has changed
        meanwhile and all must be looked up anew."""
        held = nothing_held(case.table)
        source = self._source
        if source is None or case.knowledge not in (Knowledge.FRESH, Knowledge.STALE):
            return held
        for number, hashes in enumerate(case.hashes):
            if len(hashes) == 0:
                continue
            found = source.match(hashes, case.table.groups[number].pool)
            if found.holders is not self._fleet.seen:
                return None
            scatter(case.table, number, found.result, held)
        return held

    def _conclude(self, case: _Case, held: Floats | None) -> RouteDecision:
        """Choose and place; without `held` by what the table's scorer was told. A worker whose
        breaker refuses is passed over in the next round."""
        shut: frozenset[int] = frozenset()
        speeds = self._books.table(case.table, case.now)
        try:
            for _ in range(ATTEMPTS_COUNT_MAX):
                mask = self._eligibility.mask(case.table, case.ask, shut, case.now)
                basis: Basis
                if held is None:
                    pick = self._pick(case, speeds, mask)
                    basis = RowBasis(case.table, pick, self._config.weights, _SOURCE_NAMES)
                else:
                    choice = self._choose(case, speeds, held, mask)
                    pick = self._picked(case, choice, speeds)
                    basis = DecisionBasis(case.table, choice, held, _SOURCE_NAMES)
                slot = case.table.members[pick.row].slot
                permit = self._standing.permit(slot, case.now)
                if permit is not None:
                    return self._place(case, Chosen(pick, speeds, basis), permit)
                shut |= {slot}
            raise UnavailableError(f"no worker of {case.table.name!r} lets a request through now")
        except UnavailableError:
            self.stats.unavailable += 1
            raise

    def _compare(self, case: _Case) -> Compared:
        table, held = case.table, self._match(case)
        if held is None:
            held = nothing_held(table)
        mask = self._eligibility.mask(table, case.ask, frozenset(), case.now)
        speeds = self._books.table(table, case.now)
        choice = self._choose(case, speeds, held, mask)
        pick = self._picked(case, choice, speeds)
        decoding = float(table.fleet.decoding_count[choice.row])
        return Compared(table, choice, pick, held, self._config.policy, case.knowledge, decoding)

    def _pick(self, case: _Case, speeds: SpeedTable, mask: Bools) -> RowPick:
        """The choice of native scoring."""
        table, now, look = case.table, case.now, case.look
        self._roster.decay(now)
        u = 0.0
        if table.shares or self._standing.is_anybody_ramping:
            request = Ask(case.prompt_tokens, case.ask.stage, table.shares)
            mask, u = self._chooser.thinned(table, request, mask)
        elif case.chain is None:
            u = self._chooser.draw()
        age_s = look.age_s if look is not None and case.knowledge is Knowledge.STALE else 0.0
        counted = Counted(self._roster.columns, _NO_TOKENS if look is None else look.foreign_tokens)
        ask = RowAsk(case.prompt_tokens, now, age_s, u)
        return table.scorer.decide(ask, speeds, counted, mask, case.chain)

    def _picked(self, case: _Case, choice: Choice, speeds: SpeedTable) -> RowPick:
        is_split = case.ask.scored_stage is Role.DECODE
        return picked(case.table, choice, speeds, case.prompt_tokens, is_split=is_split)

    def _choose(self, case: _Case, speeds: SpeedTable, held: Floats, mask: Bools) -> Choice:
        table, ask, now = case.table, case.ask, case.now
        self._roster.decay(now)
        foreign = None if case.look is None else foreign_tokens(table, case.look.foreign_tokens)
        fill(table, self._roster, speeds, foreign, now)
        fleet = table.fleet
        if ask.prefilled is not None:
            credit(table, ask.prefilled, held)
        fleet.eligible, fleet.held_tokens = mask, held
        age_s = 0.0
        if case.knowledge is Knowledge.STALE and case.look is not None:
            age_s = case.look.age_s
        fleet.age_s = self._roster.distrust_s[table.slots] + age_s
        fleet.ranks = None
        if case.hashes and case.knowledge is not Knowledge.HASHED:
            fleet.ranks = partial(self._ranks, case)
        request = Ask(case.prompt_tokens, ask.scored_stage, table.shares)
        return self._by_policy(case, request, speeds)

    def _by_policy(self, case: _Case, request: Ask, speeds: SpeedTable) -> Choice:
        table, chooser = case.table, self._chooser
        match self._config.policy:
            case Policy.ROUND_ROBIN:
                return chooser.round_robin(table, request)
            case Policy.LEAST_LOADED:
                return chooser.least_loaded(table, request)
            case Policy.RANDOM:
                return chooser.random(table, request)
            case Policy.SESSION:
                if case.ask.session_id:
                    return chooser.by_session(table, request, case.ask.session_id)
                return chooser.least_loaded(table, request)
            case Policy.CACHE_AWARE:
                if case.knowledge is Knowledge.HASHED:
                    return self._by_hash(case, request)
                return chooser.by_cost(table, request, speeds)

    def _by_hash(self, case: _Case, request: Ask) -> Choice:
        table = case.table
        assert case.chain is not None
        hashes, number = case.chain
        depth = max(1, self._config.affinity_tokens // table.groups[number].pool.block_tokens)
        heat = self._heat.get(table.name)
        if heat is None:
            if len(self._heat) >= _ROOTS_COUNT_MAX:
                self._heat = {}
            heat = self._heat[table.name] = PrefixHeat()
        key = heat.key(hashes, depth, int(table.fleet.eligible.sum()))
        return self._chooser.by_hash(table, request, key)

    def _ranks(self, case: _Case, reused_tokens: float) -> Floats:
        """Ranks by the hash that siblings have in common beyond what is reused."""
        assert case.chain is not None
        hashes, pool = case.chain[0], case.table.groups[case.chain[1]].pool
        beyond = int(reused_tokens + self._config.affinity_tokens) // pool.block_tokens
        return case.table.hashing.ranks(int(hashes[min(beyond, len(hashes) - 1)]))

    # ---- what follows from a choice

    def _place(self, case: _Case, chosen: Chosen, permit: Permit) -> RouteDecision:
        pick, speeds = chosen.pick, chosen.speeds
        table, row, ask = case.table, pick.row, case.ask
        group, member = table.group(row), table.members[row]
        expected = _expectation(case, pick, float(speeds.prefill_token_s[row]))
        ttft_s = expected.queue_s + expected.compute_s + expected.load_s
        is_whole = ask.delivery is Delivery.WHOLE
        ttl_s = 1.5 * ttft_s + 0.25 if is_whole else 3.0 * ttft_s + RESERVED_S_MIN
        promised = 0
        if case.knowledge is Knowledge.FRESH and not self._roster.distrust_s[member.slot]:
            promised = int(pick.held_tokens[Source.GPU])
        hashes = case.hashes[group.number] if case.hashes else _NO_HASHES
        intent = Intent(
            expected=expected,
            pool=group.pool,
            hashes=_NO_HASHES if ask.kind is PromptKind.TEXT else hashes,
            permit=permit,
            prompt_tokens=case.prompt_tokens,
            kv_tokens=expected.tokens + ask.output_tokens,
            exact_tokens=len(ask.tokens)
            if ask.kind is PromptKind.TOKENS and len(ask.tokens)
            else None,
            promised_tokens=promised,
            ttl_s=max(min(ttl_s, ask.deadline - case.now), 1.0),
            delivery=ask.delivery,
        )
        placed = self._placements.place(intent, case.now)
        decision = self._decision(case, pick, placed, chosen.basis)
        stats = self.stats
        stats.decisions += 1
        stats.prompt_tokens += decision.prompt_tokens
        stats.matched_tokens += decision.reused_tokens
        stats.by_knowledge[case.knowledge] += 1
        return decision

    def _decision(
        self, case: _Case, pick: RowPick, placement: Placement, basis: Basis
    ) -> RouteDecision:
        held = pick.held_tokens
        return RouteDecision(
            target=case.table.target(pick.row),
            policy=self._config.policy,
            knowledge=case.knowledge,
            cause=case.cause,
            prompt_tokens=len(case.ask.tokens),
            matched_tokens={source: int(held[source]) for source in _SOURCES if held[source]},
            reused_tokens=int(pick.reused_tokens),
            predicted_ttft_s=pick.ttft_s,
            decided_in_s=self._clock() - case.now,
            placement=placement,
            basis=basis,
        )

    # ---- reports

    def _model(self, table: Table, now: float) -> ModelReport:
        pools = tuple(dict.fromkeys(group.pool for group in table.groups))
        audits = [self._audits.audit(pool) for pool in pools]
        causes = [cause for pool in pools if (cause := self._audits.cause(pool, now))]
        states = [self._eligibility.state_of(member, now) for member in table.members]
        return ModelReport(
            name=table.name,
            pools=pools,
            is_adapter=table.is_adapter,
            workers_count=len(table),
            eligible_count=states.count("candidate"),
            cause="; ".join(causes),
            token_mismatches=sum(audit.token_misses_total for audit in audits),
            hit_mismatches=sum(audit.hit_misses_total for audit in audits),
            evicted_promises=sum(audit.evictions_total for audit in audits),
            responses=sum(audit.responses_total for audit in audits),
        )

    def _worker(self, member: Member, look: ReplicaLook | None, now: float) -> WorkerReport:
        view, slot, roster = member.view, member.slot, self._roster
        foreign = 0
        if look is not None and view is not None and view.holder < len(look.foreign_tokens):
            foreign = int(look.foreign_tokens[view.holder])
        tokens_per_s = self._books.tokens_per_s(member, now)
        drained = (now - roster.queued_at[slot]) * tokens_per_s
        beyond = max(float(roster.queued_beyond[slot]) - drained, 0.0)
        waiting = roster.own_tokens[slot] + beyond + foreign
        return WorkerReport(
            worker=member.name,
            address=member.address,
            served_names=member.card.served_names,
            pool=member.card.pool,
            node=member.node,
            state=self._eligibility.state_of(member, now),
            trust="unknown" if view is None else view.trust.value,
            cause="" if view is None else view.degraded_reason,
            requests_in_flight=int(roster.own_requests[slot]),
            waiting_prefill_tokens=int(waiting),
            prefill_tokens_per_s=tokens_per_s,
            ramp=float(roster.ramp[slot]),
        )

    def _set_draining(self, worker: WorkerName, is_draining: bool) -> None:
        self._look()
        member = self._roster.find(worker)
        if member is None or member.is_gone:
            raise NotFoundError(f"worker {worker.instance!r} rank {worker.dp_rank} is not known")
        member.is_draining = is_draining
        self._fleet.redraw(member)


def _hashes(group: Group, ask: RouteAsk) -> Hashes:
    """The prefix chain of one prompt in one group; empty where its blocks have no name."""
    if not group.is_indexable:
        return _NO_HASHES
    root = _root(group.pool, ask.scope_salt, group.adapter)
    return prefix_hashes(root, ask.tokens, group.pool.block_tokens)


def _expectation(case: _Case, pick: RowPick, token_s: float) -> Expectation:
    """What the choice says of the chosen worker's next seconds."""
    table, row, look = case.table, pick.row, case.look
    member = table.members[row]
    others, holder = pick.queued_tokens, member.holder
    if look is not None and holder is not None and holder < len(look.foreign_tokens):
        others += float(look.foreign_tokens[holder])
    load_s, reused, load_bytes, source, is_certain = 0.0, 0, 0, None, False
    if case.ask.scored_stage is not Role.DECODE:
        load_s = max(pick.load_s - pick.queue_s, 0.0)
        reused = int(pick.reused_tokens)
        is_fresh = case.knowledge is Knowledge.FRESH
        is_certain = is_fresh and not pick.held_tokens[Source.PREDICTED]
        if load_s > 0.0:
            source, load_bytes = loaded_from(pick.held_tokens, member)
    return Expectation(
        member=member,
        model_id=table.group(row).pool.model_id,
        tokens=max(case.prompt_tokens - reused, 1),
        context_tokens=reused,
        queue_s=pick.queue_s,
        others_s=others * token_s,
        compute_s=pick.compute_s,
        load_s=load_s,
        load_source=source,
        load_bytes=load_bytes,
        is_hit_certain=is_certain,
    )

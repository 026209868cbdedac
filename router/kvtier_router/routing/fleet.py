"""Whom the router may use, by the name that clients ask for.

`FleetView` follows an index's picture and the configuration's list of workers, and turns a served
name, alias or adapter into a `Table`: the rows that compete, with everything about them that does
not change from one request to the next. What must not live here: loads (roster.py), health
(standing.py), matching and choice (router.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.core.fallback import BoundedHash, member_seed
from kvtier.core.fallback import Member as HashMember
from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import AdapterRef, Pool
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.core.row_scoring import NO_ROW, RowGroup, Rows, RowScorer
from kvtier.core.scoring import Fleet
from kvtier.core.workers import HolderView, Load, WorkerName
from kvtier.errors import NotFoundError, UnavailableError
from kvtier.replica import ReplicaLook
from kvtier.types import HolderId, HolderKind, Role, Tier
from kvtier_router.routing.config import NameRule, NameTarget, RoutingConfig, StaticWorker
from kvtier_router.routing.roster import UNKNOWN_KV_BYTES, Bools, Ints, Member, Roster
from kvtier_router.routing.values import Target

ORPHAN_S = 10.0
"""A worker that a new index has not met yet stays for so long: its publisher is on its way."""
LEFT_S = 600.0
"""A name that nobody serves any more is out of service for so long, and unknown only then."""
STARTUP_S = 5.0
"""Who is met within so long of the first worker was there before this router."""
RANKED_ENGINES = frozenset({"vllm", "sglang"})
"""They take the rank of a request from the header `x-data-parallel-rank`."""
OWN_ENGINE = "kvtier"
"""Its publisher always tells of its load."""
TABLES_COUNT_MAX = 4096
"""Names whose tables are remembered; beyond it all are made anew."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a table that share one prefix chain."""

    number: int
    pool: Pool
    adapter: AdapterRef | None
    is_indexable: bool
    """False for an adapter without a digest: its blocks have no name."""
    target: int
    """Which target of the name's rule it serves: the unit of canary shares."""
    model: str
    """What to ask its workers for."""


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The rows behind one name; rows of one model id are neighbours. Arrays are (rows,)."""

    name: str
    groups: tuple[Group, ...]
    members: tuple[Member, ...]
    slots: Ints
    ids: tuple[HolderId, ...]
    """Slots again, as what health and speeds are kept by."""
    group_of: Ints
    models: tuple[tuple[str, int, int], ...]
    """Model ids with first row and the row after the last."""
    holders: Ints
    has_holder: Bools
    has_all_holders: bool
    holder_max: int
    rows_by_holder: tuple[Ints, ...]
    """For each group: row by holder number; the last element, -1, stands for all beyond."""
    roles: dict[Role, Bools]
    """By stage: who runs it."""
    has_roles: bool
    """Whether somebody runs only one half of requests."""
    loaded: Bools
    """Has the adapter, if the name is one."""
    is_adapter: bool
    shares: dict[int, float]
    """By target; empty where all compete on cost."""
    fleet: Fleet
    """Columns that decisions fill; nobody else may keep them."""
    hashing: BoundedHash
    scorer: RowScorer
    masks: dict[Role, tuple[int, Bools, bool]] = field(default_factory=dict)
    """By stage the roster's count of changes, the rows that were open then, whether any was."""
    ranked: frozenset[WorkerName] = frozenset()
    """Members that share their address with other ranks, of an engine that can be told which."""
    targets: dict[int, Target] = field(default_factory=dict)
    """By row, as far as they were needed."""

    def __len__(self) -> int:
        return len(self.members)

    def group(self, row: int) -> Group:
        return self.groups[int(self.group_of[row])]

    def target(self, row: int) -> Target:
        """Where requests for a row go; made once."""
        known = self.targets.get(row)
        if known is None:
            member, group = self.members[row], self.group(row)
            known = self.targets[row] = Target(
                worker=member.name,
                address=member.address,
                model=group.model,
                pool=group.pool,
                adapter=group.adapter,
                node=member.node,
                store=member.store,
                rank=member.name.dp_rank if member.name in self.ranked else None,
            )
        return known

    def open_rows(self, stage: Role, roster: Roster) -> tuple[Bools, bool]:
        """Who runs a stage and is open, and whether there is any. A shared array: do not write to
        it. O(1) unless somebody's state has changed."""
        known = self.masks.get(stage)
        if known is None or known[0] != roster.changes_count:
            is_open = roster.is_open[self.slots]
            mask: Bools = is_open & self.roles[stage]
            if stage is Role.BOTH and not mask.any():
                mask = is_open  # a whole request goes to anybody rather than to nobody
            known = self.masks[stage] = roster.changes_count, mask, bool(mask.any())
        return known[1], known[2]


class FleetListener(Protocol):
    """Hears of members; called while the view changes."""

    def joined(self, member: Member, now: float, is_new: bool) -> None:
        """`is_new`: it was not there when the router started."""
        ...

    def left(self, member: Member) -> None: ...

    def reported(self, member: Member, tokens_per_s: float, now: float) -> None:
        """It says how fast it prefills."""
        ...


class FleetView:
    """See the module. Belongs to one thread; every method is O(1) unless somebody came or went."""

    def __init__(
        self, roster: Roster, config: RoutingConfig, listeners: Sequence[FleetListener]
    ) -> None:
        self._roster = roster
        self._config = config
        self._listeners = tuple(listeners)
        self._rules = {rule.name: rule for rule in config.rules}
        self._static = {worker.name: worker for worker in config.workers}
        self._static_at = {
            _place(worker.address, worker.name.dp_rank): worker.name for worker in config.workers
        }
        self._tables: dict[str, Table] = {}
        self._by_holder: dict[HolderId, Member] = {}
        self._seen: dict[HolderId, HolderView] | None = None
        self._seen_changes = -1
        self._first_at = inf
        self._orphans: dict[WorkerName, float] = {}
        self._left_names: dict[str, float] = {}
        for worker in config.workers:
            self._add(_member_of_static(worker), -inf)

    @property
    def seen(self) -> dict[HolderId, HolderView] | None:
        """The picture whose holder numbers the tables use."""
        return self._seen

    # ---- following

    def sync(self, look: ReplicaLook, now: float) -> None:
        """Take over what has changed since the last call. O(1) where nothing has."""
        if look.holders is not self._seen:
            self._change_picture(now)
        elif look.changes_count == self._seen_changes:
            return
        self._seen, self._seen_changes = look.holders, look.changes_count
        views = look.holders.copy()
        for holder, view in views.items():
            known = self._by_holder.get(holder)
            if known is None or known.view is not view:
                self._take(view, look, now)
        for holder in [holder for holder in self._by_holder if holder not in views]:
            self._leave(self._by_holder.pop(holder), now)

    def tick(self, now: float) -> None:
        """Let go of workers that a new index never met, and of names long out of service."""
        for gone in [known for known, until in self._left_names.items() if until <= now]:
            del self._left_names[gone]
        for name in [name for name, until in self._orphans.items() if until <= now]:
            del self._orphans[name]
            member = self._roster.find(name)
            if member is not None and member.view is None and name not in self._static:
                self._leave(member, now)

    def unreported(self) -> list[tuple[WorkerName, str]]:
        """Workers of whose load nobody tells, with their addresses. O(workers)."""
        return [
            (member.name, member.address)
            for member in self._present()
            if member.engine != OWN_ENGINE and not member.reports_load
        ]

    def take_load(
        self, worker: WorkerName, load: Load | None, look: ReplicaLook | None, now: float
    ) -> None:
        """Take in what a worker said itself when it was asked; None: nothing."""
        member = self._roster.find(worker)
        if member is None or (load is None and member.asked_load is None):
            return
        member.asked_load, member.asked_at = load, now
        self._count_load(member, look)

    def forget(self, member: Member) -> None:
        """A request of a member that is gone has ended: it may have been the last."""
        if member.is_gone and self._roster.find(member.name) is member:
            self._roster.remove(member)

    def redraw(self, member: Member) -> None:
        """Its draining state has changed."""
        self._roster.refresh(member)

    def _change_picture(self, now: float) -> None:
        """Numbers of holders mean somebody else from now on. Who was known stays for a while."""
        for member in self._by_holder.values():
            member.view = None
            self._roster.refresh(member)
            self._orphans[member.name] = now + ORPHAN_S
        self._by_holder = {}
        self._tables = {}

    def _take(self, view: HolderView, look: ReplicaLook, now: float) -> None:
        info = view.info
        if info.kind is not HolderKind.WORKER or info.card is None:
            return
        member = self._roster.find(view.name)
        if member is None or member.is_gone:
            member = self._join(view, info.card, member, now)
        before, member.view = member.view, view
        if before is None or before.info is not info:
            self._describe(member, info, info.card)
            self._roster.refresh(member)
        elif before.is_hidden != view.is_hidden:
            self._roster.refresh(member)
        self._by_holder[view.holder] = member
        self._count_load(member, look)
        if view.load.prefill_tokens_per_s:
            for listener in self._listeners:
                listener.reported(member, view.load.prefill_tokens_per_s, now)

    def _count_load(self, member: Member, look: ReplicaLook | None) -> None:
        known, holder = 0, member.holder
        if look is not None and holder is not None and holder < len(look.foreign_requests):
            known = int(look.foreign_requests[holder])
        self._roster.take_load(member, known, self._config.distrust_s)

    def _join(self, view: HolderView, card: ModelCard, gone: Member | None, now: float) -> Member:
        self._first_at = min(self._first_at, now)
        double = self._static_at.get(_place(view.info.addresses.http, view.info.dp_rank))
        if double is not None and double != view.name:
            known = self._roster.find(double)
            if known is not None and known.view is None:
                self._leave_for_good(known)
        if gone is None:
            return self._add(
                Member(view.name, -1, card, "", "", "", Role.BOTH, inf, UNKNOWN_KV_BYTES), now
            )
        gone.is_gone = False  # it came back before its last request ended
        self._tables = {}
        self._tell_joined(gone, now, True)
        return gone

    def _add(self, member: Member, now: float) -> Member:
        added = self._roster.add(member)
        self._tables = {}
        self._tell_joined(added, now, now > self._first_at + STARTUP_S)
        return added

    def _tell_joined(self, member: Member, now: float, is_new: bool) -> None:
        for listener in self._listeners:
            listener.joined(member, now, is_new)

    def _describe(self, member: Member, info: HolderInfo, card: ModelCard) -> None:
        """Take over what its publisher says of a worker."""
        self._orphans.pop(member.name, None)
        member.card, member.role, member.engine = card, info.role, info.engine
        member.address, member.node, member.store = info.addresses.http, info.node, info.store
        static = self._static.get(member.name)
        if not member.address and static is not None:
            member.address = static.address
        blocks = sum(one.blocks for one in info.capacities if one.tier is Tier.GPU)
        member.capacity_tokens = float(blocks * card.block_tokens) if blocks else inf
        width = info.block_bytes * info.shards_count / card.block_tokens
        member.kv_bytes_per_token = width or UNKNOWN_KV_BYTES
        self._tables = {}

    def _leave(self, member: Member, now: float) -> None:
        """It said goodbye, or its lease and grace are over. One that the configuration names is
        still there, on the configuration's word."""
        static = self._static.get(member.name)
        if static is not None:
            fresh = _member_of_static(static)
            member.view = None
            member.card, member.address, member.role = fresh.card, fresh.address, fresh.role
            member.engine = fresh.engine
            member.node, member.store = fresh.node, fresh.store
            member.capacity_tokens = fresh.capacity_tokens
            self._roster.refresh(member)
            self._tables = {}
            return
        double = self._static_at.get(_place(member.address, member.name.dp_rank))
        if len(self._left_names) < TABLES_COUNT_MAX:
            names = (*member.card.served_names, *(one.name for one in member.card.adapters))
            self._left_names.update(dict.fromkeys(names, now + LEFT_S))
        self._leave_for_good(member)
        if double is not None and self._roster.find(double) is None:
            self._add(_member_of_static(self._static[double]), now)

    def _leave_for_good(self, member: Member) -> None:
        self._tables = {}
        for listener in self._listeners:
            listener.left(member)
        self._roster.remove(member)

    # ---- by name

    def names(self) -> tuple[str, ...]:
        """Every name that can be asked for, sorted. O(members x names)."""
        found = {rule.name for rule in self._config.rules}
        for card in {member.card for member in self._present()}:
            found.update(card.served_names)
            found.update(adapter.name for adapter in card.adapters)
        return tuple(sorted(name for name in found if self._find(name) is not None))

    def table(self, name: str) -> Table:
        """The rows behind a name, remembered until the fleet changes. UnavailableError where it
        is configured, or all who served it have left lately; NotFoundError where nobody did."""
        table = self._find(name)
        if table is None and (name in self._left_names or name in self._rules):
            raise UnavailableError(f"no worker serves {name!r} now")
        if table is None:
            raise NotFoundError(f"model {name!r} is not served here")
        return table

    def _find(self, name: str) -> Table | None:
        known = self._tables.get(name)
        if known is not None:
            return known
        rule = self._rules.get(name) or NameRule(name, (NameTarget(name),))
        made = _table(rule, self._present(), self._config)
        if made is not None:
            if len(self._tables) >= TABLES_COUNT_MAX:
                self._tables = {}
            self._tables[name] = made
        return made

    def _present(self) -> list[Member]:
        return [member for member in self._roster.members() if not member.is_gone]


def _place(address: str, dp_rank: int) -> tuple[str, int]:
    """An address without what may be written differently."""
    return address.split("://", 1)[-1].rstrip("/"), dp_rank


def _member_of_static(worker: StaticWorker) -> Member:
    return Member(
        name=worker.name,
        slot=-1,
        card=worker.card,
        address=worker.address,
        node=worker.node,
        store=worker.store,
        role=worker.role,
        capacity_tokens=worker.capacity_tokens,
        kv_bytes_per_token=UNKNOWN_KV_BYTES,
    )


# Tables


@dataclass(frozen=True, slots=True)
class _Row:
    member: Member
    group: Group
    is_loaded: bool


def _table(rule: NameRule, members: Sequence[Member], config: RoutingConfig) -> Table | None:
    """The table of one name; None where nobody serves any of its targets."""
    groups: dict[tuple[int, Pool, AdapterRef | None, bool], Group] = {}
    rows: list[_Row] = []
    for number, target in enumerate(rule.targets):
        rows += _rows(number, target, members, groups)
    if not rows:
        return None
    rows.sort(key=lambda row: (row.group.pool.model_id, row.group.number, row.member.name))
    ordered = [row.member for row in rows]
    slots = np.array([member.slot for member in ordered], np.int64)
    holders = np.array([-1 if m.holder is None else m.holder for m in ordered], np.int64)
    count = len(rows)
    fleet = Fleet.idle(count)
    fleet.capacity_tokens[:] = [member.capacity_tokens for member in ordered]
    fleet.kv_bytes_per_token[:] = [member.kv_bytes_per_token for member in ordered]
    fleet.pool[:] = [row.group.target for row in rows]
    fleet.adapter_loaded[:] = [row.is_loaded for row in rows]
    group_of = np.array([row.group.number for row in rows], np.int64)
    rows_by_holder = tuple(
        _rows_by_holder(holders, group_of == group.number) for group in groups.values()
    )
    seeds = [HashMember(member_seed(m.name.instance, m.name.dp_rank)) for m in ordered]
    return Table(
        name=rule.name,
        groups=tuple(groups.values()),
        members=tuple(ordered),
        slots=slots,
        ids=tuple(HolderId(slot) for slot in slots.tolist()),
        group_of=group_of,
        models=tuple(_stretches([row.group.pool.model_id for row in rows])),
        holders=np.maximum(holders, 0),
        has_holder=holders >= 0,
        has_all_holders=bool((holders >= 0).all()),
        holder_max=int(holders.max()),
        rows_by_holder=rows_by_holder,
        roles={stage: _runs(ordered, stage) for stage in Role},
        has_roles=any(member.role is not Role.BOTH for member in ordered),
        loaded=fleet.adapter_loaded.copy(),
        is_adapter=all(
            group.adapter is not None or not group.is_indexable for group in groups.values()
        ),
        shares=_shares(rule),
        fleet=fleet,
        hashing=BoundedHash(seeds, config.hash_bound),
        ranked=_ranked(members),
        scorer=RowScorer(
            Rows(
                slots=slots.astype(np.uint32),
                holders=_unsigned(holders),
                capacity_tokens=fleet.capacity_tokens,
                kv_bytes_per_token=fleet.kv_bytes_per_token,
                adapter_loaded=fleet.adapter_loaded,
                seeds=np.array([member.seed for member in seeds], np.uint64),
                groups=[
                    RowGroup(_unsigned(rows), group.pool.block_tokens, config.affinity_tokens)
                    for group, rows in zip(groups.values(), rows_by_holder, strict=True)
                ],
            ),
            config.weights,
        ),
    )


def _ranked(members: Sequence[Member]) -> frozenset[WorkerName]:
    behind = Counter(member.address for member in members if member.engine in RANKED_ENGINES)
    return frozenset(
        member.name
        for member in members
        if member.engine in RANKED_ENGINES and behind[member.address] > 1
    )


def _unsigned(numbers: Ints) -> npt.NDArray[np.uint32]:
    """Rows or holders, NO_ROW in place of -1."""
    return np.where(numbers < 0, NO_ROW, numbers).astype(np.uint32)


def _rows(
    number: int,
    target: NameTarget,
    members: Sequence[Member],
    groups: dict[tuple[int, Pool, AdapterRef | None, bool], Group],
) -> Iterable[_Row]:
    """Who serves one target; its groups are added to `groups`."""

    def group(pool: Pool, adapter: AdapterRef | None, is_indexable: bool) -> Group:
        key = (number, pool, adapter, is_indexable)
        if key not in groups:
            groups[key] = Group(
                len(groups), pool, adapter, is_indexable, number, target.served_name
            )
        return groups[key]

    named = target.served_name
    wanted = [m for m in members if target.revision in (None, m.card.revision)]
    with_adapter: dict[Pool, tuple[int, Group]] = {}
    rows, without = list[_Row](), list[Member]()
    for member in wanted:
        card = member.card
        if named in card.served_names:
            rows.append(_Row(member, group(card.pool, None, True), True))
            continue
        adapter = _adapter(card, named)
        if adapter is None:
            without.append(member)
            continue
        ref = adapter.ref if adapter.indexable else None
        own = group(card.pool, ref, adapter.indexable)
        rows.append(_Row(member, own, True))
        newest = with_adapter.get(card.pool)
        if newest is None or newest[0] < adapter.generation:
            with_adapter[card.pool] = (adapter.generation, own)
    for member in without:  # could load it
        known = with_adapter.get(member.card.pool)
        if known is not None:
            rows.append(_Row(member, known[1], False))
    return rows


def _adapter(card: ModelCard, name: str) -> Adapter | None:
    return next((adapter for adapter in card.adapters if adapter.name == name), None)


def _shares(rule: NameRule) -> dict[int, float]:
    return {
        number: target.share
        for number, target in enumerate(rule.targets)
        if target.share is not None
    }


def _stretches(models: Sequence[str]) -> Iterable[tuple[str, int, int]]:
    start = 0
    for row in range(1, len(models) + 1):
        if row == len(models) or models[row] != models[start]:
            yield models[start], start, row
            start = row


def _rows_by_holder(holders: Ints, is_in_group: Bools) -> Ints:
    rows = np.full(int(holders.max()) + 2, -1, np.int64)
    mine = np.flatnonzero(is_in_group & (holders >= 0))
    rows[holders[mine]] = mine
    return rows


def _runs(members: Sequence[Member], stage: Role) -> Bools:
    """Half of a request goes to any worker that runs it; a whole one to those that answer."""
    fitting = {Role.BOTH, Role.DECODE if stage is Role.BOTH else stage}
    return np.array([member.role in fitting for member in members], np.bool_)

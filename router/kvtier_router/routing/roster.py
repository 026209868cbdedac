"""Every worker this router knows, each with a slot: a row of the columns that decisions gather.

Columns hold what changes all the time (loads, own requests), so that a new load or a placement
touches one element, and tables of served names are rebuilt only when somebody joins or leaves.
What must not live here: who serves what (fleet.py), who is healthy (standing.py).
"""

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from kvtier.core.model_card import ModelCard
from kvtier.core.row_scoring import COLUMNS
from kvtier.core.workers import HolderView, Load, WorkerName
from kvtier.errors import LimitError
from kvtier.limits import HOLDERS_COUNT_MAX
from kvtier.types import HolderId, Role, Trust

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_LOAD = Load()
UNKNOWN_KV_BYTES = 128 << 10
"""KV bytes a token where a worker does not say: an 8B model with grouped-query attention."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker. `slot` stays the same for as long as this object is in the roster."""

    name: WorkerName
    slot: int
    card: ModelCard
    address: str
    node: str
    store: str
    role: Role
    capacity_tokens: float
    kv_bytes_per_token: float
    engine: str = ""
    """As its publisher calls it; empty where nobody says."""
    asked_load: Load | None = None
    """What the worker itself said when it was asked, where nobody reports its load."""
    asked_at: float = 0.0
    view: HolderView | None = None
    """As the index in use describes it; None for a worker that only the configuration names, or
    that the index in use has not met yet."""
    is_draining: bool = False
    is_gone: bool = False
    """Left the fleet; here only until its last request ends."""

    @property
    def holder(self) -> HolderId | None:
        return None if self.view is None else self.view.holder

    @property
    def reports_load(self) -> bool:
        """Whether its publisher tells of its load: one that does not says only zeros."""
        return self.view is not None and self.view.load != NO_LOAD

    @property
    def is_hidden(self) -> bool:
        return self.view is not None and self.view.is_hidden


class Roster:
    """Members by name, and their columns. Arrays are replaced when they grow: do not keep them."""

    def __init__(self) -> None:
        self._members: dict[WorkerName, Member] = {}
        self._by_slot: list[Member | None] = []
        self._free: list[int] = []
        self.own_requests: Floats = np.zeros(0)
        self.columns: Floats
        self._view(np.zeros((len(COLUMNS), 0)))
        self.ramp: Floats = np.zeros(0)
        self.is_open: Bools = np.zeros(0, np.bool_)
        """Neither hidden nor draining nor gone."""
        self.holders: Ints = np.zeros(0, np.int64)
        """Number in the index in use; -1 for none."""
        self.changes_count = 0
        """Grows with each change of `is_open`."""
        self.mean_tokens = 512.0
        """What a request computes, about."""
        self._decayed_at = -inf

    def _view(self, columns: Floats) -> None:
        """Take `columns`, (COLUMNS, slots), into use: native scoring reads them as one."""
        self.columns = columns
        (
            self.own_tokens,
            self.own_decoding,
            self.own_kv_tokens,
            self.queued_beyond,
            self.queued_at,
            self.other_running,
            self.other_kv_tokens,
            self.distrust_s,
            self.recent_tokens,
        ) = columns
        # own_tokens: prefill tokens that this router has sent and that have not answered yet.
        # own_kv_tokens: KV tokens of this router's requests in flight.
        # queued_beyond: waiting prefill tokens of the last report that no router had reserved.
        # other_running: requests of the last report that are not this router's.
        # distrust_s: added to the age of what the index says of it.

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def find(self, name: WorkerName) -> Member | None:
        return self._members.get(name)

    def at(self, slot: int) -> Member | None:
        return self._by_slot[slot] if 0 <= slot < len(self._by_slot) else None

    def add(self, member: Member) -> Member:
        """Give a new member its slot. LimitError when the roster is full."""
        if len(self._members) >= HOLDERS_COUNT_MAX:
            raise LimitError(f"more than {HOLDERS_COUNT_MAX} workers")
        if not self._free:
            self._grow()
        member.slot = self._free.pop()
        self.columns[:, member.slot] = 0.0
        self.own_requests[member.slot] = 0.0
        self.ramp[member.slot] = 1.0
        self._by_slot[member.slot] = member
        self._members[member.name] = member
        self.refresh(member)
        return member

    def remove(self, member: Member) -> bool:
        """Forget a member that has nothing in flight; otherwise it is only gone. Whether its slot
        is free again."""
        member.is_gone = True
        member.view = None
        self.refresh(member)
        if self.own_requests[member.slot] > 0:
            return False
        self._members.pop(member.name, None)
        self._by_slot[member.slot] = None
        self._free.append(member.slot)
        return True

    def refresh(self, member: Member) -> None:
        """Take over what the member itself says into the columns."""
        slot = member.slot
        self.changes_count += 1
        self.is_open[slot] = not (member.is_gone or member.is_draining or member.is_hidden)
        self.holders[slot] = -1 if member.view is None else member.view.holder

    def take_load(self, member: Member, foreign_requests: int, distrust_s: float) -> None:
        """Take over a report: the waiting requests that no router has reserved are beyond all
        routers, with their part of the waiting tokens.

        A report counts requests that routers know of as well, which would weigh twice. Requests
        are compared, not tokens: a router reserves what will be computed, while a worker may not
        know yet how much of what waits is cached.
        """
        view, slot = member.view, member.slot
        load, heard_at = NO_LOAD, 0.0
        if member.reports_load and view is not None:
            load, heard_at = view.load, view.heard_at
        elif member.asked_load is not None:
            load, heard_at = member.asked_load, member.asked_at
        elif view is not None:
            heard_at = view.heard_at
        known = self.own_requests[slot] - self.own_decoding[slot] + foreign_requests
        reported = max(load.waiting_requests, 1 if load.queued_prefill_tokens else 0)
        beyond = max(0.0, reported - known)
        each = load.queued_prefill_tokens / max(reported, 1) or self.mean_tokens
        self.queued_beyond[slot] = beyond * each
        self.queued_at[slot] = heard_at
        running = load.running_requests + load.waiting_requests
        self.other_running[slot] = max(0.0, running - self.own_requests[slot])
        pinned = float(load.running_tokens)
        if load.total_blocks:
            pinned = float((load.total_blocks - load.free_blocks) * member.card.block_tokens)
        self.other_kv_tokens[slot] = max(0.0, pinned - self.own_kv_tokens[slot])
        is_doubted = view is not None and view.trust is Trust.DEGRADED
        self.distrust_s[slot] = distrust_s if is_doubted else 0.0

    def see_tokens(self, tokens_count: int) -> None:
        """Take in what one request computes, for workers that count only requests."""
        self.mean_tokens += 0.02 * (tokens_count - self.mean_tokens)

    def decay(self, now: float, half_life_s: float = 15.0) -> None:
        """Let `recent_tokens` fade; at most ten times a second."""
        if now - self._decayed_at < 0.1:
            return
        if self._decayed_at > -inf:
            self.recent_tokens *= 0.5 ** ((now - self._decayed_at) / half_life_s)
        self._decayed_at = now

    def _grow(self) -> None:
        before = len(self._by_slot)
        after = max(16, 2 * before)
        columns = np.zeros((len(COLUMNS), after))
        columns[:, :before] = self.columns
        self._view(columns)
        for name in ("own_requests", "ramp", "is_open", "holders"):
            column = getattr(self, name)
            longer = np.zeros(after, column.dtype)
            longer[:before] = column
            setattr(self, name, longer)
        self._by_slot.extend([None] * (after - before))
        self._free.extend(range(after - 1, before - 1, -1))

"""Bounded queues in front of the workers: priority classes, fairness among tenants, deadlines.

Between classes: the higher first, but a class that was passed over too often gets its turn. Inside
a class: start-time fair queuing over tokens (Goyal et al., SIGCOMM 1996; the idea of VTC, OSDI
2024), so that equally weighted tenants with a backlog get equal tokens up to one request each.

What must not live here: quotas (quotas.py), futures and timers (the shell's), and which worker.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import NewType

from kvtier.errors import CallerError
from kvtier.limits import (
    PRIORITY_CLASSES_COUNT_MAX,
    PROMPT_TOKENS_MAX,
    QUEUED_REQUESTS_MAX,
    RUNNING_REQUESTS_MAX,
    TENANTS_COUNT_MAX,
)
from kvtier.types import TenantId

TicketId = NewType("TicketId", int)
"""Drawn by the shell; unique among the tickets that are queued or running."""


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """Ceilings of one priority class."""

    queued_requests_max: int = 1024
    queued_tokens_max: int = 1 << 24
    running_requests_max: int = RUNNING_REQUESTS_MAX
    passed_over_max: int = 8
    """Turns that go to other classes while this one waits; then it is overdue and comes first."""

    def __post_init__(self) -> None:
        if not 1 <= self.queued_requests_max <= QUEUED_REQUESTS_MAX:
            raise CallerError(f"queued_requests_max {self.queued_requests_max!r} out of range")
        if not 1 <= self.running_requests_max <= RUNNING_REQUESTS_MAX:
            raise CallerError(f"running_requests_max {self.running_requests_max!r} out of range")
        if self.queued_tokens_max < 1 or self.passed_over_max < 0:
            raise CallerError("queued_tokens_max must be positive, passed_over_max not negative")


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Ceilings of the whole queue."""

    classes: tuple[ClassPolicy, ...] = (ClassPolicy(), ClassPolicy(), ClassPolicy())
    """Highest first; a ticket's `priority` is an index into it."""
    tenant_queued_requests_max: int = 256
    """Of one tenant in one class."""
    running_requests_max: int = 4096
    running_tokens_max: int = 1 << 30
    """No further request starts while the running ones have this many (it may be passed by one)."""
    retry_after_s_max: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.classes) <= PRIORITY_CLASSES_COUNT_MAX:
            raise CallerError(f"{len(self.classes)} priority classes out of range")
        if not 1 <= self.running_requests_max <= RUNNING_REQUESTS_MAX:
            raise CallerError(f"running_requests_max {self.running_requests_max!r} out of range")
        if self.tenant_queued_requests_max < 1 or self.running_tokens_max < 1:
            raise CallerError("the ceilings of an AdmissionPolicy must be positive")
        if not 1.0 <= self.retry_after_s_max < inf:
            raise CallerError("retry_after_s_max must be at least 1 and finite")


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits for its turn."""

    number: TicketId
    tenant_id: TenantId
    priority: int
    tokens_count: int
    """What it will cost: prompt and expected output."""
    deadline_s: float = inf
    """The `now` by which it must have started."""
    weight: float = 1.0
    """The tenant's share relative to other tenants of the class."""

    def __post_init__(self) -> None:
        if not 0 < self.tokens_count <= 2 * PROMPT_TOKENS_MAX:
            raise CallerError(f"tokens_count {self.tokens_count!r} out of range")
        if not (isfinite(self.weight) and 1e-3 <= self.weight <= 1e3):
            raise CallerError(f"weight must be in [0.001, 1000], got {self.weight!r}")
        if self.deadline_s != self.deadline_s:
            raise CallerError("deadline_s is not a number")


class OfferAnswer(Enum):
    """What became of an offered ticket."""

    QUEUED = auto()
    CLASS_FULL = auto()
    TENANT_FULL = auto()
    TENANTS_FULL = auto()
    """Too many tenants have something queued."""
    LATE = auto()
    """Its deadline is over."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An answer and, where the queue is full, the seconds after which to try again (>= 1)."""

    answer: OfferAnswer
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is, and who waited too long. Both must be told."""

    ticket: Ticket | None
    """Counts as running until it is released. None: nobody waits who may run."""
    expired: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """How full one class is."""

    queued_requests: int
    queued_tokens: int
    running_requests: int


@dataclass(slots=True)
class _Flow:
    """One tenant in one class."""

    finish: float
    """Virtual time at which its service so far is paid for."""
    queue: OrderedDict[TicketId, Ticket] = field(default_factory=OrderedDict)
    listed: bool = False
    """Whether the heap has an entry for it; at most one."""
    owed: float = 0.0
    """Virtual time to add (or give back) at its next turn: what settling found."""


class _Class:
    """One priority class: flows, and a heap of those that have something queued."""

    __slots__ = (
        "backlog",
        "flows",
        "heap",
        "order",
        "passed_over",
        "policy",
        "running",
        "tokens",
        "virtual",
    )

    def __init__(self, policy: ClassPolicy) -> None:
        self.policy = policy
        self.flows: dict[TenantId, _Flow] = {}
        self.heap: list[tuple[float, int, TenantId]] = []
        self.virtual = 0.0
        self.backlog = self.tokens = self.running = self.passed_over = self.order = 0

    def may_run(self) -> bool:
        return self.backlog > 0 and self.running < self.policy.running_requests_max

    def push(self, ticket: Ticket) -> None:
        flow = self.flows.get(ticket.tenant_id)
        if flow is None:
            flow = self.flows[ticket.tenant_id] = _Flow(self.virtual)
        flow.queue[ticket.number] = ticket
        self.backlog += 1
        self.tokens += ticket.tokens_count
        if not flow.listed:
            self._list(ticket.tenant_id, flow)

    def pop(self) -> Ticket:
        """Serve the flow with the least start tag. The class must have a backlog."""
        while True:
            start, _, tenant_id = heappop(self.heap)
            flow = self.flows[tenant_id]
            flow.listed = False
            if flow.queue:
                break
        number, ticket = next(iter(flow.queue.items()))
        self.remove(tenant_id, number)
        self.virtual = start
        flow.finish = max(start, start + ticket.tokens_count / ticket.weight + flow.owed)
        flow.owed = 0.0
        if flow.queue:
            self._list(tenant_id, flow)
        self.tidy()
        return ticket

    def remove(self, tenant_id: TenantId, number: TicketId) -> Ticket:
        ticket = self.flows[tenant_id].queue.pop(number)
        self.backlog -= 1
        self.tokens -= ticket.tokens_count
        return ticket

    def settle(self, ticket: Ticket, tokens_used: float) -> None:
        flow = self.flows.get(ticket.tenant_id)
        if flow is not None:
            flow.owed += (tokens_used - ticket.tokens_count) / ticket.weight

    def forget_idle(self) -> None:
        """Drop the flows that are paid for, O(tenants); called where there are too many."""
        for tenant_id, flow in list(self.flows.items()):
            if not flow.queue and flow.finish <= self.virtual:
                del self.flows[tenant_id]
        self.heap = [entry for entry in self.heap if entry[2] in self.flows]
        heapify(self.heap)

    def _list(self, tenant_id: TenantId, flow: _Flow) -> None:
        flow.listed = True
        self.order += 1
        heappush(self.heap, (max(self.virtual, flow.finish), self.order, tenant_id))

    def tidy(self) -> None:
        """A class without a backlog starts its next busy period with a clean slate."""
        if self.backlog == 0:
            self.flows.clear()
            self.heap.clear()
            self.virtual = 0.0


class Admission:
    """The queue. Everything is O(log queued) amortised; size is bounded by the policy."""

    def __init__(self, policy: AdmissionPolicy | None = None) -> None:
        self._policy = policy or AdmissionPolicy()
        self._classes = [_Class(p) for p in self._policy.classes]
        self._queued: dict[TicketId, Ticket] = {}
        self._running: dict[TicketId, Ticket] = {}
        self._running_tokens = 0
        self._deadlines: list[tuple[float, TicketId]] = []
        self._served = _Rate()

    def offer(self, ticket: Ticket, now: float) -> Offer:
        """Queue a ticket, or say why not; mutates. Raises CallerError on a known number or an
        unknown priority."""
        if not 0 <= ticket.priority < len(self._classes):
            raise CallerError(f"priority {ticket.priority!r} is not a class")
        if ticket.number in self._queued or ticket.number in self._running:
            raise CallerError(f"ticket {ticket.number!r} is queued or running already")
        if ticket.deadline_s <= now:
            return Offer(OfferAnswer.LATE)
        row = self._classes[ticket.priority]
        refusal = self._refusal(row, ticket)
        if refusal is not None:
            return Offer(refusal, self._retry_after_s(ticket.priority, now))
        row.push(ticket)
        self._queued[ticket.number] = ticket
        if ticket.deadline_s < inf:
            self._remember_deadline(ticket)
        return Offer(OfferAnswer.QUEUED)

    def take(self, now: float) -> Turn:
        """Whose turn it is; mutates. Call until it returns no ticket, whenever a request was
        offered or released and at `next_deadline_s`."""
        expired = self._expire(now)
        row = self._next_class()
        if row is None:
            return Turn(None, expired)
        ticket = row.pop()
        del self._queued[ticket.number]
        self._running[ticket.number] = ticket
        self._running_tokens += ticket.tokens_count
        row.running += 1
        self._served.add(ticket.tokens_count, now)
        return Turn(ticket, expired)

    def cancel(self, number: TicketId) -> bool:
        """Take a queued ticket out; mutates. False if it does not wait (any more)."""
        ticket = self._queued.pop(number, None)
        if ticket is None:
            return False
        row = self._classes[ticket.priority]
        row.remove(ticket.tenant_id, number)
        row.tidy()
        return True

    def release(self, number: TicketId, tokens_used: float | None = None) -> bool:
        """A running request ended; mutates. `tokens_used`, if known, corrects what its tenant is
        charged. False if the number does not run."""
        if tokens_used is not None and not 0 <= tokens_used < inf:
            raise CallerError(f"tokens_used must be finite and not negative: {tokens_used!r}")
        ticket = self._running.pop(number, None)
        if ticket is None:
            return False
        row = self._classes[ticket.priority]
        row.running -= 1
        self._running_tokens -= ticket.tokens_count
        if tokens_used is not None:
            row.settle(ticket, tokens_used)
        return True

    def next_deadline_s(self) -> float:
        """When the next queued ticket expires at the earliest; inf if none does. O(1)."""
        return self._deadlines[0][0] if self._deadlines else inf

    def load(self, priority: int) -> QueueLoad:
        """How full a class is; does not mutate."""
        if not 0 <= priority < len(self._classes):
            raise CallerError(f"priority {priority!r} is not a class")
        row = self._classes[priority]
        return QueueLoad(row.backlog, row.tokens, row.running)

    def _refusal(self, row: _Class, ticket: Ticket) -> OfferAnswer | None:
        policy = row.policy
        if (
            row.backlog >= policy.queued_requests_max
            or row.tokens + ticket.tokens_count > policy.queued_tokens_max
        ):
            return OfferAnswer.CLASS_FULL
        flow = row.flows.get(ticket.tenant_id)
        if flow is None:
            if len(row.flows) >= TENANTS_COUNT_MAX:
                row.forget_idle()
            return OfferAnswer.TENANTS_FULL if len(row.flows) >= TENANTS_COUNT_MAX else None
        if len(flow.queue) >= self._policy.tenant_queued_requests_max:
            return OfferAnswer.TENANT_FULL
        return None

    def _next_class(self) -> _Class | None:
        """The class whose turn it is; counts for the others that they were passed over."""
        policy = self._policy
        full = len(self._running) >= policy.running_requests_max
        if full or self._running_tokens >= policy.running_tokens_max:
            return None
        waiting = [c for c in self._classes if c.may_run()]
        if not waiting:
            return None
        overdue = [c for c in waiting if c.passed_over >= c.policy.passed_over_max]
        chosen = waiting[0]
        if overdue:
            chosen = max(overdue, key=lambda c: c.passed_over - c.policy.passed_over_max)
        for row in waiting:
            row.passed_over += 1
        chosen.passed_over = 0
        return chosen

    def _expire(self, now: float) -> tuple[Ticket, ...]:
        expired: list[Ticket] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heappop(self._deadlines)
            ticket = self._queued.get(number)
            if ticket is not None and ticket.deadline_s <= now:
                self.cancel(number)
                expired.append(ticket)
        return tuple(expired)

    def _remember_deadline(self, ticket: Ticket) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._queued):  # Mostly of tickets that left
            self._deadlines = [(t.deadline_s, n) for n, t in self._queued.items()]
            heapify(self._deadlines)
            return
        heappush(self._deadlines, (ticket.deadline_s, ticket.number))

    def _retry_after_s(self, priority: int, now: float) -> float:
        """Seconds until what waits at this priority and above is served at the present rate."""
        ahead = sum(c.tokens for c in self._classes[: priority + 1])
        rate = self._served.per_s(now)
        most = self._policy.retry_after_s_max
        return min(most, max(1.0, ahead / rate)) if rate > 0 else most


class _Rate:
    """Tokens a second over about the last ten seconds."""

    __slots__ = ("_sum", "_updated_s")
    _WINDOW_S = 10.0

    def __init__(self) -> None:
        self._sum = 0.0
        self._updated_s = 0.0

    def add(self, tokens_count: float, now: float) -> None:
        self._sum = self.per_s(now) * self._WINDOW_S + tokens_count
        self._updated_s = now

    def per_s(self, now: float) -> float:
        passed_s = max(0.0, now - self._updated_s)
        return float(self._sum * 2.0 ** (-passed_s / self._WINDOW_S) / self._WINDOW_S)

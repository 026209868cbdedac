"""The queue in front of the workers, around `kvtier.core.admission`: tickets become waits.

What must not live here: who goes first (the core decides), quotas.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from kvtier.core.admission import (
    Admission,
    AdmissionPolicy,
    OfferAnswer,
    Ticket,
    TicketId,
)
from kvtier.errors import DeadlineError, OverloadedError
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier_router.front.tenants import Tenant

_SENTENCES: Final = {
    OfferAnswer.CLASS_FULL: "the queue is full",
    OfferAnswer.TENANT_FULL: "too many of your requests are waiting",
    OfferAnswer.TENANTS_FULL: "the queue is full",
    OfferAnswer.LATE: "the queue is full",
}


class QueueFullError(OverloadedError):
    """No room in the queue; `retry_after_s` says when there may be."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Slot:
    """A running request's place. `tokens_used` corrects what its tenant is charged, if set."""

    number: TicketId
    tokens_used: float | None = None


class RequestQueue:
    """Admits requests; one event loop uses it."""

    def __init__(
        self, policy: AdmissionPolicy, wait_s_max: float, clock: Callable[[], float]
    ) -> None:
        """`clock` gives monotonic seconds."""
        self._admission = Admission(policy)
        self._classes = len(policy.classes)
        self._wait_s_max = wait_s_max
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: dict[TicketId, asyncio.Future[None]] = {}
        self.running = 0
        self.refused = 0
        self.expired = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def slot(self, tenant: Tenant, tokens_count: int) -> AsyncIterator[Slot]:
        """A place to run in, waited for. QueueFullError, or DeadlineError after `wait_s_max`."""
        slot = await self.enter(tenant, tokens_count)
        try:
            yield slot
        finally:
            self.leave(slot)

    async def enter(self, tenant: Tenant, tokens_count: int) -> Slot:
        """As `slot`; `leave` must follow."""
        now = self._clock()
        number = TicketId(next(self._numbers))
        ticket = Ticket(
            number=number,
            tenant_id=tenant.tenant_id,
            priority=min(tenant.priority, self._classes - 1),
            tokens_count=min(max(1, tokens_count), 2 * PROMPT_TOKENS_MAX),
            deadline_s=now + self._wait_s_max,
            weight=tenant.weight,
        )
        offer = self._admission.offer(ticket, now)
        if offer.answer is not OfferAnswer.QUEUED:
            self.refused += 1
            raise QueueFullError(_SENTENCES[offer.answer], max(1.0, offer.retry_after_s))
        turn = asyncio.get_running_loop().create_future()
        self._waiting[number] = turn
        self.pump()
        if not turn.done():
            try:
                await turn
            except asyncio.CancelledError:
                self._give_up(number, turn)
                raise
        turn.result()
        self.running += 1
        return Slot(number)

    def leave(self, slot: Slot) -> None:
        """Make room for the next."""
        self.running -= 1
        self._admission.release(slot.number, slot.tokens_used)
        self.pump()

    def pump(self) -> None:
        """Start whose turn it is and end what waited too long; also called a few times a second."""
        while self._waiting:  # else nobody is queued, and nothing can expire
            turn = self._admission.take(self._clock())
            for late in turn.expired:
                self.expired += 1
                future = self._waiting.pop(late.number, None)
                if future is not None and not future.done():
                    future.set_exception(DeadlineError("waited too long in the queue"))
            if turn.ticket is None:
                return
            future = self._waiting.pop(turn.ticket.number, None)
            if future is None or future.done():  # its client left in the same moment
                self._admission.release(turn.ticket.number, 0.0)
            else:
                future.set_result(None)

    def _give_up(self, number: TicketId, turn: "asyncio.Future[None]") -> None:
        self._waiting.pop(number, None)
        if not self._admission.cancel(number) and turn.done() and not turn.cancelled():
            self._admission.release(number, 0.0)
            self.pump()

"""Quotas of tenants, counted over all routers of a fleet.

Every router grants from a bucket of the full rate and charges it with what the others tell that
they granted; so the fleet grants the rate once, and a burst more only within one report's delay.
What must not live here: how reports travel (gossip.py), who a tenant is.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.core.quotas import QuotaAnswer, Quotas
from kvtier.errors import LimitError, OverloadedError
from kvtier.limits import TENANTS_COUNT_MAX
from kvtier.types import TenantId
from kvtier_router.front.tenants import Tenant


class QuotaExceededError(OverloadedError):
    """Beyond what the tenant may use; `retry_after_s` says when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Used:
    """What one router granted to a tenant since it started."""

    requests: float = 0.0
    tokens: float = 0.0


class QuotaDesk:
    """Grants and refuses. One event loop uses it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._quotas = Quotas()
        self._clock = clock
        self._used: dict[TenantId, Used] = {}
        self._changed: set[TenantId] = set()

    def take(self, tenant: Tenant, tokens_count: int) -> None:
        """Charge a request and its expected tokens. QuotaExceededError where it is too early,
        LimitError where it would never be granted."""
        verdict = self._quotas.take(tenant.tenant_id, tenant.quota, tokens_count, self._clock())
        match verdict.answer:
            case QuotaAnswer.GRANTED:
                self._count(tenant.tenant_id, 1.0, float(tokens_count))
            case QuotaAnswer.NEVER:
                raise LimitError("the request has more tokens than your quota ever grants at once")
            case _:
                raise QuotaExceededError("your quota is used up", verdict.retry_after_s)

    def settle(self, tenant: Tenant, tokens_delta: float) -> None:
        """Charge (or give back) the difference to what was expected."""
        self._quotas.settle(tenant.tenant_id, tokens_delta, self._clock())
        self._count(tenant.tenant_id, 0.0, tokens_delta)

    def charge(self, tenant: Tenant, requests: float, tokens: float) -> None:
        """Charge what another router granted."""
        used = (requests, tokens)
        self._quotas.charge(tenant.tenant_id, tenant.quota, used, self._clock())

    def take_changed(self) -> list[tuple[TenantId, Used]]:
        """What this router granted since it started, of tenants that got something since the last
        call: what the others are told. Mutates."""
        changed, self._changed = self._changed, set()
        return [(name, self._used[name]) for name in changed if name in self._used]

    def _count(self, tenant_id: TenantId, requests: float, tokens: float) -> None:
        used = self._used.get(tenant_id)
        if used is None:
            if len(self._used) >= TENANTS_COUNT_MAX:
                self._used.clear()
            used = self._used[tenant_id] = Used()
        self._changed.add(tenant_id)
        used.requests += requests
        used.tokens += tokens

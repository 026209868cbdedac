"""Token buckets per tenant, in requests and in tokens. Full is not a state worth keeping.

What must not live here: queues (admission.py), who a tenant is, and any clock.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from kvtier.errors import CallerError
from kvtier.limits import TENANTS_COUNT_MAX
from kvtier.types import TenantId


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use: rates a second, and bursts on top. inf means no limit."""

    requests_per_s: float = inf
    requests_burst: float = inf
    tokens_per_s: float = inf
    tokens_burst: float = inf

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "requests_burst", "tokens_per_s", "tokens_burst"):
            if not float(getattr(self, name)) > 0:
                raise CallerError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.requests_burst < 1:
            raise CallerError("requests_burst below 1 would refuse everything")

    def scaled(self, share: float) -> "Quota":
        """The part of this quota that one of several routers hands out; bursts stay at least 1."""
        if not 0 < share <= 1:
            raise CallerError(f"share must be in (0, 1], got {share!r}")
        return Quota(
            self.requests_per_s * share,
            max(1.0, self.requests_burst * share),
            self.tokens_per_s * share,
            max(1.0, self.tokens_burst * share),
        )


class QuotaAnswer(Enum):
    """What a quota says to one request."""

    GRANTED = auto()
    LATER = auto()
    """Not now; `retry_after_s` says when there would be enough if nothing else is taken."""
    NEVER = auto()
    """More tokens than the burst: no waiting helps."""
    TENANTS_FULL = auto()
    """More tenants in debt to their quota than may be remembered."""


@dataclass(frozen=True, slots=True)
class QuotaVerdict:
    """An answer and, for LATER, the seconds to wait."""

    answer: QuotaAnswer
    retry_after_s: float = 0.0


@dataclass(slots=True)
class _Bucket:
    quota: Quota
    requests: float
    tokens: float
    updated_s: float

    def refill(self, now: float) -> None:
        passed_s = now - self.updated_s
        if passed_s <= 0:
            return
        quota = self.quota
        self.requests = _refilled(
            self.requests, quota.requests_per_s, passed_s, quota.requests_burst
        )
        self.tokens = _refilled(self.tokens, quota.tokens_per_s, passed_s, quota.tokens_burst)
        self.updated_s = now

    def full(self) -> bool:
        return self.requests >= self.quota.requests_burst and self.tokens >= self.quota.tokens_burst


class Quotas:
    """Buckets of all tenants that have used some of their quota; at most TENANTS_COUNT_MAX.

    Over any window, what is granted to a tenant is at most burst + rate * seconds, in requests and
    in tokens as estimated at the grant; `settle` corrects by what was used in fact.
    """

    def __init__(self, tenants_max: int = TENANTS_COUNT_MAX) -> None:
        if not 0 < tenants_max <= TENANTS_COUNT_MAX:
            raise CallerError(f"tenants_max {tenants_max!r} out of range")
        self._tenants_max = tenants_max
        self._buckets: dict[TenantId, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(
        self, tenant_id: TenantId, quota: Quota, tokens_count: float, now: float
    ) -> QuotaVerdict:
        """Take one request and its tokens, both or neither; mutates. O(1), seldom O(tenants).

        `quota` is the tenant's quota as configured now: a change is taken over at once.
        """
        if not 0 <= tokens_count < inf:
            raise CallerError(f"tokens_count must be finite and not negative: {tokens_count!r}")
        if tokens_count > quota.tokens_burst:
            return QuotaVerdict(QuotaAnswer.NEVER)
        bucket = self._bucket(tenant_id, quota, now)
        if bucket is None:
            return QuotaVerdict(QuotaAnswer.TENANTS_FULL, 1.0)
        wait_s = max(
            _wait_s(1.0 - bucket.requests, quota.requests_per_s),
            _wait_s(tokens_count - bucket.tokens, quota.tokens_per_s),
        )
        if wait_s > 0:
            return QuotaVerdict(QuotaAnswer.LATER, wait_s)
        bucket.requests -= 1.0
        bucket.tokens -= tokens_count
        return QuotaVerdict(QuotaAnswer.GRANTED)

    def settle(self, tenant_id: TenantId, tokens_delta: float, now: float) -> None:
        """Charge what was used beyond the estimate (a debt is possible), or give back what was not
        (negative). Mutates. A tenant that is not remembered has a full bucket: only charges count,
        and those of an unknown quota cannot be kept. O(1)."""
        if not -inf < tokens_delta < inf:
            raise CallerError(f"tokens_delta must be finite, got {tokens_delta!r}")
        bucket = self._buckets.get(tenant_id)
        if bucket is not None:
            bucket.refill(now)
            bucket.tokens = min(bucket.quota.tokens_burst, bucket.tokens - tokens_delta)

    def charge(
        self, tenant_id: TenantId, quota: Quota, used: tuple[float, float], now: float
    ) -> None:
        """Charge (requests, tokens) that somebody else granted to the tenant; mutates. A debt is
        possible, of three bursts at most: nobody is locked out for long by what cannot be undone.
        O(1), seldom O(tenants)."""
        requests, tokens = used
        if not (0 <= requests < inf and -inf < tokens < inf):
            raise CallerError(f"used must be finite, got {used!r}")
        bucket = self._bucket(tenant_id, quota, now)
        if bucket is None:
            return
        bucket.requests = _charged(bucket.requests, requests, quota.requests_burst)
        bucket.tokens = _charged(bucket.tokens, tokens, quota.tokens_burst)

    def _bucket(self, tenant_id: TenantId, quota: Quota, now: float) -> _Bucket | None:
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            if len(self._buckets) >= self._tenants_max:
                self._prune(now)
            if len(self._buckets) >= self._tenants_max:
                return None
            bucket = _Bucket(quota, quota.requests_burst, quota.tokens_burst, now)
            self._buckets[tenant_id] = bucket
            return bucket
        bucket.refill(now)
        if bucket.quota != quota:
            bucket.quota = quota
            bucket.requests = min(bucket.requests, quota.requests_burst)
            bucket.tokens = min(bucket.tokens, quota.tokens_burst)
        return bucket

    def _prune(self, now: float) -> None:
        """Forget tenants whose buckets are full again: a new bucket says the same."""
        for tenant_id, bucket in list(self._buckets.items()):
            bucket.refill(now)
            if bucket.full():
                del self._buckets[tenant_id]


def _refilled(level: float, per_s: float, passed_s: float, burst: float) -> float:
    return burst if burst == inf else min(burst, level + per_s * passed_s)


def _charged(level: float, used: float, burst: float) -> float:
    return burst if burst == inf else min(burst, max(level - used, -3.0 * burst))


def _wait_s(missing: float, per_s: float) -> float:
    """Seconds until `missing` has flowed in; rounding never makes a granted wait repeat."""
    if missing <= 1e-9:
        return 0.0
    return missing / per_s

"""What one store knows of another: whether to call it, how fast it is, what it got wrong.

What must not live here: calls.
"""

from dataclasses import dataclass, field
from typing import Final

from kvtier.core.checks import require_integer
from kvtier.core.estimates import Terms, Tuning, TwoTermEstimate
from kvtier.core.health import Breaker, BreakerPolicy, BreakerState, Outcome, Permit
from kvtier.errors import CallerError
from kvtier.limits import STORE_IN_FLIGHT_BYTES_MAX
from kvtier.ports import PeerPlace
from kvtier.store.gates import ByteGate

_PRIOR: Final = Terms(2e-3, 1e-9)
"""Seconds a call, seconds a byte, before anything was measured: as `core.costs.Priors` has it."""


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """Bounds on what peers may cost."""

    call_s: float = 1.0
    """Of one call to one peer; what is not there by then may be asked of another."""
    peer_bytes_max: int = 64 << 20
    """On their way from one peer ..."""
    bytes_max: int = 256 << 20
    """... and from all."""
    tries_max: int = 2
    """Peers that are asked for one block."""
    breaker: BreakerPolicy = field(
        default_factory=lambda: BreakerPolicy(
            failures_max=3, open_s=0.5, open_s_max=15.0, probes_to_close=1
        )
    )
    corrupt_max: int = 3
    """Bad copies after which a peer is left out ..."""
    corrupt_s: float = 60.0
    """... for so long; doubles each time, up to ..."""
    corrupt_s_max: float = 3600.0

    def __post_init__(self) -> None:
        require_integer("peer_bytes_max", self.peer_bytes_max, 1, STORE_IN_FLIGHT_BYTES_MAX)
        require_integer("bytes_max", self.bytes_max, 1, STORE_IN_FLIGHT_BYTES_MAX)
        require_integer("tries_max", self.tries_max, 1, 16)
        require_integer("corrupt_max", self.corrupt_max, 1, 1 << 20)
        for name in ("call_s", "corrupt_s", "corrupt_s_max"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CallerError(f"{name} is {getattr(self, name)}, not positive and finite")


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer, for operators."""

    place: PeerPlace
    state: BreakerState
    is_left_out: bool
    """For bad copies."""
    hits: int
    misses: int
    corrupt: int
    failures: int
    """Calls that ended without an answer."""
    payload_bytes: int
    in_flight_bytes: int
    latency_s: float
    bytes_per_s: float
    """As measured, of late."""


class Peer:
    """See the module. Mutable; of one event loop."""

    def __init__(self, place: PeerPlace, policy: PeerPolicy, now: float) -> None:
        self.place = place
        self.gate = ByteGate(policy.peer_bytes_max)
        self.used_at = now
        self.hits = self.misses = self.corrupt = self.failures = 0
        self.payload_bytes = 0
        self._policy = policy
        self._breaker = Breaker(policy.breaker)
        self._speed = TwoTermEstimate(_PRIOR, Tuning(), now)
        self._corrupt_lately = 0
        self._left_out_until = 0.0
        self._left_out_s = policy.corrupt_s

    def is_left_out(self, now: float) -> bool:
        """Whether it is not to be asked because of the bytes that it gave."""
        return now < self._left_out_until

    def may_call(self, now: float) -> bool:
        """Whether a call might be let through now. Mutates only by the passing of time."""
        return not self.is_left_out(now) and self._breaker.state(now) is not BreakerState.OPEN

    def acquire(self, now: float) -> Permit | None:
        """Leave to call; None: do not."""
        return None if self.is_left_out(now) else self._breaker.acquire(now)

    def ended(self, permit: Permit, outcome: Outcome, elapsed_s: float, now: float) -> None:
        """A call ended."""
        self._breaker.report(permit, outcome, elapsed_s, now)
        self.failures += outcome is Outcome.FAILURE

    def measured(self, size_bytes: int, elapsed_s: float, now: float) -> None:
        """A call brought so many bytes in so long."""
        self._speed.observe((1.0, float(size_bytes)), max(elapsed_s, 1e-9), _PRIOR, now)

    def lied(self, count: int, now: float) -> None:
        """It gave bad copies."""
        self.corrupt += count
        self._corrupt_lately += count
        if self._corrupt_lately >= self._policy.corrupt_max:
            self._corrupt_lately = 0
            self._left_out_until = now + self._left_out_s
            self._left_out_s = min(2 * self._left_out_s, self._policy.corrupt_s_max)

    def speed(self, now: float) -> Terms:
        """Seconds a call and seconds a byte, as measured of late."""
        return self._speed.terms(_PRIOR, now)

    def view(self, now: float) -> PeerView:
        speed = self.speed(now)
        return PeerView(
            place=self.place,
            state=self._breaker.state(now),
            is_left_out=self.is_left_out(now),
            hits=self.hits,
            misses=self.misses,
            corrupt=self.corrupt,
            failures=self.failures,
            payload_bytes=self.payload_bytes,
            in_flight_bytes=self.gate.used_bytes,
            latency_s=speed.first_s,
            bytes_per_s=1.0 / speed.second_s,
        )

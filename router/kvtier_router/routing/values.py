"""What goes into the routing brain and what comes out: asks, decisions, and how requests end.

The HTTP front is written against this file and `Router`. What must not live here: how a worker is
chosen (router.py), what the fleet looks like (fleet.py), anything of HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.core.checks import require_integer, require_name, require_text
from kvtier.core.identity import AdapterRef, Pool
from kvtier.core.workers import Load, OwnReservation, WorkerName
from kvtier.errors import CallerError, LimitError
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.types import Role, Source, TenantId

Clock = Callable[[], float]
"""Monotonic seconds."""


class Policy(StrEnum):
    """How a worker is chosen among the eligible ones."""

    CACHE_AWARE = "cache_aware"
    """Least predicted cost: queue, cached prefix, recompute, decode pressure."""
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    """Fewest requests in flight, fewest waiting prefill tokens among equals."""
    RANDOM = "random"
    SESSION = "session"
    """The same session id, the same worker, while it is eligible; least_loaded without an id."""


class Knowledge(StrEnum):
    """What the affinity of a decision rests on: the rungs of the ladder, best first."""

    FRESH = "fresh"
    """An index that is followed right now."""
    STALE = "stale"
    """What an index said before it fell silent, and own placements since; credit decays by age."""
    HASHED = "hashed"
    """No index, or one that does not speak of this model's tokens: bounded-load hashing on the
    first prefix blocks."""
    LOAD_ONLY = "load_only"
    """A prompt shorter than a block, or a policy that does not look at prefixes."""


class PromptKind(StrEnum):
    """What `RouteAsk.tokens` are."""

    TOKENS = "tokens"
    """Exactly the ids that the worker will compute: prefixes can be matched."""
    TEXT = "text"
    """u32 units of the text, about one a token, where no tokenizer is known: equal beginnings
    are recognised, blocks of the index are not."""


class Delivery(StrEnum):
    """Whether the first token can be seen."""

    STREAM = "stream"
    WHOLE = "whole"
    """The answer comes in one piece; the end of its prefill is presumed."""


class FailureKind(StrEnum):
    """How an attempt failed; all but the last three speak against the worker."""

    CONNECT = "connect"
    """No connection, or it was reset before any byte."""
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    """A 5xx other than an overload, or an answer that cannot be understood."""
    BROKEN = "broken"
    """The stream ended too early, after the first byte."""
    OVERLOADED = "overloaded"
    """429, or 503 with Retry-After: healthy, but leave it alone for a moment."""
    REJECTED = "rejected"
    """Another 4xx: the request's own fault."""
    CANCELLED = "cancelled"
    """The client left, or the router gave up for reasons of its own."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the first half of a split request left for the second."""

    worker: WorkerName
    store: str
    """Instance of the store that has it; empty: none."""
    namespace: bytes
    """Whose blocks they are: another namespace cannot read them."""
    pool: Pool
    tokens: int
    """Of the prompt, from the first on, in whole blocks."""


@dataclass(slots=True, eq=False)
class RouteAsk:
    """One request to place. Checked here; nothing else looks at its fields' ranges again, and
    nobody changes them: it is not frozen only because that costs a call a field and request.

    tokens: u32[n], the whole prompt; it must not change afterwards (it is read once, during the
    call). An empty one is placed by load alone (a path whose body is not understood).
    """

    served_name: str
    """As the client wrote it: served name, alias or adapter."""
    tokens: npt.NDArray[np.uint32]
    scope_salt: str | None = None
    """The `cache_salt` that goes upstream; None for a request without one."""
    tenant_id: TenantId | None = None
    priority: int = 0
    session_id: str | None = None
    output_tokens: int = 256
    """How many tokens the answer is expected to have."""
    excluded: frozenset[WorkerName] = frozenset()
    """Workers that failed this request already; taken all the same where no other is left."""
    deadline: float = inf
    """Monotonic seconds by which the first token is wanted."""
    kind: PromptKind = PromptKind.TOKENS
    delivery: Delivery = Delivery.STREAM
    stage: Role = Role.BOTH
    """Which half of the request is placed; BOTH for a whole one."""
    prefilled: Prefilled | None = None
    """Of the second half, what the first one left; None where that is not known."""

    @property
    def scored_stage(self) -> Role:
        """How its cost is predicted: where it is known what lies where, like a whole request's."""
        return self.stage if self.prefilled is None else Role.BOTH

    def __post_init__(self) -> None:
        require_name("served_name", self.served_name)
        if not isinstance(self.tokens, np.ndarray) or self.tokens.dtype != np.uint32:
            raise CallerError("tokens: want a uint32 array")
        if self.tokens.ndim != 1 or not self.tokens.flags.c_contiguous:
            raise CallerError("tokens: want a contiguous array of one dimension")
        if len(self.tokens) > PROMPT_TOKENS_MAX:
            raise LimitError(f"tokens: {len(self.tokens)} exceed {PROMPT_TOKENS_MAX}")
        if self.scope_salt is not None:
            require_text("scope_salt", self.scope_salt)
        if self.session_id is not None:
            require_text("session_id", self.session_id)
        require_integer("output_tokens", self.output_tokens, 0, PROMPT_TOKENS_MAX)
        if self.deadline != self.deadline:
            raise CallerError("deadline is not a number")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a decision sends the request."""

    worker: WorkerName
    address: str
    """Base URL or host:port of its HTTP endpoint, as the fleet gave it."""
    model: str
    """The name to send upstream: an alias of the router is replaced by what the worker serves."""
    pool: Pool
    adapter: AdapterRef | None
    node: str
    """Its machine; empty where unknown."""
    store: str
    """Instance of the store attached to it; empty: none."""
    rank: int | None = None
    """To be named in the request, where several ranks have this address; else None."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker's row of a decision, for people. Times are seconds, 0 where a policy has none."""

    worker: WorkerName
    pool: Pool
    state: str
    """`candidate`, or why it was none: draining, hidden, breaker, ejected, excluded, busy, role."""
    chosen: bool
    tied: bool
    """So near to the best that the draw decided."""
    matched_tokens: dict[str, int]
    """By source, what the index says it has or could get."""
    reused_tokens: float
    queue_s: float
    load_s: float
    compute_s: float
    decode_s: float
    adapter_s: float
    ttft_s: float
    total_s: float
    """What was compared; infinite for one that was no candidate (null in JSON)."""

    def as_json(self) -> dict[str, object]:
        """Plain values: numbers, strings, null."""
        parts = {
            name: round(float(getattr(self, name)), 6)
            for name in ("queue_s", "load_s", "compute_s", "decode_s", "adapter_s", "ttft_s")
        }
        return {
            "worker": self.worker.instance,
            "dp_rank": self.worker.dp_rank,
            "revision": self.pool.revision,
            "state": self.state,
            "chosen": self.chosen,
            "tied": self.tied,
            "matched_tokens": dict(self.matched_tokens),
            "reused_tokens": round(self.reused_tokens),
            **parts,
            "total_s": round(self.total_s, 6) if self.total_s < inf else None,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """What the upstream said a request cost; None for what it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    total_s: float | None = None
    """Seconds from sending to the end, where the caller measured them."""


class Placement(Protocol):
    """One attempt at one worker. Exactly one of `finished` and `failed` ends it; whatever comes
    after that is ignored, and one that is never ended expires by itself. Nothing waits, and nothing
    raises for what an upstream said."""

    @property
    def key(self) -> str:
        """Unique to this life of this router."""
        ...

    def first_token(self, ttft_s: float, cached_tokens: int | None = None) -> None:
        """The first byte of the answer came `ttft_s` seconds after the request was sent."""
        ...

    def finished(self, usage: Usage) -> None:
        """The answer is complete."""
        ...

    def failed(self, kind: FailureKind, retry_after_s: float | None = None) -> None:
        """The attempt is over without a complete answer."""
        ...


class ReservationSink(Protocol):
    """Tells other routers, through the index, what was placed. Never waits, never raises.

    `kvtier.client.ReserveSession` is one.
    """

    def tell(self, wanted: OwnReservation) -> None: ...

    def release(self, key: str) -> None: ...


class Basis(Protocol):
    """What a decision was made on, for whoever asks later. Nothing is computed until then."""

    @property
    def rows_count(self) -> int:
        """Workers that were compared: what keeping it costs."""
        ...

    def rows(self, most: int) -> tuple[Candidate, ...]:
        """The best rows by what was compared, at most `most`, the chosen one among them. Costs are
        those of the decision; whatever has happened since changes nothing."""
        ...


@dataclass(slots=True, eq=False)
class RouteDecision:
    """Where to send a request, and why. Nobody changes it; not frozen for what RouteAsk says."""

    target: Target
    policy: Policy
    knowledge: Knowledge
    cause: str
    """Why the knowledge is not fresh; empty where it is."""
    prompt_tokens: int
    matched_tokens: dict[Source, int]
    """On the chosen worker, tokens by source; they add up to its longest unbroken prefix."""
    reused_tokens: int
    """How many of them are worth using."""
    predicted_ttft_s: float
    decided_in_s: float
    placement: Placement
    """Does nothing where the decision came from `explain`."""
    candidates: tuple[Candidate, ...] = field(default=())
    """Filled by `explain` only: a row for each worker behind the name."""
    basis: Basis | None = None
    """None where nothing is kept of it."""

    @property
    def worker(self) -> WorkerName:
        return self.target.worker

    def as_json(self) -> dict[str, object]:
        """The answer to `POST /route`."""
        return {
            "worker": self.worker.instance,
            "dp_rank": self.worker.dp_rank,
            "address": self.target.address,
            "model": self.target.model,
            "revision": self.target.pool.revision,
            "policy": self.policy.value,
            "knowledge": self.knowledge.value,
            "cause": self.cause,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": {source.name.lower(): n for source, n in self.matched_tokens.items()},
            "reused_tokens": self.reused_tokens,
            "predicted_ttft_s": round(self.predicted_ttft_s, 6),
            "decided_in_s": round(self.decided_in_s, 6),
            "candidates": [candidate.as_json() for candidate in self.candidates],
        }

    def headers(self) -> dict[str, str]:
        """Response headers that tell a client or an operator what was decided; ASCII, one line."""
        matched = ",".join(
            f"{source.name.lower()}={tokens}" for source, tokens in self.matched_tokens.items()
        )
        return {
            "x-kvtier-worker": printable(self.worker.instance),
            "x-kvtier-matched-tokens": matched or "none",
            "x-kvtier-policy": f"{self.policy.value}/{self.knowledge.value}",
            "x-kvtier-decision-us": str(round(self.decided_in_s * 1e6)),
        }


@lru_cache(maxsize=4096)
def printable(name: str) -> str:
    """A name as it may stand in a header."""
    escaped = name.encode("ascii", "backslashreplace").decode()
    return "".join(c if " " <= c <= "~" else "?" for c in escaped)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker as the router sees it now, for admin pages and metrics."""

    worker: WorkerName
    address: str
    served_names: tuple[str, ...]
    pool: Pool
    node: str
    state: str
    """As Candidate.state; `candidate` where it takes part in decisions."""
    trust: str
    """exact, degraded, or unknown for a worker that no index speaks of."""
    cause: str
    """Why it is not trusted or does not take part; empty where neither."""
    requests_in_flight: int
    """Of this router."""
    waiting_prefill_tokens: int
    """Of all routers, as far as this one knows."""
    prefill_tokens_per_s: float
    """As measured here."""
    ramp: float
    """Slow start: the part of the decisions it takes part in."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One name that clients may ask for."""

    name: str
    pools: tuple[Pool, ...]
    is_adapter: bool
    workers_count: int
    eligible_count: int
    cause: str
    """Why the routing of this model is DEGRADED; empty where it is not."""
    token_mismatches: int
    """Responses whose prompt_tokens differed from the router's own count."""
    hit_mismatches: int
    """Responses that found nothing cached where a prefix was promised."""
    responses: int
    """Responses that were compared."""
    evicted_promises: int = 0
    """As hit_mismatches, of workers whose pool was full: the blocks had to make room meanwhile."""


class RoutingBrain(Protocol):
    """What the HTTP front asks; `kvtier_router.routing.Router` is it. All methods are synchronous,
    make no network call, and belong to one event loop (thread)."""

    def route(self, ask: RouteAsk) -> RouteDecision:
        """Choose a worker and reserve it. NotFoundError for a name nobody serves,
        UnavailableError where no worker behind it is eligible, CallerError for a bad ask."""
        ...

    def explain(self, ask: RouteAsk) -> RouteDecision:
        """As `route`, with every candidate's row; reserves nothing, sends nothing."""
        ...

    def models(self) -> tuple[ModelReport, ...]:
        """Every name that can be asked for now, sorted."""
        ...

    def workers(self, only: Sequence[WorkerName] | None = None) -> tuple[WorkerReport, ...]:
        """A report each; of those named in `only`, in its order and as far as they are known."""
        ...

    def worker_names(self) -> tuple[WorkerName, ...]:
        """All workers. O(workers), far cheaper than their reports."""
        ...

    def troubled(self) -> dict[WorkerName, str]:
        """Workers that take no part, or less, for a reason of this router's own: draining, breaker,
        ejected, busy. O(workers), cheaply: called every second."""
        ...

    def drain(self, worker: WorkerName) -> None:
        """Send nothing new there until `undrain`. NotFoundError for an unknown worker."""
        ...

    def undrain(self, worker: WorkerName) -> None: ...

    def unreported(self) -> Sequence[tuple[WorkerName, str]]:
        """Workers of whose load nobody tells, with their addresses. O(workers)."""
        ...

    def take_load(self, worker: WorkerName, load: Load | None) -> None:
        """What such a worker said itself when it was asked; None: nothing. Unknown workers are
        ignored, and those whose publisher tells of their load go by that."""
        ...

    def tick(self) -> None:
        """Let what has expired end; call it about ten times a second."""
        ...

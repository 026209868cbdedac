"""The metrics of the router: one table. What must not live here: counting done elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Final

from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics
from kvtier_router.front.calls import Api
from kvtier_router.front.loads import Asked, LoadPoll
from kvtier_router.front.queue import RequestQueue
from kvtier_router.front.relay import Relay, Resumed, Retried
from kvtier_router.front.splitting import REASONS, SplitOutcome, Splits
from kvtier_router.routing.values import RoutingBrain
from kvtier_router.web.server import HttpServer
from kvtier_router.web.upstream import Loss
from kvtier_router.web.values import Refused

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_SHORT: Final = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2)
_MODEL: Final = Label("model", values_count_max=64)
_STATUSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx", "left")
LEFT: Final = "left"
"""The client went before its answer had begun."""

REQUESTS: Final = MetricDef(
    _COUNTER,
    "kvtier_router_requests_total",
    "Requests of the API, by path and what they were answered with.",
    (Label("api", tuple(api.value for api in Api)), Label("status", _STATUSES)),
)
SECONDS: Final = MetricDef(
    _HISTOGRAM, "kvtier_router_request_seconds", "From a request to its end.", buckets=_SECONDS
)
TTFT: Final = MetricDef(
    _HISTOGRAM,
    "kvtier_router_first_byte_seconds",
    "From a request to the first byte of its answer's body.",
    buckets=_SECONDS,
)
DECISION: Final = MetricDef(
    _HISTOGRAM, "kvtier_router_decision_seconds", "The choice of a worker.", buckets=_SHORT
)
PREPARED: Final = MetricDef(
    _HISTOGRAM,
    "kvtier_router_preparation_seconds",
    "Reading and tokenising a request.",
    buckets=_SHORT,
)
PROMPT_TOKENS: Final = MetricDef(
    _COUNTER, "kvtier_router_prompt_tokens_total", "Prompt tokens of routed requests.", (_MODEL,)
)
MATCHED_TOKENS: Final = MetricDef(
    _COUNTER,
    "kvtier_router_matched_tokens_total",
    "Of them, those that the chosen workers were expected to have.",
    (_MODEL,),
)
RETRIES: Final = MetricDef(
    _COUNTER,
    "kvtier_router_retries_total",
    "Wishes to try a request again, by what became of them.",
    (Label("outcome", tuple(item.value for item in Retried)),),
)
RESUMPTIONS: Final = MetricDef(
    _COUNTER,
    "kvtier_router_resumptions_total",
    "Streams whose worker was lost, by what became of them.",
    (Label("outcome", tuple(item.value for item in Resumed)),),
)
SPLITS: Final = MetricDef(
    _COUNTER,
    "kvtier_router_splits_total",
    "Requests that could be split into prefill and decode, by what became of them and why.",
    (Label("outcome", tuple(item.value for item in SplitOutcome)), Label("reason", REASONS)),
)
LOSSES: Final = MetricDef(
    _COUNTER,
    "kvtier_router_upstream_losses_total",
    "Attempts that ended without a complete answer, by cause.",
    (Label("cause", tuple(loss.value for loss in Loss)),),
)
REFUSED: Final = MetricDef(
    _COUNTER,
    "kvtier_router_refused_total",
    "Connections and requests that the HTTP server turned away, by reason.",
    (Label("reason", tuple(reason.value for reason in Refused)),),
)
QUEUE_REFUSED: Final = MetricDef(
    _COUNTER, "kvtier_router_queue_refused_total", "Requests that found the queue full."
)
QUEUE_EXPIRED: Final = MetricDef(
    _COUNTER, "kvtier_router_queue_expired_total", "Requests that waited in the queue for too long."
)
QUOTA_REFUSED: Final = MetricDef(
    _COUNTER,
    "kvtier_router_quota_refused_total",
    "Requests beyond their tenant's quota.",
    (Label("tenant", values_count_max=256),),
)
QUEUED: Final = MetricDef(_GAUGE, "kvtier_router_queued_requests", "Requests that wait.")
RUNNING: Final = MetricDef(_GAUGE, "kvtier_router_running_requests", "Requests under way.")
CONNECTIONS: Final = MetricDef(_GAUGE, "kvtier_router_connections", "Connections of clients.")
TOKEN_MISMATCH: Final = MetricDef(
    _COUNTER,
    "kvtier_router_token_mismatch_total",
    "Answers whose prompt_tokens were not what the router had counted.",
    (_MODEL,),
)
HIT_MISMATCH: Final = MetricDef(
    _COUNTER,
    "kvtier_router_hit_mismatch_total",
    "Answers that found nothing cached where a prefix was promised.",
    (_MODEL,),
)
EVICTED: Final = MetricDef(
    _COUNTER,
    "kvtier_router_promises_evicted_total",
    "The same where the worker's pool was full: the blocks had to make room meanwhile.",
    (_MODEL,),
)
DEGRADED: Final = MetricDef(
    _GAUGE, "kvtier_router_model_degraded", "1 where a model's routing is DEGRADED.", (_MODEL,)
)
ELIGIBLE: Final = MetricDef(
    _GAUGE, "kvtier_router_eligible_workers", "Workers that take part in decisions.", (_MODEL,)
)
LOADS_ASKED: Final = MetricDef(
    _COUNTER,
    "kvtier_router_loads_asked_total",
    "Questions to workers of whose load nobody tells, by outcome.",
    (Label("outcome", tuple(outcome.value for outcome in Asked)),),
)
KEYS_RELOAD_ERRORS: Final = MetricDef(
    _COUNTER,
    "kvtier_router_keys_reload_errors_total",
    "Changes of the keys file that were refused.",
)
ACCESS_DROPPED: Final = MetricDef(
    _COUNTER,
    "kvtier_router_access_lines_dropped_total",
    "Request lines that were lost because the log's reader was too slow or gone.",
)

DEFINITIONS: Final = (
    REQUESTS,
    SECONDS,
    TTFT,
    DECISION,
    PREPARED,
    PROMPT_TOKENS,
    MATCHED_TOKENS,
    RETRIES,
    RESUMPTIONS,
    SPLITS,
    LOSSES,
    REFUSED,
    QUEUE_REFUSED,
    QUEUE_EXPIRED,
    QUOTA_REFUSED,
    QUEUED,
    RUNNING,
    CONNECTIONS,
    TOKEN_MISMATCH,
    HIT_MISMATCH,
    EVICTED,
    DEGRADED,
    ELIGIBLE,
    LOADS_ASKED,
    KEYS_RELOAD_ERRORS,
    ACCESS_DROPPED,
)


class FrontMetrics:
    """What is counted a request; everything else is read at a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter(REQUESTS)
        self._prompt_tokens = metrics.counter(PROMPT_TOKENS)
        self._matched_tokens = metrics.counter(MATCHED_TOKENS)
        self.quota_refused = metrics.counter(QUOTA_REFUSED)
        self.seconds = metrics.tally(SECONDS)
        self.first_byte = metrics.tally(TTFT)
        self.decision = metrics.tally(DECISION)
        self.prepared = metrics.tally(PREPARED)

    def answered(self, api: Api, status: int) -> None:
        """Count a request by its status, 0 where the client left before."""
        shown = f"{status // 100}xx" if status else LEFT
        self._requests.at(api.value, shown).inc()

    def routed(self, model: str, prompt_tokens: int, matched_tokens: int) -> None:
        self._prompt_tokens.at(model).inc(prompt_tokens)
        self._matched_tokens.at(model).inc(matched_tokens)


def bind_relay(metrics: Metrics, relay: Relay) -> None:
    """Read what the relay counts."""
    metrics.pull(RETRIES, lambda: [((k.value,), relay.retries[k]) for k in Retried])
    metrics.pull(RESUMPTIONS, lambda: [((k.value,), relay.resumptions[k]) for k in Resumed])
    metrics.pull(LOSSES, lambda: [((k.value,), relay.losses[k]) for k in Loss])


def bind_splits(metrics: Metrics, splits: Splits | None) -> None:
    """Read how many requests were split; nothing is told where none can be."""
    counts = {} if splits is None else splits.counts
    metrics.pull(SPLITS, lambda: [(key, count) for key, count in counts.items()])


def bind_server(metrics: Metrics, server: HttpServer, queue: RequestQueue) -> None:
    """Read what server and queue count."""
    metrics.pull(REFUSED, lambda: [((k.value,), server.refused[k]) for k in Refused])
    metrics.pull(CONNECTIONS, lambda: [((), server.connections_count)])
    metrics.pull(QUEUED, lambda: [((), queue.queued)])
    metrics.pull(RUNNING, lambda: [((), queue.running)])
    metrics.pull(QUEUE_REFUSED, lambda: [((), queue.refused)])
    metrics.pull(QUEUE_EXPIRED, lambda: [((), queue.expired)])


def bind_brain(metrics: Metrics, brain: RoutingBrain) -> None:
    """Read what the brain says of its models."""

    def read(field: str) -> list[tuple[tuple[str, ...], float]]:
        return [((report.name,), float(getattr(report, field))) for report in brain.models()]

    for definition, field in (
        (TOKEN_MISMATCH, "token_mismatches"),
        (HIT_MISMATCH, "hit_mismatches"),
        (EVICTED, "evicted_promises"),
        (ELIGIBLE, "eligible_count"),
    ):
        metrics.pull(definition, partial(read, field))
    metrics.pull(DEGRADED, lambda: [((r.name,), 1.0 if r.cause else 0.0) for r in brain.models()])


def bind_loads(metrics: Metrics, loads: LoadPoll) -> None:
    metrics.pull(LOADS_ASKED, lambda: [((k.value,), loads.asked[k]) for k in Asked])


def bind_keys(metrics: Metrics, errors: Callable[[], int]) -> None:
    metrics.pull(KEYS_RELOAD_ERRORS, lambda: [((), errors())])


def bind_access(metrics: Metrics, dropped: Callable[[], int]) -> None:
    metrics.pull(ACCESS_DROPPED, lambda: [((), dropped())])

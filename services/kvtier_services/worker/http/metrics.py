"""The metrics of the endpoint. A worker puts TABLE into its own table and binds it here.

What must not live here: what the engine counts (tokens a step, blocks, preemptions).
"""

from typing import Final

from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics
from kvtier_services.worker.requests import CachedTokens

_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
CALLS: Final = ("completions", "chat", "models", "other")
OUTCOMES: Final = ("ok", "refused", "overloaded", "failed", "disconnected")
TIERS: Final = tuple(CachedTokens.__dataclass_fields__)

REQUESTS: Final = MetricDef(
    MetricKind.COUNTER, "kvtier_endpoint_requests_total", "HTTP requests, by what became of them.",
    (Label("call", CALLS), Label("outcome", OUTCOMES)),
)  # fmt: skip
RUNNING: Final = MetricDef(
    MetricKind.GAUGE, "kvtier_endpoint_requests_running", "HTTP requests being answered."
)
FIRST_TOKEN: Final = MetricDef(
    MetricKind.HISTOGRAM, "kvtier_endpoint_first_token_seconds",
    "From a request's body to its first token.", buckets=_SECONDS,
)  # fmt: skip
DURATION: Final = MetricDef(
    MetricKind.HISTOGRAM, "kvtier_endpoint_request_seconds",
    "From a request's body to the end of a complete answer.", buckets=_SECONDS,
)  # fmt: skip
PROMPT_TOKENS: Final = MetricDef(
    MetricKind.COUNTER, "kvtier_endpoint_prompt_tokens_total", "Prompt tokens of complete answers."
)
CACHED_TOKENS: Final = MetricDef(
    MetricKind.COUNTER, "kvtier_endpoint_cached_tokens_total",
    "Prompt tokens of complete answers whose KV was in a cache, by tier.", (Label("tier", TIERS),),
)  # fmt: skip
COMPLETION_TOKENS: Final = MetricDef(
    MetricKind.COUNTER, "kvtier_endpoint_completion_tokens_total",
    "Generated tokens of complete answers.",
)  # fmt: skip
CONNECTIONS: Final = MetricDef(
    MetricKind.GAUGE, "kvtier_endpoint_connections", "HTTP connections now."
)
CONNECTIONS_REFUSED: Final = MetricDef(
    MetricKind.COUNTER, "kvtier_endpoint_connections_refused_total",
    "HTTP connections that were closed unasked, by why.",
    (Label("reason", ("too_many", "head_late")),),
)  # fmt: skip
TABLE: Final = (
    REQUESTS, RUNNING, FIRST_TOKEN, DURATION, PROMPT_TOKENS, CACHED_TOKENS, COMPLETION_TOKENS,
    CONNECTIONS, CONNECTIONS_REFUSED,
)  # fmt: skip


class EndpointMetrics:
    """TABLE, bound to a worker's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self.page = metrics
        self.requests = metrics.counter(REQUESTS)
        self.running = metrics.gauge(RUNNING).at()
        self.first_token = metrics.histogram(FIRST_TOKEN).at()
        self.duration = metrics.histogram(DURATION).at()
        self.prompt_tokens = metrics.counter(PROMPT_TOKENS).at()
        cached = metrics.counter(CACHED_TOKENS)
        self.cached_tokens = {tier: cached.at(tier) for tier in TIERS}
        self.completion_tokens = metrics.counter(COMPLETION_TOKENS).at()
        self.connections = metrics.gauge(CONNECTIONS).at()
        self.connections_refused = metrics.counter(CONNECTIONS_REFUSED)

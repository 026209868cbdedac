"""All telemetry of one service process, opened and closed together.

For composition roots: `async with open_telemetry(...)` starts the log, binds the table of metrics,
serves the page where one is configured, and opens the tracer. What must not live here: metrics
other than those of telemetry itself.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, TextIO

from kvtier.sections import TelemetryConfig
from kvtier.telemetry.logs import LogFormat, start_logging
from kvtier.telemetry.metrics import MetricDef, MetricKind, Metrics
from kvtier.telemetry.metrics_http import Exposure, MetricsServer
from kvtier.telemetry.tracing import Tracer, TraceTarget, open_tracer

LOG_LINES_DROPPED: Final = MetricDef(
    MetricKind.COUNTER,
    "kvtier_telemetry_log_lines_dropped_total",
    "Log lines that were lost because their reader was too slow or gone.",
)
PAGE_REFUSED: Final = MetricDef(
    MetricKind.COUNTER,
    "kvtier_telemetry_page_refused_total",
    "Connections to the metrics page beyond its ceiling.",
)
TELEMETRY_METRICS: Final = (LOG_LINES_DROPPED, PAGE_REFUSED)


@dataclass(frozen=True, slots=True)
class Service:
    """What telemetry has to know of a service."""

    name: str
    metrics: tuple[MetricDef, ...]
    """Its table; the definitions of telemetry itself are added."""
    live: Callable[[], bool]
    """Whether the process is worth keeping; must not block."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a service reports to."""

    metrics: Metrics
    tracer: Tracer
    page_port: int | None
    """Where the metrics page is served; None where it is off."""


@asynccontextmanager
async def open_telemetry(
    config: TelemetryConfig, service: Service, stream: TextIO
) -> AsyncIterator[Telemetry]:
    """Open everything that `config` asks for; close it in reverse order, in bounded time.

    The log goes to `stream`, one line of logfmt a record. Raises ConfigError for a page that cannot
    be served, or an OTLP endpoint without the extra `otel`.
    """
    async with AsyncExitStack() as stack:
        log = stack.enter_context(start_logging(stream, config.log_level.value, LogFormat.LOGFMT))
        metrics = Metrics((*service.metrics, *TELEMETRY_METRICS))
        metrics.pull(LOG_LINES_DROPPED, lambda: [((), log.dropped_count)])
        tracer = open_tracer(TraceTarget(service.name, config.otlp_endpoint))
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        page = _page(config, service, metrics)
        metrics.pull(PAGE_REFUSED, lambda: [((), page.refused_count if page else 0)])
        if page is not None:
            await stack.enter_async_context(page)
        yield Telemetry(metrics, tracer, page.port if page else None)


def _page(config: TelemetryConfig, service: Service, metrics: Metrics) -> MetricsServer | None:
    if config.metrics_bind is None:
        return None
    exposure = Exposure.NETWORK if config.metrics_insecure else Exposure.LOCAL
    return MetricsServer(metrics, service.live, config.metrics_bind, exposure)

"""All telemetry of a service: opened by its configuration, closed with it."""

import asyncio
import io
import logging

import pytest

from kvtier.errors import ConfigError
from kvtier.sections import LogLevel, TelemetryConfig
from kvtier.telemetry.logs import EventLog
from kvtier.telemetry.metrics import MetricDef, MetricKind
from kvtier.telemetry.service import (
    LOG_LINES_DROPPED,
    PAGE_REFUSED,
    TELEMETRY_METRICS,
    Service,
    open_telemetry,
)

REQUESTS = MetricDef(MetricKind.COUNTER, "kvtier_test_requests_total", "Requests.")
SERVICE = Service("kvtier-test", (REQUESTS,), lambda: True)


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 40)
    writer.close()
    return answer.decode()


async def test_a_configured_service_logs_and_shows_its_metrics() -> None:
    stream = io.StringIO()
    config = TelemetryConfig(log_level=LogLevel.DEBUG, metrics_bind="127.0.0.1:0")
    async with open_telemetry(config, SERVICE, stream) as telemetry:
        assert telemetry.metrics.unbound == (REQUESTS,)
        telemetry.metrics.counter(REQUESTS).at().inc()
        EventLog("kvtier.test").debug("served", count=1)
        assert telemetry.page_port is not None
        page = await get(telemetry.page_port, "/metrics")
        assert "200 OK" in await get(telemetry.page_port, "/live")
    assert "kvtier_test_requests_total 1.0" in page
    assert f"{LOG_LINES_DROPPED.name} 0.0" in page
    assert f"{PAGE_REFUSED.name} 0.0" in page
    assert "event=served count=1" in stream.getvalue()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", telemetry.page_port)


async def test_by_default_there_is_no_page_and_no_trace() -> None:
    async with open_telemetry(TelemetryConfig(), SERVICE, io.StringIO()) as telemetry:
        assert telemetry.page_port is None
        with telemetry.tracer.span("a") as span:
            assert span.traceparent() is None
        assert {definition.name for definition in TELEMETRY_METRICS} <= {
            definition.name for definition in telemetry.metrics.definitions
        }


async def test_what_was_opened_is_closed_when_the_page_cannot_be_served() -> None:
    before = logging.getLogger().handlers
    async with open_telemetry(
        TelemetryConfig(metrics_bind="127.0.0.1:0"), SERVICE, io.StringIO()
    ) as first:
        config = TelemetryConfig(metrics_bind=f"127.0.0.1:{first.page_port}")
        with pytest.raises(ConfigError, match="cannot serve metrics"):
            async with open_telemetry(config, SERVICE, io.StringIO()):
                pass
    assert logging.getLogger().handlers == before


async def test_an_endpoint_that_is_none_is_refused_at_start() -> None:
    config = TelemetryConfig(otlp_endpoint="nonsense")
    with pytest.raises(ConfigError, match="OTLP endpoint"):
        async with open_telemetry(config, SERVICE, io.StringIO()):
            pass

"""Spans: none without an endpoint, and what a collector gets with one."""

import ast
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from kvtier.errors import ConfigError
from kvtier.telemetry import tracing
from kvtier.telemetry.tracing import Tracer, TraceTarget, open_tracer
from tests.harness.ports import free_port
from tests.harness.processes import REPOSITORY

CANARY = "canary-4711"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[WireSpan] = []
        self.resources: dict[str, str] = {}
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, self._server
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = resource.resource.attributes
            self.resources |= {item.key: item.value.string_value for item in attributes}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> WireSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def close(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    tracer = open_tracer(TraceTarget("kvtier-test", f"http://127.0.0.1:{collector.port}"))
    yield tracer
    tracer.close()


def attributes(span: WireSpan) -> dict[str, str | int]:
    """Our attributes are text or whole numbers."""
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_without_an_endpoint_nothing_is_imported_and_spans_are_nothing() -> None:
    code = (
        "import sys\n"
        "from kvtier.telemetry.tracing import TraceTarget, open_tracer\n"
        "tracer = open_tracer(TraceTarget('x'))\n"
        "with tracer.span('a', {'b': 1}, parent='junk') as span:\n"
        "    span.set('c', 2)\n"
        "    assert span.traceparent() is None\n"
        "tracer.close()\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'grpc')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_an_exception_passes_through_a_silent_span() -> None:
    with pytest.raises(KeyError), open_tracer(TraceTarget("x")).span("a"):
        raise KeyError


def test_the_collector_gets_nested_spans_with_their_attributes(
    collector: Collector, tracer: Tracer
) -> None:
    with tracer.span("outer", {"blocks_count": 64}) as outer:
        outer.set("tier", "dram")
        with tracer.span("inner"):
            pass
    tracer.close()
    outer_span, inner_span = collector.named("outer"), collector.named("inner")
    assert inner_span.parent_span_id == outer_span.span_id
    assert inner_span.trace_id == outer_span.trace_id
    assert attributes(outer_span) == {"blocks_count": 64, "tier": "dram"}
    assert collector.resources["service.name"] == "kvtier-test"


def test_a_trace_goes_on_from_a_traceparent(collector: Collector, tracer: Tracer) -> None:
    with tracer.span("here") as here:
        sent = here.traceparent()
    assert sent is not None
    with tracer.span("there", parent=sent):
        pass
    tracer.close()
    assert collector.named("there").trace_id == collector.named("here").trace_id
    assert collector.named("there").parent_span_id == collector.named("here").span_id


@pytest.mark.parametrize("parent", ["", "junk", "00-0-0-01", "\n", "00-" + "f" * 10_000])
def test_a_malformed_traceparent_starts_a_new_trace(
    collector: Collector, tracer: Tracer, parent: str
) -> None:
    with tracer.span("root", parent=parent):
        pass
    tracer.close()
    assert collector.named("root").parent_span_id == b""


def test_an_exception_marks_its_span_by_type_only(collector: Collector, tracer: Tracer) -> None:
    with pytest.raises(ValueError, match=CANARY), tracer.span("bad", {"token": CANARY}):
        raise ValueError(f"token {CANARY}")
    tracer.close()
    span = collector.named("bad")
    assert attributes(span) == {"token": "***", "error.type": "ValueError"}
    assert span.status.code == 2
    assert CANARY not in str(collector.spans)


async def test_spans_of_concurrent_tasks_do_not_mix(collector: Collector, tracer: Tracer) -> None:
    async def work(number: int) -> None:
        with tracer.span(f"outer-{number}"):
            await asyncio.sleep(0)
            with tracer.span(f"inner-{number}"):
                await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(5)))
    await asyncio.to_thread(tracer.close)
    for number in range(5):
        outer, inner = collector.named(f"outer-{number}"), collector.named(f"inner-{number}")
        assert inner.parent_span_id == outer.span_id
    assert len({span.trace_id for span in collector.spans}) == 5


def test_a_ratio_of_zero_records_nothing_but_follows_a_parent(collector: Collector) -> None:
    target = TraceTarget("x", f"http://127.0.0.1:{collector.port}", sample_ratio=0.0)
    tracer = open_tracer(target)
    with tracer.span("dropped"):
        pass
    with tracer.span("kept", parent=f"00-{'a' * 32}-{'b' * 16}-01"):
        pass
    tracer.close()
    assert [span.name for span in collector.spans] == ["kept"]


def test_closing_without_a_collector_ends_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "SPAN_EXPORT_MS_MAX", 200)
    tracer = open_tracer(TraceTarget("x", f"http://127.0.0.1:{free_port()}"))
    with tracer.span("lost") as span:
        assert span.traceparent() is not None
    tracer.close()
    tracer.close()


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:4317",
        "ftp://h:1",
        "http://",
        "http://h",
        "http://u:p@h:1",
        "http://h:x",
        "http://h:1/v1/traces",
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTLP endpoint"):
        TraceTarget("x", endpoint)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="sample_ratio"):
        TraceTarget("x", sample_ratio=ratio)


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("prometheus_client", "kvtier/telemetry/metrics.py"),
        ("opentelemetry", "kvtier/telemetry/tracing.py"),
    ],
)
def test_each_library_of_telemetry_is_imported_in_one_file(library: str, home: str) -> None:
    importers = set()
    for folder in ("kvtier", "services", "router"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                if any(name.split(".")[0] == library for name in names):
                    importers.add(path.relative_to(REPOSITORY))
    assert importers == {Path(home)}

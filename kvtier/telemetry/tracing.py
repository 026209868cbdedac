"""Spans for OpenTelemetry: nothing at all unless an OTLP endpoint is configured.

The only importer of opentelemetry, and only in `open_tracer` with an endpoint; otherwise every call
here is a constant. Attributes pass the same masking as log fields; exceptions leave their type,
never their text. What must not live here: a global tracer, decisions about what to trace.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier.limits import SPAN_EXPORT_MS_MAX, SPANS_QUEUED_COUNT_MAX
from kvtier.telemetry.logs import FieldValue, safe_value

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

_NO_ATTRIBUTES: Final[Mapping[str, FieldValue]] = {}
_TRACEPARENT_CHARS_MAX: Final = 64


class Span(Protocol):
    """A piece of work that is being timed."""

    def set(self, name: str, value: FieldValue) -> None:
        """Attach an attribute; secrets are masked."""

    def traceparent(self) -> str | None:
        """The W3C header value that continues this trace elsewhere; None where none is recorded."""


class Tracer(Protocol):
    """Makes spans; closing it sends what is queued."""

    def span(
        self,
        name: str,
        attributes: Mapping[str, FieldValue] = _NO_ATTRIBUTES,
        parent: str | None = None,
    ) -> AbstractContextManager[Span]:
        """A span around a `with` block, below `parent` (a traceparent) or the enclosing span.

        A malformed parent starts a new trace. An exception marks the span and passes through.
        """

    def close(self) -> None:
        """Send what is queued, for a bounded time; blocks. Idempotent."""


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """Where spans go and whose they are."""

    service: str
    endpoint: str | None = None
    """http://host:port (in the clear) or https://host:port of an OTLP gRPC collector."""
    sample_ratio: float = 1.0
    """Share of new traces that are recorded; a parent's choice is followed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ConfigError(f"sample_ratio must be in 0..1, got {self.sample_ratio}")
        if self.endpoint is not None and not _is_endpoint(self.endpoint):
            raise ConfigError(f"OTLP endpoint must be http[s]://host:port, got {self.endpoint!r}")


def open_tracer(target: TraceTarget) -> Tracer:
    """The tracer of a process. ConfigError when an endpoint is set and the extra is missing."""
    if target.endpoint is None:
        return _SilentTracer()
    try:
        return _OtelTracer(target, target.endpoint)
    except ImportError as error:
        raise ConfigError(
            "an OTLP endpoint is configured, but OpenTelemetry is not installed: kvtier[otel]"
        ) from error


class _SilentSpan:
    """The span where nothing is recorded; one for all."""

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def set(self, name: str, value: FieldValue) -> None:
        """Nothing."""

    def traceparent(self) -> str | None:
        return None


_SILENT_SPAN: Final = _SilentSpan()


class _SilentTracer:
    def span(
        self,
        name: str,
        attributes: Mapping[str, FieldValue] = _NO_ATTRIBUTES,
        parent: str | None = None,
    ) -> AbstractContextManager[Span]:
        return _SILENT_SPAN

    def close(self) -> None:
        """Nothing."""


class _OtelSpan:
    def __init__(self, span: "OtelSpan", traceparent: Callable[[], str | None]) -> None:
        self._span = span
        self._traceparent = traceparent

    def set(self, name: str, value: FieldValue) -> None:
        safe = safe_value(name, value)
        if safe is not None:
            self._span.set_attribute(name, safe)

    def traceparent(self) -> str | None:
        return self._traceparent()


class _OtelTracer:
    def __init__(self, target: TraceTarget, endpoint: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": target.service, "service.version": __version__})
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=urlsplit(endpoint).scheme == "http",
            timeout=SPAN_EXPORT_MS_MAX / 1e3,
        )
        self._provider: TracerProvider | None = TracerProvider(
            sampler=ParentBasedTraceIdRatio(target.sample_ratio),
            resource=resource,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=SPANS_QUEUED_COUNT_MAX,
                max_export_batch_size=SPANS_QUEUED_COUNT_MAX // 4,
                export_timeout_millis=SPAN_EXPORT_MS_MAX,
            )
        )
        self._tracer = self._provider.get_tracer("kvtier", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._error = trace.Status(trace.StatusCode.ERROR)

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, FieldValue] = _NO_ATTRIBUTES,
        parent: str | None = None,
    ) -> Iterator[Span]:
        context = None
        if parent is not None and len(parent) <= _TRACEPARENT_CHARS_MAX:
            context = self._propagator.extract({"traceparent": parent})
        with self._tracer.start_as_current_span(
            name, context=context, record_exception=False, set_status_on_exception=False
        ) as inner:
            span = _OtelSpan(inner, self._inject)
            for key, value in attributes.items():
                span.set(key, value)
            try:
                yield span
            except BaseException as error:
                inner.set_status(self._error)
                inner.set_attribute("error.type", type(error).__name__)
                raise

    def close(self) -> None:
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.force_flush(SPAN_EXPORT_MS_MAX)
            provider.shutdown()

    def _inject(self) -> str | None:
        """The traceparent of the current span, which is ours inside its `with` block."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent")


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = not parts.username and not parts.query and parts.path in ("", "/")
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port is not None and plain

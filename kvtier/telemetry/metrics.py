"""Prometheus metrics from a table of definitions, with a ceiling on every label.

A service declares a tuple of `MetricDef` in a module of its own and makes one `Metrics` of it; a
test can enumerate the table, and `unbound` tells which definitions nothing feeds. The only importer
of prometheus_client. What must not live here: definitions of a service's metrics, a registry that
outlives its `Metrics`.
"""

import enum
import itertools
import math
import re
import threading
from bisect import bisect_left
from collections import Counter as Multiset
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from kvtier import __version__
from kvtier.errors import CallerError, LimitError
from kvtier.limits import (
    METRIC_LABEL_CHARS_MAX,
    METRIC_LABEL_VALUES_MAX,
    METRIC_SERIES_COUNT_MAX,
)

OTHER: Final = "other"
"""The label value of everything beyond a label's ceiling or outside its closed set."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PRECREATED_COUNT_MAX: Final = 64
_NAME: Final = re.compile(r"kvtier(_[a-z0-9]+)+")
_LABEL_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")

Readings = Iterable[tuple[tuple[str, ...], float]]
"""(label values in the order of the definition's labels, value): the items of a dictionary, say."""


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """A dimension: a closed set of values, or an open one (names from outside) with a ceiling."""

    name: str
    values: tuple[str, ...] = ()
    values_count_max: int = 64
    """For an open label: how many values live at once; the next ones become `other`."""

    def __post_init__(self) -> None:
        if not _LABEL_NAME.fullmatch(self.name):
            raise CallerError(f"label name must be like a_b, got {self.name!r}")
        if not 1 <= self.values_count_max <= METRIC_LABEL_VALUES_MAX:
            raise LimitError(
                f"values_count_max of label {self.name} must be in 1..{METRIC_LABEL_VALUES_MAX},"
                f" got {self.values_count_max}"
            )
        if len(set(self.values)) != len(self.values):
            raise CallerError(f"label {self.name} has a value twice: {self.values}")

    @property
    def ceiling(self) -> int:
        """How many values there can be, `other` included."""
        return (len(self.values) or self.values_count_max) + 1


@dataclass(frozen=True, slots=True)
class MetricDef:
    """One line of a table of metrics. Counters end in `_total`; units stand last before that."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without infinity."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise CallerError(f"metric name must be like kvtier_a_b, got {self.name!r}")
        if (self.kind is MetricKind.COUNTER) != self.name.endswith("_total"):
            raise CallerError(f"counters, and only they, end in _total: {self.name}")
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise CallerError(f"histograms, and only they, have buckets: {self.name}")
        ascending = all(low < high for low, high in itertools.pairwise(self.buckets))
        if not ascending or not all(math.isfinite(bound) for bound in self.buckets):
            raise CallerError(f"buckets of {self.name} must be finite and ascend: {self.buckets}")
        if not self.help:
            raise CallerError(f"{self.name} has no help")
        if self.series_ceiling > METRIC_SERIES_COUNT_MAX:
            raise LimitError(
                f"{self.name} could have {self.series_ceiling} series,"
                f" more than {METRIC_SERIES_COUNT_MAX}"
            )

    @property
    def series_ceiling(self) -> int:
        """The most lines that it can make in a scrape."""
        a_series = len(self.buckets) + 3 if self.buckets else 1
        return a_series * math.prod(label.ceiling for label in self.labels)


class CounterSeries(Protocol):
    def inc(self, amount: float = 1) -> None:
        """Count `amount` (not negative)."""


class GaugeSeries(Protocol):
    def set(self, value: float) -> None: ...
    def inc(self, amount: float = 1) -> None: ...
    def dec(self, amount: float = 1) -> None: ...


class HistogramSeries(Protocol):
    def observe(self, amount: float) -> None: ...


class TallySeries(Protocol):
    def observe(self, amount: float, count: int = 1) -> None:
        """Note `count` times that something was `amount`."""


S = TypeVar("S", CounterSeries, GaugeSeries, HistogramSeries)

LABEL_OVERFLOW: Final = "kvtier_telemetry_label_overflow_total"
_BUILD_INFO: Final = MetricDef(
    MetricKind.GAUGE, "kvtier_build_info", "Version of this process; always 1.", (Label("version"),)
)


class Family(Generic[S]):
    """All series of one metric. Safe for threads."""

    def __init__(
        self,
        definition: MetricDef,
        parent: MetricWrapperBase,
        series: Callable[[tuple[str, ...]], S],
        overflow: Callable[[], None],
    ) -> None:
        self._parent = parent
        self._make: Callable[[tuple[str, ...]], S] = series
        self._guards = _Guards(definition.labels, overflow)
        self._series: dict[tuple[str, ...], S] = {}
        self._lock = threading.Lock()

    def at(self, *values: str) -> S:
        """The series of these label values, made if it is new; hold on to it on hot paths.

        Values beyond a ceiling give the series of `other`. Raises CallerError for a wrong number
        of values.
        """
        known = self._series.get(values)
        if known is not None:
            return known
        with self._lock:
            admitted = self._guards.admit(values)
            series = self._series.get(admitted)
            if series is None:
                series = self._series[admitted] = self._make(admitted)
                self._guards.hold(admitted)
            return series

    def drop(self, *values: str) -> None:
        """Forget the series of something that is no more; its label values are free. Idempotent."""
        with self._lock:
            shown = tuple(map(_shown, values))
            if self._series.pop(shown, None) is not None:
                self._parent.remove(*shown)
                self._guards.release(shown)


class Metrics:
    """The metrics of one process (or one test): a registry of its own, filled from definitions."""

    def __init__(self, definitions: Iterable[MetricDef]) -> None:
        """Raises CallerError when two definitions have one name."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus_client.CollectorRegistry()
        given = tuple(definitions)
        overflow = _overflow_definition(given)
        self.definitions: tuple[MetricDef, ...] = (*given, _BUILD_INFO, overflow)
        names = Multiset(definition.name for definition in self.definitions)
        doubles = sorted(name for name, count in names.items() if count > 1)
        if doubles:
            raise CallerError(f"defined twice: {', '.join(doubles)}")
        self._unbound = {definition.name: definition for definition in self.definitions}
        prometheus_client.ProcessCollector(registry=self._registry)
        self._overflow = self.counter(overflow)
        self.gauge(_BUILD_INFO).at(__version__).set(1)

    @property
    def unbound(self) -> tuple[MetricDef, ...]:
        """Definitions that nothing feeds yet: empty once a service has started."""
        return tuple(self._unbound.values())

    def counter(self, definition: MetricDef) -> Family[CounterSeries]:
        """Bind a counter of the table; each definition is bound once, or CallerError."""
        self._bind(definition, MetricKind.COUNTER)
        parent = prometheus_client.Counter(
            definition.name, definition.help, _label_names(definition), registry=self._registry
        )

        def series(values: tuple[str, ...]) -> CounterSeries:
            return parent.labels(*values) if values else parent

        family = Family(definition, parent, series, self._overflown(definition))
        for values in _closed_combinations(definition):
            family.at(*values)
        return family

    def gauge(self, definition: MetricDef) -> Family[GaugeSeries]:
        """Bind a gauge of the table; each definition is bound once, or CallerError."""
        self._bind(definition, MetricKind.GAUGE)
        parent = prometheus_client.Gauge(
            definition.name, definition.help, _label_names(definition), registry=self._registry
        )

        def series(values: tuple[str, ...]) -> GaugeSeries:
            return parent.labels(*values) if values else parent

        return Family(definition, parent, series, self._overflown(definition))

    def histogram(self, definition: MetricDef) -> Family[HistogramSeries]:
        """Bind a histogram of the table; each definition is bound once, or CallerError."""
        self._bind(definition, MetricKind.HISTOGRAM)
        parent = prometheus_client.Histogram(
            definition.name,
            definition.help,
            _label_names(definition),
            registry=self._registry,
            buckets=definition.buckets,
        )

        def series(values: tuple[str, ...]) -> HistogramSeries:
            return parent.labels(*values) if values else parent

        return Family(definition, parent, series, self._overflown(definition))

    def tally(self, definition: MetricDef) -> TallySeries:
        """Bind a histogram without labels that one thread alone observes, without any lock.

        For paths so hot that the locks of `histogram` are felt; any thread may scrape. CallerError
        for a definition with labels.
        """
        if definition.labels:
            raise CallerError(f"{definition.name}: a tally has no labels")
        self._bind(definition, MetricKind.HISTOGRAM)
        tally = _Tally(definition)
        self._registry.register(tally)
        return tally

    def pull(self, definition: MetricDef, read: Callable[[], Readings]) -> None:
        """Bind a counter or gauge whose values are kept elsewhere (native code, say).

        `read` is called at each scrape, in the thread of `render`. Readings beyond a label's
        ceiling are summed up under `other`. Series of a counter with small closed labels that are
        not read are shown as 0.
        """
        if definition.kind is MetricKind.HISTOGRAM:
            raise CallerError(f"{definition.name}: a histogram cannot be pulled")
        self._bind(definition, definition.kind)
        self._registry.register(_Pulled(definition, read, self._overflown(definition)))

    def render(self) -> bytes:
        """All metrics as the text that Prometheus scrapes; see CONTENT_TYPE. O(series)."""
        return prometheus_client.generate_latest(self._registry)

    def _bind(self, definition: MetricDef, kind: MetricKind) -> None:
        if definition.kind is not kind:
            raise CallerError(f"{definition.name} is a {definition.kind.value}, not a {kind.value}")
        if self._unbound.get(definition.name) != definition:
            raise CallerError(f"{definition.name} is not of this table, or is bound already")
        del self._unbound[definition.name]

    def _overflown(self, definition: MetricDef) -> Callable[[], None]:
        return lambda: self._overflow.at(definition.name).inc()


class _Tally(Collector):
    """A histogram whose buckets are plain numbers."""

    def __init__(self, definition: MetricDef) -> None:
        self._definition = definition
        self._bounds = definition.buckets
        self._counts = [0] * (len(definition.buckets) + 1)
        self._sum = 0.0

    def observe(self, amount: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, amount)] += count
        self._sum += amount * count

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._definition.name, self._definition.help)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        counts = itertools.accumulate(tuple(self._counts))
        yield HistogramMetricFamily(
            self._definition.name,
            self._definition.help,
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._sum,
        )


class _Guards:
    """Admits label values up to the ceilings; counts how many series hold each open value."""

    def __init__(self, labels: tuple[Label, ...], overflow: Callable[[], None]) -> None:
        self._labels = labels
        self._overflow = overflow
        self._held: list[Multiset[str]] = [Multiset() for _ in labels]

    def admit(self, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(values) != len(self._labels):
            names = [label.name for label in self._labels]
            raise CallerError(f"label values for {names} wanted, got {len(values)}")
        places = zip(self._labels, self._held, map(_shown, values), strict=True)
        admitted = tuple(v if _fits(label, held, v) else OTHER for label, held, v in places)
        if any(a is OTHER and v != OTHER for a, v in zip(admitted, values, strict=True)):
            self._overflow()
        return admitted

    def hold(self, values: tuple[str, ...]) -> None:
        for held, value in zip(self._held, values, strict=True):
            held[value] += 1

    def release(self, values: tuple[str, ...]) -> None:
        for held, value in zip(self._held, values, strict=True):
            held[value] -= 1
            if held[value] == 0:
                del held[value]


class _Pulled(Collector):
    """Reads its values when it is scraped."""

    def __init__(
        self, definition: MetricDef, read: Callable[[], Readings], overflow: Callable[[], None]
    ) -> None:
        self._definition = definition
        self._read = read
        self._overflow = overflow
        is_counter = definition.kind is MetricKind.COUNTER
        closed = is_counter and all(label.values for label in definition.labels)
        self._zeros = tuple(_closed_combinations(definition)) if closed else ()
        """What a counter shows before anything was counted: an absent series cannot be rated."""

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield self._family(())

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        guards = _Guards(self._definition.labels, self._overflow)
        sums: dict[tuple[str, ...], float] = dict.fromkeys(self._zeros, 0.0)
        for values in self._zeros:
            guards.hold(values)
        for values, reading in self._read():
            admitted = guards.admit(values)
            if admitted not in sums:
                guards.hold(admitted)
            sums[admitted] = sums.get(admitted, 0.0) + reading
        yield self._family(sums.items())

    def _family(self, sums: Readings) -> CounterMetricFamily | GaugeMetricFamily:
        definition = self._definition
        is_counter = definition.kind is MetricKind.COUNTER
        make = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = make(definition.name, definition.help, labels=_label_names(definition))
        for values, value in sums:
            family.add_metric(values, value)
        return family


def _fits(label: Label, held: Mapping[str, int], value: str) -> bool:
    if label.values:
        return value in label.values
    return value in held or len(held) - (OTHER in held) < label.values_count_max


def _shown(value: str) -> str:
    """A label value without control characters, cut to its ceiling."""
    text = value if value.isprintable() else value.encode("unicode_escape").decode()
    return text[:METRIC_LABEL_CHARS_MAX]


def _label_names(definition: MetricDef) -> tuple[str, ...]:
    return tuple(label.name for label in definition.labels)


def _closed_combinations(definition: MetricDef) -> Iterator[tuple[str, ...]]:
    """All values of small closed labels: only a counter that starts at 0 can be rated."""
    combinations: list[tuple[str, ...]] = [()]
    for label in definition.labels:
        combinations = [(*head, value) for head in combinations for value in label.values]
        if len(combinations) > _PRECREATED_COUNT_MAX:
            return
    yield from combinations


def _overflow_definition(given: tuple[MetricDef, ...]) -> MetricDef:
    names = tuple(sorted({definition.name for definition in given if definition.labels}))
    return MetricDef(
        MetricKind.COUNTER,
        LABEL_OVERFLOW,
        "Label values that were counted as `other`, by metric.",
        (Label("metric", names or (OTHER,)),),
    )

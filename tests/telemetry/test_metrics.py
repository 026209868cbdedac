"""Metrics from definitions: what is declared is what is scraped, and no label grows without end."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvtier import __version__
from kvtier.errors import CallerError, LimitError
from kvtier.limits import METRIC_LABEL_CHARS_MAX
from kvtier.telemetry.metrics import LABEL_OVERFLOW, Label, MetricDef, MetricKind, Metrics

TIER = Label("tier", values=("gpu", "dram"))
MODEL = Label("model", values_count_max=3)
EVENTS = MetricDef(MetricKind.COUNTER, "kvtier_test_events_total", "Events.", (TIER,))
BY_MODEL = MetricDef(MetricKind.COUNTER, "kvtier_test_requests_total", "Requests.", (MODEL,))
DEPTH = MetricDef(MetricKind.GAUGE, "kvtier_test_queue_count", "Queue.")
HOLDER = MetricDef(MetricKind.GAUGE, "kvtier_test_holder_blocks", "Blocks.", (MODEL, TIER))
LATENCY = MetricDef(
    MetricKind.HISTOGRAM, "kvtier_test_match_seconds", "Match.", buckets=(0.001, 0.01, 0.1)
)
TABLE = (EVENTS, BY_MODEL, DEPTH, HOLDER, LATENCY)


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label=value,...}` of ours."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_counters_gauges_and_histograms_show_what_they_were_told() -> None:
    metrics = Metrics(TABLE)
    metrics.counter(EVENTS).at("gpu").inc(3)
    depth = metrics.gauge(DEPTH).at()
    depth.set(5)
    depth.inc()
    depth.dec(2)
    latency = metrics.histogram(LATENCY).at()
    for seconds in (0.0005, 0.05, 5.0):
        latency.observe(seconds)
    samples = scraped(metrics)
    assert samples["kvtier_test_events_total{tier=gpu}"] == 3
    assert samples["kvtier_test_queue_count"] == 4
    assert samples["kvtier_test_match_seconds_count"] == 3
    assert samples["kvtier_test_match_seconds_bucket{le=0.001}"] == 1
    assert samples["kvtier_test_match_seconds_bucket{le=0.1}"] == 2
    assert samples["kvtier_test_match_seconds_bucket{le=+Inf}"] == 3


@given(st.lists(st.floats(0, 1) | st.sampled_from(LATENCY.buckets), max_size=30))
def test_a_tally_shows_what_a_histogram_shows(seconds: list[float]) -> None:
    histogram, tally = Metrics(TABLE), Metrics(TABLE)
    series = (histogram.histogram(LATENCY).at(), tally.tally(LATENCY))
    for one in seconds:
        for each in series:
            each.observe(one)
    shown = [
        {key: value for key, value in scraped(metrics).items() if key.startswith(LATENCY.name)}
        for metrics in (histogram, tally)
    ]
    assert shown[0] == shown[1]
    assert shown[1][f"{LATENCY.name}_count"] == len(seconds)


def test_a_tally_can_note_many_at_once() -> None:
    metrics = Metrics(TABLE)
    tally = metrics.tally(LATENCY)
    tally.observe(LATENCY.buckets[0], 3)
    tally.observe(LATENCY.buckets[1])
    shown = scraped(metrics)
    assert shown[f"{LATENCY.name}_count"] == 4
    assert shown[f"{LATENCY.name}_bucket{{le={LATENCY.buckets[0]}}}"] == 3
    assert shown[f"{LATENCY.name}_sum"] == 3 * LATENCY.buckets[0] + LATENCY.buckets[1]


def test_a_tally_has_no_labels_and_is_bound_once() -> None:
    labelled = MetricDef(
        MetricKind.HISTOGRAM, "kvtier_test_apply_seconds", "Apply.", (TIER,), buckets=(1.0,)
    )
    metrics = Metrics((*TABLE, labelled))
    with pytest.raises(CallerError):
        metrics.tally(labelled)
    metrics.tally(LATENCY)
    with pytest.raises(CallerError):
        metrics.tally(LATENCY)


def test_a_counter_with_closed_labels_starts_at_zero_for_each() -> None:
    metrics = Metrics(TABLE)
    metrics.counter(EVENTS)
    samples = scraped(metrics)
    assert samples["kvtier_test_events_total{tier=gpu}"] == 0
    assert samples["kvtier_test_events_total{tier=dram}"] == 0


def test_the_page_tells_version_and_process() -> None:
    samples = scraped(Metrics(()))
    assert samples[f"kvtier_build_info{{version={__version__}}}"] == 1
    assert samples["process_resident_memory_bytes"] > 0
    assert not [name for name in samples if name.endswith("_created")]


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, two = Metrics(TABLE), Metrics(TABLE)
    one.counter(EVENTS).at("gpu").inc()
    two.counter(EVENTS)
    assert scraped(one)["kvtier_test_events_total{tier=gpu}"] == 1
    assert scraped(two)["kvtier_test_events_total{tier=gpu}"] == 0


def test_the_table_can_be_enumerated_and_tells_what_nothing_feeds() -> None:
    metrics = Metrics(TABLE)
    assert set(TABLE) <= set(metrics.definitions)
    assert set(metrics.unbound) == set(TABLE)
    metrics.counter(EVENTS)
    metrics.counter(BY_MODEL)
    metrics.gauge(DEPTH)
    metrics.pull(HOLDER, tuple)
    metrics.histogram(LATENCY)
    assert metrics.unbound == ()


def test_open_label_values_beyond_the_ceiling_become_other_and_are_counted() -> None:
    metrics = Metrics(TABLE)
    requests = metrics.counter(BY_MODEL)
    for number in range(1000):
        requests.at(f"model-{number}").inc()
    samples = {k: v for k, v in scraped(metrics).items() if k.startswith(BY_MODEL.name)}
    assert samples == {
        "kvtier_test_requests_total{model=model-0}": 1,
        "kvtier_test_requests_total{model=model-1}": 1,
        "kvtier_test_requests_total{model=model-2}": 1,
        "kvtier_test_requests_total{model=other}": 997,
    }
    assert scraped(metrics)[f"{LABEL_OVERFLOW}{{metric={BY_MODEL.name}}}"] == 997


def test_a_value_outside_a_closed_label_becomes_other() -> None:
    metrics = Metrics(TABLE)
    metrics.counter(EVENTS).at("tape").inc()
    assert scraped(metrics)["kvtier_test_events_total{tier=other}"] == 1


def test_a_dropped_series_is_gone_and_its_place_is_free() -> None:
    metrics = Metrics(TABLE)
    holders = metrics.gauge(HOLDER)
    for name in ("a", "b", "c"):
        holders.at(name, "gpu").set(1)
        holders.at(name, "dram").set(1)
    holders.at("d", "gpu").set(1)
    holders.drop("a", "gpu")
    holders.at("e", "gpu").set(1)
    shown = scraped(metrics)
    assert "kvtier_test_holder_blocks{model=a,tier=gpu}" not in shown
    assert "kvtier_test_holder_blocks{model=e,tier=gpu}" not in shown, "a still has a series"
    holders.drop("a", "dram")
    holders.drop("a", "dram")
    holders.at("f", "gpu").set(7)
    assert scraped(metrics)["kvtier_test_holder_blocks{model=f,tier=gpu}"] == 7


def test_pulled_values_are_read_at_each_scrape_and_summed_beyond_the_ceiling() -> None:
    metrics = Metrics(TABLE)
    state = {(f"m{number}", "gpu"): 1.0 for number in range(5)}
    metrics.pull(HOLDER, state.items)
    samples = scraped(metrics)
    assert samples["kvtier_test_holder_blocks{model=m0,tier=gpu}"] == 1
    assert samples["kvtier_test_holder_blocks{model=other,tier=gpu}"] == 2
    state.clear()
    assert not [name for name in scraped(metrics) if name.startswith(HOLDER.name)]


def test_a_counter_can_be_pulled_under_its_full_name() -> None:
    metrics = Metrics(TABLE)
    metrics.pull(EVENTS, lambda: [(("gpu",), 12.0)])
    assert scraped(metrics)["kvtier_test_events_total{tier=gpu}"] == 12


def test_a_pulled_counter_starts_at_0_for_each_value_of_its_closed_label() -> None:
    """A series that is not there before its first count has no rate at its first count."""
    metrics = Metrics(TABLE)
    counted: dict[tuple[str, ...], float] = {}
    metrics.pull(EVENTS, counted.items)
    before = {k: v for k, v in scraped(metrics).items() if k.startswith(EVENTS.name)}
    assert set(before) == {f"{EVENTS.name}{{tier={tier}}}" for tier in EVENTS.labels[0].values}
    assert set(before.values()) == {0}
    counted[("gpu",)] = 3
    after = {k: v for k, v in scraped(metrics).items() if k.startswith(EVENTS.name)}
    assert after == before | {f"{EVENTS.name}{{tier=gpu}}": 3}


@settings(max_examples=60)
@given(st.lists(st.text(max_size=300), min_size=1, max_size=10))
def test_any_label_value_gives_a_page_that_can_be_parsed(values: list[str]) -> None:
    metrics = Metrics(TABLE)
    requests = metrics.counter(BY_MODEL)
    for value in values:
        requests.at(value).inc()
    samples = {k: v for k, v in scraped(metrics).items() if k.startswith(BY_MODEL.name)}
    assert sum(samples.values()) == len(values)
    assert len(samples) <= MODEL.ceiling
    prefix = len(f"{BY_MODEL.name}{{model=")
    assert all(len(name) - prefix - 1 <= METRIC_LABEL_CHARS_MAX for name in samples)
    assert all(name.isprintable() for name in samples)


def test_series_made_from_many_threads_keep_the_ceiling() -> None:
    metrics = Metrics(TABLE)
    requests = metrics.counter(BY_MODEL)

    def work(worker: int) -> None:
        for number in range(200):
            requests.at(f"m-{worker}-{number}").inc()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples = {k: v for k, v in scraped(metrics).items() if k.startswith(BY_MODEL.name)}
    assert len(samples) == MODEL.ceiling
    assert sum(samples.values()) == 800


def test_misuse_is_refused() -> None:
    metrics = Metrics(TABLE)
    events = metrics.counter(EVENTS)
    with pytest.raises(CallerError, match="bound already"):
        metrics.counter(EVENTS)
    with pytest.raises(CallerError, match="is a gauge"):
        metrics.counter(DEPTH)
    with pytest.raises(CallerError, match="not of this table"):
        metrics.gauge(MetricDef(MetricKind.GAUGE, "kvtier_stranger", "?"))
    with pytest.raises(CallerError, match="cannot be pulled"):
        metrics.pull(LATENCY, tuple)
    with pytest.raises(CallerError, match=r"label values for \['tier'\] wanted, got 2"):
        events.at("gpu", "dram")
    with pytest.raises(CallerError, match=r"defined twice: kvtier_test_queue_count"):
        Metrics((DEPTH, DEPTH))


@pytest.mark.parametrize(
    ("kind", "name", "buckets"),
    [
        (MetricKind.COUNTER, "kvtier_events", ()),
        (MetricKind.GAUGE, "kvtier_events_total", ()),
        (MetricKind.GAUGE, "events", ()),
        (MetricKind.GAUGE, "kvtier_Events", ()),
        (MetricKind.GAUGE, "kvtier_x", (1.0,)),
        (MetricKind.HISTOGRAM, "kvtier_x_seconds", ()),
        (MetricKind.HISTOGRAM, "kvtier_x_seconds", (2.0, 1.0)),
        (MetricKind.HISTOGRAM, "kvtier_x_seconds", (1.0, float("inf"))),
        (MetricKind.HISTOGRAM, "kvtier_x_seconds", (float("nan"),)),
    ],
)
def test_definitions_that_break_the_rules_are_refused(
    kind: MetricKind, name: str, buckets: tuple[float, ...]
) -> None:
    with pytest.raises(CallerError, match=name):
        MetricDef(kind, name, "help", buckets=buckets)


def test_definitions_that_could_grow_too_large_are_refused() -> None:
    wide = tuple(Label(f"l{number}", values_count_max=200) for number in range(2))
    with pytest.raises(LimitError, match="40401 series"):
        MetricDef(MetricKind.GAUGE, "kvtier_wide", "help", wide)
    with pytest.raises(LimitError, match="values_count_max"):
        Label("x", values_count_max=10**6)
    with pytest.raises(CallerError, match="twice"):
        Label("x", values=("a", "a"))
    with pytest.raises(CallerError, match="label name"):
        Label("not a name")

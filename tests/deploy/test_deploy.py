"""What is in deploy/ against what real services export: every metric, label and value is there.

And the other way round: what the services export, something sets.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvtier.local.directory import DataDirectory
from kvtier.local.probes import http_answer
from kvtier.telemetry.metrics import MetricDef, MetricKind
from kvtier.telemetry.service import TELEMETRY_METRICS
from kvtier_router.metrics import DEFINITIONS as ROUTER
from kvtier_services.bridge.metrics import DEFINITIONS as BRIDGE
from kvtier_services.index.metrics import DEFINITIONS as INDEX
from kvtier_services.store.metrics import DEFINITIONS as STORE
from kvtier_services.worker.http.metrics import TABLE as ENDPOINT
from kvtier_services.worker.metrics import TABLE as WORKER
from tests.harness.processes import ProcessRunner
from tests.support import promql
from tests.support.bridge_cluster import BridgeCluster, EngineSpec, channel_of
from tests.support.index_cluster import IndexProcess, index_launch
from tests.support.local_cluster import LocalCluster, router_of, start_cluster
from tests.support.worker_cluster import Failed, prompt_of

pytestmark = pytest.mark.timeout(240)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "kvtier.rules.yml").read_text())["groups"]
SCRAPE = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in RULES for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
TABLES = {
    "router": ROUTER,
    "index": INDEX,
    "store": STORE,
    "worker": (*WORKER, *ENDPOINT),
    "bridge": BRIDGE,
}
DEFINED: dict[str, MetricDef] = {
    definition.name: definition
    for definition in (
        *ROUTER,
        *INDEX,
        *STORE,
        *WORKER,
        *ENDPOINT,
        *BRIDGE,
        *TELEMETRY_METRICS,
    )
}
OF_PROMETHEUS = {"job", "instance", "le"}
OF_ALL = {"up", "kvtier_build_info", "kvtier_telemetry_label_overflow_total"}
SILENT = {
    "kvtier_router_quota_refused_total": "no tenant has a quota here, and its label is open",
}
"""Metrics without a sample in this cluster, each with the reason."""

EXPRESSIONS = {
    **{alert["alert"]: alert["expr"] for alert in ALERTS},
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
}


@dataclass(frozen=True, slots=True)
class Page:
    """A page of metrics."""

    labels: Mapping[str, list[dict[str, str]]]
    """By the name of a sample (`_bucket` and the like included): the labels of each."""
    families: frozenset[str]
    with_samples: frozenset[str]


def page_of(address: str) -> Page:
    status, body = http_answer(address, "/metrics")
    assert status == 200, address
    labels = dict[str, list[dict[str, str]]]()
    families, with_samples = set[str](), set[str]()
    for family in text_string_to_metric_families(body.decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        families.add(name)
        with_samples |= {name} if family.samples else set()
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(dict(sample.labels))
    return Page(labels, frozenset(families), frozenset(with_samples))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("deploy")
    with ProcessRunner("deploy", directory) as runner:
        yield start_cluster(runner, directory / "kvtier", workers=1)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeCluster]:
    """A foreign engine and its bridge, with an index of their own."""
    with ProcessRunner("deploy_bridge", tmp_path_factory.mktemp("bridge")) as runner:
        launch, port = index_launch(runner)
        cluster = BridgeCluster(runner, IndexProcess(runner.start(launch), port), EngineSpec())
        asyncio.run(_follow(cluster))
        yield cluster


async def _follow(cluster: BridgeCluster) -> None:
    await cluster.start_engine()
    await cluster.start_bridge()
    async with channel_of(cluster) as cluster.channel:
        await cluster.ask("run", 1, 3)
        await cluster.shows(exact=True)


@pytest.fixture(scope="module")
def pages(cluster: LocalCluster, bridge: BridgeCluster) -> dict[str, Page]:
    asyncio.run(_load(cluster))
    ports = json.loads((DataDirectory(cluster.root).root / "ports.json").read_text())
    found = {one.name: one.address for one in cluster.state.services}
    addresses = {
        "router": cluster.state.admin,
        "index": f"127.0.0.1:{ports['index-metrics']}",
        "store": f"127.0.0.1:{ports['store-metrics']}",
        "worker": found["worker-1"],
        "bridge": f"127.0.0.1:{bridge.page_port}",
    }
    return {name: page_of(address) for name, address in addresses.items()}


async def _load(cluster: LocalCluster) -> None:
    async with router_of(cluster).client() as client:
        for number in range(3):
            await client.answer(prompt_of(1, 200), 4)
            await client.answer(prompt_of(number, 100), 2)
        assert isinstance(await client.ask([1, 2], 1, model="nobody"), Failed)


def metric_of(sample: str) -> MetricDef | None:
    """The definition behind a sample's name."""
    if sample in DEFINED:
        return DEFINED[sample]
    found = DEFINED.get(re.sub(r"_(bucket|sum|count)$", "", sample))
    return found if found is not None and found.kind is MetricKind.HISTOGRAM else None


# ---- expressions


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_asks_only_for_metrics_labels_and_values_that_there_are(name: str) -> None:
    expression = EXPRESSIONS[name]
    found = promql.selectors(expression)
    assert found
    known_labels = set(OF_PROMETHEUS)
    for selector in found:
        if selector.metric in OF_ALL:
            known_labels |= {"metric", "version"}
            continue
        definition = metric_of(selector.metric)
        assert definition is not None, selector.metric
        labels = {label.name: label for label in definition.labels}
        known_labels |= set(labels)
        for label, operator, value in selector.matchers:
            assert label in labels or label in OF_PROMETHEUS, (selector.metric, label)
            if label in labels and labels[label].values:
                wanted = value.split("|") if "Re" in operator else [value]
                assert set(wanted) <= set(labels[label].values), (selector.metric, wanted)
        counts = definition.kind is not MetricKind.GAUGE
        assert selector.is_rated == counts, f"{selector.metric} in {expression}"
    assert promql.grouped(expression) <= known_labels


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_metric_that_is_asked_for_is_on_a_page_of_a_real_service(
    name: str, pages: dict[str, Page]
) -> None:
    for selector in promql.selectors(EXPRESSIONS[name]):
        metric = metric_of(selector.metric)
        wanted = selector.metric if metric is None else metric.name
        assert wanted == "up" or any(wanted in page.families for page in pages.values()), wanted


def test_what_the_services_export_something_sets(pages: dict[str, Page]) -> None:
    """Each definition of each service's table has a sample after some load, or is explained."""
    silent = {
        definition.name
        for service, table in TABLES.items()
        for definition in table
        if definition.name not in pages[service].with_samples
    }
    assert silent == set(SILENT)


def test_counts_of_a_load_are_on_the_pages(pages: dict[str, Page]) -> None:
    router = pages["router"].labels["kvtier_router_requests_total"]
    assert {"api": "completions", "status": "2xx"} in router
    assert {"api": "completions", "status": "4xx"} in router
    tiers = {one["tier"] for one in pages["store"].labels["kvtier_store_bytes"]}
    assert {"dram", "nvme"} <= tiers
    states = pages["bridge"].labels["kvtier_bridge_ranks"]
    assert [one["state"] for one in states] == ["absent", "exact", "degraded"]


# ---- alerts


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names)) >= 20
    for alert in ALERTS:
        assert re.fullmatch(r"Kvtier[A-Z][A-Za-z]+", alert["alert"])
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert re.fullmatch(r"\d+m", alert["for"])
        assert alert["annotations"]["summary"].rstrip().endswith(".")
        assert alert["annotations"]["runbook"].count(".") >= 2, alert["alert"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_labels_in_the_words_of_an_alert_are_labels_of_its_result(alert: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    kept = promql.grouped(alert["expr"])
    if not re.match(r"(sum|max|min|avg|histogram_quantile)\b", alert["expr"]):
        first = promql.selectors(alert["expr"])[0]
        metric = metric_of(first.metric)
        kept |= {"instance", "job", "metric"}
        kept |= set() if metric is None else {label.name for label in metric.labels}
    assert used <= kept


def test_every_alert_is_on_the_operator_s_page() -> None:
    page = (DEPLOY.parent / "docs" / "operating.md").read_text()
    told = re.findall(r"^\| `(Kvtier\w+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: (severity, text) for name, severity, text in told} == {
        alert["alert"]: (alert["labels"]["severity"], alert["annotations"]["runbook"].strip())
        for alert in ALERTS
    }


def test_every_job_that_rules_speak_of_is_scraped() -> None:
    jobs = {job["job_name"] for job in SCRAPE["scrape_configs"]}
    assert jobs == {f"kvtier-{service}" for service in TABLES}
    assert SCRAPE["rule_files"] == ["kvtier.rules.yml"]
    for alert in ALERTS:
        for selector in promql.selectors(alert["expr"]):
            for label, operator, value in selector.matchers:
                if label == "job":
                    wanted = value if "Re" in operator else re.escape(value)
                    assert any(re.fullmatch(wanted, job) for job in jobs), value
    targets = [one for job in SCRAPE["scrape_configs"] for one in job["static_configs"]]
    assert all(target.startswith("127.0.0.1:") for one in targets for target in one["targets"])


# ---- dashboard


def test_panels_have_ids_of_their_own_places_without_overlap_units_and_words() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)) > 0
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"]


def test_the_dashboard_has_its_variables_and_each_expression_uses_them() -> None:
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["job"]["datasource"]["uid"] == "${datasource}"
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            used = set(re.findall(r"\$(\w+)", expression))
            assert used <= {*variables, "__rate_interval"}
            assert "job" in used
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = promql.grouped(expression)
            is_bare = not re.match(r"(sum|max|avg|histogram_quantile)\b", expression)
            assert is_bare or legend <= grouped, (panel["title"], legend)

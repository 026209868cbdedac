"""The page in a real browser, over a real cluster: what it shows, and that names stay names.

Pictures of it are kept in `.test-artifacts/`.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.rights import requires_chromium
from tests.harness.waiting import eventually
from tests.support.index_cluster import start_index
from tests.support.store_cluster import start_store
from tests.support.worker_cluster import MODEL, TOKEN_BYTES, prompt_of, start_worker

if TYPE_CHECKING:  # it needs a package that a machine without a browser may lack
    from tests.support.browser import Browser

pytestmark = [requires_chromium, pytest.mark.timeout(180)]
FAKE = {"prefill_tokens_per_s": 20_000.0, "step_ms": 2.0, "token_bytes": TOKEN_BYTES}
HOSTILE = "<script>window.hacked=1</script>"
IMAGE = "<img src=x onerror=window.hacked=1>"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The processes behind the page."""

    router: Process
    port: int
    admin_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}/ui"

    def ask(self, number: int, model: str = MODEL, **headers: str) -> int:
        """One request; its status."""
        prompt = prompt_of(7, 160) + prompt_of(number % 5, 64)
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "stream": number % 2 == 0}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = {"content-type": "application/json", "x-request-id": f"ask-{number}"}
            connection.request("POST", "/v1/completions", json.dumps(body), sent | headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("dashboard")
    with ProcessRunner("dashboard", directory) as runner:
        yield asyncio.run(_start(runner, directory))


async def _start(runner: ProcessRunner, directory: Path) -> Cluster:
    index = await start_index(runner, lease_ms=2000)
    told = {"targets": [index.address]}
    store = await asyncio.to_thread(start_store, runner, directory / "data", index=told)
    settings: dict[str, Any] = {
        "store": {"targets": [store.socket]},
        "index": told,
        "model": {"model": "fake", "fake": FAKE},
    }
    names = {"w0": "worker-one", "w1": HOSTILE}
    await asyncio.gather(
        *(start_worker(runner, name, instance=shown, **settings) for name, shown in names.items())
    )
    port, admin_port = free_port(), free_port()
    argv = kvtier_command(
        "router",
        f"--listen-bind=127.0.0.1:{port}",
        f"--admin-bind=127.0.0.1:{admin_port}",
        f"--index-targets={index.address}",
        "--instance=router-under-test",
    )
    launch = Launch("router", argv, http_ready(f"http://127.0.0.1:{port}/ready"))
    return Cluster(await asyncio.to_thread(runner.start, launch), port, admin_port)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Browser]":
    from tests.support.browser import browser

    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_before_any_request_it_says_what_is_there_and_what_is_not(
    cluster: Cluster, window: "Browser"
) -> None:
    window.open(cluster.url)
    window.until("#fleet tbody", "worker-one")
    assert window.text("#instance") == "router-under-test"
    assert window.until("#index-pill", "EXACT")
    assert "No request has ended yet" in window.text("#requests tbody")
    assert "no requests in this time" in window.text("#chart-rate")
    window.until("#k-workers", "2")
    assert "no prompt in the last minute" in window.text("#k-hit-more")
    window.picture("dashboard-empty")
    assert window.complaints() == []


def test_under_load_it_shows_tiers_rates_and_why_each_request_went_where(
    cluster: Cluster, window: "Browser"
) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(cluster.ask, range(60))) == {200}
        assert set(pool.map(lambda n: cluster.ask(n, IMAGE), range(100, 104))) == {404}
    window.open(cluster.url)
    window.until("#k-rate", "/s")
    window.until("#k-hit", "%")
    tiers = window.until("#tiers", "DRAM")
    assert "GPU" in tiers
    assert "all EXACT" in tiers
    assert "block" in tiers
    fleet = window.text("#fleet tbody")
    assert HOSTILE in fleet
    assert fleet.count("takes requests") == 2
    assert window.text("#k-workers").split() == ["2", "of", "2"]
    assert "router started" in window.text("#events")
    assert window.count("#chart-rate rect") > 0
    assert window.count("#chart-hit path, #chart-hit circle") > 0
    assert window.count("#requests tbody tr") == 25
    window.picture("dashboard")
    window.type("#requests-text", "ask-59")
    window.until("#requests tbody tr:nth-child(1)", "ask-59")
    assert window.count("#requests tbody tr") == 1
    window.click("#requests tbody tr:nth-child(1) button")
    why = window.until("#why", "prompt tokens")
    assert "It went to" in why
    assert window.count("#candidates tbody tr") == 2
    assert window.count("#candidates tr.chosen") == 1
    window.picture("dashboard-why")
    window.press("\ue00c")  # Escape
    assert window.run("return document.getElementById('why').open") is False
    assert window.complaints() == []


def test_names_from_outside_stay_text_and_nothing_comes_from_elsewhere(
    cluster: Cluster, window: "Browser"
) -> None:
    assert cluster.ask(200, IMAGE) == 404
    window.open(cluster.url)
    window.until("#requests tbody", IMAGE)
    window.until("#fleet tbody", HOSTILE)
    assert window.run("return window.hacked") is None
    assert window.count("#fleet script, #requests img, #events script, #models img") == 0
    assert window.loaded_from() == {f"http://127.0.0.1:{cluster.admin_port}"}
    refused = window.run(
        "try { document.body.innerHTML = '<b>x</b>'; return 'done' } catch (e) { return e.name }"
    )
    assert refused == "TypeError"
    # What the page refused just now is the only thing that the console may have heard of.
    assert all("TrustedHTML" in line for line in window.complaints())


def test_lists_are_searched_paged_and_worked_with_the_keyboard(
    cluster: Cluster, window: "Browser"
) -> None:
    window.open(cluster.url)
    window.until("#requests tbody", "ask-")
    first = window.texts("#requests tbody tr")
    window.click("#requests-next")
    window.until("#requests-page", "older")
    older = window.texts("#requests tbody tr")
    assert not set(first) & set(older)
    window.click("#requests-back")
    window.until("#requests-page", "newest")
    window.click("#requests-errors")
    eventually(
        lambda: all("404" in line for line in window.texts("#requests tbody tr")),
        30,
        "only errors are listed",
    )
    window.click("#requests-errors")
    window.type("#requests-text", "ask-58")
    window.until("#requests tbody tr:nth-child(1)", "ask-58")
    window.type("#fleet-text", "nobody of this name")
    window.until("#fleet tbody", "No holder fits")
    window.run("document.querySelector('#requests button.link').focus()")
    window.press("\ue007")  # Enter
    window.until("#why", "It went to")
    window.press("\ue00c")
    outline = window.run(
        "const b = document.getElementById('theme'); b.focus();"
        "return getComputedStyle(b).outlineStyle"
    )
    assert outline != "none"
    assert window.complaints() == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_reads_well_on_a_small_screen_in_both_themes(
    cluster: Cluster, window: "Browser", theme: str
) -> None:
    window.open(cluster.url)
    window.until("#fleet tbody", "worker-one")
    window.run("localStorage.setItem('kvtier-theme', arguments[0]); location.reload()", theme)
    window.until("#theme", theme)
    window.until("#fleet tbody", "worker-one")
    window.resize(500, 900)
    assert window.overflow() <= 0
    assert _contrast(window, "body", "body") >= 7
    assert _contrast(window, ".small", ".card") >= 4.5
    assert _contrast(window, "[data-level='good']", "[data-level='good']") >= 4.5
    window.picture(f"dashboard-small-{theme}")
    window.resize(1400, 1000)
    assert window.complaints() == []


def test_it_says_that_the_router_is_gone_and_goes_on_when_it_is_back(
    cluster: Cluster, window: "Browser"
) -> None:
    window.open(cluster.url)
    window.until("#live-text", "live")
    cluster.router.kill()
    window.until("#alerts", "does not answer")
    assert window.text("#live-text") == "no answer"
    assert "worker-one" in window.text("#fleet tbody")
    cluster.router.restart()
    window.until("#live-text", "live")
    window.until("#requests tbody", "No request has ended yet")
    assert cluster.ask(300) == 200
    window.until("#requests tbody", "ask-300")
    assert "does not answer" not in window.text("#alerts")
    assert all("ERR_CONNECTION" in line for line in window.complaints())


def _contrast(window: "Browser", text: str, behind: str) -> float:
    """Contrast ratio of an element's text with a background, as WCAG has it."""
    colours: list[str] = window.run(
        "const style = (s) => getComputedStyle(document.querySelector(s));"
        "return [style(arguments[0]).color, style(arguments[1]).backgroundColor]",
        text,
        behind,
    )
    light = sorted(_luminance(colour) for colour in colours)
    return (light[1] + 0.05) / (light[0] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

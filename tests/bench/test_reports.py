"""The contract of every bench: listed, importable, one JSON object, a status that tells."""

import argparse
import contextlib
import json
import os
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from kvtier.bench import report
from kvtier.bench.report import BENCHES, Bar, Result, command, module
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.waiting import eventually

PACKAGE = Path(report.__file__).parent


class FakeBench(ModuleType):
    """A bench that measures nothing."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.results: list[Result] = []

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", type=int, default=3)

    def run(self, arguments: argparse.Namespace) -> list[Result]:
        return [*self.results, Result("size", arguments.size, "blocks")]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    fake = FakeBench()
    monkeypatch.setattr(report, "BENCHES", ("fake-one",))
    monkeypatch.setattr(report, "module", lambda name: {"fake-one": fake}[name])
    return fake


MET = Result("rate", 5.5, "M/s", 4.0)
MISSED = Result("latency", 130.25, "us", 100.0, Bar.AT_MOST)


def test_json_is_exactly_one_object_with_the_agreed_keys(
    bench: FakeBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.results = [MET]
    assert command(["fake-one", "--json", "--size", "7"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document.keys() == {"bench", "machine", "results"}
    assert document["bench"] == "fake-one"
    assert document["machine"]["cores"] >= 1
    assert document["results"] == [
        {"name": "rate", "value": 5.5, "unit": "M/s", "bar": ">= 4", "ok": True},
        {"name": "size", "value": 7, "unit": "blocks", "bar": None, "ok": True},
    ]


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_missed_bar_is_status_1_in_either_form(
    bench: FakeBench, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    bench.results = [MET, MISSED]
    assert command(["fake-one", *form]) == 1
    out = capsys.readouterr().out
    assert '"ok": false' in out if form else "MISSED" in out


def test_a_table_shows_value_unit_and_bar(
    bench: FakeBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.results = [MET]
    assert command(["fake-one"]) == 0
    title, rate, _ = capsys.readouterr().out.splitlines()
    assert title == "kvtier bench fake-one"
    assert rate.split() == ["rate", "5.5", "M/s", ">=", "4", "ok"]


@pytest.mark.parametrize(
    ("result", "is_ok"),
    [
        (Result("at least, equal", 4.0, "x", 4.0), True),
        (Result("at least, below", 3.9, "x", 4.0), False),
        (Result("at most, equal", 4.0, "x", 4.0, Bar.AT_MOST), True),
        (Result("at most, above", 4.1, "x", 4.0, Bar.AT_MOST), False),
        (Result("informative", 1e9, "x"), True),
        (Result("not a number", float("nan"), "x", 4.0), False),
    ],
    ids=lambda value: value.name if isinstance(value, Result) else "",
)
def test_a_result_is_ok_when_it_meets_its_bar(result: Result, is_ok: bool) -> None:
    assert result.ok is is_ok


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_can_be_imported_and_takes_its_options(name: str) -> None:
    bench = module(name)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args([]) is not None
    assert bench.__doc__
    assert callable(bench.run)


def test_every_module_with_a_bench_in_it_is_listed() -> None:
    """A bench is a module that has both `add_arguments` and `run`, or a part of one that has."""
    found = {
        path.stem.replace("_", "-")
        for path in PACKAGE.glob("*.py")
        if "def add_arguments(" in (text := path.read_text(encoding="utf-8")) and "def run(" in text
    }
    parts = {name for name in found for bench in BENCHES if name.startswith(f"{bench}-")}
    assert found - parts | set(BENCHES) & found == set(BENCHES)


def test_a_bench_that_is_not_listed_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["no-such-bench"])
    assert ended.value.code == 2
    assert "index-service" in capsys.readouterr().err


def test_a_bench_that_is_told_to_end_leaves_nothing_behind(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    argv = kvtier_command("bench", "peers", "--only", "bulk")
    bench = processes.spawn(Launch("bench", argv, environment={"TMPDIR": str(tmp_path)}))
    eventually(lambda: len(session(bench.pid)) > 2, 60, "a store and a plain peer run beside it")
    bench.terminate()
    assert bench.wait(60) == 130
    assert session(bench.pid) == []
    assert list(tmp_path.iterdir()) == []


def session(leader: int) -> list[int]:
    """Pids of a session."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            found += [pid] if os.getsid(pid) == leader else []
    return found

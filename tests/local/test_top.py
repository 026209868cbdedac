"""`kvtier top`: frames of any input, and the command under a real terminal with a real router."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.local.top import Watch, read_terms
from kvtier.local.top_frame import HEIGHT_MIN, WIDTH_MIN, Known, Screen, columns, fit, frame
from tests.harness.ports import free_port
from tests.harness.processes import ProcessRunner, kvtier_command
from tests.router.front.rig import Rig
from tests.support.local_cluster import run_kvtier
from tests.support.terminal import terminal

pytestmark = pytest.mark.timeout(120)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(
            ["router", "index", "fleet", "tiers", "models", "series", "columns", "events", "rows",
             "tier", "name", "at", "trust", "age_s", "bytes", "bytes_max", "status", "cause", "now",
             "last", "events_count", "requests", "ttft_p50_s", "eligible", "states", "worker"]
        ),
        inner,
        max_size=6,
    ),
    max_leaves=30,
)  # fmt: skip


def table(**fields: Any) -> dict[str, Any]:
    return fields


def overview(**changes: Any) -> dict[str, Any]:
    """What a router with two workers says."""
    return table(
        router=table(instance="router", policy="cache_aware", now=1e9, up_s=75.0, processes=1),
        index=table(mode="embedded", trust="exact", age_s=0.1),
        fleet=table(kinds={"worker": 2}, states={"candidate": 2}),
        gauges=table(running=1, queued=2),
        models=[table(name="m", eligible=2, cause="")],
        tiers=[
            table(tier="gpu", blocks=10, bytes=2048, bytes_max=4096, holders=2, degraded=0),
            table(tier="nvme", blocks=1, bytes=512, bytes_max=1 << 40, holders=1, degraded=1),
        ],
        series=table(
            point_s=5.0,
            last=1,
            columns=table(
                at=[1e9], requests=[50], failed=[0], limited=[3], refused=[0], left=[0],
                cached_tokens=[90], told_tokens=[100], matched_tokens=[95], prompt_tokens=[100],
                ttft_p50_s=[0.0123], ttft_p95_s=[0.5],
            ),
        ),
        events=[table(number=1, at=1e9, level="bad", kind="index lost", subject="i", detail="")],
        events_count=1,
    ) | changes  # fmt: skip


def shown(known: Known, width: int = 80, height: int | None = 24) -> str:
    return "\n".join(line.text for line in frame(known, Screen(width, height)))


def test_a_frame_tells_rates_tiers_holders_requests_and_events() -> None:
    known = Known()
    known.take(overview())
    known.holders = [table(name="w0", kind="worker", state="candidate", trust="exact", tiers={})]
    known.requests = [table(at=1e9, status=503, worker="w0", prompt_tokens=7, total_s=1.5)]
    known.holders_count = 1
    text = shown(known)
    assert "requests 10.0/s" in text
    assert "hit 90 % (expected 95 %)" in text
    assert "TTFT 12 ms, p95 500 ms" in text
    assert "workers 2/2  under way 1  queued 2" in text
    assert "429 3" in text
    assert "GPU   [########........] 10 blocks  2 KiB of 4 KiB  2 holders  EXACT" in text
    assert "1 DEGRADED" in text
    assert "503" in text
    assert "index lost  i" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": {"mode": "embedded", "trust": "degraded", "age_s": 12.0}}, "not heard for 12 s"),
        ({"index": {"mode": "embedded", "trust": "degraded", "age_s": None}}, "not heard yet"),
        ({"models": [{"name": "m", "eligible": 0}]}, "no worker takes requests for m"),
        ({"models": [{"name": "m", "eligible": 1, "cause": "why"}]}, "m is DEGRADED: why"),
        ({"models": []}, "no model is served yet"),
    ],
)
def test_what_is_wrong_stands_at_the_top(changes: dict[str, Any], words: str) -> None:
    known = Known()
    known.take(overview(**changes))
    text = shown(known)
    assert words in "\n".join(text.splitlines()[:5])
    assert ("as last heard" in text) == ("index" in changes)


def test_names_cannot_command_the_terminal_and_wide_ones_are_cut_by_columns() -> None:
    known = Known()
    known.take(overview())
    known.holders = [table(name="\x1b[2Jevil\n" * 9, kind="worker"), table(name="工" * 90)]
    known.holders_count = 2
    text = shown(known, 60)
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2Jevil" in text
    assert max(columns(line) for line in text.splitlines()) <= 60


def test_more_holders_than_fit_are_counted() -> None:
    known = Known()
    known.take(overview())
    known.holders = [table(name=f"w{number}", kind="worker") for number in range(200)]
    known.holders_count = 1000
    text = shown(known)
    rows = sum(line.startswith("w") and line[1:2].isdigit() for line in text.splitlines())
    assert f"... {1000 - rows} more" in text


@given(JSON, JSON, st.integers(WIDTH_MIN, 200), st.integers(HEIGHT_MIN, 60) | st.none(), st.text())
@settings(max_examples=150)
def test_whatever_a_router_says_a_frame_fits_and_nothing_is_raised(
    told: Any, rows: Any, width: int, height: int | None, trouble: str
) -> None:
    known = Known()
    if isinstance(told, dict):
        known.take(told)
    if isinstance(rows, list):
        known.holders = known.requests = [row for row in rows if isinstance(row, dict)]
    lines = frame(known, Screen(width, height), trouble)
    assert height is None or len(lines) <= height
    for line in lines:
        assert line.text.isprintable()
        assert columns(line.text) <= width


@given(st.text(), st.integers(0, 30))
def test_fit_gives_exactly_as_many_columns(text: str, width: int) -> None:
    assert columns(fit(text, width)) == width


def test_a_router_that_was_restarted_is_told_from_the_start() -> None:
    known = Known()
    known.take(overview())
    known.forget()
    assert (known.last_point, known.last_event, len(known.events)) == (0, 0, 0)


@pytest.mark.parametrize("flags", [["--interval-s", "0"], ["--admin", "unix:/x"], ["--admin", "x"]])
def test_flags_without_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_terms(flags)


# ---- the command


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("top")
    with ProcessRunner("top", directory) as runner:
        rig = Rig(runner, directory)
        rig.start_workers(2)
        rig.start_router("--instance=router-7", brain="real")
        for _ in range(4):
            assert rig.complete(max_tokens=1).status == 200
        yield rig


def top(rig: Rig, *flags: str) -> tuple[str, ...]:
    return kvtier_command("top", f"--admin=127.0.0.1:{rig.admin_port}", "--interval-s=0.3", *flags)


def test_once_prints_one_plain_frame_and_ends_with_0(router: Rig) -> None:
    done = run_kvtier(*top(router, "--once")[1:])
    assert done.returncode == 0
    assert "kvtier router-7" in done.stdout
    assert "workers 2/2" in done.stdout
    assert done.stdout.count("200") >= 4
    assert "\x1b" not in done.stdout


def test_once_without_a_router_says_so_and_ends_with_1() -> None:
    done = run_kvtier("top", "--once", f"--admin=127.0.0.1:{free_port()}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no router answers at 127.0.0.1" in done.stderr


def test_a_directory_in_which_no_cluster_runs_is_told(tmp_path: Path) -> None:
    done = run_kvtier("top", "--once", f"--data-dir={tmp_path}")
    assert done.returncode == 1
    assert "no cluster runs" in done.stderr


def test_on_a_terminal_it_draws_in_place_follows_its_size_and_ends_with_q(router: Rig) -> None:
    with terminal(top(router)) as screen:
        first = screen.until("router-7")
        assert len(first) <= 24
        assert max(len(line) for line in first) <= 80
        assert any(line.startswith("w0 ") for line in first)
        screen.resize(60, 16)
        screen.while_showing(lambda lines: max(map(len, lines)) > 60)
        assert len(screen.frame()) <= 16
        assert max(len(line) for line in screen.frame()) <= 60
        screen.press(b"q")
        assert screen.status() == 0
        assert screen.output.count(b"\x1b[?1049h") == screen.output.count(b"\x1b[?1049l") == 1
        assert screen.output.rstrip().endswith(b"\x1b[?1049l")
        assert screen.modes == screen.before


@pytest.mark.parametrize(
    ("how", "status"), [("ctrl-c", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_however_it_ends_the_terminal_is_given_back(
    router: Rig, how: str | signal.Signals, status: int
) -> None:
    with terminal(top(router)) as screen:
        screen.until("router-7")
        if isinstance(how, signal.Signals):
            screen.signal(how)
        else:
            screen.press(b"\x03")
        assert screen.status() == status
        assert screen.output.rstrip().endswith(b"\x1b[?1049l")
        assert screen.modes == screen.before


def test_it_says_when_the_router_is_gone_and_goes_on_when_it_is_back(router: Rig) -> None:
    assert router.router is not None
    with terminal(top(router)) as screen:
        screen.until("workers 2/2")
        router.router.kill()
        lost = screen.until("no router answers")
        assert any("router-7" in line for line in lost)
        router.router.restart()
        assert router.complete(max_tokens=1).status == 200
        screen.while_showing(lambda lines: "no router answers" in lines[0])
        screen.until("router started")
        screen.press(b"q")
        assert screen.status() == 0


def test_before_the_first_answer_it_waits_and_does_not_end(tmp_path: Path) -> None:
    argv = kvtier_command("top", f"--admin=127.0.0.1:{free_port()}", "--interval-s=0.3")
    with terminal(argv) as screen:
        screen.until("no router answers")
        screen.press(b"q")
        assert screen.status() == 0


def test_an_answer_that_is_no_feed_is_no_router(router: Rig) -> None:
    watch = Watch(f"127.0.0.1:{router.workers[0].port}")
    watch.ask()
    assert "no router answers" in watch.trouble
    assert json.dumps(dict(watch.known.overview)) == "{}"

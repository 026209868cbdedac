"""`kvtier bench cluster`: exact prefixes out of a trace, and replays against real processes."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.cluster import figures, side_by_side
from kvtier.bench.cluster_load import Outcome, Progress, Replayed
from kvtier.bench.cluster_trace import (
    NUMBERS_MAX,
    STAMP_S,
    Blocks,
    Shaping,
    block_tokens,
    read_replay,
)
from kvtier.errors import CallerError
from tests.harness.ports import free_port
from tests.harness.processes import ProcessRunner, clean_environment, kvtier_command
from tests.harness.waiting import eventually
from tests.support.local_cluster import LocalCluster, cluster_table, start_cluster

ROWS = [
    {"timestamp": 0, "input_length": 1500, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 600, "output_length": 0, "hash_ids": [0, 4]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 9, "hash_ids": [0, 1, 2]},
]
BAILIAN = {
    "chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40,
    "output_length": 5, "type": "text", "turn": 1, "hash_ids": [3, 4, 5],
}  # fmt: skip
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0319600,110,27"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def shared(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_prompts_share_exactly_what_the_trace_says(trace: Path) -> None:
    replay = read_replay(trace, Shaping(requests_max=10, token_scale=16))
    blocks = Blocks(replay.piece_tokens)
    assert replay.piece_tokens == 32
    prompts = [blocks.prompt(ask) for ask in replay.asks]
    assert [len(prompt) for prompt in prompts] == [94, 75, 38, 96]
    assert shared(prompts[0], prompts[1]) == 64
    assert shared(prompts[0], prompts[2]) == 32
    assert shared(prompts[0], prompts[3]) == 94  # the same last block, of which one is cut


@given(st.sets(st.integers(0, NUMBERS_MAX - 1), min_size=2, max_size=20), st.integers(6, 40))
def test_blocks_are_the_same_each_time_and_no_two_begin_alike(
    numbers: set[int], count: int
) -> None:
    made = [block_tokens(number, count) for number in numbers]
    assert made == [block_tokens(number, count) for number in numbers]
    assert len({tuple(block[:6]) for block in made}) == len(numbers)
    assert all(len(block) == count and min(block) >= 32 and max(block) < 100 for block in made)


def test_arrivals_are_spread_within_their_stamp_and_sped_up(trace: Path) -> None:
    slow = read_replay(trace, Shaping(requests_max=10))
    fast = read_replay(trace, Shaping(requests_max=10, speed=4.0))
    ats = [ask.at for ask in slow.asks]
    assert ats == sorted(ats)
    assert ats[0] == 0
    assert len(set(ats)) == len(ats)
    assert ats[-1] <= 3 + STAMP_S
    assert [ask.at for ask in fast.asks] == pytest.approx([at / 4 for at in ats])
    assert "4 times as fast" in fast.note
    assert "spread" in fast.note


def test_an_endless_cache_would_find_every_whole_block_that_came_before(trace: Path) -> None:
    replay = read_replay(trace, Shaping(requests_max=10))
    assert replay.ideal_hit() == pytest.approx((1024 + 512 + 1536) / (1500 + 1200 + 600 + 1536))


def test_long_prompts_and_answers_are_cut(trace: Path) -> None:
    shaping = Shaping(requests_max=3, prompt_tokens_max=600, output_tokens_max=5)
    asks = read_replay(trace, shaping).asks
    assert [ask.prompt_tokens for ask in asks] == [600, 600, 600]
    assert [ask.output_tokens for ask in asks] == [5, 3, 1]
    assert [ask.pieces for ask in asks] == [(0, 1), (0, 1), (0, 4)]


def test_other_formats_are_known_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(BAILIAN) + "\n")
    bailian = read_replay(path, Shaping(requests_max=10))
    assert bailian.piece_tokens == 16
    assert bailian.asks[0].pieces == (3, 4, 5)
    path.write_text(AZURE)
    azure = read_replay(path, Shaping(requests_max=10))
    assert [ask.prompt_tokens for ask in azure.asks] == [4808, 110]
    assert azure.asks[1].at == pytest.approx(1.052)
    assert not set(azure.asks[0].pieces) & set(azure.asks[1].pieces)
    assert azure.ideal_hit() == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no rows"),
        ("nonsense\n", "line 1: trace row is not JSON"),
        (json.dumps({**ROWS[0], "hash_ids": [0]}), "line 1: 1 hash_ids do not make 1500"),
        (json.dumps({**ROWS[0], "hash_ids": [0, 1, -2]}), "hash_ids are 0 to"),
        (json.dumps({**ROWS[0], "hash_ids": [0, 1, NUMBERS_MAX]}), "hash_ids are 0 to"),
        (json.dumps({**ROWS[0], "hash_ids": [], "input_length": 0}), "do not make 0"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: no row of an Azure"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,2\n", "positive"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(CallerError, match=complaint):
        read_replay(path, Shaping(requests_max=10))


@pytest.mark.parametrize("scale", [3, 128, 0])
def test_a_scale_that_blurs_prefixes_is_refused(trace: Path, scale: int) -> None:
    with pytest.raises(CallerError, match=r"scale|positive"):
        read_replay(trace, Shaping(requests_max=10, token_scale=scale))


def outcome(ttft_s: float, cached: int = 0, error: str = "") -> Outcome:
    tiers = {"gpu": cached, "dram": 0}
    return Outcome(0.0, 100, 4, cached, tiers, ttft_s, (0.1, 0.2), 1.0, error)


def test_figures_leave_failures_out_and_miss_the_bar_for_them() -> None:
    failed = outcome(float("inf"), error="status 503")
    good = figures("a", Replayed((outcome(1.0, 50), outcome(3.0)), 2.0))
    bad = figures("b", Replayed((outcome(1.0), failed), 2.0))
    none = figures("c", Replayed((failed,), 2.0))
    assert {r.name: r.value for r in good}["hit rate, gpu"] == 0.25
    assert {r.name: r.value for r in good}["prompt tokens"] == 100
    assert all(result.ok for result in good)
    assert [result.name for result in bad if not result.ok] == ["errors"]
    assert not any(result.name.startswith("TTFT") for result in none)
    names = [result.name for result in side_by_side({"a": good, "b": bad})]
    assert names[:4] == ["errors: a", "errors: b", "TTFT, p50: a", "TTFT, p50: b"]


def test_progress_tells_how_many_failed_and_ends_full(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("replay", 2)
    progress.done(failed=False)
    progress.done(failed=True)
    progress.close()
    assert "2/2, 1 errors" in capsys.readouterr().err


# Against processes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with ProcessRunner("bench-cluster", directory) as runner:
        yield start_cluster(runner, directory / "kvtier")


def bench(*arguments: str) -> tuple[int, dict[str, float], str]:
    """Exit status, values by name, standard error of one run."""
    done = subprocess.run(
        kvtier_command("bench", "cluster", "--json", *arguments),
        capture_output=True, text=True, timeout=200, check=False, env=clean_environment(),
    )  # fmt: skip
    if not done.stdout:
        return done.returncode, {}, done.stderr
    told = json.loads(done.stdout)
    assert told["bench"] == "cluster"
    assert told["machine"]["cores"] >= 1
    values = {result["name"]: result["value"] for result in told["results"]}
    return done.returncode, values, done.stderr


@pytest.mark.timeout(200)
def test_a_replay_hits_as_far_as_its_prefixes_reach(cluster: LocalCluster, trace: Path) -> None:
    shape = ("--trace", str(trace), "--token-scale", "16", "--output-max", "4")
    status, first, told = bench(*shape, "--url", f"here={cluster.url}/v1")
    assert status == 0, told
    assert "4/4" in told
    assert first["errors: here"] == 0
    assert first["output tokens: here"] > 0

    def hits() -> bool:
        status, again, told = bench(*shape, "--url", f"here={cluster.url}", "--speed", "100")
        assert status == 0, told
        by_tier = [value for name, value in again.items() if name.startswith("hit rate, ")]
        assert sum(by_tier) == pytest.approx(again["hit rate: here"], abs=1e-5)
        # All but the part of the last block that was cut, and the token that is computed anyway.
        return again["hit rate: here"] > 0.75

    eventually(hits, 100, "prefixes are found where they were computed")


@pytest.mark.timeout(200)
def test_endpoints_stand_side_by_side_and_a_dead_one_misses_the_bar(
    cluster: LocalCluster, trace: Path
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    shape = ("--trace", str(trace), "--token-scale", "16", "--speed", "100", "--requests", "2")
    arms = ("--url", f"a={cluster.url}", "--url", f"dead={dead}", "--model", "kvtier-fake")
    status, values, told = bench(*shape, *arms)
    assert status == 1
    assert values["errors: a"] == 0
    assert values["errors: dead"] == 2
    assert "dead: first of 2 errors" in told
    status, values, told = bench(*shape, "--url", dead)
    assert status == 1
    assert values == {}
    assert "tells no model" in told


@pytest.mark.timeout(300)
def test_a_policy_gets_a_cluster_of_its_own(
    processes: ProcessRunner, tmp_path: Path, trace: Path
) -> None:
    file = processes.config_file("bench.toml", cluster_table())
    status, values, told = bench(
        "--trace", str(trace), "--cluster", str(file), "--policies", "round_robin",
        "--token-scale", "16", "--speed", "10",
    )  # fmt: skip
    assert status == 0, told
    assert values["errors: round_robin"] == 0
    assert "router     stopped" in told


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--trace", "/nowhere"), "No such file"),
        (("--url", "localhost"), "want http"),
        (("--url", "a=http://h:1", "--url", "a=http://h:2"), "name of its own"),
        (("--url", "http://h:1", "--cluster", "x"), "not both"),
        (("--open-max", "0"), "positive"),
        (("--requests", "0"), "positive"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    trace: Path, flags: tuple[str, ...], complaint: str
) -> None:
    status, _, told = bench("--trace", str(trace), *flags)
    assert status != 0
    assert complaint in told
    assert "Traceback" not in told

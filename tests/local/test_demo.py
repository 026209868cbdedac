"""`kvtier demo` over the fake model, and its judgement."""

import json
import signal
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.local import models
from kvtier.local.demo import report
from kvtier.local.demo.chats import CHATS, SYSTEM_TOKENS, conversation, system_prompt
from kvtier.local.demo.client import Answer, Token
from kvtier.local.demo.command import command
from kvtier.local.demo.judging import (
    NEAR_TIE_GAP,
    Phase,
    PhaseResult,
    Same,
    Served,
    compared,
    judged,
)
from tests.harness.processes import Launch, ProcessRunner, clean_environment, kvtier_command
from tests.harness.waiting import eventually
from tests.support.local_cluster import cluster_table

TIERS = {
    "repeated: L1": {"gpu"},
    "workers restarted: L2 DRAM": {"dram"},
    "store restarted: NVMe": {"nvme"},
    "other worker: L2": {"dram", "nvme"},
}


@pytest.mark.timeout(400)
def test_each_phase_hits_its_tier_and_every_answer_is_that_of_cache_off(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    file = processes.config_file("demo.toml", cluster_table())
    argv = kvtier_command("demo", "--config", str(file), "--tokens", "8", "--out", "out")
    done = subprocess.run(
        argv, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
        timeout=390, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "demo.json").read_text())
    by_name = {phase["name"]: phase for phase in told["phases"]}
    for name, tiers in TIERS.items():
        first = by_name[name]["requests"][0]
        hit = sum(first["reused_tokens"][tier] for tier in tiers)
        assert hit >= 0.5 * first["prompt_tokens"] >= 0.5 * SYSTEM_TOKENS
        assert name in done.stdout
    assert {phase["identical"] for phase in told["phases"]} == {"yes"}
    assert by_name["cold"]["requests"][0]["reused_tokens"]["gpu"] == 0
    assert by_name["cache off"]["hit_rate"] == 0
    workers = [by_name[name]["requests"][0]["worker"] for name in list(TIERS)[2:]]
    assert workers[0] != workers[1]
    if find_spec("matplotlib") is not None:
        assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def answer(text: str, gap: float = 1.0, cached_tokens: int = 0) -> Answer:
    tokens = tuple(Token((ord(letter),), gap) for letter in text)
    return Answer(text, tokens, 0.1, 1000, cached_tokens, "worker-1")


def test_equal_answers_are_the_same() -> None:
    assert compared(answer("abc"), answer("abc")) is Same.YES


@pytest.mark.parametrize("other", ["abd", "ab", "abcd", "", "xbc"])
def test_a_difference_counts_unless_cache_off_itself_was_undecided_there(other: str) -> None:
    undecided = answer("abc", NEAR_TIE_GAP / 2)
    assert compared(answer(other), answer("abc")) is Same.NO
    expected = Same.NO if other == "abcd" else Same.NEAR_TIE
    assert compared(answer(other), undecided) is expected


def test_tokens_that_agree_with_other_text_are_no_match() -> None:
    assert compared(replace(answer("abc"), text="abd"), answer("abc")) is Same.NO


def result(tiers: tuple[str, ...], cached: int, text: str = "abc", **loaded: int) -> PhaseResult:
    served = Served(answer(text, cached_tokens=cached), loaded)
    return PhaseResult(Phase("phase", tiers), (served,))


OFF = result((), 0)


def complaint(one: PhaseResult) -> str:
    return judged([one, OFF])[0].complaint()


def test_a_phase_that_kept_its_promise_has_nothing_to_complain_of() -> None:
    assert complaint(OFF) == ""
    assert complaint(result(("gpu",), 900)) == ""
    assert complaint(result(("dram",), 900, dram=500)) == ""
    assert complaint(result(("dram", "nvme"), 900, dram=300, nvme=300)) == ""


def test_a_phase_that_missed_its_tier_is_told() -> None:
    assert "0 of 1000" in complaint(result(("gpu",), 900, dram=900))
    assert "from dram" in complaint(result(("dram",), 900, nvme=900))
    assert "400 of 1000" in complaint(result(("dram",), 900, dram=400))
    assert "900 tokens were reused" in complaint(result((), 900))


def test_a_wrong_answer_is_told_before_anything_else() -> None:
    assert "answer 1 differs" in complaint(result(("gpu",), 0, text="abd"))


def test_no_token_is_counted_twice() -> None:
    served = Served(answer("a", cached_tokens=100), {"dram": 64, "nvme": 64})
    assert served.reused == {"gpu": 0, "dram": 64, "nvme": 36}


def test_the_table_has_a_row_a_phase_and_says_what_differs() -> None:
    good, bad = result(("gpu",), 900), result(("gpu",), 900, text="abd")
    shown = report.table(judged([good, bad, OFF])).splitlines()
    assert len(shown) == 4
    assert shown[1].split()[-2:] == ["90%", "yes"]
    assert shown[2].split()[-1] == "NO"
    document = report.as_json(judged([good, OFF]), "fake")
    assert json.loads(json.dumps(document))["phases"][0]["reused_tokens"] == {"gpu": 900}


def test_the_system_prompt_is_as_long_as_it_should_be_by_any_count() -> None:
    for count in (len, lambda text: len(text.split()), lambda text: len(text) // 4):
        prompt = system_prompt(count)
        assert SYSTEM_TOKENS <= count(prompt) < SYSTEM_TOKENS + 500
        assert prompt == system_prompt(count)


def test_a_turn_carries_the_whole_chat_so_far() -> None:
    first = conversation("rules", CHATS[0], [])
    second = conversation("rules", CHATS[0], ["It costs its price."])
    assert second[: len(first)] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[-1]["content"] == CHATS[0].questions[1]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--tokens", "0"], "positive"),
        (["--workers", "1"], "two workers"),
        (["--moddel", "x"], "nearest.*--model"),
    ],
)
def test_what_the_demo_cannot_do_is_refused(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        command(argv)


def test_nothing_is_fetched_for_models_that_workers_make() -> None:
    told: list[str] = []
    for model in ("tiny", "fake", "owner/name", "/nowhere"):
        models.provide(model, told.append)
    assert told == []


@pytest.mark.timeout(200)
def test_the_demo_ends_at_once_when_it_is_asked_to(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    file = processes.config_file("demo.toml", cluster_table())
    out = tmp_path / "out"
    argv = kvtier_command("demo", "--config", str(file), "--out", str(out))
    process = processes.spawn(Launch("demo", argv))
    eventually(lambda: "store      up" in process.log_text(), 90, "the demo has begun")
    process.send(signal.SIGINT)
    assert process.wait(60) == 130
    assert not out.exists()

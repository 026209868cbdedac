"""`kvtier demo` over the fake model, and its judgement."""

import asyncio
import json
import signal
import subprocess
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.local import models
from kvtier.local.demo import report
from kvtier.local.demo.chats import CHATS, SYSTEM_TOKENS, conversation, system_prompt
from kvtier.local.demo.client import Answer, Ask, Token, ask
from kvtier.local.demo.command import Wish, command, concluded, demo_cluster, demonstrate
from kvtier.local.demo.judging import (
    NEAR_TIE_GAP,
    Computed,
    Phase,
    PhaseResult,
    Same,
    compared,
    judged,
)
from tests.harness.processes import Launch, ProcessRunner, clean_environment, kvtier_command
from tests.harness.waiting import eventually
from tests.support.local_cluster import cluster_table

REQUESTS = sum(len(chat.questions) for chat in CHATS)
"""Of each phase."""
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


def answer(text: str, gap: float = 1.0, **reused: int) -> Answer:
    tokens = tuple(Token((ord(letter),), gap) for letter in text)
    return Answer(text, tokens, 0.1, 1000, reused, "worker-1")


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


def result(tiers: tuple[str, ...], text: str = "abc", **reused: int) -> PhaseResult:
    return PhaseResult(Phase("phase", tiers), (answer(text, **reused),))


OFF = result(())


def complaint(one: PhaseResult) -> str:
    return judged([one, OFF])[0].complaint()


def test_a_phase_that_kept_its_promise_has_nothing_to_complain_of() -> None:
    assert complaint(OFF) == ""
    assert complaint(result(("gpu",), gpu=900)) == ""
    assert complaint(result(("dram",), gpu=400, dram=500)) == ""
    assert complaint(result(("dram", "nvme"), gpu=300, dram=300, nvme=300)) == ""


def test_a_phase_that_missed_its_tier_is_told() -> None:
    assert "0 of 1000" in complaint(result(("gpu",), dram=900))
    assert "from dram" in complaint(result(("dram",), nvme=900))
    assert "400 of 1000" in complaint(result(("dram",), gpu=500, dram=400))
    assert "900 tokens were reused" in complaint(result((), gpu=900))
    later = (answer("abc"), answer("abc", gpu=16))
    cold, off = Phase("cold", ()), Phase("off", (), Computed.ALL)
    assert PhaseResult(cold, later).complaint() == ""
    assert "16 tokens were reused" in PhaseResult(off, later).complaint()


def test_a_wrong_answer_is_told_before_anything_else() -> None:
    assert "answer 1 differs" in complaint(result(("gpu",), text="abd"))


def test_the_table_has_a_row_a_phase_and_says_what_differs() -> None:
    good, bad = result(("gpu",), gpu=900), result(("gpu",), text="abd", gpu=900)
    shown = report.table(judged([good, bad, OFF])).splitlines()
    assert len(shown) == 4
    assert shown[1].split()[-2:] == ["90%", "yes"]
    assert shown[2].split()[-1] == "NO"
    document = report.as_json(judged([good, OFF]), "fake")
    assert json.loads(json.dumps(document))["phases"][0]["reused_tokens"] == {"gpu": 900}


def spoilt(address: str, request: Ask, asked: list[int]) -> Answer:
    """As `ask`, but for the first repeated answer and the first after the store's restart.

    The one gets another letter, the other a salt of its own, so that nothing is found for it.
    """
    asked.append(len(asked))
    if asked[-1] == 3 * REQUESTS:
        return ask(address, replace(request, salt="nobody else's"))
    found = ask(address, request)
    if asked[-1] != REQUESTS:
        return found
    wrong = replace(found.tokens[0], piece=(*found.tokens[0].piece, 33))
    return replace(found, tokens=(wrong, *found.tokens[1:]))


@pytest.mark.timeout(400)
def test_a_wrong_answer_and_a_missed_tier_are_told_and_end_in_status_1(
    processes: ProcessRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = processes.config_file("demo.toml", cluster_table())
    flags = ["--config", str(file), "--data-dir", str(tmp_path / "data")]
    asking = partial(spoilt, asked=[])
    wish = Wish(demo_cluster(flags), tmp_path / "out", 4, asking)
    assert asyncio.run(demonstrate(wish)) == 1
    told = capsys.readouterr().out
    failed = [line for line in told.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2, told
    assert "repeated: L1: answer 1 differs from cache-off" in failed[0]
    assert "store restarted: NVMe: 0 of" in failed[1]
    document = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert [phase["name"] for phase in document["phases"] if phase["complaint"]] == [
        "repeated: L1",
        "store restarted: NVMe",
    ]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (OFF, 0),
        (result(("gpu",)), 1),
        (result((), text="abd"), 1),
        (result((), gpu=16), 1),
    ],
)
def test_each_fault_alone_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: PhaseResult, status: int
) -> None:
    wish = Wish(demo_cluster(["--model", "fake"]), tmp_path / "out", 4)
    assert concluded(wish, judged([wrong, OFF]), 1.0) == status
    assert ("FAILED" in capsys.readouterr().out) == bool(status)


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

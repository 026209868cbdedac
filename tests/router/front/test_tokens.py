"""`kvtier tokens diff` finds the first token where router and worker part."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import BackendError, UnavailableError
from kvtier_router.routing.learning import RESPONSES_MIN
from kvtier_router.tokens import command, first_difference
from tests.harness.ports import free_port
from tests.router.front.rig import Rig, call

TOKENS = st.lists(st.integers(0, 3), max_size=12)


@given(TOKENS, TOKENS)
def test_everything_before_the_difference_is_equal_and_nothing_more(
    ours: list[int], theirs: list[int]
) -> None:
    found = first_difference(ours, theirs)
    if found is None:
        assert ours == theirs
        return
    assert ours[: found.at] == theirs[: found.at]
    assert ours[found.at : found.at + 1] != theirs[found.at : found.at + 1]


def test_a_worker_with_another_template_is_found_out(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    (worker,) = rig.start_workers(1)
    text = rig.directory / "text"
    flags = ["--worker", f"127.0.0.1:{worker.port}", "--model", "mock"]
    assert command(["diff", "--text", str(text), *flags]) == 0
    assert capsys.readouterr().out.startswith("equal")

    other = rig.directory / "other"
    shutil.copytree(text, other)
    template = other / "chat_template.jinja"
    template.write_text("the quick" + template.read_text(encoding="utf-8"), encoding="utf-8")
    assert command(["diff", "--text", str(other), *flags]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("different at token 0")
    assert "the quick" in shown


def test_a_worker_with_another_template_makes_its_model_degraded(rig: Rig) -> None:
    (worker,) = rig.start_workers(1)
    other = rig.directory / "other"
    shutil.copytree(rig.directory / "text", other)
    template = other / "chat_template.jinja"
    template.write_text("the quick" + template.read_text(encoding="utf-8"), encoding="utf-8")
    rig.start_router(f"--texts=mock={other}", brain="real")
    usage = {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}
    worker.behave(scripted={"choices": [], "usage": usage})
    for _ in range(RESPONSES_MIN):  # what a list of prompts used is nobody's count of one
        assert rig.complete(prompt=["the quick", "the lazy dog"]).status == 200
    assert rig.metric("kvtier_router_token_mismatch_total") == 0
    worker.behave()
    for _ in range(RESPONSES_MIN):
        assert rig.chat(max_tokens=1).status == 200
    assert rig.metric("kvtier_router_token_mismatch_total") == RESPONSES_MIN
    assert rig.metric("kvtier_router_model_degraded") == 1
    fleet = call(rig.admin_port, "GET", "/fleet").body.decode()
    assert "of prompts are tokenised differently" in fleet


def test_a_request_of_ones_own_is_compared(
    rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (worker,) = rig.start_workers(1)
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"prompt": "the lazy dog"}), encoding="utf-8")
    flags = ["--text", str(rig.directory / "text"), "--model", "mock", "--path", "/v1/completions"]
    flags += ["--worker", f"127.0.0.1:{worker.port}", "--request", str(request)]
    assert command(["diff", *flags]) == 0
    assert "router 3 tokens" in capsys.readouterr().out or worker.last()["body"]["prompt"]
    worker.behave(scripted={"choices": []})
    with pytest.raises(BackendError):
        command(["diff", *flags])


def test_a_worker_that_is_not_there_is_said_so(rig: Rig) -> None:
    rig.start_workers(1)
    flags = ["--text", str(rig.directory / "text"), "--model", "mock"]
    with pytest.raises(UnavailableError):
        command(["diff", *flags, "--worker", f"127.0.0.1:{free_port()}"])


def test_a_new_key_comes_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["key"]) == 0
    key, *rest = capsys.readouterr().out.splitlines()
    assert hashlib.sha256(key.encode()).hexdigest() in rest[-1]

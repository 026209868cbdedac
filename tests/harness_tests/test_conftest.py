"""The checks at the end of each test, shown by running pytest on tests that break them."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.harness.processes import REPOSITORY, clean_environment

CONFTEST = REPOSITORY / "tests" / "conftest.py"


def run_pytest(directory: Path, code: str) -> str:
    """Run pytest, with this project's conftest, on one file of `code` and return its output."""
    header = (
        "import sys, subprocess, pytest\n"
        "from tests.harness.processes import Launch, ProcessRunner\n"
        "SLEEPER = (sys.executable, '-S', '-c', "
        "\"import time; print('pid', __import__('os').getpid(), flush=True); time.sleep(600)\")\n"
    )
    (directory / "test_inner.py").write_text(header + code)
    (directory / "conftest.py").write_text(CONFTEST.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-q", str(directory)],
        cwd=directory,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    return done.stdout + done.stderr


def test_a_failed_test_shows_logs_and_a_leak_fails_and_is_ended(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
from tests.harness.waiting import eventually

def test_fails_with_a_process(processes):
    process = processes.start(Launch("talker", SLEEPER))
    eventually(lambda: "pid" in process.log_text(), 10, "it talks")
    assert False, "on purpose"

def test_leaks(tmp_path):
    process = ProcessRunner("leak", tmp_path).__enter__().start(Launch("stray", SLEEPER))
    print("stray pid", process.pid)

@pytest.mark.needs("unheard-of")
def test_unknown_need():
    pass

def test_is_clean(processes):
    processes.start(Launch("good", SLEEPER))
""",
    )
    assert "process talker" in output
    assert "left behind: ['stray']" in output
    assert "unheard-of" in output
    assert "1 failed, 2 passed, 2 errors" in output
    stray = int(output.split("stray pid ")[1].split()[0])
    assert not psutil.pid_exists(stray)


def test_a_missing_right_skips_with_the_exact_reason(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
from tests.harness import rights

rights.CHECKS["netns"] = lambda: "no `ip` on PATH"

@rights.requires_netns
def test_needs_it():
    raise AssertionError
""",
    )
    assert "needs netns, not to be had here: no `ip` on PATH" in output
    assert "1 skipped" in output

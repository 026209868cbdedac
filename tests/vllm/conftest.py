"""The budget of time of all tests of real vLLM together, and what one look at its parts tells."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import REPOSITORY, clean_environment
from tests.support.vllm_servers import PYTHON

BUDGET_S = float(os.environ.get("KVTIER_VLLM_BUDGET_S", "inf"))
"""Tests that would begin later are skipped, so that a slow machine ends in time."""
BEGAN = time.monotonic()


def pytest_runtest_setup() -> None:
    if time.monotonic() - BEGAN > BUDGET_S:
        pytest.skip(f"KVTIER_VLLM_BUDGET_S: {BUDGET_S:g} s are over")


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `vllm_probe` tells; importing vLLM takes longer than all that it does."""
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    probe = Path(__file__).parents[1] / "support" / "vllm_probe.py"
    done = subprocess.run(
        [PYTHON, str(probe), "--lora", str(adapter), "--halves"],
        env=clean_environment() | {"DO_NOT_TRACK": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

"""The budget of time of all tests of real vLLM together."""

import os
import time

import pytest

BUDGET_S = float(os.environ.get("KVTIER_VLLM_BUDGET_S", "inf"))
"""Tests that would begin later are skipped, so that a slow machine ends in time."""
BEGAN = time.monotonic()


def pytest_runtest_setup() -> None:
    if time.monotonic() - BEGAN > BUDGET_S:
        pytest.skip(f"KVTIER_VLLM_BUDGET_S: {BUDGET_S:g} s are over")

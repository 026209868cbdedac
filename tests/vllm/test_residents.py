"""The connector's picture of what is resident, held against vLLM's own block pool; no server runs.

Runs in `make test-vllm`; skipped where there is no vLLM.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_servers import PYTHON, WHY_NOT

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

CHILD = Path(__file__).with_name("residents_child.py")


@pytest.mark.parametrize("seed", [1, 2])
def test_every_slot_is_told_as_the_pool_has_it_after_every_step(seed: int) -> None:
    """Under reuse, copies, evictions, preemptions, resets; equal to the sum of the events too."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [PYTHON, str(CHILD), str(seed), "400"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    wanted = ("reused", "evicted", "preempted", "resets", "copies", "held")
    assert all(seen[what] > 0 for what in wanted), seen

"""`kvtier worker drain` beside a worker: what it loads."""

import subprocess
import sys

_DRAIN = """
import sys
from kvtier_services.worker.entry import command
status = command(["drain", "http://127.0.0.1:1", "--wait-s", "1"])
assert status == 1, status
assert not {"torch", "grpc", "transformers"} & set(sys.modules)
"""


def test_a_drain_loads_nothing_that_a_worker_computes_with() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _DRAIN], capture_output=True, timeout=60, check=False, text=True
    )
    assert ended.returncode == 0, ended.stderr

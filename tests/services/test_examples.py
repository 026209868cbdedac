"""The examples of the documentation run as they are written there, against real processes."""

import subprocess
import sys
from pathlib import Path

from tests.harness.ports import free_port
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.readiness import grpc_ready

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "first_match.py"


def test_the_first_example_prints_what_the_readme_says(processes: ProcessRunner) -> None:
    address = f"127.0.0.1:{free_port()}"
    processes.start(
        Launch("index", kvtier_command("index", "--bind", address), ready=grpc_ready(address))
    )
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), address],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "holds 640 of 1000 tokens" in result.stdout

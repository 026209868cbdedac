"""Grouping needs as much memory as it may have, however many rows there are."""

import subprocess
import sys

import pytest

from tests.harness.processes import REPOSITORY, clean_environment

pytestmark = pytest.mark.timeout(240)

PROGRAM = """
import resource, sys, tempfile
from pathlib import Path
from kvtier.batch.directory import BatchDirectory
from kvtier.batch.rows import Row, Url
from kvtier.batch.settings import BatchConfig, EstimateSection

count = int(sys.argv[1])
estimate = EstimateSection(workers=1, worker_tokens=10_000, store_tokens=10_000)
config = BatchConfig(sort_memory_bytes=1 << 20, estimate=estimate)

def rows():
    for number in range(count):
        prompt = f"group {number % 997} " * 60 + f"{number}"
        yield Row(str(number), Url.COMPLETIONS, {"prompt": prompt})

with tempfile.TemporaryDirectory() as folder:
    directory = BatchDirectory(Path(folder))
    assert directory.prepare(rows(), config, "made").rows == count
    groups = 0
    for entry in directory.entries():
        groups += entry.shared < 256
print(groups, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def grouped(count: int) -> tuple[int, int]:
    """(groups, greatest memory in bytes) of a process that groups so many rows."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(count)],
        capture_output=True, text=True, check=True, timeout=100,
        cwd=REPOSITORY, env=clean_environment(),
    )  # fmt: skip
    groups, peak = done.stdout.split()
    return int(groups), int(peak)


def test_twelve_times_the_rows_take_no_more_memory() -> None:
    few, many = grouped(2_000), grouped(25_000)
    assert many[0] == few[0] == 997  # rows of one group lie together
    assert many[1] - few[1] < 8 << 20  # 18 MB of prompts; 1 MiB for sorting, 8 bytes a name

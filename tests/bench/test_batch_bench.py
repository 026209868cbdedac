"""The batch bench on few rows: its own checks hold (every row once, a window again, memory)."""

import argparse
from pathlib import Path

import pytest

from kvtier.bench import batch
from kvtier.errors import KvtierError

pytestmark = pytest.mark.timeout(240)

ROWS = 4_000


def test_a_batch_that_is_killed_in_the_bench_keeps_its_promises(tmp_path: Path) -> None:
    arguments = argparse.Namespace(rows=ROWS, groups=400, folder=tmp_path)
    results = {one.name: one for one in batch.run(arguments)}
    assert [one for one in results.values() if not one.ok] == []
    # Where the kill came too late there is nothing left to be sent again.
    assert 0 < results["done when it was killed"].value <= ROWS
    assert 0 <= results["sent again after the kill"].value <= batch.WINDOW
    assert results["peak memory"].value > 0
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_missing_or_there_twice_fail_the_bench(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"custom_id": "row-0"}\n{"custom_id": "row-0"}\n{"custom_id": "row-1"}\n')
    with pytest.raises(KvtierError, match="2 rows are not there exactly once"):
        batch.require_each_once(results, 3)
    results.write_text('{"custom_id": "row-1"}\n{"custom_id": "row-0"}\n')
    batch.require_each_once(results, 2)

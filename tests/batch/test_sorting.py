"""Sorting on disk gives what sorting in memory gives."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.batch import sorting
from kvtier.batch.sorting import ExternalSort
from kvtier.errors import BackendError

ENTRIES = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=3)), max_size=60)


@given(ENTRIES)
def test_many_small_runs_come_out_in_order(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[bytes, bytes]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "BATCH_RUNS_COUNT_MAX", 3)
        sort = ExternalSort(tmp_path_factory.mktemp("runs"), 600)
        for key, payload in entries:
            sort.add(key, payload)
        assert list(sort.ordered()) == sorted(entries)


def test_a_run_that_was_cut_short_is_no_end_of_the_entries(tmp_path: Path) -> None:
    sort = ExternalSort(tmp_path, 1)
    for number in range(3):
        sort.add(bytes([number]), b"payload")
    run = tmp_path / "run-000001"
    run.write_bytes(run.read_bytes()[:-1])
    with pytest.raises(BackendError, match="run-000001"):
        list(sort.ordered())

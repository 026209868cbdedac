"""Which files of tests begin first, and in which of two queues."""

import pytest

from tests.harness.processes import REPOSITORY
from tests.harness.scheduling import LONGEST, WAITING, is_waiting, order_of


def test_every_name_is_one_of_a_file_or_folder_that_there_is() -> None:
    assert [path for path in LONGEST if not (REPOSITORY / path).is_file()] == []
    folders = {path.name for path in (REPOSITORY / "tests").rglob("*") if path.is_dir()}
    assert folders >= WAITING


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("tests/faults/test_peer_network.py", True),
        ("tests/router/front/test_faults.py", True),
        ("tests/router/routing/test_router.py", False),
        ("tests/core/test_frame.py", False),
        ("tests/test_tidy.py", False),
    ],
)
def test_files_that_start_services_are_told_from_those_that_compute(path: str, waits: bool) -> None:
    assert is_waiting(path) is waits


def test_the_longest_come_first_and_the_rest_in_its_own_order() -> None:
    assert [order_of(path) for path in LONGEST] == list(range(len(LONGEST)))
    assert order_of("tests/core/test_frame.py") == order_of("tests/faults/test_nvme_disk.py")
    assert order_of("tests/core/test_frame.py") > order_of(LONGEST[-1])

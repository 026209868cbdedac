"""Rigs of router processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ProcessRunner
from tests.router.front.rig import Rig


@pytest.fixture
def rig(processes: ProcessRunner, tmp_path: Path) -> Rig:
    """Nothing started yet."""
    return Rig(processes, tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One router over two workers for all tests of a module that break nothing."""
    directory = tmp_path_factory.mktemp("shared")
    with ProcessRunner(f"shared-{directory.name}", directory) as runner:
        rig = Rig(runner, directory)
        rig.start_workers(2)
        rig.start_router()
        yield rig


@pytest.fixture
def calm(shared: Rig) -> Rig:
    """The shared rig with workers that behave."""
    for worker in shared.workers:
        worker.behave()
    return shared

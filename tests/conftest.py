"""What every test gets: processes, networks, rights, and a check that nothing is left behind."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.harness import netns, tmpfs
from tests.harness.netns import Network
from tests.harness.processes import Process, ProcessRunner, live_processes
from tests.harness.rights import missing
from tests.harness.scheduling import TwoQueues
from tests.support.engine_support import note

# Equal runs on every machine: examples follow from the test's code, and a slow machine is no fault.
settings.register_profile("kvtier", derandomize=True, deadline=None, database=None)
settings.load_profile("kvtier")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(name, ...): skipped with the reason where a right or tool is missing"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoQueues | None:
    """Where `-n` alone is given: see tests.harness.scheduling."""
    return TwoQueues(config, log) if config.getoption("dist") == "load" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot be done here, and say exactly why."""
    for mark in item.iter_markers("needs"):
        reason = missing(mark.args)
        if reason is not None:
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the log tails of every process that runs to the report of a failed phase."""
    report = yield
    if report.when == "call" and report.passed:
        note(report.nodeid)
    if report.failed:
        for process in sorted(live_processes(), key=lambda live: live.name):
            report.sections.append((f"process {process.name}", process.log_tail()))
    return report


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process behind which did not run before it, and end it."""
    before = live_processes()
    yield
    left = sorted(live_processes() - before, key=_name)
    for process in left:
        process.end()
    assert not left, f"left behind: {[process.name for process in left]}"


@pytest.fixture(autouse=True, scope="session")
def no_namespace_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the run if a network namespace or a small file system outlives it; and remove them."""
    yield
    namespaces = netns.remove_own()
    mounts = tmpfs.remove_own(tmp_path_factory.getbasetemp())
    assert not namespaces, f"network namespaces left behind: {namespaces}"
    assert not mounts, f"mounts left behind: {mounts}"


@pytest.fixture
def processes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessRunner]:
    """The runner of this test's processes."""
    with ProcessRunner(request.node.nodeid, tmp_path) as runner:
        yield runner


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A network of the test's own; mark the test with `requires_netns`."""
    directory = tmp_path / "network"
    directory.mkdir()
    with Network(directory) as made:
        yield made


def _name(process: Process) -> str:
    return process.name

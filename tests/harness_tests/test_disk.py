"""The disk shim and the small file systems: each fault happens, is counted, and ends."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.diskshim import (
    RULES_COUNT_MAX,
    DiskAction,
    DiskFault,
    DiskOp,
    DiskRule,
    DiskShim,
)
from tests.harness.netns import Network
from tests.harness.processes import Launch, ProcessRunner
from tests.harness.rights import requires_diskshim, requires_netns, requires_tmpfs
from tests.harness.tmpfs import SmallTmpfs, own_mounts
from tests.harness.waiting import eventually

# Prints one line per call: its name and the bytes moved, or the name of the error.
ACTOR = """
import errno, os, sys, time
target = sys.argv[1]
fd = os.open(target, os.O_RDWR | os.O_CREAT)
calls = {
    "write": lambda: os.write(fd, b"w" * 100),
    "pwrite": lambda: os.pwrite(fd, b"p" * 100, 0),
    "writev": lambda: os.writev(fd, [b"a" * 60, b"b" * 40]),
    "pwritev": lambda: os.pwritev(fd, [b"a" * 60, b"b" * 40], 0),
    "read": lambda: (os.lseek(fd, 0, 0), len(os.read(fd, 100)))[1],
    "pread": lambda: len(os.pread(fd, 100, 0)),
    "preadv": lambda: os.preadv(fd, [bytearray(60), bytearray(40)], 0),
    "fsync": lambda: os.fsync(fd),
    "fdatasync": lambda: os.fdatasync(fd),
    "truncate": lambda: os.ftruncate(fd, 4096),
    "allocate": lambda: os.posix_fallocate(fd, 0, 4096),
}
for name in sys.argv[2:]:
    begin = time.monotonic()
    try:
        result = calls[name]()
    except OSError as error:
        result = errno.errorcode[error.errno]
    print("call", name, result, int(1e3 * (time.monotonic() - begin)), flush=True)
"""


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[DiskShim]:
    directory = tmp_path / "shim"
    directory.mkdir()
    with DiskShim(directory) as shim:
        yield shim


class Actor:
    """Runs calls in processes under the shim, all on one file."""

    def __init__(self, processes: ProcessRunner, shim: DiskShim, path: Path) -> None:
        self.path = path
        self._processes = processes
        self._shim = shim
        self._runs = 0

    def calls(self, *names: str) -> list[str]:
        """The result of each call: bytes, None or the error's name."""
        return [line.split()[2] for line in self.lines(*names)]

    def lines(self, *names: str) -> list[str]:
        self._runs += 1
        argv = (sys.executable, "-S", "-c", ACTOR, str(self.path), *names)
        environment = self._shim.environment
        launch = Launch(f"actor-{self._runs}", argv, environment=environment)
        process = self._processes.spawn(launch)
        assert process.wait(20) == 0, process.log_tail()
        return [line for line in process.log_text().splitlines() if line.startswith("call ")]


@pytest.fixture
def actor(processes: ProcessRunner, shim: DiskShim, tmp_path: Path) -> Actor:
    return Actor(processes, shim, tmp_path / "victim")


ALL_CALLS = {
    DiskOp.WRITE: ("write", "pwrite", "writev", "pwritev"),
    DiskOp.READ: ("read", "pread", "preadv"),
    DiskOp.SYNC: ("fsync", "fdatasync"),
    DiskOp.ALLOCATE: ("truncate", "allocate"),
}


@requires_diskshim
@pytest.mark.parametrize("operation", list(ALL_CALLS))
def test_every_call_of_a_family_fails_with_the_chosen_error_and_no_other(
    actor: Actor, shim: DiskShim, operation: DiskOp
) -> None:
    rule = shim.add(DiskFault(operation, actor.path, error=errno.ENOSPC))
    names = [name for family in ALL_CALLS.values() for name in family]
    results = dict(zip(names, actor.calls(*names), strict=True))
    failed = {name for name, result in results.items() if result == "ENOSPC"}
    assert failed == set(ALL_CALLS[operation])
    assert rule.injected_count == rule.matched_count == len(failed)


@requires_diskshim
def test_only_the_nth_call_fails(actor: Actor, shim: DiskShim) -> None:
    rule = shim.add(DiskFault(DiskOp.WRITE, actor.path, first=3, count_max=2))
    results = actor.calls(*["write"] * 6)
    assert results == ["100", "100", "EIO", "EIO", "100", "100"]
    assert (rule.matched_count, rule.injected_count) == (6, 2)
    assert actor.path.stat().st_size == 400, "a failed write writes nothing"


@requires_diskshim
def test_a_short_write_moves_the_first_bytes_only(actor: Actor, shim: DiskShim) -> None:
    fault = DiskFault(DiskOp.WRITE, actor.path, DiskAction.SHORT, short_bytes=70, count_max=2)
    rule = shim.add(fault)
    assert actor.calls("write", "writev", "write") == ["70", "70", "100"]
    assert actor.path.read_bytes() == b"w" * 70 + b"a" * 60 + b"b" * 10 + b"w" * 100
    assert rule.injected_count == 2


@requires_diskshim
def test_a_short_read_returns_fewer_bytes(actor: Actor, shim: DiskShim) -> None:
    actor.path.write_bytes(bytes(100))
    shim.add(DiskFault(DiskOp.READ, actor.path, DiskAction.SHORT, short_bytes=61))
    assert actor.calls("read", "pread", "preadv") == ["61", "61", "61"]


@requires_diskshim
def test_latency_delays_and_then_lets_pass(actor: Actor, shim: DiskShim) -> None:
    fault = DiskFault(DiskOp.SYNC, actor.path, DiskAction.LATENCY, latency_us=50_000, count_max=1)
    rule = shim.add(fault)
    (line,) = actor.lines("fsync")
    _, _, result, spent_ms = line.split()
    assert result == "None"
    assert int(spent_ms) >= 50
    assert rule.injected_count == 1


@requires_diskshim
def test_other_paths_are_left_alone(actor: Actor, shim: DiskShim, tmp_path: Path) -> None:
    rule = shim.add(DiskFault(DiskOp.WRITE, tmp_path / "elsewhere"))
    assert actor.calls("write") == ["100"]
    assert (rule.matched_count, rule.injected_count) == (0, 0)


@requires_diskshim
def test_rules_change_while_the_process_runs(
    processes: ProcessRunner, shim: DiskShim, tmp_path: Path
) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "print('open', flush=True)\n"
        "state = None\n"
        "while True:\n"
        "  try: os.pwrite(fd, b'x', 0); now = 'works'\n"
        "  except OSError as error: now = error.strerror\n"
        "  if now != state: state = now; print('state', state, flush=True)\n"
    )
    path = tmp_path / "file"
    argv = (sys.executable, "-S", "-c", code, str(path))
    process = processes.start(Launch("writer", argv, environment=shim.environment))

    def said(state: str, count: int) -> bool:
        return process.log_text().count(f"state {state}") == count

    eventually(lambda: said("works", 1), 10, "it writes")
    rule = shim.add(DiskFault(DiskOp.WRITE, path))
    eventually(lambda: said("Input/output error", 1), 10, "it fails")
    rule.withdraw()
    eventually(lambda: said("works", 2), 10, "it works again")
    assert rule.injected_count > 0


@requires_diskshim
def test_the_shim_refuses_rules_beyond_its_table_and_nonsense(
    shim: DiskShim, tmp_path: Path
) -> None:
    rules: list[DiskRule] = [
        shim.add(DiskFault(DiskOp.READ, tmp_path)) for _ in range(RULES_COUNT_MAX)
    ]
    assert len(rules) == RULES_COUNT_MAX
    with pytest.raises(RuntimeError, match="16 rules"):
        shim.add(DiskFault(DiskOp.READ, tmp_path))
    with pytest.raises(ValueError, match="first"):
        DiskFault(DiskOp.READ, tmp_path, first=0)
    with pytest.raises(ValueError, match="short"):
        DiskFault(DiskOp.SYNC, tmp_path, DiskAction.SHORT)
    with pytest.raises(ValueError, match="path_prefix"):
        DiskFault(DiskOp.READ, Path("/" + "x" * 600))


@requires_tmpfs
def test_a_full_file_system_refuses_writes_until_it_is_freed(tmp_path: Path) -> None:
    with SmallTmpfs(tmp_path / "disk", 1 << 20) as disk:
        assert disk.space().free_bytes == 1 << 20
        assert disk.fill() == 1 << 20
        assert disk.space().free_bytes == 0
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "file").write_bytes(b"x")
        disk.free()
        (disk.path / "file").write_bytes(bytes(1000))
        assert (disk.path / "file").stat().st_size == 1000


@requires_tmpfs
def test_a_file_system_can_be_filled_up_to_a_rest(tmp_path: Path) -> None:
    with SmallTmpfs(tmp_path / "disk", 1 << 20) as disk:
        disk.fill(leave_bytes=100_000)
        assert 100_000 - os.sysconf("SC_PAGESIZE") <= disk.space().free_bytes <= 100_000


@requires_tmpfs
def test_inodes_run_out_while_bytes_are_free(tmp_path: Path) -> None:
    with SmallTmpfs(tmp_path / "disk", 1 << 20, inodes_count=20) as disk:
        assert disk.fill_inodes() == 19
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "one-more").touch()
        assert disk.space().free_bytes > 0
        disk.free()
        (disk.path / "one-more").touch()
        assert (disk.path / "one-more").exists()


@requires_tmpfs
def test_a_small_file_system_is_gone_even_with_a_file_open_and_after_a_failure(
    tmp_path: Path,
) -> None:
    class OnPurposeError(Exception):
        pass

    path = tmp_path / "disk"

    def run() -> None:
        with SmallTmpfs(path, 1 << 20):
            assert own_mounts(tmp_path) == [path]
            with (path / "open").open("w"):
                raise OnPurposeError

    with pytest.raises(OnPurposeError):
        run()
    assert own_mounts(tmp_path) == []


@requires_tmpfs
@requires_netns
def test_a_small_file_system_is_seen_by_nodes_made_after_it(
    network: Network, tmp_path: Path
) -> None:
    with SmallTmpfs(tmp_path / "disk", 1 << 20) as disk:
        node = network.add_node("a")
        (disk.path / "file").write_text("seen")
        assert node.run("cat", str(disk.path / "file")) == "seen"

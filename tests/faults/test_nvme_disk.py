"""The NVMe tier on a disk that is full, refuses, falls short or does not answer."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.ports import GetStatus, PutStatus
from kvtier.tiers.nvme.archive import Condition
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import NvmeTier
from tests.harness.diskshim import DiskAction, DiskFault, DiskOp, DiskShim
from tests.harness.processes import REPOSITORY, Launch, Process, ProcessRunner, python_module
from tests.harness.rights import requires_diskshim, requires_tmpfs
from tests.harness.tmpfs import SmallTmpfs
from tests.harness.waiting import eventually, eventually_async
from tests.support.nvme_child import get as get_block
from tests.support.nvme_child import put as put_block
from tests.support.nvme_directory import MIB, du, fill, generation, held, index, segments
from tests.tiers.contract import put, put_of, soon

RECOVERY_S = 30.0


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[DiskShim]:
    (tmp_path / "shim").mkdir()
    with DiskShim(tmp_path / "shim") as made:
        yield made


async def prepared(directory: Path, count: int = 10) -> NvmeConfig:
    """A closed tier with blocks 0 to `count` of `nvme_child`."""
    config = NvmeConfig(directory, 64 * MIB, segment_bytes=2 * MIB)
    tier = await NvmeTier.open(config)
    for number in range(count):
        assert (await put_block(tier, number))[0][0] is PutStatus.STORED
    await tier.close()
    return config


def spawn(processes: ProcessRunner, shim: DiskShim, program: str, directory: Path) -> Process:
    argv = python_module("tests.support.nvme_child", program, str(directory))
    launch = Launch(program, argv, environment=shim.environment, directory=REPOSITORY)
    return processes.spawn(launch)


@requires_tmpfs
async def test_a_full_disk_stops_writes_only_and_they_go_on_once_there_is_space(
    tmp_path: Path,
) -> None:
    with SmallTmpfs(tmp_path / "disk", 12 * MIB) as disk:
        directory = disk.path / "tier"
        tier = await NvmeTier.open(NvmeConfig(directory, 11 * MIB, segment_bytes=256 << 10))
        await fill(tier, range(10))
        await tier.settle(soon())
        disk.fill()
        statuses: set[PutStatus] = set()
        for number in range(1000, 1100):
            statuses |= set(await put(tier, put_of(number, 20_000)))
        assert statuses == {PutStatus.STORED, PutStatus.REFUSED}
        assert tier.health().condition is Condition.DISK_FULL
        assert await held(tier, range(10)) == 10
        (disk.path / ".filler-bytes").unlink()

        async def taken() -> bool:
            return await put(tier, put_of(5000)) in ([PutStatus.STORED], [PutStatus.DUPLICATE])

        await eventually_async(taken, RECOVERY_S, "writes are taken again")
        assert await held(tier, range(10)) == 10
        assert await held(tier, range(5000, 5001)) == 1
        assert tier.stats().corrupt == {}
        await tier.close()
        tier = await NvmeTier.open(NvmeConfig(directory, 11 * MIB))
        assert await held(tier, range(10)) == 10
        assert await held(tier, range(5000, 5001)) == 1
        await tier.close()


@requires_tmpfs
async def test_a_disk_that_is_smaller_than_the_cap_is_used_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    with SmallTmpfs(tmp_path / "disk", 8 * MIB) as disk:
        tier = await NvmeTier.open(
            NvmeConfig(disk.path / "tier", 64 * MIB, segment_bytes=256 << 10)
        )
        stored = 0
        for number in range(3000):
            (status,) = await put(tier, put_of(number, 20_000))
            assert status in {PutStatus.STORED, PutStatus.REFUSED}
            stored += status is PutStatus.STORED
        assert stored > 1000
        assert await held(tier, range(3000), 20_000) > 0
        await tier.close()


@requires_tmpfs
async def test_a_disk_without_inodes_stops_writes_and_nothing_else(tmp_path: Path) -> None:
    with SmallTmpfs(tmp_path / "disk", 16 * MIB, inodes_count=100) as disk:
        tier = await NvmeTier.open(NvmeConfig(disk.path / "tier", 8 * MIB, segment_bytes=256 << 10))
        await fill(tier, range(100))
        disk.fill_inodes()
        for number in range(1000, 1400):
            (status,) = await put(tier, put_of(number))
            assert status in {PutStatus.STORED, PutStatus.REFUSED}
        assert tier.stats().blocks > 0
        assert await held(tier, range(1000, 1400)) == tier.stats().blocks
        for path in disk.path.glob(".filler-inode-*"):
            path.unlink()

        async def taken() -> bool:
            return await put(tier, put_of(5000)) in ([PutStatus.STORED], [PutStatus.DUPLICATE])

        await eventually_async(taken, RECOVERY_S, "writes are taken again")
        await tier.close()


@requires_diskshim
@pytest.mark.parametrize("action", [DiskAction.ERROR, DiskAction.SHORT])
async def test_a_failed_write_costs_its_own_blocks_and_seals_the_segment(
    tmp_path: Path, processes: ProcessRunner, shim: DiskShim, action: DiskAction
) -> None:
    directory = tmp_path / "tier"
    config = await prepared(directory)
    rule = shim.add(
        DiskFault(
            DiskOp.WRITE,
            generation(directory) / "segments",
            action,
            first=3,
            count_max=1,
            short_bytes=512,
        )
    )
    child = spawn(processes, shim, "failing_write", directory)
    assert child.wait(30) == 0, child.log_tail()
    assert rule.injected_count == 1
    log = child.log_text()
    assert "stored stored error stored\nreason io\nhit hit miss hit\nquarantined 1" in log
    tier = await NvmeTier.open(config)
    for number in (*range(10), 100, 101, 103):
        assert await get_block(tier, number) == (GetStatus.HIT, "")
    assert await get_block(tier, 102) == (GetStatus.MISS, "")
    await tier.close()


@requires_diskshim
async def test_blocks_that_the_disk_does_not_read_are_lost_and_a_bad_segment_is_given_up(
    tmp_path: Path, processes: ProcessRunner, shim: DiskShim
) -> None:
    directory = tmp_path / "tier"
    await prepared(directory)
    assert len(segments(directory)) == 1
    # Each cold read is two calls: one that does not wait, one that does.
    rule = shim.add(
        DiskFault(DiskOp.READ, generation(directory) / "segments", first=1, count_max=3)
    )
    child = spawn(processes, shim, "failing_read", directory)
    assert child.wait(30) == 0, child.log_tail()
    assert rule.injected_count == 3
    first, second, counts = child.log_text().splitlines()[-3:]
    assert first.split()[:3] == ["error"] * 3
    assert set(first.split()[3:]) <= {"hit", "miss"}
    assert set(second.split()) == {"miss"}
    assert counts == "failures 3 given up 1"


@requires_diskshim
async def test_a_stuck_read_is_a_miss_at_its_deadline_and_leaves_the_callers_memory_alone(
    tmp_path: Path, processes: ProcessRunner, shim: DiskShim
) -> None:
    directory = tmp_path / "tier"
    await prepared(directory)
    rule = shim.add(
        DiskFault(
            DiskOp.READ,
            generation(directory) / "segments",
            DiskAction.LATENCY,
            count_max=2,  # the read that must not wait does not
            latency_us=1_500_000,
        )
    )
    child = spawn(processes, shim, "stuck_read", directory)
    assert child.wait(30) == 0, child.log_tail()
    assert rule.injected_count == 2
    log = child.log_text()
    assert "first timeout\nsecond hit\nuntouched True\nthird hit" in log


@requires_diskshim
async def test_a_disk_that_hangs_opens_the_breaker_and_closes_it_when_it_is_well(
    tmp_path: Path, processes: ProcessRunner, shim: DiskShim
) -> None:
    directory = tmp_path / "tier"
    await prepared(directory)
    rule = shim.add(
        DiskFault(
            DiskOp.READ,
            generation(directory) / "segments",
            DiskAction.LATENCY,
            latency_us=300_000,
        )
    )
    child = spawn(processes, shim, "hanging_reads", directory)
    eventually(lambda: "open True" in child.log_text(), 30, "the breaker is open")
    assert "timeouts 5\nthen breaker_open; open True" in child.log_text()
    assert rule.injected_count > 0
    rule.withdraw()
    (tmp_path / "well").touch()
    assert child.wait(30) == 0, child.log_tail()
    assert "hits again" in child.log_text()


@requires_diskshim
@pytest.mark.parametrize("operations", [DiskOp.WRITE, DiskOp.SYNC, DiskOp.WRITE | DiskOp.SYNC])
async def test_an_index_that_the_disk_refuses_is_built_anew(
    tmp_path: Path, processes: ProcessRunner, shim: DiskShim, operations: DiskOp
) -> None:
    directory = tmp_path / "tier"
    config = await prepared(directory)
    old = index(directory)
    child = spawn(processes, shim, "failing_index", directory)
    eventually(lambda: "ready" in child.log_text(), 30, "the tier is open")
    rule = shim.add(DiskFault(operations, old, error=errno.EIO))
    (tmp_path / "begin").touch()
    eventually(lambda: "condition index_failed; read hit" in child.log_text(), 30, "it failed")
    assert rule.injected_count > 0
    rule.withdraw()
    (tmp_path / "well").touch()
    assert child.wait(30) == 0, child.log_tail()
    assert "condition writable; rebuilt 1" in child.log_text()
    assert index(directory) != old
    tier = await NvmeTier.open(config)
    for number in (*range(10), 100, 102):
        assert (await get_block(tier, number))[0] is GetStatus.HIT
    assert du(directory) <= 64 * MIB
    await tier.close()

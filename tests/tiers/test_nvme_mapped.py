"""Long frames of the NVMe tier, which are copied out of a mapping of their segment."""

import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvtier import _native
from kvtier.errors import FrameFault
from kvtier.ports import ByNames, GetRequest, GetResult, GetStatus, PutStatus, RemovalCause
from kvtier.tiers.nvme import cached
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import NvmeTier
from tests.harness.waiting import eventually_async
from tests.support.nvme_directory import segments
from tests.tiers.contract import (
    Backend,
    LocalTierContract,
    bytes_of,
    name_of,
    payload_of,
    put,
    put_of,
)
from tests.tiers.test_nvme import NvmeBackend, location

MIB = 1 << 20
LONG = 2 * MIB


@pytest.fixture(params=["mapped", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every frame by a mapping, or none: the native copy and its twin."""
    way = str(request.param)
    monkeypatch.setattr(cached, "MAPPED_BYTES_MIN", 0 if way == "mapped" else 1 << 60)
    return way


class TestNvmeMapped(LocalTierContract):
    """`test_nvme` runs the same suite on frames that are read: the twin."""

    @pytest.fixture
    async def backend(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Backend]:
        monkeypatch.setattr(cached, "MAPPED_BYTES_MIN", 0)
        made = NvmeBackend(tmp_path)
        yield made
        await made.close()


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[NvmeTier]:
    opened = await NvmeTier.open(NvmeConfig(tmp_path, 96 * MIB, segment_bytes=16 * MIB))
    yield opened
    await opened.close()


async def put_long(tier: NvmeTier, *numbers: int) -> None:
    assert set(await put(tier, *[put_of(n, LONG) for n in numbers])) == {PutStatus.STORED}


async def read(tier: NvmeTier, n: int, into: bytearray, timeout_s: float = 30.0) -> GetResult:
    request = GetRequest(name_of(n), memoryview(into), LONG)
    return (await tier.get_many([request], time.monotonic() + timeout_s))[0]


def is_mapped(suffix: str) -> bool:
    """Whether this process has a file mapped whose path contains this."""
    return suffix in Path("/proc/self/maps").read_text()


def forget_cached(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cut_first(path: Path, size: int) -> Callable[[int, int, memoryview, memoryview], int]:
    """A `copy_cached` whose file is cut after it asked whether all of it is cached."""

    def copy(descriptor: int, offset: int, head: memoryview, body: memoryview) -> int:
        os.truncate(path, size)
        return _native.copy_from_file(descriptor, offset, head, body)

    return copy


@pytest.mark.usefixtures("way")
async def test_a_long_block_is_whole_whether_its_segment_is_cached_or_not(
    tier: NvmeTier, tmp_path: Path
) -> None:
    await put_long(tier, *range(6))
    for round_number in range(2):
        for n in range(6):
            into = bytearray(LONG)
            assert (await read(tier, n, into)).status is GetStatus.HIT
            assert into == payload_of(n, LONG)
            (given,) = await tier.get_many([GetRequest(name_of(n))], time.monotonic() + 30)
            assert bytes_of(given) == payload_of(n, LONG)
        if not round_number:
            for path in segments(tmp_path):
                forget_cached(path)
    assert tier.stats().gets == {GetStatus.HIT: 24}


@pytest.mark.usefixtures("way")
async def test_a_segment_that_was_cut_under_a_running_tier_is_a_short_frame(
    tier: NvmeTier, tmp_path: Path
) -> None:
    await put_long(tier, 1, 2)
    assert (await read(tier, 1, bytearray(LONG))).is_hit
    for path in segments(tmp_path):
        os.truncate(path, MIB)
    result = await read(tier, 1, bytearray(LONG))
    assert (result.status, result.reason) == (GetStatus.CORRUPT, FrameFault.SHORT.value)
    assert tier.stats().removals[RemovalCause.CORRUPT] == 1
    assert tier.names() == [name_of(2)]


async def test_a_segment_that_is_cut_while_it_is_copied_is_an_error_of_the_disk(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_long(tier, 1)
    at = location(tier, name_of(1))
    monkeypatch.setattr(
        "kvtier.tiers.nvme.segments.copy_cached", cut_first(at.path, at.offset + MIB)
    )
    result = await read(tier, 1, bytearray(LONG))
    assert (result.status, result.reason) == (GetStatus.ERROR, "io")
    assert tier.health().disk.read_failures == 1
    assert tier.stats().removals[RemovalCause.LOST] == 1
    assert tier.names() == []


async def test_a_disk_that_hangs_under_a_long_frame_costs_the_deadline_and_no_byte(
    tier: NvmeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_long(tier, 1)
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(_: int, __: int, ___: int) -> bool:
        hangs.set()
        goes_on.wait(60)
        return False

    forget_cached(location(tier, name_of(1)).path)
    monkeypatch.setattr("kvtier.tiers.nvme.segments.copy_cached", lambda *_: None)
    monkeypatch.setattr("kvtier.tiers.nvme.segments.warm", hang)
    into = bytearray(LONG)
    result = await read(tier, 1, into, timeout_s=0.3)
    assert result.status is GetStatus.TIMEOUT

    async def is_hung() -> bool:
        assert not (await read(tier, 1, into, timeout_s=0.3)).is_hit
        return hangs.is_set()

    await eventually_async(is_hung, 60.0, "a thread to hang in the disk")
    goes_on.set()
    monkeypatch.undo()
    other = bytearray(LONG)

    async def is_well() -> bool:
        return (await read(tier, 1, other)).is_hit

    await eventually_async(is_well, 30.0, "the tier to read again")
    assert other == payload_of(1, LONG)
    assert into == bytes(LONG)


async def test_a_segment_that_is_deleted_is_kept_by_no_mapping(
    tier: NvmeTier, tmp_path: Path
) -> None:
    await put_long(tier, *range(12))
    for n in range(12):
        assert (await read(tier, n, bytearray(LONG))).is_hit
    before = segments(tmp_path)
    assert before
    await tier.drop(ByNames(tuple(map(name_of, range(12)))), time.monotonic() + 30)
    await put_long(tier, *range(20, 40))

    async def are_gone() -> bool:
        return not set(before[:-1]) & set(segments(tmp_path))

    await eventually_async(are_gone, 30.0, "empty segments to be deleted")
    assert not is_mapped(".segment")

"""The NVMe tier from start to start: what comes back, what a damaged or foreign directory does."""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.core.frame import FrameName
from kvtier.errors import BackendError, CallerError, ConfigError, FrameFault, UnavailableError
from kvtier.ports import (
    BlockOwner,
    ByNames,
    ByScope,
    GetRequest,
    GetStatus,
    PutRequest,
    PutStatus,
    RemovalCause,
)
from kvtier.tiers.nvme.catalog import Catalog
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.types import ScopeId
from tests.harness.processes import Launch, ProcessRunner
from tests.harness.rights import requires_tmpfs, run_command
from tests.harness.tmpfs import SmallTmpfs
from tests.harness.waiting import eventually, eventually_async
from tests.support.nvme_directory import (
    MIB,
    du,
    fill,
    flip,
    generation,
    held,
    index,
    segments,
    small,
)
from tests.tiers.contract import (
    bytes_of,
    get,
    get_bytes,
    get_status,
    name_of,
    payload_of,
    put,
    put_of,
    soon,
)

BLOCKS = range(200)


async def filled(directory: Path, blocks: range = BLOCKS) -> None:
    """A tier that had these blocks and was closed."""
    tier = await NvmeTier.open(small(directory))
    await fill(tier, blocks)
    await tier.close()


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    await filled(tmp_path)
    tier = await NvmeTier.open(small(tmp_path))
    assert tier.stats().blocks == len(BLOCKS)
    assert sorted(n.key for n in tier.names()) == sorted(name_of(n).key for n in BLOCKS)
    assert await held(tier, BLOCKS) == len(BLOCKS)
    assert await put(tier, put_of(3), put_of(3, version=1)) == [
        PutStatus.DUPLICATE,
        PutStatus.DIVERGENT,
    ]
    await tier.close()


async def test_writer_and_scope_outlive_a_restart_and_so_does_a_drop(tmp_path: Path) -> None:
    tier = await NvmeTier.open(small(tmp_path))
    scopes = [ScopeId("a"), ScopeId("tenant/../\n\0é"), ScopeId("\ud800")]
    requests = [
        PutRequest(name_of(n), payload_of(n), BlockOwner(2**64 - 1, scope))
        for n, scope in enumerate(scopes)
    ]
    await put(tier, *requests)
    assert await tier.drop(ByScope(scopes[0]), soon()) == 1
    await tier.close()
    tier = await NvmeTier.open(small(tmp_path))
    assert await get_status(tier, name_of(0)) is GetStatus.MISS
    for n in (1, 2):
        result = await get(tier, name_of(n))
        assert result.scope == scopes[n]
        assert result.header is not None
        assert result.header.writer_id == 2**64 - 1
    await tier.close()


async def test_writing_goes_on_in_the_segment_in_which_it_ended(tmp_path: Path) -> None:
    for start in range(0, 40, 4):
        tier = await NvmeTier.open(small(tmp_path))
        await fill(tier, range(start, start + 4))
        await tier.close()
    assert len(segments(tmp_path)) == 1
    tier = await NvmeTier.open(small(tmp_path))
    assert await held(tier, range(40)) == 40
    await tier.close()


async def test_the_cap_of_the_first_start_is_remembered_and_a_lower_one_is_kept_at_once(
    tmp_path: Path,
) -> None:
    await filled(tmp_path, range(1000))
    tier = await NvmeTier.open(NvmeConfig(tmp_path))
    assert tier.stats().bytes_max == 8 * MIB
    assert await held(tier, range(1000)) == 1000
    await tier.close()
    tier = await NvmeTier.open(NvmeConfig(tmp_path, 4 * MIB))
    assert du(tmp_path) <= 4 * MIB
    assert 0 < await held(tier, range(1000)) < 1000
    assert await get_bytes(tier, name_of(999)) == payload_of(999)
    assert await get_status(tier, name_of(0)) is GetStatus.MISS
    await tier.close()


async def test_without_a_cap_most_of_what_is_free_is_taken(tmp_path: Path) -> None:
    tier = await NvmeTier.open(NvmeConfig(tmp_path, free_share=0.01))
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    assert 0.005 * free < tier.stats().bytes_max < 0.02 * free
    await tier.close()


async def test_a_cap_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        await NvmeTier.open(NvmeConfig(tmp_path, 1000))
    with pytest.raises(CallerError):
        NvmeConfig(tmp_path, 8 * MIB, segment_bytes=100_000)


async def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    tier = await NvmeTier.open(small(tmp_path))
    with pytest.raises(UnavailableError, match="in use by another process"):
        await NvmeTier.open(small(tmp_path))
    await fill(tier, range(3))
    await tier.close()
    again = await NvmeTier.open(small(tmp_path))
    assert await held(again, range(3)) == 3
    await again.close()


async def test_a_second_process_on_the_directory_refuses_with_one_line(
    tmp_path: Path, processes: ProcessRunner
) -> None:
    tier = await NvmeTier.open(small(tmp_path / "tier"))
    program = (
        "import asyncio, sys; from pathlib import Path; from kvtier.errors import KvtierError;"
        "from kvtier.tiers.nvme.tier import NvmeTier; from kvtier.tiers.nvme.layout import *\n"
        "try: asyncio.run(NvmeTier.open(NvmeConfig(Path(sys.argv[1]))))\n"
        "except KvtierError as error: print(error); sys.exit(3)"
    )
    argv = (sys.executable, "-c", program, str(tmp_path / "tier"))
    second = processes.spawn(Launch("second", argv))
    assert second.wait(40) == 3
    lines = second.log_text().splitlines()[1:]
    assert len(lines) == 1
    assert "in use by another process" in lines[0]
    await tier.close()


@pytest.mark.parametrize("damage", ["flipped", "empty", "gone"])
async def test_a_damaged_manifest_starts_the_tier_cold_and_leaves_nothing_behind(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(tmp_path)
    (manifest,) = index(tmp_path).glob("MANIFEST-*")
    if damage == "flipped":
        flip(manifest, manifest.stat().st_size // 2, 255)
    elif damage == "empty":
        manifest.write_bytes(b"")
    else:
        manifest.unlink()
    before = generation(tmp_path)
    tier = await NvmeTier.open(small(tmp_path))
    assert "starts cold" in caplog.text
    assert tier.stats().blocks == 0
    assert generation(tmp_path) != before
    assert not segments(tmp_path)
    await fill(tier, BLOCKS)
    assert await held(tier, BLOCKS) == len(BLOCKS)
    await tier.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"format": 1}',
        b"\xff\xfe",
        "other format",
        "other generation",
        "sizes",
    ],
)
async def test_a_state_of_another_release_or_of_nobody_starts_the_tier_cold(
    tmp_path: Path, content: bytes | str
) -> None:
    await filled(tmp_path)
    state = tmp_path / "state.json"
    if isinstance(content, bytes):
        state.write_bytes(content)
    else:
        changes: dict[str, dict[str, object]] = {
            "other format": {"format": 2},
            "other generation": {"generation": "../../etc"},
            "sizes": {"segment_bytes": 2**40},
        }
        state.write_text(json.dumps(json.loads(state.read_text()) | changes[content]))
    tier = await NvmeTier.open(small(tmp_path))
    assert tier.stats().blocks == 0
    assert generation(tmp_path).exists()
    await fill(tier, range(10))
    await tier.close()
    tier = await NvmeTier.open(small(tmp_path))
    assert await held(tier, range(10)) == 10
    await tier.close()


async def test_foreign_files_are_left_alone_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    directory = tmp_path / "tier"
    await filled(directory)
    (directory / "lost+found").mkdir()
    (directory / "generation-0000000000000000").symlink_to(outside)
    (directory / "notes").write_text("mine")
    inside = generation_of(directory) / "segments"
    (inside / "00000000000000ff.segment").symlink_to(outside / "precious")
    (inside / "ff.segment").write_bytes(b"not ours")
    tier = await NvmeTier.open(small(directory))
    assert await held(tier, BLOCKS) == len(BLOCKS)
    await fill(tier, range(1000, 1400))
    await tier.close()
    assert (outside / "precious").read_bytes() == b"precious"
    assert (directory / "notes").read_text() == "mine"
    assert (inside / "ff.segment").read_bytes() == b"not ours"


def entries(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def generation_of(directory: Path) -> Path:
    return next(p for p in directory.glob("generation-*") if not p.is_symlink())


async def test_a_state_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendError):
        await NvmeTier.open(small(tmp_path / "tier"))
    assert (tmp_path / "elsewhere").read_text() == "{}"


async def test_files_are_the_owners_alone_and_no_name_from_outside_reaches_a_path(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        tier = await NvmeTier.open(small(tmp_path / "tier"))
    finally:
        os.umask(before)
    owner = BlockOwner(1, ScopeId("../../../etc/passwd"))
    await put(tier, PutRequest(name_of(1), b"x", owner))
    await tier.close()
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    assert generation(tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    for path in segments(tmp_path / "tier"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert entries(tmp_path) == {"tier"}
    assert {entry.split("-")[0] for entry in entries(tmp_path / "tier")} == {
        "LOCK",
        "state.json",
        "generation",
    }


async def test_a_flipped_bit_in_the_index_costs_the_blocks_around_it_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = range(2000)
    tier = await NvmeTier.open(small(tmp_path, 32 * MIB, MIB))
    await fill(tier, blocks, 64)
    await tier.close()
    table = max(index(tmp_path).glob("*.sst"), key=lambda path: path.stat().st_size)
    flip(table, table.stat().st_size // 3, 4)
    tier = await NvmeTier.open(small(tmp_path, 32 * MIB, MIB))
    assert "the index is damaged" in caplog.text
    left = await held(tier, blocks, 64)
    assert 1500 < left < 2000
    assert tier.stats().corrupt == {}
    await fill(tier, range(5000, 5100), 64)
    await tier.close()
    tier = await NvmeTier.open(small(tmp_path, 32 * MIB, MIB))
    assert tier.stats().blocks == left + 100
    await tier.close()


async def test_flipped_bits_and_cut_segments_are_misses_after_a_restart(tmp_path: Path) -> None:
    await filled(tmp_path)
    first, *_, last = segments(tmp_path)
    for at in range(0, first.stat().st_size, 10_000):
        flip(first, at)
    os.truncate(last, 5000)  # within the second frame
    tier = await NvmeTier.open(small(tmp_path))
    assert 0 < await held(tier, BLOCKS) < len(BLOCKS)
    stats = tier.stats()
    assert stats.corrupt[FrameFault.PAYLOAD_CHECKSUM] > 0
    assert stats.corrupt[FrameFault.SHORT] > 0
    assert stats.removals[RemovalCause.CORRUPT] == sum(stats.corrupt.values())
    await fill(tier, range(1000, 1100))
    assert await held(tier, range(1000, 1100)) == 100
    await tier.close()


async def test_a_segment_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    await filled(tmp_path)
    segments(tmp_path)[0].unlink()
    tier = await NvmeTier.open(small(tmp_path))
    left = await held(tier, BLOCKS)
    assert 0 < left < len(BLOCKS)
    assert tier.stats().blocks == left
    await tier.close()
    tier = await NvmeTier.open(small(tmp_path))
    assert tier.stats().blocks == left
    await tier.close()


@requires_tmpfs
async def test_what_the_index_says_of_segments_that_are_gone_is_never_read_in_new_ones(
    tmp_path: Path,
) -> None:
    """A kill that comes before the index has forgotten them, and after their ids would be free."""
    directory, killed = tmp_path / "tier", tmp_path / "killed"
    await filled(directory)
    for segment in segments(directory):
        segment.unlink()
    slow = replace(small(directory), save_s=1.0)
    tier = await NvmeTier.open(slow)
    await fill(tier, range(1000, 1200))
    shutil.copytree(directory, killed)  # what a kill leaves
    assert index(killed).exists()
    await tier.close()
    tier = await NvmeTier.open(small(killed))
    statuses = {await get_status(tier, name_of(n)) for n in BLOCKS}
    await tier.close()
    assert statuses == {GetStatus.MISS}


async def test_what_a_start_has_found_lost_is_gone_from_the_index_when_it_is_closed(
    tmp_path: Path,
) -> None:
    await filled(tmp_path)
    for segment in segments(tmp_path):
        segment.unlink()
    await (await NvmeTier.open(small(tmp_path))).close()
    catalog = Catalog(index(tmp_path), 8 * MIB)
    assert catalog.load().entries == {}
    catalog.close()


async def test_a_read_only_file_system_is_refused_with_one_line(tmp_path: Path) -> None:
    directory = tmp_path / "small"
    with SmallTmpfs(directory, 16 * MIB):
        await filled(directory)
        run_command("mount", "-o", "remount,ro", str(directory))
        with pytest.raises(BackendError) as caught:
            await NvmeTier.open(small(directory))
        assert len(str(caught.value).splitlines()) == 1
        run_command("mount", "-o", "remount,rw", str(directory))
        tier = await NvmeTier.open(small(directory))
        assert await held(tier, BLOCKS) == len(BLOCKS)
        await tier.close()


async def test_du_never_says_more_than_the_cap_and_stats_say_what_du_says(tmp_path: Path) -> None:
    tier = await NvmeTier.open(small(tmp_path, 6 * MIB, 128 << 10))
    for start in range(0, 12_000, 200):
        size = (0, 100, 3000, 20_000)[start // 200 % 4]
        count = 200 if size < 10_000 else 20
        numbers = range(start, start + count)
        assert set(await put(tier, *[put_of(n, size) for n in numbers])) == {PutStatus.STORED}
        await tier.get_many([GetRequest(name_of(n)) for n in numbers[::7]], soon())
        await tier.drop(ByNames(tuple(name_of(n) for n in numbers[::5])), soon())
        assert du(tmp_path) <= 6 * MIB
        assert tier.stats().bytes <= 6 * MIB
    await tier.settle(soon())
    assert tier.stats().removals[RemovalCause.EVICTED] > 1000
    assert abs(tier.stats().bytes - du(tmp_path)) <= 256 << 10
    assert tier.health().disk.bytes_moved > 0
    await tier.close()


async def test_a_tier_whose_blocks_were_all_dropped_gives_its_disk_back(tmp_path: Path) -> None:
    tier = await NvmeTier.open(small(tmp_path))
    await fill(tier, range(1000))
    assert len(segments(tmp_path)) > 10
    assert await tier.drop(ByNames(tuple(tier.names())), soon()) == 1000
    await asyncio.to_thread(
        eventually, lambda: len(segments(tmp_path)) <= 1, 30, "empty segments are deleted"
    )
    await tier.close()


async def test_an_open_that_is_cancelled_leaves_the_directory_to_the_next_one(
    tmp_path: Path,
) -> None:
    await filled(tmp_path)
    opening = asyncio.ensure_future(NvmeTier.open(small(tmp_path)))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening

    async def opened() -> NvmeTier | None:
        try:
            return await NvmeTier.open(small(tmp_path))
        except UnavailableError:
            return None

    tier = await eventually_async(opened, 30, "the directory is free")
    assert tier is not None
    assert await held(tier, BLOCKS) == len(BLOCKS)
    await tier.close()


@pytest.mark.timeout(120)
async def test_a_hundred_thousand_small_blocks(tmp_path: Path) -> None:
    tier = await NvmeTier.open(small(tmp_path, 256 * MIB, 8 * MIB))
    count, size = 100_000, 100
    for start in range(0, count, 4000):
        requests = [
            PutRequest(name_of(n), n.to_bytes(4, "little") * (size // 4), BlockOwner(7))
            for n in range(start, start + 4000)
        ]
        results = await tier.put_many(requests, soon())
        assert all(result.status is PutStatus.STORED for result in results)
    assert tier.stats().blocks == count
    await tier.close()
    tier = await NvmeTier.open(small(tmp_path, 256 * MIB, 8 * MIB))
    assert tier.stats().blocks == count
    sample = range(0, count, 97)
    gets = [GetRequest(name_of(n), memoryview(bytearray(size)), size) for n in sample]
    for n, result in zip(sample, await tier.get_many(gets, soon()), strict=True):
        assert bytes_of(result) == n.to_bytes(4, "little") * (size // 4)
    assert du(tmp_path) <= 256 * MIB
    await tier.close()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "drop", "restart", "settle"]),
        st.integers(0, 15),
        st.integers(0, 2),
        st.sampled_from([0, 5, 900, 30_000, 70_000]),
    ),
    max_size=60,
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(CALLS, st.integers(0, 2**32))
async def test_over_restarts_it_gives_what_a_dict_gives_or_a_miss(
    tmp_path: Path, calls: list[tuple[str, int, int, int]], salt: int
) -> None:
    directory = tmp_path / f"{salt}-{len(entries(tmp_path))}"
    config = small(directory, 2 * MIB, 128 << 10)
    tier = await NvmeTier.open(config)
    model: dict[FrameName, bytes] = {}
    for call, number, version, size in calls:
        name = name_of(number)
        offered = payload_of(number, size, version)
        if call == "put":
            (status,) = await put(tier, put_of(number, size, version))
            if status is PutStatus.STORED:
                model[name] = offered
            else:
                same = model[name] == offered
                assert status is (PutStatus.DUPLICATE if same else PutStatus.DIVERGENT)
        elif call == "get":
            found = await get_bytes(tier, name)
            assert found == (model.pop(name, None) if found is None else model[name]) or not found
        elif call == "drop":
            await tier.drop(ByNames((name,)), soon())
            model.pop(name, None)
        elif call == "settle":
            await tier.settle(soon())
        else:
            await tier.close()
            tier = await NvmeTier.open(config)
        assert set(tier.names()) <= set(model)
        assert tier.stats().bytes <= 2 * MIB
    for name in tier.names():
        assert await get_bytes(tier, name) == model[name]
    await tier.close()

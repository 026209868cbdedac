"""The arena when processes race, stop, die, or are refused memory (matrix rows 2, 24, 25, 28)."""

import asyncio
import fcntl
import mmap
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import BackendError
from kvtier.ports import BlockOwner, GetRequest, GetStatus, PutRequest, PutStatus
from kvtier.tiers.arena.client import connect_arena
from kvtier.tiers.arena.memory import Sealing, attach, create, spare_bytes
from tests.faults.arena_process import (
    CLIENT,
    CONFIG,
    CRASH_POINTS,
    PAYLOAD_BYTES,
    count_reads,
    described,
    put_request,
    version_of,
)
from tests.harness.processes import REPOSITORY, Launch, Process, ProcessRunner, python_module
from tests.harness.waiting import eventually, eventually_async
from tests.tiers.arena_support import Node, node, on_thread
from tests.tiers.contract import get_bytes, name_of, soon

WAIT_S = 30.0


def launched(processes: ProcessRunner, name: str, role: str, *arguments: object) -> Process:
    argv = python_module("tests.faults.arena_process", role, *map(str, arguments))
    return processes.spawn(Launch(name, argv, directory=REPOSITORY))


def said(process: Process, text: str) -> str:
    """Wait until a line with this text is in its log, and return that line."""

    def line() -> str:
        return next((found for found in process.log_text().splitlines() if text in found), "")

    return eventually(line, WAIT_S, f"{process.name} says {text!r}")


def test_readers_of_other_processes_never_see_wrong_bytes_while_slots_are_rewritten(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    path = tmp_path / "arena.sock"
    said(launched(processes, "store", "churn", path), "ready")
    other = launched(processes, "reader", "read", path, 150)
    client = connect_arena(path, CLIENT)
    hits, misses, wrong, versions = count_reads(client, 150)
    client.close()
    assert wrong == 0
    assert hits > 0
    assert misses > 0
    assert versions > 1
    line = said(other, "hits")
    assert other.wait(WAIT_S) == 0
    assert " wrong 0 " in line
    assert not line.startswith("hits 0 ")


def test_a_killed_store_costs_misses_and_a_new_one_is_found(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    path = tmp_path / "arena.sock"
    store = launched(processes, "store", "store", path)
    said(store, "ready")
    client = connect_arena(path, CLIENT)
    assert client.put_many([put_request(10, 3)], soon())[0].status is PutStatus.STORED
    store.kill()
    # What the dead store left in memory is still whole, or not given.
    for number, version in ((0, 0), (10, 3)):
        (result,) = client.get_many([GetRequest(name_of(number), None, PAYLOAD_BYTES)])
        if result.payload is not None:
            assert version_of(number, result.payload) == version
    (lost,) = client.put_many([put_request(11, 1)], soon())
    assert lost.status is PutStatus.ERROR
    assert not client.is_attached
    client.close()
    path.unlink()
    store.restart()
    eventually(lambda: store.log_text().count("ready") == 2, WAIT_S, "the store serves again")
    again = connect_arena(path, CLIENT)
    results = again.get_many([GetRequest(name_of(n)) for n in (0, 10)])
    assert [result.status for result in results] == [GetStatus.HIT, GetStatus.MISS]
    assert again.put_many([put_request(10, 4)], soon())[0].status is PutStatus.STORED
    again.close()


@pytest.mark.timeout(180)
def test_a_store_killed_at_any_step_of_a_put_leaves_whole_blocks_and_misses_only(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    for point in CRASH_POINTS:
        for side in ("before", "after"):
            path = tmp_path / f"{side}-{point}.sock"
            store = launched(processes, f"{side}-{point}", "crash", path, side, point)
            said(store, "ready")
            client = connect_arena(path, CLIENT)
            versions = dict.fromkeys(range(4), 0)
            for version in range(1, 40):
                numbers = [(4 * version + i) % 40 + 100 for i in range(4)]
                results = client.put_many([put_request(n, version) for n in numbers], soon())
                versions |= {
                    n: version
                    for n, result in zip(numbers, results, strict=True)
                    if result.status is PutStatus.STORED
                }
                if not client.is_attached:
                    break
            assert store.wait(WAIT_S) == -signal.SIGKILL, f"{side} {point} was not reached"
            statuses = [result.status for result in results]
            assert set(statuses) <= {PutStatus.STORED, PutStatus.ERROR}
            assert statuses[-1] is PutStatus.ERROR  # a put is answered part by part
            seen = client.get_many([GetRequest(name_of(n), None, PAYLOAD_BYTES) for n in versions])
            for number, result in zip(versions, seen, strict=True):
                assert result.status in {GetStatus.HIT, GetStatus.MISS}
                if result.payload is not None:
                    assert version_of(number, result.payload) == versions[number]
            # What was being put is whole, or not there.
            seen = client.get_many([GetRequest(name_of(n), None, PAYLOAD_BYTES) for n in numbers])
            for number, result in zip(numbers, seen, strict=True):
                if result.payload is not None:
                    assert version_of(number, result.payload) in {version, versions.get(number)}
            client.close()


async def filled(store: Node) -> None:
    await store.tier.put_many([put_request(n, 0) for n in range(4)], soon())


async def test_a_killed_client_leaves_no_lease_and_no_reservation(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        client = launched(processes, "client", "hold", store.path)
        await on_thread(lambda: said(client, "holding 4 leases 2 reservations"))
        assert store.tier.stats().blocks_pinned == 4
        assert store.tier.stats().blocks_reserved == 2
        await on_thread(client.kill)

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the session ends")
        stats = store.tier.stats()
        assert (stats.blocks_pinned, stats.blocks_reserved) == (0, 0)
        assert store.tier.held(name_of(100)) is None
        assert await get_bytes(store.tier, name_of(0)) == described(0, 0)


async def test_a_writer_stopped_in_the_middle_of_a_put_blocks_no_slot_and_harms_no_block(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        go = tmp_path / "go"
        writer = launched(processes, "writer", "stall", store.path, go)
        await on_thread(lambda: said(writer, "begun"))
        await on_thread(writer.freeze)

        async def given_up() -> bool:
            return store.server.stats().reservations_expired == 1

        await eventually_async(given_up, WAIT_S, "its slots are taken back")
        assert store.tier.stats().blocks_reserved == 0
        # What had come whole is there. Its slots go to others, and keep what those put there.
        assert await get_bytes(store.tier, name_of(200)) == described(200, 1)
        for start in range(300, 348, 8):
            await store.tier.put_many([put_request(n, 1) for n in range(start, start + 8)], soon())
        before = {name: await get_bytes(store.tier, name) for name in store.tier.names()}
        go.touch()
        writer.thaw()
        line = await on_thread(lambda: said(writer, "put"))
        assert line == "put 7 ['stored', 'stored']"
        assert await on_thread(lambda: writer.wait(WAIT_S)) == 0
        for name, payload in before.items():
            assert await get_bytes(store.tier, name) in {payload, None}
        assert await get_bytes(store.tier, name_of(201)) == described(201, 1)
        assert store.tier.stats().blocks_reserved == 0


async def test_a_writer_killed_in_the_middle_of_a_put_leaves_nothing_behind(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        writer = launched(processes, "writer", "stall", store.path, tmp_path / "go")
        await on_thread(lambda: said(writer, "begun"))
        assert store.tier.stats().blocks_reserved == 2
        await on_thread(writer.kill)

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the session ends")
        assert store.tier.stats().blocks_reserved == 0
        assert store.tier.held(name_of(200)) is None
        other = await on_thread(lambda: store.connect(CLIENT))
        put = await on_thread(lambda: other.put_many([put_request(200, 2)], soon()))
        assert put[0].status is PutStatus.STORED
        assert await get_bytes(store.tier, name_of(200)) == described(200, 2)
        other.close()


async def test_a_buffer_that_changes_while_it_is_put_gives_no_block_that_is_not_whole(
    tmp_path: Path,
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        client = await on_thread(lambda: store.connect(CLIENT))
        buffer = bytearray(described(1, 1))
        is_over = threading.Event()

        def scribble() -> None:
            words = np.frombuffer(buffer, np.uint64)
            while not is_over.is_set():
                words += 1

        def put_all() -> list[PutStatus]:
            requests = [PutRequest(name_of(n), buffer, BlockOwner(1)) for n in range(100, 108)]
            return [
                result.status
                for _ in range(20)
                for request in requests
                for result in client.put_many([request], soon())
            ]

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        try:
            outcomes = await on_thread(put_all)
        finally:
            is_over.set()
            scribbler.join()
        allowed = {PutStatus.STORED, PutStatus.CORRUPT, PutStatus.DIVERGENT, PutStatus.DUPLICATE}
        assert set(outcomes) <= allowed
        assert client.is_attached
        # Of what was stored, its checksum is of its bytes.
        requests = [GetRequest(name_of(n), None, PAYLOAD_BYTES) for n in range(100, 108)]
        seen = [result.status for result in client.get_many(requests)]
        assert set(seen) <= {GetStatus.HIT, GetStatus.MISS}
        assert not store.tier.stats().corrupt
        assert store.tier.stats().blocks_reserved == 0
        client.close()


async def test_a_put_that_is_broken_off_gives_no_bytes_to_the_next(tmp_path: Path) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        client = await on_thread(lambda: store.connect(CLIENT))

        def broken_off() -> None:
            with pytest.raises(KeyboardInterrupt):
                client.put_many([put_request(100, 1), put_request(101, 1)], soon())

        with pytest.MonkeyPatch.context() as patched:

            def interrupted(*_: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(client, "give", interrupted)
            await on_thread(broken_off)
        assert not client.is_attached
        again = await on_thread(lambda: client.put_many([put_request(102, 1)], soon()))
        assert again[0].status is PutStatus.ERROR

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the session ends")
        assert [store.tier.held(name_of(n)) for n in (100, 101, 102)] == [None] * 3
        assert store.tier.stats().blocks_reserved == 0


async def test_a_stopped_writer_whose_reservation_expired_changes_nothing_when_it_goes_on(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        go = tmp_path / "go"
        writer = launched(processes, "writer", "late", store.path, go)
        await on_thread(lambda: said(writer, "reserved True"))
        await on_thread(writer.freeze)

        async def quarantined() -> bool:
            return store.server.stats().quarantined == 1

        await eventually_async(quarantined, 30, "the reservation is in quarantine")
        # The arena is filled and emptied around the quarantined slot; nobody else gets it.
        for start in range(300, 348, 8):
            results = await store.tier.put_many(
                [put_request(n, 1) for n in range(start, start + 8)], soon()
            )
            assert {result.status for result in results} == {PutStatus.STORED}
        published = store.tier.names()
        before = {name: await get_bytes(store.tier, name) for name in published}
        assert store.server.stats().quarantined == 1
        go.touch()
        writer.thaw()
        line = await on_thread(lambda: said(writer, "commit"))
        assert line == "commit error expired"
        assert await on_thread(lambda: writer.wait(WAIT_S)) == 0
        after = {name: await get_bytes(store.tier, name) for name in store.tier.names()}
        assert after == before
        assert store.server.stats().quarantined == 0
        assert store.tier.stats().blocks_reserved == 0


async def test_a_stopped_reader_of_a_lease_does_not_stop_the_store(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        client = launched(processes, "client", "hold", store.path)
        await on_thread(lambda: said(client, "holding"))
        await on_thread(client.freeze)
        results = await store.tier.put_many([put_request(n, 1) for n in range(300, 308)], soon())
        assert {result.status for result in results} == {PutStatus.STORED}
        assert await get_bytes(store.tier, name_of(0)) == described(0, 0)
        client.send(signal.SIGKILL)

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the session ends")
        await on_thread(lambda: client.wait(WAIT_S))


async def test_nobody_but_the_store_can_write_cut_or_grow_an_arena(tmp_path: Path) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)
        client = await on_thread(lambda: store.connect(CLIENT))
        memory = client.memory
        for shared in (memory.directory, memory.slots):
            size = shared.view.nbytes
            assert shared.view.readonly
            with pytest.raises(PermissionError):
                os.ftruncate(shared.fd, 4096)
            with pytest.raises(PermissionError):
                os.ftruncate(shared.fd, 2 * size)
            with pytest.raises(PermissionError):
                os.pwrite(shared.fd, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(shared.fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            again = os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            os.close(again)
        with pytest.raises(PermissionError):
            os.ftruncate(memory.segment.fd, 4096)
        assert await get_bytes(store.tier, name_of(0)) == described(0, 0)
        client.close()


@pytest.mark.parametrize("sealing", list(Sealing))
def test_memory_that_could_be_cut_off_is_refused(sealing: Sealing) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(BackendError):
        attach(fd, sealing)
    with pytest.raises(OSError, match="Bad file"):
        fcntl.fcntl(fd, fcntl.F_GETFD)  # it was closed


def test_memory_that_others_write_is_not_taken_for_an_arena() -> None:
    segment = create("segment", 4096, Sealing.OTHERS_WRITE)
    with pytest.raises(BackendError):
        attach(os.dup(segment.fd), Sealing.OWNER_WRITES)
    segment.close()
    segment.close()


def test_an_arena_larger_than_the_machine_is_refused_before_a_page_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The real call would take all memory there is, and the kernel end other processes.
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _fd, _offset, length: taken.append(length))
    with pytest.raises(BackendError, match="can be spared"):
        create("large", spare_bytes() + (1 << 30), Sealing.OWNER_WRITES)
    assert taken == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemFree: 1 kB\nMemAvailable: 1000 kB\n"}, 1024_000 * 9 // 10),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "proc/self/cgroup": "0::/pod/app\n",
                "sys/fs/cgroup/pod/app/memory.max": "5000\n",
                "sys/fs/cgroup/pod/app/memory.current": "1000\n",
            },
            3600,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1000 kB\n",
                "proc/self/cgroup": "4:cpu,memory:/x\n1:cpu:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
            },
            1800,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1 kB\n",
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "max\n",
            },
            921,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 1 kB\n",
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "10\n",
                "sys/fs/cgroup/memory.current": "11\n",
            },
            0,
        ),
    ],
)
def test_what_can_be_spared_is_the_least_of_machine_and_cgroup(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert spare_bytes(tmp_path) == expected


def test_an_arena_that_its_process_may_not_have_is_an_error_and_no_signal(
    processes: ProcessRunner,
) -> None:
    process = launched(processes, "small", "small", 64 << 20)
    said(process, "refused BackendError")
    assert process.wait(WAIT_S) == 0


async def test_memory_that_runs_out_while_a_session_opens_refuses_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, arena=CONFIG) as store:
        await filled(store)

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(Exception, match="refused"):
                await on_thread(store.connect)
        assert store.server.stats().refused_sessions == 1
        client = await on_thread(store.connect)
        assert client.contains([name_of(0)]) == [True]
        client.close()


async def test_descriptors_are_given_back(tmp_path: Path) -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with node(tmp_path) as store:
        (await on_thread(store.connect)).close()
        await asyncio.sleep(0)
        before = open_descriptors()
        for _ in range(5):
            (await on_thread(store.connect)).close()

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the sessions end")
        assert open_descriptors() <= before

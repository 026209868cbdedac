"""Copies out of mapped files: against their twin, and what a failing disk does to the process."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.tiers.nvme import cached

PAGE = mmap.PAGESIZE
SIZE = 5 << 20
DATA = np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mapped") / "file"
    path.write_bytes(DATA)
    return path


def room(size: int) -> memoryview:
    return memoryview(bytearray(size))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offset=st.integers(0, SIZE - 1) | st.sampled_from([0, PAGE, 2 << 20, (2 << 20) - 64]),
    head_size=st.sampled_from([0, 1, 128, 4096]),
    body_size=st.integers(0, 3000) | st.sampled_from([1 << 20, 2 << 20]),
)
def test_a_mapped_copy_is_what_its_twin_reads(
    file: Path, offset: int, head_size: int, body_size: int
) -> None:
    offset = min(offset, SIZE - head_size - body_size)
    if head_size + body_size == 0:
        return
    descriptor = os.open(file, os.O_RDONLY)
    try:
        head, body = room(head_size), room(body_size)
        found = _native.copy_from_file(descriptor, offset, head, body)
        assert bytes(head) + bytes(body) == DATA[offset : offset + head_size + body_size]
        assert found == _native.checksum(body)
        other_head, other_body = room(head_size), room(body_size)
        asked = _native.copy_from_file_cached(descriptor, offset, other_head, other_body)
        if asked is not None:  # the kernel may have given a page away meanwhile
            assert (asked, other_head, other_body) == (found, head, body)
        if head_size:
            twin_head, twin_body = room(head_size), room(body_size)
            read = cached.read_cached(descriptor, offset, twin_head, twin_body)
            if read is not None:
                assert (read, twin_head, twin_body) == (found, head, body)
    finally:
        os.close(descriptor)


def test_what_was_warmed_is_copied_without_the_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    body = room(2 << 20)
    assert _native.warm_from_file(descriptor, 4096, body.nbytes)
    found = _native.copy_from_file_cached(descriptor, 4096, room(0), body)
    assert found == _native.checksum(DATA[4096 : 4096 + body.nbytes])
    os.close(descriptor)


def test_a_file_that_was_cut_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    body = room(2 << 20)
    os.truncate(path, (1 << 20) + 100)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output") as caught:
            _native.copy_from_file(descriptor, 0, room(128), body)
        assert caught.value.errno == errno.EIO
        assert _native.copy_from_file_cached(descriptor, 0, room(128), body) is None
    assert not _native.warm_from_file(descriptor, 0, 2 << 20)
    assert not _native.warm_from_file(descriptor, 64 << 20, 1)
    half = room(1 << 20)
    found = _native.copy_from_file(descriptor, 0, room(0), half)
    assert found == _native.checksum(DATA[: 1 << 20])
    os.close(descriptor)


def test_files_that_are_cut_under_many_threads_are_errors_on_each(tmp_path: Path) -> None:
    """Each thread's fault is its own: some copies fail while others succeed."""
    outcomes: list[set[str]] = [set() for _ in range(4)]

    def work(number: int) -> None:
        path = tmp_path / str(number)
        path.write_bytes(DATA[: 1 << 20])
        descriptor = os.open(path, os.O_RDONLY)
        for _ in range(20):
            _native.copy_from_file(descriptor, 0, room(0), room(1 << 20))
            outcomes[number].add("whole")
            os.truncate(path, PAGE)
            try:
                _native.copy_from_file(descriptor, 0, room(0), room(1 << 20))
            except OSError as error:
                outcomes[number].add(errno.errorcode[error.errno or 0])
            path.write_bytes(DATA[: 1 << 20])
        os.close(descriptor)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [{"whole", "EIO"}] * 4


def test_descriptors_that_cannot_be_mapped_are_errors(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    for descriptor in (reading, writing, 1_000_000):
        with pytest.raises(OSError, match=r"device|descriptor|denied"):
            _native.copy_from_file(descriptor, 0, room(0), room(10))
        assert not _native.warm_from_file(descriptor, 0, 10)
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1, 0, bytearray(1), bytearray(1)), ValueError),
        ((0, -1, bytearray(1), bytearray(1)), ValueError),
        ((0, 2**63, bytearray(1), bytearray(1)), ValueError),
        ((0, 0, bytearray(), bytearray()), ValueError),
        ((0, 0, b"x", bytearray(1)), ValueError),
        ((0, 0, bytearray(1), b"x"), ValueError),
        (("0", 0, bytearray(1), bytearray(1)), TypeError),
        ((0, 0, None, bytearray(1)), TypeError),
        ((0, 0, bytearray(1), memoryview(bytearray(8))[::2]), ValueError),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    arguments: tuple[int, int, bytearray, bytearray], error: type[Exception]
) -> None:
    for copy in (_native.copy_from_file, _native.copy_from_file_cached):
        with pytest.raises(error):
            copy(*arguments)


def test_destinations_that_overlap_are_refused() -> None:
    area = room(100)
    with pytest.raises(ValueError, match="overlaps"):
        _native.copy_from_file(0, 0, area[:60], area[50:])


CHILD = """
import faulthandler, mmap, os, signal, sys
from kvtier import _native
path = sys.argv[1]
def cut_copy():
    descriptor = os.open(path, os.O_RDONLY)
    os.truncate(path, 4096)
    try:
        _native.copy_from_file(descriptor, 0, bytearray(0), bytearray(100_000))
    except OSError as error:
        print("guarded", error.errno, flush=True)
    os.close(descriptor)
    os.truncate(path, 1 << 20)
def foreign():
    descriptor = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(descriptor, 1 << 20, prot=mmap.PROT_READ)
    os.truncate(path, 4096)
    print("foreign", flush=True)
    print(mapped[500_000], flush=True)
{body}
"""


def child(path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """What became of a process that did this."""
    path.write_bytes(bytes(1 << 20))
    return subprocess.run(
        [sys.executable, "-c", CHILD.replace("{body}", body), str(path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def assert_killed(ended: subprocess.CompletedProcess[str]) -> None:
    """By SIGBUS; a sanitizer's own handler reports it and exits instead."""
    if _native.SANITIZED:
        assert ended.returncode != 0
    else:
        assert ended.returncode == -signal.SIGBUS


def test_a_foreign_bus_error_kills_as_before(tmp_path: Path) -> None:
    ended = child(tmp_path / "file", "cut_copy()\ncut_copy()\nforeign()")
    assert ended.stdout == f"guarded {errno.EIO}\n" * 2 + "foreign\n"
    assert_killed(ended)


def test_a_bus_error_that_somebody_sends_kills_as_before(tmp_path: Path) -> None:
    ended = child(tmp_path / "file", "cut_copy()\nos.kill(os.getpid(), signal.SIGBUS)\nforeign()")
    assert ended.stdout == f"guarded {errno.EIO}\n"
    assert_killed(ended)


def test_an_ignored_bus_error_is_ignored_as_before(tmp_path: Path) -> None:
    ended = child(
        tmp_path / "file",
        "signal.signal(signal.SIGBUS, signal.SIG_IGN)\ncut_copy()\n"
        "os.kill(os.getpid(), signal.SIGBUS)\nprint('alive')",
    )
    assert ended.stdout == f"guarded {errno.EIO}\nalive\n"
    assert ended.returncode == 0


@pytest.mark.skipif(_native.SANITIZED, reason="the sanitizer reports it itself")
@pytest.mark.parametrize(
    "body",
    [
        "faulthandler.enable()\ncut_copy()\nforeign()",
        "cut_copy()\nfaulthandler.enable()\ncut_copy()\nforeign()",
        "cut_copy()\nfaulthandler.enable()\nforeign()",
        "faulthandler.enable()\ncut_copy()\nfaulthandler.disable()\nfaulthandler.enable()\n"
        "cut_copy()\nforeign()",
    ],
    ids=["before", "between", "after", "again"],
)
def test_a_fault_handler_still_says_where_a_foreign_bus_error_was(
    tmp_path: Path, body: str
) -> None:
    ended = child(tmp_path / "file", body)
    assert ended.stdout == f"guarded {errno.EIO}\n" * body.count("cut_copy()") + "foreign\n"
    assert "Bus error" in ended.stderr
    assert "in foreign" in ended.stderr
    assert_killed(ended)


def test_a_handler_of_python_is_asked_of_others_only(tmp_path: Path) -> None:
    ended = child(
        tmp_path / "file",
        "signal.signal(signal.SIGBUS, lambda *_: print('heard', flush=True))\ncut_copy()\n"
        "signal.raise_signal(signal.SIGBUS)\ncut_copy()",
    )
    assert ended.stdout == f"guarded {errno.EIO}\nheard\nguarded {errno.EIO}\n"
    assert ended.returncode == 0

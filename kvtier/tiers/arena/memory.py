"""Shared memory by file descriptor: made once, sealed, mapped here, handed to others.

A memfd is preallocated to its last page, so that no process that maps it can meet SIGBUS, and
sealed against shrinking and growing. More than the machine (or the cgroup) can spare is refused
before a page is taken: the kernel would end other processes to find the memory.
`Sealing.OWNER_WRITES` adds that nobody but the process that made it can ever map or write it
writable: what others get is read-only for good.
What must not live here: what the memory holds.
"""

import contextlib
import fcntl
import mmap
import os
from enum import Enum
from pathlib import Path

from kvtier.core.checks import require_integer
from kvtier.errors import BackendError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 0x01
_F_SEAL_SHRINK = 0x02
_F_SEAL_GROW = 0x04
_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_SHARED_BYTES_MAX = 1 << 46


class Sealing(Enum):
    """Who may write, besides the process that made the memory."""

    OWNER_WRITES = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
    OTHERS_WRITE = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW


class SharedMemory:
    """One mapping of sealed memory, and the descriptor it came from.

    `view` is the whole of it. Views that are still held when it is closed keep the mapping; the
    descriptor is closed in any case.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self._fd = fd
        self._mapping = mapping
        self.view = memoryview(mapping)

    @property
    def fd(self) -> int:
        """To be sent to another process; stays ours."""
        return self._fd

    def populate(self) -> None:
        """Fill this process's page tables now: a fault costs more than copying its page.

        Takes some 0.1 s a GiB. A hint, may do nothing.
        """
        # An older kernel does not know it: pages come as they are touched.
        with contextlib.suppress(OSError):
            self._mapping.madvise(
                _MADV_POPULATE_READ if self.view.readonly else _MADV_POPULATE_WRITE
            )

    def close(self) -> None:
        """Close the descriptor, and the mapping unless views of it are still held. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(BufferError):  # else they go when the last view goes
                self.view.release()
                self._mapping.close()


def create(name: str, size_bytes: int, sealing: Sealing) -> SharedMemory:
    """Make, preallocate and map zeroed memory. BackendError where the system has not that much."""
    require_integer("size_bytes", size_bytes, 1, _SHARED_BYTES_MAX)
    spare = spare_bytes()
    if size_bytes > spare:
        raise BackendError(f"{size_bytes} bytes of shared memory are wanted, {spare} can be spared")
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, _F_ADD_SEALS, sealing.value)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise BackendError(f"no {size_bytes} bytes of shared memory: {error}") from error
    memory = SharedMemory(fd, mapping)
    memory.populate()
    return memory


def attach(fd: int, sealing: Sealing) -> SharedMemory:
    """Map memory that came by descriptor: read-only where its owner writes, else writable.

    Takes the descriptor over. Refuses, with BackendError, what is not sealed as it must be.
    """
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if seals & sealing.value != sealing.value:
            raise BackendError("shared memory is not sealed as it must be")
        size = os.fstat(fd).st_size
        access = mmap.PROT_READ
        if sealing is Sealing.OTHERS_WRITE:
            access |= mmap.PROT_WRITE
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise BackendError(f"shared memory cannot be mapped: {error}") from error
    except BackendError:
        os.close(fd)
        raise
    memory = SharedMemory(fd, mapping)
    memory.populate()
    return memory


def spare_bytes(root: Path = Path("/")) -> int:
    """Nine tenths of what can be allocated now without taking from others, as the kernel says.

    The least of the machine's and the cgroup's (either version, own or as a container sees it).
    `root` is where /proc and /sys are.
    """
    limits = [_available_bytes(root / "proc/meminfo")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if not controllers:
            base = root / "sys/fs/cgroup"
            limits += [
                _left(folder / "memory.max", folder / "memory.current")
                for folder in (base / below, base)
            ]
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limits += [
                _left(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")
                for folder in (base / below, base)
            ]
    return max(0, min(limits)) * 9 // 10


def _available_bytes(meminfo: Path) -> int:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _SHARED_BYTES_MAX


def _left(limit: Path, used: Path) -> int:
    try:
        return int(_text(limit)) - int(_text(used) or 0)
    except ValueError:  # "max", or no such file
        return _SHARED_BYTES_MAX


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

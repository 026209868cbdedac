"""Small file systems that fill up: a tmpfs of a given size and number of inodes.

Needs the right to mount: mark tests with `requires_tmpfs`. What must not live here: read or write
errors other than a full disk (see `diskshim`).
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.rights import run_command

MOUNT_SOURCE = "kvtier-test-tmpfs"
_PIECE_BYTES = 64 << 10
_INODES_DEFAULT = 4096


@dataclass(frozen=True, slots=True)
class Space:
    """What is left of a file system."""

    free_bytes: int
    free_inodes: int


class SmallTmpfs:
    """A context manager: mounts a tmpfs on `path` (made if missing) and unmounts it at the end.

    Processes of the test see it, and those of network nodes that are made after it is mounted.
    """

    def __init__(self, path: Path, size_bytes: int, inodes_count: int = _INODES_DEFAULT) -> None:
        self.path = path
        self._options = f"size={size_bytes},nr_inodes={inodes_count},mode=0700"

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        target = str(self.path)
        run_command("mount", "-t", "tmpfs", "-o", self._options, MOUNT_SOURCE, target)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Lazy: a process under test that still has files open must not keep the mount in the tree.
        run_command("umount", "--lazy", str(self.path))

    def space(self) -> Space:
        """What is free now."""
        stats = os.statvfs(self.path)
        return Space(stats.f_bavail * stats.f_frsize, stats.f_favail)

    def fill(self, leave_bytes: int = 0) -> int:
        """Write a filler until at most `leave_bytes` (and a page) are free; return its size."""
        with (self.path / ".filler-bytes").open("ab", buffering=0) as filler:
            while (over := self.space().free_bytes - leave_bytes) > 0:
                piece = bytes(min(over, _PIECE_BYTES))
                try:
                    filler.write(piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
            return filler.tell()

    def fill_inodes(self, leave_count: int = 0) -> int:
        """Make empty files until at most `leave_count` inodes are free; return how many."""
        made = 0
        while self.space().free_inodes > leave_count:
            try:
                (self.path / f".filler-inode-{made}").touch(exist_ok=False)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
            made += 1
        return made

    def free(self) -> None:
        """Delete every filler. Idempotent."""
        for filler in self.path.glob(".filler-*"):
            filler.unlink()


def own_mounts(root: Path) -> list[Path]:
    """Mount points of this module's file systems under `root`."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    mounts = [Path(line.split()[1]) for line in lines if line.split()[0] == MOUNT_SOURCE]
    return [mount for mount in mounts if mount.is_relative_to(root)]


def remove_own(root: Path) -> list[Path]:
    """Unmount every one of this module's file systems under `root` and return where they were."""
    mounts = own_mounts(root)
    for mount in mounts:
        run_command("umount", "--lazy", str(mount))
    return mounts

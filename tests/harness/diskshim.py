"""Makes the disk of a process under test fail: the Python side of `diskshim.c`.

The library is built by gcc into the test's directory and preloaded through the environment;
rules can be added and withdrawn while the process runs, and each counts what it matched and
injected. Not reached: mmap, io_uring, direct system calls, the C library's buffered streams. Mark
tests with `requires_diskshim`. What must not live here: full file systems (see `tmpfs`).
"""

import errno
import mmap
import struct
from dataclasses import dataclass
from enum import Enum, IntFlag
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.rights import run_command

RULES_COUNT_MAX = 16
_SOURCE = Path(__file__).with_name("diskshim.c")
_PREFIX_BYTES_MAX = 512
_MAGIC = 0x316D696873647674
_HEADER = struct.Struct("<Q")
_ARMED = struct.Struct("<I")
_BODY = struct.Struct("<IIiQQQQ")
"""operations, action, error, first, count_max, short_bytes, latency_us"""
_COUNTERS = struct.Struct("<QQ")
_BODY_AT = _ARMED.size
_COUNTERS_AT = _BODY_AT + _BODY.size
_PREFIX_AT = _COUNTERS_AT + _COUNTERS.size
_RULE_BYTES = _PREFIX_AT + _PREFIX_BYTES_MAX


class DiskOp(IntFlag):
    """Families of calls."""

    READ = 1
    WRITE = 2
    SYNC = 4
    ALLOCATE = 8
    """ftruncate, fallocate, posix_fallocate"""


class DiskAction(Enum):
    ERROR = 1
    SHORT = 2
    """Transfer only `short_bytes`; longer reads and writes only."""
    LATENCY = 3


@dataclass(frozen=True, slots=True)
class DiskFault:
    """One rule: from the `first` matching call on (1: all), `count_max` times (0: always)."""

    operations: DiskOp
    path_prefix: Path
    """Files whose path starts so, as the process under test sees it."""
    action: DiskAction = DiskAction.ERROR
    first: int = 1
    count_max: int = 0
    error: int = errno.EIO
    short_bytes: int = 1
    latency_us: int = 0

    def __post_init__(self) -> None:
        if self.first < 1 or self.count_max < 0 or self.latency_us < 0 or self.short_bytes < 0:
            raise ValueError(f"first counts from 1, the others are not negative: {self}")
        if len(bytes(self.path_prefix)) >= _PREFIX_BYTES_MAX:
            raise ValueError(f"path_prefix has more than {_PREFIX_BYTES_MAX - 1} bytes")
        if self.action is DiskAction.SHORT and self.operations & ~(DiskOp.READ | DiskOp.WRITE):
            raise ValueError(f"only reads and writes can be short: {self}")


class DiskRule:
    """A rule in force; its counters are those of all processes under the shim."""

    def __init__(self, control: mmap.mmap, offset: int) -> None:
        self._control = control
        self._offset = offset

    @property
    def matched_count(self) -> int:
        """Calls that the rule applied to, injected or not."""
        return self._counters()[0]

    @property
    def injected_count(self) -> int:
        """Calls that were made to fail, fall short or wait."""
        return self._counters()[1]

    def withdraw(self) -> None:
        """Take the rule out of force; its counters stay readable until its place is used again."""
        _ARMED.pack_into(self._control, self._offset, 0)

    def _counters(self) -> tuple[int, int]:
        matched, injected = _COUNTERS.unpack_from(self._control, self._offset + _COUNTERS_AT)
        return matched, injected


class DiskShim:
    """A context manager: builds the library, keeps the control file, both in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._library = directory / "diskshim.so"
        self._control_path = directory / "diskshim.control"
        self._control: mmap.mmap | None = None
        self._used = 0

    @property
    def environment(self) -> dict[str, str]:
        """What puts a process under the shim: for `Launch.environment`."""
        return {"LD_PRELOAD": str(self._library), "DISKSHIM_CONTROL": str(self._control_path)}

    def __enter__(self) -> Self:
        flags = ("-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror")
        run_command("gcc", *flags, "-o", str(self._library), str(_SOURCE), "-ldl")
        size = _HEADER.size + RULES_COUNT_MAX * _RULE_BYTES
        self._control_path.write_bytes(_HEADER.pack(_MAGIC).ljust(size, b"\0"))
        with self._control_path.open("r+b") as control:
            self._control = mmap.mmap(control.fileno(), size)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def add(self, fault: DiskFault) -> DiskRule:
        """Put a rule into force; at most 16 in the shim's life. Earlier rules are asked first."""
        control = self._control
        if control is None or self._used == RULES_COUNT_MAX:
            raise RuntimeError(f"the shim is closed, or has had {RULES_COUNT_MAX} rules")
        offset = _HEADER.size + self._used * _RULE_BYTES
        self._used += 1
        _BODY.pack_into(
            control,
            offset + _BODY_AT,
            fault.operations,
            fault.action.value,
            fault.error,
            fault.first,
            fault.count_max,
            fault.short_bytes,
            fault.latency_us,
        )
        prefix = bytes(fault.path_prefix)
        control[offset + _PREFIX_AT : offset + _PREFIX_AT + len(prefix)] = prefix
        _ARMED.pack_into(control, offset, 1)
        return DiskRule(control, offset)

"""Runs one service, or one foreign server, as a child that cannot outlive its supervisor.

    python -m kvtier.local.child PARENT index --config index.toml
    python -m kvtier.local.child PARENT --exec /path/of/a/server ARGUMENTS

What must not live here: anything slow to import.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

EXEC: Final = "--exec"
GENTLE: Final = frozenset({"vllm"})
"""Services that have processes of their own to end."""
_PR_SET_PDEATHSIG: Final = 1
_ORPHANED: Final = 71


def bind_to(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process as soon as the thread that started it ends.

    It survives an exec. Ends this process where the parent is gone already. Linux only; elsewhere
    a killed supervisor leaves its services behind.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os._exit(_ORPHANED)


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command of a service, or with EXEC of a program, that the kernel ends as soon as this
    process ends, however that is."""
    return [sys.executable, "-P", "-m", "kvtier.local.child", str(os.getpid()), *arguments]


def main(argv: list[str]) -> int:
    """See the module; returns the exit status of the service."""
    bind_to(int(argv[0]), signal.SIGTERM if argv[1] in GENTLE else signal.SIGKILL)
    if argv[1] == EXEC:
        os.execv(argv[2], argv[2:])  # noqa: S606 (the supervisor chose the program)
    from kvtier.cli import main as run

    return run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The log file that a child writes: kept within its bound, and its end for messages.

What must not live here: what services log.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Final

_TAIL_BYTES: Final = 4_096
_TAIL_LINES: Final = 12


def rotate(log: Path, bytes_max: int) -> None:
    """Keep a log within its bound: the full one is copied away and cut to nothing.

    The process appends, so it goes on at the new end; what it writes between copying and cutting
    is lost. A log that cannot be read or written is left as it is.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size > bytes_max:
            shutil.copyfile(log, log.with_suffix(".log.1"))
            os.truncate(log, 0)


def tail(log: Path) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])

"""All processes of one session: what a service leaves behind when it is killed.

Linux only; elsewhere nothing is found. What must not live here: who is to be killed.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_PASSES: Final = 3
"""One that forks while it is looked for is found in the next."""


def kill_session(leader: int) -> None:
    """SIGKILL every process whose session was begun by `leader`, dead or alive."""
    for _ in range(_PASSES):
        members = list(_members(leader))
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return


def _members(leader: int) -> Iterator[int]:
    if not _PROC.is_dir():
        return
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # pid (name) state ppid pgrp session; a name may hold spaces and brackets
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if int(session) == leader and state != "Z":
            yield int(entry.name)

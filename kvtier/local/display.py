"""What `kvtier up` shows: a line a process, redrawn on a terminal, appended elsewhere.

What must not live here: what is known of a cluster.
"""

import sys
import time
from collections.abc import Sequence
from typing import Final, TextIO

from kvtier.local.directory import ServiceState
from kvtier.local.supervisor import Change, State

_NAME_WIDTH: Final = 10
_STATE_WIDTH: Final = 9
_UP: Final = "\x1b[{}A"
_CLEAR: Final = "\x1b[K"
_MARKS: Final = {State.UP: "\x1b[32m", State.DOWN: "\x1b[31m", State.STARTING: "\x1b[33m"}
_PLAIN: Final = "\x1b[0m"


class Display:
    """Shows changes on a stream. On a terminal a start is redrawn in place until `settle`."""

    def __init__(self, names: Sequence[str], stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._redraws = self._stream.isatty()
        self._lines: dict[str, tuple[State, str, float]] = {
            name: (State.WAITING, "", time.monotonic()) for name in names
        }
        self._drawn = 0
        self._settled = False

    def told(self, change: Change) -> None:
        """Show a change."""
        before = self._lines[change.name]
        now = time.monotonic()
        took_s = now - before[2]
        detail = change.detail
        if change.state is State.UP and before[0] is State.STARTING:
            detail = f"after {took_s:.1f} s"
        self._lines[change.name] = (change.state, detail, now)
        if self._redraws and not self._settled:
            self.draw()
        elif change.state is not State.WAITING:
            self._stream.write(self._line(change.name) + "\n")
            self._stream.flush()

    def draw(self) -> None:
        """Draw all lines again, with the seconds that a start has taken so far. Terminals only."""
        if not self._redraws or self._settled:
            return
        if self._drawn:
            self._stream.write(_UP.format(self._drawn))
        for name in self._lines:
            self._stream.write(f"{self._line(name)}{_CLEAR}\n")
        self._drawn = len(self._lines)
        self._stream.flush()

    def settle(self) -> None:
        """The start is over: from now on one new line a change."""
        self._settled = True

    def say(self, text: str) -> None:
        """A line of its own, above what is redrawn next."""
        self._stream.write(f"{text}\n")
        self._stream.flush()
        self._drawn = 0

    def _line(self, name: str) -> str:
        state, detail, since = self._lines[name]
        if state is State.STARTING and self._redraws and not self._settled:
            detail = f"{time.monotonic() - since:.0f} s"
        word = f"{state.value:<{_STATE_WIDTH}}"
        if self._redraws:
            word = f"{_MARKS.get(state, '')}{word}{_PLAIN}"
        return f"{name:<{_NAME_WIDTH}} {word} {detail}".rstrip()


def status_table(services: Sequence[ServiceState]) -> str:
    """The table of `kvtier status`. Reads the clock."""
    now = time.monotonic()
    rows = [("SERVICE", "STATE", "PID", "SINCE", "RESTARTS", "ADDRESS")]
    rows += [
        (
            one.name,
            one.state,
            "-" if one.pid is None else str(one.pid),
            spoken_time(now - one.since),
            str(one.restarts),
            one.address,
        )
        for one in services
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


def spoken_time(seconds: float) -> str:
    """A duration for people. Pure."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7_200:
        return f"{whole // 60} min"
    return f"{whole // 3_600} h"

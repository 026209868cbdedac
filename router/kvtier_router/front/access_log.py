"""One line a request, cheap enough to be written for each: formatted here, written in batches.

The same logfmt as the rest of the log. A line costs a few microseconds instead of the sixty that
general logging takes, because names are known and values are quoted once. Lines are written by a
thread a few times a second; a reader that stops reading costs lines (counted), never requests.
What must not live here: prompt text, keys, salts.
"""

import json
import queue
import re
import threading
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, TextIO

from kvtier.limits import LOG_QUEUE_LINES_MAX, LOG_VALUE_CHARS_MAX
from kvtier.security.clock import SYSTEM, Clock

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@+-]+")
_BATCHES_MAX: Final = 64
_CLOSE_S: Final = 2.0


class AccessLog:
    """Lines of one process. One event loop uses it; `close` writes the rest."""

    def __init__(self, stream: TextIO, clock: Clock = SYSTEM) -> None:
        self._stream = stream
        self._clock = clock
        self._lines: list[str] = []
        self._batches: queue.Queue[str | None] = queue.Queue(_BATCHES_MAX)
        self.dropped_count = 0
        self._second = -1
        self._stamp = ""
        self._thread = threading.Thread(target=self._write, name="kvtier-access", daemon=True)
        self._thread.start()

    def add(self, fields: str) -> None:
        """Put a line of `fields`, which the caller has made of `quoted` values."""
        if len(self._lines) >= LOG_QUEUE_LINES_MAX:
            self.dropped_count += 1
            return
        now = self._clock.wall()
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        millis = int((now - second) * 1e3)
        self._lines.append(
            f"ts={self._stamp}.{millis:03d}Z level=info logger=kvtier_router.access "
            f"event=request {fields}\n"
        )

    def flush(self) -> None:
        """Hand what there is to the writing thread; called a few times a second. Never blocks."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            self._batches.put_nowait("".join(lines))
        except queue.Full:
            self.dropped_count += len(lines)

    def close(self) -> None:
        """Write the rest, for two seconds at most. Blocks."""
        self.flush()
        try:
            self._batches.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._stream.write(batch)
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                self.dropped_count += batch.count("\n")


@lru_cache(maxsize=4096)
def quoted(value: str) -> str:
    """A value as logfmt shows it: one line of printable ASCII, cut to its ceiling."""
    if len(value) > LOG_VALUE_CHARS_MAX:
        value = f"{value[:LOG_VALUE_CHARS_MAX]}...({len(value)} chars)"
    if _PLAIN.fullmatch(value):
        return value
    return json.dumps(value).replace("\x7f", "\\u007f")

"""Events that an operator wants to know of, the last ones only.

What must not live here: how they are noticed (`watching`).
"""

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from kvtier.limits import HISTORY_EVENTS_COUNT_MAX


class Level(StrEnum):
    """How much an event asks for attention."""

    GOOD = "good"
    INFO = "info"
    WARNING = "warning"
    BAD = "bad"


class Event(NamedTuple):
    """Something that happened."""

    number: int
    at: float
    """Monotonic seconds."""
    level: Level
    kind: str
    """A few words that name what happened: `worker left`."""
    subject: str
    """Whom it happened to; a name from outside."""
    detail: str


class Journal:
    """See the module. Belongs to one event loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=HISTORY_EVENTS_COUNT_MAX)
        self.count = 0

    def note(self, at: float, level: Level, kind: str, subject: str, detail: str = "") -> None:
        """Add an event."""
        self.count += 1
        self._events.append(Event(self.count, at, level, kind, subject, detail))

    def after(self, number: int) -> Iterator[Event]:
        """Events numbered above `number` that are still kept, the newest first."""
        for event in reversed(self._events):
            if event.number <= number:
                return
            yield event

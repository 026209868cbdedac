"""Bounded waiting for a state to come about; the only place of the tests that polls.

Every wait names what it waits for and ends at a deadline with what it saw last. What must not live
here: fixed sleeps as synchronisation.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_FIRST_S = 0.001
_PAUSE_MAX_S = 0.05


class NeverHappenedError(AssertionError):
    """A state that a test waited for did not come about before the deadline."""


def eventually(predicate: Callable[[], T], deadline_s: float, what: str) -> T:
    """Call `predicate` until it returns something true, and return that.

    Blocks the calling thread. The predicate is called at least once, and once more after the
    deadline has passed; its exceptions are the caller's. Raises NeverHappenedError, which names
    `what` and the last value.
    """
    end = time.monotonic() + deadline_s
    pause = _PAUSE_FIRST_S
    while True:
        late = time.monotonic() >= end
        value = predicate()
        if value:
            return value
        if late:
            raise NeverHappenedError(_complaint(what, deadline_s, value))
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX_S)


async def eventually_async(
    predicate: Callable[[], Awaitable[T]], deadline_s: float, what: str
) -> T:
    """Like `eventually`, for a predicate that awaits; the event loop runs between the calls."""
    end = time.monotonic() + deadline_s
    pause = _PAUSE_FIRST_S
    while True:
        late = time.monotonic() >= end
        value = await predicate()
        if value:
            return value
        if late:
            raise NeverHappenedError(_complaint(what, deadline_s, value))
        await asyncio.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX_S)


def _complaint(what: str, deadline_s: float, value: object) -> str:
    return f"not within {deadline_s:g} s: {what} (last seen: {value!r})"

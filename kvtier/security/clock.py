"""The clocks of credentials: wall time decides expiry, monotonic time decides when to look again.

What must not live here: any other use of wall time. Leases and deadlines count durations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Two time sources, so that tests can move either."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970: certificates and tokens expire by it."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds that only grow: files are polled by it."""


SYSTEM = Clock()

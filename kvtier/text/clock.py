"""The local date and time that a chat template prints.

What must not live here: any other use of wall time.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TypeAlias

LocalTime: TypeAlias = Callable[[], datetime]


def local_time() -> datetime:
    """Return the local time without a zone, as templates expect it."""
    return datetime.now().astimezone().replace(tzinfo=None)

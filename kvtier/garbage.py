"""Python's garbage collector in a service: what is there from the start is not looked at again.

A service makes many objects that stay for a while and are in no cycle; each look for cycles through
all that a loaded model or tokenizer has made holds every thread of the process for 0.1 s and more,
which is the deadline of a load. What must not live here: anything but these settings.
"""

import gc
from typing import Final

_THRESHOLDS: Final = (20_000, 20, 20)
"""A request or a batch of blocks makes hundreds of objects: by default every third would pay for
looking for a cycle among the young, and some for looking everywhere."""


def settle() -> None:
    """Collect once, leave all that is there out of later collections, and make those rare.

    Of the whole process; for an entry point, when what it serves is loaded and nobody is served.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)

"""A family of processes that serve nothing: `family_process.py COUNT`, for tests of signals."""

import os
import select
import signal
import sys

from kvtier_router.processes import supervise


def run_one(number: int, parent: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while not select.select([parent], [], [], 0.05)[0]:
        pass  # a signal just before a wait without an end would be acted upon after it
    return 0


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.exit(supervise(int(sys.argv[1]), run_one))

"""Which CPUs the processes of a bench run on. What must not live here: what is measured."""

import os


def apart(store_pid: int) -> None:
    """Give the store and this process CPUs of their own, where there are two.

    Else a machine that does other things runs both on one, and a put waits for itself.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        os.sched_setaffinity(store_pid, cpus[1:])
        os.sched_setaffinity(0, cpus[:1])

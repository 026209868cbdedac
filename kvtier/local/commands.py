"""`kvtier up`, `kvtier down`, `kvtier status`, `kvtier config`.

What must not live here: how a cluster is started (`cluster.py`).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, DeadlineError
from kvtier.local.cluster import RunningCluster, curl_line, running
from kvtier.local.directory import DataDirectory
from kvtier.local.display import status_table
from kvtier.local.plan import Places, Plan, make_plan, port_names, show
from kvtier.local.settings import Cluster, read_cluster
from kvtier.local.supervisor import State

NOT_RUNNING: Final = 3
_DEGRADED: Final = 1
_INTERRUPTED: Final = 130
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DOWN_S_MAX: Final = 120.0
_LOOK_S: Final = 0.05


def up(argv: list[str]) -> int:
    """Entry point of `kvtier up`: run a cluster until Ctrl-C, SIGTERM or `kvtier down`."""
    cluster = read_cluster(argv)
    if cluster.loaded.print_only:
        sys.stdout.write(show(_checked(cluster)))
        return 0
    return asyncio.run(_up(cluster))


def down(argv: list[str]) -> int:
    """Entry point of `kvtier down`: stop the cluster of a data directory; fine if none runs."""
    directory, _ = _directory("down", "stop the cluster that runs in a data directory", argv)
    pid = directory.supervisor()
    if pid is None:
        sys.stdout.write(f"no cluster runs in {directory.root}\n")
        return 0
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _DOWN_S_MAX
    while directory.supervisor() == pid:
        if time.monotonic() > until:
            raise DeadlineError(f"process {pid} still stops its services; try again")
        time.sleep(_LOOK_S)
    sys.stdout.write(f"stopped the cluster in {directory.root}\n")
    return 0


def status(argv: list[str]) -> int:
    """Entry point of `kvtier status`: exit status 0: all serve, 1: not all, 3: none runs."""
    directory, as_json = _directory("status", "show the cluster of a data directory", argv)
    pid = directory.supervisor()
    state = None if pid is None else directory.state()
    services = () if state is None else state.services
    if as_json:
        shown = {"supervisor": pid, "data_dir": str(directory.root)}
        shown |= {} if state is None else asdict(state)
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    elif pid is None:
        sys.stdout.write(f"no cluster runs in {directory.root}\n")
    elif state is not None:
        sys.stdout.write(f"{state.endpoint}/v1  (supervisor {pid}, {directory.root})\n")
        sys.stdout.write(status_table(services))
    if pid is None:
        return NOT_RUNNING
    all_up = bool(services) and all(one.state == State.UP for one in services)
    return 0 if all_up else _DEGRADED


def config(argv: list[str]) -> int:
    """Entry point of `kvtier config check|show`: a cluster file, held against every service."""
    verb, rest = (argv[0], argv[1:]) if argv else ("", [])
    if verb in {"-h", "--help"}:
        sys.stdout.write(
            "usage: kvtier config check|show [--config FILE] [flags of kvtier up]\n\n"
            "check  says whether a cluster could be started with this configuration\n"
            "show   prints the effective configuration of every process, secrets masked\n"
        )
        return 0
    if verb not in {"check", "show"}:
        raise ConfigError("want: kvtier config check|show [--config FILE]")
    cluster = read_cluster(rest)
    plan = _checked(cluster)
    if verb == "show":
        sys.stdout.write(show(plan))
    else:
        names = ", ".join(service.name for service in plan.services)
        sys.stdout.write(f"ok: {names}\n")
    return 0


async def _up(cluster: Cluster) -> int:
    main = asyncio.current_task()
    assert main is not None
    asking = _Asking(main)
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, asking.ask)
    try:
        async with running(cluster) as found:
            asking.kill = found.supervisor.kill
            _welcome(found, cluster.config.directory)
            await asking.stop.wait()
    except asyncio.CancelledError:
        if not asking.stop.is_set():
            raise
        return _INTERRUPTED
    return 0


class _Asking:
    """What becomes of signals: the first stops, in the midst of a start too; the second kills."""

    def __init__(self, main: asyncio.Task[int]) -> None:
        self.stop = asyncio.Event()
        self.kill: Callable[[], None] | None = None
        """Set once the cluster serves."""
        self._main = main

    def ask(self) -> None:
        """A signal has come."""
        if self.kill is None:
            if not self.stop.is_set():
                self._main.cancel()
        elif self.stop.is_set():
            self.kill()
        else:
            sys.stderr.write("stopping; once more to kill\n")
        self.stop.set()


def _welcome(found: RunningCluster, directory: Path) -> None:
    model = found.models[0] if found.models else "MODEL"
    urls = " and ".join(f"{endpoint}/v1" for endpoint in found.plan.endpoints)
    page = f"dashboard: http://{found.plan.admin}/ui\n" if found.plan.admin else ""
    sys.stdout.write(
        f"\nkvtier serves {model} at {urls}\n\n"
        f"  {curl_line(found.plan.endpoint, model)}\n\n{page}"
        f"logs: {directory / 'logs'}; stop: Ctrl-C, or kvtier down --data-dir {directory}\n"
    )
    sys.stdout.flush()


def _checked(cluster: Cluster) -> Plan:
    """The plan that `up` would make, without taking ports or touching the data directory."""
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        ports = {name: number for number, name in enumerate(port_names(cluster), 8_000)}
        root = cluster.config.directory
        places = Places(Path(folder), root, DataDirectory(root).run, ports)
        return make_plan(cluster, places)


def _directory(name: str, about: str, argv: Sequence[str]) -> tuple[DataDirectory, bool]:
    parser = argparse.ArgumentParser(prog=f"kvtier {name}", description=about, allow_abbrev=False)
    parser.add_argument("--data-dir", help="data directory of the cluster")
    parser.add_argument("--config", help="cluster file that names it")
    if name == "status":
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    told = parser.parse_args(list(argv))
    flags: list[str] = []
    for flag, value in (("--data-dir", told.data_dir), ("--config", told.config)):
        flags += [] if value is None else [flag, value]
    return DataDirectory(read_cluster(flags).config.directory), bool(getattr(told, "json", False))

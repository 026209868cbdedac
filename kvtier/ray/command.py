"""`python -m kvtier.ray up|status|down|batch`: for `ray job submit`, or on a node of the cluster.

What must not live here: what they do.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.config import describe
from kvtier.errors import ConfigError, DeadlineError, UnavailableError
from kvtier.ray.batches import submit
from kvtier.ray.controller import CONTROLLER, Controller, living_nodes
from kvtier.ray.settings import document_of, read_fleet

FAILED_ROWS: Final = 3
NOT_RUNNING: Final = 3
_LOOK_S: Final = 0.5
_USAGE: Final = """\
usage: python -m kvtier.ray up [--config FILE] [FLAGS]   start a fleet, wait until it serves
       python -m kvtier.ray status [--namespace NAME]    what runs, as JSON
       python -m kvtier.ray down [--namespace NAME]      stop it
       python -m kvtier.ray batch [--namespace NAME] [--ray-data FORMAT:PATH] [FLAGS]
                                                         a batch; flags are those of kvtier batch
"""


def command(argv: Sequence[str]) -> int:
    """Exit status 0: done; of status 3: no fleet; of batch 3: some rows failed."""
    verbs: dict[str, Callable[[list[str]], int]] = {
        "up": _up,
        "status": _status,
        "down": _down,
        "batch": _batch,
    }
    verb = verbs.get(argv[0]) if argv else None
    if verb is None:
        asked = list(argv[:1]) in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(_USAGE)
        return 0 if asked else 2
    return verb(list(argv[1:]))


def _up(argv: list[str]) -> int:
    fleet = read_fleet(argv)
    if fleet.loaded.print_only:
        sys.stdout.write(describe(fleet.loaded))
        return 0
    config = fleet.config
    _connect(config.namespace)
    if _controller(config.namespace) is not None:
        raise UnavailableError(f"a fleet runs in {config.namespace}: python -m kvtier.ray down")
    document, flags = document_of(argv)
    head = next(node.node_id for node in living_nodes() if node.is_head)
    controller = (
        ray.remote(Controller)
        .options(
            name=CONTROLLER,
            namespace=config.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False),
        )
        .remote(flags, document)
    )
    _wait_until_served(controller, config.ready_s_max)
    return _tell(controller)


def _wait_until_served(controller: Any, ready_s_max: float) -> None:
    """Tell what changes meanwhile. DeadlineError."""
    until, states = time.monotonic() + ready_s_max, dict[str, str]()
    while not ray.get(controller.serves.remote()):
        now = {one["name"]: one["state"] for one in ray.get(controller.status.remote())}
        for name, state in now.items():
            if states.get(name) != state:
                sys.stderr.write(f"{name}: {state}\n")
        states = now
        if time.monotonic() > until:
            told = ", ".join(f"{name}: {state}" for name, state in states.items())
            raise DeadlineError(f"not everything serves after {ready_s_max:g} s: {told}")
        time.sleep(_LOOK_S)


def _status(argv: list[str]) -> int:
    namespace, _, _ = _options("status", argv)
    _connect(namespace)
    controller = _controller(namespace)
    if controller is None:
        sys.stdout.write(f"no fleet runs in {namespace}\n")
        return NOT_RUNNING
    return _tell(controller)


def _down(argv: list[str]) -> int:
    namespace, _, _ = _options("down", argv)
    _connect(namespace)
    controller = _controller(namespace)
    if controller is None:
        sys.stdout.write(f"no fleet runs in {namespace}\n")
        return 0
    ray.get(controller.stop.remote())
    ray.kill(controller, no_restart=True)
    sys.stdout.write(f"stopped the fleet in {namespace}\n")
    return 0


def _batch(argv: list[str]) -> int:
    namespace, data, rest = _options("batch", argv)
    _connect(namespace)
    controller = _controller(namespace)
    urls = [] if controller is None else ray.get(controller.endpoints.remote())
    if not urls and "--urls" not in rest:
        raise UnavailableError(f"no fleet serves in {namespace}, and no --urls are given")
    summary = submit(rest, urls, data)
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return FAILED_ROWS if summary["failed"] else 0


def _options(verb: str, argv: list[str]) -> tuple[str, str, list[str]]:
    """(namespace, data set, other flags)."""
    parser = argparse.ArgumentParser(prog=f"python -m kvtier.ray {verb}", allow_abbrev=False)
    parser.add_argument("--namespace", default="kvtier", help="of the fleet's actors in Ray")
    if verb != "batch":
        return parser.parse_args(argv).namespace, "", []
    parser.add_argument("--ray-data", default="", help="parquet|json|csv:PATH, in place of inputs")
    told, rest = parser.parse_known_args(argv)
    return told.namespace, told.ray_data, rest


def _connect(namespace: str) -> None:
    try:
        ray.init(address="auto", namespace=namespace, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster is reached: {error}") from None


def _controller(namespace: str) -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace)
    except ValueError:
        return None


def _tell(controller: Any) -> int:
    urls, services = ray.get([controller.endpoints.remote(), controller.status.remote()])
    sys.stdout.write(json.dumps({"urls": urls, "services": services}, indent=1) + "\n")
    return 0

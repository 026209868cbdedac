"""A running cluster: its directory, its plan and its supervisor, opened and closed together.

What must not live here: the command line.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from kvtier.local import models
from kvtier.local.directory import ClusterState, DataDirectory
from kvtier.local.display import Display
from kvtier.local.plan import (
    ROUTER_PORT,
    Kind,
    Places,
    Plan,
    make_plan,
    port_names,
)
from kvtier.local.probes import http_json
from kvtier.local.settings import Cluster
from kvtier.local.supervisor import Change, Supervisor, Terms

_DRAW_S: Final = 0.25
_FLEET_S_MAX: Final = 20.0
_FLEET_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that serves."""

    plan: Plan
    supervisor: Supervisor
    models: tuple[str, ...]
    """Names that the router serves."""

    def addresses(self, kind: Kind) -> dict[str, str]:
        """host:port of each process of a kind, by its name."""
        return {one.name: one.address for one in self.plan.services if one.kind is kind}

    async def until_seen(self) -> None:
        """Wait until every router sends requests to every worker; at most 20 s, then go on."""
        wanted = set(self.addresses(Kind.WORKER))
        until = time.monotonic() + _FLEET_S_MAX
        for name in self.addresses(Kind.ROUTER):
            admin = self.plan.metrics.get(name, "")
            while admin and not admin.startswith("unix:") and time.monotonic() < until:
                if wanted <= await asyncio.to_thread(_eligible, admin):
                    break
                await asyncio.sleep(_FLEET_LOOK_S)


def _eligible(admin: str) -> set[str]:
    told = http_json(admin, "/fleet")
    workers = told.get("workers", []) if isinstance(told, dict) else []
    return {one["worker"] for one in workers if one.get("state") == "candidate"}


@contextlib.asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[RunningCluster]:
    """The cluster while entered: started in order, then supervised, stopped in reverse order.

    KvtierError, after everything has been stopped again, where something does not start.
    """
    config = cluster.config
    directory = DataDirectory(config.directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.held())
        stack.callback(directory.clear_run)
        places = _places(cluster, directory)
        plan = make_plan(cluster, places)
        display = Display([service.name for service in plan.services])
        stop = threading.Event()
        try:
            await asyncio.to_thread(models.provide, config.model, display.say, stop)
        finally:
            stop.set()
        supervisor = _Told(directory, plan, display).supervisor(
            config.log_bytes_max, config.ready_s_max
        )
        drawing = asyncio.create_task(_keep_drawing(display))
        try:
            await supervisor.start()
            found = RunningCluster(plan, supervisor, await _models(plan))
            await found.until_seen()
            drawing.cancel()
            display.settle()
            yield found
        finally:
            drawing.cancel()
            display.settle()
            await supervisor.close()


class _Told:
    """Passes changes on to the display and into the state file."""

    def __init__(self, directory: DataDirectory, plan: Plan, display: Display) -> None:
        self._directory = directory
        self._plan = plan
        self._display = display
        self._supervisor: Supervisor | None = None

    def supervisor(self, log_bytes_max: int, ready_s_max: float) -> Supervisor:
        terms = Terms(self._directory.logs, log_bytes_max, ready_s_max)
        self._supervisor = Supervisor(self._plan, terms, self.told)
        return self._supervisor

    def told(self, change: Change) -> None:
        self._display.told(change)
        if self._supervisor is not None:
            plan = self._plan
            states = self._supervisor.states()
            self._directory.tell(ClusterState(plan.endpoint, plan.admin, states))


def _places(cluster: Cluster, directory: DataDirectory) -> Places:
    for name in ("store", "redis"):
        (directory.root / name).mkdir(mode=0o700, exist_ok=True)
    wishes = {"router": ROUTER_PORT} if cluster.config.bind is None else {}
    ports = directory.ports(port_names(cluster), wishes)
    return Places(directory.root / "config", directory.root, directory.make_run(), ports)


async def _keep_drawing(display: Display) -> None:
    while True:
        display.draw()
        await asyncio.sleep(_DRAW_S)


async def _models(plan: Plan) -> tuple[str, ...]:
    """What the router serves; nothing where it cannot be asked in plain text."""
    if not plan.endpoint.startswith("http://"):
        return ()
    address = plan.endpoint.removeprefix("http://")
    told = await asyncio.to_thread(http_json, address, "/v1/models")
    listed = told.get("data", []) if isinstance(told, dict) else []
    return tuple(str(entry["id"]) for entry in listed)


def curl_line(endpoint: str, model: str) -> str:
    """A command that asks the cluster a question. Pure."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is a KV cache?"}],
        "max_tokens": 64,
    }
    return (
        f"curl {endpoint}/v1/chat/completions -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'"
    )

"""An engine, its bridge and an index as processes, and what the index says of that engine.

What must not live here: faults, what a test expects of them.
"""

import asyncio
import http.client
import json
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from kvtier.types import Tier
from kvtier.wire import messages as pb
from tests.harness.ports import free_port
from tests.harness.processes import (
    REPOSITORY,
    Launch,
    Process,
    ProcessRunner,
    kvtier_command,
    python_module,
)
from tests.harness.readiness import http_ready
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import (
    HolderView,
    IndexProcess,
    channel_to,
    ranks_view,
)

SHOWN_S = 45.0
ADAPTER_DIGEST = "ab" * 32


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine: `ring` is how many messages it can replay, `is_old` its wire's shape, `tells`
    whether our connector is in it."""

    ranks: int = 1
    ring: int = 10_000
    blocks: int = 64
    is_old: bool = False
    int_hashes: bool = True
    topic: str = "kv"
    block_tokens: int = 16
    model_id: str = "org/model"
    revision: str = "rev-1"
    seed: str = "0"
    tells: bool = False
    adapters: Mapping[str, tuple[str, int]] = field(
        default_factory=lambda: {"ad": (ADAPTER_DIGEST, 3)}
    )


class BridgeCluster:
    """One of each. Every `ask` is a command of `engine_process.Commands`."""

    def __init__(self, runner: ProcessRunner, index: IndexProcess, spec: EngineSpec) -> None:
        """The index may be shared: every cluster has an engine of its own name."""
        self.runner = runner
        self.index = index
        self.spec = spec
        self.events_port, self.replay_port, self.page_port = _ports(spec.ranks)
        self.instance = f"engine-{self.events_port}"
        self.control = runner.directory / "engine.sock"
        self.run_folder = runner.directory / "run"
        self.channel: grpc.aio.Channel
        self.engine: Process
        self.bridge: Process

    async def ask(self, do: str, *arguments: Any, **named: Any) -> Any:
        if arguments:
            named |= {"chain": arguments[0], "blocks": arguments[1]}
        return await asyncio.to_thread(_ask, self.control, {"do": do, **named})

    async def start_engine(self) -> None:
        spec = self.spec
        table = {name: getattr(spec, name) for name in EngineSpec.__dataclass_fields__}
        table |= {
            "events_port": self.events_port,
            "replay_port": self.replay_port,
            "control": str(self.control),
            "residents": str(self.run_folder) if spec.tells else "",
        }
        path = self.runner.directory / "engine.json"
        path.write_text(json.dumps(table))
        launch = Launch(
            "engine",
            python_module("tests.support.engine_process", str(path)),
            ready=lambda: _answers(self.control),
            environment={"PYTHONPATH": str(REPOSITORY)},
        )
        self.engine = await asyncio.to_thread(self.runner.start, launch)

    async def start_bridge(self, **engine: TomlValue) -> None:
        await self.start_bridge_of(self.settings(**engine))

    async def start_bridge_of(self, settings: dict[str, TomlValue]) -> None:
        path = self.runner.config_file("bridge.toml", settings)
        launch = Launch(
            "bridge",
            kvtier_command("bridge", "--config", str(path)),
            ready=http_ready(f"http://127.0.0.1:{self.page_port}/live"),
        )
        self.bridge = await asyncio.to_thread(self.runner.start, launch)

    def settings(self, **engine: TomlValue) -> dict[str, TomlValue]:
        spec = self.spec
        followed: dict[str, TomlValue] = {
            "events": f"tcp://127.0.0.1:{self.events_port}",
            "replay": f"tcp://127.0.0.1:{self.replay_port}",
            "ranks": spec.ranks,
            "topic": spec.topic,
            "gone_ms": 300,
            "probe_ms": 300,
            "load_ms": 0,
        }
        if spec.tells:
            followed["residents"] = str(self.run_folder)
        return {
            "instance": self.instance,
            "index": {"targets": [self.index.address]},
            "telemetry": {"metrics_bind": f"127.0.0.1:{self.page_port}"},
            "memory": {"data_dir": str(self.runner.directory / "data"), "save_ms": 20},
            "model": {
                "served_names": ["chat"],
                "model_id": spec.model_id,
                "revision": spec.revision,
                "block_tokens": spec.block_tokens,
                "tokenizer_digest": "74" * 32,
                "adapters": [f"{digest}:{n}:{name}" for name, (digest, n) in spec.adapters.items()],
            },
            "engine": followed | engine,
        }

    # ---- what the index says

    async def view(self, rank: int = 0) -> HolderView | None:
        """The engine as the index shows it; None where it is not in the fleet."""
        found = (await ranks_view(self.channel)).get((self.instance, rank))
        return None if found is None or found.hidden else found

    async def shows(self, *, exact: bool, rank: int = 0) -> HolderView:
        """Wait until the index shows just what the engine holds, trusted or not."""
        truth = await self.ask("truth", rank=rank)
        trust = pb.TRUST_EXACT if exact else pb.TRUST_DEGRADED
        last = "nothing"

        async def is_shown() -> HolderView | None:
            nonlocal last
            view = await self.view(rank)
            if view is None:
                last = "no such holder"
                return None
            held = sorted(view.shards.get(0, {}).get(Tier.GPU, np.empty(0, np.uint64)).tolist())
            last = f"{len(held)} blocks, trust {view.trust} {view.reason}"
            return view if held == truth and view.trust == trust else None

        try:
            found = await eventually_async(is_shown, SHOWN_S, f"{len(truth)} blocks, {exact=}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None
        assert found is not None
        return found

    async def is_degraded(self, rank: int = 0) -> HolderView:
        """Wait until the index says that the bridge itself is in doubt."""

        async def is_shown() -> HolderView | None:
            view = await self.view(rank)
            is_doubted = view is not None and view.trust == pb.TRUST_DEGRADED
            return view if is_doubted and view is not None and view.reason == "source" else None

        found = await eventually_async(is_shown, SHOWN_S, "DEGRADED (source)")
        assert found is not None
        return found

    async def is_absent(self) -> None:
        async def is_gone() -> bool:
            return await self.view() is None

        await eventually_async(is_gone, SHOWN_S, "the engine left the fleet")

    async def metric(self, line: str) -> float:
        """One number of the bridge's metrics page; not a number before the bridge shows it."""
        text = await asyncio.to_thread(page_of, self.page_port)
        found = [row for row in text.splitlines() if row.startswith(line + " ")]
        assert len(found) <= 1, found
        return float(found[0].rpartition(" ")[2]) if found else math.nan

    async def metric_reaches(self, line: str, least: float) -> None:
        async def is_so() -> bool:
            return await self.metric(line) >= least

        await eventually_async(is_so, SHOWN_S, f"{line} >= {least}")

    async def metric_is(self, line: str, wanted: float) -> None:
        async def is_so() -> bool:
            return await self.metric(line) == wanted

        await eventually_async(is_so, SHOWN_S, f"{line} == {wanted}")


async def started(
    runner: ProcessRunner, index: IndexProcess, spec: EngineSpec | None = None
) -> BridgeCluster:
    """With an engine that runs; the bridge is the test's to start."""
    cluster = BridgeCluster(runner, index, spec or EngineSpec())
    await cluster.start_engine()
    return cluster


def channel_of(cluster: BridgeCluster) -> Any:
    """A context with a channel to the cluster's index."""
    return channel_to(cluster.index.address)


def _ports(ranks: int) -> tuple[int, int, int]:
    """A port, and so many after it, for events and for replays; one for the page."""
    return free_port(ranks), free_port(ranks), free_port()


def _ask(control: Path, command: Mapping[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(str(control))
        with connection.makefile("rwb") as lines:
            lines.write(json.dumps(command).encode() + b"\n")
            lines.flush()
            line = lines.readline()
    assert line, f"no answer to {command}"
    return json.loads(line)


def page_of(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=40)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _answers(control: Path) -> bool:
    try:
        return bool(_ask(control, {"do": "ping"}))
    except OSError:
        return False

"""A small cluster under `kvtier up`, over the fake model, and what can be asked of it.

What must not live here: what a test expects.
"""

import json
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvtier.local.directory import ClusterState, DataDirectory
from kvtier.local.probes import http_json
from tests.harness.processes import Launch, Process, ProcessRunner, clean_environment
from tests.harness.processes import kvtier_command as command
from tests.harness.toml_text import TomlTable
from tests.support.worker_cluster import WorkerProcess

MIB = 1 << 20
START_S = 120.0
PATIENT: TomlTable = {
    "offload": {"lookup_ms_max": 10_000},
    "model": {"fake": {"prefill_tokens_per_s": 500.0, "step_ms": 0.0}},
}
"""A worker that waits for its store, however busy the machine: a load has as long as computing."""


def cluster_table(
    step_ms: float = 0.0,
    store: TomlTable | None = None,
    worker: TomlTable | None = None,
    **cluster: Any,
) -> TomlTable:
    """A cluster file: small tiers, a fake model that computes 3,000 tokens a second.

    `store` and `worker` have more tables of their sections, `cluster` more of the cluster's keys.
    """
    return {
        "cluster": {"model": "fake", "bind": "127.0.0.1:0", **cluster},
        "index": {"lease_ms": 1000},
        "store": {
            "dram": {"bytes_max": 64 * MIB, "slab_bytes": 8 * MIB},
            "nvme": {"bytes_max": 256 * MIB},
            **(store or {}),
        },
        "worker": {
            "cache": {"kv_memory_bytes": 64 * MIB},
            "model": {"fake": {"prefill_tokens_per_s": 3000.0, "step_ms": step_ms}},
            **(worker or {}),
        },
    }


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """One `kvtier up` and its data directory."""

    process: Process
    root: Path

    @property
    def state(self) -> ClusterState:
        found = DataDirectory(self.root).state()
        assert found is not None
        return found

    @property
    def url(self) -> str:
        return self.state.endpoint

    @property
    def pids(self) -> dict[str, int]:
        return {one.name: one.pid for one in self.state.services if one.pid is not None}

    def restarts(self, name: str) -> int:
        return next(one.restarts for one in self.state.services if one.name == name)

    def all_up(self) -> bool:
        return all(one.state == "up" for one in self.state.services)

    def all_seen(self) -> bool:
        """Whether every router sends requests to every worker."""
        workers = {one.name for one in self.state.services if one.name.startswith("worker")}
        for one in self.state.services:
            if one.name.startswith("router"):
                text = (self.root / "config" / f"{one.name}.toml").read_text(encoding="utf-8")
                told = http_json(str(tomllib.loads(text)["admin_bind"]), "/fleet")
                rows = told["workers"] if isinstance(told, dict) else []
                if not workers <= {row["worker"] for row in rows if row["state"] == "candidate"}:
                    return False
        return True

    def log(self, name: str) -> str:
        return (self.root / "logs" / f"{name}.log").read_text(errors="replace")


def up_launch(
    runner: ProcessRunner, root: Path, name: str = "up", flags: Sequence[str] = (), **cluster: Any
) -> Launch:
    """How to start a cluster in `root`; ready once everything serves and its state says so."""
    path = runner.config_file(f"{name}.toml", cluster_table(**cluster))
    directory = DataDirectory(root)

    def ready() -> bool:
        # A supervisor that was killed has left its state, which is not that of this one.
        state = None if directory.supervisor() is None else directory.state()
        return state is not None and all(one.state == "up" for one in state.services)

    argv = command("up", "--config", str(path), "--data-dir", str(root), *flags)
    return Launch(name, argv, ready=ready, ready_deadline_s=START_S)


def start_cluster(
    runner: ProcessRunner, root: Path, name: str = "up", flags: Sequence[str] = (), **cluster: Any
) -> LocalCluster:
    return LocalCluster(runner.start(up_launch(runner, root, name, flags, **cluster)), root)


def router_of(cluster: LocalCluster) -> WorkerProcess:
    """The router as something that answers like a worker."""
    return WorkerProcess(cluster.process, int(cluster.url.rpartition(":")[2]))


def run_kvtier(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )


def living(pids: Sequence[int]) -> list[int]:
    """Which of these processes still run."""
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def status_json(root: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        run_kvtier("status", "--json", "--data-dir", str(root)).stdout
    )
    return told

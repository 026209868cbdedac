"""A Ray cluster of two nodes on this machine, loopback only, with jobs submitted to it.

What must not live here: what a test expects.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvtier.local.probes import http_json
from tests.harness.ports import free_port
from tests.harness.processes import HarnessError, Launch, ProcessRunner, clean_environment
from tests.harness.waiting import eventually

WHY_NOT = (
    None
    if importlib.util.find_spec("ray")
    else "Ray is not installed (the extra `ray`; `make test-ray` installs it)"
)
HEAD_IP, OTHER_IP = "127.0.0.2", "127.0.0.3"
"""Of loopback, and not the address that Ray replaces by the machine's own."""
OWNER = "RAY_TEST_OWNER"
"""Variable that names the folder of the cluster that a process belongs to; it is inherited."""
START_S = 240.0
JOB_S = 240.0

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_LOG_TO_DRIVER": "0",
    # A slow machine is no fault.
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job that has ended."""

    succeeded: bool
    text: str
    """What it wrote, with Ray's own lines."""

    @property
    def told(self) -> dict[str, Any]:
        """The JSON object that it printed last."""
        start = self.text.rindex("\n{\n") + 1
        found: dict[str, Any] = json.JSONDecoder().raw_decode(self.text[start:])[0]
        return found


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Two nodes, `a` and `b`, that are up."""

    dashboard: str
    root: Path
    """A folder for tests, removed with the cluster."""

    def submit(self, *arguments: str) -> "subprocess.Popen[str]":
        """`ray job submit` of `python -m kvtier.ray ARGUMENTS`; it follows the job to its end."""
        return self.submit_program("-m", "kvtier.ray", *arguments)

    def submit_program(self, *arguments: str) -> "subprocess.Popen[str]":
        """The same of `python ARGUMENTS`."""
        argv = [
            *_ray("job", "submit", "--address", f"http://{self.dashboard}", "--"),
            sys.executable, *arguments,
        ]  # fmt: skip
        return subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=clean_environment() | VARIABLES, cwd=self.root,
        )  # fmt: skip

    def done(self, job: "subprocess.Popen[str]") -> Job:
        """Wait for a job."""
        try:
            text, _ = job.communicate(timeout=JOB_S)
        finally:
            job.kill()
            job.wait()
        return Job(job.returncode == 0, text)

    def run(self, *arguments: str) -> Job:
        """A job from its submission to its end."""
        return self.done(self.submit(*arguments))


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start both nodes, and end every process of theirs afterwards."""
    # Ray's sockets have long names, so their folder must have a short one.
    directory = Path(tempfile.mkdtemp(prefix="kvr-"))
    port, dashboard = free_port(), f"127.0.0.1:{free_port()}"
    variables = VARIABLES | {OWNER: str(directory)}
    head = _start(
        "--head", "--node-name=a", f"--node-ip-address={HEAD_IP}", f"--port={port}",
        f"--temp-dir={directory / 'ray'}", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard.rpartition(':')[2]}",
        f"--ray-client-server-port={free_port()}",
    )  # fmt: skip
    other = _start(f"--address={HEAD_IP}:{port}", "--node-name=b", f"--node-ip-address={OTHER_IP}")

    def serves() -> bool:
        return http_json(dashboard, "/api/version") is not None

    def both() -> bool:
        told = http_json(dashboard, "/nodes?view=summary")
        nodes = told["data"]["summary"] if isinstance(told, dict) else []
        return [node["raylet"].get("state") for node in nodes] == ["ALIVE", "ALIVE"]

    with ProcessRunner("ray", directory) as runner:
        try:
            runner.start(Launch("head", head, serves, START_S, variables))
            runner.start(Launch("other", other, both, START_S, variables))
            yield RayCluster(dashboard, directory)
        finally:
            kill_all_of(directory)
            for name in ("head", "other"):
                with suppress(KeyError, HarnessError):
                    runner[name].wait(10.0)
            shutil.rmtree(directory, ignore_errors=True)


def processes_of(cluster: RayCluster, title: str = "") -> list[psutil.Process]:
    """Processes of this cluster, all or those whose title begins so."""
    return [one for one in psutil.process_iter() if _is_of(one, cluster.root, title)]


def _start(*arguments: str) -> tuple[str, ...]:
    terms = (
        "--block", "--num-cpus=8", "--num-gpus=0", "--object-store-memory=80000000",
        "--include-log-monitor=false", "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0",
        "--max-worker-port=0",
    )  # fmt: skip
    return _ray("start", *arguments, *terms)


def _ray(*arguments: str) -> tuple[str, ...]:
    program = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    return (sys.executable, "-c", program, *arguments)


def kill_all_of(directory: Path) -> None:
    """Kill every process of a cluster; they lead sessions of their own."""
    eventually(lambda: not _killed(directory), 60.0, "no process of Ray is left")


def _killed(directory: Path) -> bool:
    """Kill what is left; whether there was anything."""
    left = [one for one in psutil.process_iter() if _is_of(one, directory, "")]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return bool(left)


def _is_of(process: psutil.Process, directory: Path, title: str) -> bool:
    """Every process of the cluster, and of jobs and services in it, has inherited its owner."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(OWNER) != str(directory):
            return False
        return " ".join(process.cmdline()).startswith(title)
    except psutil.Error:
        return False

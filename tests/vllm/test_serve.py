"""`kvtier vllm serve` and `kvtier vllm doctor` with real vLLM: the index knows what it holds."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, clean_environment
from tests.harness.processes import kvtier_command as command
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually
from tests.support.index_cluster import index_launch
from tests.support.local_cluster import living
from tests.support.paged_models import smollm2
from tests.support.store_cluster import MIB, start_store
from tests.support.vllm_servers import PYTHON, WHY_NOT, VllmServer, launch_vllm, prompt, start_vllm

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

START_S = 600.0
WAIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Rig:
    serve: Process
    port: int
    index: str
    run_dir: Path


@pytest.fixture
def rig(processes: ProcessRunner, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model = smollm2(tmp_path_factory).directory
    directory = tmp_path_factory.mktemp("serve")
    launch, index_port = index_launch(processes, "index")
    processes.start(launch)
    index = f"127.0.0.1:{index_port}"
    store = start_store(
        processes,
        directory / "store",
        dram={"bytes_max": 256 * MIB, "slab_bytes": 64 * MIB, "blocks_max": 4096},
        nvme={"enabled": False},
    )
    port = free_port()
    argv = command(
        "vllm", "serve", str(model), "--python", PYTHON, "--store", store.socket,
        "--index", index, "--run-dir", str(directory / "run"), "--port", str(port),
        "--kv-memory-bytes", str(256 * MIB), "--eager", "--model-id", "m",
        "--dtype", "float32", "--max-model-len", "4096", "--load-format", "dummy",
    )  # fmt: skip
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    ready = http_ready(f"http://127.0.0.1:{port}/health")
    serve = processes.start(Launch("serve", argv, ready, START_S, variables))
    return Rig(serve, port, index, directory / "run")


def doctor(port: int, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("vllm", "doctor", f"http://127.0.0.1:{port}", "--json", *flags),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=clean_environment(),
    )


def is_known(index: str) -> bool:
    """Whether the index is sure of an engine with the blocks of a prompt of 200 tokens."""
    done = subprocess.run(
        command("inspect", "index", "--targets", index, "--json"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=clean_environment(),
    )
    [told] = json.loads(done.stdout)["indexes"]
    return any(
        one["state"] == "exact" and one["tiers"].get("gpu", {}).get("blocks", 0) >= 200 // 32
        for one in told["holders"]
    )


def test_a_served_model_is_well_is_told_to_the_index_and_leaves_no_process(rig: Rig) -> None:
    told = doctor(rig.port, "--replay", f"ipc://{rig.run_dir / 'replay'}")
    assert told.returncode == 0, told.stdout
    assert json.loads(told.stdout)["well"]
    server = VllmServer(rig.serve, rig.port)
    server.complete(prompt(1, 200), 4)
    eventually(lambda: is_known(rig.index), WAIT_S, "the index knows it")
    family = psutil.Process(rig.serve.pid).children(recursive=True)
    assert any("VLLM" in "".join(one.cmdline()) for one in family)
    rig.serve.terminate()
    assert rig.serve.wait(WAIT_S) == 0
    eventually(lambda: living([one.pid for one in family]) == [], WAIT_S, "no process is left")
    assert os.listdir(rig.run_dir) != []  # it was given, so it stays


def test_a_server_without_our_flags_is_told_what_it_lacks(
    processes: ProcessRunner, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    launch, port = launch_vllm(
        "plain",
        smollm2(tmp_path_factory).directory,
        f"unix:{tmp_path / 'none.sock'}",
        "--load-format=dummy",
        "--prefix-caching-hash-algo=sha256",
    )
    [server] = start_vllm(processes, (launch, port))
    told = doctor(server.port)
    assert told.returncode == 1, told.stdout
    findings = {one["what"]: one for one in json.loads(told.stdout)["findings"]}
    assert findings["block hash"]["mend"] == "--prefix-caching-hash-algo sha256_cbor"
    assert findings["events"]["state"] == "missing"
    assert findings["connector"]["state"] == "ok"
    server.process.end()

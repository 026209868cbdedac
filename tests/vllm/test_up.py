"""`kvtier up --engine vllm` with real vLLM: one prompt, two servers, one cache, no process left."""

import http.client
import json
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.harness.processes import Launch, ProcessRunner, clean_environment
from tests.harness.processes import kvtier_command as command
from tests.harness.waiting import eventually
from tests.support.local_cluster import LocalCluster, living, status_json
from tests.support.paged_models import smollm2
from tests.support.vllm_servers import ANSWER_S, PYTHON, WHY_NOT

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

START_S = 600.0
WAIT_S = 180.0


def ask(url: str, text: str) -> tuple[int, str]:
    """Cached tokens of a completion through the router, and the worker that answered."""
    body = {"model": "m", "prompt": text, "max_tokens": 4, "temperature": 0}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        told = json.loads(reply.read())
    finally:
        connection.close()
    assert reply.status == 200, told
    details = told["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0, reply.headers.get("x-kvtier-worker", "")


def test_two_servers_answer_as_one_cluster_and_leave_no_process(
    processes: ProcessRunner, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path / "kvtier"
    file = processes.config_file(
        "up.toml",
        {
            "cluster": {
                "engine": "vllm",
                "vllm_python": PYTHON,
                "model": str(smollm2(tmp_path_factory).directory),
                "bind": "127.0.0.1:0",
            },
            "store": {
                "dram": {"bytes_max": 256 << 20, "slab_bytes": 64 << 20},
                "nvme": {"enabled": False},
            },
            "vllm": {
                "model_id": "m",
                "flags": ["--dtype=float32", "--max-model-len=4096"],
                "kv_memory_bytes": 256 << 20,
            },
        },
    )
    cluster = LocalCluster(
        processes.start(
            Launch(
                "up",
                command("up", "--config", str(file), "--data-dir", str(root)),
                ready=lambda: "kvtier serves" in _log(processes),
                ready_deadline_s=START_S,
                environment={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            )
        ),
        root,
    )
    told = status_json(root)
    assert [one["state"] for one in told["services"]] == ["up"] * 5
    text = "The quick brown fox jumps over the lazy dog. " * 40
    assert ask(cluster.url, text)[0] == 0
    eventually(lambda: ask(cluster.url, text)[0] >= 300, WAIT_S, "it comes from a cache")
    assert ask(cluster.url, text)[1] in {"worker-1", "worker-2"}
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    assert sum("VLLM" in "".join(one.cmdline()) for one in family) >= 2
    done = subprocess.run(
        command("down", "--data-dir", str(root)),
        capture_output=True, text=True, timeout=WAIT_S, check=False, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert cluster.process.wait(WAIT_S) == 0
    eventually(lambda: living([one.pid for one in family]) == [], WAIT_S, "no process is left")


def _log(processes: ProcessRunner) -> str:
    return processes["up"].log_text()

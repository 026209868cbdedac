"""`kvtier vllm serve` as a supervisor, over a process that is started like vLLM.

What real vLLM makes of the flags is held in tests/vllm.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually
from tests.support.fake_vllm import fake_vllm
from tests.support.local_cluster import living
from tests.support.text_models import byte_level_bpe, write_model

pytestmark = pytest.mark.timeout(180)

WAIT_S = 60.0


def model_in(directory: Path) -> Path:
    model = write_model(directory / "some-model", byte_level_bpe())
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def launch(tmp_path: Path, *flags: str, ready: bool = True, **environment: str) -> Launch:
    port = free_port()
    argv = kvtier_command(
        "vllm", "serve", str(model_in(tmp_path)), "--python", str(fake_vllm(tmp_path)),
        "--index", f"127.0.0.1:{free_port()}", f"--port={port}", *flags,
    )  # fmt: skip
    probe = http_ready(f"http://127.0.0.1:{port}/health") if ready else None
    return Launch("serve", argv, probe, WAIT_S, environment)


def told(process: Process) -> dict[str, Any]:
    """What the fake vLLM said of itself."""
    found = re.search(r"^FAKE (.*)$", process.log_text(), re.MULTILINE)
    assert found is not None
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def bridge_pids(process: Process) -> list[int]:
    """Bridges that were started and still run."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            b"kvtier.local.child" in argv
            and str(process.pid).encode() in argv
            and b"bridge" in argv
        ):
            found.append(pid)
    return living(found)


def bridge_of(process: Process) -> int:
    return eventually(lambda: bridge_pids(process), WAIT_S, "a bridge runs")[0]


def test_it_starts_vllm_with_all_flags_and_a_bridge_that_follows_it(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    serve = processes.start(launch(tmp_path, "--max-model-len=2048"))
    fake = told(serve)
    flags = dict(one.partition("=")[::2] for one in fake["flags"])
    assert flags["--model"] == str(tmp_path / "some-model")
    assert flags["--served-model-name"] == "some-model"
    assert flags["--host"] == "127.0.0.1"
    assert fake["seed"] == "0"  # this release draws a seed of its own
    connector = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
    events = json.loads(flags["--kv-events-config"])
    run_dir = Path(events["endpoint"].removeprefix("ipc://")).parent
    assert run_dir.stat().st_mode & 0o77 == 0
    bridge_of(serve)
    toml = (run_dir / "bridge.toml").read_text()
    assert f'revision = "{connector["revision"]}"' in toml
    assert f'replay = "{events["replay_endpoint"]}"' in toml
    assert connector["residents"] == str(run_dir)
    assert f'residents = "{run_dir}"' in toml
    assert f'namespace = "{"ab" * 32}"' in toml
    serve.terminate()
    assert serve.wait(WAIT_S) == 0
    assert not run_dir.exists()


def test_a_seed_and_threads_of_the_operator_stay(processes: ProcessRunner, tmp_path: Path) -> None:
    serve = processes.start(launch(tmp_path, "--no-bridge", "--cpus=0", PYTHONHASHSEED="77"))
    assert (told(serve)["seed"], told(serve)["cpus"]) == ("77", "0")
    serve.terminate()
    assert serve.wait(WAIT_S) == 0


def test_signals_reach_vllm_and_its_status_is_ours(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    serve = processes.start(launch(tmp_path, "--status=7"))
    bridge = bridge_of(serve)
    child = told(serve)["child"]
    serve.send(signal.SIGUSR1)
    eventually(lambda: "GOT SIGUSR1" in serve.log_text(), WAIT_S, "the signal is there")
    serve.terminate()
    assert serve.wait(WAIT_S) == 7
    assert living([child, bridge, told(serve)["pid"]]) == []


def test_a_killed_vllm_takes_its_children_and_the_bridge_along(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    serve = processes.start(launch(tmp_path))
    bridge = bridge_of(serve)
    os.kill(told(serve)["pid"], signal.SIGKILL)
    assert serve.wait(WAIT_S) == 128 + signal.SIGKILL
    assert living([told(serve)["child"], bridge]) == []


def test_a_bridge_that_is_killed_is_started_again(processes: ProcessRunner, tmp_path: Path) -> None:
    serve = processes.start(launch(tmp_path))
    first = bridge_of(serve)
    os.kill(first, signal.SIGKILL)

    def another() -> bool:
        return any(pid != first for pid in bridge_pids(serve))

    eventually(another, WAIT_S, "another bridge")
    assert living([told(serve)["pid"]])
    serve.terminate()
    assert serve.wait(WAIT_S) == 0


def test_a_vllm_that_does_not_start_ends_it_with_its_status(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    serve = processes.spawn(launch(tmp_path, "--fails", ready=False))
    assert serve.wait(WAIT_S) == 3
    assert bridge_pids(serve) == []


def test_a_vllm_that_does_not_end_in_its_time_is_killed(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    serve = processes.start(launch(tmp_path, "--deaf", "--no-bridge", "--stop-s-max=0.5"))
    serve.terminate()
    assert serve.wait(WAIT_S) == 128 + signal.SIGKILL
    assert living([told(serve)["pid"], told(serve)["child"]]) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--block-size=16", "--block-tokens=32"), "contradicts --block-size 32"),
        (("--data-parallel-size=2",), "several ranks"),
        (("--ssl-certfile=x",), "plain HTTP"),
        (("--bind=127.0.0.1:1",), "not both"),
        (("--cpus=0-9999",), "this machine has"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    processes: ProcessRunner, tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    serve = processes.spawn(launch(tmp_path, *flags, ready=False))
    assert serve.wait(WAIT_S) == 1
    assert complaint in serve.log_text()
    assert "FAKE" not in serve.log_text()


def test_a_python_without_vllm_is_named(processes: ProcessRunner, tmp_path: Path) -> None:
    argv = kvtier_command("vllm", "serve", str(tmp_path), "--python", "/usr/bin/env")
    serve = processes.spawn(Launch("serve", argv))
    assert serve.wait(WAIT_S) == 1
    assert "/usr/bin/env" in serve.log_text()

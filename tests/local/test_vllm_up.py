"""`kvtier up --engine vllm` as a supervisor, over processes that are started like vLLM.

Real vLLM under it is in tests/vllm.
"""

import json
import os
import re
import signal
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.local.commands import config
from kvtier.local.directory import DataDirectory
from kvtier.local.vllm.sharing import cpus_of
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually
from tests.support.fake_vllm import fake_vllm
from tests.support.local_cluster import LocalCluster, living, up_launch
from tests.support.text_models import byte_level_bpe, write_model

pytestmark = pytest.mark.timeout(300)

WAIT_S = 120.0
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Rig:
    cluster: LocalCluster
    model: Path

    def fakes(self, name: str) -> list[dict[str, Any]]:
        """What each life of a server's vLLM said of itself, in order."""
        return [
            json.loads(text) for text in re.findall(r"^FAKE (.*)$", self.cluster.log(name), re.M)
        ]


def up(root: Path) -> set[str]:
    """The workers that serve."""
    state = DataDirectory(root).state()
    services = () if state is None else state.services
    return {one.name for one in services if one.state == "up" and one.name.startswith("worker")}


@pytest.fixture
def rig(processes: ProcessRunner, tmp_path: Path) -> Rig:
    model = write_model(tmp_path / "some-model", byte_level_bpe())
    (model / "model.safetensors").write_bytes(b"weights")
    root = tmp_path / "kvtier"
    fake = str(fake_vllm(tmp_path))
    launch = up_launch(processes, root, engine="vllm", model=str(model), vllm_python=fake)
    # A fake has no events, so no bridge joins the fleet, and the router waits for a worker.
    process = processes.start(replace(launch, ready=lambda: up(root) == {"worker-1", "worker-2"}))
    return Rig(LocalCluster(process, root), model)


def test_it_runs_servers_that_share_the_machine_mends_them_and_leaves_none(rig: Rig) -> None:
    one, two = (rig.fakes(name)[0] for name in ("worker-1", "worker-2"))
    assert one["cpus"] != two["cpus"] or one["cpus"] == "nobind"
    for fake in (one, two):
        flags = dict(text.partition("=")[::2] for text in fake["flags"])
        assert flags["--model"] == str(rig.model)
        assert int(flags["--kv-cache-memory-bytes"]) == 512 << 20
        assert "--enforce-eager" in flags
    guard = rig.cluster.pids["worker-1"]
    os.kill(guard, signal.SIGKILL)
    eventually(lambda: len(rig.fakes("worker-1")) == 2, WAIT_S, "it is started again")
    assert living([one["pid"], one["child"]]) == []
    eventually(lambda: len(up(rig.cluster.root)) == 2, WAIT_S, "both are up again")
    again = rig.fakes("worker-1")[1]
    os.kill(again["pid"], signal.SIGKILL)
    eventually(lambda: len(rig.fakes("worker-1")) == 3, WAIT_S, "and again")
    assert living([again["pid"], again["child"]]) == []
    eventually(lambda: len(up(rig.cluster.root)) == 2, WAIT_S, "both are up again")
    rig.cluster.process.terminate()
    assert rig.cluster.process.wait(WAIT_S) == INTERRUPTED
    last = [*rig.fakes("worker-1"), *rig.fakes("worker-2")]
    assert living([pid for fake in last for pid in (fake["pid"], fake["child"])]) == []


def test_a_killed_supervisor_takes_every_server_along(rig: Rig) -> None:
    fakes = [*rig.fakes("worker-1"), *rig.fakes("worker-2")]
    pids = [pid for fake in fakes for pid in (fake["pid"], fake["child"])]
    assert len(living(pids)) == 4
    rig.cluster.process.kill()
    eventually(lambda: living(pids) == [], WAIT_S, "all are gone")


def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> dict[str, Any]:
    file = tmp_path / "cluster.toml"
    file.write_text(f"[cluster]\nengine = 'vllm'\nvllm_python = '{fake_vllm(tmp_path)}'\n{text}")
    assert config(["show", "--config", str(file)]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_the_section_vllm_has_every_setting_of_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model = 'org/some'\nworkers = 1\n[vllm]\nflags = ['--dtype=float32']\nblock_tokens = 64"
    told = shown(tmp_path, capsys, text)
    worker = told["worker-1"]
    assert worker["model"] == "org/some"
    assert worker["flags"] == ["--dtype=float32"]
    assert worker["block_tokens"] == 64
    assert worker["cpus"] == ""
    assert worker["index"]["targets"] == [told["index"]["listen"]["bind"]]
    smollm2 = shown(tmp_path, capsys, "")["worker-2"]
    assert smollm2["model_id"] == "SmolLM2-135M-Instruct"


def test_in_an_empty_home_the_router_has_the_texts_that_will_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    told = shown(tmp_path, capsys, "")
    directory = tmp_path / "home" / ".cache" / "kvtier" / "models" / "smollm2"
    assert not directory.exists()
    assert told["worker-1"]["model"] == str(directory)
    assert told["router"]["texts"] == [f"*={directory}"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model = 'fake'", "cannot serve fake"),
        ("[vllm]\nflags = ['--block-size=16']\nblock_tokens = 32", "contradicts --block-size 32"),
        ("[vllm]\nmodle = 'x'", "modle"),
        ("[vllm]\nflags = ['--port=1']", "not both"),
    ],
)
def test_what_cannot_work_is_found_by_config_check(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f"[cluster]\nengine = 'vllm'\nvllm_python = '{fake_vllm(tmp_path)}'\n{text}")
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        config(["check", "--config", str(file)])


def test_a_python_without_vllm_is_found_by_config_check() -> None:
    with pytest.raises(ConfigError, match="has no vLLM"):
        config(["check", "--engine", "vllm"])


@pytest.mark.parametrize(
    ("servers", "cpus", "parts"),
    [
        (1, [0, 1], [""]),
        (2, [0, 1], ["0", "1"]),
        (2, [4, 5, 6], ["4", "5,6"]),
        (3, [0, 1], ["nobind"] * 3),
    ],
)
def test_servers_get_processors_of_their_own(
    servers: int, cpus: list[int], parts: list[str]
) -> None:
    assert [cpus_of(number, servers, cpus) for number in range(servers)] == parts

"""`kvtier up` with real processes over the fake model, whose answers show one wrong KV byte."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.local.probes import http_answer
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.waiting import eventually
from tests.support.local_cluster import (
    PATIENT,
    START_S,
    LocalCluster,
    living,
    router_of,
    run_kvtier,
    start_cluster,
    status_json,
    up_launch,
)
from tests.support.worker_cluster import Client, Expected, prompt_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with ProcessRunner("local-cluster", directory) as runner:
        yield start_cluster(runner, directory / "kvtier")


async def test_a_prompt_is_answered_through_the_router_and_found_again(
    cluster: LocalCluster,
) -> None:
    prompt, expected = prompt_of(1, 400), Expected()
    async with router_of(cluster).client() as client:
        first = await _asked(client, prompt)
        again = await _asked(client, prompt)
    assert first.text == again.text == expected.text(prompt, 8)
    assert first.cached == 0
    assert again.cached >= 384


def test_status_tells_every_process_and_the_endpoint(cluster: LocalCluster) -> None:
    told = status_json(cluster.root)
    assert told["endpoint"] == cluster.url
    assert told["supervisor"] == cluster.process.pid
    assert [one["name"] for one in told["services"]] == [
        "index", "store", "worker-1", "worker-2", "router",
    ]  # fmt: skip
    shown = run_kvtier("status", "--data-dir", str(cluster.root))
    assert shown.returncode == 0
    assert "worker-2" in shown.stdout


def test_it_prints_where_it_serves_and_a_curl_line(cluster: LocalCluster) -> None:
    def printed() -> bool:
        return f"curl {cluster.url}/v1/chat/completions" in cluster.process.log_text()

    eventually(printed, START_S, "the endpoint is printed")
    assert "kvtier-fake" in cluster.process.log_text()
    page = http_answer(cluster.state.admin, "/ui")
    assert page[0] in {200, 301, 302, 308}
    assert f"dashboard: http://{cluster.state.admin}/ui" in cluster.process.log_text()


def test_a_second_cluster_in_the_same_directory_is_refused(cluster: LocalCluster) -> None:
    refused = run_kvtier("up", "--model", "fake", "--data-dir", str(cluster.root))
    assert refused.returncode == 1
    assert str(cluster.root) in refused.stderr
    assert str(cluster.process.pid) in refused.stderr
    assert cluster.all_up()


def test_ctrl_c_leaves_nothing_and_a_cluster_keeps_its_addresses_and_blocks(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    root = tmp_path / "kvtier"
    cluster = start_cluster(processes, root, workers=1, worker=PATIENT)
    pids, url = cluster.pids, cluster.url
    prompt, expected = prompt_of(3, 400), Expected()
    assert asyncio.run(_one(cluster, prompt)).text == expected.text(prompt, 8)

    cluster.process.send(signal.SIGINT)
    assert cluster.process.wait(60) == 0
    assert not living(list(pids.values()))
    assert not (root / "run").exists()
    assert run_kvtier("status", "--data-dir", str(root)).returncode == 3
    assert run_kvtier("down", "--data-dir", str(root)).returncode == 0

    again = start_cluster(processes, root, "again", workers=1, worker=PATIENT)
    assert again.url == url
    found = asyncio.run(_one(again, prompt))
    assert found.text == expected.text(prompt, 8)
    assert found.cached > 0  # from the disk: nothing else has outlived the cluster

    pids = again.pids
    again.process.kill()
    eventually(lambda: not living(list(pids.values())), 30, "no process outlives its supervisor")
    # What a killed supervisor leaves behind misleads nobody.
    assert (root / "state.json").exists()
    assert run_kvtier("status", "--data-dir", str(root)).returncode == 3
    (root / "LOCK").write_text(f"{os.getpid()}\n")  # as if its pid were somebody else's by now
    stopped = run_kvtier("down", "--data-dir", str(root))
    assert stopped.returncode == 0
    assert "no cluster runs" in stopped.stdout
    third = start_cluster(processes, root, "third", workers=1, worker=PATIENT)
    assert third.url == url
    assert run_kvtier("down", "--data-dir", str(root)).returncode == 0
    assert third.process.wait(60) == 0


def test_a_signal_in_the_midst_of_the_start_ends_what_has_begun(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    root = tmp_path / "kvtier"
    process = processes.spawn(up_launch(processes, root, workers=1))
    cluster = LocalCluster(process, root)
    eventually(lambda: (root / "state.json").exists() and cluster.pids, 60, "something runs")
    pids = list(cluster.pids.values())
    process.send(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not living(pids)


def test_a_signal_while_the_model_is_made_ends_that_too(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    argv = kvtier_command("up", "--model", "smollm2", "--data-dir", str(tmp_path / "kvtier"))
    process = processes.spawn(Launch("up", argv, environment={"HOME": str(home)}))
    eventually(lambda: "converting" in process.log_text(), START_S, "the model is being made")
    process.send(signal.SIGTERM)
    assert process.wait(60) == 130
    assert process.session_usage().threads_count == 0, "nothing that it started goes on"
    assert not (home / ".cache" / "kvtier" / "models" / "smollm2").exists()


def test_what_does_not_start_is_told_with_its_log_and_everything_else_ends(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    root = tmp_path / "kvtier"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file = processes.config_file("taken.toml", {"store": {"listen": {"bind": address}}})
        refused = run_kvtier(
            "up", "--config", str(file), "--data-dir", str(root), "--model", "fake"
        )
    assert refused.returncode == 1
    assert "store ended with status 1" in refused.stderr
    assert f"cannot listen on {address}" in refused.stderr
    assert run_kvtier("status", "--data-dir", str(root)).returncode == 3


def test_a_process_that_keeps_ending_is_started_less_and_less_often(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    cluster = start_cluster(processes, tmp_path / "kvtier", workers=1)
    for number in range(1, 4):
        os.kill(cluster.pids["index"], signal.SIGKILL)

        def mended(wanted: int = number) -> bool:
            return cluster.restarts("index") == wanted and cluster.all_up()

        eventually(mended, START_S, f"the index is mended {number} times")
    told = cluster.process.log_text()
    pauses = [line.rpartition(" in ")[2] for line in told.splitlines() if "starting again" in line]
    assert pauses == ["0.5 s", "1 s", "2 s"]


@dataclass(frozen=True, slots=True)
class Found:
    """An answer of the router, and how much of its prompt was cached."""

    text: str
    cached: int


async def _asked(client: Client, prompt: list[int]) -> Found:
    body = {"model": "kvtier-fake", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    async with client.session.post(f"{client.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        told = await response.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Found(told["choices"][0]["text"], cached)


async def _one(cluster: LocalCluster, prompt: list[int]) -> Found:
    async with router_of(cluster).client() as client:
        return await _asked(client, prompt)

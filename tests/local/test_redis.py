"""A cluster that keeps blocks in a Redis: one of its own, or one that was there before."""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlTable
from tests.harness.valkey import ValkeyOptions, command, requires_valkey, start_valkey
from tests.harness.waiting import eventually
from tests.support.local_cluster import (
    PATIENT,
    START_S,
    LocalCluster,
    router_of,
    run_kvtier,
    start_cluster,
)
from tests.support.worker_cluster import Expected, prompt_of

pytestmark = [pytest.mark.timeout(300), requires_valkey]

COLD: TomlTable = {**PATIENT, "hot_set": {"prefetch_ms_max": 0}}
"""A worker that comes back asks for blocks when a request wants them."""
STORE = {"nvme": {"enabled": False}, "redis": {"write_policy": "on_seal", "touches_min": 1}}
PROMPT = prompt_of(5, 400)
EXPECTED = Expected().text(PROMPT, 8)


def start(runner: ProcessRunner, root: Path, redis: str, name: str = "up") -> LocalCluster:
    return start_cluster(runner, root, name, store=STORE, worker=COLD, workers=1, redis=redis)


def redis_tokens(cluster: LocalCluster) -> int:
    """Ask for the prompt, check the answer, and tell how much of it came from Redis."""

    async def asked() -> int:
        body = {"model": "kvtier-fake", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        headers = {"x-kvtier-explain": "1"}
        async with (
            router_of(cluster).client() as client,
            client.session.post(
                f"{client.url}/v1/completions", json=body, headers=headers
            ) as response,
        ):
            assert response.status == 200, await response.text()
            told = await response.json()
        assert told["choices"][0]["text"] == EXPECTED
        return int(told["usage"]["kvtier"]["cached_tokens"]["redis"])

    return asyncio.run(asked())


def kill(cluster: LocalCluster, *names: str) -> None:
    """SIGKILL, and wait until all is well again."""
    before = {name: cluster.restarts(name) for name in names}
    for name in names:
        os.kill(cluster.pids[name], signal.SIGKILL)

    def mended() -> bool:
        return cluster.all_up() and all(cluster.restarts(name) > before[name] for name in names)

    eventually(mended, START_S, f"{names} are mended")


def comes_from_redis(cluster: LocalCluster) -> None:
    """Where a busy machine computed the prompt before it was loaded, it is tried again cold."""

    def has_come() -> bool:
        if redis_tokens(cluster) >= 200:
            return True
        kill(cluster, "store", "worker-1")
        return False

    eventually(has_come, 150, "the prompt comes from Redis")


def test_an_embedded_redis_outlives_store_and_worker_and_is_mended_itself(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    cluster = start(processes, tmp_path / "kvtier", "embedded")
    assert next(one.name for one in cluster.state.services) == "redis"
    path = next(one.address for one in cluster.state.services if one.name == "redis")

    def keys() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2)
            connection.connect(path.removeprefix("unix:"))
            connection.sendall(b"DBSIZE\r\n")
            return connection.recv(64)

    assert redis_tokens(cluster) == 0
    eventually(lambda: int(keys()[1:]) >= 24, 30, "the prompt's blocks are in Redis")
    kill(cluster, "store", "worker-1")
    comes_from_redis(cluster)
    kill(cluster, "redis")
    assert redis_tokens(cluster) >= 0  # whatever was found, the answer was right
    assert Path(path.removeprefix("unix:")).stat().st_mode & 0o77 == 0


def test_a_redis_by_url_keeps_blocks_over_a_restart_and_its_password_is_not_told(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    server = start_valkey(processes, options=ValkeyOptions(password="hunter2hunter2"))
    root = tmp_path / "kvtier"
    cluster = start(processes, root, server.url)
    assert "redis" not in cluster.pids
    assert redis_tokens(cluster) == 0

    def keys() -> int:
        return int(command(server.port, "DBSIZE", password=server.password)[1:])

    eventually(lambda: keys() >= 24, 30, "the prompt's blocks are in Redis")
    assert run_kvtier("down", "--data-dir", str(root)).returncode == 0
    assert cluster.process.wait(60) == 0
    assert keys() >= 24
    again = start(processes, root, server.url, "again")
    comes_from_redis(again)
    told = json.dumps(run_kvtier("status", "--json", "--data-dir", str(root)).stdout)
    logs = "".join(path.read_text() for path in (root / "logs").glob("*.log"))
    assert "hunter2" not in told + logs + again.process.log_text()
    assert (root / "config" / "store.toml").stat().st_mode & 0o77 == 0


def test_a_redis_that_is_not_there_costs_hits_and_nothing_else(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    cluster = start(processes, tmp_path / "kvtier", f"redis://127.0.0.1:{port}/0")
    assert redis_tokens(cluster) == 0
    assert redis_tokens(cluster) == 0
    assert cluster.all_up()

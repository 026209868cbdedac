"""A fleet and a batch as jobs of a real Ray cluster of two nodes, with processes killed in between.

Tests run in order on one cluster: it is up, it does a batch, it mends itself, it is down.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvtier.local.directory import DataDirectory
from kvtier.local.probes import grpc_serving, http_ok
from tests.harness.processes import REPOSITORY
from tests.harness.toml_text import TomlTable, toml_text
from tests.harness.waiting import eventually, eventually_async
from tests.support.local_cluster import MIB, living
from tests.support.openai_stub import serving
from tests.support.ray_cluster import WHY_NOT, RayCluster, processes_of, ray_cluster
from tests.support.worker_cluster import Expected, prompt_of

if WHY_NOT is not None:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

MEND_S = 240.0
GROUPS, OF_EACH, COUNT = 5, 16, 8


@dataclass(frozen=True, slots=True)
class UpFleet:
    ray: RayCluster
    services: dict[str, dict[str, Any]]
    urls: list[str]

    @property
    def data_dir(self) -> Path:
        return self.ray.root / "fleet"

    def keeper(self, name: str) -> int | None:
        """Pid of the actor that keeps a service now."""
        return DataDirectory(self.data_dir / self.services[name]["node"] / name).supervisor()


@pytest.fixture(scope="module")
def fleet() -> Iterator[UpFleet]:
    with ray_cluster() as cluster:
        path = cluster.root / "fleet.toml"
        table: TomlTable = {
            "ray": {"model": "fake", "data_dir": str(cluster.root / "fleet"), "ready_s_max": 200.0},
            "store": {
                "dram": {"bytes_max": 64 * MIB, "slab_bytes": 8 * MIB},
                "nvme": {"bytes_max": 256 * MIB},
            },
            "worker": {
                "cache": {"kv_memory_bytes": 64 * MIB},
                "model": {"threads": 1, "fake": {"prefill_tokens_per_s": 3000.0, "step_ms": 20.0}},
            },
        }
        path.write_text(toml_text(table))
        job = cluster.run("up", "--config", str(path))
        assert job.succeeded, job.text
        services = {one["name"]: one for one in job.told["services"]}
        yield UpFleet(cluster, services, job.told["urls"])


def prompts() -> list[list[int]]:
    """Groups with 160 tokens in common, dealt out in turn."""
    return [
        prompt_of(group, 160) + prompt_of(100 + number, 24)
        for number in range(OF_EACH)
        for group in range(GROUPS)
    ]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_each_node_has_a_store_and_a_worker_and_the_head_has_index_and_router(
    fleet: UpFleet,
) -> None:
    assert {(one["name"], one["kind"], one["node"]) for one in fleet.services.values()} == {
        ("index", "index", "a"),
        ("store-a", "store", "a"),
        ("store-b", "store", "b"),
        ("worker-a-1", "worker", "a"),
        ("worker-b-1", "worker", "b"),
        ("router", "router", "a"),
    }
    assert all(one["state"] == "serving" for one in fleet.services.values())
    assert fleet.services["worker-b-1"]["address"].startswith("127.0.0.3:")
    assert fleet.urls == [f"http://{fleet.services['router']['address']}"]


def test_a_batch_whose_worker_and_own_actor_are_killed_has_every_row_once(fleet: UpFleet) -> None:
    asked = prompts()
    rows = fleet.ray.root / "rows.jsonl"
    rows.write_text(
        "".join(
            f"{json.dumps({'custom_id': f'id-{n}', 'prompt': p, 'max_tokens': COUNT})}\n"
            for n, p in enumerate(asked)
        )
    )
    out = fleet.ray.root / "out"
    results = out / "results.jsonl"
    job = fleet.ray.submit(
        "batch", "--inputs", str(rows), "--out", str(out), "--window", "2",
        "--body", '{"temperature": 0}',
    )  # fmt: skip
    try:
        eventually(lambda: len(lines_of(results)) >= 10, MEND_S, "the batch is under way")
        [actor] = processes_of(fleet.ray, "ray::BatchActor")
        actor.suspend()
        before = lines_of(results)
        assert len(before) < len(asked)
        [worker] = [
            p for p in processes_of(fleet.ray) if p.pid == fleet.services["worker-b-1"]["pid"]
        ]
        worker.kill()
        actor.kill()
    finally:
        ended = fleet.ray.done(job)
    assert ended.succeeded, ended.text
    told = lines_of(results)
    assert told[: len(before)] == before
    assert sorted(one["custom_id"] for one in told) == sorted(f"id-{n}" for n in range(len(asked)))
    expected = Expected()
    for one in told:
        prompt = asked[int(one["custom_id"].removeprefix("id-"))]
        assert one["response"]["status_code"] == 200, one
        assert one["response"]["body"]["choices"][0]["text"] == expected.text(prompt, COUNT)
    summary = ended.told
    assert (summary["rows"], summary["failed"]) == (len(asked), 0)
    assert summary["rows_of_earlier_runs"] >= len(before)
    assert summary["prompt_tokens"] == sum(map(len, asked))
    assert summary["cached_tokens"] > 0.5 * summary["prompt_tokens"]


def written_data_set(folder: Path) -> list[str]:
    """Two files of several row groups; the prompts of all rows."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    questions = [f"group {n % 5} " * 60 + f"question {n}" for n in range(60)]
    for part in range(2):
        mine = range(part, len(questions), 2)
        columns = {
            "custom_id": [f"id-{n}" for n in mine],
            "messages": [[{"role": "user", "content": questions[n], "name": None}] for n in mine],
            "max_tokens": [None if n % 3 else n + 1 for n in mine],
        }
        parquet.write_table(arrow.table(columns), folder / f"{part}.parquet", row_group_size=7)
    return questions


async def test_a_data_set_of_ray_has_every_row_once_although_its_actor_is_killed(
    fleet: UpFleet,
) -> None:
    folder, out = fleet.ray.root / "data", fleet.ray.root / "of-data"
    questions = written_data_set(folder)
    hold = asyncio.Event()

    async def rule(_prompt: str, _before: int) -> web.Response | None:
        if len(stub.asked) > 20 and not hold.is_set():
            await hold.wait()
        return None

    async with serving(rule) as stub:
        job = fleet.ray.submit(
            "batch", "--ray-data", f"parquet:{folder}", "--out", str(out), "--window", "4",
            "--urls", stub.url,
        )  # fmt: skip
        ended = asyncio.create_task(asyncio.to_thread(fleet.ray.done, job))

        async def is_held() -> bool:
            return stub.at_once == 4 or ended.done()

        await eventually_async(is_held, MEND_S, "the whole window is under way")
        assert not ended.done(), ended.result().text
        [actor] = processes_of(fleet.ray, "ray::BatchActor")
        actor.kill()
        first = list(stub.asked)
        hold.set()
        done = await ended
    assert done.succeeded, done.text
    rows = {one["custom_id"]: one for one in lines_of(out / "results.jsonl")}
    assert len(rows) == len(lines_of(out / "results.jsonl"))
    assert {name: row["response"]["body"]["choices"][0]["text"] for name, row in rows.items()} == {
        f"id-{n}": text[-20:][::-1] for n, text in enumerate(questions)
    }
    assert len([text for text in stub.asked[len(first) :] if text in first]) == 4
    assert done.told["rows_of_earlier_runs"] == len(first) - 4
    asked = {body["messages"][0]["content"]: body for body in stub.bodies}
    for n, text in enumerate(questions):
        assert asked[text]["messages"] == [{"role": "user", "content": text}]
        assert asked[text].get("max_tokens") == (None if n % 3 else n + 1)


async def test_a_program_sends_its_own_data_set_as_the_page_shows(fleet: UpFleet) -> None:
    folder, out = fleet.ray.root / "data", fleet.ray.root / "of-program"
    page = (REPOSITORY / "docs" / "ray.md").read_text()
    [shown] = [part for part in page.split("```python\n")[1:] if "dataset_rows" in part]
    program = fleet.ray.root / "program.py"
    async with serving() as stub:
        text = shown.partition("```")[0].replace("http://127.0.0.1:8000", stub.url)
        program.write_text(
            "from pathlib import Path\nimport ray\n"
            f"out = Path({str(out)!r})\n"
            f"dataset = ray.data.read_parquet({str(folder)!r}).filter(lambda row: "
            "row['max_tokens'] is not None)\n"
            f"{text}"
        )
        done = await asyncio.to_thread(
            lambda: fleet.ray.done(fleet.ray.submit_program(str(program)))
        )
    assert done.succeeded, done.text
    names = [one["custom_id"] for one in lines_of(out / "results.jsonl")]
    assert sorted(names) == sorted(f"id-{n}" for n in range(0, 60, 3))
    assert all(body["max_tokens"] for body in stub.bodies)


def test_a_killed_service_and_a_killed_actor_come_back_at_their_addresses(fleet: UpFleet) -> None:
    """The worker was killed by the test before this one; here it is a store's actor."""
    address = fleet.services["worker-b-1"]["address"]
    eventually(http_ok(address, "/health"), MEND_S, "the worker is back")
    before, child = fleet.keeper("store-b"), fleet.services["store-b"]["pid"]
    [actor] = [p for p in processes_of(fleet.ray, "ray::ServiceActor") if p.pid == before]
    actor.kill()
    eventually(lambda: not living([child]), MEND_S, "its service ends with it")
    eventually(lambda: fleet.keeper("store-b") not in {None, before}, MEND_S, "it is restarted")
    serves = grpc_serving(fleet.services["store-b"]["address"])
    eventually(serves, MEND_S, "the store is back where it was")


def test_a_killed_controller_goes_on_and_down_leaves_nothing(fleet: UpFleet) -> None:
    [controller] = processes_of(fleet.ray, "ray::Controller")
    controller.kill()
    job = fleet.ray.run("down")
    assert job.succeeded, job.text
    assert "stopped the fleet" in job.text
    assert not [p for p in processes_of(fleet.ray) if "kvtier.local.child" in p.cmdline()]
    assert not processes_of(fleet.ray, "ray::ServiceActor")

"""The laptop's compose file without a container engine: read by the real loaders, then run.

Its services run as plain processes with the commands, variables, configuration files and health
checks that containers would have; ports and paths are put elsewhere, and the model is the fake one.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.config import Root, load
from kvtier.sections import Reach, parse_address
from kvtier_router.config import RouterConfig, check_listen
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.worker.config import WorkerConfig
from tests.harness.ports import free_port
from tests.harness.processes import Launch, ProcessRunner, clean_environment
from tests.harness.readiness import ReadyProbe, grpc_ready, http_ready
from tests.harness.waiting import eventually, eventually_async
from tests.support.compose_file import AsProcesses, Service, read_compose
from tests.support.dockerfile import read_dockerfile
from tests.support.worker_cluster import Expected, WorkerProcess, prompt_of

pytestmark = pytest.mark.timeout(240)

DOCKER = Path(__file__).resolve().parents[2] / "deploy" / "docker"
FILE = read_dockerfile(DOCKER / "Dockerfile")
AS_IT_IS = read_compose(DOCKER / "compose.yaml", {})
CONFIGS: dict[str, type[Root]] = {
    "index": IndexConfig,
    "store": StoreConfig,
    "worker": WorkerConfig,
    "router": RouterConfig,
}
MIB = 1 << 20
START_S = 120.0
WORKERS = ("worker-1", "worker-2")


def configured(service: Service) -> Root:
    """What the service would run with, by its own loader; raises for anything it does not know."""
    role, *flags = service.command or FILE.last(service.target, "CMD").argv
    at = f"/etc/kvtier/{role}.toml"
    assert flags[:2] == ["--config", at]
    argv = ["--config", str(DOCKER / service.mounts[at]), *flags[2:]]
    return load(CONFIGS[role], argv, service.environment).config


@pytest.mark.parametrize("name", AS_IT_IS.services)
def test_every_command_file_and_variable_is_one_that_the_service_knows(name: str) -> None:
    service = AS_IT_IS.services[name]
    config = configured(service)
    assert isinstance(config, IndexConfig | StoreConfig | WorkerConfig | RouterConfig)
    if isinstance(config, RouterConfig):
        check_listen(config)
    assert service.raw["read_only"] is True
    assert service.raw["cap_drop"] == ["ALL"]
    grace_s = int(str(service.raw.get("stop_grace_period", "10s")).removesuffix("s"))
    assert grace_s * 1000 > config.drain_ms_max


def test_services_call_each_other_where_they_listen_and_only_the_router_is_published() -> None:
    configs = {name: configured(service) for name, service in AS_IT_IS.services.items()}
    index = configs["index"]
    assert isinstance(index, IndexConfig)
    index_at = f"index:{parse_address(index.listen.bind).port}"
    for name, config in configs.items():
        if isinstance(config, StoreConfig | WorkerConfig | RouterConfig):
            assert config.index.targets == (index_at,), name
        if isinstance(config, WorkerConfig):
            port = parse_address(config.listen.bind).port
            assert (config.instance, config.advertise) == (name, f"{name}:{port}")
    published = {name: one.published for name, one in AS_IT_IS.services.items() if one.published}
    assert published == {"router": ("127.0.0.1:8000:8000",)}
    assert parse_address("127.0.0.1:8000").reach is Reach.LOCAL


def test_workers_meet_the_store_in_one_volume_under_one_user_and_share_nothing_else() -> None:
    store = AS_IT_IS.services["store"]
    config = configured(store)
    assert isinstance(config, StoreConfig)
    assert config.run_dir is not None
    assert store.mounts[str(config.run_dir)] == "sockets"
    for name in WORKERS:
        worker = AS_IT_IS.services[name]
        told = configured(worker)
        assert isinstance(told, WorkerConfig)
        assert told.store.targets == (f"unix:{config.run_dir}/store.sock",)
        assert (told.node, told.offload.store_instance) == (config.node, config.instance)
        assert worker.mounts[str(config.run_dir)] == "sockets"
        assert str(config.run_dir) in worker.read_only
        assert FILE.last(worker.target, "USER") == FILE.last(store.target, "USER")
    for service in AS_IT_IS.services.values():
        assert not {"ipc", "pid", "shm_size", "privileged", "network_mode"} & set(service.raw)
        volumes = {source for source in service.mounts.values() if not source.startswith(".")}
        assert volumes <= AS_IT_IS.volumes


def test_the_stores_memory_fits_into_its_limit() -> None:
    store = AS_IT_IS.services["store"]
    config = configured(store)
    assert isinstance(config, StoreConfig)
    needed = config.dram.bytes_max + config.dram.segments_bytes_max
    needed += config.staging_bytes_max + config.in_flight_bytes_max + 300 * MIB
    assert needed <= 0.9 * store.memory_bytes  # of which it takes nine tenths at most
    assert config.dram.segments_bytes_max >= 64 * MIB * len(WORKERS)


# Running


@dataclass(frozen=True, slots=True)
class Running:
    """All services of the file."""

    runner: ProcessRunner
    compose: AsProcesses

    def worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(self.runner[name], self.compose.ports[name])

    def health(self, name: str) -> subprocess.CompletedProcess[str]:
        """What the image's HEALTHCHECK says."""
        return subprocess.run(
            self.compose.health_argv(name), capture_output=True, text=True, timeout=60,
            check=False, env=clean_environment() | self.compose.environment(name),
        )  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("laptop")
    places = {"sockets": root / "run", "blocks": root / "blocks", "models": Path.home() / ".cache"}
    (root / "run").mkdir(mode=0o700)
    compose = AsProcesses(
        read_compose(DOCKER / "compose.yaml", {"MODEL": "fake"}), FILE, places, root
    )
    with ProcessRunner("compose", root) as runner:
        for group in (("index",), ("store",), WORKERS, ("router",)):
            runner.start_all([launch(compose, name) for name in group])
        yield Running(runner, compose)


def launch(compose: AsProcesses, name: str) -> Launch:
    at = f"127.0.0.1:{compose.ports[name]}"
    path = "/ready" if name == "router" else "/health"
    http: ReadyProbe = http_ready(f"http://{at}{path}")
    return Launch(
        name, compose.argv(name), environment=compose.environment(name) | own(name),
        ready=grpc_ready(at) if name in {"index", "store"} else http, ready_deadline_s=START_S,
    )  # fmt: skip


def own(name: str) -> dict[str, str]:
    """What is a container's own, or the machine's: a second port, the model's speed, patience."""
    if name == "router":
        return {"KVTIER_ROUTER_ADMIN_BIND": f"127.0.0.1:{free_port()}"}
    if name == "index":
        return {"KVTIER_INDEX_LEASE_MS": "20000"}
    if name not in WORKERS:
        return {}
    return {
        "KVTIER_WORKER_MODEL_FAKE_PREFILL_TOKENS_PER_S": "2000",
        "KVTIER_WORKER_OFFLOAD_LOOKUP_MS_MAX": "5000",
    }


def test_the_order_of_starting_is_the_one_that_the_file_asks_for() -> None:
    asked = {name: set(service.after) for name, service in AS_IT_IS.services.items()}
    assert asked["store"] == {"index"}
    assert asked["worker-1"] == asked["worker-2"] == {"index", "store"}
    assert asked["router"] == set(WORKERS)


@pytest.mark.parametrize("name", AS_IT_IS.services)
def test_the_images_health_check_finds_each_service_well(running: Running, name: str) -> None:
    # One that is too busy to answer in time is asked again, as an engine would.
    said = eventually(lambda: running.health(name).stdout, START_S, f"{name} is well")
    assert said == "ok\n"


async def test_a_prompt_is_answered_twice_and_the_second_time_from_a_cache(
    running: Running,
) -> None:
    prompt, expected = prompt_of(3, 400), Expected()
    router = WorkerProcess(running.runner["router"], running.compose.ports["router"])
    async with router.client() as client:
        first = await client.answer(prompt, 8)
        again = await client.answer(prompt, 8)
    assert first.text == again.text == expected.text(prompt, 8)
    assert first.cached == {}
    assert sum(again.cached.values()) >= 384


async def test_what_one_worker_computed_the_other_one_has_from_the_store(running: Running) -> None:
    expected, found = Expected(), []
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(running.worker(name).client()) for name in WORKERS
        ]

        async def written() -> bool:
            waiting = [
                await one.metric("kvtier_worker_saves_waiting", state=state)
                for state in ("queued", "in_flight")
            ]
            return not any(waiting)

        # A store that was slow to answer is a miss, which is no fault of the file.
        for number in range(11, 17):
            prompt = prompt_of(number, 400)
            await one.answer(prompt, 8)
            await eventually_async(written, 30, "its blocks are written")
            known = await other.answer(prompt, 8)
            assert known.text == expected.text(prompt, 8)
            found.append(dict(known.cached))
            if known.cached.get("dram", 0) >= 384:
                break
    assert found[-1].get("dram", 0) >= 384, found


def test_shared_memory_has_no_name_that_containers_would_have_to_share(
    running: Running,
) -> None:
    for name in ("store", *WORKERS):
        maps = Path(f"/proc/{running.runner[name].pid}/maps").read_text()
        assert "/memfd:kvtier" in maps, name
        assert "/dev/shm/" not in maps, name


async def test_a_store_that_is_gone_is_found_sick(running: Running) -> None:
    await asyncio.to_thread(running.runner["store"].kill)
    told = await asyncio.to_thread(running.health, "store")
    assert told.returncode == 1
    assert "kvtier health store" in told.stderr

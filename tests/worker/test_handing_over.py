"""Lists of hot sets in a real store, and the end of a worker as operators and clients see it."""

import asyncio
import io
import json
import ssl
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from kvtier.client.store import BlockStoreClient, SharedMemory, StoreClientConfig
from kvtier.config import Secret, load
from kvtier.core.planner import WritePolicy
from kvtier.errors import ConfigError
from kvtier.sections import DialConfig, ListenConfig, TlsConfig
from kvtier.security import certs
from kvtier.security.roles import new_principal
from kvtier.types import Fingerprint, InstanceId, PrefixKey, ScopeId, Tier
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import serve as serve_index
from kvtier_services.store.config import RedisSection
from kvtier_services.worker.config import (
    CacheSection,
    FakeSection,
    HotSetSection,
    ModelSection,
    OffloadSection,
    WorkerConfig,
)
from kvtier_services.worker.draining import drain_command
from kvtier_services.worker.l2.heat import NO_BLOCK_BEFORE, HotBlock, HotSet
from kvtier_services.worker.l2.hot_record import page_name
from kvtier_services.worker.l2.shelf import PLACES_COUNT, HotSetShelf
from kvtier_services.worker.main import serve
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.support.peer_stores import some_nodes
from tests.support.store_service import a_store, small_store
from tests.tiers.contract import soon

pytestmark = pytest.mark.timeout(120)
NAMESPACE = Fingerprint(b"\x05" * 32)
PAGE = 4096
WORKER = WorkerConfig(
    listen=ListenConfig(bind="127.0.0.1:0"),
    model=ModelSection(model="fake", fake=FakeSection(token_bytes=256)),
    cache=CacheSection(kv_memory_bytes=4 << 20),
    offload=OffloadSection(write_policy=WritePolicy.ON_EVICT),
    instance="w0",
)


def hot_of(*numbers: int) -> HotSet:
    return tuple(
        HotBlock(PrefixKey(n.to_bytes(32)), NO_BLOCK_BEFORE, ScopeId(""), 1.0) for n in numbers
    )


def client_of(target: str) -> BlockStoreClient:
    config = StoreClientConfig(deadline_s=20.0, shared_memory=SharedMemory.NEVER)
    return BlockStoreClient(DialConfig(targets=(target,)), config)


def shelf_of(client: BlockStoreClient, instance: str, page: int = PAGE) -> HotSetShelf:
    return HotSetShelf(client, NAMESPACE, page, InstanceId(instance))


# Lists in the store


async def test_a_worker_finds_what_it_left_itself_before_what_others_left(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (running, _),
        client_of(f"127.0.0.1:{running.port}") as client,
    ):
        lists = {f"w{n}": hot_of(*range(n, n + 300)) for n in range(5)}
        for name, hot in lists.items():
            assert await shelf_of(client, name).leave(hot, 30.0)
        for name, hot in lists.items():
            assert await shelf_of(client, name).find(30.0) == (name, hot)


async def test_newcomers_take_lists_of_others_and_spread_over_them(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (running, _),
        client_of(f"127.0.0.1:{running.port}") as client,
    ):
        assert await shelf_of(client, "new").find(30.0) is None
        for n in range(4):
            assert await shelf_of(client, f"w{n}").leave(hot_of(n), 30.0)
        taken = set()
        for n in range(16):
            found = await shelf_of(client, f"new{n}").find(30.0)
            assert found is not None
            assert found == await shelf_of(client, f"new{n}").find(30.0)
            taken.add(found[0])
        assert len(taken) > 1


async def test_a_list_is_replaced_by_the_next_of_the_same_worker(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (running, _),
        client_of(f"127.0.0.1:{running.port}") as client,
    ):
        shelf = shelf_of(client, "w0")
        for hot in (hot_of(*range(500)), hot_of(7), hot_of(*range(100, 400))):
            assert await shelf.leave(hot, 30.0)
            assert await shelf.find(30.0) == ("w0", hot)


async def test_where_all_places_are_taken_the_last_comer_still_finds_one(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (running, _),
        client_of(f"127.0.0.1:{running.port}") as client,
    ):
        for n in range(PLACES_COUNT + 2):
            assert await shelf_of(client, f"w{n}").leave(hot_of(n), 30.0)
        last = f"w{PLACES_COUNT + 1}"
        assert await shelf_of(client, last).find(30.0) == (last, hot_of(PLACES_COUNT + 1))


async def test_what_is_no_list_is_passed_over(tmp_path: Path) -> None:
    async with (
        a_store(small_store(tmp_path)) as (running, _),
        client_of(f"127.0.0.1:{running.port}") as client,
    ):
        names = [page_name(NAMESPACE, place, 0) for place in range(PLACES_COUNT // 2)]
        await client.put_many(names, [b"\xee" * PAGE] * len(names))
        assert await shelf_of(client, "w0").find(30.0) is None
        assert await shelf_of(client, "w0").leave(hot_of(3), 30.0)
        assert await shelf_of(client, "w0").find(30.0) == ("w0", hot_of(3))


async def test_an_absent_store_and_blocks_too_short_cost_only_the_hand_over(
    tmp_path: Path,
) -> None:
    async with client_of(f"unix:{tmp_path / 'none.sock'}") as client:
        assert await shelf_of(client, "w0").find(0.5) is None
        assert not await shelf_of(client, "w0", page=1024).leave(hot_of(1), 0.5)


# The end of a worker


async def asked(url: str, prompt: str = "word " * 60) -> dict[str, int]:
    """Cached tokens by tier."""
    body = {"model": "kvtier-fake", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    async with (
        aiohttp.ClientSession(headers={"x-kvtier-explain": "1"}) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        told = await response.json()
    tiers: dict[str, int] = told["usage"]["kvtier"]["cached_tokens"]
    return {tier: count for tier, count in tiers.items() if count}


async def status(
    method: str, url: str, token: str | None = None, tls: ssl.SSLContext | bool = True
) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, url, ssl=tls) as response,
    ):
        return response.status


async def test_a_successor_serves_its_first_request_from_its_own_memory(tmp_path: Path) -> None:
    async with a_store(small_store(tmp_path)) as (running, _):
        config = replace(WORKER, store=DialConfig(targets=(f"unix:{running.socket}",)))
        async with serve(config, io.StringIO()) as first:
            assert await asked(f"http://127.0.0.1:{first.port}") == {}
            assert await asked(f"http://127.0.0.1:{first.port}") == {"gpu": 288}
        assert first.leaving.left_blocks > 0
        async with serve(config, io.StringIO()) as second:
            assert second.core.prefetched.loaded == first.leaving.left_blocks
            assert await asked(f"http://127.0.0.1:{second.port}") == {"gpu": 288}


async def test_a_successor_on_another_node_finds_the_hot_set_at_its_predecessors_store(
    tmp_path: Path,
) -> None:
    async with some_nodes(tmp_path, "a", "b") as nodes:
        near, far = (
            replace(WORKER, instance=f"w-{name}", store=DialConfig(targets=(f"unix:{one.socket}",)))
            for name, one in nodes.stores.items()
        )
        async with serve(near, io.StringIO()) as first:
            assert await asked(f"http://127.0.0.1:{first.port}") == {}
        left = first.leaving.left_blocks
        assert left > 0

        async def is_told() -> bool:  # all blocks, and the list
            return len(nodes.held_by("a")) == left + 1

        await eventually_async(is_told, 30, "the index knows what the first store has")
        async with serve(far, io.StringIO()) as second:
            assert second.core.prefetched.loaded == left
            assert await asked(f"http://127.0.0.1:{second.port}") == {"gpu": 288}
        assert nodes.fetched("b") >= left


@requires_valkey
async def test_a_successor_on_another_node_finds_the_hot_set_in_a_shared_redis(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    valkey = await asyncio.to_thread(start_valkey, processes)
    shared = RedisSection(
        url=Secret(valkey.url),
        write_policy=WritePolicy.ON_SEAL,
        touches_min=1,
        deadline_ms=20_000,
    )
    configs = [
        small_store(tmp_path / name, instance=name, node=name, redis=shared) for name in "ab"
    ]
    async with a_store(configs[0]) as (one, _), a_store(configs[1]) as (other, _):
        near, far = (
            replace(WORKER, instance=f"w-{at}", store=DialConfig(targets=(f"unix:{store.socket}",)))
            for at, store in enumerate((one, other))
        )
        async with serve(near, io.StringIO()) as first:
            assert await asked(f"http://127.0.0.1:{first.port}") == {}
        left = first.leaving.left_blocks
        assert left > 0
        assert await one.store.settled(soon())
        async with serve(far, io.StringIO()) as second:
            assert second.core.prefetched.loaded == left
            assert await asked(f"http://127.0.0.1:{second.port}") == {"gpu": 288}
        assert other.store.stats().counts.fetched[Tier.REDIS] >= left


async def test_a_worker_that_is_told_not_to_hand_over_leaves_and_takes_nothing(
    tmp_path: Path,
) -> None:
    async with a_store(small_store(tmp_path)) as (running, _):
        config = replace(WORKER, store=DialConfig(targets=(f"unix:{running.socket}",)))
        mute = replace(config, hot_set=HotSetSection(write_ms_max=0, prefetch_ms_max=0))
        async with serve(mute, io.StringIO()) as first:
            assert await asked(f"http://127.0.0.1:{first.port}") == {}
        assert first.leaving.left_blocks == 0
        async with serve(config, io.StringIO()) as second:
            assert second.core.prefetched.listed == 0
        async with serve(mute, io.StringIO()) as third:
            assert third.core.prefetched.listed == 0
            assert await asked(f"http://127.0.0.1:{third.port}") == {}


async def test_a_drained_worker_is_up_and_serves_nobody() -> None:
    async with serve(WORKER, io.StringIO()) as running:
        url = f"http://127.0.0.1:{running.port}"
        assert await status("GET", f"{url}/health") == 200
        assert await asyncio.to_thread(drain_command, [url]) == 0
        assert await asyncio.to_thread(drain_command, [url]) == 0
        assert await status("GET", f"{url}/live") == 200
        assert await status("GET", f"{url}/metrics") == 200

        async def is_unready() -> bool:  # the last verdict stands for a second
            return await status("GET", f"{url}/health") == 503

        await eventually_async(is_unready, 30, "the worker says that it is not ready")
        body = json.dumps({"model": "kvtier-fake", "prompt": "Once", "max_tokens": 1})
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", data=body, headers=headers) as response,
        ):
            assert response.status == 503
            assert "Retry-After" in response.headers


async def test_a_request_that_runs_ends_before_its_worker_does() -> None:
    slow = ModelSection(model="fake", fake=FakeSection(token_bytes=256, step_ms=5.0))
    config = replace(WORKER, model=slow, drain_ms_max=60_000)
    body = {"model": "kvtier-fake", "prompt": "Once", "max_tokens": 40, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        async with serve(config, io.StringIO()) as running:
            url = f"http://127.0.0.1:{running.port}"
            asking = asyncio.create_task(_answer(session, url, body))

            async def runs() -> bool:
                return running.engine.live_count > 0 or asking.done()

            await eventually_async(runs, 30, "the request runs")
        assert await asking == (200, 40)


async def _answer(
    session: aiohttp.ClientSession, url: str, body: dict[str, object]
) -> tuple[int, int]:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        told = await response.json()
    return response.status, told["usage"]["completion_tokens"]


async def test_only_operators_may_drain(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.init(folder)
    cert, key = certs.issue_into(folder, new_principal("w1", "worker"), ["127.0.0.1"])
    router = certs.add_token(folder, new_principal("r1", "router"))
    operator = certs.add_token(folder, new_principal("o1", "operator"))
    listen = ListenConfig(
        bind="127.0.0.1:0", tls=TlsConfig(cert, key), tokens_file=folder / certs.TOKENS
    )
    context = ssl.create_default_context(cafile=str(folder / certs.CA_CERT))
    files = {"router": router, "operator": operator}
    for name, token in files.items():
        (tmp_path / name).write_text(token + "\n")
    ca = ["--ca-file", str(folder / certs.CA_CERT)]
    async with serve(replace(WORKER, listen=listen), io.StringIO()) as running:
        url = f"https://127.0.0.1:{running.port}"
        asked_by = [None, "wrong", router]
        told = [await status("POST", f"{url}/drain", one, context) for one in asked_by]
        assert told == [401, 401, 403]
        for argv in ([], ["--token-file", str(tmp_path / "router")]):
            assert await asyncio.to_thread(drain_command, [url, *ca, *argv]) == 1
        assert not running.leaving.has_begun
        argv = ["--token-file", str(tmp_path / "operator")]
        assert await asyncio.to_thread(drain_command, [url, *ca, *argv]) == 0
        assert running.leaving.has_begun


@pytest.mark.parametrize("url", ["127.0.0.1:7730", "ftp://127.0.0.1", "http://127.0.0.1:1"])
def test_a_worker_that_cannot_be_asked_is_a_failed_hook(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drain_command([url]) == 1
    assert url in capsys.readouterr().err


async def test_a_worker_with_tls_tells_the_fleet_an_https_address(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.init(folder)
    cert, key = certs.issue_into(folder, new_principal("w0", "worker"), ["127.0.0.1"])
    config = IndexConfig(listen=ListenConfig(bind="127.0.0.1:0"), drain_ms_max=0)
    async with serve_index(config, io.StringIO()) as index:
        told = DialConfig(targets=(f"127.0.0.1:{index.port}",))
        listen = ListenConfig(bind="127.0.0.1:0", tls=TlsConfig(cert, key))
        for secured in (WORKER, replace(WORKER, listen=listen)):
            async with serve(replace(secured, index=told), io.StringIO()) as running:

                async def is_known(port: int = running.port) -> str:
                    records = index.state.fleet.records()
                    urls = [one.info.addresses.http for one in records]
                    return next((url for url in urls if url.endswith(f":{port}")), "")

                url = await eventually_async(is_known, 30, "the index knows the worker")
                scheme = "" if secured is WORKER else "https://"
                assert url == f"{scheme}127.0.0.1:{running.port}"


# Settings


def test_hand_over_is_configured_in_a_section_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text("drain_delay_ms = 7\n[hot_set]\nwrite_ms_max = 0\nprefetch_share_max = 0.25\n")
    loaded = load(WorkerConfig, ["--config", str(path), "--hot-set-prefetch-ms-max=5"]).config
    assert loaded.hot_set == HotSetSection(0, 16 << 30, 5, 0.25)
    assert loaded.drain_delay_ms == 7


@pytest.mark.parametrize(
    "section",
    [
        {"write_ms_max": -1},
        {"prefetch_ms_max": 3_600_000},
        {"write_bytes_max": -1},
        {"prefetch_share_max": 1.5},
    ],
)
def test_settings_beyond_their_ceilings_are_refused(section: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        HotSetSection(**section)

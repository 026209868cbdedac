"""The composition root: what it refuses to serve, and whom it serves."""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from kvtier.config import load
from kvtier.errors import ConfigError
from kvtier.sections import DialConfig, ListenConfig, TlsConfig
from kvtier.security import certs
from kvtier.security.roles import new_principal
from kvtier_services.worker.config import CacheSection, ModelSection, WorkerConfig
from kvtier_services.worker.main import RunningWorker, serve

FAKE = WorkerConfig(
    listen=ListenConfig(bind="127.0.0.1:0"),
    model=ModelSection(model="fake", served_names=("fake", "alias")),
    cache=CacheSection(kv_memory_bytes=2 << 20),
    drain_ms_max=1000,
)


@asynccontextmanager
async def a_worker(config: WorkerConfig) -> AsyncIterator[RunningWorker]:
    async with serve(config, io.StringIO()) as running:
        yield running


async def status(url: str, token: str | None = None, tls: ssl.SSLContext | bool = True) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url, ssl=tls) as response,
    ):
        return response.status


async def test_a_worker_needs_neither_store_nor_index() -> None:
    async with a_worker(FAKE) as running:
        url = f"http://127.0.0.1:{running.port}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/v1/models") as response:
                told = await response.json()
            assert {one["id"] for one in told["data"]} == {"fake", "alias"}
            body = {"model": "alias", "prompt": "Once", "max_tokens": 5}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
        assert answer["usage"]["completion_tokens"] == 5
        assert await status(f"{url}/health") == 200


async def test_tokens_and_tls_are_asked_for_where_they_are_configured(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.init(folder)
    cert, key = certs.issue_into(folder, new_principal("w1", "worker"), ["127.0.0.1"])
    good = certs.add_token(folder, new_principal("r1", "router"))
    other = certs.add_token(folder, new_principal("s1", "store"))
    listen = ListenConfig(
        bind="127.0.0.1:0", tls=TlsConfig(cert, key), tokens_file=folder / certs.TOKENS
    )
    context = ssl.create_default_context(cafile=str(folder / certs.CA_CERT))
    async with a_worker(replace(FAKE, listen=listen)) as running:
        url = f"https://127.0.0.1:{running.port}"
        asked = [None, "wrong", other, good]
        statuses = [await status(f"{url}/v1/models", token, context) for token in asked]
        assert statuses == [401, 401, 403, 200]
        assert await status(f"{url}/live", None, context) == 200
        with pytest.raises(aiohttp.ClientError):
            await status(f"http://127.0.0.1:{running.port}/live")


async def test_an_open_address_without_tls_and_tokens_is_refused() -> None:
    config = replace(FAKE, listen=ListenConfig(bind="0.0.0.0:0"))
    with pytest.raises(ConfigError, match="reachable from other machines"):
        async with a_worker(config):
            pass


async def test_an_absent_store_and_an_absent_index_keep_nobody_waiting(tmp_path: Path) -> None:
    config = replace(
        FAKE,
        store=DialConfig(targets=(f"unix:{tmp_path / 'none.sock'}",)),
        index=DialConfig(targets=(f"unix:{tmp_path / 'nobody.sock'}",)),
    )
    async with asyncio.timeout(30), a_worker(config) as running:
        assert await status(f"http://127.0.0.1:{running.port}/health") == 200
        assert running.connector is not None
        assert not running.connector.is_attached


def test_a_pool_of_less_than_two_blocks_is_refused() -> None:
    config = replace(FAKE, cache=CacheSection(block_tokens=4096, kv_memory_bytes=1 << 20))

    async def served() -> None:
        async with a_worker(config):
            pass

    with pytest.raises(ConfigError, match="fewer than two blocks"):
        asyncio.run(served())


@pytest.mark.parametrize("targets", [("127.0.0.1:1", "127.0.0.1:2")])
def test_a_worker_has_one_store(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="one store"):
        WorkerConfig(store=DialConfig(targets=targets))


async def test_the_endpoints_ceilings_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text("[endpoint]\nbody_bytes_max = 100\nbodies_bytes_max = 150\n")
    loaded = load(WorkerConfig, ["--config", str(path)]).config
    body = {"model": "fake", "prompt": "Once", "max_tokens": 1}
    async with (
        a_worker(replace(FAKE, endpoint=loaded.endpoint)) as running,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{running.port}/v1/completions"
        async with session.post(url, json=body) as response:
            assert response.status == 200
        async with session.post(url, json=body | {"prompt": "Once" * 30}) as response:
            assert response.status == 413


@pytest.mark.parametrize("priority", [90, 35, 10])
async def test_a_retention_hint_decides_what_stays_in_l1(priority: int) -> None:
    """Two prompts fill the pool; the hinted one is the older."""
    hint = {"kv_retention": {"ranges": [{"start": 0, "priority": priority}]}}

    async def cached_of(
        session: aiohttp.ClientSession, url: str, first: int, **more: object
    ) -> int:
        body = {"model": "fake", "prompt": [first] + [1] * 399, "max_tokens": 1, **more}
        async with session.post(url, json=body) as response:
            told = await response.json()
        count = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(count, int)
        return count

    async with a_worker(FAKE) as running, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{running.port}/v1/completions"
        assert await cached_of(session, url, 2, **hint) == 0
        for other in range(3, 7):
            assert await cached_of(session, url, other) == 0
        assert await cached_of(session, url, 2) == (384 if priority == 90 else 0)

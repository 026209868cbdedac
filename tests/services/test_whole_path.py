"""Index, store, two workers and a router as processes: every tier serves, and changes no answer.

The tests share the processes; the last one kills some.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvtier.engines.transformers.tiny import write_byte_tokenizer
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import IndexProcess, start_index
from tests.support.store_cluster import StoreProcess, start_store
from tests.support.worker_cluster import (
    MODEL,
    TOKEN_BYTES,
    Client,
    Expected,
    WorkerProcess,
    prompt_of,
    start_worker,
)

pytestmark = pytest.mark.timeout(240)
EXPECTED = Expected()
PROMPT = prompt_of(1, 321)
"""20 blocks, and one token."""
HELD = 320
SAVED = "kvtier_worker_saved_blocks_total"
FAKE = {"prefill_tokens_per_s": 2000.0, "step_ms": 20.0, "token_bytes": TOKEN_BYTES}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The processes."""

    index: IndexProcess
    store: StoreProcess
    workers: dict[str, WorkerProcess]
    router: Process
    url: str

    async def ask(self, tenant: str, prompt: list[int], count: int) -> tuple[str, int, int, str]:
        """Through the router: text, cached tokens, matched tokens, worker."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
        timeout = aiohttp.ClientTimeout(total=30)
        headers = {"authorization": f"Bearer {tenant}"}
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            told = await response.json()
            assert response.status == 200, told
            shown = response.headers["x-kvtier-matched-tokens"]
            worker = response.headers["x-kvtier-worker"]
        matched = sum(int(part.partition("=")[2]) for part in shown.split(",") if "=" in part)
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return told["choices"][0]["text"], cached, matched, worker

    async def stream(self, tenant: str, prompt: list[int], count: int) -> AsyncIterator[Any]:
        """Through the router: the worker's name, then the events of a stream."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}
        timeout = aiohttp.ClientTimeout(total=60)
        headers = {"authorization": f"Bearer {tenant}"}
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{self.url}/v1/completions", json=body | {"stream": True}) as response,
        ):
            yield response.headers["x-kvtier-worker"]
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def clean_logs(self) -> None:
        """Fails where a process logged an error that nobody handled."""
        assert "Traceback" not in self.router.log_text()
        self.index.clean_log()
        self.store.clean_log()
        for worker in self.workers.values():
            worker.clean_log()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    with ProcessRunner(f"path-{directory.name}", directory) as runner:
        yield asyncio.run(started(runner, directory))


async def started(processes: ProcessRunner, tmp_path: Path) -> Fleet:
    index = await start_index(processes)
    told = {"targets": [index.address]}
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data", index=told)
    settings: dict[str, Any] = {
        "store": {"targets": [store.socket]},
        "index": told,
        "model": {"model": "fake", "fake": FAKE},
    }
    workers = await asyncio.gather(
        *(start_worker(processes, name, **settings) for name in ("w0", "w1"))
    )
    text = tmp_path / "text"
    text.mkdir()
    write_byte_tokenizer(text, 1 << 20)
    secret = tmp_path / "secret"
    secret.write_text("a cluster secret of thirty bytes")
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[tenant]]\nid = "{name}"\n[[tenant.key]]\n'
            f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name in ("alice", "bob")
        )
    )
    keys.chmod(0o600)
    port = free_port()
    argv = kvtier_command(
        "router",
        f"--listen-bind=127.0.0.1:{port}",
        f"--admin-bind=127.0.0.1:{free_port()}",
        f"--index-targets={index.address}",
        f"--texts=*={text}",
        f"--keys-file={keys}",
        f"--cluster-secret-file={secret}",
    )
    url = f"http://127.0.0.1:{port}"
    launch = Launch("router", argv, http_ready(f"{url}/ready"))
    router = await asyncio.to_thread(processes.start, launch)
    return Fleet(index, store, dict(zip(("w0", "w1"), workers, strict=True)), router, url)


async def from_tier(client: Client, tier: str, salt: str) -> None:
    """Ask until most of the prompt comes from a tier (where loading takes about as long as
    computing, the worker computes the head meanwhile); every answer is right."""

    async def came() -> bool:
        for number in range(2):  # put other prompts in place of what L1 holds
            await client.answer(prompt_of(1000 + number, 600), 1)
        told = await client.answer(PROMPT, 6, cache_salt=salt)
        assert told.text == EXPECTED.text(PROMPT, 6)
        return told.cached.get(tier, 0) >= HELD // 2

    await eventually_async(came, 60, f"most of it comes from {tier}")


async def test_every_tier_and_every_restart_gives_the_answer_of_no_cache(fleet: Fleet) -> None:
    one, other = fleet.workers.values()
    async with one.client() as first, other.client() as second:
        for number in range(20):
            salt = f"a{number}"
            cold = await first.answer(PROMPT, 6, cache_salt=salt)
            await first.until(SAVED, 20 * (number + 1), outcome="saved")
            shared = await second.answer(PROMPT, 6, cache_salt=salt)
            apart = await second.answer(PROMPT, 6, cache_salt=f"b{number}")
            again = await second.answer(PROMPT, 6, cache_salt=salt)
            assert [cold.cached, apart.cached, again.cached] == [{}, {}, {"gpu": HELD}]
            told = {cold.text, shared.text, apart.text, again.text}
            assert told == {EXPECTED.text(PROMPT, 6)}
            if shared.cached == {"dram": HELD}:
                break  # else the machine was too slow to load all of it before it was computed
        assert shared.cached == {"dram": HELD}
    await asyncio.to_thread(one.process.kill)
    await asyncio.to_thread(one.process.restart)
    async with one.client() as first:
        await from_tier(first, "dram", salt)
        fleet.store.process.terminate()
        await asyncio.to_thread(fleet.store.process.wait, 40)
        await asyncio.to_thread(fleet.store.process.restart)
        await from_tier(first, "nvme", salt)
    fleet.clean_logs()


async def test_tenants_share_nothing_and_matches_come_true(fleet: Fleet) -> None:
    expected = EXPECTED.text(PROMPT, 2)
    text, cached, matched, _ = await fleet.ask("alice", PROMPT, 2)
    assert (text, cached, matched) == (expected, 0, 0)

    async def comes_true(tenant: str) -> bool:  # once the router has heard of every block
        text, cached, matched, _ = await fleet.ask(tenant, PROMPT, 2)
        assert text == expected
        return (cached, matched) == (HELD, HELD)

    await eventually_async(lambda: comes_true("alice"), 30, "alice's own blocks match and hit")
    text, cached, matched, _ = await fleet.ask("bob", PROMPT, 2)
    assert (text, cached, matched) == (expected, 0, 0)
    await eventually_async(lambda: comes_true("bob"), 30, "bob's own blocks match and hit")
    fleet.clean_logs()


async def test_deaths_of_a_worker_the_index_and_the_store_change_no_text(fleet: Fleet) -> None:
    prompt = [ord(c) for c in "a stream that loses its worker"] * 3
    name, parts = "", []
    async for event in fleet.stream("alice", prompt, 40):
        if isinstance(event, str):
            name = event
            continue
        assert "error" not in event, event
        parts += [choice["text"] for choice in event["choices"]]
        if len(parts) == 3:
            await asyncio.to_thread(fleet.workers[name].process.kill)
    assert "".join(parts) == EXPECTED.text(prompt, 40)
    line = "status=200 worker=" + next(other for other in fleet.workers if other != name)

    async def went_on() -> bool:
        log = fleet.router.log_text()
        return any(line in row and "resumed=1" in row for row in log.splitlines())

    await eventually_async(went_on, 30, "the other worker goes on")
    await asyncio.to_thread(fleet.index.process.kill)
    assert (await fleet.ask("alice", PROMPT, 2))[0] == EXPECTED.text(PROMPT, 2)
    await asyncio.to_thread(fleet.store.process.kill)
    for number in (2, 3):
        prompt = prompt_of(number, 100)
        assert (await fleet.ask("bob", prompt, 2))[0] == EXPECTED.text(prompt, 2)
    assert "Traceback" not in fleet.router.log_text()

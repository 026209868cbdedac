"""Worker processes of a fault test over the fake model, and what they must answer.

What must not live here: faults, what a test expects of them.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvtier.core.identity import KvDtype
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import one_group
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.worker_rig import Rig, RigTerms

MIB = 1 << 20
BLOCK_TOKENS = 16
TOKEN_BYTES = 2048
BLOCK = BLOCK_TOKENS * TOKEN_BYTES
MODEL = "kvtier-fake"
_ANSWER_S = 40.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to."""

    text: str
    finish: str
    prompt_tokens: int
    cached: Mapping[str, int]
    """By tier; those with none are left out."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that was refused, or broke off."""

    status: int
    code: str
    message: str


@dataclass(slots=True)
class Client:
    """Calls to one worker."""

    session: aiohttp.ClientSession
    url: str

    async def ask(self, prompt: Sequence[int], count: int, **terms: Any) -> Answer | Failed:
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": count,
            "temperature": 0,
            **terms,
        }
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            told = await response.json()
        if response.status != 200:
            error = told["error"]
            return Failed(response.status, str(error.get("code")), str(error.get("message")))
        choice, usage = told["choices"][0], told["usage"]
        cached = usage["kvtier"]["cached_tokens"]
        return Answer(
            choice["text"],
            choice["finish_reason"],
            usage["prompt_tokens"],
            {tier: count for tier, count in cached.items() if count},
        )

    async def answer(self, prompt: Sequence[int], count: int, **terms: Any) -> Answer:
        told = await self.ask(prompt, count, **terms)
        assert isinstance(told, Answer), told
        return told

    async def healthy(self) -> bool:
        async with self.session.get(f"{self.url}/health") as response:
            return response.status == 200

    async def metric(self, name: str, **labels: str) -> float:
        """A sample of the page; 0 where it is not there."""
        async with self.session.get(f"{self.url}/metrics") as response:
            page = await response.text()
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = f"{name}{{{shown}}}" if shown else name
        for line in page.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == wanted:
                return float(value)
        return 0.0

    async def until(self, name: str, least: float, **labels: str) -> None:
        """Wait until a metric has grown to a value."""

        async def has_grown() -> bool:
            return await self.metric(name, **labels) >= least

        await eventually_async(has_grown, 30, f"{name}{labels} >= {least}")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """One `kvtier worker` with a fake model."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        headers = {"x-kvtier-explain": "1"}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=timeout, headers=headers, connector=connector
        ) as session:
            yield Client(session, self.url)

    def clean_log(self) -> str:
        """What it logged; fails where that shows an error that nobody handled."""
        text = self.process.log_text()
        assert "Traceback" not in text, text
        return text


def worker_launch(
    runner: ProcessRunner, name: str = "worker", **settings: TomlValue
) -> tuple[Launch, int]:
    """How to start a worker whose pool holds 1,024 tokens and which computes 2,000 a second."""
    port = free_port()
    defaults: dict[str, Any] = {
        "listen": {"bind": f"127.0.0.1:{port}"},
        "instance": name,
        "node": "node-1",
        "drain_ms_max": 5000,
        "cache": {"kv_memory_bytes": 2 * MIB},
        "model": {
            "model": "fake",
            "fake": {"prefill_tokens_per_s": 2000.0, "token_bytes": TOKEN_BYTES},
        },
        "offload": {"lookup_ms_max": 5000},
    }
    path = runner.config_file(f"{name}.toml", defaults | settings)
    argv = kvtier_command("worker", "--config", str(path))
    ready = http_ready(f"http://127.0.0.1:{port}/health")
    return Launch(name, argv, ready=ready, ready_deadline_s=60.0), port


async def start_worker(
    runner: ProcessRunner, name: str = "worker", **settings: TomlValue
) -> WorkerProcess:
    launch, port = worker_launch(runner, name, **settings)
    return WorkerProcess(await asyncio.to_thread(runner.start, launch), port)


def prompt_of(number: int, count: int) -> list[int]:
    """Token ids of a prompt of its own."""
    return [(number * 89 + i * 7 + i * i) % 256 for i in range(count)]


@dataclass
class Expected:
    """What a worker with its cache off would answer."""

    token_bytes: int = TOKEN_BYTES
    _known: dict[tuple[tuple[int, ...], int], str] = field(default_factory=dict)

    def text(self, prompt: Sequence[int], count: int) -> str:
        key = (tuple(prompt), count)
        if key not in self._known:
            geometry = one_group(4, 1, self.token_bytes // 32, KvDtype.FLOAT32, BLOCK_TOKENS)
            runner = FakeModel(geometry, FakeTerms(context_tokens=131_072))
            rig = Rig(runner, RigTerms(step_tokens_max=4096, blocks=80))
            self._known[key] = "".join(map(chr, rig.generate(prompt, count).tokens))
        return self._known[key]

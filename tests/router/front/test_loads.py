"""Workers of whose load nobody tells are asked for their metrics; what they say is not trusted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvtier.config import Secret
from kvtier.core.workers import Load, WorkerName
from kvtier.errors import ConfigError
from kvtier.types import InstanceId
from kvtier_router.front.credentials import Credentials
from kvtier_router.front.loads import Asked, LoadPoll, LoadsConfig
from kvtier_router.web.upstream import Upstream, UpstreamLimits
from tests.harness.waiting import eventually_async

PAGE = b"""\
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="1"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
"""
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
LONG_S = 30.0


@dataclass
class Engine:
    """Answers every request with the same bytes, and remembers the heads."""

    answer: bytes
    ends: bool = True
    heads: list[bytes] = field(default_factory=list)
    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        if self.ends:
            writer.close()


@asynccontextmanager
async def engine(answer: bytes, *, ends: bool = True) -> AsyncIterator[Engine]:
    made = Engine(answer, ends)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for writer in made.writers:
            writer.transport.abort()


@dataclass
class Brain:
    """Remembers what it is told; nobody reports any load."""

    workers: Sequence[tuple[WorkerName, str]]
    told: list[tuple[WorkerName, Load | None]] = field(default_factory=list)

    def unreported(self) -> Sequence[tuple[WorkerName, str]]:
        return self.workers

    def take_load(self, worker: WorkerName, load: Load | None) -> None:
        self.told.append((worker, load))


def worker(rank: int = 0) -> WorkerName:
    return WorkerName(InstanceId("v"), rank)


@asynccontextmanager
async def polling(brain: Brain, token: str | None = None, **config: int) -> AsyncIterator[LoadPoll]:
    now = asyncio.get_running_loop().time
    upstream = Upstream(UpstreamLimits(), now)
    credentials = Credentials(None if token is None else Secret(token))
    poll = LoadPoll(upstream, brain, credentials, LoadsConfig(**config), now)
    try:
        yield poll
    finally:
        await poll.close()
        upstream.close()


async def asked(poll: LoadPoll, count: int) -> None:
    """Wait until so many questions have ended."""

    async def have_ended() -> bool:
        return poll.asked.total() == count

    await eventually_async(have_ended, LONG_S, f"{count} questions end")


async def test_ranks_behind_one_address_are_told_apart_on_one_page() -> None:
    async with engine(HEAD + PAGE) as made:
        address = f"127.0.0.1:{made.port}"
        brain = Brain([(worker(0), address), (worker(1), address)])
        async with polling(brain, token="s3cret") as poll:
            poll.watch()
            await asked(poll, 1)
        assert dict(brain.told) == {
            worker(0): Load(running_requests=3, running_tokens=25 * 32),
            worker(1): Load(running_requests=1, waiting_requests=2),
        }
        assert len(made.heads) == 1
        assert made.heads[0].startswith(b"GET /metrics HTTP/1.1\r\n")
        assert b"authorization: Bearer s3cret\r\n" in made.heads[0]


async def test_a_server_of_one_rank_may_call_it_any_number() -> None:
    page = HEAD + PAGE.replace(b'engine="1"', b'engine="0"').replace(b'engine="0"', b'engine="5"')
    async with engine(page) as made:
        brain = Brain([(worker(0), f"127.0.0.1:{made.port}")])
        async with polling(brain) as poll:
            poll.watch()
            await asked(poll, 1)
    [(_, load)] = brain.told
    assert load is not None
    assert (load.running_requests, load.waiting_requests) == (3, 2)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (HEAD + b"vllm:num_requests_running NaN\n", Asked.SILENT),
        (HEAD, Asked.SILENT),
        (HEAD + b"\xff\x00" * 1000, Asked.SILENT),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", Asked.FAILED),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n", Asked.FAILED),
        (b"nonsense\r\n\r\n", Asked.FAILED),
        (HEAD + b"# " + b"x" * (10 << 20), Asked.FAILED),
        (b"", Asked.FAILED),
    ],
    ids=["nan", "empty", "binary", "missing", "moved", "no http", "10 MB", "nothing"],
)
async def test_a_nasty_page_says_nothing_and_the_worker_is_asked_more_rarely(
    answer: bytes, outcome: Asked
) -> None:
    async with engine(answer) as made:
        brain = Brain([(worker(), f"127.0.0.1:{made.port}")])
        async with polling(brain, every_ms=1) as poll:
            poll.watch()
            await asked(poll, 1)
            assert poll.asked[outcome] == 1
    assert brain.told == [(worker(), None)]


async def test_a_page_that_never_ends_is_given_up_at_its_deadline() -> None:
    async with engine(HEAD + PAGE, ends=False) as made:
        brain = Brain([(worker(), f"127.0.0.1:{made.port}")])
        async with polling(brain, answer_ms_max=50) as poll:
            poll.watch()
            await asked(poll, 1)
            assert poll.asked[Asked.FAILED] == 1


async def test_addresses_that_are_none_and_nobody_at_home_cost_no_more_than_a_failure() -> None:
    brain = Brain([(worker(0), "ftp://no"), (worker(1), "127.0.0.1:1"), (worker(2), "")])
    async with polling(brain) as poll:
        poll.watch()
        await asked(poll, 2)
        assert poll.asked[Asked.FAILED] == 2


async def test_nobody_is_asked_where_it_is_switched_off() -> None:
    brain = Brain([(worker(), "127.0.0.1:1")])
    async with polling(brain, every_ms=0) as poll:
        poll.watch()
        assert poll.asked.total() == 0
    with pytest.raises(ConfigError):
        LoadsConfig(every_ms=-1)
    with pytest.raises(ConfigError):
        LoadsConfig(answer_ms_max=0)

"""The demo's load while processes are killed: no wrong answer and, but for a router's own, no lost
one; with two routers, none at all for a client that tries the other."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
import pytest

from kvtier.local.demo.chats import CHATS, Chat, conversation, system_prompt
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually
from tests.support.local_cluster import START_S, LocalCluster, start_cluster

pytestmark = pytest.mark.timeout(300)

TOKENS = 24
TRIES_MAX = 40
SYSTEM = system_prompt(len)
STEP_MS = 8.0
"""Of the fake model: an answer takes long enough to be interrupted."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with ProcessRunner("faults-cluster", directory) as runner:
        yield start_cluster(runner, directory / "kvtier", routers=2, step_ms=STEP_MS)


def routers(cluster: LocalCluster) -> list[str]:
    return [
        f"http://{one.address}" for one in cluster.state.services if one.name.startswith("router")
    ]


class Lost(Exception):
    """No whole answer came."""


async def answer(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], salt: str | None
) -> str:
    """One streamed chat; Lost for anything but a whole answer."""
    body = {
        "model": "kvtier-fake",
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    } | ({} if salt is None else {"cache_salt": salt})
    text, finish = "", None
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise Lost(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if line.strip() == b"data: [DONE]":
                    if finish != "length":
                        raise Lost(f"finish reason {finish!r} after {text!r}")
                    return text
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise Lost(f"error {event['error']} after {text!r}")
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        finish = choice["finish_reason"] or finish
    except (aiohttp.ClientError, OSError) as error:
        raise Lost(repr(error)) from error
    raise Lost(f"broke off after {text!r}")


Asking = Callable[[list[dict[str, str]], str | None], Awaitable[str]]


async def expected(asking: Asking, chat: Chat) -> list[str]:
    """The answers of a chat without any cache: each request has a salt of its own."""
    answers: list[str] = []
    for turn in range(len(chat.questions)):
        messages = conversation(SYSTEM, chat, answers)
        answers.append(await asking(messages, f"off-{chat.user}-{turn}"))
    return answers


async def keep_asking(asking: Asking, chat: Chat, begun: asyncio.Event, done: asyncio.Event) -> int:
    """One user's chat again and again until `done`, and once more; how many answers came."""
    wanted = await expected(asking, chat)
    begun.set()
    count = 0
    last = False
    while not last:
        last = done.is_set()
        for turn in range(len(chat.questions)):
            found = await asking(conversation(SYSTEM, chat, wanted[:turn]), None)
            assert found == wanted[turn]
            count += 1
    return count


async def kill_under_load(cluster: LocalCluster, victim: str, asking: Asking) -> None:
    """Kill a process while all chats go on, and wait until it is back; any Lost goes up."""
    begun, done = [asyncio.Event() for _ in CHATS], asyncio.Event()
    before = cluster.restarts(victim)
    # One fault at a time: what was killed before is back for the routers too.
    await asyncio.to_thread(eventually, cluster.all_seen, START_S, "all workers are seen")
    async with asyncio.TaskGroup() as group:
        users = [
            group.create_task(keep_asking(asking, chat, at, done))
            for chat, at in zip(CHATS, begun, strict=True)
        ]
        for at in begun:
            await at.wait()
        os.kill(cluster.pids[victim], signal.SIGKILL)
        await asyncio.to_thread(
            eventually,
            lambda: cluster.restarts(victim) > before and cluster.all_up(),
            START_S,
            f"{victim} is mended",
        )
        done.set()
    assert min(user.result() for user in users) >= 2
    assert f"{victim:<10} down" in cluster.process.log_text()


@pytest.mark.parametrize("victim", ["index", "store", "worker-1", "worker-2", "router-2"])
async def test_no_answer_is_wrong_or_lost_when_anything_but_the_router_dies(
    cluster: LocalCluster, victim: str
) -> None:
    async with aiohttp.ClientSession() as session:

        async def asking(messages: list[dict[str, str]], salt: str | None) -> str:
            return await answer(session, cluster.url, messages, salt)

        await kill_under_load(cluster, victim, asking)


@pytest.mark.parametrize("victim", ["router", "router-2"])
async def test_a_client_that_tries_the_other_router_loses_nothing(
    cluster: LocalCluster, victim: str
) -> None:
    urls = itertools.cycle(routers(cluster))
    async with aiohttp.ClientSession() as session:

        async def asking(messages: list[dict[str, str]], salt: str | None) -> str:
            for _ in range(TRIES_MAX):
                try:
                    return await answer(session, next(urls), messages, salt)
                except Lost:
                    continue
            raise AssertionError("no router answers")

        await kill_under_load(cluster, victim, asking)
        assert len(routers(cluster)) == 2

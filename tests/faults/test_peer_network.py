"""Three machines: stores on two, the index on the third, TLS and roles on; links are cut and heal.

Blocks come from another node or they are a miss: never an error, never other bytes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from kvtier.client.store import BlockStoreClient, ReadTerms
from kvtier.security import certs
from tests.harness.netns import Network
from tests.harness.processes import Process, ProcessRunner
from tests.harness.proxy import TcpProxy
from tests.harness.rights import requires_netns
from tests.harness.toml_text import TomlTable
from tests.harness.waiting import eventually_async
from tests.support.peer_network import (
    WORKER_PORT,
    Credentials,
    StoreNode,
    belongings,
    start_index,
    start_store,
    start_worker,
)
from tests.support.store_cluster import described, version_of
from tests.support.worker_cluster import Answer, Client, Expected, prompt_of
from tests.tiers.contract import name_of

pytestmark = [requires_netns, pytest.mark.timeout(420)]
SIZE = 256 << 10
COUNT = 64
READ = 'kvtier_store_read_bytes_total{tier="peer"}'
TERMS = ReadTerms(payload_bytes=SIZE)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short one: Unix sockets lie deep in it, and their paths have a ceiling."""
    return tmp_path_factory.mktemp("peers")


@dataclass(frozen=True)
class Machines:
    """What runs."""

    network: Network
    index: Process
    left: StoreNode
    right: StoreNode


@asynccontextmanager
async def three_machines(
    processes: ProcessRunner, tmp_path: Path, patience_ms: int = 2_000
) -> AsyncIterator[Machines]:
    certs.init(tmp_path / "certs")
    keys = Credentials(tmp_path / "certs")
    with Network(tmp_path / "net") as network:
        left, right, third = (network.add_node(name) for name in ("left", "right", "third"))
        for node in (left, right):
            keys.token(f"store-{node.name}", "store")
            keys.token(f"worker-{node.name}", "worker")
        index = await start_index(processes, third, keys)
        peers: TomlTable = {"deadline_ms": patience_ms, "ask_ms": patience_ms}
        machines = Machines(
            network,
            index,
            await start_store(processes, left, third, keys, peers=peers),
            await start_store(processes, right, third, keys, peers=peers),
        )
        yield machines
        for process in (machines.left.store, machines.right.store, index):
            assert "Traceback" not in process.log_text(), process.log_tail()
            await asyncio.to_thread(process.end)  # before its network goes


async def put(client: BlockStoreClient, numbers: Sequence[int]) -> None:
    payloads = [described(n, size=SIZE) for n in numbers]
    results = await client.put_many([name_of(n) for n in numbers], payloads)
    assert all(result.is_held for result in results), results


async def there(client: BlockStoreClient, numbers: Sequence[int]) -> list[bool]:
    """Which blocks a store gives; other bytes than were put fail."""
    results = await client.get_many([name_of(n) for n in numbers], None, TERMS, deadline_s=30.0)
    for number, result in zip(numbers, results, strict=True):
        if result.is_hit:
            assert result.payload is not None
            assert version_of(number, result.payload) == 0
    return [result.is_hit for result in results]


async def until_all_there(client: BlockStoreClient, numbers: Sequence[int], what: str) -> None:
    async def are_there() -> bool:
        return all(await there(client, numbers))

    await eventually_async(are_there, 120, what)


async def until_known(node: StoreNode, numbers: Sequence[int]) -> None:
    """Until the index says, to the other store, who has the blocks."""
    async with node.client() as client:

        async def is_known() -> bool:
            found = await client.contains([name_of(n) for n in numbers], shared=True)
            return all(found)

        await eventually_async(is_known, 120, "the index knows who has the blocks")


async def test_what_crosses_the_wire_is_what_the_metrics_say(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with (
        three_machines(processes, tmp_path, patience_ms=20_000) as machines,
        AsyncExitStack() as stack,
    ):
        left, right = machines.left, machines.right
        near = await stack.enter_async_context(left.client())
        far = await stack.enter_async_context(right.client())
        numbers = range(COUNT)
        await put(near, numbers)
        await until_known(right, numbers)
        before, metric = right.node.counters(), await right.metric(READ)
        assert await there(far, numbers) == [True] * COUNT
        read = await right.metric(READ) - metric
        crossed = right.node.counters().rx_bytes - before.rx_bytes
        assert read >= COUNT * SIZE
        assert 0.95 * crossed <= read <= crossed

        async def are_here() -> bool:
            read = await right.metric(READ)
            assert await there(far, numbers) == [True] * COUNT
            return await right.metric(READ) == read

        # The second touch copies them, a later one finds them here.
        await eventually_async(are_here, 60, "they are read without the other node")
        mine = belongings([left.store])
        theirs = belongings([right.store, machines.index])
        assert mine.mappings
        assert theirs.mappings
        assert mine.sockets.isdisjoint(theirs.sockets)
        assert mine.mappings.isdisjoint(theirs.mappings)


async def test_a_cut_link_between_stores_costs_misses_and_heals(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with three_machines(processes, tmp_path) as machines, AsyncExitStack() as stack:
        left, right = machines.left, machines.right
        near = await stack.enter_async_context(left.client())
        far = await stack.enter_async_context(right.client())
        await put(near, range(COUNT))
        await until_known(right, range(COUNT))
        assert await there(far, range(8)) == [True] * 8
        machines.network.partition([left.node], [right.node])
        for start in range(8, 24, 4):
            assert await there(far, range(start, start + 4)) == [False] * 4
        # Its own blocks are not held up.
        await put(far, range(1000, 1008))
        assert await there(far, range(1000, 1008)) == [True] * 8
        machines.network.heal_all()
        await until_all_there(far, range(24, 32), "peers answer again")
        await until_all_there(far, range(8, 24), "what was a miss is there again")


async def test_without_the_index_there_are_misses_and_its_return_is_noticed(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    async with three_machines(processes, tmp_path) as machines, AsyncExitStack() as stack:
        left, right = machines.left, machines.right
        third = machines.network.nodes["third"]
        near = await stack.enter_async_context(left.client())
        far = await stack.enter_async_context(right.client())
        await put(near, range(COUNT))
        await until_known(right, range(COUNT))
        machines.network.partition([right.node], [third])
        assert await there(far, range(100, 104)) == [False] * 4
        machines.network.heal_all()
        await until_all_there(far, range(32, 40), "the index is asked again")


async def test_a_worker_answers_with_what_another_nodes_worker_computed(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    prompt = prompt_of(1, 801)
    async with three_machines(processes, tmp_path) as machines:
        workers = [await start_worker(processes, node) for node in (machines.left, machines.right)]
        first = await asked(machines.left, prompt)
        assert first.text == Expected().text(prompt, 8)

        assert await machines.right.metric(READ) == 0
        for number in range(100):
            # What was saved is announced in its own time: until then it is computed here.
            other = [*prompt_of(2 + number // 5, 400), *prompt[:401]]
            first = await asked(machines.left, other)
            second = await asked(machines.right, other)
            assert first.text == second.text == Expected().text(other, 8)
            if second.cached.get("peer"):
                break
        assert second.cached["peer"] > 0
        assert await machines.right.metric(READ) > 0
        mine = belongings([machines.left.store, workers[0]])
        theirs = belongings([machines.right.store, workers[1]])
        assert mine.sockets.isdisjoint(theirs.sockets)
        assert mine.mappings.isdisjoint(theirs.mappings)
        for worker in workers:
            await asyncio.to_thread(worker.end)


async def asked(node: StoreNode, prompt: Sequence[int]) -> Answer:
    """What the worker of a node answers."""
    with TcpProxy(node.node.dial(WORKER_PORT)) as window:
        timeout = aiohttp.ClientTimeout(total=120)
        headers = {"x-kvtier-explain": "1"}
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            answer = await Client(session, f"http://{window.address}").ask(prompt, 8)
    assert isinstance(answer, Answer), answer
    return answer

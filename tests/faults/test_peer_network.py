"""Three machines: stores and workers on two, index and router on the third, TLS and roles on.

Links are cut and heal, a link is narrow for a while, a node is lost and replaced, a worker's work
goes on at another node. Blocks come from another node or they are a miss: never an error, never
other bytes. Each test finds a fleet of two machines at rest and leaves it so.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import combinations, permutations

import pytest

from kvtier.client.store import BlockStoreClient, ReadTerms
from kvtier.limits import GRPC_KEEPALIVE_MS, GRPC_KEEPALIVE_TIMEOUT_MS
from tests.harness.netns import Cut
from tests.harness.rights import requires_netns, requires_tbf
from tests.harness.waiting import eventually_async
from tests.support.node_fleet import (
    BLOCK,
    REQUEST_S,
    TOKEN_BYTES,
    WORKER_PORT,
    Machine,
    NodeFleet,
    Told,
    belongings,
    node_fleet,
)
from tests.support.node_talks import Clients, Talk, answered, at_once, tokens_from
from tests.support.store_cluster import described, version_of
from tests.support.worker_cluster import BLOCK_TOKENS
from tests.tiers.contract import name_of

pytestmark = [requires_netns, pytest.mark.timeout(420)]
HEIR_PORT = 7731
SIZE = 256 << 10
TERMS = ReadTerms(payload_bytes=SIZE)
KEEPALIVE_S = (GRPC_KEEPALIVE_MS + GRPC_KEEPALIVE_TIMEOUT_MS) / 1000
NARROW_BYTES_PER_S = 1 << 20
"""A block takes 0.13 s, in which a worker computes more than six."""
PEER_READ = 'kvtier_store_read_bytes_total{tier="peer"}'
PEER_LOADED = 'kvtier_worker_loaded_blocks_total{source="peer"}'
BY_CHOICE = "kvtier_worker_recomputed_by_choice_total"
COMPUTED = "kvtier_worker_computed_tokens_total"
PREFETCHED = 'kvtier_worker_prefetched_blocks_total{outcome="loaded"}'
LEFT = "kvtier_worker_hot_set_left_blocks"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFleet]:
    """In a folder with a short name: paths of the Unix sockets in it have a ceiling."""
    directory = tmp_path_factory.mktemp("nodes")
    with node_fleet("test_peer_network", directory, ("left", "right"), ("spare", "heir")) as made:
        yield made


def two_of(fleet: NodeFleet) -> tuple[Machine, Machine]:
    first, second = fleet.machines.values()
    fleet.only(first.name, second.name)
    return first, second


def test_conversations_cross_between_nodes_and_metrics_say_what_the_wire_carries(
    fleet: NodeFleet,
) -> None:
    first, second = two_of(fleet)
    for number in range(20):
        talks = [Talk(fleet, f"crossing {number} {n}") for n in range(3)]
        before, told = fleet.crossing(), list[Told]()
        for machine in (first, second, first):
            fleet.only(machine.name)
            told += answered(at_once([talk.turn for talk in talks]))
            assert {one.worker for one in told[-3:]} == {f"worker-{machine.name}"}
            fleet.settle()
        crossed = fleet.crossing().since(before)
        # Once more where what crosses was not asked for in time: nothing counts what is given up.
        if crossed.peer_bytes >= 45 * BLOCK and not crossed.lost:
            break
    else:
        raise AssertionError(f"conversations do not come over: {crossed}")
    assert 45 * BLOCK_TOKENS <= tokens_from(told, "peer") <= crossed.peer_bytes / TOKEN_BYTES
    assert 0.95 * crossed.wire_bytes <= crossed.peer_bytes <= crossed.wire_bytes


def test_no_process_has_anything_of_another_node(fleet: NodeFleet) -> None:
    machines = [belongings([one.store, one.worker]) for one in two_of(fleet)]
    nodes = [*machines, belongings([fleet.index, fleet.router])]
    assert all(one.mappings for one in machines)
    assert all(one.sockets and len(one.networks) == 1 for one in nodes)
    for one, other in combinations(nodes, 2):
        assert one.sockets.isdisjoint(other.sockets)
        assert one.mappings.isdisjoint(other.mappings)
        assert one.networks.isdisjoint(other.networks)


# Blocks between stores


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


async def test_a_cut_between_stores_or_to_the_index_costs_misses_and_heals(
    fleet: NodeFleet,
) -> None:
    first, second = fleet.machines.values()
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(first.client())
        far = await stack.enter_async_context(second.client())
        await put(near, range(16))
        await until_all_there(far, range(4), "the index knows who has the blocks")
        try:
            fleet.network.partition([first.node], [second.node])
            assert await there(far, range(4, 8)) == [False] * 4
            # Its own blocks are not held up.
            await put(far, range(1000, 1004))
            assert await there(far, range(1000, 1004)) == [True] * 4
            fleet.network.heal_all()
            await until_all_there(far, range(4, 8), "what was a miss is there again")
            fleet.network.partition([second.node], [fleet.hub])
            assert await there(far, range(100, 104)) == [False] * 4
        finally:
            fleet.network.heal_all()
        await until_all_there(far, range(8, 12), "the index is asked again")
    fleet.meet()


# A narrow link


@requires_tbf
def test_while_a_link_is_narrow_a_worker_computes_and_then_it_loads_again(
    fleet: NodeFleet,
) -> None:
    first, second = two_of(fleet)
    assert next(one for one in fetched(fleet, first, second, "wide") if one.told.cached.get("peer"))
    fleet.network.limit_egress(first.node, NARROW_BYTES_PER_S)
    try:
        # A handful of loads that are given up teach it.
        chosen = next(one for one in fetched(fleet, first, second, "narrow") if one.is_by_choice)
        assert chosen.told.cached == {}
        assert chosen.loaded == 0
        assert chosen.computed >= len(chosen.told.prompt)
    finally:
        fleet.network.unlimit(first.node)
    again = next(one for one in fetched(fleet, first, second, "again") if one.loaded)
    assert again.told.cached["peer"] == again.loaded * BLOCK_TOKENS
    fleet.settle()


class Fetched:
    """A prompt that one worker computed and another one was asked, and what that one did."""

    def __init__(self, fleet: NodeFleet, machine: Machine, prompt: Sequence[int]) -> None:
        def count(line: str) -> float:
            return fleet.worker_metric(machine.node, line)

        lines = (BY_CHOICE, PEER_LOADED, COMPUTED)
        before = [count(line) for line in lines]
        (self.told,) = answered([fleet.ask(prompt)])
        chosen, self.loaded, self.computed = (
            count(line) - old for line, old in zip(lines, before, strict=True)
        )
        self.is_by_choice = chosen >= len(prompt) // BLOCK_TOKENS - 1
        """Whether it knew that the blocks are there, and loaded none of them."""


def fetched(fleet: NodeFleet, source: Machine, target: Machine, topic: str) -> Iterator[Fetched]:
    """One prompt after the other, for as long as the caller goes on (within bounds)."""
    for number in range(8):
        talks = [Talk(fleet, f"{topic} {number} {n}", 10 * BLOCK_TOKENS + 1) for n in range(12)]
        prompts = [tuple(talk.tokens) for talk in talks]
        fleet.only(source.name)
        answered(at_once([talk.turn for talk in talks]))
        fleet.settle()
        fleet.only(target.name)
        for prompt in prompts:
            yield Fetched(fleet, target, prompt)
    raise AssertionError(f"not within so many prompts: {topic}")


# Links, one after the other


def test_links_that_are_cut_one_after_the_other_cost_neither_answers_nor_time(
    fleet: NodeFleet,
) -> None:
    first, second = two_of(fleet)
    dice = random.Random(9)
    links = list(permutations((first.node, second.node, fleet.hub), 2))
    dice.shuffle(links)
    cut: deque[int] = deque()

    def is_one_served() -> bool:
        """Whether a worker can be asked."""
        behind = {node.name for at in cut if fleet.hub in links[at] for node in links[at]}
        return not {first.name, second.name} <= behind

    with Clients(fleet, 2).going_on() as clients:
        clients.heard(answers=True)
        try:
            for at, link in enumerate(links):
                fleet.network.cut(*link, dice.choice(list(Cut)))
                cut.append(at)
                clients.heard(answers=is_one_served())
                if len(cut) == 2:
                    fleet.network.heal(*links[cut.popleft()])
                    clients.heard(answers=is_one_served())
        finally:
            fleet.network.heal_all()
        cut.clear()
        clients.heard(answers=True)
    told = clients.told
    assert all(one.is_right for one in told if one.is_answer)
    assert {one.status for one in told} <= {200, 502, 503, 504}
    assert max(one.seconds for one in told) <= REQUEST_S + KEEPALIVE_S
    fleet.meet()
    fleet.settle()
    assert next(one for one in fetched(fleet, first, second, "healed") if one.loaded)
    assert next(one for one in fetched(fleet, second, first, "healed too") if one.loaded)
    fleet.settle()


# Workers and nodes that go


def test_a_drained_workers_hot_set_is_found_by_its_successor_on_another_node(
    fleet: NodeFleet,
) -> None:
    first, second = two_of(fleet)
    fleet.only(first.name)
    talks = [Talk(fleet, f"hot {n}") for n in range(2)]
    for _ in range(6):  # hotter than all before
        told = answered(at_once([talk.turn for talk in talks]))
    fleet.settle()
    status, _, _ = fleet.call(
        first.node, WORKER_PORT, "POST", "/drain", token=fleet.operator.read_text()
    )
    assert status == 200
    first.serves = False
    assert fleet.worker_metric(first.node, LEFT) > 0
    first.worker.terminate()
    assert first.worker.wait(60.0) == 0
    fleet.settle()  # the list is known, too
    before = fleet.store_metric(second, PEER_READ)
    for _ in range(4):
        with fleet.another_worker("heir", second, HEIR_PORT):
            if not fleet.worker_metric(second.node, PREFETCHED, HEIR_PORT):
                continue  # the index took longer than anybody waits for a hint
            blocks = sum(len(one.prompt) // BLOCK_TOKENS for one in told)
            assert fleet.store_metric(second, PEER_READ) - before >= blocks * BLOCK
            for one in told:
                (again,) = answered([fleet.ask_worker(second.node, one.prompt, HEIR_PORT)])
                whole = (len(one.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                assert again.cached == {"gpu": whole}
            break
    else:
        raise AssertionError("no successor finds the hot set")
    fleet.again(first)
    fleet.settle()


def test_a_node_that_is_lost_is_replaced_by_a_new_one_with_an_empty_disk(
    fleet: NodeFleet,
) -> None:
    lost, kept = two_of(fleet)
    fleet.only(kept.name)
    talks = [Talk(fleet, f"kept {n}", 10 * BLOCK_TOKENS + 1) for n in range(12)]
    answered(at_once([talk.turn for talk in talks]))
    fleet.only(lost.name, kept.name)
    fleet.settle()
    with Clients(fleet, 2).going_on() as clients:
        clients.heard(answers=True)
        fleet.network.unplug(lost.node)
        lost.worker.end()
        lost.store.end()
        del fleet.machines[lost.name]
        clients.heard(answers=True)
        fleet.meet()
        clients.heard(answers=True)
    assert all(one.is_right for one in clients.told if one.is_answer)
    assert max(one.seconds for one in clients.told) <= REQUEST_S + KEEPALIVE_S
    fleet.settle()  # nobody is known any more who is gone
    new = fleet.replace(lost, "spare")
    fleet.only(new.name)
    said = answered([talk.turn() for talk in talks])
    assert tokens_from(said, "peer") > 0
    fleet.only(new.name, kept.name)
    fleet.settle()

"""Two index replicas: publishers feed both, clients take whichever answers."""

import asyncio

from kvtier.client import ClientConfig, IndexClient, OwnReservation, WorkerName
from kvtier.sections import DialConfig
from kvtier.types import InstanceId
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import U64, Corpus, card
from tests.support.index_cluster import (
    IndexProcess,
    PublisherSpec,
    channel_to,
    converged,
    match,
    start_index,
    start_publishers,
)

TTL_MS = 8_000
PATIENT = ClientConfig(deadline_s=10.0)


async def answers(client: IndexClient, corpus: Corpus) -> list[dict[str, int]]:
    """What the client is told of ten chains, by hashes."""
    found = await client.match_many(
        [corpus.hashes(chain, 64) for chain in range(10)], card(corpus.block_tokens).pool
    )
    return [
        {str(one.worker(row).name.instance): int(one.tokens[row]) for row in range(len(one))}
        for one in found
    ]


async def test_losing_one_of_two_indexes_changes_no_answer_and_loses_no_reservation(
    processes: ProcessRunner,
) -> None:
    first, second = await start_index(processes, "first"), await start_index(processes, "second")
    both = [first.address, second.address]
    publishers = await start_publishers(
        processes,
        PublisherSpec("a", both, salt="s"),
        PublisherSpec("b", both, salt="s"),
    )
    for publisher in publishers:
        await publisher.ask("steps", count=400)
    for index in (first, second):
        await converged(index, publishers)
    corpus = publishers[0].spec.corpus
    dial = DialConfig(targets=tuple(both))
    async with IndexClient(dial, PATIENT) as client, client.reservations("r") as session:
        expected = await answers(client, corpus)
        assert any(expected)
        apart = Corpus(seed=99).hashes(0, 8)
        wanted = OwnReservation("k", WorkerName(InstanceId("a")), 100, TTL_MS, apart)
        assert (await session.reserve(wanted)).is_granted
        for index in (first, second):
            await until_matched(index, apart, {"a": 8 * 16}, 30)

        # One after the other dies; nobody who asks notices.
        for lost, left in ((first, second), (second, first)):
            asking = asyncio.create_task(_ask_on(client, corpus, expected))
            await asyncio.to_thread(lost.process.kill)
            assert left.process.alive
            count = await asking
            assert count >= 40
            await asyncio.to_thread(lost.process.restart)
            await converged(lost, publishers)
        for publisher in publishers:
            stats = await publisher.ask("stats")
            assert {stream["state"] for stream in stats["streams"]} == {"live"}
            assert stats["snapshots_begun"] == 4, "two at first, one for each life after"

        # News reach both, and the reservation ends when its time is over, everywhere.
        for publisher in publishers:
            await publisher.ask("steps", count=50)
        for index in (first, second):
            await converged(index, publishers)
            await until_matched(index, apart, {}, TTL_MS / 1000 + 30)
    for index in (first, second):
        index.clean_log()


async def until_matched(
    index: IndexProcess, hashes: U64, expected: dict[str, int], deadline_s: float
) -> None:
    async with channel_to(index.address) as channel:

        async def is_so() -> bool:
            return await match(channel, hashes) == expected

        await eventually_async(is_so, deadline_s, f"the match is {expected}")


async def _ask_on(client: IndexClient, corpus: Corpus, expected: list[dict[str, int]]) -> int:
    """Ask for two seconds, at least forty times; every answer is the one from before."""
    end = asyncio.get_running_loop().time() + 2.0
    count = 0
    while asyncio.get_running_loop().time() < end or count < 40:
        assert await answers(client, corpus) == expected
        count += 1
    return count


async def test_a_frozen_index_delays_an_answer_and_never_prevents_it(
    processes: ProcessRunner,
) -> None:
    first, second = await start_index(processes, "first"), await start_index(processes, "second")
    both = [first.address, second.address]
    (publisher,) = await start_publishers(processes, PublisherSpec("a", both, salt="s"))
    await publisher.ask("steps", count=200)
    for index in (first, second):
        await converged(index, [publisher])
    corpus = publisher.spec.corpus
    async with IndexClient(DialConfig(targets=tuple(both)), PATIENT) as client:
        expected = await answers(client, corpus)
        await asyncio.to_thread(first.process.freeze)
        for _ in range(20):
            assert await asyncio.wait_for(answers(client, corpus), 40) == expected
        await publisher.ask("steps", count=50)
        await converged(second, [publisher])
        first.process.thaw()
        await converged(first, [publisher])
    for index in (first, second):
        index.clean_log()

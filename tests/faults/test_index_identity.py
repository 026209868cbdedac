"""Zombies, twins, contradictions and shards: who may speak for whom."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually_async
from tests.support.corpus import Corpus, card, worker
from tests.support.index_cluster import (
    LEASE_MS,
    PublisherSpec,
    channel_to,
    converged,
    counts_of,
    fleet_view,
    match,
    match_prompt,
    start_index,
    start_publishers,
)
from tests.support.raw_publisher import RawPublisher, stored

CHAIN = Corpus().hashes(0, 64)
LONG_MS = 20_000


# ---- an epoch that is over


async def test_a_zombie_changes_nothing_with_any_message_and_is_told_that_it_is_dead(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        zombies = [RawPublisher(channel, worker("w"), epoch=epoch) for epoch in range(2, 6)]
        for zombie in zombies:
            await zombie.join([stored(CHAIN[:40])])
            await zombie.answer("ack")
        (living,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
        await living.ask("store", chain=0, begin=0, end=8)
        await converged(index, [living])
        await zombies[0].batch(1, stored(CHAIN[8:64]))
        await zombies[1].heartbeat(0)
        await zombies[2].snapshot(1, [stored(CHAIN)], snapshot_id=9)
        await zombies[3].raw(pb.PublishRequest(batch=pb.Batch(seq=1, hashes=b"odd")))
        for zombie in zombies:
            assert (await zombie.answer("fenced")).fenced.reason == "dead_epoch"
        again = RawPublisher(channel, worker("w"), epoch=3)
        assert (await again.hello()).WhichOneof("message") == "fenced"
        await converged(index, [living])
        assert (await living.ask("stats"))["fences"] == []
        assert (await counts_of(channel))["fenced"] == 5
    index.clean_log()


async def test_the_goodbye_of_a_zombie_does_not_send_its_successor_away(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        old = RawPublisher(channel, worker("w"), epoch=7)
        await old.join([stored(CHAIN[:40])])
        (new,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
        await new.ask("store", chain=0, begin=0, end=8)
        await converged(index, [new])
        await old.goodbye()
        assert await old.ended() is grpc.StatusCode.OK
        assert await match(channel, CHAIN) == {"w": 8 * 16}
        await converged(index, [new])
        stats = await new.ask("stats")
        assert (stats["snapshots_begun"], stats["streams"][0]["opened"]) == (1, 1), "undisturbed"
    index.clean_log()


async def test_the_end_of_an_old_connection_does_not_take_the_new_ones_snapshot_along(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=LONG_MS)
    async with channel_to(index.address) as channel:
        old = RawPublisher(channel, worker("w"), epoch=7)
        await old.hello()
        new = RawPublisher(channel, worker("w"), epoch=7)
        await new.hello()
        halves = [stored(CHAIN[:32]), stored(CHAIN[32:])]
        await new.chunk(0, halves, number=0)
        await new.answer("ack")
        old.cancel()
        await new.chunk(0, halves, number=1)

        async def is_whole() -> bool:
            return await match(channel, CHAIN) == {"w": 64 * 16}

        await eventually_async(is_whole, 30, "the snapshot is taken")
        counts = await counts_of(channel)
        assert (counts["aborted"], counts["replaced"]) == (0, 1)
        new.cancel()
    index.clean_log()


async def test_of_two_processes_with_one_name_the_later_stays_and_the_earlier_is_told(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    first, second = (
        PublisherSpec("first", [index.address], instance="twin"),
        PublisherSpec("second", [index.address], instance="twin", seed=1),
    )
    (earlier,) = await start_publishers(processes, first)
    await earlier.ask("fill", chains=5, blocks=64)
    await converged(index, [earlier])
    (later,) = await start_publishers(processes, second)
    await later.ask("fill", chains=3, blocks=64)
    await earlier.ask("fill", chains=1, blocks=64)
    await converged(index, [later])

    async def is_told() -> bool:
        return bool((await earlier.ask("stats"))["fences"])

    await eventually_async(is_told, 30, "the earlier one hears that it is fenced")
    stats = await earlier.ask("stats")
    assert (stats["is_fenced"], stats["fences"]) == (True, ["dead_epoch"])
    # It is silent from then on: what it does changes nothing, and nobody fights.
    await earlier.ask("fill", chains=9, blocks=64)
    await converged(index, [later])
    assert (await later.ask("stats"))["fences"] == []
    assert (await later.ask("stats"))["snapshots_begun"] == 1
    # An owner that knows better takes the name back.
    await earlier.ask("restart")
    await converged(index, [earlier])
    index.clean_log()


async def test_a_forgotten_number_given_to_another_holder_is_not_spoken_for_by_its_old_owner(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, lease_ms=300, grace_ms=0)
    async with channel_to(index.address) as channel:
        lapsed = RawPublisher(channel, worker("lapsed"), epoch=7)
        await lapsed.join([stored(CHAIN)])

        async def is_empty() -> bool:
            return not await fleet_view(channel)

        await eventually_async(is_empty, 30, "it is forgotten")
        spec = PublisherSpec("heir", [index.address])
        (heir,) = await start_publishers(processes, spec)
        await heir.ask("fill", chains=1, blocks=8)
        await converged(index, [heir])
        await lapsed.heartbeat(0)
        await lapsed.batch(1, stored(CHAIN))
        await lapsed.answer("hello_needed")
        await lapsed.goodbye()
        assert await lapsed.ended() is grpc.StatusCode.OK
        await converged(index, [heir])
        stats = await heir.ask("stats")
        assert (stats["snapshots_begun"], stats["streams"][0]["opened"]) == (1, 1), "undisturbed"
    index.clean_log()


# ---- pools


async def test_a_contradiction_inside_one_pool_is_refused_naming_both_values(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    (honest,) = await start_publishers(processes, PublisherSpec("honest", [index.address]))
    await honest.ask("fill", chains=5, blocks=64)
    await converged(index, [honest])
    async with channel_to(index.address) as channel:
        other = replace(card(16), tokenizer_digest=b"u" * 32)
        liar = RawPublisher(channel, replace(worker("liar"), card=other), epoch=8)
        refused = (await liar.hello()).refused
        assert (b"t" * 32).hex() in refused.reason
        assert (b"u" * 32).hex() in refused.reason
        assert await liar.ended() is grpc.StatusCode.OK
        assert (await counts_of(channel))["refused_contradiction"] == 1
    await converged(index, [honest])
    index.clean_log()


async def test_two_pools_of_one_name_live_side_by_side_and_compare_in_tokens(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    fine, coarse = await start_publishers(
        processes,
        PublisherSpec("fine", [index.address], block_tokens=16, salt="s"),
        PublisherSpec("coarse", [index.address], block_tokens=32, salt="s"),
    )
    await fine.ask("store", chain=0, begin=0, end=10)
    await coarse.ask("store", chain=0, begin=0, end=6)
    await converged(index, [fine, coarse])
    async with channel_to(index.address) as channel:
        # The same prompt, by tokens, is found in both pools at once.
        longer = Corpus(32, "s")
        assert await match_prompt(channel, longer, 0) == {"coarse": 6 * 32, "fine": 10 * 16}
        assert await match_prompt(channel, Corpus(32, "another"), 0) == {}
        # By hashes one asks about one pool.
        assert await match(channel, fine.spec.corpus.hashes(0, 64), 16) == {"fine": 160}
        assert await match(channel, coarse.spec.corpus.hashes(0, 64), 32) == {"coarse": 192}
        assert await match(channel, fine.spec.corpus.hashes(0, 64), 32) == {}
    index.clean_log()


# ---- shards


async def test_blocks_of_a_worker_that_misses_a_shard_do_not_count_until_it_is_back(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    ranks = await start_publishers(
        processes,
        *(
            PublisherSpec(f"rank{n}", [index.address], instance="tp2", shard=n, shards_count=2)
            for n in range(2)
        ),
    )
    async with channel_to(index.address) as channel:
        await ranks[0].ask("fill", chains=5, blocks=64)
        await ranks[0].flushed()
        await ranks[1].flushed()
        assert await match(channel, CHAIN) == {}, "the other shard holds nothing"
        await ranks[1].ask("fill", chains=5, blocks=40)
        await converged(index, ranks)
        assert await match(channel, CHAIN) == {"tp2": 40 * 16}

        await asyncio.to_thread(ranks[1].process.kill)

        async def is_gone() -> bool:
            return await match(channel, CHAIN) == {}

        await eventually_async(is_gone, LEASE_MS / 1000 + 30, "half a worker serves nobody")
        view = (await fleet_view(channel))["tp2"]
        assert view.hidden
        await asyncio.to_thread(ranks[1].process.restart)
        await ranks[1].ask("fill", chains=5, blocks=20)
        await converged(index, ranks)
        assert await match(channel, CHAIN) == {"tp2": 20 * 16}
    index.clean_log()


async def test_a_shard_that_was_away_for_longer_than_the_grace_period_completes_its_worker_again(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, grace_ms=100)
    async with channel_to(index.address) as channel:
        ranks = [
            RawPublisher(channel, worker("tp2", shard=n, shards_count=2), epoch=7 + n)
            for n in range(2)
        ]
        for rank in ranks:
            await rank.join([stored(CHAIN)])

        async def goes_on(what: str, *, is_matched: bool) -> None:
            async def is_so() -> bool:
                await ranks[0].heartbeat(0)
                return (await match(channel, CHAIN) == {"tp2": 64 * 16}) == is_matched

            await eventually_async(is_so, 10, what)

        await goes_on("both are there", is_matched=True)
        await goes_on("one is silent", is_matched=False)
        end = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < end:  # the grace period and more
            await goes_on("one is silent", is_matched=False)
        ranks[1].cancel()
        ranks[1] = RawPublisher(channel, worker("tp2", shard=1, shards_count=2), epoch=99)
        await ranks[1].join([stored(CHAIN)])
        await goes_on("both are there again", is_matched=True)
        view = (await fleet_view(channel))["tp2"]
        assert (view.trust, view.reason) == (pb.TRUST_EXACT, "")
        for rank in ranks:
            rank.cancel()
    index.clean_log()


@pytest.mark.parametrize("grace_ms", [0, 100])
async def test_all_shards_forgotten_at_one_moment_leave_an_index_that_still_knows_the_time(
    processes: ProcessRunner, grace_ms: int
) -> None:
    index = await start_index(processes, grace_ms=grace_ms)
    async with channel_to(index.address) as channel:
        ranks = [
            RawPublisher(channel, worker("tp8", shard=n, shards_count=8), epoch=7 + n)
            for n in range(8)
        ]
        for rank in ranks:
            await rank.hello()
        for rank in ranks:
            await rank.heartbeat(0)

        async def is_empty() -> bool:
            return not await fleet_view(channel)

        await eventually_async(is_empty, 30, "the worker is forgotten")
        # Leases still end for others.
        next_one = RawPublisher(channel, worker("next"), epoch=50)
        await next_one.join([stored(CHAIN[:8])])

        async def is_matched() -> bool:
            return await match(channel, CHAIN) == {"next": 8 * 16}

        await eventually_async(is_matched, 30, "the next one is there")
        await eventually_async(is_empty, 30, "the next one is forgotten too")
        for rank in [*ranks, next_one]:
            rank.cancel()
    index.clean_log()

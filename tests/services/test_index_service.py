"""The index service over its real wire, in this process: acceptance, matches, feeds, limits."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from kvtier.core.event_columns import EventKind
from kvtier.sections import ListenConfig
from kvtier.security import without_method, without_policy
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier, Trust
from kvtier.wire import convert, rpc, transport
from kvtier.wire import messages as pb
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import POLICY, RunningIndex, serve
from tests.harness.waiting import eventually_async
from tests.support.raw_publisher import (
    CARD,
    SPACE,
    RawPublisher,
    events,
    removed,
    stored,
    tokens_of,
    unary,
    worker_info,
)

CHAIN = np.arange(1, 65, dtype=np.uint64)
LEASE_MS = 30_000
"""Where a test is not about its end: these publishers send no heartbeats."""


@asynccontextmanager
async def an_index(**changes: Any) -> AsyncIterator[tuple[RunningIndex, grpc.aio.Channel]]:
    config = replace(
        IndexConfig(listen=ListenConfig(bind="127.0.0.1:0"), lease_ms=LEASE_MS), **changes
    )
    async with serve(config, io.StringIO()) as running:
        channel = transport.new_channel(f"127.0.0.1:{running.port}")
        try:
            yield running, channel
        finally:
            await channel.close()


async def match(channel: grpc.aio.Channel, hashes: Any = CHAIN) -> dict[str, int]:
    query = pb.MatchQuery(hashes=np.asarray(hashes, "<u8").tobytes())
    return tokens_of(await unary(channel, "Match")(pb.MatchRequest(queries=[query])))


def trust_of(running: RunningIndex, name: str) -> tuple[Trust, str]:
    holder = running.state.fleet.find_worker(InstanceId(name), 0)
    assert holder is not None
    return running.state.trust(holder)


def held(running: RunningIndex, name: str) -> int:
    holder = running.state.fleet.find_worker(InstanceId(name), 0)
    return 0 if holder is None else running.state.fleet.index.digest(holder, Tier.GPU, 0).count


async def until(condition: Callable[[], bool], what: str) -> None:
    async def asked() -> bool:
        return condition()

    await eventually_async(asked, deadline_s=30, what=what)


def test_every_method_has_a_policy_and_every_policy_a_method() -> None:
    assert without_policy(POLICY, [rpc.INDEX]) == ()
    assert without_method(POLICY, [rpc.INDEX]) == ()


async def test_a_snapshot_and_a_batch_are_matched_by_everybody() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:32])])
        await publisher.batch(1, stored(CHAIN[32:48], parent=int(CHAIN[31])))
        await publisher.acked(1)
        assert await match(channel) == {"w1": 48 * 16}
        assert trust_of(running, "w1")[0] is Trust.EXACT
        await publisher.batch(2, removed(CHAIN[10:11]))
        await publisher.acked(2)
        assert await match(channel) == {"w1": 10 * 16}


async def test_a_first_hello_is_told_the_lease_and_asked_for_a_snapshot() -> None:
    async with an_index() as (_, channel):
        welcome = (await RawPublisher(channel, worker_info(), epoch=7).hello()).welcome
        assert (welcome.need_snapshot, welcome.lease_ms) == (True, LEASE_MS)
        assert 0 < welcome.heartbeat_ms < LEASE_MS


async def test_a_gap_is_asked_for_and_filled_from_what_was_held() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([])
        await publisher.batch(1, stored(CHAIN[:4]))
        await publisher.batch(3, stored(CHAIN[8:12]))
        assert (await publisher.answer("resend")).resend.from_seq == 2
        assert trust_of(running, "w1") == (Trust.DEGRADED, "gap_pending")
        assert await match(channel) == {"w1": 4 * 16}
        await publisher.batch(2, stored(CHAIN[4:8]))
        await publisher.acked(3)
        assert await match(channel) == {"w1": 12 * 16}
        assert trust_of(running, "w1")[0] is Trust.EXACT


async def test_a_lost_last_batch_is_noticed_by_the_heartbeat() -> None:
    async with an_index() as (_, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([])
        await publisher.heartbeat(2)
        assert (await publisher.answer("resend")).resend.from_seq == 1


async def test_a_digest_that_differs_brings_a_snapshot_and_the_truth() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        wrong = [pb.Digest(tier=tier, count=1, xor=99) for tier in range(4)]
        await publisher.raw(pb.PublishRequest(heartbeat=pb.Heartbeat(seq=0, digests=wrong)))
        assert (await publisher.answer("snapshot_needed")).snapshot_needed.reason == "drift"
        assert await match(channel) == {"w1": 8 * 16}, "nothing is wiped before its replacement"
        await publisher.snapshot(0, [stored(CHAIN[:5])], snapshot_id=2)
        await until(lambda: held(running, "w1") == 5, "the snapshot replaces what was held")
        assert trust_of(running, "w1")[0] is Trust.EXACT


async def test_a_new_epoch_replaces_everything_and_the_old_one_is_fenced() -> None:
    async with an_index() as (running, channel):
        zombie = RawPublisher(channel, worker_info(), epoch=7)
        await zombie.join([stored(CHAIN)])
        await until(lambda: held(running, "w1") == 64, "the first life is in")
        reborn = RawPublisher(channel, worker_info(), epoch=8)
        await reborn.join([stored(CHAIN[:2])])
        await until(lambda: held(running, "w1") == 2, "only the new life counts")
        await zombie.batch(1, stored(CHAIN))
        assert (await zombie.answer("fenced")).fenced.reason == "dead_epoch"
        again = RawPublisher(channel, worker_info(), epoch=7)
        assert (await again.hello()).WhichOneof("message") == "fenced"
        assert held(running, "w1") == 2


async def test_a_silent_holder_is_hidden_and_resumes_without_a_snapshot() -> None:
    async with an_index(lease_ms=1000) as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        await publisher.batch(1, stored(CHAIN[8:9]))
        await publisher.acked(1)
        record = running.state.fleet.record(next(running.state.fleet.records()).holder)
        await until(lambda: record.hidden, "the lease ends")
        assert await match(channel) == {}
        assert "hidden" in trust_of(running, "w1")[1]
        publisher.cancel()
        back = RawPublisher(channel, worker_info(), epoch=7)
        welcome = await back.hello(seq=1)
        assert welcome.WhichOneof("message") == "welcome", "no snapshot"
        assert not welcome.welcome.need_snapshot
        assert welcome.welcome.resume_after_seq == 1
        assert await match(channel) == {"w1": 9 * 16}
        assert trust_of(running, "w1")[0] is Trust.EXACT


async def test_a_forgotten_holder_leaves_nothing() -> None:
    async with an_index(lease_ms=200, grace_ms=200) as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN)])
        await until(lambda: len(running.state.fleet) == 0, "lease and grace end")
        assert running.state.fleet.index.stats().blocks == 0


async def test_goodbye_forgets_at_once() -> None:
    async with an_index(lease_ms=60_000) as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN)])
        await publisher.goodbye()
        assert await publisher.ended() is grpc.StatusCode.OK
        assert len(running.state.fleet) == 0


async def test_a_contradiction_is_refused_with_both_values() -> None:
    async with an_index() as (running, channel):
        await RawPublisher(channel, worker_info("w1"), epoch=7).join([])
        other = replace(CARD, tokenizer_digest=b"u" * 32)
        liar = RawPublisher(channel, worker_info("w2", card=other), epoch=8)
        refused = (await liar.hello()).refused
        assert "74747474" in refused.reason
        assert "75757575" in refused.reason
        assert await liar.ended() is grpc.StatusCode.OK
        assert len(running.state.fleet) == 1
        assert running.state.counts.refused["contradiction"] == 1


async def test_blocks_count_only_when_all_shards_are_there() -> None:
    async with an_index() as (_, channel):
        ranks = [
            RawPublisher(
                channel,
                worker_info(
                    shard_index=rank, shards_count=2, namespace=Fingerprint(bytes([rank]) * 32)
                ),
                epoch=7 + rank,
            )
            for rank in range(2)
        ]
        await ranks[0].join([stored(CHAIN[:8])])
        assert await match(channel) == {}
        await ranks[1].join([stored(CHAIN[:5])])
        await ranks[1].batch(1, stored(CHAIN[5:6]))
        await ranks[1].acked(1)
        assert await match(channel) == {"w1": 6 * 16}
        await ranks[0].batch(1, removed(CHAIN[2:3]))
        await ranks[0].acked(1)
        assert await match(channel) == {"w1": 2 * 16}


@pytest.mark.parametrize(
    "broken",
    [
        pb.Batch(seq=1, kinds=b"\0", tiers=b"\0", lengths=b"\1\0\0\0", parents=b"\0" * 8),
        pb.Batch(seq=1, kinds=b"\x44", tiers=b"\0", lengths=b"\0\0\0\0", parents=b"\0" * 8),
        pb.Batch(seq=1, hashes=b"\0\0\0"),
        convert.batch_to(stored(CHAIN[8:9], Tier.DRAM), 1),
    ],
    ids=["hashes missing", "unknown kind", "half a hash", "tier of another kind of holder"],
)
async def test_an_unreadable_batch_changes_nothing_and_is_repaired_by_a_snapshot(
    broken: pb.Batch,
) -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        await publisher.raw(pb.PublishRequest(batch=broken))
        assert (await publisher.answer("snapshot_needed")).snapshot_needed.reason == "undecodable"
        assert "undecodable" in trust_of(running, "w1")[1]
        assert await match(channel) == {"w1": 8 * 16}
        await publisher.snapshot(1, [stored(CHAIN[:9])], snapshot_id=2)
        await publisher.batch(2, stored(CHAIN[9:10]))
        await publisher.acked(2)
        assert await match(channel) == {"w1": 10 * 16}
        assert trust_of(running, "w1")[0] is Trust.EXACT


@pytest.mark.parametrize(
    "request_",
    [
        pb.PublishRequest(batch=pb.Batch(seq=1)),
        pb.PublishRequest(),
        pb.PublishRequest(hello=pb.Hello(instance="x")),
    ],
    ids=["batch first", "empty", "broken hello"],
)
async def test_a_stream_that_begins_wrongly_ends_with_the_callers_error(
    request_: pb.PublishRequest,
) -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.raw(request_)
        assert await publisher.ended() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(running.state.fleet) == 0


async def test_a_flood_is_cut_off_and_others_go_on() -> None:
    async with an_index(holder_blocks_max=1000) as (running, channel):
        good = RawPublisher(channel, worker_info("good"), epoch=7)
        await good.join([stored(CHAIN)])
        flood = RawPublisher(channel, worker_info("flood"), epoch=8)
        await flood.join([])
        for seq in range(1, 30):
            hashes = np.arange(seq << 20, (seq << 20) + 64, dtype=np.uint64)
            try:
                await flood.batch(seq, stored(hashes))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                break  # cut off already
            await asyncio.sleep(0)
        # grpc reports INTERNAL where its own write was under way when the index ended the call.
        cut_off = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL}
        assert await flood.ended() in cut_off
        assert held(running, "flood") <= 1064
        assert running.state.counts.refused["holder_full"] == 1
        assert await match(channel) == {"good": 64 * 16}


async def test_a_holder_that_stores_and_removes_for_ever_is_never_full() -> None:
    async with an_index(holder_blocks_max=200) as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([])
        for seq in range(1, 41):
            await publisher.batch(seq, stored(CHAIN) if seq % 2 else removed(CHAIN))
        await publisher.acked(40)
        assert running.state.counts.blocks_stored == 20 * 64
        assert running.state.counts.refused["holder_full"] == 0


async def test_a_snapshot_that_removes_is_unreadable_and_replaces_nothing() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        await until(lambda: held(running, "w1") == 8, "the first snapshot is in")
        await publisher.snapshot(0, [removed(CHAIN[:3])], snapshot_id=2)
        assert (await publisher.answer("snapshot_needed")).snapshot_needed.reason == "undecodable"
        assert await match(channel) == {"w1": 8 * 16}


async def test_a_store_may_clear_everything_although_its_tiers_do_not_begin_at_0() -> None:
    async with an_index() as (running, channel):
        info = worker_info("s1", kind=HolderKind.STORE, card=None, store="")
        publisher = RawPublisher(channel, info, epoch=7)
        await publisher.join([stored(CHAIN[:8], Tier.NVME)])
        await publisher.batch(1, events([(EventKind.CLEAR_ALL, Tier.GPU, CHAIN[:0])]))
        await publisher.acked(1)
        (record,) = running.state.fleet.records()
        assert set(running.state.held((record.holder, 0)).values()) == {0}


async def test_match_answers_many_queries_by_hashes_and_by_tokens() -> None:
    from kvtier.core.identity import chain_root
    from kvtier.core.keys import prefix_hashes

    tokens = np.arange(160, dtype=np.uint32)
    salted = prefix_hashes(chain_root(CARD.pool, "salt", None), tokens, 16)
    async with an_index() as (_, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(salted[:3]), stored(CHAIN[:5])])
        await publisher.batch(1, events([]))
        await publisher.acked(1)
        pool = convert.pool_name(CARD.pool)
        response = await unary(channel, "Match")(
            pb.MatchRequest(
                queries=[
                    pb.MatchQuery(hashes=CHAIN.tobytes(), pool=pool),
                    pb.MatchQuery(tokens=tokens.tobytes(), served_name="chat", scope_salt="salt"),
                    pb.MatchQuery(tokens=tokens.tobytes(), served_name="chat"),
                    pb.MatchQuery(),
                ]
            )
        )
        assert [tokens_of(response, row) for row in range(4)] == [
            {"w1": 80},
            {"w1": 48},
            {},
            {},
        ]
        assert response.results[0].queried_blocks == 64
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Match")(pb.MatchRequest(queries=[pb.MatchQuery(hashes=b"123")]))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Match")(
                pb.MatchRequest(queries=[pb.MatchQuery(hashes=b"", pool=b"nobody's")])
            )
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reservations_are_seen_by_match_and_die_with_the_stream() -> None:
    async with an_index() as (running, channel):
        await RawPublisher(channel, worker_info(), epoch=7).join([])
        call = rpc.call(channel, rpc.INDEX, "Reserve")()
        await call.write(pb.ReserveRequest(hello=pb.RouterHello(router="r1", epoch=3)))
        wanted = pb.Reservation(
            key="k1",
            instance="w1",
            prefill_tokens=500,
            predicted_hashes=CHAIN[:6].tobytes(),
            ttl_ms=50_000,
        )
        await call.write(pb.ReserveRequest(reserve=wanted))
        reply = await call.read()
        assert (reply.key, reply.granted, reply.worker_prefill_tokens) == ("k1", True, 500)
        assert await match(channel) == {"w1": 6 * 16}
        unknown = pb.Reservation(key="k2", instance="nobody", ttl_ms=1000)
        await call.write(pb.ReserveRequest(reserve=unknown))
        assert (await call.read()).reason == "unknown_worker"
        released = await unary(channel, "Release")(
            pb.ReleaseRequest(router="r1", epoch=3, keys=["k1", "k1", "never"])
        )
        assert released.released == 1
        assert await match(channel) == {}
        again = pb.Reservation()
        again.CopyFrom(wanted)
        again.key = "k3"
        await call.write(pb.ReserveRequest(reserve=again))
        assert (await call.read()).granted
        call.cancel()
        holder = running.state.fleet.find_worker(InstanceId("w1"), 0)
        assert holder is not None
        await until(
            lambda: running.state.routers.reserved(holder).prefill_tokens == 0, "the stream's death"
        )
        assert await match(channel) == {}


async def test_a_reservation_expires_by_itself() -> None:
    async with an_index() as (_, channel):
        await RawPublisher(channel, worker_info(), epoch=7).join([])
        call = rpc.call(channel, rpc.INDEX, "Reserve")()
        await call.write(pb.ReserveRequest(hello=pb.RouterHello(router="r1", epoch=3)))
        await call.write(
            pb.ReserveRequest(
                reserve=pb.Reservation(
                    key="k", instance="w1", predicted_hashes=CHAIN[:6].tobytes(), ttl_ms=100
                )
            )
        )
        assert (await call.read()).granted
        for _ in range(200):
            if not await match(channel):
                break
            await asyncio.sleep(0.02)
        assert await match(channel) == {}
        call.cancel()


async def test_a_watcher_sees_holders_come_hide_return_and_go() -> None:
    async with an_index(lease_ms=300) as (_, channel):
        early = RawPublisher(channel, worker_info("early"), epoch=5)
        await early.join([])
        watch = unary(channel, "WatchFleet")(pb.WatchFleetRequest())
        kinds = pb.FleetEvent.Kind

        async def until_kind(kind: int, name: str) -> pb.FleetEvent:
            while True:
                event: pb.FleetEvent = await watch.read()
                if event.kind == kind and event.holder.hello.instance == name:
                    return event

        first = await watch.read()
        assert (first.kind, first.holder.hello.instance) == (kinds.KIND_JOINED, "early")
        assert (await watch.read()).kind == kinds.KIND_CURRENT
        late = RawPublisher(channel, worker_info("late"), epoch=6)
        await late.join([])
        joined = await until_kind(kinds.KIND_JOINED, "late")
        assert convert.card_from(joined.holder.hello.card) == CARD
        await until_kind(kinds.KIND_HIDDEN, "late")
        await late.heartbeat(0, pb.Load(running_requests=3))
        await until_kind(kinds.KIND_RESUMED, "late")
        await late.heartbeat(0, pb.Load(running_requests=4))
        while True:
            changed = await until_kind(kinds.KIND_CHANGED, "late")
            if changed.holder.load.running_requests == 4:
                break
        assert changed.holder.trust == pb.TRUST_EXACT
        await late.goodbye()
        await until_kind(kinds.KIND_LEFT, "late")
        watch.cancel()


async def test_a_follower_gets_everything_once_and_then_every_change() -> None:
    async with an_index(lease_ms=60_000) as (_, channel):
        first = RawPublisher(channel, worker_info("w1"), epoch=7)
        await first.join([stored(CHAIN[:40])])
        await first.answer("ack")
        feed = unary(channel, "Snapshot")(pb.SnapshotRequest(follow=True))
        seen: list[str] = []
        blocks = 0
        while True:
            response: pb.SnapshotResponse = await feed.read()
            kind = response.WhichOneof("message") or ""
            seen.append(kind)
            blocks += len(response.blocks.batch.hashes) // 8
            if kind == "complete":
                break
        assert (seen[0], seen[-1], blocks) == ("holder", "complete", 40)
        await first.batch(1, stored(CHAIN[40:44]))
        store = worker_info(
            "s1", kind=HolderKind.STORE, card=None, store="", node=NodeId("node-of-w1")
        )
        second = RawPublisher(channel, store, epoch=9)
        await second.join([stored(CHAIN[:3], Tier.DRAM)])
        await first.goodbye()
        wanted = {"batch", "holder", "blocks", "removed_holder"}
        position = response.position
        while wanted:
            response = await feed.read()
            assert response.position >= position
            position = response.position
            wanted.discard(response.WhichOneof("message") or "")
        feed.cancel()


async def test_a_follower_of_one_model_gets_only_its_holders() -> None:
    other = replace(CARD, model_id="org/other", served_names=("other",))
    async with an_index() as (_, channel):
        await RawPublisher(channel, worker_info("w1"), epoch=7).join([stored(CHAIN)])
        await RawPublisher(channel, worker_info("w2", card=other), epoch=8).join([stored(CHAIN)])
        feed = unary(channel, "Snapshot")(pb.SnapshotRequest(models=["other"]))
        names = [
            response.holder.hello.instance
            async for response in feed
            if response.WhichOneof("message") == "holder"
        ]
        assert names == ["w2"]


async def test_stats_tell_holders_states_and_every_kind_of_event() -> None:
    async with an_index() as (_, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN[:8])])
        await publisher.batch(1, removed(np.array([777], np.uint64)))
        await publisher.batch(1, removed(np.array([777], np.uint64)))
        await publisher.acked(1)
        await match(channel)
        stats: pb.StatsResponse = await unary(channel, "Stats")(pb.StatsRequest())
        counts = {row.name: row.count for row in stats.events}
        assert (stats.blocks, stats.holdings, len(stats.holders)) == (8, 8, 1)
        assert counts["duplicate"] == 1
        assert counts["unresolved_unknown_block"] == 1
        assert (stats.queried_blocks, stats.matched_blocks) == (64, 8)
        (holder,) = stats.holders
        assert [(tier.tier, tier.blocks, tier.bytes) for tier in holder.tiers] == [(0, 8, 8000)]
        assert holder.holder.trust == pb.TRUST_EXACT
        assert holder.last_seq == 1


async def test_every_metric_of_the_table_is_fed() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(), epoch=7)
        await publisher.join([stored(CHAIN)])
        await publisher.answer("ack")
        await match(channel)
        assert running.metrics.unbound == ()
        page = running.metrics.render().decode()
        assert "kvtier_index_queried_blocks_total 64.0" in page
        assert 'kvtier_index_holdings{tier="gpu"} 64.0' in page
        assert 'kvtier_index_holders{kind="worker",state="exact"} 1.0' in page


async def test_removes_of_a_namespace_the_index_never_saw_change_nothing() -> None:
    async with an_index() as (running, channel):
        publisher = RawPublisher(channel, worker_info(namespace=SPACE), epoch=7)
        await publisher.join([])
        rows = [(EventKind.CLEAR_ALL, Tier.GPU, CHAIN[:0]), (EventKind.REMOVE, Tier.GPU, CHAIN)]
        await publisher.batch(1, events(rows))
        await publisher.acked(1)
        assert running.state.counts.blocks_unknown == 64


@pytest.mark.parametrize(
    ("method", "request_"),
    [("Snapshot", pb.SnapshotRequest(follow=True)), ("WatchFleet", pb.WatchFleetRequest())],
)
async def test_one_receiver_too_many_is_turned_away_and_the_others_go_on(
    method: str, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("FOLLOWERS_COUNT_MAX", "WATCHERS_COUNT_MAX"):
        monkeypatch.setattr(f"kvtier_services.index.service.{limit}", 1)
    async with an_index() as (_, channel):
        first = unary(channel, method)(request_)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, method)(request_).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await RawPublisher(channel, worker_info("w1"), epoch=7).join([])
        while "w1" not in str(await first.read()):
            pass
        first.cancel()

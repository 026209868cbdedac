"""The link between publishers and the index is cut: one way, both ways, at once, silently."""

import asyncio

import grpc
import grpc.aio
import pytest

from kvtier.limits import GRPC_KEEPALIVE_MS, GRPC_KEEPALIVE_TIMEOUT_MS
from kvtier.wire import messages as pb
from tests.harness.netns import Network
from tests.harness.processes import ProcessRunner
from tests.harness.proxy import Admission, Direction, Faults, Flow, TcpProxy
from tests.harness.rights import requires_netns
from tests.harness.waiting import eventually_async
from tests.support.index_cluster import (
    LEASE_MS,
    NODE_PORT,
    IndexProcess,
    PublisherProcess,
    PublisherSpec,
    channel_to,
    converged,
    fleet_view,
    index_launch_in,
    match,
    start_index,
    start_publishers,
    stats_of,
)
from tests.support.raw_publisher import unary

NOTICED_S = (GRPC_KEEPALIVE_MS + GRPC_KEEPALIVE_TIMEOUT_MS) / 1000
HOLD = Faults(flow=Flow.HOLD)


async def until_hidden(address: str, name: str) -> None:
    async with channel_to(address) as channel:

        async def is_hidden() -> bool:
            view = await fleet_view(channel)
            return name in view and view[name].hidden

        await eventually_async(is_hidden, LEASE_MS / 1000 + NOTICED_S + 30, f"{name} is hidden")


async def until_lost(publisher: PublisherProcess, failures: int) -> None:
    async def is_lost() -> bool:
        stream = (await publisher.ask("stats"))["streams"][0]
        return int(stream["failures"]) > failures

    await eventually_async(is_lost, NOTICED_S + 30, "the publisher notices")


@pytest.mark.parametrize(
    "cut",
    [{Direction.TO_SERVER}, {Direction.TO_CLIENT}, set(Direction)],
    ids=["to", "from", "both"],
)
async def test_a_cut_link_hides_only_who_is_behind_it_and_heals_by_itself(
    processes: ProcessRunner, cut: set[Direction]
) -> None:
    index = await start_index(processes)
    with TcpProxy(("127.0.0.1", index.port)) as link:
        near, far = await start_publishers(
            processes,
            PublisherSpec("near", [index.address], seed=1),
            PublisherSpec("far", [link.address], seed=2, config={"silence_s": 0.5}),
        )
        for publisher in (near, far):
            await publisher.ask("fill", chains=5, blocks=64)
        await converged(index, [near, far])
        failures = (await far.ask("stats"))["streams"][0]["failures"]

        for direction in cut:
            link.set(direction, HOLD)
        # The engine is never held up, and others are answered at once and rightly.
        async with channel_to(index.address) as channel:
            for length in range(1, 50):
                await far.ask("store", chain=90, begin=length - 1, end=length)
                answer = await asyncio.wait_for(match(channel, near.spec.corpus.hashes(0, 64)), 40)
                assert answer == {"near": 64 * 16}
        await until_lost(far, failures)
        await until_hidden(index.address, "far")
        await converged(index, [near])
        assert all(link.counters(direction).bytes_held > 0 for direction in cut)

        link.heal()
        await converged(index, [near, far])
        assert (await far.ask("stats"))["fences"] == []
    index.clean_log()


async def test_resets_and_refused_connections_cost_nothing_but_time(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    with TcpProxy(("127.0.0.1", index.port)) as link:
        (publisher,) = await start_publishers(processes, PublisherSpec("w", [link.address]))
        await publisher.ask("fill", chains=5, blocks=64)
        await publisher.ask("churn", pause_s=0.002)
        await publisher.flushed()
        for number in range(4):
            failures = (await publisher.ask("stats"))["streams"][0]["failures"]
            link.admit(Admission.RESET if number % 2 else Admission.ACCEPT)
            link.reset()
            await until_lost(publisher, failures + number % 2)
            link.heal()
            await publisher.flushed()
        assert link.connections().resets > 0
        assert link.connections().admission_reset > 0
        await publisher.ask("quiet")
        await converged(index, [publisher])
        stats = await publisher.ask("stats")
        assert stats["snapshots_begun"] == 1, "the ring fills every gap"
    index.clean_log()


async def test_keepalive_ends_a_call_on_a_dead_link_long_before_its_deadline(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes)
    with TcpProxy(("127.0.0.1", index.port)) as link:
        async with channel_to(link.address) as channel, channel_to(index.address) as direct:
            watching = unary(channel, "WatchFleet")(pb.WatchFleetRequest(), timeout=600)
            following = unary(channel, "Snapshot")(pb.SnapshotRequest(follow=True), timeout=600)
            assert (await watching.read()).kind == pb.FleetEvent.KIND_CURRENT
            assert (await following.read()).complete
            assert (await stats_of(direct)).followers == 1
            link.cut()

            async def ended(call: grpc.aio.UnaryStreamCall[object, object]) -> grpc.StatusCode:
                try:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

            codes = await asyncio.wait_for(
                asyncio.gather(ended(watching), ended(following)), NOTICED_S + 30
            )
            assert set(codes) == {grpc.StatusCode.UNAVAILABLE}

            async def is_let_go() -> bool:
                return (await stats_of(direct)).followers == 0

            await eventually_async(is_let_go, NOTICED_S + 30, "the index notices too")
    index.clean_log()


@requires_netns
@pytest.mark.parametrize("both_ways", [False, True], ids=["one way", "both ways"])
async def test_a_pulled_cable_between_two_machines_is_noticed_and_survived(
    network: Network, processes: ProcessRunner, both_ways: bool
) -> None:
    left, right = network.add_node("left"), network.add_node("right")
    launch = index_launch_in(left, processes)
    index = IndexProcess(await asyncio.to_thread(processes.start, launch), NODE_PORT, left.address)
    spec = PublisherSpec(
        "far", [index.address], prefix=right.prefix, config={"silence_s": 0.5}, insecure=True
    )
    (far,) = await start_publishers(processes, spec)
    with TcpProxy(left.dial(NODE_PORT, left.address)) as window:
        await far.ask("fill", chains=5, blocks=64)
        await converged(window.address, [far])
        sent = left.counters().rx_packets
        network.cut(right, left)
        if both_ways:
            network.cut(left, right)
        await far.ask("steps", count=50)
        await until_hidden(window.address, "far")
        async with channel_to(window.address) as channel:
            assert await match(channel, far.spec.corpus.hashes(0, 64)) == {}
        lost = left.counters().rx_packets - sent
        network.heal_all()
        await converged(window.address, [far])
        assert left.counters().rx_packets - sent > lost, "packets flow again"
        assert (await far.ask("stats"))["fences"] == []
    index.clean_log()

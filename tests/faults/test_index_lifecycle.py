"""Start, stop and configuration of the index process, right and wrong."""

import asyncio
import socket
import threading
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest

from kvtier.cli import main
from kvtier.limits import BATCH_BLOCKS_MAX
from kvtier.wire import messages as pb
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.waiting import eventually, eventually_async
from tests.support.corpus import Corpus, worker
from tests.support.index_cluster import (
    IndexProcess,
    PublisherSpec,
    channel_to,
    converged,
    fleet_view,
    index_launch,
    match,
    start_index,
    start_publishers,
)
from tests.support.raw_publisher import RawPublisher, removed, stored, unary

CHAIN = Corpus().hashes(0, 64)


def output_of(process: Process) -> list[str]:
    """What a process wrote, without the harness's own line."""
    return [line for line in process.log_text().splitlines() if not line.startswith("--- start")]


# ---- stopping


async def test_sigterm_lets_calls_end_and_drains_within_its_limit(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, drain_ms_max=2_000)
    (publisher,) = await start_publishers(processes, PublisherSpec("w", [index.address]))
    await publisher.ask("fill", chains=5, blocks=64)
    await converged(index, [publisher])
    async with channel_to(index.address) as channel:
        watching = unary(channel, "WatchFleet")(pb.WatchFleetRequest())
        while (await watching.read()).kind != pb.FleetEvent.KIND_CURRENT:
            pass
        calls = [asyncio.create_task(_match_until_refused(channel)) for _ in range(4)]
        index.process.terminate()
        codes = set(await asyncio.gather(*calls))
        assert codes <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        watching.cancel()
    assert await asyncio.to_thread(index.process.wait, 40) == 0
    assert "stopping" in index.clean_log()
    # Its publisher takes it up with the next one.
    await asyncio.to_thread(index.process.restart)
    await converged(index, [publisher])


async def _match_until_refused(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Ask until the index does not answer any more; every answer before that is right."""
    while True:
        try:
            assert await match(channel, CHAIN) == {"w": 64 * 16}
        except grpc.aio.AioRpcError as error:
            return error.code()


async def test_sigterm_ends_every_kind_of_stream_at_once_and_says_why(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, drain_ms_max=120_000)
    async with channel_to(index.address) as channel:
        publishing = RawPublisher(channel, worker("w"), epoch=7)
        await publishing.join([stored(CHAIN)])
        watching = unary(channel, "WatchFleet")(pb.WatchFleetRequest())
        while (await watching.read()).kind != pb.FleetEvent.KIND_CURRENT:
            pass
        following = unary(channel, "Snapshot")(pb.SnapshotRequest(follow=True))
        while not (await following.read()).complete:
            pass
        reserving = unary(channel, "Reserve")()
        await reserving.write(pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=1)))
        wanted = pb.Reservation(key="k", instance="w", prefill_tokens=1, ttl_ms=60_000)
        await reserving.write(pb.ReserveRequest(reserve=wanted))
        assert (await reserving.read()).granted
        await publishing.batch(1, stored(CHAIN))
        index.process.terminate()
        ends = {
            name: await _end_of(call)
            for name, call in {
                "publish": publishing.call,
                "watch": watching,
                "follow": following,
                "reserve": reserving,
            }.items()
        }
        # Long before the drain would have ended by itself.
        assert await asyncio.to_thread(index.process.wait, 40) == 0
    why = (grpc.StatusCode.UNAVAILABLE, "the index is stopping")
    assert ends == dict.fromkeys(ends, why)
    index.clean_log()


async def _end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and text with which the index ends a stream, once all that it said was read."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()


async def test_a_second_sigterm_changes_nothing_and_no_drain_lasts_for_ever(
    processes: ProcessRunner,
) -> None:
    index = await start_index(processes, drain_ms_max=0)
    async with channel_to(index.address) as channel:
        stuck = RawPublisher(channel, worker("w"), epoch=7)
        await stuck.join([stored(CHAIN)])
        await stuck.answer("ack")
        index.process.terminate()
        if index.process.alive:
            index.process.terminate()
        assert await asyncio.to_thread(index.process.wait, 40) == 0
        stuck.cancel()
    index.clean_log()


def test_sigterm_at_any_moment_of_the_start_ends_it_without_a_word(
    processes: ProcessRunner,
) -> None:
    statuses = set()
    for number in range(6):
        launch, _ = index_launch(processes, f"index{number}")
        process = processes.spawn(launch)
        threading.Event().wait(0.12 * number)  # the moments themselves
        process.terminate()
        statuses.add(process.wait(40))
        assert "Traceback" not in process.log_text(), process.log_text()
    # Before its handler is set the signal's own effect ends it.
    assert statuses <= {0, -15}


async def test_goodbyes_amid_a_flood_are_all_heard(processes: ProcessRunner) -> None:
    index = await start_index(processes, lease_ms=60_000)
    large = np.arange(1, BATCH_BLOCKS_MAX + 1, dtype=np.uint64)
    async with channel_to(index.address) as channel, channel_to(index.address) as busy:
        floods = [RawPublisher(busy, worker(f"flood{n}"), epoch=7 + n) for n in range(4)]
        leaving = [RawPublisher(channel, worker(f"w{n}"), epoch=7 + n) for n in range(30)]
        for one in (*floods, *leaving):
            await one.join([stored(CHAIN)])
            await one.answer("ack")
        # Each of these batches takes a turn of its own; the goodbyes come between them.
        for seq in range(1, 16):
            for flood in floods:
                await flood.batch(seq, stored(large) if seq % 2 else removed(large))
            for one in leaving[2 * seq - 2 : 2 * seq]:
                await one.goodbye()
        for one in leaving:
            assert await one.ended() is grpc.StatusCode.OK
        for flood in floods:
            await flood.acked(15)
        assert set(await fleet_view(channel)) == {f"flood{n}" for n in range(4)}
        for flood in floods:
            flood.cancel()
    index.clean_log()


# ---- starting


async def test_a_taken_port_is_one_line_and_harms_nobody(processes: ProcessRunner) -> None:
    index = await start_index(processes)
    second = processes.spawn(
        Launch("second", kvtier_command("index", "--bind", f"127.0.0.1:{index.port}"))
    )
    assert await asyncio.to_thread(second.wait, 40) == 1
    (line,) = [line for line in output_of(second) if "chttp2" not in line and "E1" not in line[:2]]
    assert line == f"kvtier index: cannot listen on 127.0.0.1:{index.port}: is it taken?"
    async with channel_to(index.address) as channel:
        assert await match(channel, CHAIN) == {}


CONFIGURATIONS = {
    "unknown key": ("lease_msec = 100\n", "lease_msec"),
    "unknown section": ("[listening]\nbind = 'x'\n", "listening"),
    "lease too short": ("lease_ms = 1\n", "lease_ms must be in 100..600000, got 1"),
    "lease of the wrong type": ("lease_ms = 'long'\n", "lease_ms"),
    "grace negative": ("grace_ms = -1\n", "grace_ms"),
    "too little memory": ("index_bytes_max = 10\n", "index_bytes_max"),
    "too much memory": (f"index_bytes_max = {1 << 60}\n", "index_bytes_max"),
    "no room for holders": ("holder_blocks_max = 0\n", "holder_blocks_max"),
    "drain negative": ("drain_ms_max = -5\n", "drain_ms_max"),
    "no address": ("[listen]\nbind = 'nowhere'\n", "nowhere"),
    "port too high": ("[listen]\nbind = '127.0.0.1:99999'\n", "99999"),
    "key without certificate": ("[listen.tls]\nkey_file = '/none'\n", "cert_file"),
    "no such certificate": (
        "[listen.tls]\nkey_file = '/none.key'\ncert_file = '/none.crt'\n",
        "/none",
    ),
    "no such tokens": ("[listen]\ntokens_file = '/none.toml'\n", "/none.toml"),
    "open to the network": ("[listen]\nbind = '0.0.0.0:0'\n", "reachable from other machines"),
    "metrics open to the network": (
        "[telemetry]\nmetrics_bind = '0.0.0.0:0'\n",
        "reachable from other machines",
    ),
    "unknown log level": ("[telemetry]\nlog_level = 'loud'\n", "loud"),
    "no TOML": ("lease_ms = = 5\n", "index.toml"),
    "not even text": ("\x00\x01\x02\n", "index.toml"),
    "cut off": ("[listen\n", "index.toml"),
    "twice the same": ("lease_ms = 500\nlease_ms = 600\n", "index.toml"),
}


STARTED = ("unknown key", "no such certificate", "no such tokens", "open to the network",
           "metrics open to the network", "not even text")  # fmt: skip
"""These are tried with a process; of the others the same command line is called here."""


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_wrong_configuration_is_refused_in_one_line_that_names_it(
    processes: ProcessRunner, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    text, named = CONFIGURATIONS[case]
    path = processes.directory / "index.toml"
    path.write_text(text)
    argv = ("index", "--config", str(path))
    if case in STARTED:
        process = processes.spawn(Launch("index", kvtier_command(*argv)))
        assert process.wait(40) == 1
        (line,) = output_of(process)
    else:
        assert main(list(argv)) == 1
        (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvtier index: ")
    assert named in line


@pytest.mark.parametrize(
    ("flags", "variables", "named"),
    [
        (["--config", "/nowhere/index.toml"], {}, "/nowhere/index.toml"),
        (["--lease-ms", "soon"], {}, "lease"),
        (["--no-such-flag"], {}, "no-such-flag"),
        ([], {"KVTIER_INDEX_LEASE_MS": "soon"}, "KVTIER_INDEX_LEASE_MS"),
        ([], {"KVTIER_INDEX_LEASE": "5"}, "KVTIER_INDEX_LEASE"),
    ],
    ids=["no file", "bad flag", "unknown flag", "bad variable", "unknown variable"],
)
def test_wrong_flags_and_variables_are_refused_in_one_line(
    processes: ProcessRunner, flags: list[str], variables: dict[str, str], named: str
) -> None:
    launch = Launch("index", kvtier_command("index", *flags), environment=variables)
    process = processes.spawn(launch)
    assert process.wait(40) in {1, 2}
    (line,) = output_of(process)
    assert named in line


def test_by_default_nothing_listens_beyond_this_machine(processes: ProcessRunner) -> None:
    port, page = free_port(), free_port()
    arguments = ("index", "--bind", f"127.0.0.1:{port}", "--metrics-bind", f"127.0.0.1:{page}")
    launch, _ = index_launch(processes)
    process = processes.start(launch)
    other = processes.spawn(Launch("flags", kvtier_command(*arguments)))
    eventually(lambda: _accepts(port) and _accepts(page), 30, "it listens")
    for running in (process, other):
        assert _listens_on(running.pid) <= {"127.0.0.1"}
    assert _listens_on(other.pid) == {"127.0.0.1"}


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _listens_on(pid: int) -> set[str]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    listening = [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]
    return {address.removeprefix("::ffff:") for address in listening}


async def test_an_index_that_starts_late_is_found_by_publishers_that_wait(
    processes: ProcessRunner,
) -> None:
    launch, port = index_launch(processes)
    address = f"127.0.0.1:{port}"
    (publisher,) = await start_publishers(processes, PublisherSpec("w", [address]))
    await publisher.ask("fill", chains=5, blocks=64)

    async def has_tried() -> bool:
        return int((await publisher.ask("stats"))["streams"][0]["failures"]) >= 3

    await eventually_async(has_tried, 30, "it tries")
    index = IndexProcess(await asyncio.to_thread(processes.start, launch), port)
    await converged(index, [publisher])
    index.clean_log()

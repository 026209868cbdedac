"""What a restart of the index, a killed publisher and a stalled one cost everybody.

Publishers are processes that embed `kvtier.publisher`; the index is asked and watched over its own
RPCs. What must not live here: faults of the network (tests/faults).
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.bench.index_service_processes import (
    BenchError,
    Program,
    index_arguments,
    module_arguments,
    running,
)
from kvtier.bench.index_service_publisher import chains
from kvtier.bench.index_service_streams import CHAIN, Blocks
from kvtier.bench.report import Bar, Result
from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport

MEGA = 1_000_000
BAR_RESYNC_S = 2.0
LEASE_S = 3.0
WAIT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class RecoverySizes:
    large_blocks: int = MEGA
    others: int = 3
    other_blocks: int = 20_000
    stall_leases: float = 2.0
    lease_s: float = LEASE_S


QUICK = RecoverySizes(large_blocks=20_032, others=2, other_blocks=640, lease_s=0.6)


class Asked:
    """What an operator can ask of one index, over a channel that outlives its restarts."""

    def __init__(self, port: int) -> None:
        self._channel = transport.new_channel(f"127.0.0.1:{port}")
        self._match = rpc.call(self._channel, rpc.INDEX, "Match")
        self._stats = rpc.call(self._channel, rpc.INDEX, "Stats")

    async def match(self, chain: Blocks) -> set[str]:
        """Workers that hold all of the chain."""
        request = pb.MatchRequest(queries=[pb.MatchQuery(hashes=chain.tobytes())])
        response = await self._match(request, timeout=WAIT_S_MAX, wait_for_ready=True)
        found = response.results[0]
        wanted = len(chain) * response.workers[0].block_tokens if response.workers else 0
        tokens = np.frombuffer(found.tokens, "<u8")
        named = np.frombuffer(found.workers, "<u4")
        return {response.workers[at].instance for at in named[tokens == wanted].tolist()}

    async def stats(self) -> dict[str, pb.HolderStats]:
        """Every holder by its instance."""
        response = await self._stats(pb.StatsRequest(), timeout=WAIT_S_MAX, wait_for_ready=True)
        return {holder.holder.hello.instance: holder for holder in response.holders}

    async def close(self) -> None:
        await self._channel.close()


async def until(condition: Callable[[], Awaitable[bool]], what: str, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not await condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {WAIT_S_MAX:g} s")
        await asyncio.sleep(every_s)


def publisher_arguments(port: int, name: str, blocks: int, seed: int) -> list[str]:
    target = f"127.0.0.1:{port}"
    return module_arguments("index_service_publisher", target, name, str(blocks), str(seed))


def snapshots(holder: pb.HolderStats) -> int:
    """Snapshots that the index asked this holder for or took from it."""
    counted = {"need_snapshot", "replaced", "staged"}
    return sum(event.count for event in holder.events if event.name in counted)


# ---- a restarted index


class Watch:
    """Matches for the small holders, one after the other, while the large one comes back."""

    def __init__(self, asked: Asked, chain_of: dict[str, Blocks]) -> None:
        self._asked = asked
        self._chain_of = chain_of
        self._began = time.monotonic()
        self.latencies_s: list[float] = []
        self.back_s: dict[str, float] = {}
        self.wrong = 0
        """Answers without a holder that was back already, or with another one."""

    async def go_on(self) -> None:
        """Ask until cancelled."""
        while True:
            for name, chain in self._chain_of.items():
                start = time.monotonic()
                found = await self._asked.match(chain)
                self.latencies_s.append(time.monotonic() - start)
                if found == {name}:
                    self.back_s.setdefault(name, start - self._began)
                else:
                    self.wrong += bool(found) or name in self.back_s
            await asyncio.sleep(0.002)


async def resync(sizes: RecoverySizes) -> list[Result]:
    """The index is killed and started again; the large holder must be whole again in time."""
    async with contextlib.AsyncExitStack() as stack:
        index = await Program.start(index_arguments())
        stack.push_async_callback(lambda: index.stop())
        port = await index.port()
        names = [f"other-{number}" for number in range(sizes.others)]
        publishers = [
            await stack.enter_async_context(
                running(publisher_arguments(port, name, sizes.other_blocks, seed))
            )
            for seed, name in enumerate(names, 1)
        ]
        arguments = publisher_arguments(port, "large", sizes.large_blocks, 99)
        publishers.append(await stack.enter_async_context(running(arguments)))
        for publisher in publishers:
            await publisher.port()
        await index.kill()
        index = await Program.start(index_arguments(port))
        await index.port()
        return await _come_back(port, names, sizes)


async def _come_back(port: int, names: Sequence[str], sizes: RecoverySizes) -> list[Result]:
    ready_at = time.monotonic()
    asked = Asked(port)
    others = {name: chains(seed, sizes.other_blocks)[-1] for seed, name in enumerate(names, 1)}
    large = chains(99, sizes.large_blocks)
    held = len(large) * CHAIN

    async def all_back() -> bool:
        return len(watch.back_s) == len(others)

    async def large_is_exact() -> bool:
        stats = (await asked.stats()).get("large")
        return (
            stats is not None
            and stats.holder.trust == pb.TRUST_EXACT
            and sum(tier.blocks for tier in stats.tiers) == held
        )

    watch = Watch(asked, others)
    watching = asyncio.create_task(watch.go_on())
    try:
        await until(large_is_exact, "the large holder is back", every_s=0.02)
        resync_s = time.monotonic() - ready_at
        await until(all_back, "small holders are back")
        if await asked.match(large[-1]) != {"large"}:
            raise BenchError("the large holder is EXACT but not matched")
        hidden = sum(holder.holder.hidden for holder in (await asked.stats()).values())
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await asked.close()
    ordered_ms = sorted(latency * 1e3 for latency in watch.latencies_s)
    p99_ms = ordered_ms[len(ordered_ms) * 99 // 100]
    meanwhile = "... other holders meanwhile"
    return [
        Result("resync of 1 M blocks after a restart", resync_s, "s", BAR_RESYNC_S, Bar.AT_MOST),
        Result("... other holders back after", max(watch.back_s.values()), "s"),
        Result(f"{meanwhile}: wrong answers", watch.wrong, "", 0, Bar.AT_MOST),
        Result(f"{meanwhile}: hidden", hidden, "", 0, Bar.AT_MOST),
        Result(f"{meanwhile}: Match p99", p99_ms, "ms"),
        Result(f"{meanwhile}: Match longest", ordered_ms[-1], "ms"),
    ]


# ---- a killed and a stalled publisher


async def lost_publishers(sizes: RecoverySizes) -> list[Result]:
    """One worker is killed, another stands still for some leases, a third goes on."""
    lease_ms = round(sizes.lease_s * 1000)
    names = ("killed", "stalled", "steady")
    shown = {name: chains(seed, sizes.other_blocks)[-1] for seed, name in enumerate(names, 1)}
    async with contextlib.AsyncExitStack() as stack:
        index = await stack.enter_async_context(
            running(index_arguments(0, "--lease-ms", str(lease_ms)))
        )
        port = await index.port()
        programs: dict[str, Program] = {}
        for seed, name in enumerate(names, 1):
            arguments = publisher_arguments(port, name, sizes.other_blocks, seed)
            programs[name] = await stack.enter_async_context(running(arguments))
        for program in programs.values():
            await program.port()
        asked = Asked(port)
        stack.push_async_callback(asked.close)
        for name, chain in shown.items():
            if await asked.match(chain) != {name}:
                raise BenchError(f"{name} is not matched")
        before = await asked.stats()
        programs["stalled"].send(signal.SIGSTOP)
        stalled_at = time.monotonic()
        hidden_s, stale, wrong = await _killed(asked, programs["killed"], shown, sizes)
        await asyncio.sleep(
            max(0.0, stalled_at + sizes.stall_leases * sizes.lease_s - time.monotonic())
        )
        was_hidden = await asked.match(shown["stalled"]) == set()
        programs["stalled"].send(signal.SIGCONT)
        back_at = time.monotonic()

        async def is_back() -> bool:
            return await asked.match(shown["stalled"]) == {"stalled"}

        await until(is_back, "the stalled publisher is back")
        back_s = time.monotonic() - back_at
        after = await asked.stats()
    taken = snapshots(after["stalled"]) - snapshots(before["stalled"])
    if not was_hidden:
        raise BenchError("the stalled publisher was never hidden: it proves nothing")
    return [
        Result("hidden after kill -9", hidden_s, "s", sizes.lease_s, Bar.AT_MOST),
        Result("... stale answers after that", stale, "", 0, Bar.AT_MOST),
        Result("... wrong answers about a steady worker", wrong, "", 0, Bar.AT_MOST),
        Result("snapshots after a stall of 2 leases", taken, "", 0, Bar.AT_MOST),
        Result("... matched again", back_s, "s"),
    ]


async def _killed(
    asked: Asked, program: Program, shown: dict[str, Blocks], sizes: RecoverySizes
) -> tuple[float, int, int]:
    """Seconds until no answer names the killed worker; answers that name it later; wrong others."""

    async def is_between_heartbeats() -> bool:
        """So that none is on its way when it dies: it would be a sign of life after death."""
        age_s = (await asked.stats())["killed"].holder.age_ms / 1000
        return 0.03 < age_s / sizes.lease_s < 0.15

    await until(is_between_heartbeats, "the worker is between two heartbeats")
    killed_at = time.monotonic()
    await program.kill()
    named_at, stale, wrong, asked_after = killed_at, 0, 0, 0
    while asked_after < 100:
        asked_at = time.monotonic()
        names_it = await asked.match(shown["killed"]) != set()
        wrong += await asked.match(shown["steady"]) != {"steady"}
        is_late = asked_at - killed_at > sizes.lease_s
        if names_it:
            named_at = asked_at
            stale += is_late
        asked_after += is_late
        if asked_at - killed_at > WAIT_S_MAX:
            raise BenchError("a killed publisher is matched for ever")
        await asyncio.sleep(0.005)
    return named_at - killed_at, stale, wrong


async def run(sizes: RecoverySizes) -> list[Result]:
    return [*await resync(sizes), *await lost_publishers(sizes)]

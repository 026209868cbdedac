"""The co-located arena against memcpy, and what it wastes: rows of `kvtier bench store`.

A store process serves an arena; this process is its client; each has a CPU of its own. Every byte
that is got is verified, every byte that is put is verified by the store before it is published.
Batches of 32 blocks of plain memcpy (the C library's, same thread, same block size) and of the
arena alternate; sources are 512 MiB each, walked from end to end, destinations are touched before.
Figures are medians, a ratio is formed within a pair of neighbouring batches.
"""

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.bench.cpus import apart
from kvtier.bench.report import Bar, Result
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import UnavailableError
from kvtier.ports import BlockOwner, ByNames, GetRequest, PutRequest, PutStatus
from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig, connect_arena
from kvtier.tiers.arena.server import ArenaListener, ArenaServer, ArenaServerConfig
from kvtier.tiers.arena.tier import ArenaConfig, ArenaTier
from kvtier.types import Fingerprint

MIB = 1 << 20
BATCH_BLOCKS = 32
NAMESPACE = Fingerprint(b"bench namespace".ljust(32))
BARS = {
    "get": {2 * MIB: 0.85, 256 << 10: 0.70},
    "put": {2 * MIB: 0.70, 256 << 10: 0.45},
}
START_S = 60.0
WASTE_BYTES = 256 * MIB
WASTE_PUTS = 12_000
DROP_SHARE = 0.02
PATTERN = bytes(range(256)) * 512

Area = npt.NDArray[np.uint8]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arena-mib", type=int, default=512, help="size of each source")
    parser.add_argument("--arena-passes", type=int, default=3, help="walks over a whole source")


def rows(arguments: argparse.Namespace) -> list[Result]:
    size = arguments.arena_mib * MIB
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        path = Path(directory) / "arena.sock"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        store = context.Process(target=serve, args=(path, 2 * size, theirs), daemon=True)
        cpus = os.sched_getaffinity(0)
        store.start()
        try:
            apart(store.pid or 0)
            if not ours.poll(START_S):
                raise UnavailableError("the bench's store has not started")
            ours.recv_bytes()
            config = ArenaClientConfig(size + 64 * MIB)
            client = connect_arena(path, config)
            results = measure(client, size, arguments.arena_passes)
            client.close()
            ours.send_bytes(b"stop")
            store.join(START_S)
        finally:
            os.sched_setaffinity(0, cpus)
            store.kill()
            store.join()
    used = "arena bytes used / live"
    return [
        *results,
        Result(used, asyncio.run(waste(0.0)), "x", 1.05, Bar.AT_MOST),
        Result(f"{used}, half of varying length", asyncio.run(waste(0.5)), "x"),
    ]


def serve(path: Path, arena_bytes: int, control: Connection) -> None:
    """The store process: an arena behind its socket until the bench says stop."""

    async def until_stopped() -> None:
        tier = ArenaTier(ArenaConfig(arena_bytes, 64 * MIB))
        server = ArenaServer(tier, ArenaServerConfig(), time.monotonic)
        listener = ArenaListener(server, path)
        listener.start()
        control.send_bytes(b"ready")
        await asyncio.get_running_loop().run_in_executor(None, control.recv_bytes)
        await listener.close()
        await tier.close()

    asyncio.run(until_stopped())


@dataclass(frozen=True, slots=True)
class Areas:
    """Memory of one run: all of it touched."""

    source: Area
    destination: Area
    in_segment: Area


def measure(client: ArenaClient, size: int, passes: int) -> list[Result]:
    source = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
    in_segment = np.frombuffer(client.allocate(size), np.uint8)
    in_segment[:] = source
    areas = Areas(source, np.ones(size, np.uint8), in_segment)
    results = []
    for block_bytes in (2 * MIB, 256 << 10):
        bench = Bench(client, areas, block_bytes, passes)
        kind = f"32 x {block_bytes >> 10} KiB"
        put, placed, got = bench.put(areas.source), bench.put(areas.in_segment), bench.get()
        results += [
            Result(f"arena get {kind} / memcpy", got.ratio, "x", BARS["get"][block_bytes]),
            Result(f"arena get {kind}", got.arena, "GB/s"),
            Result(f"arena put {kind} / memcpy", put.ratio, "x", BARS["put"][block_bytes]),
            Result(f"arena put {kind}", put.arena, "GB/s"),
            Result(f"arena put {kind} in place / memcpy", placed.ratio, "x"),
            Result(f"memcpy {kind}", got.plain, "GB/s"),
        ]
    return results


class Comparison:
    """Medians over pairs of batches (seconds of memcpy, seconds of the arena)."""

    def __init__(self, pairs: list[tuple[float, float]], batch_bytes: int) -> None:
        self.ratio = statistics.median(plain / arena for plain, arena in pairs)
        self.plain = batch_bytes / statistics.median(plain for plain, _ in pairs) / 1e9
        self.arena = batch_bytes / statistics.median(arena for _, arena in pairs) / 1e9


class Bench:
    """Gets and puts of one block size."""

    def __init__(self, client: ArenaClient, areas: Areas, block_bytes: int, passes: int) -> None:
        self._client = client
        self._areas = areas
        self._block_bytes = block_bytes
        self._batch_bytes = BATCH_BLOCKS * block_bytes
        self._passes = passes
        self._names: list[FrameName] = []

    def put(self, source: Area) -> Comparison:
        """Puts of blocks that the store has never seen; it evicts older ones to take them."""

        def batch(begin: int) -> Callable[[], None]:
            requests = [
                PutRequest(self._new_name(), block, BlockOwner(1))
                for block in self._blocks(source, begin)
            ]

            def put_batch() -> None:
                results = self._client.put_many(requests, time.monotonic() + START_S)
                assert all(result.status is PutStatus.STORED for result in results)

            return put_batch

        return self._compare(batch)

    def get(self) -> Comparison:
        """Gets of the blocks that were put last, a whole source of them."""
        count = len(self._areas.source) // self._block_bytes
        names = self._names[-count:]

        def batch(begin: int) -> Callable[[], None]:
            first = begin // self._block_bytes
            wanted = names[first : first + BATCH_BLOCKS]
            targets = self._blocks(self._areas.destination, begin)
            requests = [
                GetRequest(name, target, self._block_bytes)
                for name, target in zip(wanted, targets, strict=True)
            ]

            def get_batch() -> None:
                assert all(result.is_hit for result in self._client.get_many(requests))

            return get_batch

        comparison = self._compare(batch)
        assert np.array_equal(self._areas.destination, self._areas.source)
        return comparison

    def _compare(self, batch: Callable[[int], Callable[[], None]]) -> Comparison:
        pairs = []
        for walk in range(self._passes + 1):
            for begin in range(0, len(self._areas.source), self._batch_bytes):
                work = batch(begin)  # names and requests are the caller's, and made before
                plain = timed(partial(self._memcpy, begin))
                arena = timed(work)
                if walk:  # the first walk fills page tables and caches
                    pairs.append((plain, arena))
        return Comparison(pairs, self._batch_bytes)

    def _memcpy(self, begin: int) -> None:
        source = self._areas.source.ctypes.data
        # The other half, so that neither finds the other's bytes in a cache.
        other = (begin + len(self._areas.source) // 2) % len(self._areas.source)
        destination = self._areas.destination.ctypes.data
        for offset in range(other, other + self._batch_bytes, self._block_bytes):
            ctypes.memmove(destination + offset, source + offset, self._block_bytes)

    def _blocks(self, area: Area, begin: int) -> list[memoryview]:
        view = memoryview(area.data)
        return [
            view[offset : offset + self._block_bytes]
            for offset in range(begin, begin + self._batch_bytes, self._block_bytes)
        ]

    def _new_name(self) -> FrameName:
        key = (self._block_bytes + len(self._names)).to_bytes(32, "little")
        name = FrameName(KeyKind.PREFIX_KEY, key, NAMESPACE)
        self._names.append(name)
        return name


async def waste(varying_share: float) -> float:
    """Memory given to slabs per byte of live blocks, after a soak of several block sizes.

    Blocks of three namespaces, each of one length, and a share of one whose lengths vary, put and
    dropped at random in an arena that is full all the time.
    """
    tier = ArenaTier(ArenaConfig(WASTE_BYTES, WASTE_BYTES // 64))
    rng = random.Random(3)
    for number in range(WASTE_PUTS):
        varies = rng.random() < varying_share
        size = rng.randint(20_000, 120_000) if varies else rng.choice((131_072, 65_536, 40_960))
        key = number.to_bytes(32, "little")
        name = FrameName(KeyKind.PREFIX_KEY, key, NAMESPACE, int(varies))
        request = PutRequest(name, memoryview(PATTERN)[:size], BlockOwner(1))
        await tier.put_many([request], time.monotonic() + START_S)
        if rng.random() < DROP_SHARE:
            names = tier.names()
            await tier.drop(ByNames((rng.choice(names),)), time.monotonic() + START_S)
    held = [tier.held(name) for name in tier.names()]
    live = sum(one.payload_bytes for one in held if one is not None)
    used = tier.stats().bytes
    await tier.close()
    return used / live


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

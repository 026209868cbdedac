"""A node's whole store, as its clients meet it: `kvtier store` as a process, the SDK here.

Batches of 32 blocks through `BlockStoreClient` and plain memcpy (same thread, same block size)
alternate; a ratio is formed within a pair of neighbouring batches. Both read a source of 512 MiB,
both write a destination as large and touched before (memcpy and gets the same one, puts the arena),
and walk them from end to end, half of them apart. Store and client have CPUs of their own. An
acquire of 32 resident blocks is paired with an empty call on the same Unix socket; the figure is
the median of the differences.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.bench.cpus import apart
from kvtier.bench.report import Bar, Result
from kvtier.client.store import ReadTerms, StoreClientConfig
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import UnavailableError
from kvtier.sections import DialConfig
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier.types import Fingerprint
from kvtier.wire import blocks, rpc, transport
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import LoopThread

MIB = 1 << 20
BATCH_BLOCKS = 32
SIZES = (2 * MIB, 256 << 10)
BARS = {"get": (0.85, 0.70), "put": (0.70, 0.45)}
ACQUIRE_US_MAX = 300.0
START_S = 60.0
ACQUIRES_S_MAX = 300.0
NAMESPACE = Fingerprint(b"bench namespace".ljust(32))
CLIENT = StoreClientConfig(
    deadline_s=30.0, arena=ArenaClientConfig(segment_bytes=128 * MIB, staging_bytes=64 * MIB)
)

Area = npt.NDArray[np.uint8]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service-mib", type=int, default=512, help="size of each source")
    parser.add_argument("--acquires", type=int, default=500, help="pairs of calls")


def rows(arguments: argparse.Namespace) -> list[Result]:
    """Start a store, measure, end it."""
    size: int = arguments.service_mib * MIB
    results: list[Result] = []
    loop = LoopThread("bench")
    cpus = os.sched_getaffinity(0)
    with (
        a_store(2 * size) as target,
        BlockStoreClient(DialConfig(targets=(target,)), CLIENT) as client,
    ):
        wait_for(client)
        source = np.random.default_rng(1).integers(0, 255, size, np.uint8)
        for position, block in enumerate(SIZES):
            put, get = batches(client, source, block)
            for what, ratio in (("put", put), ("get", get)):
                name = f"service {what} {BATCH_BLOCKS} x {block >> 10} KiB / memcpy"
                results.append(Result(name, ratio, "x", BARS[what][position]))
        loop.start()
        work = acquires(target, arguments.acquires)
        empty_us, above_us = loop.submit(work).result(ACQUIRES_S_MAX)
        results.append(Result("empty call over the Unix socket", empty_us, "us"))
        name = f"acquire {BATCH_BLOCKS}, above an empty call"
        results.append(Result(name, above_us, "us", ACQUIRE_US_MAX, Bar.AT_MOST))
    loop.stop()
    os.sched_setaffinity(0, cpus)
    return results


@contextmanager
def a_store(dram_bytes: int) -> Iterator[str]:
    """A store without lower tiers, as a process; the target of its Unix socket."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        config = Path(directory) / "store.toml"
        config.write_text(
            f'data_dir = "{directory}/data"\n[listen]\nbind = "127.0.0.1:0"\n'
            f"[dram]\nbytes_max = {dram_bytes}\n[nvme]\nenabled = false\n",
            encoding="utf-8",
        )
        script = Path(sys.executable).parent / "kvtier"
        process = subprocess.Popen(  # noqa: S603 (our own entry point)
            [str(script), "store", "--config", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            apart(process.pid)
            yield f"unix:{directory}/data/run/store.sock"
        finally:
            process.terminate()
            process.wait(START_S)


def wait_for(client: BlockStoreClient) -> None:
    """Until the store takes a block through shared memory."""
    end = time.monotonic() + START_S
    while not (client.put_many([name_of(0)], [b"first"])[0].is_held and client.is_attached):
        if time.monotonic() > end:
            raise UnavailableError("the store does not start")
        time.sleep(0.05)


def name_of(number: int) -> FrameName:
    return FrameName(KeyKind.PREFIX_KEY, number.to_bytes(32, "little"), NAMESPACE)


def names_at(block: int, first: int) -> list[FrameName]:
    return [name_of(block << 32 | first + i) for i in range(BATCH_BLOCKS)]


def batches(client: BlockStoreClient, source: Area, block: int) -> tuple[float, float]:
    """Median ratios of put and of get to memcpy; every block is put once and got once."""
    count = len(source) // block // BATCH_BLOCKS * BATCH_BLOCKS
    target = np.ones(len(source), np.uint8)
    terms = ReadTerms(payload_bytes=block)
    puts, gets = [], []
    for first in range(0, count, BATCH_BLOCKS):
        copied = copying(target, source, block, first)
        names, parts = names_at(block, first), parts_of(source, block, first)
        began = time.perf_counter()
        stored = client.put_many(names, parts)
        took = time.perf_counter() - began
        if not all(result.is_held for result in stored):
            raise UnavailableError("a put was refused")
        puts.append(copied / took)
    for first in range(0, count, BATCH_BLOCKS):
        copied = copying(target, source, block, first)
        names, into = names_at(block, first), parts_of(target, block, first)
        began = time.perf_counter()
        found = client.get_many(names, into, terms)
        took = time.perf_counter() - began
        if all(result.is_hit for result in found):
            gets.append(copied / took)
            parts = parts_of(source, block, first)
            if not all(np.array_equal(a, b) for a, b in zip(into, parts, strict=True)):
                raise AssertionError("wrong bytes")
    return statistics.median(puts), statistics.median(gets)


def parts_of(area: Area, block: int, first: int) -> list[Area]:
    """The blocks of one batch."""
    return [area[(first + i) * block :][:block] for i in range(BATCH_BLOCKS)]


def copying(target: Area, source: Area, block: int, first: int) -> float:
    """Seconds of one batch of memcpy: of the half that the store's batch is not of, so that neither
    finds the other's bytes in a cache."""
    memcpy: Callable[..., object] = _MEMCPY
    size = BATCH_BLOCKS * block
    begin = (first * block + len(source) // 2) % len(source) // size * size
    to, at = target.ctypes.data, source.ctypes.data
    began = time.perf_counter()
    for offset in range(begin, begin + size, block):
        memcpy(to + offset, at + offset, block)
    return time.perf_counter() - began


async def acquires(target: str, count: int) -> tuple[float, float]:
    """Microseconds of an empty call, and by how much an acquire of 32 resident blocks is longer."""
    channel = transport.new_channel(target)
    empty = rpc.call(channel, rpc.STORE, "Attach")
    acquire = rpc.call(channel, rpc.STORE, "Acquire")
    block = SIZES[-1]
    request = pb.AcquireRequest(
        names=blocks.names_to(names_at(block, 0)), payload_bytes=block, ttl_ms=10_000
    )
    empties, differences = [], []
    try:
        for _ in range(count):
            began = time.perf_counter()
            await empty(pb.AttachRequest())
            between = time.perf_counter()
            call = acquire(request)
            answer = await call.read()
            ended = time.perf_counter()
            call.cancel()
            if answer.statuses != bytes(BATCH_BLOCKS):
                raise UnavailableError("a block is not resident")
            empties.append(between - began)
            differences.append(ended - between - (between - began))
    finally:
        await channel.close()
    return 1e6 * statistics.median(empties), 1e6 * statistics.median(differences)


def _memcpy() -> Callable[..., object]:
    found = ctypes.CDLL(None).memcpy
    found.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    found.restype = ctypes.c_void_p
    return found


_MEMCPY = _memcpy()

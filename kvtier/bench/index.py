"""`kvtier bench index`: what the prefix index takes in, answers and weighs.

Chains are random hashes, made before the clock runs. Bulk work is measured in CPU time of this one
thread, so that a busy machine does not count; matches in wall time. Both are medians. Memory is
measured in fresh processes, as bytes that the index counts and as growth of the resident set; the
larger of the two is reported.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.bench.report import Bar, Result
from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.prefix_index import HolderSpec, NativePrefixIndex
from kvtier.types import HolderId, HolderKind, Tier

Blocks = npt.NDArray[np.uint64]

HOLDERS = 32
CHAIN = 64
BATCH_CHAINS = 16
BATCH_EVENTS = 64
DOCUMENT = 8192
DOCUMENTS = 4
"""Rotated through, so that a match does not find its chain in the nearest cache each time."""
MEGA = 1_000_000
STORE_NODE = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=MEGA, help="blocks of the large index")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the median counts")


def run(arguments: argparse.Namespace) -> list[Result]:
    blocks, repeats = arguments.blocks, arguments.repeats
    results = [*_memory(blocks)]
    results += [*_apply(blocks, repeats)]
    results += [*_match(blocks, repeats)]
    results += [*_snapshot(blocks, repeats)]
    return results


def _random_blocks(seed: int, *shape: int) -> Blocks:
    return np.random.default_rng(seed).integers(0, 2**64, size=shape, dtype=np.uint64)


def _index() -> NativePrefixIndex:
    index = NativePrefixIndex()
    for holder in range(HOLDERS):
        spec = HolderSpec(HolderKind.WORKER, STORE_NODE, (0,), 0, 16)
        index.add_holder(HolderId(holder), spec)
    return index


def _batch(kind: EventKind, chains: Blocks, parents: Blocks) -> EventBatch:
    """One event a row of `chains`."""
    count = len(chains)
    return EventBatch(
        kinds=np.full(count, kind, np.uint8),
        tiers=np.full(count, Tier.GPU, np.uint8),
        lengths=np.full(count, chains.shape[1], np.uint32),
        parents=parents,
        hashes=chains.reshape(-1),
    )


def _batches(kind: EventKind, chains: Blocks) -> list[EventBatch]:
    starts = range(0, len(chains), BATCH_CHAINS)
    pieces = [np.ascontiguousarray(chains[start : start + BATCH_CHAINS]) for start in starts]
    return [_batch(kind, piece, np.zeros(len(piece), np.uint64)) for piece in pieces]


def _fill(index: NativePrefixIndex, batches: Sequence[EventBatch], shift: int = 0) -> None:
    for number, batch in enumerate(batches):
        index.apply(HolderId((number + shift) % HOLDERS), 0, batch)


def _seconds(call: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def _apply(blocks: int, repeats: int) -> Iterator[Result]:
    chains = _random_blocks(1, blocks // CHAIN, CHAIN)
    stores, removes = _batches(EventKind.STORE, chains), _batches(EventKind.REMOVE, chains)
    growth = _growth(chains[: HOLDERS * BATCH_EVENTS], blocks // 10)
    grown = sum(BATCH_EVENTS for _ in growth)
    speeds: dict[str, list[float]] = {}
    for _ in range(repeats):
        index = _index()
        for name, batches, shift, size in (
            ("apply 64-block chains", stores, 0, chains.size),
            ("apply 1-block events, batch of 64", growth, 0, grown),
            ("apply chains that another holds", stores, 1, chains.size),
            ("remove chains that another holds", removes, 1, chains.size),
            ("remove 64-block chains", removes, 0, chains.size),
        ):
            seconds = _seconds(partial(_fill, index, batches, shift))
            speeds.setdefault(name, []).append(size / seconds / 1e6)
    bars = iter((4.0, 2.0))
    for name, measured in speeds.items():
        yield Result(name, statistics.median(measured), "M blocks/s", next(bars, None))


def _growth(chains: Blocks, blocks: int) -> list[EventBatch]:
    """Decoding: each holder appends a block to each of its chains, again and again."""
    by_holder = chains.reshape(-1, HOLDERS, BATCH_CHAINS, CHAIN)
    tails = by_holder[:, :, :, -1].transpose(1, 0, 2).reshape(HOLDERS, -1)
    steps = max(1, blocks // tails.size)
    grown = _random_blocks(2, steps, HOLDERS, tails.shape[1], 1)
    batches = []
    for step in grown:
        for holder in range(HOLDERS):
            parents = np.ascontiguousarray(tails[holder])
            batches.append(_batch(EventKind.STORE, step[holder], parents))
        tails = step[:, :, 0]
    return batches


def _match(blocks: int, repeats: int) -> Iterator[Result]:
    index = _index()
    _fill(index, _batches(EventKind.STORE, _random_blocks(3, blocks // CHAIN, CHAIN)))
    held_by_one, held_by_all = (_random_blocks(seed, DOCUMENTS, DOCUMENT) for seed in (4, 5))
    for holder in range(HOLDERS):
        for document in held_by_all:
            index.store(HolderId(holder), Tier.GPU, 0, document)
    for document in held_by_one:
        index.store(HolderId(0), Tier.GPU, 0, document)
    for length, bar in ((32, 3), (512, 12), (DOCUMENT, 150)):
        for who, documents in (("1", held_by_one), (str(HOLDERS), held_by_all)):
            name = f"match {length} blocks held by {who}"
            yield Result(name, _match_us(index, documents, length, repeats), "us", bar, Bar.AT_MOST)
    yield Result("match 128 blocks held by 32", _match_us(index, held_by_all, 128, repeats), "us")
    missing = _random_blocks(6, DOCUMENTS, DOCUMENT)
    yield Result("match miss at block 0", _match_us(index, missing, 512, repeats), "us")
    index.add_holder(HolderId(HOLDERS), HolderSpec(HolderKind.STORE, STORE_NODE, (0,), 0, 16))
    for document in held_by_all:
        index.store(HolderId(HOLDERS), Tier.DRAM, 0, document[::2].copy())
        index.remove(HolderId(1), Tier.GPU, 0, document[::2].copy())
    name = "match 512 blocks, 32 workers and a store"
    yield Result(name, _match_us(index, held_by_all, 512, repeats), "us")


def _match_us(index: NativePrefixIndex, documents: Blocks, length: int, repeats: int) -> float:
    """Median time of a match whose tokens are read, over calls in turn on all documents."""
    queries = [document[:length].copy() for document in documents]
    times = []
    for _ in range(repeats * 50):
        for query in queries:
            start = time.perf_counter_ns()
            _ = index.match(query).tokens
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def _snapshot(blocks: int, repeats: int) -> Iterator[Result]:
    index = _index()
    _fill(index, _batches(EventKind.STORE, _random_blocks(7, blocks // CHAIN, CHAIN)))
    holder = HolderId(HOLDERS)
    index.add_holder(holder, HolderSpec(HolderKind.WORKER, STORE_NODE, (0,), 0, 16))
    for batch in _batches(EventKind.STORE, _random_blocks(8, blocks // CHAIN, CHAIN)):
        index.apply(holder, 0, batch)
    out = [_seconds(lambda: index.snapshot(holder, Tier.GPU, 0)) for _ in range(repeats)]
    snapshot = index.snapshot(holder, Tier.GPU, 0)
    load = []
    for _ in range(repeats):
        index.clear(holder)
        load.append(_seconds(lambda: index.load(holder, Tier.GPU, 0, snapshot)))
    size = f"{blocks / MEGA:g} M blocks"
    yield Result(f"snapshot out, {size}", statistics.median(out), "s", 0.5, Bar.AT_MOST)
    yield Result(f"snapshot in, {size}", statistics.median(load), "s", 0.5, Bar.AT_MOST)


def _memory(blocks: int) -> Iterator[Result]:
    for size in (blocks, blocks + blocks // 10):
        held, churned = _in_fresh_process(size, churn=size == blocks)
        name = f"memory, {size / MEGA:g} M blocks held once"
        yield Result(name, held / size, "B/block", 24, Bar.AT_MOST)
        if size == blocks:
            name = f"memory after a churn of {10 * size / MEGA:g} M blocks, of before"
            yield Result(name, churned / held, "x", 1.1, Bar.AT_MOST)


def _in_fresh_process(blocks: int, churn: bool) -> tuple[float, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_weigh, blocks, churn).result()


def _weigh(blocks: int, churn: bool) -> tuple[float, float]:
    """Bytes of an index of `blocks`, and after 10 times as many came and went."""
    warm = _index()
    _store_chains(warm, 0, CHAIN * 100)
    _churn(warm, CHAIN * 100)
    del warm
    gc.collect()
    resident = _resident_bytes()
    index = _index()
    _store_chains(index, 0, blocks)
    held = max(index.stats().bytes, _resident_bytes() - resident)
    if not churn:
        return held, held
    _churn(index, blocks)
    return held, max(index.stats().bytes, _resident_bytes() - resident)


def _chains(seed: int, blocks: int) -> Iterator[tuple[int, Blocks]]:
    """Chains with their holders; the same for the same seed, and never all in memory."""
    random = np.random.default_rng(seed)
    for number in range(blocks // CHAIN):
        yield number % HOLDERS, random.integers(0, 2**64, size=CHAIN, dtype=np.uint64)


def _store_chains(index: NativePrefixIndex, seed: int, blocks: int) -> None:
    for holder, chain in _chains(seed, blocks):
        index.store(HolderId(holder), Tier.GPU, 0, chain)


def _churn(index: NativePrefixIndex, blocks: int) -> None:
    """Ten times, as many blocks come as the index holds and the older ones go: in turn by whole
    chains, last block first, and in an order in which every page is left half empty for long."""
    for turn in range(10):
        _store_chains(index, turn + 1, blocks)
        if turn % 2 == 0:
            for holder, chain in _chains(turn, blocks):
                index.remove(HolderId(holder), Tier.GPU, 0, chain[::-1].copy())
            continue
        for part in range(4):
            for holder, chain in _chains(turn, blocks):
                index.remove(HolderId(holder), Tier.GPU, 0, chain[part::4].copy())


def _resident_bytes() -> int:
    """Resident set of this process; 0 where the system does not tell, then only counts count."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text(encoding="ascii").split()[1]) * 4096

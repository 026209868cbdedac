"""Verified copy against the C library's memcpy, on data that is in no cache.

Source and destination are areas of 512 MiB each, walked from end to end. Groups of plain and
verified copies alternate on neighbouring blocks, so both meet the same machine; figures are medians
over the groups, ratios are formed within a pair of groups. What must not live
here: whether the copies are right (the native tests).
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.bench.report import Result
from kvtier.core.block_copy import copy_checksum, copy_checksum_many
from kvtier.core.checksum import checksum

MIB = 1 << 20
GROUP_BYTES = 16 * MIB
BAR_RATIO = 0.9

Area: TypeAlias = npt.NDArray[np.uint8]
Copier: TypeAlias = Callable[[int], object]
"""Copies the block at an offset."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=512, help="size of source and destination each")
    parser.add_argument("--passes", type=int, default=4, help="walks over the whole area")


def run(arguments: argparse.Namespace) -> list[Result]:
    size = arguments.mib * MIB
    source = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
    destination = np.ones(size, np.uint8)  # touched, so that no copy pays for page faults
    large = compare(source, destination, 2 * MIB, arguments.passes)
    small = compare(source, destination, 256 << 10, arguments.passes)
    return [
        Result("verified copy / memcpy, 2 MiB blocks", large.ratio, "x", BAR_RATIO),
        Result("verified copy, 2 MiB blocks", large.verified, "GB/s"),
        Result("memcpy, 2 MiB blocks", large.plain, "GB/s"),
        Result("verified copy / memcpy, 256 KiB blocks", small.ratio, "x"),
        Result("verified copy, 256 KiB blocks", small.verified, "GB/s"),
        Result("verified copy, 32 x 2 MiB a call", batched(source, destination, 1), "GB/s"),
        Result(
            "verified copy, 32 x 2 MiB a call, 2 threads",
            batched(source, destination, 2),
            "GB/s",
        ),
        Result("checksum, out of cache", hashing(source, 2 * MIB), "GB/s"),
        Result("checksum, 256 KiB in cache", hashing_cached(source[: 256 << 10]), "GB/s"),
    ]


class Comparison:
    """Medians of one block size: GB/s of either copy, and the ratio of verified to plain."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        self.ratio = statistics.median(plain / verified for plain, verified in pairs)
        self.plain = GROUP_BYTES / statistics.median(plain for plain, _ in pairs) / 1e9
        self.verified = GROUP_BYTES / statistics.median(verified for _, verified in pairs) / 1e9


def compare(source: Area, destination: Area, block_bytes: int, passes: int) -> Comparison:
    source_address, destination_address = source.ctypes.data, destination.ctypes.data

    def plain(offset: int) -> None:
        ctypes.memmove(destination_address + offset, source_address + offset, block_bytes)

    def verified(offset: int) -> None:
        end = offset + block_bytes
        copy_checksum(destination[offset:end], source[offset:end])

    pairs = []
    for walk in range(passes):
        for begin in range(0, len(source) - GROUP_BYTES, 2 * GROUP_BYTES):
            first, second = begin, begin + GROUP_BYTES
            if walk % 2:  # neither kind always has the lower addresses
                first, second = second, first
            plain_seconds = timed(plain, first, block_bytes)
            pairs.append((plain_seconds, timed(verified, second, block_bytes)))
    return Comparison(pairs)


def timed(copy: Copier, begin: int, block_bytes: int) -> float:
    start = time.perf_counter()
    for offset in range(begin, begin + GROUP_BYTES, block_bytes):
        copy(offset)
    return time.perf_counter() - start


def batched(source: Area, destination: Area, threads: int) -> float:
    """GB/s of calls that copy 32 blocks of 2 MiB."""
    block_bytes, blocks = 2 * MIB, 32
    step = block_bytes * blocks
    seconds = []
    for begin in range(0, len(source) - step + 1, step):
        offsets = np.arange(begin, begin + step, block_bytes)
        start = time.perf_counter()
        copy_checksum_many(destination, offsets, source, offsets, block_bytes, threads)
        seconds.append(time.perf_counter() - start)
    return step / statistics.median(seconds) / 1e9


def hashing(source: Area, block_bytes: int) -> float:
    """GB/s of the checksum alone, over the whole area."""
    seconds = []
    for offset in range(0, len(source), block_bytes):
        start = time.perf_counter()
        checksum(source[offset : offset + block_bytes])
        seconds.append(time.perf_counter() - start)
    return block_bytes / statistics.median(seconds) / 1e9


def hashing_cached(block: Area) -> float:
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        checksum(block)
        seconds.append(time.perf_counter() - start)
    return len(block) / statistics.median(seconds) / 1e9

"""The NVMe tier against its own disk and against memcpy: rows of `kvtier bench store`.

Every figure is a ratio within one run: a group of the tier's calls alternates with a group of the
plain thing on as many bytes and threads, and the ratio is the median over the pairs. The plain
things are sequential direct writes and reads of 2 MiB on the same file system, and the C library's
memcpy between areas of 512 MiB. All that the tier gives is compared byte for byte at the end of a
group, outside its time.
"""

import argparse
import asyncio
import concurrent.futures
import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.bench.report import Result
from kvtier.core.frame import FrameName, KeyKind
from kvtier.ports import BlockOwner, GetRequest, PutRequest, PutStatus
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.types import Fingerprint

MIB = 1 << 20
AREA_BYTES = 512 * MIB
GROUP_BYTES = 64 * MIB
WRITE_GROUP_BYTES = 128 * MIB
PLAIN_BYTES = 2 * MIB
WRITE_BAR, WARM_BAR, COLD_BAR = 0.6, 0.5, 0.7
NAMESPACE = Fingerprint(b"bench-store-nvme".ljust(32, b"\0"))
DEADLINE_S = 120.0
WARM_PAIRS = 4
"""Of one group that was just read: short, so many of them."""

Area: TypeAlias = npt.NDArray[np.uint8]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nvme-directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--nvme-mib", type=int, default=1024, help="working set of the NVMe tier")


def rows(arguments: argparse.Namespace) -> list[Result]:
    """Measure. Needs three times the working set free on the disk."""
    set_bytes = arguments.nvme_mib * MIB
    source = np.random.default_rng(7).integers(0, 256, AREA_BYTES, dtype=np.uint8)
    target = np.ones(AREA_BYTES, np.uint8)  # touched: nobody pays for page faults
    results: list[Result] = []
    for block_bytes in (2 * MIB, 256 << 10):
        with (
            tempfile.TemporaryDirectory(dir=arguments.nvme_directory) as folder,
            plain(Path(folder) / "plain", set_bytes) as disk,
        ):
            bench = Bench(Path(folder) / "tier", disk, source, target, block_bytes, set_bytes)
            results += asyncio.run(bench.run())
    return results


@dataclass(frozen=True, slots=True)
class Pairs:
    """Seconds of the tier and of the plain thing, pair by pair, for so many bytes each."""

    size: int
    seconds: list[tuple[float, float]]

    @property
    def ratio(self) -> float:
        return statistics.median(plain / tier for tier, plain in self.seconds)

    @property
    def tier(self) -> float:
        """GB/s."""
        return self.size / statistics.median(tier for tier, _ in self.seconds) / 1e9

    @property
    def plain(self) -> float:
        """GB/s."""
        return self.size / statistics.median(plain for _, plain in self.seconds) / 1e9


class PlainDisk:
    """A preallocated file that is written and read by direct I/O, 2 MiB at a time.

    It is filled once, while the tier is filled: bytes that were never written before cost a virtual
    disk more than others, on both sides.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._memory = mmap.mmap(-1, PLAIN_BYTES)
        self._memory.write(os.urandom(PLAIN_BYTES))
        self._at = 0

    def write(self, size: int) -> float:
        """Write on, and sync; the seconds it took."""
        begun = time.perf_counter()
        for offset in self._offsets(size):
            assert os.pwrite(self._descriptor, self._memory, offset) == PLAIN_BYTES
        os.fdatasync(self._descriptor)
        return time.perf_counter() - begun

    def read(self, size: int) -> float:
        """Read on; the seconds it took."""
        begun = time.perf_counter()
        for offset in self._offsets(size):
            assert os.preadv(self._descriptor, [self._memory], offset) == PLAIN_BYTES
        return time.perf_counter() - begun

    def _offsets(self, size: int) -> Iterator[int]:
        for _ in range(size // PLAIN_BYTES):
            if self._at + PLAIN_BYTES > self._size:
                self._at = 0
            yield self._at
            self._at += PLAIN_BYTES


@contextmanager
def plain(path: Path, size: int) -> Iterator[PlainDisk]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        yield PlainDisk(descriptor, size)
    finally:
        os.close(descriptor)


class Bench:
    """One block size on a tier of its own."""

    def __init__(
        self,
        directory: Path,
        disk: PlainDisk,
        source: Area,
        target: Area,
        block_bytes: int,
        set_bytes: int,
    ) -> None:
        self._directory = directory
        self._disk = disk
        self._source = source
        self._target = target
        self._block_bytes = block_bytes
        self._set_bytes = set_bytes
        self._written = 0
        self._rng = np.random.default_rng(3)

    async def run(self) -> list[Result]:
        label = f"{self._block_bytes >> 10} KiB"
        large = self._block_bytes == 2 * MIB
        results: list[Result] = []
        writes = await self._writes()
        results += rows_of(
            f"nvme put {label}", writes, "direct write", WRITE_BAR if large else None
        )
        for threads in (1, 2):
            cold, warm = await self._reads(threads)
            name = f"nvme get {label}, {threads} thread{'s' if threads > 1 else ''}"
            results += rows_of(f"{name}, cold", cold, "direct read", COLD_BAR if large else None)
            results += rows_of(f"{name}, warm", warm, "memcpy", WARM_BAR if large else None)
        return results

    def _config(self, threads: int) -> NvmeConfig:
        return NvmeConfig(self._directory, 2 * self._set_bytes + 512 * MIB, readers_count=threads)

    async def _writes(self) -> Pairs:
        """Fill the working set; the time of a group includes the index on disk."""
        tier = await NvmeTier.open(self._config(1))
        pairs: list[tuple[float, float]] = []
        while self._written * self._block_bytes < self._set_bytes:
            begun = time.perf_counter()
            for _ in range(WRITE_GROUP_BYTES // GROUP_BYTES):
                await self._put_batch(tier)
            await tier.settle(time.monotonic() + DEADLINE_S)
            tier_s = time.perf_counter() - begun
            pairs.append((tier_s, self._disk.write(WRITE_GROUP_BYTES)))
        await tier.close()
        return Pairs(WRITE_GROUP_BYTES, pairs)

    async def _put_batch(self, tier: NvmeTier) -> None:
        numbers = range(self._written, self._written + GROUP_BYTES // self._block_bytes)
        self._written = numbers.stop
        requests = [PutRequest(name_of(n), self._block(n), BlockOwner(1)) for n in numbers]
        statuses = {r.status for r in await tier.put_many(requests, time.monotonic() + DEADLINE_S)}
        assert statuses == {PutStatus.STORED}, statuses

    async def _reads(self, threads: int) -> tuple[Pairs, Pairs]:
        tier = await NvmeTier.open(self._config(threads))
        cold: list[tuple[float, float]] = []
        warm: list[tuple[float, float]] = []
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for group in range(self._set_bytes // GROUP_BYTES):
                base = group * GROUP_BYTES % AREA_BYTES
                numbers = self._chain()
                self._forget_cached()
                cold_s = await self._get_batch(tier, base, numbers)
                cold.append((cold_s, self._disk.read(GROUP_BYTES)))
                for _ in range(WARM_PAIRS):
                    base = (base + AREA_BYTES // 2 + GROUP_BYTES) % AREA_BYTES  # in no cache
                    warm_s = await self._get_batch(tier, base, numbers)
                    warm.append((warm_s, self._memcpy(pool, threads, base)))
        await tier.close()
        return Pairs(GROUP_BYTES, cold), Pairs(GROUP_BYTES, warm)

    async def _get_batch(self, tier: NvmeTier, base: int, numbers: npt.NDArray[np.int64]) -> float:
        size = self._block_bytes
        places = [
            self._target[base + i * size : base + (i + 1) * size] for i in range(len(numbers))
        ]
        requests = [
            GetRequest(name_of(int(n)), place.data, size)
            for n, place in zip(numbers, places, strict=True)
        ]
        begun = time.perf_counter()
        results = await tier.get_many(requests, time.monotonic() + DEADLINE_S)
        seconds = time.perf_counter() - begun
        assert all(result.is_hit for result in results), {result.status for result in results}
        for n, place in zip(numbers, places, strict=True):
            assert np.array_equal(place, self._block(int(n)))
        return seconds

    def _chain(self) -> npt.NDArray[np.int64]:
        """Blocks that were put together, as a request asks for them; which ones is random."""
        count = GROUP_BYTES // self._block_bytes
        return self._rng.integers(self._written // count) * count + np.arange(count)

    def _memcpy(self, pool: concurrent.futures.Executor, threads: int, base: int) -> float:
        """Seconds of as many plain copies."""
        to, start, size = self._target.ctypes.data, self._source.ctypes.data, self._block_bytes
        count = GROUP_BYTES // size

        def part(thread: int) -> None:
            for i in range(thread, count, threads):
                ctypes.memmove(to + base + i * size, start + base + i * size, size)

        begun = time.perf_counter()
        list(pool.map(part, range(threads)))
        return time.perf_counter() - begun

    def _forget_cached(self) -> None:
        """Drop the segments from the page cache; needs no rights."""
        for path in self._directory.rglob("*.segment"):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _block(self, number: int) -> Area:
        """Bytes that are this block's alone: another start of the source each."""
        blocks = AREA_BYTES // self._block_bytes
        begin = number % blocks * self._block_bytes
        return self._source[begin : begin + self._block_bytes]


def name_of(number: int) -> FrameName:
    return FrameName(KeyKind.PREFIX_KEY, number.to_bytes(32, "little"), NAMESPACE)


def rows_of(name: str, pairs: Pairs, against: str, bar: float | None) -> list[Result]:
    return [
        Result(f"{name} / {against}", pairs.ratio, "x", bar),
        Result(name, pairs.tier, "GB/s"),
        Result(f"{name}: {against}", pairs.plain, "GB/s"),
    ]

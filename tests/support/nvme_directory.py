"""What tests of the NVMe tier share: small tiers, their files, and what `du` says of them."""

import os
from pathlib import Path

from kvtier.core.frame import FrameName
from kvtier.ports import PutStatus
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import NvmeTier
from tests.tiers.contract import get_bytes, name_of, payload_of, put, put_of

MIB = 1 << 20


def small(directory: Path, bytes_max: int = 8 * MIB, segment_bytes: int = 256 << 10) -> NvmeConfig:
    return NvmeConfig(directory, bytes_max, segment_bytes=segment_bytes)


def generation(directory: Path) -> Path:
    (path,) = directory.glob("generation-*")
    return path


def segments(directory: Path) -> list[Path]:
    return sorted((generation(directory) / "segments").glob("*.segment"))


def index(directory: Path) -> Path:
    (path,) = generation(directory).glob("index-*")
    return path


def du(directory: Path) -> int:
    """As the command: blocks of every file and directory, times 512."""
    total = 0
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:  # RocksDB deletes as it goes
                continue
    return total


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


async def fill(tier: NvmeTier, numbers: range, size: int = 4096) -> None:
    """Put blocks, all of which are taken."""
    for start in range(numbers.start, numbers.stop, 64):
        some = range(start, min(start + 64, numbers.stop))
        assert set(await put(tier, *[put_of(n, size) for n in some])) == {PutStatus.STORED}


async def held(tier: NvmeTier, numbers: range, size: int = 4096) -> int:
    """How many of these blocks are hits; each of them is held against what was put."""
    hits = 0
    for number in numbers:
        found = await get_bytes(tier, name_of(number))
        if found is not None:
            assert found == payload_of(number, size)
            hits += 1
    return hits


def names(numbers: range) -> list[FrameName]:
    return [name_of(number) for number in numbers]

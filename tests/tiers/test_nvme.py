"""The NVMe tier: the contract, evictions included."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtier.core.frame import FrameName
from kvtier.ports import BlockTier, TierObserver
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import Location, NvmeTier
from tests.tiers.contract import Backend, LocalTierContract

SEGMENT_BYTES = 128 << 10
BYTES_MAX = 2 << 20
"""Of which an index gets 1 MiB: eight segments are left."""


class NvmeBackend:
    payload_bytes_max = SEGMENT_BYTES - 128

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._tiers: list[NvmeTier] = []

    async def open(
        self, bytes_max: int = BYTES_MAX, observer: TierObserver | None = None
    ) -> NvmeTier:
        directory = self._directory / str(next(self._numbers))
        config = NvmeConfig(directory, max(bytes_max, BYTES_MAX), segment_bytes=SEGMENT_BYTES)
        tier = await NvmeTier.open(config, observer)
        self._tiers.append(tier)
        return tier

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        at = location(tier, name)
        with at.path.open("r+b") as file:
            file.seek(at.offset + bit // 8)
            byte = file.read(1)[0]
            file.seek(at.offset + bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        target, source = location(tier, name), location(tier, frame)
        with source.path.open("rb") as file:
            file.seek(source.offset)
            content = file.read(source.frame_bytes)
        with target.path.open("r+b") as file:
            file.seek(target.offset)
            file.write(content)

    async def close(self) -> None:
        for tier in self._tiers:
            await tier.close()


def location(tier: BlockTier, name: FrameName) -> Location:
    assert isinstance(tier, NvmeTier)
    found = tier.locate(name)
    assert found is not None
    return found


class TestNvme(LocalTierContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        made = NvmeBackend(tmp_path)
        yield made
        await made.close()

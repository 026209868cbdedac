"""The arena as a tier of its own process: the contract, natively and with the pure twin."""

import random

import pytest

from kvtier.core.frame import FrameName, KeyKind
from kvtier.ports import BlockOwner, BlockTier, PutRequest, PutStatus, TierObserver
from kvtier.tiers.arena.directory import NATIVE, PURE, ArenaOperations
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape, ArenaTier
from tests.tiers.contract import NAMESPACE, SMALL_BYTES, Backend, LocalTierContract, soon

SLAB_BYTES = 20_032


class ArenaBackend:
    payload_bytes_max = SLAB_BYTES

    def __init__(self, operations: ArenaOperations) -> None:
        self._operations = operations

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> ArenaTier:
        config = ArenaConfig(bytes_max // SLAB_BYTES * SLAB_BYTES, SLAB_BYTES, 256)
        return ArenaTier(config, ArenaShape(observer=observer, operations=self._operations))

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        assert isinstance(tier, ArenaTier)
        memory = tier.frame_memory(name)
        assert memory is not None
        header, payload = memory
        part = header if bit < 8 * header.nbytes else payload
        at = bit if part is header else bit - 8 * header.nbytes
        part[at // 8] ^= 1 << at % 8

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        assert isinstance(tier, ArenaTier)
        target, source = tier.frame_memory(name), tier.frame_memory(frame)
        assert target is not None
        assert source is not None
        for to, start in zip(target, source, strict=True):
            to[:] = start


class TestArena(LocalTierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return ArenaBackend(NATIVE)


class TestArenaWithoutNativeCode(LocalTierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return ArenaBackend(PURE)


@pytest.mark.parametrize("codec_id", [0, 1])
async def test_more_block_sizes_than_slabs_still_fill_the_arena(codec_id: int) -> None:
    tier = ArenaTier(ArenaConfig(128 * SLAB_BYTES, 2 * SLAB_BYTES, 4096))
    rng = random.Random(2)
    for number in range(1500):
        size = rng.randint(2000, 20_000)
        key = number.to_bytes(32, "little")
        name = FrameName(KeyKind.PREFIX_KEY, key, NAMESPACE, codec_id)
        (result,) = await tier.put_many([PutRequest(name, bytes(size), BlockOwner(1))], soon())
        assert result.status is PutStatus.STORED
        assert tier.stats().bytes <= tier.stats().bytes_max
    held = [tier.held(name) for name in tier.names()]
    live = sum(one.payload_bytes for one in held if one is not None)
    assert live > tier.stats().bytes_max // 2
    await tier.close()

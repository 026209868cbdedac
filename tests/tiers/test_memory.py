"""The memory tier: the contract, with every eviction policy, and what only it has."""

import pytest

from kvtier.core.eviction import LruPolicy, Policy, S3FifoConfig, S3FifoPolicy
from kvtier.core.frame import FrameName
from kvtier.errors import CallerError, LimitError
from kvtier.ports import BlockTier, GetRequest, GetStatus, PutStatus, TierObserver
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from tests.tiers.contract import (
    SMALL_BYTES,
    Backend,
    LocalTierContract,
    TierContract,
    get_status,
    name_of,
    put,
    put_of,
)


class MemoryBackend:
    payload_bytes_max = SMALL_BYTES - 128

    def __init__(self, policy: type[LruPolicy[FrameName]] | None = LruPolicy) -> None:
        self._policy = policy

    def new_policy(self) -> Policy[FrameName]:
        if self._policy is None:
            return S3FifoPolicy(S3FifoConfig(capacity_blocks=64))
        return self._policy()

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> MemoryTier:
        return MemoryTier(MemoryConfig(bytes_max), self.new_policy(), observer)

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        assert isinstance(tier, MemoryTier)
        frame = tier.frame_memory(name)
        assert frame is not None
        frame[bit // 8] ^= 1 << bit % 8

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        assert isinstance(tier, MemoryTier)
        target, source = tier.frame_memory(name), tier.frame_memory(frame)
        assert target is not None
        assert source is not None
        target[:] = source


class TestMemory(LocalTierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()


class TestMemoryWithS3Fifo(TierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend(None)


async def test_the_deadline_is_held_against_the_clock_it_was_given() -> None:
    now = 100.0
    tier = MemoryTier(MemoryConfig(SMALL_BYTES), clock=lambda: now)
    await tier.put_many([put_of(1)], 101.0)
    now = 101.0
    (late,) = await tier.get_many([GetRequest(name_of(1))], 101.0)
    (written,) = await tier.put_many([put_of(2)], 101.0)
    assert late.status is GetStatus.TIMEOUT
    assert written.status is PutStatus.TIMEOUT
    assert tier.stats().gets == {GetStatus.TIMEOUT: 1}


async def test_a_tier_without_room_refuses_everything_and_misses() -> None:
    tier = MemoryTier(MemoryConfig(0))
    assert await put(tier, put_of(1, 0)) == [PutStatus.REFUSED]
    assert await get_status(tier, name_of(1)) is GetStatus.MISS


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(CallerError):
        MemoryConfig(-1)
    with pytest.raises(LimitError):
        MemoryConfig(1 << 60)

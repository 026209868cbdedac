"""The Redis tier against a real Valkey: the contract, and what only it promises."""

from collections.abc import AsyncIterator, Iterator

import pytest

from kvtier.core.frame import FrameName
from kvtier.ports import BlockTier, TierObserver
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.values import TAIL_BYTES
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import Valkey, requires_valkey, start_valkey
from tests.tiers.contract import (
    SMALL_BYTES,
    Backend,
    TierContract,
)

pytestmark = requires_valkey


class RedisBackend:
    """Tiers of one server; each `open` begins with an empty one."""

    payload_bytes_max = SMALL_BYTES - 128 - TAIL_BYTES

    def __init__(self, server: Valkey) -> None:
        self.server = server
        self.opened: list[RedisTier] = []

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> RedisTier:
        self.server.command("FLUSHALL")
        config = RedisConfig(
            parse_url(self.server.url), bytes_max=64 << 20, value_bytes_max=bytes_max
        )
        tier = RedisTier(config, observer)
        self.opened.append(tier)
        return tier

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        key = block_key(name)
        at = str(bit // 8)
        (byte,) = self.server.command("GETRANGE", key, at, at)[4:5]
        changed = bytes([byte ^ 1 << bit % 8])
        assert self.server.command("SETRANGE", key, at, changed).startswith(b":")

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        answer = self.server.command("COPY", block_key(frame), block_key(name), "REPLACE")
        assert answer == b":1\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with ProcessRunner("tests/tiers/test_redis", tmp_path_factory.mktemp("redis")) as runner:
        yield start_valkey(runner)


@pytest.fixture
async def redis_backend(server: Valkey) -> AsyncIterator[RedisBackend]:
    made = RedisBackend(server)
    yield made
    for tier in made.opened:
        await tier.close()


class TestRedis(TierContract):
    @pytest.fixture
    def backend(self, redis_backend: RedisBackend) -> Backend:
        return redis_backend

    async def test_bytes_stay_bounded_under_churn_and_every_read_is_exact_or_a_miss(
        self, backend: Backend
    ) -> None:
        """The server evicts, not the tier: see `TestRedisThatEvicts`."""
        pytest.skip("a Redis bounds its own bytes")

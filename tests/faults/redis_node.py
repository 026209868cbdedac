"""A node that writes blocks to a shared Redis, announces them, and is killed by the test.

python -m tests.faults.redis_node URL FIRST COUNT
"""

import asyncio
import sys
import time

from kvtier.tiers.redis.caretaker import RedisCaretaker
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.holder import HolderPolicy
from kvtier.tiers.redis.tier import RedisTier
from tests.tiers.contract import put_of

POLICY = HolderPolicy(look_s=0.1, lock_ttl_s=1.0)


async def main(url: str, first: int, count: int) -> None:
    tier = RedisTier(RedisConfig(parse_url(url)))
    caretaker = RedisCaretaker(tier, POLICY)
    numbers = range(first, first + count)
    await tier.put_many([put_of(n) for n in numbers], time.monotonic() + 10.0)
    await caretaker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

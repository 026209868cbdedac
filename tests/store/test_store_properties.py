"""Random histories against a dict: whatever fails, a get is exactly what was put, or a miss."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.core.planner import ScopeQuota, Verdict, WritePolicy
from kvtier.errors import BackendError
from kvtier.ports import BlockOwner, ByNames, ByScope, GetRequest, PutRequest
from kvtier.store import PinTerms
from kvtier.tiers.faulty import Fail, Fault, FlipBit, Full, Operation, Rule, Slow, Truncate
from kvtier.types import ScopeId, Tier
from tests.harness.waiting import eventually_async
from tests.support.store_rig import FRAME_BYTES, Rig, Shape, a_rig
from tests.tiers.contract import name_of, payload_of, soon

BLOCKS = 24
SCOPES = ("", "a", "b")
QUOTA = ScopeQuota(ScopeId("a"), Tier.DRAM, 2 * FRAME_BYTES)
SHAPES = [
    Shape(dram_blocks=4, nvme_blocks=12, redis_blocks=8, high_share=0.9, low_share=0.6,
          nvme_policy=nvme, redis_policy=redis, deadline_s=0.05, quotas=(QUOTA,),
          config={"group_blocks": 3})
    for nvme in WritePolicy for redis in (WritePolicy.ON_SEAL, WritePolicy.ON_EVICT)
]  # fmt: skip
ALONE = ["drop", "pin", "fault"]
TOGETHER = ["put", "get", "get", "up"]
FAULTS: Sequence[Fault] = (Fail(), Full(), FlipBit(2000), FlipBit(5), Truncate(7), Slow(0.2))


def scope_of(n: int) -> str:
    return SCOPES[n % len(SCOPES)]


@dataclass
class Oracle:
    """Which versions of each block may be read: one that was put since the last drop."""

    rig: Rig
    dice: random.Random
    may_be: dict[int, set[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    async def step(self, kind: str) -> None:
        numbers = [self.dice.randrange(BLOCKS) for _ in range(self.dice.randint(1, 5))]
        match kind:
            case "put":
                await self.put(numbers)
            case "get":
                await self.get(numbers)
            case "up":
                names = [(name_of(n), None) for n in numbers]
                async for known in self.rig.store.bring_up(names, soon()):
                    self.seen.update(known)
            case "drop":
                await self.drop(numbers)
            case "pin":
                self.rig.store.pin([name_of(n) for n in numbers], PinTerms(0.01))
            case "fault":
                self.fault()

    async def put(self, numbers: Sequence[int]) -> None:
        version = self.dice.randrange(3)
        requests = []
        for n in numbers:
            self.may_be.setdefault(n, set()).add(version)
            owner = BlockOwner(n % 2, ScopeId(scope_of(n)))
            requests.append(PutRequest(name_of(n), payload_of(n, version=version), owner))
        for result in await self.rig.store.put_many(requests, soon()):
            self.seen[result.status] += 1

    async def get(self, numbers: Sequence[int]) -> None:
        requests = [GetRequest(name_of(n)) for n in numbers]
        results = await self.rig.store.get_many(requests, soon())
        for n, result in zip(numbers, results, strict=True):
            self.seen[result.status] += 1
            if result.is_hit:
                assert result.payload is not None
                allowed = [payload_of(n, version=v) for v in self.may_be.get(n, ())]
                assert bytes(result.payload) in allowed

    async def drop(self, numbers: Sequence[int]) -> None:
        if self.dice.random() < 0.3:
            scope = self.dice.choice(SCOPES[1:])
            selection: ByNames | ByScope = ByScope(ScopeId(scope))
            gone = [n for n in range(BLOCKS) if scope_of(n) == scope]
        else:
            selection = ByNames(tuple(name_of(n) for n in numbers))
            gone = list(numbers)
        try:
            await self.rig.store.drop(selection, soon())
        except BackendError:
            self.seen["undropped"] += 1
        for n in gone:
            self.may_be.pop(n, None)
        self.seen["dropped"] += 1

    def fault(self) -> None:
        for tier in (self.rig.nvme, self.rig.redis):
            tier.rules.clear()
            if self.dice.random() < 0.5:
                operation = self.dice.choice(list(Operation)[1:])
                fault = self.dice.choice(FAULTS)
                if operation is Operation.DROP and not isinstance(fault, Fail):
                    continue
                tier.add(Rule(operation, fault, times=self.dice.randint(1, 4)))


async def is_healed(rig: Rig) -> bool:
    tiers = rig.store.stats().tiers.values()
    return all(t.verdict is not Verdict.DOWN and t.drops_pending == 0 for t in tiers)


async def run(seed: int, steps: int) -> Counter[str]:
    """One history; afterwards the books equal what the tiers hold, and nothing is held back."""
    dice = random.Random(seed)
    async with a_rig(dice.choice(SHAPES)) as rig:
        oracle = Oracle(rig, dice)
        for _ in range(steps):
            kinds = dice.choices(ALONE + TOGETHER * 3, k=1)
            if kinds[0] in TOGETHER:
                kinds += dice.choices(TOGETHER, k=dice.randrange(3))
            await asyncio.gather(*(oracle.step(kind) for kind in kinds))
        rig.nvme.heal()
        rig.redis.heal()
        await eventually_async(partial(is_healed, rig), 30, "every tier is back")
        await rig.settled()
        await rig.quiet()
        stats = rig.store.stats()
        for tier in (Tier.DRAM, Tier.NVME):
            assert stats.tiers[tier].usage.blocks_count == len(rig.memory[tier].names())
            assert stats.tiers[tier].usage.reserved_bytes == 0
            assert rig.said.held.get(tier, set()) == set(rig.memory[tier].names())
        assert stats.in_flight_bytes == 0
        oracle.seen.update(
            {f"demoted {t.name}": n for t, n in stats.counts.demoted.items()}
            | {f"promoted {t.name}": n for t, n in stats.counts.promoted.items()}
            | {f"fetched {t.name}": n for t, n in stats.counts.fetched.items()}
            | {f"{t.name} {r.value}": n for (t, r), n in stats.counts.dropped.items()}
            | {"joins": stats.counts.joins}
        )
        return oracle.seen


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_fails_a_get_is_what_was_put_or_a_miss(seed: int) -> None:
    asyncio.run(run(seed, 40))


def test_histories_reach_every_way_that_a_block_can_go() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += asyncio.run(run(seed, 80))
    expected = {
        "hit", "miss", "stored", "duplicate", "divergent", "dropped", "undropped", "resident",
        "demoted NVME", "demoted REDIS", "promoted NVME", "fetched NVME", "fetched REDIS", "joins",
        "DRAM selected", "DRAM copy_elsewhere", "NVME corrupt",
    }  # fmt: skip
    assert expected <= {word for word, count in seen.items() if count}

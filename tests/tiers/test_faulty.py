"""The faulty tier: what the wrapped one does without rules, and what each rule does to a caller."""

import asyncio

import pytest

from kvtier.core.frame import FrameName
from kvtier.errors import BackendError, DeadlineError, FrameFault, OverloadedError, UnavailableError
from kvtier.ports import (
    BlockTier,
    ByNames,
    ByNamespace,
    GetRequest,
    GetStatus,
    PutStatus,
    RemovalCause,
    TierObserver,
)
from kvtier.tiers.faulty import (
    Checks,
    Fail,
    Fault,
    FaultyTier,
    FlipBit,
    Full,
    Hang,
    Misplace,
    Operation,
    Rule,
    Slow,
    Truncate,
)
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from tests.tiers.contract import (
    BLOCK_BYTES,
    NAMESPACE,
    SMALL_BYTES,
    Backend,
    TierContract,
    bytes_of,
    get_bytes,
    get_status,
    holds,
    name_of,
    payload_of,
    put,
    put_of,
    soon,
)
from tests.tiers.test_memory import MemoryBackend


class VirtualTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now += seconds


class FaultyBackend:
    """A faulty tier without rules over a memory tier."""

    payload_bytes_max = MemoryBackend.payload_bytes_max

    def __init__(self) -> None:
        self._memory = MemoryBackend()
        self._inner: dict[int, MemoryTier] = {}

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> FaultyTier:
        inner = await self._memory.open(bytes_max, observer)
        tier = FaultyTier(inner, inner._clock)
        self._inner[id(tier)] = inner
        return tier

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        await self._memory.flip(self._inner[id(tier)], name, bit)

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        await self._memory.replace(self._inner[id(tier)], name, frame)


class TestFaultyWithoutRules(TierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return FaultyBackend()


async def opened(*rules: Rule, checks: Checks = Checks.ON) -> tuple[FaultyTier, VirtualTime]:
    """A faulty tier that holds blocks 1 to 3."""
    time = VirtualTime()
    inner = MemoryTier(MemoryConfig(SMALL_BYTES), clock=time.clock)
    tier = FaultyTier(inner, time.clock, time.sleep, checks)
    await tier.put_many([put_of(n) for n in (1, 2, 3)], soon_of(time))
    tier.add(*rules)
    return tier, time


def soon_of(time: VirtualTime) -> float:
    return time.now + 1.0


async def statuses_of(tier: FaultyTier, deadline_s: float, *numbers: int) -> list[GetStatus]:
    requests = [GetRequest(name_of(n), None, BLOCK_BYTES) for n in numbers]
    return [result.status for result in await tier.get_many(requests, deadline_s)]


async def test_a_slow_call_shorter_than_its_deadline_answers() -> None:
    tier, time = await opened(Rule(Operation.GET, Slow(0.5)))
    assert await statuses_of(tier, soon_of(time), 1, 2) == [GetStatus.HIT] * 2
    assert time.now == 1000.5
    assert tier.applied[Operation.GET, Slow] == 2


async def test_a_slow_call_ends_at_its_deadline_with_timeouts() -> None:
    tier, time = await opened(
        Rule(Operation.GET, Slow(60)), Rule(Operation.PUT, Slow(60)), Rule(Operation.DROP, Slow(60))
    )
    assert await statuses_of(tier, soon_of(time), 1, 2) == [GetStatus.TIMEOUT] * 2
    assert time.now == 1001.0
    (written,) = await tier.put_many([put_of(9)], soon_of(time))
    assert written.status is PutStatus.TIMEOUT
    with pytest.raises(DeadlineError):
        await tier.drop(ByNames((name_of(1),)), soon_of(time))
    tier.heal()
    assert await statuses_of(tier, soon_of(time), 1, 9) == [GetStatus.HIT, GetStatus.MISS]


async def test_an_error_of_one_block_leaves_the_others_alone() -> None:
    tier, time = await opened(Rule(Operation.GET, Fail("io"), name_of(2)))
    requests = [GetRequest(name_of(n)) for n in (1, 2, 3)]
    results = await tier.get_many(requests, soon_of(time))
    assert [result.status for result in results] == [GetStatus.HIT, GetStatus.ERROR, GetStatus.HIT]
    assert results[1].reason == "io"
    assert tier.stats().gets == {GetStatus.HIT: 2, GetStatus.ERROR: 1}


async def test_a_failing_backend_fails_every_operation_in_its_own_way() -> None:
    tier, time = await opened(*[Rule(operation, Fail()) for operation in Operation])
    assert await statuses_of(tier, soon_of(time), 1) == [GetStatus.ERROR]
    (written,) = await tier.put_many([put_of(9)], soon_of(time))
    assert (written.status, written.reason) == (PutStatus.ERROR, "scripted")
    with pytest.raises(BackendError):
        await tier.contains([name_of(1)], soon_of(time))
    with pytest.raises(BackendError):
        await tier.drop(ByNamespace(NAMESPACE), soon_of(time))
    tier.heal()
    assert await statuses_of(tier, soon_of(time), 1, 9) == [GetStatus.HIT, GetStatus.MISS]


async def test_a_full_tier_refuses_puts_and_goes_on_reading() -> None:
    tier, time = await opened(
        Rule(Operation.PUT, Full(), times=2), Rule(Operation.CONTAINS, Full(), times=1)
    )
    results = await tier.put_many([put_of(7), put_of(8), put_of(9)], soon_of(time))
    assert [result.status for result in results] == [
        PutStatus.REFUSED,
        PutStatus.REFUSED,
        PutStatus.STORED,
    ]
    assert results[0].reason == "full"
    with pytest.raises(OverloadedError):
        await tier.contains([name_of(1)], soon_of(time))
    assert await tier.contains([name_of(8), name_of(9)], soon_of(time)) == [False, True]
    assert await statuses_of(tier, soon_of(time), 1) == [GetStatus.HIT]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (FlipBit(0), FrameFault.MAGIC),
        (FlipBit(300), FrameFault.HEADER_CHECKSUM),
        (FlipBit(8 * 128), FrameFault.PAYLOAD_CHECKSUM),
        (FlipBit(-1), FrameFault.PAYLOAD_CHECKSUM),
        (Truncate(1), FrameFault.SHORT),
        (Truncate(BLOCK_BYTES + 1), FrameFault.SHORT),
        (Misplace(name_of(2)), FrameFault.KEY),
    ],
)
@pytest.mark.parametrize("operation", [Operation.GET, Operation.PUT])
async def test_damage_behind_the_checksum_is_corrupt_then_a_miss(
    damage: Fault, fault: FrameFault, operation: Operation
) -> None:
    tier, time = await opened()
    await tier.drop(ByNames((name_of(1),)), soon_of(time))
    tier.add(Rule(operation, damage, name_of(1), times=1))
    assert (await tier.put_many([put_of(1)], soon_of(time)))[0].status is PutStatus.STORED
    request = GetRequest(name_of(1), None, BLOCK_BYTES)
    (damaged,) = await tier.get_many([request], soon_of(time))
    assert damaged.status is GetStatus.CORRUPT
    assert damaged.reason == fault
    assert damaged.payload is None
    assert await statuses_of(tier, soon_of(time), 1, 2) == [GetStatus.MISS, GetStatus.HIT]
    assert tier.stats().corrupt == {fault: 1}
    assert tier.stats().removals[RemovalCause.CORRUPT] == 1
    assert (await tier.put_many([put_of(1)], soon_of(time)))[0].status is PutStatus.STORED
    assert await statuses_of(tier, soon_of(time), 1) == [GetStatus.HIT]


async def test_without_checks_wrong_bytes_come_through() -> None:
    tier, time = await opened(Rule(Operation.GET, FlipBit(8 * 200)), checks=Checks.OFF)
    (result,) = await tier.get_many([GetRequest(name_of(1))], soon_of(time))
    assert result.is_hit
    assert bytes_of(result) != payload_of(1)


async def test_a_hanging_call_ends_when_it_is_released() -> None:
    inner = MemoryTier(MemoryConfig(SMALL_BYTES))
    tier = FaultyTier(inner, inner._clock)
    await put(tier, put_of(1))
    tier.add(Rule(Operation.GET, Hang()))
    hung = asyncio.ensure_future(get_bytes(tier, name_of(1)))
    await tier.wait_hanging()
    assert not hung.done()
    tier.heal()
    assert await hung == payload_of(1)
    assert await holds(tier, name_of(1)) == [True]


async def test_a_hanging_call_ends_at_its_deadline() -> None:
    tier, time = await opened(Rule(Operation.GET, Hang()), Rule(Operation.DROP, Hang()))
    assert await statuses_of(tier, soon_of(time), 1, 2) == [GetStatus.TIMEOUT] * 2
    with pytest.raises(DeadlineError):
        await tier.drop(ByNames((name_of(1),)), soon_of(time))
    assert tier.applied[Operation.GET, Hang] == 2


async def test_a_hanging_call_can_be_cancelled_and_leaves_no_task() -> None:
    inner = MemoryTier(MemoryConfig(SMALL_BYTES))
    tier = FaultyTier(inner, inner._clock)
    tier.add(Rule(Operation.PUT, Hang()))
    hung = asyncio.ensure_future(put(tier, put_of(1)))
    await tier.wait_hanging()
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert await get_status(tier, name_of(1)) is GetStatus.MISS


async def test_the_first_rule_that_fits_applies_and_each_counts_down() -> None:
    tier, time = await opened(
        Rule(Operation.GET, Fail("first"), name_of(1), times=1),
        Rule(Operation.GET, Fail("second"), times=2),
    )
    reasons = []
    for _ in range(4):
        (result,) = await tier.get_many([GetRequest(name_of(1))], soon_of(time))
        reasons.append(result.reason)
    assert reasons == ["first", "second", "second", ""]


async def test_closing_releases_what_hangs() -> None:
    inner = MemoryTier(MemoryConfig(SMALL_BYTES))
    tier = FaultyTier(inner, inner._clock)
    await put(tier, put_of(1))
    tier.add(Rule(Operation.CONTAINS, Hang(), times=1))
    hung = asyncio.ensure_future(tier.contains([name_of(1)], soon()))
    await tier.wait_hanging()
    await tier.close()
    with pytest.raises(UnavailableError):
        await hung

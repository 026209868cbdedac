"""A tier that fails on demand: wraps any tier and follows a script of rules.

For tests of everything above a tier, ours and those of others; never part of a running store. A
rule names an operation, perhaps one block, what goes wrong, and how often; the first rule that
fits a block applies. Frames are damaged *behind* the checksum: a damaged read is checked like every
read, so a correct tier's reader sees CORRUPT (`Checks.ON`); with `Checks.OFF` the wrong bytes come
through as a HIT, which is how a test proves that its own check can fail.
What must not live here: real faults of real backends (their tests have those), randomness.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypeAlias

from kvtier.core.checks import require_integer
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameName,
    encode_header,
    verify,
)
from kvtier.errors import BackendError, CallerError, DeadlineError, FrameError, OverloadedError
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.ports import (
    BlockTier,
    ByNames,
    Clock,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    Refusal,
    RemovalCause,
    Selection,
    TierStats,
    require_batch,
)
from kvtier.tiers.tally import Tally, failed_get
from kvtier.types import Tier

Sleeper: TypeAlias = Callable[[float], Awaitable[None]]
"""`asyncio.sleep`, or that of a test's clock."""


class Operation(StrEnum):
    """What a rule applies to."""

    CONTAINS = "contains"
    GET = "get"
    PUT = "put"
    DROP = "drop"


class Checks(Enum):
    """Whether damaged frames are checked, as every tier does."""

    ON = "on"
    OFF = "off"
    """Only to prove that a test sees wrong bytes when nobody checks."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes this long more; past its deadline the block is a TIMEOUT."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The backend reports an error."""

    reason: str = "scripted"


@dataclass(frozen=True, slots=True)
class Full:
    """A put is refused as FULL; `contains` and `drop` are overloaded. A get is not concerned."""


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of the frame is flipped: of the header below bit 1024, of the payload beyond.

    `bit` counts modulo the frame's bits. On PUT the damage stays until the block is dropped or put
    again; on GET it is on the way, but the copy is dropped all the same, as a tier cannot know.
    """

    bit: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """The last bytes of the frame are gone."""

    bytes: int = 1


@dataclass(frozen=True, slots=True)
class Misplace:
    """The frame of another name stands there, with the payload that was put for this one."""

    other: FrameName


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing happens until `FaultyTier.release`, or the deadline by the clock that runs.

    A hung call holds no buffer of the caller's: it has not reached the wrapped tier.
    """


Fault: TypeAlias = Slow | Fail | Full | FlipBit | Truncate | Misplace | Hang
_Damage: TypeAlias = FlipBit | Truncate | Misplace


@dataclass(slots=True)
class Rule:
    """One line of the script. `name` None: any block. `times` None: until it is removed.

    `times` counts down by one for each block that the rule applied to.
    """

    operation: Operation
    fault: Fault
    name: FrameName | None = None
    times: int | None = None

    def fits(self, operation: Operation, name: FrameName | None) -> bool:
        """Whether the rule applies now; a rule for one block never fits a call without names."""
        spent = self.times is not None and self.times <= 0
        return operation is self.operation and not spent and self.name in {None, name}


class FaultyTier:
    """`BlockTier` that does what its rules say and otherwise what the wrapped tier does.

    `rules` may be changed at any time; `applied` counts blocks (calls, for a drop without names)
    by operation and kind of fault. Reads of more than one fault's worth make one call each to the
    wrapped tier a batch.
    """

    def __init__(
        self,
        inner: BlockTier,
        clock: Clock,
        sleep: Sleeper = asyncio.sleep,
        checks: Checks = Checks.ON,
    ) -> None:
        self.rules: list[Rule] = []
        self.applied: Counter[tuple[Operation, type[Fault]]] = Counter()
        self._inner = inner
        self._clock = clock
        self._sleep = sleep
        self._checks = checks
        self._damaged: dict[FrameName, _Damage] = {}
        self._released = asyncio.Event()
        self._hanging = asyncio.Event()
        self._tally = Tally()

    @property
    def tier(self) -> Tier:
        return self._inner.tier

    async def wait_hanging(self) -> None:
        """Return once a call has begun to hang: for tests, instead of sleeping."""
        await self._hanging.wait()

    def add(self, *rules: Rule) -> None:
        """Append rules to the script."""
        self.rules.extend(rules)

    def heal(self) -> None:
        """Remove all rules and release what hangs. Damage that was stored stays."""
        self.rules.clear()
        self.release()

    def release(self) -> None:
        """Let every call that hangs now go on."""
        self._hanging.clear()
        self._released.set()
        self._released = asyncio.Event()

    async def contains(self, names: Sequence[FrameName], deadline_s: float) -> list[bool]:
        """See `BlockTier.contains`."""
        require_batch(names, deadline_s)
        await self._delay_or_fail(Operation.CONTAINS, names, deadline_s)
        return await self._inner.contains(names, deadline_s)

    async def get_many(self, requests: Sequence[GetRequest], deadline_s: float) -> list[GetResult]:
        """See `BlockTier.get_many`."""
        require_batch(requests, deadline_s)
        faults = [self._next(Operation.GET, request.name) for request in requests]
        await self._delay(faults, deadline_s)
        answers: list[GetResult | None] = [
            GetResult(GetStatus.ERROR, reason=fault.reason) if isinstance(fault, Fail) else None
            for fault in faults
        ]
        asked = [request for request, answer in zip(requests, answers, strict=True) if not answer]
        given = iter(await self._inner.get_many(asked, deadline_s))
        results = [next(given) if answer is None else answer for answer in answers]
        for i, (request, fault) in enumerate(zip(requests, faults, strict=True)):
            damage = fault if isinstance(fault, _Damage) else self._damaged.get(request.name)
            if damage is not None and results[i].is_hit:
                results[i] = await self._through_damage(request, results[i], damage, deadline_s)
        self._tally.count_gets(results)
        return results

    async def put_many(self, requests: Sequence[PutRequest], deadline_s: float) -> list[PutResult]:
        """See `BlockTier.put_many`."""
        require_batch(requests, deadline_s)
        faults = [self._next(Operation.PUT, request.name) for request in requests]
        await self._delay(faults, deadline_s)
        answers = [_failed_put(fault) for fault in faults]
        asked = [request for request, answer in zip(requests, answers, strict=True) if not answer]
        given = iter(await self._inner.put_many(asked, deadline_s))
        results = [next(given) if answer is None else answer for answer in answers]
        for request, fault, result in zip(requests, faults, results, strict=True):
            if result.status is not PutStatus.STORED:
                continue
            self._damaged.pop(request.name, None)
            if isinstance(fault, _Damage):
                self._damaged[request.name] = fault
        self._tally.count_puts(requests, results)
        return results

    async def drop(self, selection: Selection, deadline_s: float) -> int:
        """See `BlockTier.drop`."""
        names = selection.names if isinstance(selection, ByNames) else ()
        require_batch(names, deadline_s)
        await self._delay_or_fail(Operation.DROP, names or (None,), deadline_s)
        count = await self._inner.drop(selection, deadline_s)
        for name in names:
            self._damaged.pop(name, None)
        return count

    def stats(self) -> TierStats:
        """What the wrapped tier holds, with the outcomes that this one gave."""
        held = self._inner.stats()
        found = self._tally.removals[RemovalCause.CORRUPT]  # dropped from the wrapped tier
        removals = Counter(held.removals)
        removals[RemovalCause.CORRUPT] += found
        removals[RemovalCause.DROPPED] -= found
        return dataclasses.replace(
            held,
            gets=dict(self._tally.gets),
            puts=dict(self._tally.puts),
            removals=removals,
            corrupt=Counter(held.corrupt) + self._tally.corrupt,
        )

    async def close(self) -> None:
        """Release what hangs and close the wrapped tier."""
        self.release()
        await self._inner.close()

    def _next(self, operation: Operation, name: FrameName | None) -> Fault | None:
        for rule in self.rules:
            if rule.fits(operation, name):
                if rule.times is not None:
                    rule.times -= 1
                self.applied[operation, type(rule.fault)] += 1
                return rule.fault
        return None

    async def _delay(self, faults: Sequence[Fault | None], deadline_s: float) -> None:
        """Wait as the slowest of the faults says, not past the deadline."""
        remaining = max(0.0, deadline_s - self._clock())
        if any(isinstance(fault, Hang) for fault in faults):
            await self._wait_released(remaining)
        slowest = max((fault.seconds for fault in faults if isinstance(fault, Slow)), default=0.0)
        if slowest > 0:
            await self._sleep(min(slowest, remaining))

    async def _wait_released(self, remaining: float) -> None:
        self._hanging.set()
        waits = [
            asyncio.ensure_future(self._released.wait()),
            asyncio.ensure_future(self._sleep(remaining)),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _delay_or_fail(
        self, operation: Operation, names: Sequence[FrameName | None], deadline_s: float
    ) -> None:
        faults = [self._next(operation, name) for name in names]
        await self._delay(faults, deadline_s)
        if self._clock() >= deadline_s:
            raise DeadlineError("a scripted delay reached the deadline")
        for fault in faults:
            if isinstance(fault, Fail):
                raise BackendError(fault.reason)
            if isinstance(fault, Full):
                raise OverloadedError("scripted")

    async def _through_damage(
        self, request: GetRequest, hit: GetResult, damage: _Damage, deadline_s: float
    ) -> GetResult:
        """What a reader gets of a frame that was damaged behind its checksum."""
        assert hit.payload is not None
        assert hit.header is not None
        frame = _damaged(bytearray(encode_header(hit.header) + hit.payload), damage, hit)
        payload = memoryview(frame)[HEADER_BYTES:]
        hit.payload[: payload.nbytes] = payload
        if self._checks is Checks.OFF:
            return hit
        try:
            verify(frame, FrameExpectation(request.name, request.payload_bytes))
        except FrameError as error:
            self._tally.corrupt[error.fault] += 1
            with contextlib.suppress(DeadlineError):  # then it stays, and stays damaged
                await self._inner.drop(ByNames((request.name,)), deadline_s)
                self._tally.removals[RemovalCause.CORRUPT] += 1
                self._damaged.pop(request.name, None)
            return failed_get(error)
        raise CallerError(f"the scripted damage {damage!r} changes nothing")


def _failed_put(fault: Fault | None) -> PutResult | None:
    if isinstance(fault, Fail):
        return PutResult(PutStatus.ERROR, fault.reason)
    if isinstance(fault, Full):
        return PutResult(PutStatus.REFUSED, Refusal.FULL)
    return None


def _damaged(frame: bytearray, damage: _Damage, hit: GetResult) -> bytearray:
    match damage:
        case FlipBit():
            at = damage.bit % (8 * len(frame))
            frame[at // 8] ^= 1 << at % 8
        case Truncate():
            require_integer("bytes", damage.bytes, 1, PAYLOAD_BYTES_MAX)
            del frame[max(0, len(frame) - damage.bytes) :]
        case Misplace():
            assert hit.header is not None
            header = hit.header
            frame[:HEADER_BYTES] = encode_header(dataclasses.replace(header, name=damage.other))
    return frame

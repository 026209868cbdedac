"""Peers and an index that do as a test says, with a clock that moves when a test moves it.

What must not live here: what a test expects of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.checksum import checksum
from kvtier.core.event_columns import Hashes
from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import DeadlineError, FrameFault, KvtierError, UnavailableError
from kvtier.peers.finding import Places
from kvtier.ports import GetRequest, GetResult, GetStatus, PeerPlace, PutRequest, PutResult
from kvtier.types import Fingerprint, InstanceId, NodeId
from tests.harness.waiting import eventually_async
from tests.tiers.contract import payload_of

WRITER = 7


def place(name: str) -> PeerPlace:
    return PeerPlace(InstanceId(name), NodeId(f"node-{name}"), f"{name}:1")


def hash_of(name: FrameName) -> int:
    return int.from_bytes(name.key[:8], "little")


@dataclass
class Now:
    """A clock."""

    s: float = 1000.0

    def __call__(self) -> float:
        return self.s


async def begun(condition: Callable[[], bool]) -> None:
    """Wait until a task has come so far."""

    async def asked() -> bool:
        return condition()

    await eventually_async(asked, 30, "a call")


@dataclass
class FakePeer:
    """What one peer has and how it behaves."""

    has: dict[FrameName, int] = field(default_factory=dict)
    """The number of the payload, which is the block's own unless it lies."""
    error: KvtierError | None = None
    answer: Callable[[], GetResult] | None = None
    """Instead of what it has."""
    gate: asyncio.Event | None = None
    """What it waits for before it answers."""
    calls: list[list[FrameName]] = field(default_factory=list)


@dataclass
class FakeTransport:
    """`PeerTransport` to fake peers."""

    peers: dict[str, FakePeer] = field(default_factory=dict)
    in_flight: int = 0
    in_flight_max: int = 0
    is_closed: bool = False

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        fake = self.peers[peer.instance]
        fake.calls.append([request.name for request in requests])
        self.in_flight += sum(request.payload_bytes or 0 for request in requests)
        self.in_flight_max = max(self.in_flight, self.in_flight_max)
        try:
            await asyncio.sleep(0)
            if fake.gate is not None:
                await fake.gate.wait()
        finally:
            self.in_flight -= sum(request.payload_bytes or 0 for request in requests)
        if fake.error is not None:
            raise fake.error
        return [self._result(fake, request) for request in requests]

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        raise UnavailableError("nobody puts here")

    async def close(self) -> None:
        self.is_closed = True

    def _result(self, fake: FakePeer, request: GetRequest) -> GetResult:
        if fake.answer is not None:
            return fake.answer()
        number = fake.has.get(request.name)
        if number is None:
            return GetResult(GetStatus.MISS)
        payload = memoryview(payload_of(number))
        header = FrameHeader(request.name, WRITER, payload.nbytes, checksum(payload))
        return GetResult(GetStatus.HIT, payload, header)


def corrupt() -> GetResult:
    return GetResult(GetStatus.CORRUPT, reason=FrameFault.PAYLOAD_CHECKSUM.value)


@dataclass
class FakeIndex:
    """`PeerIndex` that believes what it was told."""

    held: dict[int, Places] = field(default_factory=dict)
    error: KvtierError | None = None
    gate: asyncio.Event | None = None
    questions: list[list[int]] = field(default_factory=list)

    async def locate(
        self, namespace: Fingerprint, hashes: Hashes, instance: str, deadline_s: float
    ) -> tuple[Places, ...]:
        asked = [int(one) for one in hashes]
        self.questions.append(asked)
        if self.gate is not None:
            try:
                await asyncio.wait_for(self.gate.wait(), deadline_s)
            except TimeoutError as error:
                raise DeadlineError("the index is slow") from error
        if self.error is not None:
            raise self.error
        return tuple(self.held.get(one, ()) for one in asked)

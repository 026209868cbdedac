"""`PeerTransport` over NIXL: the store moves payload between itself and memory that is lent to it.

That memory is a staging area of this process, never a caller's: what comes is copied out of a slot
and hashed over the copy, so that nothing that is written late changes what was verified. Requests,
statuses and checksums go over the bulk channel, which says who both ends are. A slot that a call
left behind, cancelled or past its deadline, is not used again before the store has said that
nothing moves there any more; where nobody can say that, it is never used again, and once no slot is
left the agent is ended, which ends all that moves, and another one is opened.
What must not live here: the wire's form (`bulk_wire`), NIXL itself (`nixl_agent`), whom to ask.
"""

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, TypeVar

from kvtier.core.block_copy import copy_checksum
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameName,
    parse_header,
    verify_copied,
)
from kvtier.errors import (
    BackendError,
    ConfigError,
    DeadlineError,
    FrameError,
    KvtierError,
    OverloadedError,
    UnavailableError,
)
from kvtier.limits import PEERS_COUNT_MAX, STORE_DEADLINE_MS_MAX
from kvtier.peers import bulk_wire as form
from kvtier.peers.bulk_transport import BulkTransport
from kvtier.peers.nixl_agent import AgentMaker, Exposure, open_agent
from kvtier.peers.staging import Slot, Staging, step_of
from kvtier.ports import GetRequest, GetResult, GetStatus, PeerPlace, PutRequest, PutResult
from kvtier.sections import DialConfig
from kvtier.store.gates import grouped
from kvtier.tiers.tally import failed_get, payload_view
from kvtier.wire import blocks
from kvtier.wire.loop_thread import end

GROUP_BLOCKS: Final = 256
"""Of one exchange."""
WARM_S: Final = 30.0
"""How long the first connection of two agents may take."""
SETTLE_S: Final = 0.5
"""How long a store waits for a slot to be left alone before it says that it is not ..."""
SETTLE_TRIES: Final = 10
"""... and how often it is asked before the slot is given up: for half a minute in all."""
_PAUSE_S, _PAUSE_S_MAX = 0.2, 5.0
_SETTLING_MAX: Final = 2
"""Questions about slots at once: they take threads from calls."""


RENEWALS_MAX: Final = 32
"""Of agents, each of which may keep the addresses of its staging memory: 64 MiB, without pages."""
TAKE_S: Final = 0.2
"""How long a call waits for a slot: there is one for each thread, but for those left behind."""
ANSWER_S: Final = 1.0
"""Beyond that, how long the answer may take to come."""

T = TypeVar("T")


class WhenCold(Enum):
    """What becomes of a call to a store whose agent has not met ours."""

    WAIT = "wait"
    REFUSE = "refuse"
    """UnavailableError at once, for another way to be taken; they meet meanwhile."""


class _NotMovedError(BackendError):
    """The store says that its transfer failed: another connection would not help."""


class _Near:
    """An agent of ours and the memory that it lends."""

    def __init__(self, reach: Exposure, maker: AgentMaker) -> None:
        self.staging = Staging()
        self.agent = maker(f"kvtier-asker-{secrets.token_hex(16)}", reach)
        try:
            self.base = self.agent.register(self.staging.memory)
            self.description = self.agent.describe()
        except BackendError:
            self.agent.close()
            raise

    def close(self) -> None:
        """End the agent. A store that stood still may yet write into what it was lent."""
        self.agent.close()
        self.staging.bury()


class NixlTransport:
    """See the module. Belongs to one event loop."""

    def __init__(
        self,
        dial: DialConfig,
        reach: Exposure = Exposure.LOOPBACK,
        cold: WhenCold = WhenCold.WAIT,
        maker: AgentMaker = open_agent,
    ) -> None:
        """`dial` has the credentials. Opens nothing before the first call."""
        self._channel = BulkTransport(dial)
        self._reach = reach
        self._cold = cold
        self._maker = maker
        self._near: _Near | None = None
        self._opening = asyncio.Lock()
        self._warm: OrderedDict[PeerPlace, asyncio.Task[None]] = OrderedDict()
        self._settling: set[asyncio.Task[None]] = set()
        self._questions = asyncio.Semaphore(_SETTLING_MAX)
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self.renewals = 0
        """Agents that were ended because no slot was left."""

    @property
    def quarantined(self) -> int:
        """Slots that calls left behind and that nobody has settled yet."""
        return len(self._settling)

    @property
    def free(self) -> int:
        """Slots of the agent of now that nobody has."""
        return 0 if self._near is None else self._near.staging.free

    @property
    def retired(self) -> int:
        """Slots of the agent of now that are never used again."""
        return 0 if self._near is None else self._near.staging.retired

    async def get_many(
        self, peer: PeerPlace, requests: Sequence[GetRequest], deadline_s: float
    ) -> list[GetResult]:
        """See `PeerTransport.get_many`. Lengths that nobody knows come over the bulk channel."""
        if not requests:
            return []
        size = requests[0].payload_bytes
        near = await self._ready(peer, deadline_s)
        if not size or step_of(size) > near.staging.slot_bytes:
            return await self._channel.get_many(peer, requests, deadline_s)
        runs = grouped([step_of(size)] * len(requests), GROUP_BLOCKS, near.staging.slot_bytes)

        call = _Call(peer, near, deadline_s)

        def got(wire: form.Wire) -> list[GetResult]:
            results: list[GetResult] = []
            for run in runs:
                results += self._got(wire, call, [requests[i] for i in run])
            return results

        return await self._called(call, got)

    async def put_many(
        self, peer: PeerPlace, requests: Sequence[PutRequest], deadline_s: float
    ) -> list[PutResult]:
        """See `PeerTransport.put_many`."""
        if not requests:
            return []
        sizes = [step_of(payload_view(request.payload).nbytes) for request in requests]
        near = await self._ready(peer, deadline_s)
        if max(sizes) > near.staging.slot_bytes:
            return await self._channel.put_many(peer, requests, deadline_s)
        runs = grouped(sizes, GROUP_BLOCKS, near.staging.slot_bytes)

        call = _Call(peer, near, deadline_s)

        def put(wire: form.Wire) -> list[PutResult]:
            results: list[PutResult] = []
            for run in runs:
                results += self._put(wire, call, [requests[i] for i in run])
            return results

        return await self._called(call, put)

    async def close(self) -> None:
        """See `PeerTransport.close`."""
        self._is_open = False
        tasks = [*self._warm.values(), *self._settling]
        self._warm.clear()
        closing = asyncio.ensure_future(self._channel.close())
        await end(tasks)
        await closing
        near, self._near = self._near, None
        if near is not None:
            await asyncio.to_thread(near.close)

    # Meeting

    async def _ready(self, peer: PeerPlace, deadline_s: float) -> _Near:
        """The agent to call the peer with, once they have met."""
        if not self._is_open:
            raise UnavailableError("the transport is closed")
        warm = self._warm.get(peer)
        if warm is None or (warm.done() and (warm.cancelled() or warm.exception() is not None)):
            warm = self._warm[peer] = asyncio.create_task(self._meet(peer))
            warm.add_done_callback(_heard)
        self._warm.move_to_end(peer)
        while len(self._warm) > PEERS_COUNT_MAX:
            _, idle = self._warm.popitem(last=False)
            idle.cancel()
        if not warm.done():
            if self._cold is WhenCold.REFUSE:
                raise UnavailableError(f"{peer.instance} is being met")
            await asyncio.wait([warm], timeout=max(0.0, deadline_s - time.monotonic()))
            if not warm.done():
                raise DeadlineError(f"{peer.instance} takes long to meet")
        if warm.cancelled():
            raise UnavailableError("the transport is closed")
        warm.result()
        return await self._agent()

    async def _meet(self, peer: PeerPlace) -> None:
        near = await self._agent()
        call = _Call(peer, near, time.monotonic() + WARM_S)
        await self._called(call, lambda wire: self._tried(wire, call))

    async def _called(self, call: "_Call", work: Callable[[form.Wire], T]) -> T:
        """As `BulkTransport.call`. UnavailableError where another way may do: no slot is free, or
        the transfer failed, after which the two have to meet again."""
        try:
            return await self._channel.call(call.peer, call.end, work)
        except OverloadedError as error:
            raise UnavailableError(str(error)) from error
        except _NotMovedError as error:
            warm = self._warm.get(call.peer)
            if warm is not None and warm.done():
                del self._warm[call.peer]
            raise UnavailableError(str(error)) from error

    async def _agent(self) -> _Near:
        async with self._opening:
            near = self._near
            if near is not None and near.staging.is_spent:
                self._near = None
                self.renewals += 1
                await asyncio.to_thread(near.close)
            if self._near is None:
                if self.renewals >= RENEWALS_MAX:
                    raise UnavailableError("nixl has failed too often, and is not tried again")
                try:
                    opened = await asyncio.to_thread(_Near, self._reach, self._maker)
                except (BackendError, ConfigError) as error:
                    raise UnavailableError(str(error)) from error
                if not self._is_open:
                    await asyncio.to_thread(opened.close)
                    raise UnavailableError("the transport is closed")
                self._near = opened
            return self._near

    # On a thread

    def _introduced(self, wire: form.Wire, near: _Near, end: float) -> bytes:
        """The acquaintance of our agent with the store at the other end, made if need be."""
        if wire.met is not None and wire.met[0] is near:
            return wire.met[1]
        request = _request(form.NIXL_MEET, end, payload_bytes=len(near.description))
        wire.write([request, near.description])
        if wire.read(1) != b"\1":
            raise UnavailableError("the store does not meet us")
        token = wire.read(form.ACQUAINTANCE_BYTES)
        wire.met = (near, token)
        return token

    def _tried(self, wire: form.Wire, call: "_Call") -> None:
        """Let the store try whether it reaches our memory: that connects the two agents."""
        with self._lent(wire, call) as loan:
            wire.write([_request(form.NIXL_TRY, call.end), loan.offer])
            loan.is_left_alone = _answered(wire, 0)
        if not loan.is_left_alone:
            raise _NotMovedError(f"{call.peer.instance} does not reach our memory")

    def _got(
        self, wire: form.Wire, call: "_Call", requests: Sequence[GetRequest]
    ) -> list[GetResult]:
        """One exchange of a get."""
        size = requests[0].payload_bytes or 0
        keys = b"".join(request.name.key for request in requests)
        results: list[GetResult] = []
        with self._lent(wire, call) as loan:
            request = _request(form.NIXL_GET, call.end, requests[0].name, len(requests), size)
            wire.write([request, keys, loan.offer])
            loan.is_left_alone = _answered(wire, len(requests))
            if not loan.is_left_alone:
                raise _NotMovedError(f"{call.peer.instance} does not reach our memory any more")
            statuses = blocks.get_statuses_from(wire.read(len(requests)))
            hits = statuses.count(GetStatus.HIT)
            headers = memoryview(wire.read(hits * HEADER_BYTES))
            valid = wire.read(hits)
            at = 0
            for asked, status in zip(requests, statuses, strict=True):
                if status is not GetStatus.HIT:
                    results.append(GetResult(status))
                    continue
                raw = headers[at * HEADER_BYTES :][:HEADER_BYTES]
                source = loan.slot.memory[at * step_of(size) :][:size]
                results.append(
                    _taken(asked, raw, source) if valid[at] else GetResult(GetStatus.MISS)
                )
                at += 1
        return results

    def _put(
        self, wire: form.Wire, call: "_Call", requests: Sequence[PutRequest]
    ) -> list[PutResult]:
        """One exchange of a put."""
        owner = requests[0].owner
        scope = owner.scope.encode()
        keys = b"".join(request.name.key for request in requests)
        with self._lent(wire, call) as loan:
            lengths: list[int] = []
            sums: list[int] = []
            at = 0
            for one in requests:
                payload = payload_view(one.payload)
                seen = copy_checksum(loan.slot.memory[at:][: payload.nbytes], payload)
                lengths.append(payload.nbytes)
                sums.append(seen if one.payload_checksum is None else one.payload_checksum)
                at += step_of(payload.nbytes)
            writer = (owner.writer_id, len(scope))
            request = _request(
                form.NIXL_PUT, call.end, requests[0].name, len(requests), writer=writer
            )
            columns = [blocks.u64s(lengths), blocks.u64s(sums), scope]
            wire.write([request, keys, loan.offer, *columns])
            loan.is_left_alone = _answered(wire, len(requests))
            if not loan.is_left_alone:
                raise _NotMovedError(f"{call.peer.instance} does not reach our memory any more")
            statuses = blocks.put_statuses_from(wire.read(len(requests)))
        return [PutResult(status) for status in statuses]

    @contextlib.contextmanager
    def _lent(self, wire: form.Wire, call: "_Call") -> Iterator["_Loan"]:
        """A slot of ours for the store at the other end, while entered."""
        near = call.near
        acquaintance = self._introduced(wire, near, call.end)
        slot = near.staging.take(min(call.end, time.monotonic() + TAKE_S))
        offer = form.OFFER.pack(slot.number, slot.generation, near.base + slot.offset)
        loan = _Loan(call.peer, near, slot, offer, acquaintance)
        try:
            yield loan
        finally:
            if loan.is_left_alone:
                near.staging.give_back(slot)
            else:
                self._loop.call_soon_threadsafe(self._left, loan)

    # Slots that were left behind

    def _left(self, loan: "_Loan") -> None:
        if self._is_open:
            settling = asyncio.create_task(self._settled(loan))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)

    async def _settled(self, loan: "_Loan") -> None:
        """Give a slot back once the store has let go of it, or retire it."""
        for turn in range(SETTLE_TRIES):
            async with self._questions:
                end_s = time.monotonic() + SETTLE_S
                asking = partial(self._ending, loan=loan, end=end_s)
                try:
                    ending = await self._channel.call(loan.peer, end_s + ANSWER_S, asking)
                except KvtierError:
                    ending = form.Ending.RUNNING
            if ending is form.Ending.ENDED:
                loan.near.staging.give_back(loan.slot)
                return
            if ending is form.Ending.FAILED:
                break
            await asyncio.sleep(min(_PAUSE_S * 2**turn, _PAUSE_S_MAX))
        loan.near.staging.retire(loan.slot)

    def _ending(self, wire: form.Wire, loan: "_Loan", end: float) -> form.Ending:
        """What the store knows of a slot that it was offered. On a thread.

        A store that does not know us any more, as one that was started anew, knows nothing of what
        was sent before: FAILED.
        """
        if self._introduced(wire, loan.near, end) != loan.acquaintance:
            return form.Ending.FAILED
        wire.write([_request(form.NIXL_END, end), loan.offer])
        try:
            return form.Ending(wire.read(1)[0])
        except ValueError as error:
            raise BackendError("an ending that is none") from error


@dataclass(frozen=True, slots=True)
class _Call:
    """What all exchanges of a call have in common."""

    peer: PeerPlace
    near: _Near
    end: float


@dataclass(slots=True, eq=False)
class _Loan:
    """A slot that a store was offered."""

    peer: PeerPlace
    near: _Near
    slot: Slot
    offer: bytes
    acquaintance: bytes
    is_left_alone: bool = False
    """Whether the store has said that nothing moves there any more."""


def _request(
    op: int,
    end: float,
    name: FrameName | None = None,
    count: int = 1,
    payload_bytes: int = 0,
    writer: tuple[int, int] = (0, 0),
) -> bytes:
    left_s = max(0.001, end - time.monotonic())
    ms = min(STORE_DEADLINE_MS_MAX, max(1, int(1000 * left_s)))
    kind, key_bytes, codec, namespace = 0, 0, 0, bytes(32)
    if name is not None:
        kind, key_bytes = name.key_kind, len(name.key)
        codec, namespace = name.codec_id, name.namespace
    return form.REQUEST.pack(
        op, kind, key_bytes, 0, codec, count, ms, payload_bytes, namespace, *writer
    )


def _answered(wire: form.Wire, expected: int) -> bool:
    """Read an answer's head; whether the transfer has ended well."""
    is_clean, count = form.ANSWER.unpack(wire.read(form.ANSWER.size))
    if count != expected:
        raise BackendError(f"{count} blocks, {expected} were asked for")
    return bool(is_clean)


def _taken(request: GetRequest, raw: memoryview, source: memoryview) -> GetResult:
    """Copy a payload to where it belongs and check the copy."""
    target = memoryview(bytearray(source.nbytes)) if request.into is None else request.into
    if target.nbytes < source.nbytes:
        return GetResult(GetStatus.ERROR, reason="buffer_short")
    target = target.cast("B")[: source.nbytes]
    expected = FrameExpectation(request.name, request.payload_bytes)
    try:
        header = parse_header(raw)
        if header.name != request.name or header.payload_bytes != source.nbytes:
            verify_copied(raw, header.payload_bytes, header.payload_checksum, expected)
            return GetResult(GetStatus.ERROR, reason="header")
        verified = verify_copied(raw, source.nbytes, copy_checksum(target, source), expected)
    except FrameError as error:
        return failed_get(error)
    return GetResult(GetStatus.HIT, target, verified)


def _heard(task: asyncio.Task[None]) -> None:
    """Nobody need wait for a meeting that failed."""
    if not task.cancelled():
        task.exception()

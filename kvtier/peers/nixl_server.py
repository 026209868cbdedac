"""The store's end of NIXL: moves blocks between its staging memory and a slot of the caller's.

What it asks of the store it asks as the bulk channel does, and answers on that channel. Its own
memory is described to nobody: callers are written to and read from, and never come here.
What must not live here: who may call, what becomes of blocks.
"""

import hashlib
import itertools
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier.core.block_copy import copy_checksum
from kvtier.core.frame import FrameName
from kvtier.errors import CallerError, DeadlineError, KvtierError, LimitError, UnavailableError
from kvtier.peers import bulk_wire as form
from kvtier.peers.lending import Lent, Room
from kvtier.peers.nixl_agent import (
    DESCRIPTION_BYTES_MAX,
    Agent,
    AgentMaker,
    Direction,
    Exposure,
    State,
    Transfer,
    open_agent,
)
from kvtier.peers.staging import Slot, Staging, step_of
from kvtier.ports import BlockOwner, GetStatus, PutResult, PutStatus
from kvtier.wire import blocks

ACQUAINTANCES_MAX: Final = 64
"""Agents of callers that are known at once."""
GRACE_S: Final = 60.0
"""How long one whose connections are all gone stays known."""
LIMBO_S: Final = 30.0
"""After so long a transfer that nobody waits for is broken off."""
SLOTS_MAX: Final = 64
"""Of a caller."""
ANSWER_S: Final = 5.0
"""How long one answer may take to go."""
TAKE_S: Final = 0.5
"""How long one exchange waits for a slot of our own."""
_PROBE_BYTES: Final = 64
_PAUSES_S: Final = (0.0, 0.0, 0.00005, 0.0001, 0.0002, 0.0005, 0.001)

OnLoop = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True, slots=True)
class Offer:
    """A slot of the caller's."""

    slot: int
    generation: int
    address: int


@dataclass(slots=True, eq=False)
class _Acquaintance:
    """One agent that callers have described."""

    name: str
    token: bytes = field(default_factory=lambda: secrets.token_bytes(form.ACQUAINTANCE_BYTES))
    guests: int = 0
    left_at: float = 0.0
    active: dict[int, int] = field(default_factory=dict)
    """Generation by slot: what moves or may begin to."""
    failed: dict[int, int] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    """No generation below begins any more."""


@dataclass(frozen=True, slots=True)
class _Limbo:
    """A transfer that nobody waits for any more, and what it keeps."""

    transfer: Transfer
    acquaintance: _Acquaintance
    offer: Offer
    slot: Slot
    since: float


class NixlEnd:
    """See the module. Any thread may call it."""

    def __init__(self, reach: Exposure, maker: AgentMaker = open_agent) -> None:
        """Opens an agent, which takes seconds. ConfigError where NIXL is not installed."""
        self._agent: Agent = maker(f"kvtier-store-{secrets.token_hex(16)}", reach)
        self._staging = Staging()
        self._base = self._agent.register(self._staging.memory)
        self._known: OrderedDict[bytes, _Acquaintance] = OrderedDict()
        self._limbo: list[_Limbo] = []
        self._changed = threading.Condition()
        self._is_open = True

    @property
    def acquaintances(self) -> int:
        """Agents that are known."""
        return len(self._known)

    @property
    def unsettled(self) -> int:
        """Transfers past their time that still run."""
        return len(self._limbo)

    @property
    def slot_bytes(self) -> int:
        """Of one exchange, at most."""
        return self._staging.slot_bytes

    def guest(self) -> "Guest":
        """What one connection may do here; `leave` it."""
        return Guest(self)

    def stop(self) -> None:
        """Let every transfer that is waited for fail soon. Idempotent."""
        self._is_open = False

    def close(self) -> None:
        """End the agent, when no thread is here any more."""
        self.stop()
        self._agent.close()

    # For guests

    def met(self, description: bytes) -> _Acquaintance:
        """Know a caller's agent. CallerError where it says the name of another."""
        key = hashlib.sha256(description).digest()
        with self._changed:
            self._sweep()
            known = self._known.get(key)
            if known is None:
                if len(self._known) >= ACQUAINTANCES_MAX and not self._drop_one():
                    raise LimitError("too many agents")
                name = self._agent.meet(description)
                if any(one.name == name for one in self._known.values()):
                    raise CallerError("an agent's name that another one has")
                known = self._known[key] = _Acquaintance(name)
            self._known.move_to_end(key)
            known.guests += 1
            return known

    def left(self, known: _Acquaintance) -> None:
        with self._changed:
            known.guests -= 1
            known.left_at = time.monotonic()

    def begin(self, known: _Acquaintance, offer: Offer) -> None:
        """From here on the caller's slot may be written to. UnavailableError where it must not."""
        with self._changed:
            self._sweep()
            if offer.slot in known.active or offer.generation < known.fences.get(offer.slot, 0):
                raise UnavailableError("the slot is not offered any more")
            known.active[offer.slot] = offer.generation

    def end(self, known: _Acquaintance, offer: Offer, *, is_clean: bool) -> None:
        """The caller's slot is left alone from here on."""
        with self._changed:
            known.active.pop(offer.slot, None)
            if not is_clean:
                known.failed[offer.slot] = offer.generation
            self._changed.notify_all()

    def fence(self, known: _Acquaintance, offer: Offer, end: float) -> form.Ending:
        """Let nothing begin with the slot up to this generation, and wait for what has."""
        with self._changed:
            fence = known.fences.get(offer.slot, 0)
            known.fences[offer.slot] = max(fence, offer.generation + 1)
            while known.active.get(offer.slot, offer.generation + 1) <= offer.generation:
                left = end - time.monotonic()
                if left <= 0 or not self._is_open:
                    return form.Ending.RUNNING
                self._changed.wait(min(left, 0.02))
                self._sweep()
            is_failed = known.failed.get(offer.slot, 0) >= offer.generation
            return form.Ending.FAILED if is_failed else form.Ending.ENDED

    def slot(self, end: float) -> Slot:
        """Memory of our own for one exchange."""
        with self._changed:
            self._sweep()
        return self._staging.take(min(end, time.monotonic() + TAKE_S))

    def back(self, slot: Slot) -> None:
        self._staging.give_back(slot)

    def moved(
        self,
        known: _Acquaintance,
        direction: Direction,
        ends: tuple[Slot, Offer],
        size_bytes: int,
        end: float,
    ) -> bool:
        """Move bytes and wait for it; whether all have come.

        DeadlineError where that takes too long: then both slots belong to the transfer, and it is
        looked after here.
        """
        slot, offer = ends
        near = self._base + slot.offset
        try:
            transfer = self._agent.begin(direction, near, offer.address, size_bytes, known.name)
        except KvtierError:
            return False
        for turn in itertools.count():
            state = transfer.state()
            if state is not State.RUNNING:
                return state is State.DONE
            if time.monotonic() >= end or not self._is_open:
                break
            time.sleep(_PAUSES_S[min(turn, len(_PAUSES_S) - 1)])
        with self._changed:
            self._limbo.append(_Limbo(transfer, known, offer, slot, time.monotonic()))
        raise DeadlineError("the transfer takes too long")

    # With the lock

    def _sweep(self) -> None:
        """See which forgotten transfers have ended, and who has been gone for long."""
        now = time.monotonic()
        for one in tuple(self._limbo):
            state = one.transfer.state()
            if state is State.RUNNING and now >= one.since + LIMBO_S and one.transfer.give_up():
                state = one.transfer.state()
            if state is not State.RUNNING:
                self._limbo.remove(one)
                one.acquaintance.active.pop(one.offer.slot, None)
                if state is State.FAILED:
                    one.acquaintance.failed[one.offer.slot] = one.offer.generation
                self._staging.give_back(one.slot)
                self._changed.notify_all()
        for key, known in tuple(self._known.items()):
            if not known.guests and not known.active and now >= known.left_at + GRACE_S:
                self._forget(key)

    def _drop_one(self) -> bool:
        for key, known in self._known.items():
            if not known.guests and not known.active:
                self._forget(key)
                return True
        return False

    def _forget(self, key: bytes) -> None:
        known = self._known.pop(key)
        try:
            self._agent.forget(known.name)
        except KvtierError:
            return  # it was gone already


class Guest:
    """NIXL on one connection, by its thread."""

    def __init__(self, far: NixlEnd) -> None:
        self._far = far
        self._known: _Acquaintance | None = None

    def leave(self) -> None:
        """The connection has ended. Idempotent."""
        if self._known is not None:
            self._far.left(self._known)
            self._known = None

    def control(self, wire: form.Wire, op: int, description_bytes: int, end: float) -> None:
        """Meet, try or end."""
        if op == form.NIXL_MEET:
            self._meet(wire, description_bytes)
            return
        known, offer = self._met(), _offer(wire)
        if op == form.NIXL_END:
            answer = bytes([self._far.fence(known, offer, end)])
        else:
            with _Exchange(self._far, known, offer, end) as exchange:
                exchange.slot.memory[:_PROBE_BYTES] = bytes(_PROBE_BYTES)
                answer = form.ANSWER.pack(exchange.moved(Direction.WRITE, _PROBE_BYTES), 0)
        wire.until(time.monotonic() + ANSWER_S)
        wire.write([answer])

    def _meet(self, wire: form.Wire, description_bytes: int) -> None:
        """Get to know the caller's agent."""
        if not 0 < description_bytes <= DESCRIPTION_BYTES_MAX:
            raise LimitError("a description that cannot be")
        description = wire.read(description_bytes)
        self.leave()
        known = self._known = self._far.met(description)
        wire.until(time.monotonic() + ANSWER_S)
        wire.write([b"\1" + known.token])

    def give(
        self, wire: form.Wire, store_lend: Callable[[], Lent], on_loop: OnLoop, asked: "Asked"
    ) -> None:
        """Answer a get: the payloads first, then what they are."""
        known, offer = self._met(), _offer(wire)
        step = step_of(asked.payload_bytes)
        if not asked.payload_bytes or step * len(asked.names) > self._far.slot_bytes:
            raise LimitError("more than one exchange moves")
        with _Exchange(self._far, known, offer, asked.end) as exchange:
            lent = store_lend()
            hits = len(lent.payloads)
            try:
                for i, payload in enumerate(lent.payloads):
                    if payload.nbytes != asked.payload_bytes:
                        raise CallerError("a payload of another length")
                    into = exchange.slot.memory[i * step :][: payload.nbytes]
                    copy_checksum(into, payload)
                    # What was here before, of whomever, does not go along.
                    exchange.slot.memory[i * step + payload.nbytes : (i + 1) * step] = bytes(
                        step - payload.nbytes
                    )
            finally:
                valid = on_loop(lent.back())
            size_bytes = step * (hits - 1) + asked.payload_bytes if hits else 0
            is_clean = exchange.moved(Direction.WRITE, size_bytes)
        statuses, headers = lent.statuses, lent.headers
        if not is_clean:
            statuses, headers, valid = [GetStatus.ERROR] * len(statuses), b"", b""
        head = form.ANSWER.pack(is_clean, len(statuses))
        wire.until(time.monotonic() + ANSWER_S)
        wire.write([head, blocks.get_statuses(statuses), headers, valid])

    def take(
        self,
        wire: form.Wire,
        make_room: Callable[[Sequence[int], BlockOwner], Room],
        on_loop: OnLoop,
        asked: "Asked",
        writer: tuple[int, int],
    ) -> None:
        """Answer a put: read the payloads, publish them, and say what became of them."""
        known, offer = self._met(), _offer(wire)
        count = len(asked.names)
        lengths = blocks.lengths_from(wire.read(8 * count), count)
        declared = blocks.u64s_from("checksums", wire.read(8 * count), count)
        owner = BlockOwner(writer[0], blocks.scope_from(wire.read(writer[1]).decode()))
        size_bytes = sum(map(step_of, lengths))
        if size_bytes > self._far.slot_bytes:
            raise LimitError("more than one exchange moves")
        results: list[PutResult] = []
        with _Exchange(self._far, known, offer, asked.end) as exchange:
            is_clean = exchange.moved(Direction.READ, size_bytes)
            if is_clean:
                room = make_room(lengths, owner)
                is_settled = False
                try:
                    seen, at = [], 0
                    for view, length in zip(room.views, lengths, strict=True):
                        source = exchange.slot.memory[at:][:length]
                        seen.append(0 if view is None else copy_checksum(view, source))
                        at += step_of(length)
                    is_settled = True
                    results = on_loop(room.settle(seen, list(declared)))
                finally:
                    if not is_settled:
                        on_loop(room.abandon())
        statuses = [one.status for one in results] if is_clean else [PutStatus.ERROR] * count
        wire.until(time.monotonic() + ANSWER_S)
        wire.write([form.ANSWER.pack(is_clean, count), blocks.put_statuses(statuses)])

    def _met(self) -> _Acquaintance:
        if self._known is None:
            raise CallerError("who has not met us")
        return self._known


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as it was read."""

    names: Sequence[FrameName]
    payload_bytes: int
    end: float


class _Exchange:
    """A slot here and one there, while entered: left alone afterwards, or in limbo."""

    def __init__(self, far: NixlEnd, known: _Acquaintance, offer: Offer, end: float) -> None:
        self._far = far
        self._known = known
        self._offer = offer
        self._end = end
        self._is_clean = True
        self._is_ours = True

    def __enter__(self) -> "_Exchange":
        self.slot = self._far.slot(self._end)
        try:
            self._far.begin(self._known, self._offer)
        except BaseException:
            self._far.back(self.slot)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self._far.back(self.slot)
            self._far.end(self._known, self._offer, is_clean=self._is_clean)

    def moved(self, direction: Direction, size_bytes: int) -> bool:
        """See `NixlEnd.moved`; nothing to move has been moved."""
        if not size_bytes:
            return True
        try:
            ends = (self.slot, self._offer)
            self._is_clean = self._far.moved(self._known, direction, ends, size_bytes, self._end)
        except DeadlineError:
            self._is_ours = False
            raise
        return self._is_clean


def _offer(wire: form.Wire) -> Offer:
    slot, generation, address = form.OFFER.unpack(wire.read(form.OFFER.size))
    if slot >= SLOTS_MAX:
        raise LimitError("a slot that cannot be")
    return Offer(slot, generation, address)

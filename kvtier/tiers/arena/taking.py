"""The puts of one session, as the store takes them: announced, copied into slots, published.

A client announces a part of a put by its names, so that slots are taken while it stages the
payloads; those come through the ring of its segment (`kvtier.tiers.arena.ring`) or stand elsewhere
in it. The store copies as they come, verifies over its copy, publishes a part as a whole and
answers. A client that is slow makes nobody wait: the taker goes to sleep and is told to go on by a
message. One that stands still gives its slots back after a while: what had come whole is published
then, the block in the middle is lost, the others take new slots when they come after all.
What must not live here: sockets, reservations and leases of other kinds.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeAlias

from kvtier.errors import CallerError
from kvtier.ports import Clock, PutResult
from kvtier.tiers.arena.directory import NOWHERE
from kvtier.tiers.arena.holdings import Answer, Place, Prepared, Reservation, Wanted
from kvtier.tiers.arena.messages import BlockToCommit
from kvtier.tiers.arena.ring import RingStatus, Taker, new_taker
from kvtier.tiers.arena.tier import ArenaTier

PUT_S = 5.0
"""How long slots are kept for blocks that a client announced and does not hand over."""
_PUTS_MAX = 16
"""Announced and not answered, of one session."""
_IDLE_US = 100
"""How long bytes that are about to come are waited for, rather than sleep and be woken."""
_SLICE_BYTES = 8 << 20
"""Copied before others have their turn."""


Answering: TypeAlias = Callable[[int, list[PutResult]], None]


@dataclass(slots=True, eq=False)
class _Incoming:
    """One announced part of a put. Nobody but the store writes its slots."""

    tag: int
    blocks: list[BlockToCommit]
    prepared: Prepared | None
    """None: they could not be prepared as one, or were given up since."""
    places: Sequence[Place]
    expires_s: float
    seen: list[int] = field(default_factory=list)
    declared: list[int | None] = field(default_factory=list)
    settled: list[PutResult] = field(default_factory=list)
    """Of those that had come when it was given up."""

    @property
    def at(self) -> int:
        """The next block to come."""
        return len(self.seen)

    @property
    def is_whole(self) -> bool:
        return len(self.seen) == len(self.blocks)


class Intake:
    """What one session puts. Made, used and closed on the tier's thread."""

    def __init__(self, tier: ArenaTier, segment: memoryview, ring_bytes: int, clock: Clock) -> None:
        """CallerError for a ring that cannot be."""
        self._tier = tier
        self._segment = segment
        self._clock = clock
        self._puts: deque[_Incoming] = deque()
        self._taker: Taker | None = None
        if ring_bytes:
            try:
                self._taker = new_taker(ring_bytes)
                self._taker.take(segment, bytearray(), (), 0, _SLICE_BYTES, 0)
            except (ValueError, TypeError) as error:
                raise CallerError(f"ring_bytes: {error}") from error

    @property
    def reservations_count(self) -> int:
        """Slots that are taken for blocks that are still to be published."""
        return sum(isinstance(place, Reservation) for put in self._puts for place in put.places)

    def begin(self, tag: int, blocks: list[BlockToCommit], reservations_left: int) -> None:
        """Take slots for blocks that are going to come.

        CallerError for a tag that is in use, too many such puts, and what is outside the segment.
        """
        in_use = any(put.tag == tag for put in self._puts)
        if in_use or len(self._puts) >= _PUTS_MAX or not blocks:
            raise CallerError("a put that may not begin")
        standing = [block for block in blocks if block.segment_offset != NOWHERE]
        in_segment(self._segment, standing)
        if self._taker is None and len(standing) < len(blocks):
            raise CallerError("a block through a ring that is not there")
        prepared = None
        places: Sequence[Place] = ()
        if len(blocks) <= reservations_left:  # else they take slots when they have come
            wanted = _wanted(blocks)
            prepared = self._tier.prepare(wanted)
            places = self._tier.begin(wanted) if prepared is None else prepared.reservations
        expires_s = self._clock() + PUT_S
        self._puts.append(_Incoming(tag, blocks, prepared, places, expires_s))

    @property
    def is_expecting(self) -> bool:
        """Whether anything was announced that has not come."""
        return bool(self._puts)

    async def advance(self, answer: Answering) -> None:
        """Take what has come, waiting for nothing that does not come at once.

        `answer` gets the tag and the results of each put that is whole, as soon as readers can find
        its blocks; it must not raise. CallerError for a ring that is broken: nothing more can be
        taken of this session.
        """
        while self._puts:
            put = self._puts[0]
            put.expires_s = inf  # slots that are being written are nobody else's
            try:
                while not put.is_whole and await self._advance(put):
                    pass
            finally:
                put.expires_s = self._clock() + PUT_S
            if not put.is_whole:
                return
            self._puts.popleft()
            self._publish(put, partial(answer, put.tag))

    def expire(self, now: float) -> int:
        """Give up puts that stand still for too long; how many slots that freed."""
        freed = 0
        for put in self._puts:
            if put.expires_s <= now:
                put.expires_s = inf
                freed += self._give_up(put)
        return freed

    def close(self) -> None:
        """Free everything. Idempotent."""
        for put in self._puts:
            self._tier.abort([place for place in put.places if isinstance(place, Reservation)])
        self._puts.clear()

    async def _advance(self, put: _Incoming) -> bool:
        """Take the next blocks; whether there may be more at once."""
        if len(put.places) < len(put.blocks):
            put.places = [*put.places, *self._tier.begin(_wanted(put.blocks[len(put.places) :]))]
        begin = end = put.at
        through_ring = put.blocks[begin].segment_offset == NOWHERE
        while end < len(put.blocks) and through_ring == (put.blocks[end].segment_offset == NOWHERE):
            end += 1
        if through_ring:
            return await self._take(put, begin, end)
        await self._copy(put, begin, end)
        return True

    async def _copy(self, put: _Incoming, begin: int, end: int) -> None:
        """Blocks that stand in the segment."""
        payloads = in_segment(self._segment, put.blocks[begin:end])
        seen = await self._tier.fill(put.places[begin:end], payloads)
        put.seen += seen
        put.declared += [block.payload_checksum for block in put.blocks[begin:end]]

    async def _take(self, put: _Incoming, begin: int, end: int) -> bool:
        """Blocks that come through the ring."""
        assert self._taker is not None
        places: list[int] = []
        for block, place in zip(put.blocks[begin:end], put.places[begin:end], strict=True):
            offset = place.slot.offset if isinstance(place, Reservation) else NOWHERE
            places += (offset, block.wanted.payload_bytes)
        slots = self._tier.slots_memory.view
        taken, status = take(self._taker, self._segment, slots, places, put.tag)
        words = memoryview(taken).cast("Q").tolist()
        put.seen += words[::2]
        for block, seen, staged in zip(
            put.blocks[begin:end], words[::2], words[1::2], strict=False
        ):
            own = block.payload_checksum
            put.declared.append(own if own is not None and staged == seen else staged)
        if status == RingStatus.BROKEN:
            raise CallerError("the ring is broken")
        if status == RingStatus.SLICE:
            await asyncio.sleep(0)
        return status != RingStatus.WAITING

    def _publish(self, put: _Incoming, answer: Answer) -> None:
        if put.prepared is not None:
            self._tier.publish_filled(put.prepared, put.seen, put.declared, answer)
            return
        done = len(put.settled)
        rest = self._tier.settle(
            _wanted(put.blocks[done:]), put.places[done:], put.seen[done:], put.declared[done:]
        )
        answer(put.settled + rest)

    def _give_up(self, put: _Incoming) -> int:
        """Publish what has come whole, free the slots of the rest. The block in the middle is lost:
        what is left of it goes nowhere."""
        done, at = len(put.settled), put.at
        put.settled += self._tier.settle(
            _wanted(put.blocks[done:at]), put.places[done:at], put.seen[done:], put.declared[done:]
        )
        lost = [place for place in put.places[at:] if isinstance(place, Reservation)]
        self._tier.abort(lost)
        put.prepared = None
        cut = self._taker is not None and not self._taker.is_between and put is self._puts[0]
        put.places = [*put.places[:at], *([None] if cut else [])]
        return len(lost)


def take(
    taker: Taker, segment: memoryview, slots: memoryview, places: list[int], label: int
) -> tuple[bytes, int]:
    """One step of taking payloads: see `Taker.take`."""
    return taker.take(segment, slots, places, label, _SLICE_BYTES, _IDLE_US)


def in_segment(segment: memoryview, blocks: Sequence[BlockToCommit]) -> list[memoryview]:
    """The payloads of blocks that stand in a segment. CallerError for one that is outside."""
    limit = segment.nbytes
    places = [
        (block.segment_offset, block.segment_offset + block.wanted.payload_bytes)
        for block in blocks
    ]
    if any(end > limit for _, end in places):
        raise CallerError("a block to commit is outside its segment")
    return [segment[start:end] for start, end in places]


def _wanted(blocks: Sequence[BlockToCommit]) -> list[Wanted]:
    return [block.wanted for block in blocks]

"""One `put_many` of an arena's client: through the ring of its segment, which the store empties.

A part is announced with its names first, so that the store takes slots while the first payloads are
staged; from then on both copy at the same time, and no message passes unless the store has gone to
sleep. One answer a part. What already stands in the segment is not copied by this side at all.

What must not live here: the connection, reads, deadlines of anything else.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.errors import DeadlineError, UnavailableError
from kvtier.ports import PutRequest, PutResult, PutStatus, Refusal
from kvtier.tiers.arena import messages
from kvtier.tiers.arena.directory import NOWHERE

_PART_BYTES: Final = 64 << 20
"""Of blocks that are announced and answered together."""
_PART_SHARE: Final = 8
"""Of the arena a part takes at most one of so many: its slots are taken before it has come."""
_PART_BLOCKS: Final = 128
_PARTS_MAX: Final = 8
"""Handed over and not answered."""


class PutChannel(Protocol):
    """What a put needs of its client, under whose lock it runs. Errors as `ArenaClient.send`."""

    @property
    def ring_bytes(self) -> int: ...

    @property
    def arena_bytes(self) -> int: ...

    def places_in_segment(self, payloads: Sequence[memoryview]) -> list[int]: ...

    def give(self, payloads: Sequence[memoryview], tag: int, deadline_s: float) -> None: ...

    def new_tag(self) -> int: ...

    def send(self, message: bytes, deadline_s: float) -> None: ...

    def receive(self, deadline_s: float) -> tuple[int, int, bytes]: ...


@dataclass(slots=True)
class _Part:
    """Blocks that were handed over and are not answered yet."""

    tag: int
    positions: range


class Put:
    """One `put_many`. `run` it once, under the client's lock."""

    def __init__(
        self,
        channel: PutChannel,
        requests: Sequence[PutRequest],
        payloads: Sequence[memoryview],
        deadline_s: float,
    ) -> None:
        self._channel = channel
        self._deadline_s = deadline_s
        self._results: list[PutResult | None] = [None] * len(requests)
        self._places = channel.places_in_segment(payloads)
        self._at_request: Sequence[int] = range(len(requests))
        """Which request each block is of that is put at all."""
        self._requests, self._payloads = requests, payloads
        if not channel.ring_bytes:
            self._leave_out([i for i in self._at_request if self._places[i] == NOWHERE])
        self._sizes = [payload.nbytes for payload in self._payloads]
        self._part_bytes = min(_PART_BYTES, channel.arena_bytes // _PART_SHARE)
        self._handed: deque[_Part] = deque()

    def run(self) -> list[PutResult]:
        """Hand over part by part, and collect the answers."""
        rest = PutResult(PutStatus.TIMEOUT)
        try:
            begin = 0
            while begin < len(self._requests):
                end = self._part_from(begin)
                self._hand_over(range(begin, end))
                begin = end
                if len(self._handed) == _PARTS_MAX:
                    self._collect()
            while self._handed:
                self._collect()
        except DeadlineError:
            rest = PutResult(PutStatus.TIMEOUT)
        except UnavailableError:
            rest = PutResult(PutStatus.ERROR, "unavailable")
        return [rest if one is None else one for one in self._results]

    def _leave_out(self, positions: Sequence[int]) -> None:
        """Refuse blocks that there is no way for."""
        for i in positions:
            self._results[i] = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
        kept = [i for i in self._at_request if self._results[i] is None]
        self._at_request = kept
        self._requests = [self._requests[i] for i in kept]
        self._payloads = [self._payloads[i] for i in kept]
        self._places = [self._places[i] for i in kept]

    def _part_from(self, begin: int) -> int:
        """Where a part ends that begins there; at least one block."""
        at, taken = begin + 1, self._sizes[begin]
        while at < len(self._sizes) and at - begin < _PART_BLOCKS:
            taken += self._sizes[at]
            if taken > self._part_bytes:
                break
            at += 1
        return at

    def _hand_over(self, part: range) -> None:
        span = slice(part.start, part.stop)
        tag = self._channel.new_tag()
        places = self._places[span]
        begin = messages.pack_begin(tag, self._requests[span], places, self._sizes[span])
        self._channel.send(begin, self._deadline_s)
        self._handed.append(_Part(tag, part))
        payloads = self._payloads[span]
        if places.count(NOWHERE) < len(places):
            payloads = [
                one for one, place in zip(payloads, places, strict=True) if place == NOWHERE
            ]
        self._channel.give(payloads, tag, self._deadline_s)

    def _collect(self) -> None:
        part = self._handed.popleft()
        tag, count, body = self._channel.receive(self._deadline_s)
        if (tag, count) != (part.tag, len(part.positions)):
            raise UnavailableError("the arena answered something else")
        for i, result in zip(part.positions, messages.parse_results(count, body), strict=True):
            self._results[self._at_request[i]] = result

"""One `put_many` of an arena's client: staged in the segment while the store takes it out again.

A part is announced with its names first, so that the store can take slots while the first payloads
are copied into the segment; then it is told, a few blocks at a time, what stands there, and copies
that while the next is staged. One answer a part. What already stands in the segment is not copied.

What must not live here: the connection, reads, deadlines of anything else.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtier.errors import DeadlineError, UnavailableError
from kvtier.ports import PutRequest, PutResult, PutStatus, Refusal
from kvtier.tiers.arena import messages

_PART_BYTES: Final = 8 << 20
"""Of blocks that are announced and answered together; of their staging area two are in use."""
_PART_BLOCKS: Final = 64
_STEP_BYTES: Final = 2 << 20
"""Of blocks that the store is told of together: it copies them while the next are staged. As many
as keep it busy: smaller ones cost it more messages, larger ones let it sleep in between."""
_STEP_BLOCKS: Final = 24
_TAIL: Final = 4
"""At most a fourth of a step is no step of its own."""
_ALIGNMENT: Final = 64


class PutChannel(Protocol):
    """What a put needs of its client, under whose lock it runs. Errors as `ArenaClient.send`."""

    @property
    def staging_bytes(self) -> int: ...

    def offsets_in_segment(self, payloads: Sequence[memoryview]) -> list[int | None]: ...

    def stage(self, payloads: Sequence[memoryview], offsets: Sequence[int]) -> list[int]: ...

    def new_tag(self) -> int: ...

    def send(self, message: bytes, deadline_s: float) -> None: ...

    def receive(self, deadline_s: float) -> tuple[int, int, bytes]: ...


@dataclass(slots=True)
class _Part:
    """Blocks that were handed over and are not answered yet; their part of the staging area."""

    tag: int
    positions: range
    start: int
    end: int


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
        staging = channel.staging_bytes
        places = channel.offsets_in_segment(payloads)
        sizes = [payload.nbytes for payload in payloads]
        self._at_request: Sequence[int] = range(len(requests))
        """Which request each block is of that is put at all."""
        self._requests, self._payloads, self._places = requests, payloads, places
        if max(sizes, default=0) > staging:
            kept = [i for i in self._at_request if self._fits(i, places, payloads)]
            self._at_request, sizes = kept, [sizes[i] for i in kept]
            self._requests = [requests[i] for i in kept]
            self._payloads = [payloads[i] for i in kept]
            self._places = [places[i] for i in kept]
        self._sizes = sizes
        self._aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        """What each takes of the staging area, unless it is in the segment already."""
        self._part_bytes = min(_PART_BYTES, staging // 2)
        self._handed: deque[_Part] = deque()
        self._at = 0

    def run(self) -> list[PutResult]:
        """Hand over part by part, and collect the answers."""
        rest = PutResult(PutStatus.TIMEOUT)
        try:
            begin = 0
            while begin < len(self._requests):
                end = self._run_of(begin, len(self._requests), self._part_bytes, _PART_BLOCKS)
                self._hand_over(range(begin, end))
                begin = end
            while self._handed:
                self._collect()
        except DeadlineError:
            rest = PutResult(PutStatus.TIMEOUT)
        except UnavailableError:
            rest = PutResult(PutStatus.ERROR, "unavailable")
        return [rest if one is None else one for one in self._results]

    def _fits(self, i: int, places: Sequence[int | None], payloads: Sequence[memoryview]) -> bool:
        if places[i] is None and payloads[i].nbytes > self._channel.staging_bytes:
            self._results[i] = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)
            return False
        return True

    def _run_of(self, begin: int, end: int, bytes_max: int, blocks_max: int) -> int:
        """Where a run of blocks from `begin` ends that keeps to both; at least one block."""
        at, taken = begin + 1, self._aligned[begin]
        while at < end and at - begin < blocks_max:
            taken += self._aligned[at]
            if taken > bytes_max:
                break
            at += 1
        return at

    def _hand_over(self, part: range) -> None:
        aligned, places = self._aligned, self._places
        staged = [i for i in part if places[i] is None]
        start, end = self._room(sum([aligned[i] for i in staged]))
        offsets = [place or 0 for place in places[part.start : part.stop]]
        starts = itertools.accumulate([aligned[i] for i in staged], initial=start)
        for i, at in zip(staged, starts, strict=False):
            offsets[i - part.start] = at
        tag = self._channel.new_tag()
        span = slice(part.start, part.stop)
        requests, sizes = self._requests[span], self._sizes[span]
        begin = messages.pack_begin(tag, requests, offsets, sizes)
        self._channel.send(begin, self._deadline_s)
        self._handed.append(_Part(tag, part, start, end))
        for step in self._steps(part):
            checksums = self._stage(step, offsets[step.start - part.start : step.stop - part.start])
            self._channel.send(messages.pack_ready(tag, checksums), self._deadline_s)

    def _steps(self, part: range) -> Iterator[range]:
        begin, end = part.start, part.stop
        while begin < end:
            at = self._run_of(begin, end, _STEP_BYTES, _STEP_BLOCKS)
            left = sum(self._aligned[at:end])
            if _TAIL * left <= _STEP_BYTES and _TAIL * (end - at) <= _STEP_BLOCKS:
                at = end
            yield range(begin, at)
            begin = at

    def _stage(self, step: range, offsets: Sequence[int]) -> list[int | None]:
        """Copy what is not in the segment yet; what the writer says that the checksums are."""
        checksums: list[int | None] = [
            request.payload_checksum for request in self._requests[step.start : step.stop]
        ]
        staged = [i for i in step if self._places[i] is None]
        if staged:
            seen = self._channel.stage(
                [self._payloads[i] for i in staged], [offsets[i - step.start] for i in staged]
            )
            for i, one in zip(staged, seen, strict=True):
                if checksums[i - step.start] is None:
                    checksums[i - step.start] = one
        return checksums

    def _room(self, need: int) -> tuple[int, int]:
        """A part of the staging area that the store is done with."""
        if self._at + need > min(self._channel.staging_bytes, 2 * max(self._part_bytes, need)):
            self._at = 0
        start, end = self._at, self._at + need
        while any(part.start < end and start < part.end for part in self._handed):
            self._collect()
        self._at = end
        return start, end

    def _collect(self) -> None:
        part = self._handed.popleft()
        tag, count, body = self._channel.receive(self._deadline_s)
        if (tag, count) != (part.tag, len(part.positions)):
            raise UnavailableError("the arena answered something else")
        for i, result in zip(part.positions, messages.parse_results(count, body), strict=True):
            self._results[self._at_request[i]] = result

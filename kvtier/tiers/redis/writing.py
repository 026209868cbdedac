"""One batch of puts as rounds of commands: look who was first, send what is missing. Sans-I/O.

A round asks for the header of every block that is still open (GETRANGE 0 127, so that what another
node put already is not sent again), then sends the missing ones by SET NX. Where NX says that
somebody was faster, the next round finds whose it is.

What must not live here: sockets, deadlines, deletion of bad copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.checksum import checksum
from kvtier.core.frame import HEADER_BYTES, FrameHeader, parse_header
from kvtier.errors import FrameError, FrameFault
from kvtier.ports import PutRequest, PutResult, PutStatus, Refusal
from kvtier.tiers.redis.connection import Argument, Command
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.replies import ErrorReply, Reply
from kvtier.tiers.redis.troubles import WRONG_TYPE, classify, code_of, refused_put
from kvtier.tiers.redis.values import encode_scope, surround, value_bytes
from kvtier.tiers.tally import payload_view

_HEADER_END: Final = b"%d" % (HEADER_BYTES - 1)


@dataclass(slots=True)
class _Put:
    request: PutRequest
    payload: memoryview
    header: FrameHeader
    scope: bytes
    key: bytes
    was_beaten: bool = False
    """NX said that something stands at the key."""

    @property
    def value_bytes(self) -> int:
        return value_bytes(self.payload.nbytes, self.scope)

    def judge(self, reply: Reply) -> tuple[PutResult | None, FrameFault | None]:
        """What the header that is stored says: the outcome, or the fault; neither if absent."""
        if isinstance(reply, ErrorReply):
            if code_of(reply) == WRONG_TYPE:
                return None, FrameFault.MAGIC
            return refused_put(classify(reply)), None
        if not isinstance(reply, bytes) or not reply:
            # GETRANGE tells an empty string and nothing at all alike.
            return None, FrameFault.SHORT if self.was_beaten else None
        try:
            first = parse_header(reply)
        except FrameError as error:
            return None, error.fault
        if first.name != self.request.name:
            return None, FrameFault.KEY
        offered = (self.header.payload_bytes, self.header.payload_checksum)
        same = (first.payload_bytes, first.payload_checksum) == offered
        return PutResult(PutStatus.DUPLICATE if same else PutStatus.DIVERGENT), None


@dataclass(slots=True)
class PutBatch:
    """The puts of one call and what became of them. Holds the caller's payloads until it ends."""

    puts: list[_Put]
    results: list[PutResult | None]
    expiry: tuple[Argument, ...]
    bad: list[tuple[int, FrameFault]] = field(default_factory=list)
    """Found by the last probes: what stands at these keys is no copy of the block, it seems."""

    @property
    def open(self) -> list[int]:
        """Puts that have no outcome yet."""
        return [i for i, result in enumerate(self.results) if result is None]

    def refuse_longer_than(self, bytes_max: int) -> None:
        """Give up what the server would cut the connection for. Mutates."""
        for i in self.open:
            if self.puts[i].value_bytes > bytes_max:
                self.results[i] = PutResult(PutStatus.REFUSED, Refusal.TOO_LONG)

    def probes(self) -> tuple[list[int], list[Command]]:
        """Ask what is stored."""
        commands = [Command((b"GETRANGE", self.puts[i].key, b"0", _HEADER_END)) for i in self.open]
        return self.open, commands

    def take_probes(self, asked: Sequence[int], replies: Sequence[Reply]) -> None:
        """Settle what is there already. Mutates."""
        self.bad = []
        for i, reply in zip(asked, replies, strict=False):
            put = self.puts[i]
            self.results[i], fault = put.judge(reply)
            if fault is not None:
                self.bad.append((i, fault))

    def sets(self) -> tuple[list[int], list[Command]]:
        """Send what is missing."""
        return self.open, [self._set(self.puts[i]) for i in self.open]

    def take_sets(self, asked: Sequence[int], replies: Sequence[Reply]) -> None:
        """Settle what was stored or refused; what somebody else put first stays open. Mutates."""
        for i, reply in zip(asked, replies, strict=False):
            if reply == b"OK":
                self.results[i] = PutResult(PutStatus.STORED)
            elif reply is None:
                self.puts[i].was_beaten = True
            elif isinstance(reply, ErrorReply):
                self.results[i] = refused_put(classify(reply))

    def settle(self, result: PutResult) -> None:
        """Give everything that is open this outcome. Mutates."""
        for i in self.open:
            self.results[i] = result

    def done(self) -> list[PutResult]:
        """The outcomes, in order of the requests; all must be settled."""
        results = [result for result in self.results if result is not None]
        assert len(results) == len(self.puts)
        return results

    def _set(self, put: _Put) -> Command:
        head, tail = surround(put.header, put.scope)
        value = (head, put.payload, tail)
        arguments = (b"SET", put.key, value, b"NX", *self.expiry)
        return Command(arguments, cost_bytes=put.value_bytes)


def put_batch(requests: Sequence[PutRequest], ttl_s: float | None) -> PutBatch:
    """Check and hash the payloads of a call. Raises CallerError; O(payload bytes)."""
    views = [payload_view(request.payload) for request in requests]
    scopes = [encode_scope(request.owner.scope) for request in requests]
    puts, results = [], []
    for request, payload, scope in zip(requests, views, scopes, strict=True):
        offered = checksum(payload)
        header = FrameHeader(request.name, request.owner.writer_id, payload.nbytes, offered)
        puts.append(_Put(request, payload, header, scope, block_key(request.name)))
        declared = request.payload_checksum
        is_right = declared is None or declared == offered
        results.append(None if is_right else PutResult(PutStatus.CORRUPT))
    expiry = () if ttl_s is None else (b"PX", b"%d" % max(1, round(ttl_s * 1000)))
    return PutBatch(puts, results, expiry)

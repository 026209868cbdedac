"""Payloads as chunks: what a Put stream sends is gathered here, what a Get stream says is cut here.

Bounded by what was declared and checked before: memory is taken block by block, and many tiny
chunks are refused. What must not live here: gRPC, the store.
"""

from collections.abc import Iterator, Sequence

from kvtier.core.frame import encode_header
from kvtier.errors import CallerError
from kvtier.limits import STORE_CHUNK_BYTES_MAX, STORE_CHUNK_BYTES_MIN
from kvtier.ports import GetResult
from kvtier.wire import blocks
from kvtier.wire import messages as pb


class Gatherer:
    """Takes the data of a stream in order and fills one buffer after the other."""

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of all payloads that were declared."""
        self._total_bytes = total_bytes
        self._taken = 0
        self._rest = memoryview(b"")

    @property
    def is_whole(self) -> bool:
        """Whether all that was declared has come."""
        return self._taken == self._total_bytes

    def add(self, data: bytes) -> None:
        """Take the next message; the one before must be used up.

        CallerError for more than was declared, and for a chunk too small to be worth a message.
        """
        assert not self._rest, "a message is taken while the one before is not used up"
        self._taken += len(data)
        if self._taken > self._total_bytes:
            raise CallerError("data: more than was declared")
        if len(data) < STORE_CHUNK_BYTES_MIN and not self.is_whole:
            raise CallerError(f"data: {len(data)} bytes in a chunk, want {STORE_CHUNK_BYTES_MIN}")
        self._rest = memoryview(data)

    def fill(self, target: memoryview | None, length: int, filled: int) -> int:
        """Move what is there into a block; returns how much of the block is filled then."""
        taken = min(length - filled, len(self._rest))
        if target is not None and taken:
            target[filled : filled + taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return filled + taken


def cut(results: Sequence[GetResult], *, framed: bool = False) -> Iterator[pb.GetBlocksResponse]:
    """The messages that say what became of some blocks, with their payloads."""
    hits = [result for result in results if result.is_hit]
    headers = [result.header for result in hits if result.header is not None]
    message = pb.GetBlocksResponse(
        statuses=blocks.get_statuses(result.status for result in results),
        lengths=blocks.u64s(header.payload_bytes for header in headers),
        checksums=blocks.u64s(header.payload_checksum for header in headers),
        writer_ids=blocks.u64s(header.writer_id for header in headers),
        headers=b"".join(map(encode_header, headers)) if framed else b"",
    )
    pending: list[memoryview] = []
    pending_bytes = 0
    for hit in hits:
        assert hit.payload is not None
        at = 0
        while at < hit.payload.nbytes:
            part = hit.payload[at : at + STORE_CHUNK_BYTES_MAX - pending_bytes]
            pending.append(part)
            pending_bytes += part.nbytes
            at += part.nbytes
            if pending_bytes == STORE_CHUNK_BYTES_MAX:
                message.data = b"".join(pending)
                yield message
                message, pending, pending_bytes = pb.GetBlocksResponse(), [], 0
    if pending or message.statuses:
        message.data = b"".join(pending)
        yield message

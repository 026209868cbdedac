"""What every tier counts, and the checks that every tier makes of its arguments.

What must not live here: anything of one backend.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.core.frame import FrameHeader, FrameName
from kvtier.errors import CallerError, FrameError, FrameFault, LimitError, UnavailableError
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.ports import (
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    RemovalCause,
    Selection,
    TierStats,
)
from kvtier.types import BytesLike, ScopeId


@dataclass(frozen=True, slots=True)
class Holding:
    """What a tier holds now: the part of `TierStats` that is not counted here."""

    blocks: int
    bytes: int
    bytes_max: int
    blocks_pinned: int = 0
    blocks_reserved: int = 0


@dataclass(slots=True)
class Tally:
    """Counters of one tier since it was opened; `stats` makes a snapshot of them."""

    gets: Counter[GetStatus] = field(default_factory=Counter)
    puts: Counter[PutStatus] = field(default_factory=Counter)
    removals: Counter[RemovalCause] = field(default_factory=Counter)
    corrupt: Counter[FrameFault] = field(default_factory=Counter)
    payload_bytes_read: int = 0
    payload_bytes_written: int = 0

    def count_gets(self, results: Iterable[GetResult]) -> None:
        """Count the outcomes of one call; faults are counted where they are found."""
        for result in results:
            self.gets[result.status] += 1
            if result.payload is not None:
                self.payload_bytes_read += result.payload.nbytes

    def count_puts(self, requests: Sequence[PutRequest], results: Sequence[PutResult]) -> None:
        """Count the outcomes of one call."""
        for request, result in zip(requests, results, strict=True):
            self.puts[result.status] += 1
            if result.status is PutStatus.STORED:
                self.payload_bytes_written += payload_view(request.payload).nbytes

    def stats(self, holding: Holding) -> TierStats:
        """The counters with what is held now; later counts do not change it."""
        return TierStats(
            blocks=holding.blocks,
            bytes=holding.bytes,
            bytes_max=holding.bytes_max,
            blocks_pinned=holding.blocks_pinned,
            blocks_reserved=holding.blocks_reserved,
            gets=dict(self.gets),
            puts=dict(self.puts),
            removals=dict(self.removals),
            corrupt=dict(self.corrupt),
            payload_bytes_read=self.payload_bytes_read,
            payload_bytes_written=self.payload_bytes_written,
        )


def payload_view(payload: BytesLike) -> memoryview:
    """The payload as a flat view of bytes. Raises CallerError for what cannot be put."""
    try:
        view = memoryview(payload)  # type: ignore[arg-type]
        flat = memoryview(b"") if view.c_contiguous and not view.nbytes else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise CallerError(f"payload is not a contiguous buffer of a plain type: {error}") from error
    if flat.nbytes > PAYLOAD_BYTES_MAX:
        raise LimitError(f"payload of {flat.nbytes} bytes exceeds {PAYLOAD_BYTES_MAX}")
    return flat


def require_open(is_open: bool) -> None:
    """Raise UnavailableError once the tier was closed."""
    if not is_open:
        raise UnavailableError("the tier is closed")


def fitting(request: GetRequest, header: FrameHeader) -> memoryview | None:
    """The memory for a payload of `header`'s length: of the caller's, or fresh.

    None where the caller's is too small. Nothing is written yet. The header must be checked first.
    """
    if request.into is None:
        return memoryview(bytearray(header.payload_bytes))
    into = request.into
    if into.nbytes < header.payload_bytes:
        return None
    return into.cast("B")[: header.payload_bytes] if into.nbytes else memoryview(bytearray())


def failed_get(error: FrameError) -> GetResult:
    """The outcome of a frame that is not what was asked for.

    One of another release is a plain miss: an upgrade is no corruption.
    """
    if error.fault is FrameFault.VERSION:
        return GetResult(GetStatus.MISS)
    return GetResult(GetStatus.CORRUPT, reason=error.fault.value)


def is_selected(selection: Selection, name: FrameName, writer_id: int, scope: ScopeId) -> bool:
    """Whether a block with this name, writer and scope is one of the selection's."""
    match selection:
        case ByNames():
            return name in selection.names
        case ByNamespace():
            return name.namespace == selection.namespace
        case ByWriter():
            return writer_id == selection.writer_id
        case ByScope():
            return scope == selection.scope

"""Values of `kvtier.ports` made of parts that were checked, for loops over the blocks of a batch.

A frozen class sets its fields through `object.__setattr__` and checks them again: of a batched put
or get through shared memory that was a fifth. Setters of the slots do without, and what comes out
is the same value. What must not live here: anything that has not been checked.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvtier import _native
from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameHeader, FrameName
from kvtier.ports import (
    NO_SCOPE,
    BlockOwner,
    GetRequest,
    GetResult,
    GetStatus,
    PutRequest,
)
from kvtier.types import BytesLike, ScopeId

T = TypeVar("T")

minted: Final = _native.instances
"""`minted(kind, columns, count)`: instances of a class with slots, made in one call, not checked.

One column a slot, in their order: a list has one value for each instance, anything else is what all
have. ValueError or TypeError for columns that do not fit the class.
"""


def pure_minted(kind: type[T], columns: tuple[object, ...], count: int) -> list[T]:
    """Twin of `minted`."""
    setters = _setters(kind)
    if len(setters) != len(columns):
        raise ValueError(f"columns: {len(columns)} for {len(setters)} slots")
    if any(isinstance(column, list) and len(column) != count for column in columns):
        raise ValueError("columns: one has not as many values as there are instances")
    made = [object.__new__(kind) for _ in range(count)]
    for set_field, column in zip(setters, columns, strict=True):
        for i, one in enumerate(made):
            set_field(one, column[i] if isinstance(column, list) else column)
    return made


def _setters(kind: type) -> tuple[Callable[[object, object], None], ...]:
    fields: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    return tuple(vars(kind)[name].__set__ for name in fields)


_HEADER_NAME, _HEADER_WRITER, _HEADER_BYTES, _HEADER_CHECKSUM = _setters(FrameHeader)
_GOT_STATUS, _GOT_PAYLOAD, _GOT_HEADER, _GOT_SCOPE, _GOT_REASON = _setters(GetResult)
_NEW: Final = object.__new__


def hit(
    name: FrameName, writer_id: int, payload_checksum: int, payload: memoryview,
    scope: ScopeId = NO_SCOPE,
) -> GetResult:  # fmt: skip
    """A HIT whose payload, all of the block's bytes, was verified against the checksum."""
    header = _NEW(FrameHeader)
    _HEADER_NAME(header, name)
    _HEADER_WRITER(header, writer_id)
    _HEADER_BYTES(header, payload.nbytes)
    _HEADER_CHECKSUM(header, payload_checksum)
    result = _NEW(GetResult)
    _GOT_STATUS(result, GetStatus.HIT)
    _GOT_PAYLOAD(result, payload)
    _GOT_HEADER(result, header)
    _GOT_SCOPE(result, scope)
    _GOT_REASON(result, "")
    return result


def hits(
    names: Sequence[FrameName],
    writer_ids: Sequence[int],
    checksums: Sequence[int],
    payloads: Sequence[memoryview],
) -> list[GetResult]:
    """`hit` of each, without a scope."""
    count = len(names)
    sizes = [payload.nbytes for payload in payloads]
    headers = minted(FrameHeader, (list(names), list(writer_ids), sizes, list(checksums)), count)
    return minted(GetResult, (GetStatus.HIT, list(payloads), headers, NO_SCOPE, ""), count)


def blocks_wanted(
    names: Sequence[FrameName], into: Sequence[memoryview | None], payload_bytes: int | None
) -> list[GetRequest]:
    """Requests whose memory, where given, is flat and writable and whose length is a u64."""
    return minted(GetRequest, (list(names), list(into), payload_bytes), len(names))


def blocks_to_put(
    names: Sequence[FrameName],
    payloads: Sequence[BytesLike],
    owner: BlockOwner,
    retention: Retention,
) -> list[PutRequest]:
    """Requests to put blocks whose checksums the writer does not know."""
    return minted(PutRequest, (list(names), list(payloads), owner, None, retention), len(names))

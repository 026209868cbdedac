"""Values of `kvtier.ports` made of parts that were checked, for loops over the blocks of a batch.

A frozen class sets its fields through `object.__setattr__` and checks them again: of a batched put
or get through shared memory that was a fifth. Setters of the slots do without, and what comes out
is the same value. What must not live here: anything that has not been checked.
"""

from collections.abc import Callable
from typing import Final

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


def _setters(kind: type) -> tuple[Callable[[object, object], None], ...]:
    fields: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    return tuple(vars(kind)[name].__set__ for name in fields)


_HEADER_NAME, _HEADER_WRITER, _HEADER_BYTES, _HEADER_CHECKSUM = _setters(FrameHeader)
_GET_NAME, _GET_INTO, _GET_BYTES = _setters(GetRequest)
_GOT_STATUS, _GOT_PAYLOAD, _GOT_HEADER, _GOT_SCOPE, _GOT_REASON = _setters(GetResult)
_PUT_NAME, _PUT_PAYLOAD, _PUT_OWNER, _PUT_CHECKSUM, _PUT_RETENTION = _setters(PutRequest)
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


def block_wanted(name: FrameName, into: memoryview | None, payload_bytes: int | None) -> GetRequest:
    """A request whose memory, if given, is flat and writable and whose length is a u64."""
    request = _NEW(GetRequest)
    _GET_NAME(request, name)
    _GET_INTO(request, into)
    _GET_BYTES(request, payload_bytes)
    return request


def block_to_put(
    name: FrameName, payload: BytesLike, owner: BlockOwner, retention: Retention
) -> PutRequest:
    """A request to put a block whose checksum the writer does not know."""
    request = _NEW(PutRequest)
    _PUT_NAME(request, name)
    _PUT_PAYLOAD(request, payload)
    _PUT_OWNER(request, owner)
    _PUT_CHECKSUM(request, None)
    _PUT_RETENTION(request, retention)
    return request

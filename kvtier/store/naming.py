"""Between the names of frames and the keys of the planner, whose keys are opaque.

What must not live here: anything with state.
"""

import struct
from typing import Final

from kvtier.core.eviction import Retention
from kvtier.core.frame import HEADER_BYTES, FrameName, KeyKind
from kvtier.core.planner import Block, BlockKey, Reuse
from kvtier.errors import CallerError
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.ports import BlockOwner, PutRequest
from kvtier.tiers.tally import payload_view
from kvtier.types import InstanceId, ScopeId

STORED_PAYLOAD_BYTES_MAX: Final = PAYLOAD_BYTES_MAX - HEADER_BYTES
"""Longest payload whose frame the planner can keep books of."""

_HEAD: Final = struct.Struct("<BI")


def block_key(name: FrameName) -> BlockKey:
    """The planner's key of a frame: kind and codec are part of what names the bytes."""
    return BlockKey(name.namespace, _HEAD.pack(name.key_kind, name.codec_id) + name.key)


def frame_name(key: BlockKey) -> FrameName:
    """Undo `block_key`."""
    kind, codec_id = _HEAD.unpack_from(key.key)
    return FrameName(KeyKind(kind), key.key[_HEAD.size :], key.namespace, codec_id)


def writer_name(writer_id: int) -> InstanceId:
    """A frame's writer id as the planner knows it."""
    return InstanceId(f"{writer_id:016x}")


def frame_bytes(payload_bytes: int) -> int:
    """What a block of this payload counts for in every tier's books."""
    return HEADER_BYTES + payload_bytes


def block_of_put(request: PutRequest, reuse: Reuse) -> Block:
    """The planner's view of a put. CallerError for a payload that is no contiguous buffer."""
    return Block(
        block_key(request.name),
        frame_bytes(payload_view(request.payload).nbytes),
        request.owner.scope,
        writer_name(request.owner.writer_id),
        reuse,
        request.retention,
    )


def unseen_block(name: FrameName, payload_bytes: int, scope: ScopeId, reuse: Reuse) -> Block:
    """A block that this node has never held and that may be in a shared tier."""
    if not 0 <= payload_bytes <= STORED_PAYLOAD_BYTES_MAX:
        raise CallerError(f"payload_bytes is {payload_bytes}, at most {STORED_PAYLOAD_BYTES_MAX}")
    return Block(block_key(name), frame_bytes(payload_bytes), scope, writer_name(0), reuse)


def held_block(
    name: FrameName, payload_bytes: int, owner: BlockOwner, retention: Retention | None = None
) -> Block:
    """A block that a tier has, for the planner's books."""
    return Block(
        block_key(name),
        frame_bytes(payload_bytes),
        owner.scope,
        writer_name(owner.writer_id),
        retention=retention,
    )

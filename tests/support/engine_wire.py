"""Events as the engines encode them: msgspec structs with the fields and options of their sources.

vLLM 0.33.0 (`distributed/kv_events.py`) publishes events as maps; `Old*` are its arrays of before
0.23, which SGLang also had. What must not live here: our decoders, sockets.
"""

from collections.abc import Sequence
from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class OldBlockStored(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"
):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class OldestBlockStored(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"
):
    """As it was before salts were published."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class OldBlockRemoved(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"
):
    block_hashes: list[bytes | int]
    medium: str | None = None


class OldAllBlocksCleared(
    msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"
):
    pass


class SglangBlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


_ENCODER = msgspec.msgpack.Encoder()


def encoded(*events: Any, ts: float = 1.0, dp_rank: int | None = None) -> bytes:
    """One batch as its publisher sends it."""
    return _ENCODER.encode(EventBatch(ts, list(events), dp_rank))


def stored(
    hashes: Sequence[bytes | int], parent: bytes | int | None, tokens: Sequence[Any], **more: Any
) -> BlockStored:
    """Blocks of 16 tokens on the GPU, unless `more` says otherwise."""
    given: dict[str, Any] = {
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    return BlockStored(list(hashes), parent, list(tokens), **(given | more))


def removed(hashes: Sequence[bytes | int], **more: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), **({"medium": "GPU"} | more))


def raw(value: Any) -> bytes:
    """Any value as msgpack."""
    return _ENCODER.encode(value)


def as_old(event: Any) -> Any:
    """The same event as an array of before vLLM 0.23."""
    match event:
        case BlockStored():
            names = OldBlockStored.__struct_fields__
            return OldBlockStored(*(getattr(event, name) for name in names))
        case BlockRemoved():
            return OldBlockRemoved(event.block_hashes, event.medium)
        case AllBlocksCleared():
            return OldAllBlocksCleared()
    return event

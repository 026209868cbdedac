"""TensorRT-LLM's polled events: what `POST /kv_cache_events` of its server answers.

    [{"event_id": 3, "data": {"type": "stored", ...}, "window_size": n, "attention_dp_rank"?: r}]

A poll takes the events away, so there is exactly one reader, and a full buffer drops the oldest:
`event_id` counts per rank, and a hole in it is a loss. Cache level 0 is the GPU, 1 the host, below
that disks. Read from 1.4.0rc4. What must not live here: the ZMQ path (stream.py), polling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from kvtier.core.encoding import U64_MAX
from kvtier.core.engine_events import (
    GPU,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    EventFault,
    Place,
    Unindexed,
)
from kvtier.engines.events import fields as read
from kvtier.engines.events.payload import Plain, UnreadableError, from_json
from kvtier.engines.events.policy import DecodePolicy
from kvtier.limits import (
    ENGINE_EVENT_BLOCKS_MAX,
    ENGINE_EVENTS_MAX,
    ENGINE_RANKS_MAX,
    TOKEN_ID_MAX,
)

_MEDIA: Final = (GPU, "CPU", "DISK")
_LEVEL_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class NumberedBatch:
    """One polled event with its number, which counts per rank; None where it has no readable one.

    `batch` holds several of the core's events for one of the engine's, and none for those that
    change nothing.
    """

    number: int | None
    batch: EngineBatch


def decode_trtllm_json(policy: DecodePolicy, body: bytes) -> tuple[NumberedBatch, ...]:
    """Read the answer to one poll, or one event; raises nothing. O(body)."""
    try:
        value = from_json(body)
        events = value if isinstance(value, list) else [value]
        if len(events) > ENGINE_EVENTS_MAX:
            raise UnreadableError(EventFault.TOO_LARGE)
    except UnreadableError as error:
        return (NumberedBatch(None, EngineBatch(faults={error.fault: 1})),)
    return tuple(_numbered(policy, event) for event in events)


def _numbered(policy: DecodePolicy, event: Plain) -> NumberedBatch:
    if not isinstance(event, dict):
        return NumberedBatch(None, EngineBatch(faults={EventFault.SHAPE: 1}))
    number = event.get("event_id")
    known = number if type(number) is int and 0 <= number <= U64_MAX else None
    try:
        rank = event.get("attention_dp_rank")
        dp_rank = None if rank is None else read.as_integer(rank, ENGINE_RANKS_MAX - 1)
        events = _events(policy, event)
    except UnreadableError as error:
        return NumberedBatch(known, EngineBatch(faults={error.fault: 1}))
    return NumberedBatch(known, EngineBatch(tuple(events), {}, dp_rank))


def _events(policy: DecodePolicy, event: Mapping[str, Plain]) -> list[EngineEvent]:
    data = event.get("data")
    if not isinstance(data, dict):
        raise UnreadableError(EventFault.SHAPE)
    window = event.get("window_size")
    if window is not None and type(window) is not int:
        raise read.bad_field()
    is_chosen = policy.window_tokens is None or window == policy.window_tokens
    group = read.as_group(event.get("layer_group_id"))
    match data.get("type"):
        case "created":
            return []
        case "stored":
            return _stored(policy, data, group, is_chosen=is_chosen)
        case "removed":
            # Gone from all levels, of this window: others say so themselves.
            hashes = read.as_hashes(data.get("block_hashes"))
            return [BlocksRemoved(None, hashes)] if is_chosen else []
        case "updated":
            return _updated(data, group) if is_chosen else []
    raise UnreadableError(EventFault.UNKNOWN_TYPE)


def _updated(data: Mapping[str, Plain], group: int) -> list[EngineEvent]:
    levels = data.get("cache_level")
    if levels is None:
        return []  # another priority
    if not isinstance(levels, dict):
        raise read.bad_field()
    old, new = (levels.get(f"{which}_value", levels.get(which)) for which in ("old", "new"))
    return [
        BlocksMoved(_place(old, group), _place(new, group), (read.as_hash(data.get("block_hash")),))
    ]


def _place(level: Plain, group: int) -> Place:
    number = read.as_integer(level, _LEVEL_MAX)
    return Place(_MEDIA[min(number, len(_MEDIA) - 1)], "", group)


@dataclass(frozen=True, slots=True)
class _Block:
    """One block of a stored event."""

    place: Place
    name: bytes
    tokens: list[int]
    salt: str | None
    is_plain: bool


def _stored(
    policy: DecodePolicy, data: Mapping[str, Plain], group: int, *, is_chosen: bool
) -> list[EngineEvent]:
    """Its full blocks, an event each; what follows a short one is left out."""
    listed = read.as_list(data.get("blocks"))
    if len(listed) > ENGINE_EVENT_BLOCKS_MAX:
        raise UnreadableError(EventFault.TOO_LARGE)
    if not is_chosen:
        return []
    blocks = [_block(block, group) for block in listed]
    full = list(takewhile(lambda block: len(block.tokens) == policy.block_tokens, blocks))
    parent = read.as_parent(data.get("parent_hash"))
    found: list[EngineEvent] = []
    for block in full:
        name = read.as_hash(block.name)
        unindexed = Unindexed.ADAPTER_UNSEEN if policy.has_adapters else None
        found.append(
            BlocksStored(
                place=block.place,
                hashes=(name,),
                parent=parent,
                tokens=read.as_tokens(block.tokens),
                block_tokens=policy.block_tokens,
                salt=block.salt if parent is None else None,
                unindexed=unindexed if block.is_plain else Unindexed.EXTRAS,
            )
        )
        parent = name
    return found


def _block(block: Plain, group: int) -> _Block:
    if not isinstance(block, dict):
        raise read.bad_field()
    tokens: list[int] = []
    is_plain = block.get("mm_keys") in (None, [])
    for token in read.as_list(block.get("tokens")):
        if not isinstance(token, dict):
            raise read.bad_field()
        tokens.append(read.as_integer(token.get("token_id"), TOKEN_ID_MAX))
        is_plain = is_plain and token.get("token_extra_id") in (None, 0)
    return _Block(
        place=_place(block.get("cache_level", 0), group),
        name=read.as_hash(block.get("block_hash")),
        tokens=tokens,
        salt=read.as_text(block.get("cache_salt")),
        is_plain=is_plain,
    )

"""The ZMQ path of all three engines: msgpack batches of events as maps, or as arrays of old.

    batch    [time, [event, ...], dp rank]            the third may be missing
    event    {"type": "BlockStored", field: value}    defaults are left out
             ["BlockStored", value, ...]              by position, as many as the version knows

Both shapes of event are taken in any mixture; unknown fields are ignored. Names and meaning are
those of vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM 1.4.0rc4; see docs of each at `Dialect`.

What must not live here: TensorRT-LLM's polled JSON (trtllm_json.py).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvtier.core.engine_events import (
    GPU,
    NO_EXTRAS,
    AllCleared,
    BlockExtras,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvent,
    EventFault,
    Place,
    Unindexed,
)
from kvtier.engines.events import fields as read
from kvtier.engines.events.fields import Fields
from kvtier.engines.events.payload import Plain, UnreadableError, from_msgpack
from kvtier.engines.events.policy import DecodePolicy, Dialect, HiddenSalts
from kvtier.limits import ENGINE_EVENTS_MAX, ENGINE_RANKS_MAX, MULTIMODAL_ITEMS_MAX

_COMMON: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
)  # fmt: skip
_STORED: Final[Mapping[Dialect, tuple[str, ...]]] = {
    Dialect.VLLM: (
        *_COMMON, "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window", "locality", "ownership",
    ),
    Dialect.SGLANG: (*_COMMON, "cache_salt", "session_id", "lora_name"),
    Dialect.TRTLLM: _COMMON,
}  # fmt: skip
"""Fields of a stored event by position, in the order in which versions added them."""
_REMOVED: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_SALT_FIELD: Final = {Dialect.VLLM: "extra_keys", Dialect.SGLANG: "cache_salt"}
"""Which field says whose blocks they are."""
_WHOLE_PREFIXES: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_REMOTE: Final = "REMOTE"
_EMBEDS_BYTES: Final = 32


def decode(policy: DecodePolicy, payload: bytes) -> EngineBatch:
    """Read one message; raises nothing. O(payload)."""
    try:
        events, rank = _batch(from_msgpack(payload))
    except UnreadableError as error:
        return EngineBatch(faults={error.fault: 1})
    found: list[EngineEvent] = []
    faults: Counter[EventFault] = Counter()
    for event in events:
        try:
            found.append(_event(policy, event))
        except UnreadableError as error:
            faults[error.fault] += 1
    return EngineBatch(tuple(found), dict(faults), rank)


def _batch(value: Plain) -> tuple[list[Plain], int | None]:
    match value:
        case [int() | float(), list(events), *rest]:
            if len(events) > ENGINE_EVENTS_MAX:
                raise UnreadableError(EventFault.TOO_LARGE)
            rank = rest[0] if rest else None
            is_rank = type(rank) is int and 0 <= rank < ENGINE_RANKS_MAX
            return events, rank if is_rank and isinstance(rank, int) else None
    raise UnreadableError(EventFault.SHAPE)


def _event(policy: DecodePolicy, event: Plain) -> EngineEvent:
    kind = _kind(event)
    if kind == "BlockStored":
        return _stored(policy, _named(event, _STORED[policy.dialect]))
    if kind == "BlockRemoved":
        named = _named(event, _REMOVED)
        return BlocksRemoved(_place(named), read.as_hashes(named.get("block_hashes")))
    if kind == "AllBlocksCleared":
        return AllCleared()
    raise UnreadableError(EventFault.UNKNOWN_TYPE)


def _kind(event: Plain) -> str:
    match event:
        case {"type": str(kind)} | [str(kind), *_]:
            return kind
    raise UnreadableError(EventFault.SHAPE)


def _named(event: Plain, names: tuple[str, ...]) -> Fields:
    """The fields by name. Those of an array are all there that its version knows."""
    if isinstance(event, dict):
        return event
    return dict(zip(names, read.as_list(event)[1:], strict=False))


def _place(named: Fields) -> Place:
    medium = read.as_text(named.get("medium")) or GPU
    if read.as_text(named.get("locality")) == _REMOTE:
        medium = _REMOTE
    ownership = read.as_text(named.get("ownership")) or ""
    return Place(medium, ownership, read.as_group(named.get("group_idx")))


def _stored(policy: DecodePolicy, named: Fields) -> BlocksStored:
    hashes = read.as_hashes(named.get("block_hashes"))
    parent = read.as_parent(named.get("parent_block_hash"))
    size = read.as_block_tokens(named.get("block_size"))
    tokens = read.as_tokens(named.get("token_ids"))
    adapter = read.as_text(named.get("lora_name"))
    salt, extras, strange = _identity(policy.dialect, named, adapter, is_first=parent is None)
    kind = read.as_text(named.get("kv_cache_spec_kind"))
    reasons = (
        Unindexed.NO_TOKENS if not len(tokens) or not size else None,
        Unindexed.ATTENTION if kind not in _WHOLE_PREFIXES else None,
        Unindexed.LENGTHS if len(hashes) * size != len(tokens) else None,
        _unseen(policy, named, adapter),
        Unindexed.EXTRAS if strange else None,
    )
    return BlocksStored(
        place=_place(named),
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_tokens=size,
        adapter=adapter,
        salt=salt,
        extras=extras,
        unindexed=next((reason for reason in reasons if reason is not None), None),
    )


def _unseen(policy: DecodePolicy, named: Fields, adapter: str | None) -> Unindexed | None:
    """Whether this version hides whose block it is. An array that is short of a field hides it."""
    is_nameless = policy.dialect is Dialect.TRTLLM and policy.has_adapters
    if adapter is None and (named.get("lora_id") is not None or is_nameless):
        return Unindexed.ADAPTER_UNSEEN
    if policy.hidden_salts is HiddenSalts.ASSUME_NONE:
        return None
    salt_field = _SALT_FIELD.get(policy.dialect, "cache_salt")
    is_array = "type" not in named
    if salt_field not in named and (is_array or policy.dialect is Dialect.TRTLLM):
        return Unindexed.SALT_UNSEEN
    return None


def _identity(
    dialect: Dialect, named: Fields, adapter: str | None, *, is_first: bool
) -> tuple[str | None, Mapping[int, BlockExtras], bool]:
    """Salt, extras by block, and whether there is something in them that cannot be understood."""
    if dialect is not Dialect.VLLM:
        strange = named.get("mm_keys") not in (None, [])
        return read.as_text(named.get("cache_salt")), NO_EXTRAS, strange
    per_block = named.get("extra_keys")
    if per_block is None:
        return None, NO_EXTRAS, False
    salt: str | None = None
    extras: dict[int, BlockExtras] = {}
    strange = False
    for block, keys in enumerate(read.as_list(per_block)):
        if keys is None:
            continue
        texts, found, is_strange = _extra_keys(read.as_list(keys))
        strange |= is_strange
        if found.items or found.embeds is not None:
            extras[block] = found
        # The wire does not say which text is what: an adapter's name comes first, then the salt,
        # which only the first block of a request has.
        if adapter is not None and texts[:1] == [adapter]:
            del texts[0]
        if texts and block == 0 and is_first:
            salt = texts.pop(0)
        strange |= bool(texts)
    return salt, extras, strange


def _extra_keys(keys: list[Plain]) -> tuple[list[str], BlockExtras, bool]:
    texts: list[str] = []
    items: list[tuple[str, int]] = []
    embeds: bytes | None = None
    strange = len(keys) > MULTIMODAL_ITEMS_MAX
    for key in keys[:MULTIMODAL_ITEMS_MAX]:
        match key:
            case str():
                texts.append(read.as_text(key) or "")
            case [str(identifier), int(offset)]:
                items.append((identifier, offset))
            case bytes() if len(key) == _EMBEDS_BYTES and embeds is None:
                embeds = key
            case _:
                strange = True
    return texts, BlockExtras(tuple(items), embeds), strange

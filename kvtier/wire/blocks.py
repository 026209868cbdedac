"""Between the columns of kvtier.v1.Store and the core's values.

What comes in is parsed before anything is allocated by it: a count or a length that passes a
ceiling is a LimitError, everything else that is not right a CallerError. What must not live here:
calls, and what a store answers.
"""

import struct
from collections.abc import Iterable, Sequence

from kvtier.core.checks import DIGEST_BYTES, require_integer
from kvtier.core.eviction import PRIORITY_MAX, Retention
from kvtier.core.frame import FrameName, KeyKind, frame_names
from kvtier.errors import CallerError, LimitError
from kvtier.limits import LEASE_MS_MAX, NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.ports import BlockOwner, GetStatus, PutStatus
from kvtier.types import Fingerprint, ScopeId, Tier
from kvtier.wire import messages as pb

_U64_BYTES = 8

PUT_STATUSES = tuple(PutStatus)
GET_STATUSES = tuple(GetStatus)
_PUT_NUMBERS = {status: number for number, status in enumerate(PUT_STATUSES)}
_GET_NUMBERS = {status: number for number, status in enumerate(GET_STATUSES)}


def u64s(values: Iterable[int]) -> bytes:
    """Numbers as a column."""
    listed = list(values)
    return struct.pack(f"<{len(listed)}Q", *listed)


def u64s_from(what: str, column: bytes, count: int | None = None) -> tuple[int, ...]:
    """A column as numbers; `count` where it must have so many."""
    present, rest = divmod(len(column), _U64_BYTES)
    if rest or (count is not None and present != count):
        raise CallerError(f"{what}: {len(column)} bytes, want {count if count is not None else 'n'}"
                          " numbers of 8")  # fmt: skip
    if present > TIER_BATCH_BLOCKS_MAX:
        raise LimitError(f"{what}: {present} exceed TIER_BATCH_BLOCKS_MAX {TIER_BATCH_BLOCKS_MAX}")
    return struct.unpack(f"<{present}Q", column)


def names_to(names: Sequence[FrameName]) -> pb.BlockNames:
    """Names of one namespace, kind, codec and key length. CallerError where they differ."""
    if not names:
        return pb.BlockNames()
    first = names[0]
    length = len(first.key)
    for name in names:
        if (name.namespace, name.key_kind, name.codec_id, len(name.key)) != (
            first.namespace, first.key_kind, first.codec_id, length
        ):  # fmt: skip
            raise CallerError("names of one call must be of one namespace, kind, codec and length")
    return pb.BlockNames(
        namespace=first.namespace,
        key_kind=0 if first.key_kind is KeyKind.PREFIX_KEY else first.key_kind,
        key_bytes=0 if length == DIGEST_BYTES else length,
        codec_id=first.codec_id,
        keys=b"".join(name.key for name in names),
    )


def names_from(message: pb.BlockNames) -> list[FrameName]:
    """The names; at most TIER_BATCH_BLOCKS_MAX, and perhaps none."""
    if not message.keys:
        return []
    length = message.key_bytes or DIGEST_BYTES
    count, rest = divmod(len(message.keys), length)
    if rest:
        raise CallerError(f"keys: {len(message.keys)} bytes are no multiple of {length}")
    if count > TIER_BATCH_BLOCKS_MAX:
        raise LimitError(f"{count} blocks exceed TIER_BATCH_BLOCKS_MAX {TIER_BATCH_BLOCKS_MAX}")
    kind = message.key_kind or KeyKind.PREFIX_KEY.value
    if kind not in KeyKind.__members__.values():
        raise CallerError(f"key_kind {kind} is none")
    namespace = Fingerprint(message.namespace)
    return frame_names(KeyKind(kind), message.keys, length, namespace, message.codec_id)


def lengths_from(column: bytes, count: int) -> tuple[int, ...]:
    """Declared payload lengths, each within PAYLOAD_BYTES_MAX."""
    lengths = u64s_from("lengths", column, count)
    if lengths and max(lengths) > PAYLOAD_BYTES_MAX:
        raise LimitError(f"a payload of {max(lengths)} bytes exceeds {PAYLOAD_BYTES_MAX}")
    return lengths


def length_from(payload_bytes: int) -> int | None:
    """A declared length of all payloads, None where it is not known."""
    require_integer("payload_bytes", payload_bytes, 0, PAYLOAD_BYTES_MAX)
    return payload_bytes or None


def seconds_from(what: str, milliseconds: int, ms_max: int = LEASE_MS_MAX) -> float:
    """A duration of a request; none is endless."""
    require_integer(what, milliseconds, 1, ms_max)
    return milliseconds / 1000


def scope_from(scope: str) -> ScopeId:
    if len(scope.encode()) > NAME_BYTES_MAX:
        raise LimitError(f"scope: more than {NAME_BYTES_MAX} bytes")
    return ScopeId(scope)


def owner_from(message: pb.BlockWriter) -> BlockOwner:
    return BlockOwner(message.writer_id, scope_from(message.scope))


def retention_from(message: pb.BlockWriter, now: float) -> Retention:
    """How long what is put is worth how much."""
    require_integer("priority_plus_one", message.priority_plus_one, 0, PRIORITY_MAX + 1)
    expires_at = now + message.priority_ms / 1000 if message.priority_ms else None
    if not message.priority_plus_one:
        return Retention(expires_at=expires_at)
    return Retention(message.priority_plus_one - 1, expires_at)


def put_statuses(statuses: Iterable[PutStatus]) -> bytes:
    return bytes(_PUT_NUMBERS[status] for status in statuses)


def put_statuses_from(column: bytes) -> list[PutStatus]:
    """What a store says became of a put; a status of a later release counts as an ERROR."""
    return [PUT_STATUSES[n] if n < len(PUT_STATUSES) else PutStatus.ERROR for n in column]


def get_statuses(statuses: Iterable[GetStatus]) -> bytes:
    return bytes(_GET_NUMBERS[status] for status in statuses)


def get_statuses_from(column: bytes) -> list[GetStatus]:
    """What a store says became of a get; a status of a later release counts as an ERROR."""
    return [GET_STATUSES[n] if n < len(GET_STATUSES) else GetStatus.ERROR for n in column]


def tier_mask(tiers: Iterable[Tier]) -> int:
    """Tiers as a byte: bit n for tier n."""
    return sum(1 << tier for tier in set(tiers))


def tiers_from(mask: int) -> frozenset[Tier]:
    return frozenset(tier for tier in Tier if mask >> tier & 1)

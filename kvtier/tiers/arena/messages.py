"""What an arena's client and its server say to each other over the Unix socket, as bytes.

One SEQPACKET message each: a head (kind, count of items, tag of the request) and packed items,
little-endian. Answers carry the tag; TOUCH and CORRUPT have none. Everything is parsed, never
trusted: what does not parse is a CallerError and ends the connection. Payload never travels here.
What must not live here: sockets, file descriptors, what the messages do.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.ports import BlockOwner, PutRequest, PutResult, PutStatus
from kvtier.tiers.arena.directory import NAME_BYTES, packed_name, parsed_name
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.minting import minted
from kvtier.types import Fingerprint, ScopeId

MESSAGE_BYTES_MAX: Final = 96 << 10
ITEMS_COUNT_MAX: Final = 256
SCOPE_BYTES_MAX: Final = 1024

_HEAD: Final = struct.Struct("<BxHI")
_HELLO: Final = struct.Struct("<IQQ")
_WELCOME: Final = struct.Struct("<IQQ")
_OWNED: Final = struct.Struct("<QBdH")
_COUNT: Final = struct.Struct("<H")
_COMMIT: Final = struct.Struct("<QQQQBH")
_COMMIT_ITEM: Final = struct.Struct("<16sI12s32s32sQQQQBH")
"""The five parts of a packed name, split where the codec id is, and a `_COMMIT`."""
_BEGIN_ITEM: Final = struct.Struct("<12sHHI12x32s32sQQQQBH")
"""The same bytes by the fields of a name."""
_PREFIX_NAME_BEGIN: Final = packed_name(
    FrameName(KeyKind.PREFIX_KEY, bytes(32), Fingerprint(bytes(32)))
)[:16]
_NAME_ZEROS: Final = bytes(12)
_RESERVE: Final = struct.Struct("<Q")
_ID: Final = struct.Struct("<Q")
_PAIR: Final = struct.Struct("<QQ")
_TTL: Final = struct.Struct("<I")
_LEASE: Final = struct.Struct("<QQQQQQ")
_RESULT: Final = struct.Struct("<BB")
_STATUSES: Final = tuple(PutStatus)
_PLAIN_RESULTS: Final = tuple(PutResult(status) for status in _STATUSES)
_STATUS_IDS: Final = {status: i for i, status in enumerate(_STATUSES)}
_PLAIN_PACKED: Final = {status: _RESULT.pack(i, 0) for i, status in enumerate(_STATUSES)}


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    """Comes with the descriptors of directory, slots and segment."""
    REFUSED = 3
    RESERVE = 4
    COMMIT = 5
    ABORT = 6
    LEASE = 7
    RELEASE = 8
    TOUCH = 9
    CORRUPT = 10
    ANSWER = 11
    BEGIN = 12
    """As COMMIT, of blocks that stand in the segment or come through its ring. Answered once all
    have come."""
    READY = 13
    """There is more in the ring, for a store that went to sleep; or a BEGIN is about to follow, for
    one that may have. Not answered."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of every message."""

    kind: Kind
    count: int
    tag: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A client introduces itself, with the ABI it was built for."""

    abi: int
    segment_bytes: int
    ring_bytes: int = 0
    """Of the segment, behind a control page at its start (`kvtier.tiers.arena.ring`); 0: none."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the client got."""

    abi: int
    epoch: int
    segment_bytes: int


@dataclass(slots=True)
class BlockToCommit:
    """A block that stands in the client's segment, or (offset NOWHERE) comes through its ring.
    `reservation_id` 0: none was made.

    Never changed; not frozen, since freezing triples what one costs.
    """

    wanted: Wanted
    segment_offset: int
    payload_checksum: int | None = None
    reservation_id: int = 0


@dataclass(frozen=True, slots=True)
class Granted:
    """A reservation, or (`reservation_id` 0) why there is none."""

    reservation_id: int
    result: PutResult


@dataclass(frozen=True, slots=True)
class LeasedBlock:
    """Where a leased block is; its lease ends by `release`, by its time, or with the connection."""

    lease_id: int
    entry: int
    generation: int
    slot_offset: int
    payload_bytes: int
    payload_checksum: int


def head_of(message: bytes) -> tuple[Head, bytes]:
    """The head of a message and what follows it."""
    try:
        kind, count, tag = _HEAD.unpack_from(message)
        return Head(Kind(kind), count, tag), message[_HEAD.size :]
    except (struct.error, ValueError) as error:
        raise CallerError(f"not a message of the arena: {error}") from error


def pack(kind: Kind, count: int, tag: int, body: bytes = b"") -> bytes:
    """One message. CallerError past ITEMS_COUNT_MAX or MESSAGE_BYTES_MAX."""
    message = _HEAD.pack(kind, count, tag) + body
    if count > ITEMS_COUNT_MAX or len(message) > MESSAGE_BYTES_MAX:
        raise CallerError(f"{count} items of {len(message)} bytes are too much for a message")
    return message


def pack_hello(hello: Hello) -> bytes:
    return pack(Kind.HELLO, 1, 0, _HELLO.pack(hello.abi, hello.segment_bytes, hello.ring_bytes))


def parse_hello(body: bytes) -> Hello:
    return Hello(*_exactly(_HELLO, body))


def pack_welcome(welcome: Welcome) -> bytes:
    body = _WELCOME.pack(welcome.abi, welcome.epoch, welcome.segment_bytes)
    return pack(Kind.WELCOME, 1, 0, body)


def parse_welcome(body: bytes) -> Welcome:
    return Welcome(*_exactly(_WELCOME, body))


def pack_commit(tag: int, blocks: Sequence[BlockToCommit]) -> bytes:
    packer = _CommitPacker()
    for block in blocks:
        wanted, checksum = block.wanted, block.payload_checksum
        packer.parts.append(packed_name(wanted.name))
        packer.parts.append(
            _COMMIT.pack(
                block.segment_offset,
                wanted.payload_bytes,
                block.reservation_id,
                checksum or 0,
                checksum is not None,
                packer.owner(wanted.owner, wanted.retention),
            )
        )
    return pack(Kind.COMMIT, len(blocks), tag, packer.body())


def pack_begin(
    tag: int, requests: Sequence[PutRequest], offsets: Sequence[int], sizes: Sequence[int]
) -> bytes:
    """Blocks at these offsets of the segment, or NOWHERE: those come through the ring, in this
    order. Parsed by `parse_commit`."""
    packer = _CommitPacker()
    parts, pack_item, owner_of = packer.parts, _BEGIN_ITEM.pack, packer.owner
    head = _PREFIX_NAME_BEGIN[:12]
    for request, offset, size in zip(requests, offsets, sizes, strict=True):
        name = request.name
        key = name.key
        known = request.payload_checksum
        parts.append(
            pack_item(
                head, name.key_kind, len(key), name.codec_id, key, name.namespace,
                offset, size, 0, known or 0, known is not None,
                owner_of(request.owner, request.retention),
            )
        )  # fmt: skip
    return pack(Kind.BEGIN, len(requests), tag, packer.body())


class _CommitPacker:
    """The body of a COMMIT: owners first, since blocks of one put share theirs."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [b""]
        self._owners: dict[tuple[int, str, int, float | None], int] = {}
        self._last: tuple[BlockOwner | None, Retention | None] = (None, None)
        self._position = 0

    def owner(self, owner: BlockOwner, retention: Retention) -> int:
        """The position of an owner in the message."""
        if owner is not self._last[0] or retention is not self._last[1]:
            owned = (owner.writer_id, owner.scope, retention.priority, retention.expires_at)
            position = self._owners.get(owned)
            if position is None:
                position = self._owners[owned] = len(self._owners)
                self.parts[0] += _owned(owner, retention)
            self._last, self._position = (owner, retention), position
        return self._position

    def body(self) -> bytes:
        return _COUNT.pack(len(self._owners)) + b"".join(self.parts)


def parse_commit(count: int, body: bytes) -> list[BlockToCommit]:
    """Owners first, since blocks of one put share theirs, then fixed-size items."""
    reader = _Reader(body)
    (owners_count,) = reader.take(_COUNT)
    owners = [reader.owned() for _ in range(owners_count)]
    items = reader.rest()
    if len(items) != count * _COMMIT_ITEM.size:
        raise CallerError(f"{len(items)} bytes for {count} blocks to commit")
    if not count:
        return []
    columns = list(zip(*_COMMIT_ITEM.iter_unpack(items), strict=True))
    offsets, sizes, reservations, checksums, are_known, by = map(list, columns[5:])
    if max(by) >= owners_count:
        raise CallerError("a block's owner is not in its message")
    same = owners_count == 1
    owner = owners[0][0] if same else [owners[i][0] for i in by]
    retention = owners[0][1] if same else [owners[i][1] for i in by]
    names = _names(items, columns[:5])
    wanted = minted(Wanted, (names, sizes, owner, retention), count)
    declared: list[int | None] | None = None
    if any(are_known):
        declared = [one if known else None for one, known in zip(checksums, are_known, strict=True)]
    return minted(BlockToCommit, (wanted, offsets, declared, reservations), count)


def _names(items: bytes, columns: Sequence[tuple[object, ...]]) -> list[FrameName]:
    """The names of `_COMMIT_ITEM`s, whose first columns are given."""
    begins, codecs, zeros, keys, namespaces = columns
    count = len(begins)
    if begins.count(_PREFIX_NAME_BEGIN) == zeros.count(_NAME_ZEROS) == count:
        one = namespaces.count(namespaces[0]) == count
        namespace = namespaces[0] if one else list(namespaces)
        fields = (KeyKind.PREFIX_KEY, list(keys), namespace, list(codecs))
        return minted(FrameName, fields, count)
    starts = range(0, len(items), _COMMIT_ITEM.size)
    return [parsed_name(items[at : at + NAME_BYTES]) for at in starts]


def pack_reserve(tag: int, ttl_ms: int, blocks: Sequence[Wanted]) -> bytes:
    body = _TTL.pack(ttl_ms) + b"".join(
        packed_name(block.name)
        + _owned(block.owner, block.retention)
        + _RESERVE.pack(block.payload_bytes)
        for block in blocks
    )
    return pack(Kind.RESERVE, len(blocks), tag, body)


def parse_reserve(count: int, body: bytes) -> tuple[int, list[Wanted]]:
    reader = _Reader(body)
    (ttl_ms,) = reader.take(_TTL)
    blocks = []
    for _ in range(count):
        name, owner, retention = reader.name(), *reader.owned()
        (size,) = reader.take(_RESERVE)
        blocks.append(Wanted(name, size, owner, retention))
    reader.end()
    return ttl_ms, blocks


def pack_granted(tag: int, granted: Sequence[Granted]) -> bytes:
    body = b"".join(_ID.pack(one.reservation_id) + _result(one.result) for one in granted)
    return pack(Kind.ANSWER, len(granted), tag, body)


def parse_granted(count: int, body: bytes) -> list[Granted]:
    reader = _Reader(body)
    granted = [Granted(reader.take(_ID)[0], reader.result()) for _ in range(count)]
    reader.end()
    return granted


def pack_results(tag: int, results: Sequence[PutResult]) -> bytes:
    packed = [_result(one) if one.reason else _PLAIN_PACKED[one.status] for one in results]
    return pack(Kind.ANSWER, len(results), tag, b"".join(packed))


def parse_results(count: int, body: bytes) -> list[PutResult]:
    if len(body) == count * _RESULT.size and not any(body[1::2]):
        if any(status >= len(_STATUSES) for status in body[::2]):
            raise CallerError("a status is not known")
        return [_PLAIN_RESULTS[status] for status in body[::2]]
    reader = _Reader(body)
    results = [reader.result() for _ in range(count)]
    reader.end()
    return results


def pack_ids(kind: Kind, tag: int, ids: Sequence[int]) -> bytes:
    return pack(kind, len(ids), tag, b"".join(map(_ID.pack, ids)))


def parse_ids(count: int, body: bytes) -> list[int]:
    reader = _Reader(body)
    ids: list[int] = [reader.take(_ID)[0] for _ in range(count)]
    reader.end()
    return ids


def pack_pairs(kind: Kind, pairs: Sequence[tuple[int, int]]) -> bytes:
    """(entry, generation) pairs of TOUCH and CORRUPT, which have no answer."""
    return pack(kind, len(pairs), 0, b"".join(_PAIR.pack(*pair) for pair in pairs))


def parse_pairs(count: int, body: bytes) -> list[tuple[int, int]]:
    reader = _Reader(body)
    pairs = []
    for _ in range(count):
        entry, generation = reader.take(_PAIR)
        pairs.append((entry, generation))
    reader.end()
    return pairs


def pack_lease(tag: int, ttl_ms: int, names: Sequence[FrameName]) -> bytes:
    return pack(Kind.LEASE, len(names), tag, _TTL.pack(ttl_ms) + b"".join(map(packed_name, names)))


def parse_lease(count: int, body: bytes) -> tuple[int, list[FrameName]]:
    reader = _Reader(body)
    (ttl_ms,) = reader.take(_TTL)
    names = [reader.name() for _ in range(count)]
    reader.end()
    return ttl_ms, names


def pack_leased(tag: int, leased: Sequence[LeasedBlock | None]) -> bytes:
    body = b"".join(
        bytes(_LEASE.size)
        if one is None
        else _LEASE.pack(
            one.lease_id,
            one.entry,
            one.generation,
            one.slot_offset,
            one.payload_bytes,
            one.payload_checksum,
        )
        for one in leased
    )
    return pack(Kind.ANSWER, len(leased), tag, body)


def parse_leased(count: int, body: bytes) -> list[LeasedBlock | None]:
    reader = _Reader(body)
    leased = []
    for _ in range(count):
        fields = reader.take(_LEASE)
        leased.append(LeasedBlock(*fields) if fields[0] else None)
    reader.end()
    return leased


class _Reader:
    """Takes fields off a body; CallerError where it is too short, too long or out of range."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            fields = layout.unpack_from(self._body, self._at)
        except struct.error as error:
            raise CallerError(f"message cut short: {error}") from error
        self._at += layout.size
        return fields

    def raw(self, count: int) -> bytes:
        taken = self._body[self._at : self._at + count]
        if len(taken) != count:
            raise CallerError("message cut short")
        self._at += count
        return taken

    def name(self) -> FrameName:
        return parsed_name(self.raw(NAME_BYTES))

    def owned(self) -> tuple[BlockOwner, Retention]:
        writer_id, priority, expires_at, scope_bytes = self.take(_OWNED)
        owner = BlockOwner(writer_id, _scope(self.raw(scope_bytes)))
        until = None if math.isnan(expires_at) else float(expires_at)
        return owner, Retention(priority, until)

    def rest(self) -> bytes:
        return self._body[self._at :]

    def result(self) -> PutResult:
        status, length = self.take(_RESULT)
        if status >= len(_STATUSES):
            raise CallerError(f"status {status} is not known")
        if not length:
            return _PLAIN_RESULTS[status]
        return PutResult(_STATUSES[status], self.raw(length).decode("ascii", "replace"))

    def end(self) -> None:
        if self._at != len(self._body):
            raise CallerError(f"{len(self._body) - self._at} bytes follow the message")


def _owned(owner: BlockOwner, retention: Retention) -> bytes:
    scope = owner.scope.encode("utf-8")
    if len(scope) > SCOPE_BYTES_MAX:
        raise CallerError(f"scope of {len(scope)} bytes exceeds {SCOPE_BYTES_MAX}")
    until = math.nan if retention.expires_at is None else retention.expires_at
    return _OWNED.pack(owner.writer_id, retention.priority, until, len(scope)) + scope


def _scope(raw: bytes) -> ScopeId:
    if len(raw) > SCOPE_BYTES_MAX:
        raise CallerError(f"scope of {len(raw)} bytes exceeds {SCOPE_BYTES_MAX}")
    try:
        return ScopeId(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CallerError("scope is not UTF-8") from error


def _result(result: PutResult) -> bytes:
    reason = result.reason.encode("ascii", "replace")[:255]
    return _RESULT.pack(_STATUS_IDS[result.status], len(reason)) + reason


def _exactly(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise CallerError(f"{len(body)} bytes, not {layout.size}")
    return layout.unpack(body)

"""The directory of an arena in shared memory: which block is in which slot. Layout, and two ways
to work on it: native (`NATIVE`) and the pure twin (`PURE`), its oracle in tests.

All integers are little-endian u64 unless said otherwise; everything is aligned to 64 bytes.

    header page, 4096 bytes
         0   8  magic "KVTARENA"
         8   4  ABI version (u32): 3          12   4  bytes of an entry (u32): 192
        16   8  epoch: random, non-zero, of this arena
        24   8  state: 1 serving, 0 closed
        32   8  entries        40   8  buckets, a power of two, at least twice the entries
        48   8  bytes of the slots' memory
    buckets, 8 bytes each: 0, or upper 32 bits of the name's hash << 32 | entry + 1
    entries, 192 bytes each
         0   8  generation: odd while the entry is being changed
         8   8  hash of the name         16   8  offset of the slot         24   8  0
        32 128  header of the block's frame; its payload is in the slot    160  32  0

A name is the first 96 bytes of a frame header with the writer id zeroed; its hash is XXH3-64 of
epoch and name. Lookup is linear probing from hash mod buckets. Removing an entry changes its
generation and closes the gap in the buckets; entries never move, so a (entry, generation) names
one published block for ever. Memory order is stated in kvtier/native/src/arena.cpp.

What must not live here: who may write, how memory is made, which slot is free.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

import numpy as np

from kvtier import _native
from kvtier.core.checks import require_integer
from kvtier.core.checksum import checksum, pure_checksum
from kvtier.core.encoding import U64_MAX
from kvtier.core.frame import HEADER_BYTES, FrameHeader, FrameName, KeyKind, encode_header
from kvtier.errors import CallerError
from kvtier.types import BytesLike, Fingerprint, Integers

ABI_VERSION: Final = _native.ARENA_ABI_VERSION
MAGIC: Final = b"KVTARENA"
PAGE_BYTES: Final = 4096
ENTRY_BYTES: Final = 192
NAME_BYTES: Final = 96
ENTRIES_COUNT_MAX: Final = 1 << 26
NOWHERE: Final = U64_MAX
ANY_LENGTH: Final = U64_MAX
"""In `ArenaOperations.read`: the block may have any length that fits."""

_HEADER: Final = struct.Struct("<8sIIQQQQQ")
_STATE_AT: Final = 24
_SERVING: Final = 1
_WRITER: Final = slice(24, 32)
_FRAME_AT: Final = 32
_WORD: Final = struct.Struct("<Q")
_NAME: Final = struct.Struct("<12sHHI12x32s32s")
_NAME_HEAD: Final = b"\x89KVTIER\n\x01\x00\x80\x00"
"""Magic, version and header length of a frame."""
_NAME_ZEROS: Final = slice(20, 32)
_BLOCK: Final = struct.Struct("<QQQQQ")
_FOUND: Final = struct.Struct("<QQQQ")
_READ: Final = struct.Struct("<QQQQ24xQ64xQQ16x")
_READ_FRAME_AT: Final = 32
_ALIGNMENT: Final = 64
_PROBES_MAX: Final = 512

Buffer: TypeAlias = memoryview


@dataclass(frozen=True, slots=True)
class DirectoryLayout:
    """Sizes of one directory, and where its parts are."""

    epoch: int
    entries_count: int
    slots_bytes: int

    def __post_init__(self) -> None:
        require_integer("epoch", self.epoch, 1, U64_MAX)
        require_integer("entries_count", self.entries_count, 1, ENTRIES_COUNT_MAX)
        require_integer("slots_bytes", self.slots_bytes, 0, 1 << 62)

    @property
    def buckets_count(self) -> int:
        return max(8, 1 << (2 * self.entries_count - 1).bit_length())

    @property
    def directory_bytes(self) -> int:
        return PAGE_BYTES + 8 * self.buckets_count + ENTRY_BYTES * self.entries_count

    def entry_at(self, entry: int) -> int:
        """Offset of an entry in the directory."""
        return PAGE_BYTES + 8 * self.buckets_count + ENTRY_BYTES * entry

    def frame_at(self, entry: int) -> int:
        """Offset of the frame header in an entry."""
        return self.entry_at(entry) + _FRAME_AT


def format_directory(directory: Buffer, layout: DirectoryLayout) -> None:
    """Write the header page of an empty directory into zeroed memory; state serving."""
    _HEADER.pack_into(
        directory,
        0,
        MAGIC,
        ABI_VERSION,
        ENTRY_BYTES,
        layout.epoch,
        _SERVING,
        layout.entries_count,
        layout.buckets_count,
        layout.slots_bytes,
    )


def read_layout(directory: Buffer) -> DirectoryLayout:
    """What a header page says. Raises CallerError for what is not a directory of this version."""
    if directory.nbytes < PAGE_BYTES:
        raise CallerError("directory: smaller than its header")
    magic, abi, entry_bytes, epoch, _, entries, buckets, slots_bytes = _HEADER.unpack_from(
        directory
    )
    if magic != MAGIC:
        raise CallerError("directory: not the directory of an arena")
    if (abi, entry_bytes) != (ABI_VERSION, ENTRY_BYTES):
        raise CallerError("directory: of another version of the layout")
    layout = DirectoryLayout(epoch, entries, slots_bytes)
    if buckets != layout.buckets_count or directory.nbytes < layout.directory_bytes:
        raise CallerError("directory: its header says impossible sizes")
    return layout


def close_directory(directory: Buffer) -> None:
    """Make every reader miss from now on."""
    _WORD.pack_into(directory, _STATE_AT, 0)


def packed_name(name: FrameName) -> bytes:
    """The 96 bytes that stand for a name in the directory."""
    return _NAME.pack(
        _NAME_HEAD, name.key_kind, len(name.key), name.codec_id, name.key, name.namespace
    )


def parsed_name(packed: bytes) -> FrameName:
    """Inverse of `packed_name`. CallerError for bytes that it never gives."""
    if len(packed) != NAME_BYTES:
        raise CallerError(f"a name has {NAME_BYTES} bytes, not {len(packed)}")
    head, kind, key_bytes, codec_id, key, namespace = _NAME.unpack(packed)
    try:
        name = FrameName(KeyKind(kind), key[:key_bytes], Fingerprint(namespace), codec_id)
    except ValueError as error:
        raise CallerError(f"not a block's name: {error}") from error
    others = head != _NAME_HEAD or any(packed[_NAME_ZEROS])
    if others or key_bytes > len(key) or any(key[key_bytes:]):
        raise CallerError("not a block's name: other constants")
    return name


def packed_names(names: Sequence[FrameName]) -> bytes:
    """The names one after another, as `ArenaOperations` take them."""
    pack = _NAME.pack
    return b"".join(
        [
            pack(_NAME_HEAD, name.key_kind, len(name.key), name.codec_id, name.key, name.namespace)
            for name in names
        ]
    )


packed_block: Final = _BLOCK.pack
"""Entry, slot offset, writer id, payload length and checksum, as `ArenaOperations.publish` takes
them beside the name."""


@dataclass(frozen=True, slots=True)
class Located:
    """Where a block was, as of one generation of its entry."""

    entry: int
    generation: int
    slot_offset: int
    payload_bytes: int


class ReadStatus(IntEnum):
    """How one block of a read ended."""

    HIT = 0
    MISS = 1
    NOT_THE_NAME = 2
    """The entry's frame header is damaged, or of another name."""
    LENGTH = 3
    BUFFER_SHORT = 4
    PAYLOAD = 5


@dataclass(frozen=True, slots=True)
class Read:
    """One block of a read; the numbers are what the entry said, verified only on a HIT."""

    status: ReadStatus
    entry: int
    generation: int
    slot_offset: int
    writer_id: int
    payload_bytes: int
    payload_checksum: int


class ArenaOperations(Protocol):
    """What is done to a directory, by its writer (publish, remove) and by readers.

    All take packed names and raise ValueError or TypeError for arguments that do not fit together
    or memory that is no directory; then nothing was done. Native ones never touch memory outside
    the buffers whatever the directory says.
    """

    def publish(self, directory: Buffer, names: bytes, blocks: bytes) -> bytes:
        """Publish `packed_block`s in unused entries, whose slots have been written.

        Their generations as packed u64, 0 where the table has no place near enough.
        """
        ...

    def remove(self, directory: Buffer, entries: Integers, names: bytes) -> None:
        """Make the entries unused. Their slots may be written once this has returned."""
        ...

    def find(self, directory: Buffer, names: bytes) -> bytes:
        """Records for `located`."""
        ...

    def unchanged(self, directory: Buffer, entries: Integers, generations: Integers) -> bytes:
        """A byte each, 1 where the entry still has that generation; ask after the slot was read."""
        ...

    def offsets(self, segment: Buffer, payloads: Sequence[BytesLike]) -> bytes:
        """Where in the segment each payload stands, as packed u64; NOWHERE if it does not."""
        ...

    def read(
        self,
        directory: Buffer,
        slots: Buffer,
        names: bytes,
        lengths: Integers,
        destinations: Sequence[BytesLike],
    ) -> bytes:
        """Copy payloads into the destinations, verify each over the copy; records for `reads`.

        A length is what a block must have, or ANY_LENGTH. Never waits: what changes is a miss.
        """
        ...


def located(records: bytes) -> list[Located | None]:
    """What `ArenaOperations.find` found."""
    return [
        None if entry == NOWHERE else Located(entry, generation, slot, payload_bytes)
        for entry, generation, slot, payload_bytes in _FOUND.iter_unpack(records)
    ]


def reads(records: bytes) -> list[Read]:
    """What became of the blocks of one `ArenaOperations.read`."""
    return [Read(ReadStatus(status), *rest) for status, *rest in _READ.iter_unpack(records)]


def read_fields(records: bytes) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """The fields of each `Read`, in its order, the status as a number: 0 is a HIT."""
    return _READ.iter_unpack(records)


def frame_header_of(records: bytes, position: int) -> bytes:
    """The frame header that the entry of one block of a read had."""
    start = position * _READ.size + _READ_FRAME_AT
    return records[start : start + HEADER_BYTES]


class NativeOperations:
    """`ArenaOperations` in native code; a read of more than 32 KiB releases the GIL."""

    publish = staticmethod(_native.arena_publish)
    remove = staticmethod(_native.arena_remove)
    find = staticmethod(_native.arena_find)
    unchanged = staticmethod(_native.arena_unchanged)
    offsets = staticmethod(_native.arena_offsets)
    read = staticmethod(_native.arena_read)


def _address(buffer: BytesLike) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


class PureOperations:
    """Twin of `NativeOperations`. Single steps are not atomic towards other processes."""

    def __init__(self, checksum_of: Callable[[BytesLike], int] = pure_checksum) -> None:
        """`checksum_of` may be the native one, for payloads of a real size."""
        self._checksum = checksum_of

    def publish(self, directory: Buffer, names: bytes, blocks: bytes) -> bytes:
        layout = read_layout(directory)
        items, wanted = _split(names, NAME_BYTES), list(_BLOCK.iter_unpack(blocks))
        if len(items) != len(wanted):
            raise ValueError("blocks: not as many as names")
        for entry, slot, _, size, _ in wanted:
            _require_entry(layout, entry)
            if slot + size > layout.slots_bytes:
                raise ValueError("blocks: a slot is outside the slots' memory")
        generations = []
        for name, (entry, slot, writer_id, size, payload_checksum) in zip(
            items, wanted, strict=True
        ):
            hashed = self._hash(layout, name)
            free = [p for p in _probe(layout, hashed) if not _word(directory, _bucket(p))]
            if not free:
                generations.append(0)
                continue
            header = FrameHeader(parsed_name(name), writer_id, size, payload_checksum)
            at = layout.entry_at(entry)
            generation = (_word(directory, at) | 1) + 1
            _set_word(directory, at, generation - 1)
            _set_word(directory, at + 8, hashed)
            _set_word(directory, at + 16, slot)
            directory[at + _FRAME_AT : at + _FRAME_AT + HEADER_BYTES] = encode_header(header)
            _set_word(directory, at, generation)
            _set_word(directory, _bucket(free[0]), hashed >> 32 << 32 | entry + 1)
            generations.append(generation)
        return b"".join(map(_WORD.pack, generations))

    def remove(self, directory: Buffer, entries: Integers, names: bytes) -> None:
        layout = read_layout(directory)
        for entry, name in zip(entries, _split(names, NAME_BYTES), strict=True):
            _require_entry(layout, int(entry))
            hashed = self._hash(layout, name)
            word = hashed >> 32 << 32 | int(entry) + 1
            for position in _probe(layout, hashed):
                if _word(directory, _bucket(position)) == word:
                    _close_gap(directory, layout, position)
                    break
            at = layout.entry_at(int(entry))
            generation = (_word(directory, at) | 1) + 1
            directory[at + 8 : at + _FRAME_AT + HEADER_BYTES] = bytes(24 + HEADER_BYTES)
            _set_word(directory, at, generation)

    def find(self, directory: Buffer, names: bytes) -> bytes:
        layout = read_layout(directory)
        records = []
        for name in _split(names, NAME_BYTES):
            entry = self._entry_of(directory, layout, name)
            if entry is None:
                records.append(_FOUND.pack(NOWHERE, 0, 0, 0))
                continue
            at = layout.entry_at(entry)
            generation, slot = _word(directory, at), _word(directory, at + 16)
            payload_bytes = _word(directory, at + _FRAME_AT + 96)
            records.append(_FOUND.pack(entry, generation, slot, payload_bytes))
        return b"".join(records)

    def unchanged(self, directory: Buffer, entries: Integers, generations: Integers) -> bytes:
        layout = read_layout(directory)
        serving = _word(directory, _STATE_AT) == _SERVING
        answers = bytearray()
        for entry, generation in zip(entries, generations, strict=True):
            _require_entry(layout, int(entry))
            now = _word(directory, layout.entry_at(int(entry)))
            answers.append(serving and now == int(generation) and now % 2 == 0)
        return bytes(answers)

    def offsets(self, segment: Buffer, payloads: Sequence[BytesLike]) -> bytes:
        start = _address(segment)
        packed = []
        for payload in payloads:
            size = memoryview(payload).nbytes  # type: ignore[arg-type]
            offset = _address(payload) - start if size else 0
            inside = 0 <= offset <= segment.nbytes - size
            packed.append(_WORD.pack(offset if inside else NOWHERE))
        return b"".join(packed)

    def read(
        self,
        directory: Buffer,
        slots: Buffer,
        names: bytes,
        lengths: Integers,
        destinations: Sequence[BytesLike],
    ) -> bytes:
        layout = read_layout(directory)
        if slots.nbytes < layout.slots_bytes:
            raise ValueError("slots: smaller than the directory says")
        targets = [memoryview(target).cast("B") for target in destinations]  # type: ignore[arg-type]
        if any(target.readonly for target in targets):
            raise ValueError("destinations: one is read-only")
        items = _split(names, NAME_BYTES)
        if not len(items) == len(lengths) == len(targets):
            raise ValueError("names: not as many as lengths and destinations")
        records = []
        for name, length, target in zip(items, lengths, targets, strict=True):
            entry = self._entry_of(directory, layout, name)
            if entry is None:
                empty = _FOUND.pack(ReadStatus.MISS, NOWHERE, 0, 0)
                records.append(empty + bytes(HEADER_BYTES))
                continue
            at = layout.entry_at(entry)
            frame = bytes(directory[at + _FRAME_AT : at + _FRAME_AT + HEADER_BYTES])
            slot = _word(directory, at + 16)
            status = self._read_one(slots, name, frame, slot, int(length), target)
            known = _FOUND.pack(status, entry, _word(directory, at), slot)
            records.append(known + frame)
        return b"".join(records)

    def _read_one(
        self, slots: Buffer, name: bytes, frame: bytes, slot: int, length: int, target: Buffer
    ) -> ReadStatus:
        size, expected = _WORD.unpack_from(frame, 96)[0], _WORD.unpack_from(frame, 104)[0]
        named = bytearray(frame[:NAME_BYTES])
        named[_WRITER] = bytes(8)
        intact = _WORD.unpack_from(frame, 120)[0] == self._checksum(frame[:120])
        if named != name or not intact or any(frame[112:120]) or slot + size > slots.nbytes:
            return ReadStatus.NOT_THE_NAME
        if length not in {ANY_LENGTH, size}:
            return ReadStatus.LENGTH
        if target.nbytes < size:
            return ReadStatus.BUFFER_SHORT
        target[:size] = slots[slot : slot + size]
        same = self._checksum(target[:size]) == expected
        return ReadStatus.HIT if same else ReadStatus.PAYLOAD

    def _entry_of(self, directory: Buffer, layout: DirectoryLayout, name: bytes) -> int | None:
        if _word(directory, _STATE_AT) != _SERVING:
            return None
        hashed = self._hash(layout, name)
        for position in _probe(layout, hashed):
            word = _word(directory, _bucket(position))
            if word == 0:
                return None
            entry = (word & 0xFFFFFFFF) - 1
            if word >> 32 != hashed >> 32 or not 0 <= entry < layout.entries_count:
                continue
            at = layout.entry_at(entry)
            if _word(directory, at) % 2:
                return None
            if _word(directory, at + 8) == hashed:
                return entry
        return None

    def _hash(self, layout: DirectoryLayout, name: bytes) -> int:
        return self._checksum(_WORD.pack(layout.epoch) + name)


NATIVE: Final = NativeOperations()
PURE: Final = PureOperations(checksum)
"""The twin over the native checksum."""


def _split(packed: bytes, item_bytes: int) -> list[bytes]:
    if len(packed) % item_bytes:
        raise ValueError(f"{len(packed)} bytes are no multiple of {item_bytes}")
    return [packed[i : i + item_bytes] for i in range(0, len(packed), item_bytes)]


def _require_entry(layout: DirectoryLayout, entry: int) -> None:
    if not 0 <= entry < layout.entries_count:
        raise ValueError("entries: one is outside the directory")


def _probe(layout: DirectoryLayout, hashed: int) -> list[int]:
    buckets = layout.buckets_count
    return [(hashed + i) % buckets for i in range(min(buckets, _PROBES_MAX))]


def _bucket(position: int) -> int:
    return PAGE_BYTES + 8 * position


def _word(directory: Buffer, at: int) -> int:
    word: int = _WORD.unpack_from(directory, at)[0]
    return word


def _set_word(directory: Buffer, at: int, value: int) -> None:
    _WORD.pack_into(directory, at, value)


def _close_gap(directory: Buffer, layout: DirectoryLayout, gap: int) -> None:
    buckets = layout.buckets_count
    position = (gap + 1) % buckets
    while position != gap and (word := _word(directory, _bucket(position))):
        entry = (word & 0xFFFFFFFF) - 1
        home = _word(directory, layout.entry_at(entry) + 8) % buckets
        if (position - home) % buckets >= (position - gap) % buckets:
            _set_word(directory, _bucket(gap), word)
            gap = position
        position = (position + 1) % buckets
    _set_word(directory, _bucket(gap), 0)

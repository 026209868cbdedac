"""What an engine's own connector says it holds: frames of a byte stream, and the books of them.

    hello    who speaks: its life, its rank, how many slots it has, the root of its pool
    rows     of each slot that changed, what is in it now
    synced   whatever is held has been told; also said when nothing changes, as a sign of life

    frame    length of the body (u32 little-endian), kind (u8), body

A stream begins with a hello and the rows of every slot that holds something. Slots are the engine's
physical blocks, so equal content in two of them is two copies, and a row replaces what was said of
its slot before: nothing can be counted twice. What must not live here: sockets, engines' objects.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.engine_events import EngineHash
from kvtier.core.engine_holdings import Appeared, Change, KnownKeys, U64Array, Vanished
from kvtier.errors import CallerError
from kvtier.limits import ENGINE_FEED_ROWS_MAX, ENGINE_RANKS_MAX, ENGINE_RESIDENTS_MAX
from kvtier.types import PrefixKey, Tier

DIGEST_BYTES: Final = 32
LIFE_BYTES: Final = 16
_VERSION: Final = 1
_MAGIC: Final = b"kvtR"
_HEAD: Final = struct.Struct("<IB")
_HELLO: Final = struct.Struct(f"<4sHHI{LIFE_BYTES}s{DIGEST_BYTES}s")
ROW: Final = struct.Struct(f"<IB{DIGEST_BYTES}s{DIGEST_BYTES}s")
"""Slot, `SlotState`, digest, prefix key; zeros where there is none."""
_ROWS: Final = np.dtype(
    [("slot", "<u4"), ("state", "u1"), ("digest", "V32"), ("key", "V32")]
)  # fmt: skip
_BODY_BYTES_MAX: Final = ENGINE_FEED_ROWS_MAX * ROW.size
NO_BYTES: Final = bytes(DIGEST_BYTES)


class _Kind(IntEnum):
    HELLO = 1
    ROWS = 2
    SYNCED = 3


class SlotState(IntEnum):
    """What is said of a slot."""

    EMPTY = 0
    KEYED = 1
    """A digest and the prefix key of its chain."""
    UNKNOWN = 2
    """A digest whose prefix key the connector does not know, though it has one."""
    NAMELESS = 3
    """A digest whose chain no prefix key can name, as those of images."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who speaks. `root` is the root of its pool without salt and adapter, which tells whether its
    prefix keys mean what the listener's do."""

    life: bytes
    rank: int
    slots: int
    root: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Slots and what is in them."""

    packed: bytes

    def __len__(self) -> int:
        return len(self.packed) // ROW.size

    def each(self) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Slot, state, digest, key."""
        return ROW.iter_unpack(self.packed)


@dataclass(frozen=True, slots=True)
class Synced:
    """All has been told."""


Frame: TypeAlias = Hello | Rows | Synced


def hello_frame(hello: Hello) -> bytes:
    body = _HELLO.pack(_MAGIC, _VERSION, hello.rank, hello.slots, hello.life, hello.root)
    return _HEAD.pack(len(body), _Kind.HELLO) + body


def rows_frames(packed: bytes) -> bytes:
    """Rows, each as `ROW` packs it, in as many frames as they need."""
    found = bytearray()
    for start in range(0, len(packed), _BODY_BYTES_MAX):
        body = packed[start : start + _BODY_BYTES_MAX]
        found += _HEAD.pack(len(body), _Kind.ROWS) + body
    return bytes(found)


SYNCED_FRAME: Final = _HEAD.pack(0, _Kind.SYNCED)


def held_rows(table: bytes) -> bytes:
    """Of a table with a row for each slot, those that hold something."""
    rows: npt.NDArray[np.void] = np.frombuffer(table, _ROWS)
    held: bytes = rows[rows["state"] != SlotState.EMPTY].tobytes()
    return held


class FrameReader:
    """Bytes of one connection to frames; keeps less than one frame."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Frame]:
        """The frames that are whole now. CallerError for what is none, and then for good."""
        buffer = self._rest + data
        frames: list[Frame] = []
        at = 0
        while len(buffer) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(buffer, at)
            if length > _BODY_BYTES_MAX:
                raise CallerError(f"a frame of {length} bytes")
            end = at + _HEAD.size + length
            if end > len(buffer):
                break
            frames.append(_frame(kind, buffer[at + _HEAD.size : end]))
            at = end
        self._rest = buffer[at:]
        return frames


def _frame(kind: int, body: bytes) -> Frame:
    if kind == _Kind.ROWS and body and len(body) % ROW.size == 0:
        return Rows(body)
    if kind == _Kind.SYNCED and not body:
        return Synced()
    if kind != _Kind.HELLO or len(body) != _HELLO.size:
        raise CallerError(f"a frame of kind {kind} with {len(body)} bytes")
    magic, version, rank, slots, life, root = _HELLO.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise CallerError(f"hello of version {version}, want {_VERSION}")
    if rank >= ENGINE_RANKS_MAX or not 1 <= slots <= ENGINE_RESIDENTS_MAX:
        raise CallerError(f"hello of rank {rank} with {slots} slots")
    return Hello(life, rank, slots, root)


@dataclass(frozen=True, slots=True)
class _Held:
    digest: EngineHash
    prefix_hash: int | None


class SlotBooks:
    """What the slots of one engine's life hold, and what an index is to know of it.

    Not thread-safe. O(rows); bounded by the slots. Keys that rows bring are learnt by `known`,
    which outlives the engine, and sought there for rows that bring none.
    """

    def __init__(self, slots_count: int, known: KnownKeys) -> None:
        self._slots_count = slots_count
        self._known = known
        self._slots: dict[int, _Held] = {}
        self._copies: dict[int, int] = {}
        self._before: dict[int, int] = {}
        """Copies, before the rows that are not settled, of each hash that they touched."""
        self._unknown: dict[EngineHash, set[int]] = {}
        self.nameless_count = 0
        """Rows of chains that no prefix key names, since the beginning."""

    # ---- reading

    @property
    def held_count(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    @property
    def copies_count(self) -> int:
        """Of those, the ones that an index knows of."""
        return sum(self._copies.values())

    @property
    def unknown_count(self) -> int:
        """Digests of which nobody has said what an index calls them."""
        return len(self._unknown)

    def unknown(self) -> list[EngineHash]:
        """Digests whose prefix hash is to be found out."""
        return list(self._unknown)

    def held(self) -> list[Change]:
        """All that an index is to know."""
        found = _packed(one for one, copies in self._copies.items() if copies)
        return [Appeared(Tier.GPU, 0, found)] if len(found) else []

    # ---- what is said

    def take(self, rows: Rows) -> None:
        """Note them. CallerError for a slot that there is not, or for no state."""
        for slot, state, digest, key in rows.each():
            if slot >= self._slots_count or state > SlotState.NAMELESS:
                raise CallerError(f"slot {slot} of {self._slots_count}, state {state}")
            self._leave(slot)
            if state == SlotState.EMPTY:
                continue
            name = EngineHash(digest)
            found = self._known.find(name) if state == SlotState.UNKNOWN else None
            if state == SlotState.KEYED:
                found = PrefixKey(key)
                self._known.learn(name, found)
            if found:
                self._enter(slot, name, int.from_bytes(found[:8], "little"))
                continue
            self._slots[slot] = _Held(name, None)
            if state == SlotState.UNKNOWN and found is None:
                self._unknown.setdefault(name, set()).add(slot)
            else:
                self.nameless_count += 1

    def learn(self, hashes: Mapping[EngineHash, int]) -> None:
        """Prefix hashes of digests that were `unknown`; others are ignored."""
        for name, prefix_hash in hashes.items():
            for slot in self._unknown.pop(name, ()):
                self._enter(slot, name, prefix_hash)

    def settle(self) -> list[Change]:
        """What changed for an index since this was asked last."""
        gone = [one for one, had in self._before.items() if had and not self._copies.get(one)]
        come = [one for one, had in self._before.items() if not had and self._copies.get(one)]
        self._before = {}
        changes: list[Change] = []
        if gone:
            changes.append(Vanished(Tier.GPU, _packed(gone)))
        if come:
            changes.append(Appeared(Tier.GPU, 0, _packed(come)))
        return changes

    # ---- parts

    def _enter(self, slot: int, name: EngineHash, prefix_hash: int) -> None:
        self._slots[slot] = _Held(name, prefix_hash)
        copies = self._copies.get(prefix_hash, 0)
        self._before.setdefault(prefix_hash, copies)
        self._copies[prefix_hash] = copies + 1

    def _leave(self, slot: int) -> None:
        one = self._slots.pop(slot, None)
        if one is None:
            return
        if one.prefix_hash is None:
            waiting = self._unknown.get(one.digest)
            if waiting is not None:
                waiting.discard(slot)
                if not waiting:
                    del self._unknown[one.digest]
            return
        copies = self._copies[one.prefix_hash]
        self._before.setdefault(one.prefix_hash, copies)
        if copies > 1:
            self._copies[one.prefix_hash] = copies - 1
        else:
            del self._copies[one.prefix_hash]


def _packed(hashes: "Iterator[int] | list[int]") -> U64Array:
    return np.fromiter(hashes, np.uint64)

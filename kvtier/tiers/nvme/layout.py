"""Sizes, settings, and the packed form of names and places.

What must not live here: anything that touches a disk.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from kvtier.core.checks import require_integer
from kvtier.core.frame import HEADER_BYTES, FrameName, KeyKind
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import NVME_SEGMENTS_COUNT_MAX, NVME_UNSAVED_BYTES_MAX
from kvtier.types import Fingerprint, ScopeId

T = TypeVar("T")

PAGE_BYTES: Final = 4096
"""Direct I/O: offsets, lengths and memory are multiples of it."""
FRAME_ALIGNMENT: Final = 64
FORMAT_VERSION: Final = 1
SEGMENTS_COUNT_MIN: Final = 3
"""One to fill, one to evict, and the spare that kept blocks move into."""

_SEGMENT_BYTES_MIN: Final = 64 << 10
_SEGMENT_BYTES_DEFAULT: Final = 256 << 20
_SEGMENTS_COUNT_DEFAULT: Final = 64
_TIER_BYTES_MAX: Final = 1 << 50
_INDEX_BYTES_MIN: Final = 1 << 20
_INDEX_SHARE: Final = 32
_THREADS_MAX: Final = 64

_NAME_HEAD: Final = struct.Struct("<32sBI")
_PLACE: Final = struct.Struct("<QQQQQ")


@dataclass(frozen=True, slots=True)
class NvmeConfig:
    """Where the tier lives and how much it may take."""

    directory: Path
    """Of one process at a time. Made if missing; what is not the tier's in it is left alone."""
    bytes_max: int | None = None
    """All that `du` says of it. None: as at the first start, and then `free_share` of what was
    free."""
    free_share: float = 0.8
    segment_bytes: int | None = None
    """Of new segments; None: by the size of the tier."""
    readers_count: int = 2
    """Threads that read."""
    save_s: float = 0.25
    """Changes of the index begin to be written so much later; a kill loses what is younger and
    what is being written: well under a second."""
    unsaved_bytes_max: int = NVME_UNSAVED_BYTES_MAX
    """Writes wait for the index once so many bytes of frames are not in it."""
    kept_share: float = 0.125
    """Of a segment that is evicted: blocks read since they were written move on, up to this much.
    It bounds write amplification to 1 / (1 - kept_share)."""
    stall_s: float = 0.25
    """A call that misses its deadline after at least this long counts against the disk."""

    def __post_init__(self) -> None:
        if self.bytes_max is not None:
            require_integer("bytes_max", self.bytes_max, 1, _TIER_BYTES_MAX)
        if self.segment_bytes is not None:
            require_integer("segment_bytes", self.segment_bytes, _SEGMENT_BYTES_MIN, 1 << 40)
            if self.segment_bytes % PAGE_BYTES:
                raise CallerError(f"segment_bytes is no multiple of {PAGE_BYTES}")
        require_integer("readers_count", self.readers_count, 1, _THREADS_MAX)
        require_integer("unsaved_bytes_max", self.unsaved_bytes_max, 1, NVME_UNSAVED_BYTES_MAX)
        if not 0 < self.free_share <= 1 or not 0 <= self.kept_share <= 0.5:
            raise CallerError("free_share must be in (0, 1], kept_share in [0, 0.5]")
        if not (0 < self.save_s <= 1 and 0 < self.stall_s < math.inf):
            raise CallerError("save_s must be in (0, 1], stall_s positive")


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tier of `bytes_max` is cut into segments and a share for the index."""

    bytes_max: int
    segment_bytes: int

    def __post_init__(self) -> None:
        if self.segments_max(0) < SEGMENTS_COUNT_MIN:
            raise ConfigError(
                f"bytes_max {self.bytes_max} does not hold {SEGMENTS_COUNT_MIN} segments of "
                f"{self.segment_bytes} bytes and an index"
            )

    @property
    def index_bytes(self) -> int:
        """What is kept free for the index from the start."""
        return max(_INDEX_BYTES_MIN, self.bytes_max // _INDEX_SHARE)

    def segments_max(self, index_bytes: int) -> int:
        """How many segments fit beside an index that takes so much now.

        RocksDB writes a new file before it deletes those that went into it: the index counts twice.
        """
        return max(0, self.bytes_max - max(self.index_bytes, 2 * index_bytes)) // self.segment_bytes


def geometry_of(bytes_max: int, segment_bytes: int | None) -> Geometry:
    """The geometry of a new tier. Segments are of 256 MiB: smaller where the tier holds few, larger
    where their files would be too many to keep open."""
    if segment_bytes is None:
        wanted = min(_SEGMENT_BYTES_DEFAULT, bytes_max // _SEGMENTS_COUNT_DEFAULT)
        wanted = max(wanted, bytes_max // NVME_SEGMENTS_COUNT_MAX, _SEGMENT_BYTES_MIN)
        segment_bytes = _rounded(wanted, PAGE_BYTES)
    return Geometry(bytes_max, segment_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a frame lies, and what of it need not be read to answer a put."""

    segment_id: int
    offset: int
    payload_bytes: int
    payload_checksum: int
    writer_id: int
    scope: ScopeId

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


def pack_name(name: FrameName) -> bytes:
    """The key of a block: its namespace first, so that a namespace is one range."""
    return _NAME_HEAD.pack(name.namespace, name.key_kind, name.codec_id) + name.key


def unpack_name(packed: bytes) -> FrameName:
    """Undo `pack_name`. Raises CallerError for bytes that it never made."""
    if len(packed) < _NAME_HEAD.size:
        raise CallerError("a packed name is too short")
    namespace, kind, codec_id = _NAME_HEAD.unpack_from(packed)
    if kind not in KeyKind.__members__.values():
        raise CallerError(f"a packed name has key kind {kind}")
    return FrameName(KeyKind(kind), packed[_NAME_HEAD.size :], Fingerprint(namespace), codec_id)


def pack_place(place: Place) -> bytes:
    return _PLACE.pack(
        place.segment_id,
        place.offset,
        place.payload_bytes,
        place.payload_checksum,
        place.writer_id,
    ) + place.scope.encode("utf-8", "surrogatepass")


def unpack_place(packed: bytes) -> Place:
    """Undo `pack_place`. Raises CallerError for bytes that it never made."""
    try:
        segment_id, offset, size, taken, writer_id = _PLACE.unpack_from(packed)
        scope = packed[_PLACE.size :].decode("utf-8", "surrogatepass")
    except (struct.error, UnicodeDecodeError) as error:
        raise CallerError(f"not a packed place: {error}") from error
    return Place(segment_id, offset, size, taken, writer_id, ScopeId(scope))


def aligned_frame(payload_bytes: int) -> int:
    """What a frame takes up in a run of frames."""
    return _rounded(HEADER_BYTES + payload_bytes, FRAME_ALIGNMENT)


def aligned_pages(size: int) -> int:
    return _rounded(size, PAGE_BYTES)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, at most `size` at a time."""
    return (items[at : at + size] for at in range(0, len(items), size))

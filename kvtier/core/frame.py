"""The block frame: a header that says whose bytes follow, and proves that they are those bytes.

A frame is what every tier keeps and every peer sends: a header of 128 bytes (a multiple of 64, so
that an aligned frame has an aligned payload) and the payload. All integers are little-endian.

    offset  bytes  field
         0      8  magic: 89 4b 56 54 49 45 52 0a ("\\x89KVTIER\\n")
         8      2  format version: 1
        10      2  header length: 128
        12      2  key kind: 1 prefix key, 2 engine digest
        14      2  key length: 32, or that of the engine's digest (8 to 32)
        16      4  codec id
        20      4  reserved: 0
        24      8  writer id
        32     32  prefix key or engine digest, zeros after it
        64     32  namespace fingerprint
        96      8  payload length
       104      8  payload checksum: XXH3-64 of the payload
       112      8  reserved: 0
       120      8  header checksum: XXH3-64 of bytes 0 to 119

A reader checks all of it on every read from every tier and peer and takes any `FrameFault` for a
miss. Checksums find accidents; who may write a tier is trusted with its bytes.

What must not live here: where frames are kept, counting of faults, codecs. Nothing here copies a
payload.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvtier.core.checks import DIGEST_BYTES, require_digest, require_integer
from kvtier.core.checksum import checksum
from kvtier.core.encoding import U64_MAX
from kvtier.errors import CallerError, FrameError, FrameFault
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.types import BytesLike, Fingerprint

FRAME_VERSION: Final = 1
HEADER_BYTES: Final = 128

_MAGIC: Final = b"\x89KVTIER\n"
_LAYOUT: Final = struct.Struct("<8sHHHHIIQ32s32sQQQ")
_CHECKSUM: Final = struct.Struct("<Q")
_VERSION: Final = struct.Struct("<H")
_VERSION_AT: Final = len(_MAGIC)
_CHECKED_BYTES: Final = _LAYOUT.size
_DIGEST_BYTES_MIN: Final = 8
_CODEC_ID_MAX: Final = 2**32 - 1


class KeyKind(IntEnum):
    """What names the block of a frame."""

    PREFIX_KEY = 1
    ENGINE_DIGEST = 2
    """A foreign engine's own digest, inside a namespace that says how it was computed."""


@dataclass(frozen=True, slots=True)
class FrameName:
    """By what a frame is put and asked for."""

    key_kind: KeyKind
    key: bytes
    namespace: Fingerprint
    codec_id: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.key_kind, KeyKind):
            raise CallerError(f"key_kind {self.key_kind!r} is not a KeyKind")
        if self.key_kind is KeyKind.PREFIX_KEY:
            require_digest("key", self.key)
        elif type(self.key) is not bytes or not _is_digest_length(len(self.key)):
            raise CallerError(f"key is not bytes of {_DIGEST_BYTES_MIN} to {DIGEST_BYTES}")
        require_digest("namespace", self.namespace)
        require_integer("codec_id", self.codec_id, 0, _CODEC_ID_MAX)

    def __hash__(self) -> int:
        return hash(self.key)  # a digest, and bytes keep their hash: tables of names look up often


# Setters of its slots: what a frozen class costs more is a third of what a name costs.
_SET_KEY_KIND: Final[Callable[[FrameName, KeyKind], None]] = vars(FrameName)["key_kind"].__set__
_SET_KEY: Final[Callable[[FrameName, bytes], None]] = vars(FrameName)["key"].__set__
_SET_NAMESPACE: Final[Callable[[FrameName, bytes], None]] = vars(FrameName)["namespace"].__set__
_SET_CODEC_ID: Final[Callable[[FrameName, int], None]] = vars(FrameName)["codec_id"].__set__


def prefix_key_name(key: bytes, namespace: bytes, codec_id: int) -> FrameName:
    """A prefix key's name, of parts that were unpacked: 32 bytes each and a u32, not checked here.

    For parsers of many names; everyone else makes a `FrameName`, which checks.
    """
    name = FrameName.__new__(FrameName)
    _SET_KEY_KIND(name, KeyKind.PREFIX_KEY)
    _SET_KEY(name, key)
    _SET_NAMESPACE(name, namespace)
    _SET_CODEC_ID(name, codec_id)
    return name


def frame_names(
    key_kind: KeyKind, keys: bytes, key_bytes: int, namespace: Fingerprint, codec_id: int = 0
) -> list[FrameName]:
    """The names of keys that stand one after another, each of `key_bytes`; checked once for all.

    Raises CallerError as `FrameName` does, and where `keys` is no whole number of them. A fifth of
    what one name after the other costs.
    """
    if not isinstance(keys, bytes) or key_bytes < 1 or len(keys) % key_bytes:
        raise CallerError(f"keys: {len(keys)} bytes are no multiple of {key_bytes}")
    if not keys:
        return []
    FrameName(key_kind, keys[:key_bytes], namespace, codec_id)
    names = []
    for at in range(0, len(keys), key_bytes):
        name = FrameName.__new__(FrameName)
        _SET_KEY_KIND(name, key_kind)
        _SET_KEY(name, keys[at : at + key_bytes])
        _SET_NAMESPACE(name, namespace)
        _SET_CODEC_ID(name, codec_id)
        names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What the header of a frame says. `writer_id` is a u64 that the writer drew for itself."""

    name: FrameName
    writer_id: int
    payload_bytes: int
    payload_checksum: int

    def __post_init__(self) -> None:
        require_integer("writer_id", self.writer_id, 0, U64_MAX)
        require_integer("payload_bytes", self.payload_bytes, 0, PAYLOAD_BYTES_MAX)
        require_integer("payload_checksum", self.payload_checksum, 0, U64_MAX)


@dataclass(frozen=True, slots=True)
class FrameExpectation:
    """What a reader asked for; `payload_bytes` None where a codec makes the length vary."""

    name: FrameName
    payload_bytes: int | None

    def __post_init__(self) -> None:
        if self.payload_bytes is not None:
            require_integer("payload_bytes", self.payload_bytes, 0, PAYLOAD_BYTES_MAX)


def encode_header(header: FrameHeader) -> bytes:
    """Return the 128 bytes that stand before the payload."""
    name = header.name
    checked = _LAYOUT.pack(
        _MAGIC,
        FRAME_VERSION,
        HEADER_BYTES,
        name.key_kind,
        len(name.key),
        name.codec_id,
        0,
        header.writer_id,
        name.key,
        name.namespace,
        header.payload_bytes,
        header.payload_checksum,
        0,
    )
    return checked + _CHECKSUM.pack(checksum(checked))


def header_of(name: FrameName, writer_id: int, payload: BytesLike) -> FrameHeader:
    """Return the header of a payload that is about to be written; reads all of it once.

    A writer that copies anyway takes the checksum from the verified copy and builds `FrameHeader`
    itself. Raises CallerError for what is not a contiguous buffer, or past PAYLOAD_BYTES_MAX.
    """
    view = _bytes_view(payload)
    return FrameHeader(name, writer_id, view.nbytes, checksum(view))


def parse_header(buffer: BytesLike) -> FrameHeader:
    """Return what the header at the start of `buffer` says, its own checksum verified.

    Says nothing of the payload, which need not be there. Raises FrameError for any bytes that are
    not a header of this version, CallerError for what is not a contiguous buffer.
    """
    view = _bytes_view(buffer)
    if view.nbytes < HEADER_BYTES:
        raise FrameError(FrameFault.SHORT, f"{view.nbytes} bytes are less than a header")
    raw = bytes(view[:HEADER_BYTES])
    if not raw.startswith(_MAGIC):
        raise FrameError(FrameFault.MAGIC, "not a block frame")
    (version,) = _VERSION.unpack_from(raw, _VERSION_AT)
    if version != FRAME_VERSION:
        raise FrameError(FrameFault.VERSION, f"{version}, this release reads {FRAME_VERSION}")
    (expected_checksum,) = _CHECKSUM.unpack_from(raw, _CHECKED_BYTES)
    if checksum(raw[:_CHECKED_BYTES]) != expected_checksum:
        raise FrameError(FrameFault.HEADER_CHECKSUM, "the header was altered")
    return _checked_header(raw)


def verify(buffer: BytesLike, expected: FrameExpectation) -> FrameHeader:
    """Return the header of the frame that fills `buffer`, if it is the frame that was asked for.

    Checks version, key, namespace, codec, length (to the byte: nothing may follow) and both
    checksums; `payload_of` then gives the payload without copying it. Where the writer of the
    memory may still write, verify a private copy. Raises FrameError with the first fault, and
    CallerError for what is not a contiguous buffer. O(payload bytes).
    """
    view = _bytes_view(buffer)
    header = parse_header(view)
    _require_expected(header, expected, view.nbytes - HEADER_BYTES)
    _require_checksum(header, checksum(view[HEADER_BYTES:]))
    return header


def verify_copied(
    header_buffer: BytesLike,
    payload_bytes: int,
    payload_checksum: int,
    expected: FrameExpectation,
) -> FrameHeader:
    """As `verify`, for a payload that a verified copy has read already.

    `payload_bytes` is how much was copied, `payload_checksum` what the copy computed on its way.
    O(1).
    """
    header = parse_header(header_buffer)
    _require_expected(header, expected, payload_bytes)
    _require_checksum(header, payload_checksum)
    return header


def payload_of(frame: BytesLike) -> memoryview:
    """Return the payload of a frame as a view on the same memory; call `verify` first."""
    return _bytes_view(frame)[HEADER_BYTES:]


def _checked_header(raw: bytes) -> FrameHeader:
    fields = _LAYOUT.unpack_from(raw)
    _, _, header_bytes, kind, key_bytes, codec_id, zero_a, writer_id = fields[:8]
    padded_key, namespace, payload_bytes, payload_checksum, zero_b = fields[8:]
    key, padding = padded_key[:key_bytes], padded_key[key_bytes:]
    if header_bytes != HEADER_BYTES or zero_a or zero_b or any(padding):
        raise FrameError(FrameFault.HEADER_FIELD, "a constant of the header is another")
    if not _is_key(kind, key_bytes):
        raise FrameError(FrameFault.HEADER_FIELD, f"key kind {kind} with {key_bytes} bytes")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise FrameError(FrameFault.LENGTH, f"{payload_bytes} exceeds {PAYLOAD_BYTES_MAX}")
    name = FrameName(KeyKind(kind), key, Fingerprint(namespace), codec_id)
    return FrameHeader(name, writer_id, payload_bytes, payload_checksum)


def _require_expected(header: FrameHeader, expected: FrameExpectation, present_bytes: int) -> None:
    ours, theirs = expected.name, header.name
    if (theirs.key_kind, theirs.key) != (ours.key_kind, ours.key):
        raise FrameError(FrameFault.KEY, "the frame is of another block")
    if theirs.namespace != ours.namespace:
        raise FrameError(FrameFault.NAMESPACE, "the frame is of another namespace")
    if theirs.codec_id != ours.codec_id:
        raise FrameError(FrameFault.CODEC, f"{theirs.codec_id}, expected {ours.codec_id}")
    if expected.payload_bytes is not None and header.payload_bytes != expected.payload_bytes:
        detail = f"{header.payload_bytes} declared, expected {expected.payload_bytes}"
        raise FrameError(FrameFault.LENGTH, detail)
    if present_bytes < header.payload_bytes:
        detail = f"{present_bytes} bytes of payload, {header.payload_bytes} declared"
        raise FrameError(FrameFault.SHORT, detail)
    if present_bytes != header.payload_bytes:
        detail = f"{present_bytes - header.payload_bytes} bytes follow the payload"
        raise FrameError(FrameFault.LENGTH, detail)


def _require_checksum(header: FrameHeader, payload_checksum: int) -> None:
    if payload_checksum != header.payload_checksum:
        raise FrameError(FrameFault.PAYLOAD_CHECKSUM, "the payload was altered")


def _is_key(kind: int, key_bytes: int) -> bool:
    if kind == KeyKind.PREFIX_KEY:
        return key_bytes == DIGEST_BYTES
    return kind == KeyKind.ENGINE_DIGEST and _is_digest_length(key_bytes)


def _is_digest_length(length: int) -> bool:
    return _DIGEST_BYTES_MIN <= length <= DIGEST_BYTES


def _bytes_view(buffer: BytesLike) -> memoryview:
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if view.c_contiguous and not view.nbytes:
            return memoryview(b"")  # Python casts no view that has a zero in its shape
        return view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise CallerError(f"not a contiguous buffer of a plain type: {error}") from error

"""The list of a hot set as it lies in the store: pages as long as any block of the namespace.

    8  magic        2  page          2  pages         8  generation, one a record
    4  first entry  4  entries       2  scopes        2  bytes of the instance's name
    the name; each scope as u16 length and text; entries; zeros
    entry: 32 key, 4 place of its parent or -1, 2 scope of this page, 4 heat (float)

Little-endian. It holds names, never tokens or KV, and is a hint: whoever reads it gets nothing by
it that was not verified under its own name. What must not live here: the store.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.limits import HOT_SET_BLOCKS_MAX, HOT_SET_BYTES_MAX, NAME_BYTES_MAX
from kvtier.types import Fingerprint, InstanceId, PrefixKey, ScopeId
from kvtier_services.worker.l2.heat import NO_BLOCK_BEFORE, HotBlock, HotSet

PAGE_BYTES_MIN: Final = 4096
"""Namespaces with shorter blocks have no place for a record."""
_MAGIC: Final = b"KVTHOT\x00\x01"
_HEAD: Final = struct.Struct("<8sHHQIIHH")
_LENGTH: Final = struct.Struct("<H")
_ENTRY: Final = struct.Struct("<32siHf")
_DOMAIN: Final = b"kvtier hot set, 1"


@dataclass(frozen=True, slots=True)
class Page:
    """One page, read."""

    instance: InstanceId
    """Who left it."""
    generation: int
    number: int
    pages_count: int
    first: int
    """Where in the hot set its first block stands."""
    blocks: HotSet


def page_name(namespace: Fingerprint, place: int, page: int) -> FrameName:
    """What a page is called in the store: no prefix key can be equal. Pure."""
    told = _DOMAIN + namespace + struct.pack("<II", place, page)
    return FrameName(KeyKind.PREFIX_KEY, hashlib.sha256(told).digest(), namespace)


def encode(instance: InstanceId, hot: HotSet, page_bytes: int, generation: int) -> list[bytes]:
    """Pages of `page_bytes` each, at least one. CallerError where they are too short.

    What exceeds HOT_SET_BLOCKS_MAX or HOT_SET_BYTES_MAX, the coldest, is left out.
    """
    if page_bytes < PAGE_BYTES_MIN:
        raise CallerError(f"page_bytes is {page_bytes}, must be {PAGE_BYTES_MIN} or more")
    name = instance.encode()
    if len(name) > NAME_BYTES_MAX:
        raise CallerError(f"the instance's name exceeds {NAME_BYTES_MAX} bytes")
    room = page_bytes - _HEAD.size - len(name)
    parts = _parts(hot[:HOT_SET_BLOCKS_MAX], room)[: _pages_max(page_bytes)]
    pages, first = [], 0
    for number, part in enumerate(parts):
        scopes = list(dict.fromkeys(block.scope for block in part))
        places = {scope: at for at, scope in enumerate(scopes)}
        head = _HEAD.pack(
            _MAGIC, number, len(parts), generation, first, len(part), len(scopes), len(name)
        )
        texts = [_LENGTH.pack(len(text)) + text for text in (s.encode() for s in scopes)]
        entries = [_ENTRY.pack(b.key, b.parent, places[b.scope], b.heat) for b in part]
        pages.append(b"".join((head, name, *texts, *entries)).ljust(page_bytes, b"\x00"))
        first += len(part)
    return pages


def decode(page: bytes | memoryview) -> Page:
    """Read one page. CallerError for whatever is not one, in any part."""
    data = bytes(page)
    try:
        return _decoded(data)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise CallerError(f"no page of a hot set: {type(error).__name__}") from error


def joined(pages: Sequence[Page]) -> HotSet:
    """The hot set of the pages of one record, from the first on, as far as they fit together."""
    blocks: list[HotBlock] = []
    for number, page in enumerate(pages):
        fits = page.number == number and page.first == len(blocks)
        if not fits or page.generation != pages[0].generation:
            break
        blocks += page.blocks
    return tuple(blocks[:HOT_SET_BLOCKS_MAX])


def _pages_max(page_bytes: int) -> int:
    return max(1, HOT_SET_BYTES_MAX // page_bytes)


def _parts(hot: HotSet, room: int) -> list[HotSet]:
    """Blocks of one page each; the first part may be empty."""
    parts: list[HotSet] = []
    part: list[HotBlock] = []
    scopes: set[ScopeId] = set()
    left = room
    for block in hot:
        size = _ENTRY.size
        if block.scope not in scopes:
            size += _LENGTH.size + len(block.scope.encode())
        if size > left:
            parts.append(tuple(part))
            part, scopes, left = [], set(), room
            size = _ENTRY.size + _LENGTH.size + len(block.scope.encode())
        part.append(block)
        scopes.add(block.scope)
        left -= size
    return [*parts, tuple(part)]


def _decoded(data: bytes) -> Page:
    magic, number, pages, generation, first, count, scopes_count, name_bytes = _HEAD.unpack_from(
        data
    )
    if magic != _MAGIC or number >= pages or pages > _pages_max(len(data)):
        raise CallerError("no page of a hot set")
    if first + count > HOT_SET_BLOCKS_MAX or name_bytes > NAME_BYTES_MAX:
        raise CallerError("a page of a hot set exceeds its ceilings")
    at = _HEAD.size
    instance = _text(data, at, name_bytes)
    at += name_bytes
    scopes = []
    for _ in range(scopes_count):
        (length,) = _LENGTH.unpack_from(data, at)
        if length > NAME_BYTES_MAX:
            raise CallerError("a scope of a hot set is too long")
        scopes.append(ScopeId(_text(data, at + _LENGTH.size, length)))
        at += _LENGTH.size + length
    if at + count * _ENTRY.size > len(data):
        raise CallerError("a page of a hot set is cut")
    blocks = []
    for place in range(first, first + count):
        key, parent, scope, heat = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if not NO_BLOCK_BEFORE <= parent < place or not 0 <= heat < math.inf:
            raise CallerError("an entry of a hot set contradicts itself")
        blocks.append(HotBlock(PrefixKey(key), parent, scopes[scope], heat))
    return Page(InstanceId(instance), generation, number, pages, first, tuple(blocks))


def _text(data: bytes, at: int, length: int) -> str:
    if at + length > len(data):
        raise CallerError("a page of a hot set is cut")
    return data[at : at + length].decode()

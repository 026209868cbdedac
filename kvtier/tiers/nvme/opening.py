"""What a tier does once, before it answers: own the directory, read the index, look at the files.

Attach or start cold: an index that cannot be opened or belongs to another release is deleted with
all it spoke of; one with damaged parts is replaced by what could be read of it. Payloads are not
read: each is verified when it is asked for. All of it blocks.
What must not live here: anything that is called after the start.
"""

import contextlib
import logging
from dataclasses import dataclass

from kvtier.errors import BackendError, CallerError
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.ports import TierObserver
from kvtier.tiers.nvme.archive import Archive
from kvtier.tiers.nvme.catalog import Catalog, CatalogDamagedError, CatalogFullError
from kvtier.tiers.nvme.home import Home
from kvtier.tiers.nvme.layout import (
    NvmeConfig,
    Place,
    aligned_pages,
    unpack_name,
    unpack_place,
)
from kvtier.tiers.nvme.saving import rebuilt
from kvtier.tiers.nvme.segments import Segment, segment_id_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """An open directory, its catalog, and what is in it."""

    home: Home
    catalog: Catalog
    archive: Archive

    def close(self) -> None:
        """Give it all back, unused."""
        for segment in self.archive.segments.values():
            segment.seal()
            segment.retire()
        with contextlib.suppress(BackendError):
            self.catalog.close()
        self.home.close()


def open_directory(config: NvmeConfig, observer: TierObserver | None) -> Opened:
    """Lock the directory and load what is there.

    Raises UnavailableError where another process owns it, ConfigError for sizes that cannot be, and
    BackendError where the disk refuses.
    """
    home = Home(config)
    try:
        catalog, entries = _catalog(home)
        archive = Archive(home.state.geometry, observer)
        _load(archive, home, entries)
        archive.overhead_bytes = home.overhead_bytes()
    except (BackendError, OSError) as error:
        home.close()
        if isinstance(error, OSError):
            raise BackendError(f"{config.directory}: {error.strerror}") from error
        raise
    return Opened(home, catalog, archive)


def _catalog(home: Home) -> tuple[Catalog, dict[bytes, bytes]]:
    """The catalog and its entries, whatever that takes."""
    home.remove_stray_indexes()
    try:
        catalog = Catalog(home.index, home.state.bytes_max)
        loaded = catalog.load()
    except CatalogDamagedError as error:
        _LOG.warning("nvme tier: %s: the tier starts cold", error)
        home.begin_generation()
        return Catalog(home.index, home.state.bytes_max), {}
    except CatalogFullError:
        _give_up_oldest(home)
        catalog = Catalog(home.index, home.state.bytes_max)
        loaded = catalog.load()
    if loaded.is_whole:
        return catalog, loaded.entries
    _LOG.warning("nvme tier: the index is damaged, %d blocks are left", len(loaded.entries))
    return rebuilt(home, catalog, loaded.entries), loaded.entries


def _give_up_oldest(home: Home) -> None:
    """The disk is full: delete the oldest segment, so that there is room to start."""
    ids = sorted(filter(None, map(segment_id_of, home.segments.iterdir())))
    if ids:
        _LOG.warning("nvme tier: the disk is full: the oldest segment is deleted")
        (home.segments / f"{ids[0]:016x}.segment").unlink()


def _load(archive: Archive, home: Home, entries: dict[bytes, bytes]) -> None:
    """Fill the archive with what has both an entry and a file; delete files without entries."""
    places: dict[int, list[tuple[bytes, Place]]] = {}
    for key, packed in entries.items():
        place = _place_of(key, packed)
        if place is None:
            archive.changes[key] = None
        else:
            places.setdefault(place.segment_id, []).append((key, place))
    unknown_count = 0
    for segment in _segments(home):
        placed = places.pop(segment.segment_id, [])
        if placed:
            _shelve(archive, segment, placed)
        else:
            segment.retire()
            segment.path.unlink()
            unknown_count += 1
    if unknown_count > 1:  # one is what a kill leaves
        _LOG.warning("nvme tier: %d segments that the index does not know: deleted", unknown_count)
    for segment_id, lost in places.items():
        # Another file of this id before the index has forgotten these would be read as theirs.
        archive.pass_over(segment_id)
        archive.changes.update(dict.fromkeys((key for key, _ in lost), None))
    archive.changes_count += len(archive.changes)
    _fit(archive)
    _resume(archive)


def _segments(home: Home) -> list[Segment]:
    """Attached, oldest first. What is not a file of ours is left alone."""
    found: list[Segment] = []
    for path in home.segments.iterdir():
        segment_id = segment_id_of(path)
        if segment_id is None or path.is_symlink() or not path.is_file():
            continue
        segment = Segment(segment_id, path, path.lstat().st_size)
        segment.attach()
        found.append(segment)
    return sorted(found, key=lambda segment: segment.segment_id)


def _shelve(archive: Archive, segment: Segment, placed: list[tuple[bytes, Place]]) -> None:
    """Know a segment's blocks as if they had been put in the order in which they lie there."""
    archive.adopt(segment)
    placed.sort(key=lambda one: one[1].offset)
    for one in placed:
        archive.ledger.add([one])
    last = placed[-1][1]
    segment.tail = aligned_pages(last.offset + last.frame_bytes)


def _fit(archive: Archive) -> None:
    """Delete the oldest segments of a tier whose cap was lowered."""
    geometry = archive.geometry
    allowed_bytes = geometry.segments_max(0) * geometry.segment_bytes
    for segment_id in list(archive.segments):
        if archive.segment_bytes <= allowed_bytes:
            return
        keys = archive.ledger.blocks(segment_id)
        for key in keys:
            archive.ledger.remove(key)
            archive.changes[key] = None
        archive.changes_count += len(keys)
        archive.ledger.close_shelf(segment_id)
        segment = archive.segments.pop(segment_id)
        segment.retire()
        segment.path.unlink()


def _resume(archive: Archive) -> None:
    """Append to the youngest segment where it was left: what no entry speaks of is not there."""
    youngest = next(reversed(archive.segments.values()), None)
    if youngest is not None and youngest.tail < youngest.size:
        with contextlib.suppress(OSError):
            youngest.reopen()
            archive.active = youngest


def _place_of(key: bytes, packed: bytes) -> Place | None:
    """None for an entry that no release of this format wrote."""
    try:
        unpack_name(key)
        place = unpack_place(packed)
    except CallerError:
        return None
    return place if place.payload_bytes <= PAYLOAD_BYTES_MAX else None

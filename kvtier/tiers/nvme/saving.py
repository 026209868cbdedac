"""Keeps the index on disk close behind memory, and brings the tier back after a full disk.

Changes are saved in batches, at most `save_s` after they were made. A batch that was not saved is
saved again by a catalog that was opened anew: an fsync that failed is never tried again as if it
could succeed. What must not live here: frames, what a change means.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.errors import BackendError, DeadlineError
from kvtier.ports import Clock
from kvtier.tiers.nvme.archive import Archive, Condition
from kvtier.tiers.nvme.catalog import Catalog, CatalogFullError
from kvtier.tiers.nvme.home import Home
from kvtier.tiers.nvme.lanes import Lane

_LOG = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Between attempts to come back from a full or failed disk."""
_SPACE_BYTES_MIN: Final = 1 << 20


@dataclass(slots=True)
class _Illness:
    """Why writes were stopped, until they go on."""

    space_bytes: int
    catalog_broken: bool
    must_rebuild: bool
    attempts_count: int = 0


class Saver:
    """Owns the catalog. Of the event loop; what blocks runs on its lane, one job at a time."""

    def __init__(self, archive: Archive, home: Home, catalog: Catalog, clock: Clock) -> None:
        self.free_space: Callable[[], Awaitable[None]] | None = None
        """Gives one segment back to the file system; called once each time the disk is full."""
        self._archive = archive
        self._home = home
        self._catalog = catalog
        self._clock = clock
        self._lane = Lane("kvtier-nvme-index", 1)
        self._wanted = asyncio.Event()
        self._at_once = asyncio.Event()
        self._progress = asyncio.Event()
        self._saved_count = archive.changes_count - len(archive.changes)
        """Of the archive's changes; what the start has found is not saved yet."""
        self._illness: _Illness | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, save_s: float) -> None:
        """Begin to save what changes."""
        self._task = asyncio.get_running_loop().create_task(self._run(save_s))
        if self._archive.changes:
            self._wanted.set()

    def changed(self) -> None:
        """Something changed: save it within `save_s`."""
        self._wanted.set()

    def hurry(self) -> None:
        """Much changed: save it now."""
        self._wanted.set()
        self._at_once.set()

    def stop_writes(self, space_bytes: int) -> None:
        """The disk is full: no writes until it takes a page and has so many bytes free."""
        self._fall_ill(Condition.DISK_FULL, _Illness(space_bytes, False, False))

    async def settle(self, deadline_s: float) -> None:
        """Return once all changes made so far are on disk.

        Raises DeadlineError, or BackendError where the disk does not take them now.
        """
        count = self._archive.changes_count
        while self._saved_count < count:
            if self._illness is not None:
                raise BackendError("the index cannot be written now")
            self.hurry()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._clock())):
                    await self._progress.wait()
            except TimeoutError:
                raise DeadlineError("the index was not written by the deadline") from None

    async def close(self, timeout_s: float) -> bool:
        """Save what is left and close the catalog; False where a thread is stuck in the disk."""
        deadline_s = self._clock() + timeout_s
        try:
            await self.settle(deadline_s)
        except (BackendError, DeadlineError) as error:
            _LOG.warning("nvme tier: closed with changes unsaved: %s", error)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        closing = self._lane.submit(lambda: _close_quietly(self._catalog))
        await asyncio.wait({closing}, timeout=max(0.0, deadline_s - self._clock()))
        return await self._lane.close(max(0.1, deadline_s - self._clock()))

    async def _run(self, save_s: float) -> None:
        while True:
            illness = self._illness
            if illness is not None:
                await self._recover(illness)
                continue
            await self._wanted.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(save_s):
                    await self._at_once.wait()
            if self._archive.condition is not Condition.WRITABLE:  # since it began to wait
                continue
            self._wanted.clear()
            self._at_once.clear()
            await self._save()

    async def _save(self) -> None:
        archive = self._archive
        count = archive.changes_count
        changes, unsaved_bytes = archive.take_changes()
        try:
            archive.overhead_bytes = await self._lane.submit(lambda: self._write(changes))
        except (BackendError, OSError) as error:
            archive.give_back_changes(changes, unsaved_bytes)
            archive.disk.index_failures += 1
            _LOG.warning("nvme tier: %s", error)
            is_full = isinstance(error, CatalogFullError)
            condition = Condition.DISK_FULL if is_full else Condition.INDEX_FAILED
            self._fall_ill(condition, _Illness(0, catalog_broken=True, must_rebuild=not is_full))
        else:
            archive.disk.index_saves += 1
            self._saved_count = count
        self._tell()

    def _write(self, changes: Mapping[bytes, bytes | None]) -> int:
        if changes:
            self._catalog.save(changes)
        return self._home.overhead_bytes()

    def _fall_ill(self, condition: Condition, illness: _Illness) -> None:
        before = self._illness
        if before is None:
            _LOG.warning("nvme tier: takes no writes: %s", condition.value)
            self._archive.condition = condition
        else:
            illness.space_bytes = max(illness.space_bytes, before.space_bytes)
            illness.catalog_broken |= before.catalog_broken
            illness.must_rebuild |= before.must_rebuild
        self._illness = illness
        self.hurry()

    async def _recover(self, illness: _Illness) -> None:
        """One attempt: everything that the disk refused before is tried on something smaller."""
        archive = self._archive
        if not illness.attempts_count and self.free_space is not None:
            await self.free_space()
        illness.attempts_count += 1
        await asyncio.sleep(RETRY_S)
        count = archive.changes_count
        changes, unsaved_bytes = archive.take_changes()
        entries = dict(archive.ledger.packed()) if illness.must_rebuild else {}
        try:
            archive.overhead_bytes = await self._lane.submit(
                lambda: self._heal(illness, changes, entries)
            )
        except (BackendError, OSError) as error:
            archive.give_back_changes(changes, unsaved_bytes)
            illness.must_rebuild |= illness.catalog_broken and not isinstance(
                error, CatalogFullError
            )
            _LOG.debug("nvme tier: still takes no writes: %s", error)
        else:
            archive.disk.index_rebuilds += illness.must_rebuild
            archive.condition = Condition.WRITABLE
            self._saved_count = count
            self._illness = None
            _LOG.warning("nvme tier: takes writes again")
        self._tell()

    def _heal(
        self,
        illness: _Illness,
        changes: Mapping[bytes, bytes | None],
        entries: Mapping[bytes, bytes],
    ) -> int:
        space = os.statvfs(self._home.root)
        if space.f_bavail * space.f_frsize < max(illness.space_bytes, _SPACE_BYTES_MIN):
            raise CatalogFullError("no space yet")
        self._home.probe()
        if illness.must_rebuild:
            self._catalog = rebuilt(self._home, self._catalog, entries)
        elif illness.catalog_broken:
            _close_quietly(self._catalog)
            self._catalog = Catalog(self._home.index, self._home.state.bytes_max)
            self._catalog.save(changes)
        elif changes:
            self._catalog.save(changes)
        return self._home.overhead_bytes()

    def _tell(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


def rebuilt(home: Home, old: Catalog, entries: Mapping[bytes, bytes]) -> Catalog:
    """A new catalog with these entries in place of a damaged one. Blocks; raises BackendError."""
    path = home.begin_index()
    catalog = Catalog(path, home.state.bytes_max)
    try:
        catalog.save(entries)
        _close_quietly(old)
        home.adopt_index(path)
    except BackendError:
        _close_quietly(catalog)
        home.remove_stray_indexes()
        raise
    return catalog


def _close_quietly(catalog: Catalog) -> None:
    """Close one whose content does not matter any more, or was saved."""
    with contextlib.suppress(BackendError):
        catalog.close()

"""Worker side of the connector: blocks between the engine's cache and the store, beside the model.

A load reads payloads, each verified in private memory, and copies the leading ones into the blocks
that the engine reserved; it always ends, with how many are in place. A save is copied out of the
cache before the engine goes on (`save` returns then), so that a block may be given away at once,
and is put by a thread; where the staging memory is full the blocks are not saved.
What must not live here: what to load and to save (scheduling.py), vLLM's objects.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.client.store import ReadTerms, WriteTerms
from kvtier.client.store_memory import Payload
from kvtier.core.frame import FrameName, KeyKind
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.pages import KvPages
from kvtier.engines.vllm.scheduling import LoadOrder, SaveOrder
from kvtier.errors import KvtierError
from kvtier.ports import GetResult, GetStatus, PutResult
from kvtier.types import Fingerprint

LOG = logging.getLogger("vllm.kvtier")
CHUNK_BLOCKS: Final = 16
"""Blocks that one call of the store's client moves."""
PUT_S: Final = 5.0
_CLOSE_S: Final = 10.0


class BlockClient(Protocol):
    """What is used of `kvtier.client.store_blocking.BlockStoreClient`."""

    def get_many(
        self,
        names: Sequence[FrameName],
        into: Sequence[Payload | None] | None = None,
        terms: ReadTerms = ...,
        *,
        deadline_s: float | None = None,
    ) -> list[GetResult]: ...

    def put_many(
        self,
        names: Sequence[FrameName],
        payloads: Sequence[Payload],
        terms: WriteTerms = ...,
        *,
        deadline_s: float | None = None,
    ) -> list[PutResult]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """How a load ended: so many blocks, head first, are in place; the others were not written."""

    order: LoadOrder
    leading_blocks: int
    seconds: float


@dataclass(slots=True)
class TransferCounts:
    """Since the start; blocks, and seconds of the thread."""

    loaded: int = 0
    not_loaded: int = 0
    load_s: float = 0.0
    saved: int = 0
    not_saved: int = 0
    dropped: int = 0
    """Not saved because the staging memory was full."""
    save_s: float = 0.0


@dataclass(slots=True)
class _Staged:
    """Blocks of an order, copied out of the cache into one chunk of staging memory."""

    order: SaveOrder
    start: int
    stop: int
    rows: npt.NDArray[np.uint8]


class Transfers:
    """Loads and saves of one rank. Called by the engine's thread; owns two threads and a client."""

    def __init__(
        self,
        pages: KvPages,
        facts: EngineFacts,
        rank: int,
        client: BlockClient,
        load_s: float,
        staging_bytes: int,
    ) -> None:
        self.counts = TransferCounts()
        self._pages = pages
        self._facts = facts
        self._rank = rank
        self._client = client
        self._load_s = load_s
        self._namespaces: dict[tuple[bytes | None, str], Fingerprint] = {}
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._chunks_unmade = staging_bytes // (CHUNK_BLOCKS * pages.block_bytes)
        self._lock = threading.Lock()
        self._ended: list[LoadEnd] = []
        self._loads: queue.Queue[LoadOrder | None] = queue.Queue()
        self._saves: queue.Queue[_Staged | None] = queue.Queue()
        self._row = np.empty((CHUNK_BLOCKS, pages.block_bytes), np.uint8)
        self._threads = [
            threading.Thread(target=self._load_all, name="kvtier loads", daemon=True),
            threading.Thread(target=self._save_all, name="kvtier saves", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def load(self, order: LoadOrder) -> None:
        """Begin; its end is among `ended` once. The blocks are written until then."""
        self._loads.put(order)

    def save(self, order: SaveOrder) -> None:
        """Copy the blocks out, and have them put. They may be overwritten when this returns."""
        for start in range(0, len(order.digests), CHUNK_BLOCKS):
            stop = min(start + CHUNK_BLOCKS, len(order.digests))
            chunk = self._chunk()
            if chunk is None:
                self.counts.dropped += len(order.digests) - start
                return
            rows = chunk[: stop - start]
            self._pages.gather(order.block_ids[start:stop], rows)
            self._saves.put(_Staged(order, start, stop, rows))

    def ended(self) -> list[LoadEnd]:
        """Loads that ended since this was asked last."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the threads and the client; what waits is given up. Blocks for seconds at most."""
        self._loads.put(None)
        with contextlib.suppress(queue.Empty):
            while True:
                self._saves.get_nowait()
        self._saves.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._client.close()

    def _chunk(self) -> npt.NDArray[np.uint8] | None:
        """Memory for `CHUNK_BLOCKS` blocks, used again and again; None where all is in use."""
        with self._lock:
            if self._chunks:
                return self._chunks.pop()
            if not self._chunks_unmade:
                return None
            self._chunks_unmade -= 1
        return np.empty((CHUNK_BLOCKS, self._pages.block_bytes), np.uint8)

    # ---- the loads' thread

    def _load_all(self) -> None:
        while (order := self._loads.get()) is not None:
            began_s = time.monotonic()
            leading = 0
            try:
                leading = self._load(order, began_s + self._load_s)
            except KvtierError as error:
                LOG.warning("kvtier: a load failed: %s", error)
            except Exception as error:  # the thread's outermost edge: the request must go on
                LOG.exception("kvtier: a load broke off", exc_info=error)
            seconds = time.monotonic() - began_s
            with self._lock:
                self.counts.loaded += leading
                self.counts.not_loaded += len(order.digests) - leading
                self.counts.load_s += seconds
                self._ended.append(LoadEnd(order, leading, seconds))

    def _load(self, order: LoadOrder, end_s: float) -> int:
        """How many blocks, from the first, are in place."""
        names = self._names(order.digests, order)
        terms = ReadTerms(payload_bytes=self._pages.block_bytes)
        leading = 0
        while leading < len(names):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            chunk = names[leading : leading + CHUNK_BLOCKS]
            rows = self._row[: len(chunk)]
            results = self._client.get_many(chunk, list(rows), terms, deadline_s=left_s)
            whole = _leading_hits(results)
            if whole:
                ids = order.block_ids[leading : leading + whole]
                self._pages.scatter(ids, rows[:whole])
                leading += whole
            if whole < len(chunk):
                break
        return leading

    # ---- the saves' thread

    def _save_all(self) -> None:
        while (staged := self._saves.get()) is not None:
            began_s = time.monotonic()
            saved, blocks = 0, staged.stop - staged.start
            try:
                saved = self._save(staged)
            except KvtierError as error:
                LOG.warning("kvtier: a save failed: %s", error)
            except Exception as error:  # the thread's outermost edge: saves are only copies
                LOG.exception("kvtier: a save broke off", exc_info=error)
            chunk = staged.rows.base
            assert isinstance(chunk, np.ndarray)
            with self._lock:
                self._chunks.append(chunk)
                self.counts.saved += saved
                self.counts.not_saved += blocks - saved
                self.counts.save_s += time.monotonic() - began_s

    def _save(self, staged: _Staged) -> int:
        order, start, stop = staged.order, staged.start, staged.stop
        names = self._names(order.digests[start:stop], order)
        terms = WriteTerms(prefix_hashes=order.prefix_hashes[start:stop])
        results = self._client.put_many(names, list(staged.rows), terms, deadline_s=PUT_S)
        return sum(result.is_held for result in results)

    def _names(self, digests: Sequence[bytes], order: LoadOrder | SaveOrder) -> list[FrameName]:
        kind = order.adapter, order.generation
        namespace = self._namespaces.get(kind)
        if namespace is None:
            facts = replace(self._facts, generation=order.generation)
            namespace = facts.spec(self._rank, order.adapter).fingerprint()
            self._namespaces[kind] = namespace
        return [FrameName(KeyKind.ENGINE_DIGEST, digest, namespace) for digest in digests]


def _leading_hits(results: Sequence[GetResult]) -> int:
    for at, result in enumerate(results):
        if result.status is not GetStatus.HIT:
            return at
    return len(results)

"""Which blocks vLLM's cache holds, for bridges beside it: seen in the scheduler, told by a thread.

vLLM hands its block pool to a connector and lets it look at the blocks (`bind_gpu_block_pool`). A
block changes its name only where a request fills it or where it is handed out anew, both of which a
connector sees step by step. What happens beside that (a reset of the cache, blocks whose load
failed) is found by looking a share of the pool over in each step.

The scheduler never waits for a bridge: it writes a table with a row a block. The thread tells each
bridge the rows that changed since it last listened, however long ago that was, and all of them at
first. What must not live here: vLLM's modules, frames (`kvtier.core.engine_residents`).
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kvtier.core.engine_residents import (
    LIFE_BYTES,
    NO_BYTES,
    ROW,
    SYNCED_FRAME,
    Hello,
    SlotState,
    held_rows,
    hello_frame,
    rows_frames,
)
from kvtier.errors import BackendError, KvtierError
from kvtier.limits import ENGINE_FEED_CLIENTS_MAX

LOG = logging.getLogger("vllm.kvtier")
SWEEP_BLOCKS_MIN: Final = 256
"""Looked over in each step: small pools whole, since an engine may rest for long after it."""
SWEEP_STEPS: Final = 256
"""In so many steps the whole pool is looked over once, if it is large."""
TURN_S: Final = 0.02
"""How often bridges are told what changed."""
IDLE_S: Final = 0.5
ALIVE_S: Final = 1.0
"""So often a bridge hears something, whether or not anything changes."""
_CLOSE_S: Final = 5.0
_NOT_LOOKED: Final = object()


class CachedBlock(Protocol):
    """What is looked at of vLLM's `KVCacheBlock`."""

    @property
    def block_hash(self) -> Any:
        """Digest and cache group, while the block is in the prefix cache."""
        ...


class BlockKeys(Protocol):
    """Prefix keys of a request's blocks, growing with it."""

    def __len__(self) -> int: ...
    def key(self, at: int) -> bytes: ...


class NoKeys:
    """Of requests whose chain no prefix key names."""

    def __len__(self) -> int:
        return 0

    def key(self, at: int) -> bytes:
        raise IndexError(at)


NO_KEYS: Final = NoKeys()


@dataclass(slots=True)
class _Followed:
    digests: Sequence[bytes]
    keys: BlockKeys
    seen: int = 0
    """Leading blocks of the request that are known to hold its digests."""
    last_slot: int = -1
    """Of those, where the last one is: another one there means another table."""


class SlotTable:
    """A row for each block of the pool. Written by the scheduler's thread, read by any."""

    def __init__(self, blocks: Sequence[CachedBlock], digest_of: Callable[[Any], bytes]) -> None:
        self._blocks = blocks
        self._digest_of = digest_of
        self._seen: list[object] = [None] * len(blocks)
        self._requests: dict[str, _Followed] = {}
        self._unknown: set[int] = set()
        self._new: list[bytes] = []
        """Rows of this step, packed."""
        self._sweep_at = 0
        self._steps_since_full = SWEEP_STEPS
        self._lock = threading.Lock()
        self._rows = bytearray(len(blocks) * ROW.size)
        for slot in range(len(blocks)):
            ROW.pack_into(self._rows, slot * ROW.size, slot, SlotState.EMPTY, NO_BYTES, NO_BYTES)
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    # ---- the scheduler's thread

    def arrived(self, request_id: str, digests: Sequence[bytes], keys: BlockKeys) -> None:
        """A request whose blocks will be named by these digests and keys."""
        self._requests[request_id] = _Followed(digests, keys)

    def handed_out(self, slots: Iterable[int]) -> None:
        """These blocks were given away, whatever they held before."""
        for slot in slots:
            self._look(slot)

    def follow(self, request_id: str, slots: Sequence[int]) -> None:
        """Look which of a request's blocks are full now. O(blocks that became full)."""
        one = self._requests.get(request_id)
        if one is None:
            return
        if one.seen and (len(slots) < one.seen or slots[one.seen - 1] != one.last_slot):
            one.seen = 0  # preempted meanwhile: another table
        while one.seen < min(len(slots), len(one.digests)):
            slot = slots[one.seen]
            name = self._blocks[slot].block_hash
            if name is None:
                break
            if name is not self._seen[slot] or slot in self._unknown:
                self._note(slot, name, self._key(one, name))
            one.seen += 1
            one.last_slot = slot

    def finished(self, request_id: str, slots: Sequence[int]) -> None:
        """The request is over; its blocks may stay."""
        self.follow(request_id, slots)
        self._requests.pop(request_id, None)

    def end_step(self) -> None:
        """Look over a share of the pool, and show what changed in this step to the readers."""
        share = max(SWEEP_BLOCKS_MIN, len(self._blocks) // SWEEP_STEPS)
        self._steps_since_full += 1
        stop = min(self._sweep_at + share, len(self._blocks))
        surprises = [self._look(slot) for slot in range(self._sweep_at, stop)]
        self._sweep_at = stop if stop < len(self._blocks) else 0
        if any(surprises) and self._steps_since_full * share >= len(self._blocks):
            self._steps_since_full = 0
            self.handed_out(range(len(self._blocks)))
        if self._new:
            new, self._new = self._new, []
            with self._lock:
                for packed in new:
                    slot = int.from_bytes(packed[:4], "little")
                    self._rows[slot * ROW.size : (slot + 1) * ROW.size] = packed
                    self._changed.add(slot)

    # ---- readers

    def take_changed(self) -> set[int]:
        """Slots whose row changed since this was asked last; for one reader."""
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def rows(self, slots: Iterable[int]) -> bytes:
        """The rows of slots as they are now."""
        with self._lock:
            return b"".join(self._rows[s * ROW.size : (s + 1) * ROW.size] for s in slots)

    def held(self) -> bytes:
        """The rows of all slots that hold something."""
        with self._lock:
            table = bytes(self._rows)
        return held_rows(table)

    # ---- parts

    def _look(self, slot: int) -> bool:
        """Whether a block has another name than before; whose it is, nobody here says."""
        name = self._blocks[slot].block_hash
        if name is self._seen[slot] or name == self._seen[slot]:
            return False
        self._note(slot, name, None)
        return True

    def _key(self, one: _Followed, name: Any) -> bytes | None:
        """The key of a block of this request; empty where it is nameless."""
        if self._digest_of(name) != one.digests[one.seen]:
            return None
        if one.keys is NO_KEYS:
            return b""
        return one.keys.key(one.seen) if one.seen < len(one.keys) else None

    def _note(self, slot: int, name: Any, key: bytes | None) -> None:
        self._seen[slot] = name
        self._unknown.discard(slot)
        if name is None:
            self._new.append(ROW.pack(slot, SlotState.EMPTY, NO_BYTES, NO_BYTES))
            return
        state = SlotState.KEYED if key else SlotState.NAMELESS
        if key is None:
            state = SlotState.UNKNOWN
            self._unknown.add(slot)
        self._new.append(ROW.pack(slot, state, self._digest_of(name), key or NO_BYTES))


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    outgoing: bytes
    said_at: float
    changed: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class FeedTerms:
    """Where bridges connect, and who speaks: the rank and the root of its pool."""

    folder: Path
    rank: int
    root: bytes

    @property
    def path(self) -> Path:
        return self.folder / f"residents-{self.rank}.sock"


class ResidentsFeed:
    """Watches one engine rank's pool and tells bridges. Nothing here raises into the scheduler:
    what breaks ends the feed, loudly, and bridges go on with the engine's events."""

    def __init__(self, terms: FeedTerms, digest_of: Callable[[Any], bytes]) -> None:
        self._terms = terms
        self._digest_of = digest_of
        self._table: SlotTable | None = None
        self._life = secrets.token_bytes(LIFE_BYTES)
        self._listener: socket.socket | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier residents", daemon=True)

    @property
    def is_on(self) -> bool:
        return self._table is not None

    # ---- the scheduler's thread

    def bind(self, blocks: Sequence[CachedBlock]) -> None:
        """The engine's pool is there: begin to watch, and to listen."""
        try:
            self._listener = _listening(self._terms.path)
        except (OSError, KvtierError) as error:
            LOG.error("kvtier: no bridge can be told what is resident: %s", error)
            return
        self._table = SlotTable(blocks, self._digest_of)
        self._thread.start()
        LOG.info("kvtier tells bridges what is resident at %s", self._terms.path)

    def arrived(self, request_id: str, digests: Sequence[bytes], keys: BlockKeys) -> None:
        """See `SlotTable`."""
        if self._table is not None:
            self._table.arrived(request_id, digests, keys)

    def allocated(self, request_id: str, slots: Sequence[int]) -> None:
        """The engine gave a request these blocks."""

        def look(table: SlotTable) -> None:
            table.follow(request_id, slots)
            table.handed_out(slots)

        if self._table is not None:
            self._guarded(look)

    def step(
        self,
        tables: Iterable[tuple[str, Sequence[int]]],
        handed_out: Iterable[Sequence[int]],
    ) -> None:
        """The scheduler made a step of these requests with their blocks, and gave blocks away."""

        def look(table: SlotTable) -> None:
            for request_id, slots in tables:
                table.follow(request_id, slots)
            for slots in handed_out:
                table.handed_out(slots)
            table.end_step()

        if self._table is not None:
            self._guarded(look)

    def finished(self, request_id: str, slots: Sequence[int]) -> None:
        """See `SlotTable`."""
        if self._table is not None:
            self._guarded(lambda table: table.finished(request_id, slots))

    def close(self) -> None:
        """End the thread and all connections. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        self._table = None

    def _guarded(self, work: Callable[[SlotTable], None]) -> None:
        table = self._table
        assert table is not None
        try:
            work(table)
        except Exception as error:  # outermost edge: the engine must go on
            LOG.exception("kvtier: what is resident is told no more", exc_info=error)
            self._table = None
            self._stopping.set()

    # ---- the thread

    def _run(self) -> None:
        listener, table = self._listener, self._table
        assert listener is not None
        assert table is not None
        clients: list[_Client] = []
        try:
            while not self._stopping.is_set():
                _wait(listener, clients)
                self._accept(listener, table, clients)
                changed = table.take_changed()
                for client in list(clients):
                    client.changed |= changed
                    if not _tell(client, table):
                        client.connection.close()
                        clients.remove(client)
        except Exception as error:  # outermost edge of the thread: bridges see the end of it
            LOG.exception("kvtier: what is resident is told no more", exc_info=error)
        finally:
            for client in clients:
                client.connection.close()
            self._terms.path.unlink(missing_ok=True)
            listener.close()

    def _accept(self, listener: socket.socket, table: SlotTable, clients: list[_Client]) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                if len(clients) >= ENGINE_FEED_CLIENTS_MAX or not _is_trusted(connection):
                    LOG.warning("kvtier: a bridge is turned away")
                    connection.close()
                    continue
                connection.setblocking(False)
                hello = Hello(self._life, self._terms.rank, len(table), self._terms.root)
                # What changes from here on comes after the rows, so nothing falls in between.
                first = hello_frame(hello) + rows_frames(table.held()) + SYNCED_FRAME
                clients.append(_Client(connection, first, time.monotonic()))


def _wait(listener: socket.socket, clients: Sequence[_Client]) -> None:
    """Until somebody calls, or it is time to tell what changed."""
    if not clients:
        select.select([listener], [], [], IDLE_S)
        return
    busy = [client.connection for client in clients if client.outgoing]
    select.select([listener], busy, [], TURN_S)


def _tell(client: _Client, table: SlotTable) -> bool:
    """Send what fits; whether the client is still there."""
    now = time.monotonic()
    if not client.outgoing:
        if client.changed:
            slots, client.changed = sorted(client.changed), set()
            client.outgoing = rows_frames(table.rows(slots)) + SYNCED_FRAME
        elif now - client.said_at >= ALIVE_S:
            client.outgoing = SYNCED_FRAME
    try:
        if client.outgoing:
            sent = client.connection.send(client.outgoing)
            client.outgoing = client.outgoing[sent:]
            client.said_at = now
        return not _is_over(client.connection)
    except BlockingIOError:
        return True
    except OSError:
        return False


def _is_over(connection: socket.socket) -> bool:
    """Whether the other side is gone; bridges say nothing."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _listening(path: Path) -> socket.socket:
    """A socket that only this user can open. BackendError for a folder that others may change, or
    where another engine listens."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.parent.stat()
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(f"{path.parent} is another user's, or others may write to it")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.exists():
            _remove_dead(path)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(ENGINE_FEED_CLIENTS_MAX)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise BackendError(f"another engine listens at {path}")


def _is_trusted(connection: socket.socket) -> bool:
    layout = struct.Struct("iII")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return layout.unpack(raw)[1] in {os.geteuid(), 0}

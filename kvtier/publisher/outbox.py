"""The hand-over from engine threads to the publishing thread, and the one `Publication` behind it.

Two locks. `_entry` guards a plain list and is held for a few instructions, so that an engine's call
costs about a microsecond whatever happens elsewhere. `_lock` guards the publication.

The queue is bounded. Above the bound the engine's call takes some of the publishing thread's work
upon itself: it moves twice as many blocks as it brings into the publication, a dict operation a
block in C. Nothing is dropped, so the resident set is always right, and the owner never has to
enumerate what it holds: memory is bounded by the ring's bounds and by the cache that the resident
set mirrors. What a slow replica pays for an overflow is a snapshot. Only when the publishing thread
is inside the publication at that moment and the queue has twice its bound does the call wait, for
that one step of at most `STEP_BLOCKS` blocks (or of copying a snapshot).

What must not live here: connections, asyncio.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Final

from kvtier.core.event_columns import NO_PARENT, EventKind, U64Array
from kvtier.core.event_messages import FenceReason, Heartbeat, Hello, Reply
from kvtier.core.publication import Message, Publication, PublicationStats
from kvtier.types import Epoch, Seq, Tier, Trust

STEP_BLOCKS: Final = 8192
"""Moved at a time, so that nobody waits long for the lock and heartbeats come in between."""

Change = tuple[EventKind, Tier, int, U64Array]


class Outbox:
    """Thread-safe; every method returns without waiting for anything but another's short step."""

    def __init__(
        self,
        publication: Publication,
        queue_blocks_max: int,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from engine threads when the queue stops being empty."""
        self._publication = publication
        self._queue_blocks_max = queue_blocks_max
        self._clock = clock
        self._wake = wake
        self._entry = threading.Lock()
        self._lock = threading.Lock()
        self._queue: deque[Change] = deque()
        self._queued_blocks = 0
        self._before = PublicationStats()
        """Counters of the epochs before this one."""
        self.changes = 0
        """Put so far; the first `_moved` of them are in the publication."""
        self._moved = 0
        self._trust_due: tuple[int, Trust] | None = None
        """What to say of the state once so many changes are in the publication."""
        self.queue_overflows = 0
        self.engine_waits = 0

    # ---- engine threads

    def put(self, kind: EventKind, tier: Tier, hashes: U64Array, parent: int = NO_PARENT) -> None:
        """Queue a change that has been checked. Order is kept per calling thread."""
        with self._entry:
            is_first = not self._queue
            self._queue.append((kind, tier, parent, hashes))
            self._queued_blocks += len(hashes)
            self.changes += 1
            queued = max(self._queued_blocks, len(self._queue))
        if is_first:
            self._wake()
        if queued > self._queue_blocks_max:
            self._help(queued, len(hashes))

    def put_trust(self, trust: Trust) -> None:
        """Say this of the state with all changes put before; see `Publication.set_trust`."""
        with self._entry:
            self._trust_due = (self.changes, trust)
        self._wake()

    def _help(self, queued: int, brought: int) -> None:
        if not self._lock.acquire(blocking=False):
            if queued <= 2 * self._queue_blocks_max:
                return  # the publishing thread is at it
            self.engine_waits += 1
            self._lock.acquire()
        try:
            self.queue_overflows += 1
            self._move(STEP_BLOCKS + 2 * brought)
        finally:
            self._lock.release()

    # ---- the publishing thread

    @property
    def epoch(self) -> Epoch:
        return self._publication.epoch

    @property
    def fenced(self) -> FenceReason | None:
        return self._publication.fenced

    @property
    def queued_blocks(self) -> int:
        return self._queued_blocks

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued; the next `put` then wakes."""
        return not self._queue

    def move(self, until: int) -> bool:
        """Take a step towards having the first `until` changes in the publication; is it done?"""
        with self._lock:
            if self._moved < until:
                self._move(STEP_BLOCKS)
            return self._moved >= until

    def seal(self) -> Seq:
        """Make a batch of what has been moved; returns the last batch's number."""
        with self._lock:
            self._publication.flush()
            with self._entry:
                due = self._trust_due
                is_due = due is not None and self._moved >= due[0]
                self._trust_due = None if is_due else due
            if due is not None and is_due:
                self._publication.set_trust(due[1])
            return self._publication.seq

    def attach(self, target: str) -> Epoch:
        """A stream to a replica was opened; returns the epoch that it speaks for."""
        with self._lock:
            self._publication.attach(target)
            return self._publication.epoch

    def poll(self, target: str, messages_max: int) -> list[Message]:
        with self._lock:
            return self._publication.poll(target, self._clock(), messages_max)

    def heartbeat(self, target: str) -> Heartbeat | Hello | None:
        with self._lock:
            return self._publication.heartbeat(target)

    def trust(self, target: str) -> Trust:
        with self._lock:
            return self._publication.trust(target)

    def receive(self, target: str, reply: Reply) -> None:
        with self._lock:
            self._publication.receive(target, reply)

    def lag_batches(self, target: str) -> int:
        """Batches that a replica has not acknowledged; all of them where it never connected."""
        with self._lock:
            if target not in self._publication.replicas():
                return self._publication.seq
            return self._publication.lag_batches(target)

    def succeed(self, epoch: Epoch) -> None:
        """Carry the residents into a new epoch. Replicas have to be attached again."""
        with self._lock:
            self._before = _sum(self._before, self._publication.stats)
            self._publication = self._publication.successor(epoch)

    def totals(self) -> tuple[Seq, int, PublicationStats]:
        """Last batch, resident copies, and counters over all epochs."""
        with self._lock:
            publication = self._publication
            return (
                publication.seq,
                publication.copies_count,
                _sum(self._before, publication.stats),
            )

    def _move(self, blocks_max: int) -> None:
        """Take the oldest changes into the publication, at least one if there is one.

        The caller holds `_lock`, which keeps the order.
        """
        moved: list[Change] = []
        blocks_count = 0
        with self._entry:
            while self._queue and blocks_count < blocks_max:
                change = self._queue.popleft()
                moved.append(change)
                blocks_count += max(1, len(change[3]))
                self._queued_blocks -= len(change[3])
            self._moved += len(moved)
        now = self._clock()
        publication = self._publication
        for kind, tier, parent, hashes in moved:
            match kind:
                case EventKind.STORE:
                    publication.store(tier, parent, hashes, now)
                case EventKind.REMOVE:
                    publication.remove(tier, hashes, now)
                case EventKind.CLEAR_TIER:
                    publication.clear_tier(tier, now)
                case EventKind.CLEAR_ALL:
                    publication.clear_all(now)


def _sum(one: PublicationStats, other: PublicationStats) -> PublicationStats:
    names = [field.name for field in fields(PublicationStats)]
    return PublicationStats(**{name: getattr(one, name) + getattr(other, name) for name in names})

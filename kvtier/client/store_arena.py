"""The shared memory of this node's store, as long as there is one; attached anew when it restarts.

Safe from several threads: reads of an arena that was replaced end before its memory is let go.
What must not live here: calls over gRPC.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import KvtierError
from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig, connect_arena
from kvtier.tiers.arena.directory import ABI_VERSION, read_layout

LOOK_S = 0.25
"""How often a client that only reads looks whether its store still lives."""


class _Counted:
    """An arena and how many calls are inside it."""

    def __init__(self, client: ArenaClient) -> None:
        self.client = client
        self.users = 0
        self.is_retired = False


class SharedArena:
    """At most one session with the arena of one store."""

    def __init__(self, config: ArenaClientConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._current: _Counted | None = None
        self._looked_s = 0.0
        self._is_closed = False

    @property
    def is_attached(self) -> bool:
        """Whether there is a session whose store lives, as far as is known."""
        with self._lock:
            return self._current is not None

    @contextlib.contextmanager
    def use(self) -> Iterator[ArenaClient | None]:
        """The session, kept alive meanwhile; None where there is none."""
        counted = self._enter()
        try:
            yield None if counted is None else counted.client
        finally:
            if counted is not None:
                self._leave(counted)

    def attach(self, path: str, abi: int, epoch: int) -> bool:
        """Open a session, unless there is one; whether there is one now. Blocks for a moment.

        `epoch` is what the store says of its arena: another store may listen at that path here.
        """
        with self._lock:
            if self._current is not None or self._is_closed:
                return not self._is_closed
        if not path or abi != ABI_VERSION or not Path(path).is_socket():
            return False
        try:
            client = connect_arena(Path(path), self._config)
        except KvtierError:
            return False
        if read_layout(client.memory.directory.view).epoch == epoch:
            with self._lock:
                if self._current is None and not self._is_closed:
                    self._current = _Counted(client)
                    return True
        client.close()
        return self.is_attached

    def doubt(self) -> None:
        """The store was seen to differ from this memory: attach anew at the next occasion."""
        with self._lock:
            counted, self._current = self._current, None
        if counted is not None:
            self._retire(counted)

    def close(self) -> None:
        """End the session. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.doubt()

    def _enter(self) -> _Counted | None:
        now = time.monotonic()
        with self._lock:
            counted = self._current
            if counted is None:
                return None
            counted.users += 1
            looks = now - self._looked_s >= LOOK_S
            if looks:
                self._looked_s = now
        there = counted.client.look() if looks else counted.client.is_attached
        if there:
            return counted
        self._leave(counted)
        with self._lock:
            if self._current is counted:
                self._current = None
        self._retire(counted)
        return None

    def _leave(self, counted: _Counted) -> None:
        with self._lock:
            counted.users -= 1
            is_last = counted.is_retired and not counted.users
        if is_last:
            counted.client.close()

    def _retire(self, counted: _Counted) -> None:
        with self._lock:
            first = not counted.is_retired
            counted.is_retired = True
            is_free = first and not counted.users
        if is_free:
            counted.client.close()

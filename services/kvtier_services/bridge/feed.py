"""The socket at which an engine's own connector tells what is resident: found, read, believed.

One per rank, of the follower's thread; no call waits. The path is tried until an engine is there.
Whoever listens must be this user or root. What must not live here: what rows mean (rank.py,
`kvtier.core.engine_residents`).
"""

import os
import socket
import struct
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from kvtier.core.engine_residents import Frame, FrameReader, Hello
from kvtier.errors import CallerError
from kvtier.telemetry.logs import EventLog

LOG: Final = EventLog("kvtier_services.bridge")
CALL_S: Final = 0.25
"""How often an engine that is not there is looked for."""
REFUSED_S: Final = 5.0
"""The same after something that does not pass by itself."""
SILENT_S: Final = 4.0
"""A connector that says nothing for so long is not believed any more."""
_READ_BYTES: Final = 1 << 18
_READS_MAX: Final = 16
"""Of one turn, before others have theirs."""


class FeedFault(StrEnum):
    """Why a connector is not listened to; labels of a metric."""

    PEER = "peer"
    """Another user listens at the socket."""
    SHAPE = "shape"
    """Its bytes are not what they should be."""
    POOL = "pool"
    """It speaks of another model, revision or block size than the model card."""
    RANK = "rank"
    """It is another rank."""
    TOO_LARGE = "too_large"
    """It has more blocks than `memory.residents_max`."""
    SILENT = "silent"
    """Its process stands still."""


class FeedRefusedError(Exception):
    """A hearer's verdict on a hello; never leaves this package."""

    def __init__(self, fault: FeedFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class FeedHearer(Protocol):
    """What is told of one rank; `EngineRank` is one."""

    def feed_opened(self, hello: Hello, now: float) -> None: ...
    def feed_said(self, frame: Frame, now: float) -> None: ...
    def feed_closed(self, now: float) -> None: ...


class FeedSocket:
    """The connection to one rank's connector, if there is any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: socket.socket | None = None
        self._reader = FrameReader()
        self._is_open = False
        """Whether a hello was taken."""
        self._heard_at = 0.0
        self._call_at = 0.0
        self.faults: Counter[FeedFault] = Counter()

    def fileno(self) -> int | None:
        """For a poller."""
        return None if self._connection is None else self._connection.fileno()

    def take(self, hearer: FeedHearer, now: float) -> bool:
        """Hand over what has come, or look for an engine; whether more may be waiting."""
        if self._connection is None and (now < self._call_at or not self._call(now)):
            return False
        try:
            return self._read(hearer, now)
        except FeedRefusedError as refused:
            self._refuse(refused.fault, hearer, now)
        except CallerError as error:
            LOG.error("a connector cannot be understood", reason=str(error))
            self._refuse(FeedFault.SHAPE, hearer, now)
        except OSError:
            self._close(hearer, now, CALL_S)
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---- parts

    def _call(self, now: float) -> bool:
        self._call_at = now + CALL_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return False
        layout = struct.Struct("iII")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
        if layout.unpack(raw)[1] not in {os.geteuid(), 0}:
            connection.close()
            self.faults[FeedFault.PEER] += 1
            LOG.error("another user listens where a connector should", path=str(self._path))
            self._call_at = now + REFUSED_S
            return False
        self._connection = connection
        self._reader, self._is_open, self._heard_at = FrameReader(), False, now
        return True

    def _read(self, hearer: FeedHearer, now: float) -> bool:
        assert self._connection is not None
        for _ in range(_READS_MAX):
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:
                if now - self._heard_at >= SILENT_S:
                    raise FeedRefusedError(FeedFault.SILENT) from None
                return False
            if not data:
                self._close(hearer, now, CALL_S)
                return False
            self._heard_at = now
            for frame in self._reader.take(data):
                self._hand_over(frame, hearer, now)
        return True

    def _hand_over(self, frame: Frame, hearer: FeedHearer, now: float) -> None:
        if isinstance(frame, Hello) == self._is_open:
            raise CallerError("a hello where none is due, or none where one is")
        if isinstance(frame, Hello):
            hearer.feed_opened(frame, now)
            self._is_open = True
        else:
            hearer.feed_said(frame, now)

    def _refuse(self, fault: FeedFault, hearer: FeedHearer, now: float) -> None:
        self.faults[fault] += 1
        LOG.error("a connector is not listened to", reason=fault.value, path=str(self._path))
        self._close(hearer, now, REFUSED_S)

    def _close(self, hearer: FeedHearer, now: float, again_s: float) -> None:
        self.close()
        self._call_at = now + again_s
        if self._is_open:
            self._is_open = False
            hearer.feed_closed(now)

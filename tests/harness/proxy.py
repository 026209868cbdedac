"""A TCP proxy that breaks what passes through it, steered from any thread while it runs.

Faults are set per direction and hold for all connections; every one is counted, so that a test can
assert that it happened. TCP is a byte stream, hence the limits: messages cannot be lost, doubled or
swapped here (a frame of HTTP/2 may span chunks), only bytes. `HOLD` is what a cut link does to TCP
(nothing arrives, after healing everything does). `DISCARD` and `duplicate_probability` break the
stream itself: they suit raw protocols, and tests of how a parser takes garbage. Reordering does not
exist on this layer; lost, doubled or swapped *messages* are made by a client that sends them so.
What must not live here: knowledge of any protocol above TCP.
"""

import asyncio
import contextlib
import dataclasses
import math
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")
Dial = Callable[[], socket.socket]
"""Connects to the server and returns the socket; may block (it runs in a thread)."""

CHUNK_BYTES_MAX = 64 << 10
BUFFER_CHUNKS_MAX = 64
"""Per direction of a connection; beyond it the sender feels backpressure."""
CONNECTIONS_COUNT_MAX = 2048
CONTROL_DEADLINE_S = 30.0
_DIAL_TIMEOUT_S = 5.0
_SLICES_PER_S = 50


class Direction(Enum):
    TO_SERVER = 0
    TO_CLIENT = 1


class Flow(Enum):
    """What happens to the bytes of one direction."""

    PASS = "pass"
    HOLD = "hold"
    """A one-way cut: nothing passes until it ends, then everything does, in order."""
    DISCARD = "discard"
    """Bytes read meanwhile are lost: the stream has a hole."""


class Admission(Enum):
    """What happens to new connections."""

    ACCEPT = "accept"
    RESET = "reset"
    SILENT = "silent"
    """Accepted, never answered, never connected to the server."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one direction; the default is none."""

    flow: Flow = Flow.PASS
    delay_s: float = 0.0
    """Added latency; does not limit the rate, up to the buffer."""
    bytes_per_s: float | None = None
    """Throttle of each connection."""
    flip_at: int | None = None
    """Flip one bit of the n-th byte (from 0) that is read after this was set, on any connection."""
    flip_probability: float = 0.0
    """Of each byte: flip one of its bits."""
    duplicate_probability: float = 0.0
    """Of each chunk as read from the socket: pass it twice."""

    def __post_init__(self) -> None:
        for name in ("flip_probability", "duplicate_probability"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.delay_s < 0 or (self.bytes_per_s is not None and self.bytes_per_s <= 0):
            raise ValueError(f"delay_s and bytes_per_s must be positive: {self}")
        if self.flip_at is not None and self.flip_at < 0:
            raise ValueError(f"flip_at must not be negative, got {self.flip_at}")


NO_FAULTS = Faults()


@dataclass(slots=True)
class Counters:
    """What happened in one direction since the proxy started."""

    bytes_read: int = 0
    bytes_sent: int = 0
    chunks_delayed: int = 0
    bytes_held: int = 0
    """Bytes that had to wait for a HOLD to end (counted when they start to wait)."""
    bytes_discarded: int = 0
    bytes_throttled: int = 0
    bits_flipped: int = 0
    chunks_duplicated: int = 0
    half_closes: int = 0


@dataclass(slots=True)
class ConnectionCounters:
    """What happened to connections since the proxy started."""

    accepted: int = 0
    open: int = 0
    admission_reset: int = 0
    admission_silent: int = 0
    dial_failed: int = 0
    resets: int = 0
    """Connections that `reset` ended."""


class TcpProxy:
    """A context manager: listens on 127.0.0.1 and relays to `upstream`, in a thread of its own.

    Methods may be called from any thread and take effect before they return.
    """

    def __init__(self, upstream: tuple[str, int] | Dial, port: int = 0, seed: int = 0) -> None:
        self._dial: Dial = upstream if callable(upstream) else _dialer(upstream)
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lanes = {side: _Lane(random.Random(f"{seed}-{side.name}")) for side in Direction}
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._counters = ConnectionCounters()
        self._admission = Admission.ACCEPT
        self._loop = asyncio.new_event_loop()
        self._accepting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CONTROL_DEADLINE_S)
        if self._thread.is_alive():
            raise RuntimeError("the proxy's thread does not end")

    def set(self, direction: Direction, faults: Faults) -> None:
        """Replace the faults of one direction, for live and new connections."""
        self._do(lambda: self._lanes[direction].set(faults))

    def cut(self) -> None:
        """HOLD both directions: the link is dead, and neither side is told."""
        for direction in Direction:
            self.set(direction, Faults(flow=Flow.HOLD))

    def heal(self) -> None:
        """Take all faults of both directions away and admit connections again."""
        for direction in Direction:
            self.set(direction, NO_FAULTS)
        self.admit(Admission.ACCEPT)

    def admit(self, admission: Admission) -> None:
        """Say what becomes of connections from now on."""

        def change() -> None:
            self._admission = admission

        self._do(change)

    def reset(self) -> int:
        """End every open connection with RST on both sides; return how many there were."""
        return self._do(self._reset)

    def half_close(self, direction: Direction) -> int:
        """Send FIN in one direction of every connection; what follows in it is discarded."""
        return self._do(
            lambda: sum(c.pumps[direction].half_close() for c in self._connections.values())
        )

    def counters(self, direction: Direction) -> Counters:
        """A copy of the counters of one direction."""
        return self._do(lambda: dataclasses.replace(self._lanes[direction].counters))

    def connections(self) -> ConnectionCounters:
        """A copy of the connections' counters."""
        return self._do(lambda: dataclasses.replace(self._counters, open=len(self._connections)))

    def _do(self, action: Callable[[], T]) -> T:
        async def call() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(CONTROL_DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._accepting = self._loop.create_task(self._accept())
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._listener.close()
            self._loop.close()

    def _stop(self) -> None:
        self._loop.stop()

    async def _close(self) -> None:
        tasks: list[asyncio.Task[None]] = list(self._connections)
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            client.setblocking(False)
            self._counters.accepted += 1
            full = len(self._connections) >= CONNECTIONS_COUNT_MAX
            if full or self._admission is Admission.RESET:
                self._counters.admission_reset += 1
                _abort(client)
                continue
            silent = self._admission is Admission.SILENT
            connection = _Connection(client, self._dial, self._lanes)
            serve = connection.ignore() if silent else connection.serve()
            self._counters.admission_silent += silent
            task = self._loop.create_task(serve)
            self._connections[task] = connection
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        connection.close()
        self._counters.dial_failed += connection.dial_failed

    def _reset(self) -> int:
        for task, connection in self._connections.items():
            task.cancel()
            connection.close()
        self._counters.resets += len(self._connections)
        return len(self._connections)


class _Lane:
    """Faults, counters and dice of one direction, shared by its connections."""

    def __init__(self, dice: random.Random) -> None:
        self.faults = NO_FAULTS
        self.counters = Counters()
        self.changed = asyncio.Event()
        self._dice = dice
        self._read_since_set = 0
        self._until_flip: int | None = None

    def set(self, faults: Faults) -> None:
        self.faults = faults
        self._read_since_set = 0
        self._until_flip = self._gap()
        self.changed.set()
        self.changed = asyncio.Event()

    def corrupt(self, chunk: bytes) -> bytes:
        """Apply the flips that fall into `chunk`; counts it as read."""
        begin, self._read_since_set = self._read_since_set, self._read_since_set + len(chunk)
        at = self.faults.flip_at
        places = [] if at is None or not begin <= at < self._read_since_set else [at - begin]
        offset = 0
        while self._until_flip is not None and offset + self._until_flip < len(chunk):
            offset += self._until_flip
            places.append(offset)
            offset += 1
            self._until_flip = self._gap()
        if self._until_flip is not None:
            self._until_flip -= len(chunk) - offset
        if not places:
            return chunk
        changed = bytearray(chunk)
        for place in places:
            changed[place] ^= 1 << self._dice.randrange(8)
        self.counters.bits_flipped += len(places)
        return bytes(changed)

    def duplicates(self) -> bool:
        probability = self.faults.duplicate_probability
        return probability > 0 and self._dice.random() < probability

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the next change of the faults."""
        try:
            await asyncio.wait_for(self.changed.wait(), seconds)
        except TimeoutError:
            return

    def _gap(self) -> int | None:
        """Bytes to the next flip, geometrically distributed."""
        probability = self.faults.flip_probability
        if probability == 0:
            return None
        if probability == 1:
            return 0
        return int(math.log(1.0 - self._dice.random()) / math.log1p(-probability))


class _Pump:
    """Moves the bytes of one direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, lane: _Lane) -> None:
        self._source = source
        self._sink = sink
        self._lane = lane
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(BUFFER_CHUNKS_MAX)
        self._closed = False

    async def read(self) -> None:
        counters = self._lane.counters
        while True:
            chunk = await self._loop.sock_recv(self._source, CHUNK_BYTES_MAX)
            faults = self._lane.faults
            counters.bytes_read += len(chunk)
            if chunk and faults.flow is Flow.DISCARD:
                counters.bytes_discarded += len(chunk)
                continue
            counters.chunks_delayed += faults.delay_s > 0 and len(chunk) > 0
            item = (self._loop.time() + faults.delay_s, self._lane.corrupt(chunk))
            await self._queue.put(item)
            if not chunk:
                return
            if self._lane.duplicates():
                counters.chunks_duplicated += 1
                await self._queue.put(item)

    async def write(self) -> None:
        while True:
            due, chunk = await self._queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._flowing(len(chunk))
            if not chunk:
                self._finish()
                return
            await self._send(memoryview(chunk))

    def half_close(self) -> int:
        """Send FIN now; 1 if this was not done before."""
        if self._closed:
            return 0
        with contextlib.suppress(OSError):  # the peer has reset it: its pump will tell
            self._finish()
        self._lane.counters.half_closes += 1
        return 1

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._sink.shutdown(socket.SHUT_WR)

    async def _send(self, view: memoryview) -> None:
        counters = self._lane.counters
        while view:
            if self._closed:
                counters.bytes_discarded += len(view)
                return
            rate = self._lane.faults.bytes_per_s
            size = len(view) if rate is None else max(1, int(rate / _SLICES_PER_S))
            piece, view = view[:size], view[size:]
            await self._loop.sock_sendall(self._sink, piece)
            counters.bytes_sent += len(piece)
            if rate is not None:
                counters.bytes_throttled += len(piece)
                await self._lane.pause(len(piece) / rate)
                await self._flowing(len(view))

    async def _flowing(self, waiting_bytes: int) -> None:
        """Wait while the flow is HOLD."""
        if self._lane.faults.flow is Flow.HOLD:
            self._lane.counters.bytes_held += waiting_bytes
        while self._lane.faults.flow is Flow.HOLD:
            await self._lane.changed.wait()


class _Connection:
    """A client's socket, the server's, and the two pumps between them."""

    def __init__(self, client: socket.socket, dial: Dial, lanes: dict[Direction, _Lane]) -> None:
        self.pumps: dict[Direction, _Pump] = {}
        self.dial_failed = False
        self._client = client
        self._server: socket.socket | None = None
        self._complete = False
        self._dial = dial
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()

    async def ignore(self) -> None:
        """Keep the client waiting until it is reset."""
        await self._loop.create_future()

    async def serve(self) -> None:
        """Relay until both directions are closed or one breaks."""
        try:
            server = await self._connect()
        except OSError:
            self.dial_failed = True
            return
        server.setblocking(False)
        to_server = _Pump(self._client, server, self._lanes[Direction.TO_SERVER])
        to_client = _Pump(server, self._client, self._lanes[Direction.TO_CLIENT])
        self.pumps = {Direction.TO_SERVER: to_server, Direction.TO_CLIENT: to_client}
        try:
            async with asyncio.TaskGroup() as group:
                for pump in self.pumps.values():
                    group.create_task(pump.read())
                    group.create_task(pump.write())
            self._complete = True
        except* OSError:
            self._complete = False

    def close(self) -> None:
        """Close both sockets, with RST unless both directions have ended. Idempotent."""
        for end in (self._client, self._server):
            if end is None:
                continue
            if self._complete:
                end.close()
            else:
                _abort(end)

    async def _connect(self) -> socket.socket:
        dialing = self._loop.run_in_executor(None, self._dial)
        try:
            self._server = await asyncio.shield(dialing)
        except asyncio.CancelledError:
            dialing.add_done_callback(_close_result)
            raise
        return self._server


def _close_result(dialing: asyncio.Future[socket.socket]) -> None:
    if not dialing.cancelled() and dialing.exception() is None:
        dialing.result().close()


def _abort(connection: socket.socket) -> None:
    if connection.fileno() < 0:
        return
    # Linger of zero seconds: close sends RST.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _dialer(address: tuple[str, int]) -> Dial:
    return lambda: socket.create_connection(address, timeout=_DIAL_TIMEOUT_S)

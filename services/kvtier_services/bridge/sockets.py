"""ZMQ: a subscription and a replay socket per rank; the only importer of zmq.

One thread polls for all ranks. News of a connection are taken before what came over it, so that no
message of an engine's new life passes for one of the old. A replay gets a socket of its own each
time: answers to an older question die with the older socket.

    subscription   [topic, number u64 big-endian, payload]
    replay, asked  ["", number]
    answered       ["", topic, number, payload]..., at last ["", "", -1, ""]; older engines leave
                   the topic out

ZMQ has no credentials here and encrypts nothing: whoever can open the engine's port hears it, and
whoever can pose as the engine is believed. What must not live here: what messages mean.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtier.limits import ENGINE_PAYLOAD_BYTES_MAX

_FRAME_BYTES_MAX: Final = 4 * ENGINE_PAYLOAD_BYTES_MAX
"""A larger one ends the connection; one that is only too large for us is counted."""
_RECEIVE_MESSAGES_MAX: Final = 1 << 14
"""Messages that wait in a subscription before the engine drops some, which a replay mends."""
_REPLAY_MESSAGES_MAX: Final = 1 << 17
_TURN_MESSAGES_MAX: Final = 256
"""Of one socket before others have their turn."""
_RECONNECT_MS: Final = 100
_RECONNECT_MS_MAX: Final = 1_000
_HEARTBEAT_MS: Final = 2_000
"""ZMTP pings, so that a connection that is dead but not closed is noticed."""
_NUMBER_BYTES: Final = 8
_END: Final = b"\xff" * _NUMBER_BYTES
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Hearer(Protocol):
    """What is told of one rank; `EngineRank` is one."""

    def connected(self, now: float) -> None: ...
    def disconnected(self, now: float) -> None: ...
    def live(self, seq: int, payload: bytes, now: float) -> None: ...
    def replayed(self, seq: int, payload: bytes, now: float) -> None: ...
    def replay_ended(self, now: float) -> None: ...
    def malformed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where one rank publishes and (None: nowhere) answers."""

    events: str
    replay: str | None
    topic: str = ""


class RankSockets:
    """The sockets of one rank."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: RankAddress) -> None:
        self._context = context
        self._address = address
        self._news, self._subscription = self._subscribe()
        self._replay: zmq.Socket[bytes] | None = None
        self._is_connected = False

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """All that are open, for a poller."""
        found = [self._news, self._subscription]
        return found if self._replay is None else [*found, self._replay]

    def ask_replay(self, from_seq: int) -> None:
        """Ask for messages from this number on; what was asked for before is not heard any more."""
        if self._replay is not None:
            self._replay.close(0)
        if self._address.replay is None:
            return
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVHWM, _REPLAY_MESSAGES_MAX)
        _prepare(self._replay)
        self._replay.connect(self._address.replay)
        self._replay.send_multipart([b"", from_seq.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)

    def take(self, hearer: Hearer, now: float) -> bool:
        """Hand over what has come, news of the connection first; whether more may be waiting."""
        messages = list(_received(self._subscription))
        for frames in _received(self._news):
            event = parse_monitor_message(frames)["event"]
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                hearer.connected(now)
            else:
                hearer.disconnected(now)
        for frames in messages:
            _take_live(frames, hearer, now)
        replayed = self._take_replay(hearer, now)
        return max(len(messages), replayed) >= _TURN_MESSAGES_MAX

    def close(self) -> None:
        self._subscription.disable_monitor()
        for socket in self.sockets():
            socket.close(0)

    def _subscribe(self) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        subscription = self._context.socket(zmq.SUB)
        subscription.setsockopt(zmq.RCVHWM, _RECEIVE_MESSAGES_MAX)
        _prepare(subscription)
        news = subscription.get_monitor_socket(_EVENTS)
        subscription.setsockopt(zmq.SUBSCRIBE, self._address.topic.encode("utf-8"))
        subscription.connect(self._address.events)
        return news, subscription

    def _take_replay(self, hearer: Hearer, now: float) -> int:
        """How many were taken. Stops where the hearer asks anew: the rest answers nothing now."""
        asked, count = self._replay, 0
        if asked is None:
            return 0
        for frames in _received(asked):
            count += 1
            match frames:
                case [b"", number, payload] | [b"", _, number, payload]:
                    if number == _END:
                        hearer.replay_ended(now)
                    elif len(number) == _NUMBER_BYTES:
                        hearer.replayed(int.from_bytes(number, "big"), payload, now)
                    else:
                        hearer.malformed()
                case _:
                    hearer.malformed()
            if self._replay is not asked:
                break
        return count


def _take_live(frames: Sequence[bytes], hearer: Hearer, now: float) -> None:
    match frames:
        case [number, payload] | [_, number, payload] if len(number) == _NUMBER_BYTES:
            hearer.live(int.from_bytes(number, "big"), payload, now)
        case _:
            hearer.malformed()


def _prepare(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_BYTES_MAX)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)


def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    for _ in range(_TURN_MESSAGES_MAX):
        if socket.closed:
            return
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class Wire:
    """All ranks' sockets and the wait for them."""

    def __init__(self, addresses: Sequence[RankAddress]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.ranks = [RankSockets(self._context, address) for address in addresses]

    def wait(self, longest_s: float, others: Sequence[int | None] = ()) -> None:
        """Return when something has come, here or at the descriptors `others` (None: there is
        none), or after `longest_s`. Blocks without the GIL."""
        poller = zmq.Poller()
        for descriptor in others:
            if descriptor is not None:
                poller.register(descriptor, zmq.POLLIN)
        for rank in self.ranks:
            for socket in rank.sockets():
                poller.register(socket, zmq.POLLIN)
        poller.poll(max(1, int(longest_s * 1000)))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        with contextlib.suppress(zmq.ZMQError):
            self._context.term()

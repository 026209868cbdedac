"""The bridge's sockets against a peer that says anything at all."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvtier_services.bridge.sockets import RankAddress, Wire
from tests.harness.waiting import eventually

SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8
DEADLINE_S = 45.0


class Heard:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.lives: list[tuple[int, bytes]] = []
        self.replays: list[tuple[int, bytes]] = []
        self.ends = 0
        self.oddities = 0

    def connected(self, now: float) -> None:
        self.news.append("connected")

    def disconnected(self, now: float) -> None:
        self.news.append("disconnected")

    def live(self, seq: int, payload: bytes, now: float) -> None:
        self.lives.append((seq, payload))

    def replayed(self, seq: int, payload: bytes, now: float) -> None:
        self.replays.append((seq, payload))

    def replay_ended(self, now: float) -> None:
        self.ends += 1

    def malformed(self) -> None:
        self.oddities += 1


class Peer:
    """The engine's two sockets, and a wire that is connected to them."""

    def __init__(self, context: "zmq.Context[Any]", topic: str = "") -> None:
        self.events = context.socket(zmq.XPUB)
        port = self.events.bind_to_random_port("tcp://127.0.0.1")
        self.router = context.socket(zmq.ROUTER)
        replay = self.router.bind_to_random_port("tcp://127.0.0.1")
        address = RankAddress(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}", topic)
        self.wire = Wire([address])
        self.heard = Heard()
        assert self.events.poll(10_000)
        assert self.events.recv() == b"\x01" + topic.encode()  # the subscription has arrived

    def turn(self) -> bool:
        self.wire.wait(0.01)
        self.wire.ranks[0].take(self.heard, time.monotonic())
        return True

    def until(self, what: str, is_so: Any) -> None:
        eventually(lambda: self.turn() and is_so(), DEADLINE_S, what)

    def close(self) -> None:
        self.wire.close()
        self.events.close(0)
        self.router.close(0)


@pytest.fixture
def peer() -> Iterator[Peer]:
    context: zmq.Context[Any] = zmq.Context()
    made = Peer(context)
    yield made
    made.close()
    context.term()


def test_live_messages_come_with_and_without_a_topic_and_others_are_counted(peer: Peer) -> None:
    for frames in ([b"t", SEVEN, b"a"], [SEVEN, b"b"], [b"x"], [b"t", b"7", b"c"], [b""] * 5):
        peer.events.send_multipart(frames)
    peer.until("all came", lambda: len(peer.heard.lives) + peer.heard.oddities == 5)
    assert peer.heard.lives == [(7, b"a"), (7, b"b")]
    assert peer.heard.news == ["connected"]


def test_a_replay_is_asked_with_an_empty_frame_and_read_in_both_shapes(peer: Peer) -> None:
    peer.wire.ranks[0].ask_replay(5)
    assert peer.router.poll(10_000)
    client, *asked = peer.router.recv_multipart()
    assert asked == [b"", (5).to_bytes(8, "big")]
    for frames in ([b"t", SEVEN, b"a"], [SEVEN, b"b"], [b"t", b"7", b"c"], [], [b"", END, b""]):
        peer.router.send_multipart([client, b"", *frames])
    peer.until("the end came", lambda: peer.heard.ends)
    assert peer.heard.replays == [(7, b"a"), (7, b"b")]
    assert peer.heard.oddities == 2


def test_answers_to_an_older_question_are_not_heard(peer: Peer) -> None:
    rank = peer.wire.ranks[0]
    rank.ask_replay(1)
    assert peer.router.poll(10_000)
    old, *_ = peer.router.recv_multipart()
    rank.ask_replay(2)
    assert peer.router.poll(10_000)
    new, *_ = peer.router.recv_multipart()
    peer.router.send_multipart([old, b"", b"", SEVEN, b"old"])
    peer.router.send_multipart([new, b"", b"", SEVEN, b"new"])
    peer.router.send_multipart([new, b"", b"", END, b""])
    peer.until("the end came", lambda: peer.heard.ends)
    assert peer.heard.replays == [(7, b"new")]


def test_only_the_topic_that_was_asked_for_is_heard() -> None:
    context: zmq.Context[Any] = zmq.Context()
    peer = Peer(context, "kv")
    peer.events.send_multipart([b"other", SEVEN, b"a"])
    peer.events.send_multipart([b"kv-1", SEVEN, b"b"])
    peer.until("one came", lambda: peer.heard.lives)
    assert peer.heard.lives == [(7, b"b")]
    peer.close()
    context.term()


def test_an_engine_that_goes_is_news(peer: Peer) -> None:
    peer.until("it is there", lambda: peer.heard.news)
    peer.events.close(0)
    peer.until("it is gone", lambda: peer.heard.news[-1] == "disconnected")

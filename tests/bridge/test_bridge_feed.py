"""The socket to an engine's connector: what is believed, what is not, when it is tried again."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.engine_events import EventFault
from kvtier.core.engine_holdings import EngineHoldings, HoldingsTerms, KnownKeys
from kvtier.core.engine_residents import (
    ROW,
    SYNCED_FRAME,
    Hello,
    SlotState,
    hello_frame,
    rows_frames,
)
from kvtier.core.engine_sequence import Doubt, SequenceTracker
from kvtier.core.event_columns import Hashes
from kvtier.core.identity import Pool, chain_root
from kvtier.engines.events import DecodePolicy, Dialect
from kvtier.types import Tier, Trust
from kvtier_services.bridge.feed import CALL_S, REFUSED_S, SILENT_S, FeedFault, FeedSocket
from kvtier_services.bridge.rank import Doors, EngineRank, FeedTerms, Source
from tests.support import engine_wire as wire

POOL = Pool("model", "rev", 16)
ROOT = chain_root(POOL, None, None)
HELLO = Hello(b"l" * 16, 0, 8, ROOT)


@dataclass
class Index:
    """An announcer that remembers what it was told."""

    held: set[int] = field(default_factory=set)
    trust: Trust | None = None
    joined: int = 0
    left: int = 0

    def store(self, tier: Tier, parent: int, hashes: Hashes) -> None:
        told = set(np.asarray(hashes).tolist())
        assert not told & self.held, "told twice"
        self.held |= told

    def remove(self, tier: Tier, hashes: Hashes) -> None:
        gone = set(np.asarray(hashes).tolist())
        assert gone <= self.held, "removed what was never told"
        self.held -= gone

    def clear(self, tier: Tier | None = None) -> None:
        self.held.clear()

    def set_trust(self, trust: Trust) -> None:
        self.trust = trust

    def join(self) -> "Index":
        self.joined += 1
        self.held, self.trust = set(), None
        return self

    def leave(self) -> None:
        self.left += 1


@dataclass
class Rig:
    """One rank, its feed, and a connector that a test plays."""

    path: Path
    index: Index = field(default_factory=Index)
    now: float = 100.0
    residents_max: int = 1_000

    def __post_init__(self) -> None:
        self.rank = EngineRank(
            0,
            DecodePolicy(Dialect.VLLM, 16),
            SequenceTracker(),
            EngineHoldings(HoldingsTerms(POOL, residents_max=self.residents_max), KnownKeys(100)),
            Doors(lambda _: None, self.index.join, self.index.leave),
            FeedTerms(ROOT, 1_000),
        )
        self.feed = FeedSocket(self.path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(4)
        self.connectors: list[socket.socket] = []

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.feed.take(self.rank, self.now)
        self.rank.tick(self.now, gone_s=3.0, probe_s=1_000.0)

    def call(self, frames: bytes = b"") -> socket.socket:
        """Have the bridge connect, and say something."""
        self.turn(REFUSED_S)
        return self.answer(frames)

    def answer(self, frames: bytes = b"") -> socket.socket:
        """Take the bridge's call, and say something."""
        connection, _ = self.listener.accept()
        self.connectors.append(connection)
        if frames:
            connection.sendall(frames)
            self.turn()
        return connection

    def events(self, *numbers: int) -> None:
        """The engine's events, from an engine that nobody listened to before."""
        self.rank.connected(self.now)
        self.rank.replay_ended(self.now)
        for seq, number in enumerate(numbers):
            self.rank.live(seq, stored(number), self.now)

    def close(self) -> None:
        self.feed.close()
        self.listener.close()
        for connector in self.connectors:
            connector.close()


def stored(number: int) -> bytes:
    return wire.encoded(wire.stored([number], None, [number] * 16, extra_keys=None), ts=number)


def row(slot: int, number: int | None) -> bytes:
    if number is None:
        return ROW.pack(slot, SlotState.EMPTY, bytes(32), bytes(32))
    key = number.to_bytes(8, "little") + bytes(24)
    return ROW.pack(slot, SlotState.KEYED, number.to_bytes(32, "big"), key)


def said(*rows: bytes) -> bytes:
    return rows_frames(b"".join(rows)) + SYNCED_FRAME


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "residents-0.sock")
    yield made
    made.close()


def test_a_connector_is_believed_once_all_has_been_said(rig: Rig) -> None:
    connector = rig.call(hello_frame(HELLO) + rows_frames(row(0, 5) + row(1, 6)))
    assert (rig.index.joined, rig.index.held, rig.rank.source) == (1, set(), None)
    connector.sendall(SYNCED_FRAME)
    rig.turn()
    assert (rig.index.held, rig.index.trust) == ({5, 6}, Trust.EXACT)
    connector.sendall(said(row(0, None), row(2, 6), row(3, 7)))
    rig.turn()
    assert rig.index.held == {6, 7}


def test_the_books_of_one_source_are_told_at_a_time(rig: Rig) -> None:
    rig.events(1, 2)
    by_events = set(rig.index.held)
    assert (len(by_events), rig.rank.source) == (2, Source.EVENTS)
    connector = rig.call(hello_frame(HELLO) + said(row(0, 5)))
    assert (rig.index.held, rig.rank.source) == ({5}, Source.CONNECTOR)
    rig.rank.live(2, stored(3), rig.now)
    assert rig.index.held == {5}
    connector.close()
    rig.turn()
    assert rig.rank.source is Source.EVENTS
    assert by_events < rig.index.held
    assert len(rig.index.held) == 3


def test_doubts_of_the_events_do_not_spoil_what_the_connector_says(rig: Rig) -> None:
    rig.rank.connected(rig.now)
    rig.rank.replayed(7, stored(1), rig.now)
    rig.rank.replay_ended(rig.now)
    assert (rig.index.trust, set(rig.rank.doubts)) == (Trust.DEGRADED, {Doubt.GAP})
    connector = rig.call(hello_frame(HELLO) + said(row(0, 5)))
    assert (rig.index.trust, rig.rank.doubts) == (Trust.EXACT, frozenset())
    connector.close()
    rig.turn()
    assert (rig.index.trust, set(rig.rank.doubts)) == (Trust.DEGRADED, {Doubt.GAP})
    assert rig.rank.doubted[Doubt.GAP] == 2


def test_what_a_connector_said_last_stands_in_doubt_where_nobody_knows_better(rig: Rig) -> None:
    connector = rig.call(hello_frame(HELLO) + said(row(0, 5)))
    connector.close()
    rig.turn()
    assert (rig.index.held, rig.index.trust) == ({5}, Trust.DEGRADED)
    rig.turn(2.9)
    assert rig.index.left == 0
    rig.turn(0.2)
    assert rig.index.left == 1
    rig.answer(hello_frame(Hello(b"m" * 16, 0, 4, ROOT)) + said(row(0, 9)))
    assert (rig.index.joined, rig.index.held, rig.index.trust) == (2, {9}, Trust.EXACT)


def test_another_life_within_the_time_shows_nothing_of_the_one_before(rig: Rig) -> None:
    rig.call(hello_frame(HELLO) + said(row(0, 5))).close()
    rig.turn()
    rig.turn(CALL_S)
    connection = rig.answer(hello_frame(Hello(b"m" * 16, 0, 4, ROOT)))
    assert rig.index.held == set()
    connection.sendall(said(row(0, 9)))
    rig.turn()
    assert (rig.index.held, rig.index.left) == ({9}, 0)


@pytest.mark.parametrize(
    ("hello", "fault"),
    [
        (Hello(b"l" * 16, 0, 8, b"x" * 32), FeedFault.POOL),
        (Hello(b"l" * 16, 1, 8, ROOT), FeedFault.RANK),
        (Hello(b"l" * 16, 0, 1_001, ROOT), FeedFault.TOO_LARGE),
    ],
)
def test_one_that_speaks_of_something_else_is_left_alone_for_a_while(
    rig: Rig, hello: Hello, fault: FeedFault
) -> None:
    connector = rig.call(hello_frame(hello) + said(row(0, 5)))
    assert (rig.feed.faults[fault], rig.index.joined) == (1, 0)
    assert connector.recv(1) == b""
    rig.listener.setblocking(False)
    rig.turn(CALL_S)
    with pytest.raises(BlockingIOError):
        rig.listener.accept()
    rig.listener.setblocking(True)
    rig.call(hello_frame(HELLO) + said(row(0, 5)))
    assert rig.index.held == {5}


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        SYNCED_FRAME,
        hello_frame(HELLO) + hello_frame(HELLO),
        hello_frame(HELLO) + said(row(8, 1)),
    ],
    ids=["http", "no hello", "two hellos", "no such slot"],
)
def test_what_cannot_be_understood_ends_the_connection_and_is_counted(
    rig: Rig, nonsense: bytes
) -> None:
    connector = rig.call(nonsense)
    assert rig.feed.faults[FeedFault.SHAPE] == 1
    assert connector.recv(1) == b""
    assert rig.index.held == set()


def test_a_connector_that_stands_still_is_not_believed_any_more(rig: Rig) -> None:
    rig.call(hello_frame(HELLO) + said(row(0, 5)))
    rig.turn(SILENT_S - 0.1)
    assert rig.index.trust is Trust.EXACT
    rig.turn(0.2)
    assert (rig.index.trust, rig.feed.faults[FeedFault.SILENT]) == (Trust.DEGRADED, 1)


def test_where_nobody_listens_it_is_tried_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "residents-0.sock")
    rig.listener.close()
    rig.path.unlink()
    for _ in range(3):
        rig.turn(CALL_S)
    assert (rig.index.joined, sum(rig.feed.faults.values())) == (0, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as late:
        late.bind(str(rig.path))
        late.listen(1)
        rig.turn(CALL_S)
        connection, _ = late.accept()
        with connection:
            connection.sendall(hello_frame(HELLO) + said(row(0, 5)))
            rig.turn()
    assert rig.index.held == {5}
    rig.feed.close()


def test_digests_that_a_store_knows_are_told(rig: Rig) -> None:
    unknown = ROW.pack(0, SlotState.UNKNOWN, (7).to_bytes(32, "big"), bytes(32))
    rig.call(hello_frame(HELLO) + said(unknown, row(1, 5)))
    assert (rig.index.held, rig.index.trust) == ({5}, Trust.DEGRADED)
    assert rig.rank.doubts == {Doubt.UNRESOLVED}
    (name,) = rig.rank.unresolved()
    rig.rank.learn({name: 77})
    assert (rig.index.held, rig.index.trust) == ({5, 77}, Trust.EXACT)


@pytest.mark.parametrize(
    ("payload", "faults"),
    [
        (b"\xc1", {EventFault.MALFORMED: 1}),
        (wire.raw({}), {EventFault.SHAPE: 1}),
        (
            wire.encoded({"type": "BlockFolded"}, 7),
            {EventFault.UNKNOWN_TYPE: 1, EventFault.SHAPE: 1},
        ),
        (wire.encoded({"type": "BlockRemoved"}), {EventFault.FIELD: 1}),
        (None, {EventFault.SHAPE: 1}),
    ],
    ids=["no msgpack", "no batch", "no known event", "no hashes", "no number"],
)
def test_what_cannot_be_read_is_counted_by_reason_and_in_doubt_until_a_clear(
    rig: Rig, payload: bytes | None, faults: dict[EventFault, int]
) -> None:
    rig.events(1)
    assert rig.index.trust is Trust.EXACT
    if payload is None:
        rig.rank.malformed()
    else:
        rig.rank.live(1, payload, rig.now)
    assert rig.rank.faults == faults
    assert (rig.rank.trust, set(rig.rank.doubts)) == (Trust.DEGRADED, {Doubt.UNDECODABLE})
    assert rig.rank.doubted[Doubt.UNDECODABLE] == 1
    rig.rank.live(rig.rank.tracker.applied_seq + 1, wire.encoded(wire.AllBlocksCleared()), rig.now)
    assert (rig.index.trust, rig.index.held) == (Trust.EXACT, set())


def test_more_blocks_than_the_ceiling_are_a_doubt_until_the_engine_is_empty(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "residents-0.sock", residents_max=2)
    rig.events(1, 2)
    assert (len(rig.index.held), rig.index.trust) == (2, Trust.EXACT)
    rig.rank.live(2, stored(3), rig.now)
    assert (len(rig.index.held), rig.index.trust) == (2, Trust.DEGRADED)
    assert (set(rig.rank.doubts), rig.rank.doubted[Doubt.OVERFLOW]) == ({Doubt.OVERFLOW}, 1)
    rig.rank.live(3, wire.encoded(wire.AllBlocksCleared()), rig.now)
    assert (rig.index.trust, rig.index.held) == (Trust.EXACT, set())
    rig.close()


def test_a_clear_of_the_gpu_does_not_make_up_for_what_was_lost_of_other_media(rig: Rig) -> None:
    rig.events(1)
    rig.rank.live(1, wire.encoded(wire.stored([9], None, [9] * 16, medium="CPU")), rig.now)
    rig.rank.malformed()
    rig.rank.live(2, wire.encoded(wire.AllBlocksCleared()), rig.now)
    assert (rig.index.held, rig.index.trust) == (set(), Trust.DEGRADED)

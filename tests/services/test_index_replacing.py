"""Large snapshots go into the index in slices: what is true meanwhile, and afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtier.core.event_columns import EventBatch, PackedBatch
from kvtier.core.event_messages import (
    Batch,
    Heartbeat,
    Hello,
    SnapshotChunk,
    SnapshotMark,
    TierDigest,
)
from kvtier.core.events import Verdict
from kvtier.core.fleet import HolderRecord
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.core.reservations import Reservation
from kvtier.core.workers import Load
from kvtier.types import Epoch, HolderId, Seq, Tier, Trust
from kvtier.wire import convert, transport
from kvtier_services.index.state import AT_ONCE_BLOCKS_MAX, IndexState, StateConfig, Stream
from tests.support.live_index import LiveIndex
from tests.support.raw_publisher import U64, RawPublisher, removed, stored, worker_info

MANY = np.arange(1, 3 * AT_ONCE_BLOCKS_MAX + 1, dtype=np.uint64)
OTHERS = MANY + np.uint64(1 << 40)
EPOCH = Epoch(7)


@dataclass
class Told:
    """Keeps what the state tells others."""

    replaced: int = 0
    applied: list[PackedBatch] = field(default_factory=list)

    def holder_joined(self, holder: HolderId) -> None: ...
    def holder_changed(self, holder: HolderId) -> None: ...
    def holder_hidden(self, holder: HolderId) -> None: ...
    def holder_resumed(self, holder: HolderId) -> None: ...
    def holder_left(self, record: HolderRecord) -> None: ...
    def reserved(self, ticket: int, reservation: Reservation) -> None: ...
    def reservation_over(self, ticket: int, reservation: Reservation) -> None: ...

    def batch_applied(self, stream: Stream, batch: PackedBatch) -> None:
        self.applied.append(batch)

    def messages_applied(self, stream: Stream, messages: list[bytes], count: int) -> None:
        raise AssertionError("nothing is said in serialized messages here")

    def stream_replaced(self, stream: Stream) -> None:
        self.replaced += 1


class Publishing:
    """One worker's stream into a state, without a wire."""

    def __init__(self) -> None:
        self.told = Told()
        self.state = IndexState(NativePrefixIndex(), StateConfig(), self.told)
        self.connection = object()
        self.hello(EPOCH)

    def hello(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.stream, _ = self.state.hello(
            worker_info("w1"), Hello(epoch, Seq(0)), self.connection, 0.0
        )

    def snapshot(self, number: int, blocks: U64, at_seq: int = 0) -> Verdict:
        """All of `blocks`, in pieces as a publisher sends them."""
        mark = SnapshotMark(self.epoch, number, Seq(at_seq))
        pieces = np.array_split(blocks, max(1, len(blocks) // 8192))
        for position, piece in enumerate(pieces):
            columns = convert.packed_from(convert.batch_to(stored(piece), 0))
            chunk = SnapshotChunk(mark, position, position == len(pieces) - 1, columns)
            outcome = self.state.snapshot(self.stream, chunk, 0.0)
        return outcome.verdict

    def batch(self, seq: int, columns: PackedBatch) -> Verdict:
        message = Batch(self.epoch, Seq(seq), columns, columns.payload_bytes)
        return self.state.batch(self.stream, message, 0.0).verdict

    def held(self) -> set[int]:
        snapshot = self.state.fleet.index.snapshot(self.stream[0], Tier.GPU, 0)
        return set(snapshot.hashes.tolist())

    def trust(self) -> tuple[Trust, str]:
        return self.state.trust(self.stream[0])

    def is_busy(self) -> bool:
        return self.state.has_work

    def work(self) -> list[object]:
        """Go on to the end; whoever was told that everything is in."""
        done = []
        while self.is_busy():
            connection = self.state.work(0.0)
            if connection is not None:
                done.append(connection)
        return done


def packed(batch: EventBatch) -> PackedBatch:
    return convert.packed_from(convert.batch_to(batch, 0))


@pytest.fixture
def publishing() -> Publishing:
    return Publishing()


def test_a_small_snapshot_is_in_at_once(publishing: Publishing) -> None:
    assert publishing.snapshot(1, MANY[:1000]) is Verdict.REPLACED
    assert not publishing.is_busy()
    assert publishing.trust() == (Trust.EXACT, "")
    assert publishing.held() == set(range(1, 1001))


def test_a_large_snapshot_comes_in_slices_and_is_not_exact_before_the_last(
    publishing: Publishing,
) -> None:
    assert publishing.snapshot(1, MANY) is Verdict.REPLACED
    assert publishing.is_busy()
    assert publishing.trust() == (Trust.DEGRADED, "snapshot_pending")
    sizes = []
    while publishing.is_busy():
        publishing.state.work(0.0)
        sizes.append(len(publishing.held()))
    assert sizes == sorted(sizes)
    assert len(sizes) > 5
    assert publishing.held() == set(MANY.tolist())
    assert publishing.trust() == (Trust.EXACT, "")
    assert publishing.told.replaced == 1


def test_what_comes_meanwhile_is_applied_after_it_and_in_order(publishing: Publishing) -> None:
    publishing.snapshot(1, MANY)
    assert publishing.batch(1, packed(removed(MANY[:10]))) is Verdict.APPLY
    assert publishing.batch(2, packed(stored(MANY[:4]))) is Verdict.APPLY
    assert publishing.told.applied == []
    assert publishing.work() == [publishing.connection]
    assert publishing.held() == set(MANY.tolist()) - set(range(5, 11))
    assert len(publishing.told.applied) == 2


def test_what_was_held_before_is_gone_afterwards(publishing: Publishing) -> None:
    publishing.snapshot(1, MANY)
    publishing.work()
    publishing.snapshot(2, OTHERS[:50])
    assert publishing.is_busy(), "taking much away is much work too"
    publishing.work()
    assert publishing.held() == set(OTHERS[:50].tolist())
    assert publishing.trust() == (Trust.EXACT, "")


def test_a_second_snapshot_takes_the_place_of_one_that_is_under_way(
    publishing: Publishing,
) -> None:
    publishing.snapshot(1, MANY)
    publishing.state.work(0.0)
    publishing.batch(1, packed(stored(OTHERS[:3])))
    publishing.snapshot(2, OTHERS, at_seq=1)
    publishing.work()
    assert publishing.held() == set(OTHERS.tolist())
    assert publishing.trust() == (Trust.EXACT, "")


def test_a_new_life_ends_what_was_under_way_for_the_old_one(publishing: Publishing) -> None:
    publishing.snapshot(1, MANY)
    publishing.state.work(0.0)
    publishing.hello(Epoch(8))
    assert publishing.held() == set()
    assert publishing.work() == []
    assert publishing.held() == set()
    publishing.snapshot(1, OTHERS[:5])
    assert publishing.held() == set(OTHERS[:5].tolist())


def test_a_holder_that_leaves_meanwhile_leaves_nothing(publishing: Publishing) -> None:
    publishing.snapshot(1, MANY)
    publishing.state.work(0.0)
    publishing.state.goodbye(publishing.stream, EPOCH)
    assert publishing.work() == []
    assert publishing.state.fleet.index.stats().blocks == 0
    publishing.hello(EPOCH)
    assert publishing.held() == set()


def test_a_digest_is_not_held_against_a_half_replaced_stream(publishing: Publishing) -> None:
    publishing.snapshot(1, MANY)
    publishing.state.work(0.0)
    digest = TierDigest(len(MANY), int(np.bitwise_xor.reduce(MANY)))
    nothing = TierDigest(0, 0)
    beat = Heartbeat(EPOCH, Seq(0), (digest, nothing, nothing, nothing))
    assert publishing.state.heartbeat(publishing.stream, beat, Load(), 0.0).verdict is Verdict.OK
    publishing.work()
    assert publishing.state.heartbeat(publishing.stream, beat, Load(), 0.0).verdict is Verdict.OK


async def test_over_the_wire_nothing_is_acknowledged_before_it_is_in() -> None:
    with LiveIndex(lease_ms=5_000) as index:
        channel = transport.new_channel(index.target)
        publisher = RawPublisher(channel, worker_info("w1"), epoch=7)
        pieces: Sequence[U64] = np.array_split(MANY, 12)
        await publisher.join([stored(piece) for piece in pieces])
        await publisher.batch(1, removed(MANY[:7]))
        await publisher.heartbeat(1)
        await publisher.acked(1)
        assert len(index.held("w1", Tier.GPU)) == len(MANY) - 7
        assert index.trust("w1") is Trust.EXACT
        await channel.close()


async def test_two_large_snapshots_at_once_both_come_in() -> None:
    with LiveIndex(lease_ms=5_000) as index:
        channels = [transport.new_channel(index.target) for _ in range(2)]
        names = ("w1", "w2")
        publishers = [
            RawPublisher(channel, worker_info(name), epoch=7)
            for channel, name in zip(channels, names, strict=True)
        ]
        for publisher in publishers:
            await publisher.join([stored(piece) for piece in np.array_split(MANY, 12)])
        for publisher in publishers:
            await publisher.batch(1, stored(OTHERS[:1]))
            await publisher.acked(1)
        for name in names:
            assert len(index.held(name, Tier.GPU)) == len(MANY) + 1
        for channel in channels:
            await channel.close()

"""Batches taken in many at once, in their serialized form, end as those taken in one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.event_columns import EventKind, PackedBatch
from kvtier.core.event_messages import Batch, Hello, SnapshotChunk, SnapshotMark
from kvtier.core.fleet import HolderRecord
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.core.reservations import Reservation
from kvtier.errors import CallerError, LimitError
from kvtier.limits import INDEX_BYTES_MAX
from kvtier.types import Epoch, HolderId, Seq, Tier
from kvtier.wire import convert
from kvtier.wire import messages as pb
from kvtier_services.index.broadcast import Broadcast, Follower
from kvtier_services.index.feed import Receiver
from kvtier_services.index.state import IndexState, StateConfig, Stream
from tests.support.index_pair import Event, batch, message
from tests.support.raw_publisher import worker_info

EPOCH = Epoch(7)
NOTHING = convert.packed_from(convert.batch_to(batch(), 0))


@dataclass
class Told:
    """Keeps the batches that others are told of."""

    batches: list[PackedBatch] = field(default_factory=list)

    def holder_joined(self, holder: HolderId) -> None: ...
    def holder_changed(self, holder: HolderId) -> None: ...
    def holder_hidden(self, holder: HolderId) -> None: ...
    def holder_resumed(self, holder: HolderId) -> None: ...
    def holder_left(self, record: HolderRecord) -> None: ...
    def stream_replaced(self, stream: Stream) -> None: ...
    def reserved(self, ticket: int, reservation: Reservation) -> None: ...
    def reservation_over(self, ticket: int, reservation: Reservation) -> None: ...

    def batch_applied(self, stream: Stream, batch: PackedBatch) -> None:
        self.batches.append(batch)

    def messages_applied(self, stream: Stream, messages: list[bytes], count: int) -> None:
        for one in messages[:count]:
            self.batches.append(convert.packed_from(pb.PublishRequest.FromString(one).batch))


class Publishing:
    """One worker's stream into a state, its first snapshot (of nothing) done."""

    def __init__(self, blocks_max: int = 1 << 20, index_bytes_max: int = INDEX_BYTES_MAX) -> None:
        self.told = Told()
        index = NativePrefixIndex(index_bytes_max)
        self.state = IndexState(index, StateConfig(holder_blocks_max=blocks_max), self.told)
        hello = Hello(EPOCH, Seq(0))
        self.stream, _ = self.state.hello(worker_info("w"), hello, self, 0.0)
        first = SnapshotChunk(SnapshotMark(EPOCH, 1, Seq(0)), 0, True, NOTHING)
        self.state.snapshot(self.stream, first, 0.0)
        self.cut_off = False

    def one(self, data: bytes) -> None:
        request = pb.PublishRequest.FromString(data).batch
        try:
            columns = convert.packed_from(request)
        except CallerError:
            self.state.undecodable(self.stream, EPOCH, 0.0)
            return
        said = Batch(EPOCH, Seq(request.seq), columns, columns.payload_bytes)
        self.state.batch(self.stream, said, 0.0)

    def say(self, messages: Sequence[bytes], at_once: int) -> None:
        """Until the stream is cut off, as the service does; 0 at once: without runs."""
        waiting = list(messages)
        try:
            while waiting:
                run = waiting[:at_once]
                count = self.state.advance(self.stream, EPOCH, run, 0.0) if run else 0
                if not count:
                    self.one(waiting[0])
                del waiting[: count or 1]
        except LimitError:
            self.cut_off = True

    def seen(self) -> dict[str, object]:
        state, index = self.state, self.state.fleet.index
        stream = state.stream(self.stream)
        assert stream is not None
        return {
            "cut off": self.cut_off,
            "counts": dict(state.counts.named()),
            "verdicts": stream.acceptor.counts,
            "applied": stream.acceptor.applied_seq,
            "behind": stream.acceptor.lag_batches,
            "trust": state.trust(self.stream[0]),
            "told of": self.told.batches,
            "held": index.digest(self.stream[0], Tier.GPU, 0),
        }


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.tuples(
        st.sampled_from([EventKind.STORE, EventKind.STORE, EventKind.REMOVE]),
        st.sampled_from([Tier.GPU] * 12 + [Tier.NVME]),
        st.integers(0, 3),
        st.lists(st.integers(1, 20), max_size=4),
    ),
    st.just((EventKind.CLEAR_ALL, Tier.GPU, 0, [])),
)


@st.composite
def stories(draw: st.DrawFn) -> list[bytes]:
    """Numbered batches; some come twice, too early, or make no sense."""
    said, seq = [], 1
    for events in draw(st.lists(st.lists(EVENTS, max_size=3), max_size=14)):
        number = draw(st.sampled_from([seq] * 8 + [seq + 1, max(1, seq - 1)]))
        said.append(message(number, *events))
        seq += number == seq
    return said


@settings(max_examples=200)
@given(stories(), st.integers(1, 8), st.sampled_from([3, 8, 1 << 20]))
def test_runs_end_as_single_messages_do(
    messages: list[bytes], at_once: int, blocks_max: int
) -> None:
    singly, in_runs = Publishing(blocks_max), Publishing(blocks_max)
    singly.say(messages, at_once=0)
    in_runs.say(messages, at_once=at_once)
    assert in_runs.seen() == singly.seen()


def test_a_run_that_overflows_the_byte_budget_makes_the_stream_degraded() -> None:
    publishing = Publishing(index_bytes_max=4 << 20)
    for number in range(400):
        blocks = range(1 + number * 1000, 1001 + number * 1000)
        publishing.say([message(number + 1, (EventKind.STORE, Tier.GPU, 0, blocks))], at_once=1)
    assert publishing.state.counts.blocks_evicted > 0
    _, reasons = publishing.state.trust(publishing.stream[0])
    assert reasons == "budget_evicted"


def test_a_follower_is_told_of_each_batch_of_a_run() -> None:
    index = NativePrefixIndex()
    broadcast = Broadcast(index, lambda: 0.0, 1)
    state = IndexState(index, StateConfig(), broadcast)
    broadcast.attach(state)
    receiver = Receiver(1 << 20)
    broadcast.followers.add(Follower(receiver, frozenset()))
    stream, _ = state.hello(worker_info("w"), Hello(EPOCH, Seq(0)), None, 0.0)
    first = SnapshotChunk(SnapshotMark(EPOCH, 1, Seq(0)), 0, True, NOTHING)
    state.snapshot(stream, first, 0.0)
    before, position = receiver.queued_bytes, broadcast.position
    messages = [message(number, (EventKind.STORE, Tier.GPU, 0, [number])) for number in (1, 2, 3)]
    assert state.advance(stream, EPOCH, messages, 0.0) == 3
    assert broadcast.position == position + 3
    assert receiver.queued_bytes > before
    broadcast.followers.clear()
    messages = [message(number, (EventKind.STORE, Tier.GPU, 0, [number])) for number in (4, 5)]
    assert state.advance(stream, EPOCH, messages, 0.0) == 2
    assert broadcast.position == position + 5, "as many changes, whoever listens"

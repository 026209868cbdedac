"""What others were told last of a holder is what is true of it now, whatever happens."""

import contextlib
from collections.abc import Callable

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtier.core.event_columns import PackedBatch
from kvtier.core.event_messages import Batch, Heartbeat, Hello, SnapshotChunk, SnapshotMark
from kvtier.core.fleet import HolderRecord
from kvtier.core.membership import LeaseConfig
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.core.reservations import Reservation
from kvtier.core.workers import Load
from kvtier.errors import CallerError
from kvtier.types import Epoch, HolderId, InstanceId, Seq, Trust
from kvtier.wire import convert
from kvtier.wire import messages as pb
from kvtier_services.index.state import AT_ONCE_BLOCKS_MAX, IndexState, StateConfig, Stream
from tests.support.raw_publisher import stored, worker_info

MANY = np.arange(1, AT_ONCE_BLOCKS_MAX + 2, dtype=np.uint64)
CONFIG = StateConfig(lease=LeaseConfig(lease_s=1.0, grace_s=3.0, stall_s_max=0.5))


class Listener:
    """Writes down what every holder was when somebody was told of it."""

    def __init__(self) -> None:
        self.told: dict[HolderId, Trust] = {}
        self.trust_of: Callable[[HolderId], Trust] = lambda _: Trust.DEGRADED

    def _tell(self, holder: HolderId) -> None:
        self.told[holder] = self.trust_of(holder)

    holder_joined = holder_changed = holder_hidden = holder_resumed = _tell

    def holder_left(self, record: HolderRecord) -> None:
        del self.told[record.holder]

    def batch_applied(self, stream: Stream, batch: PackedBatch) -> None: ...
    def messages_applied(self, stream: Stream, messages: list[bytes], count: int) -> None: ...
    def stream_replaced(self, stream: Stream) -> None: ...
    def reserved(self, ticket: int, reservation: Reservation) -> None: ...
    def reservation_over(self, ticket: int, reservation: Reservation) -> None: ...


class World:
    """A worker of one or two shards and a state; each step is one message or some time."""

    def __init__(self, shards_count: int) -> None:
        self.shards_count = shards_count
        self.listener = Listener()
        self.state = IndexState(NativePrefixIndex(), CONFIG, self.listener)
        self.listener.trust_of = lambda holder: self.state.trust(holder)[0]
        self.now = 0.0
        self.streams: dict[int, Stream] = {}
        self.epochs = {0: Epoch(1), 1: Epoch(1)}
        self.snapshots = 0

    def step(self, kind: str, shard: int, number: int) -> None:
        if kind == "time":
            for _ in range(number):
                self.now += 0.4
                self.state.tick(self.now)
        elif kind == "work":
            for _ in range(number):
                self.state.work(self.now)
        elif kind == "hello":
            self.epochs[shard] = Epoch(1 + number // 5)
            info = worker_info(
                "w",
                shard_index=shard,
                shards_count=self.shards_count,
                engine=f"e{number // 6}",
            )
            message = Hello(self.epochs[shard], Seq(number % 3))
            self.streams[shard], _ = self.state.hello(info, message, self, self.now)
        elif shard in self.streams:
            self.say(kind, self.streams[shard], self.epochs[shard], number)

    def say(self, kind: str, stream: Stream, epoch: Epoch, number: int) -> None:
        columns = convert.packed_from(convert.batch_to(stored(MANY[: number * 3]), 0))
        state, seq = self.state, Seq(number)
        match kind:
            case "batch":
                request = pb.PublishRequest(batch=convert.packed_to(columns, number))
                if not state.advance(stream, epoch, [request.SerializeToString()], self.now):
                    state.batch(stream, Batch(epoch, seq, columns, 10), self.now)
            case "heartbeat":
                state.heartbeat(stream, Heartbeat(epoch, seq, None), Load(), self.now)
            case "undecodable":
                state.undecodable(stream, epoch, self.now)
            case "disconnect":
                state.disconnected(stream, self)
            case "goodbye" if number == 0:
                state.goodbye(stream, epoch)
            case "snapshot" | "large":
                self.snapshots += 1
                if kind == "large":
                    columns = convert.packed_from(convert.batch_to(stored(MANY), 0))
                mark = SnapshotMark(epoch, self.snapshots, seq)
                chunk = SnapshotChunk(mark, 0, True, columns)
                state.snapshot(stream, chunk, self.now)
            case _:
                pass


KINDS = (
    "time", "time", "work", "hello", "hello", "batch", "batch", "batch", "heartbeat", "heartbeat",
    "undecodable", "disconnect", "goodbye", "snapshot", "snapshot", "large",
)  # fmt: skip
STEPS = st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(0, 6))


@settings(max_examples=300)
@example(1, [("snapshot", 0, 0), ("heartbeat", 0, 1), ("batch", 0, 1)])  # a gap that is filled
@given(st.integers(1, 2), st.lists(STEPS, max_size=30))
def test_nobody_is_left_with_an_old_description(
    shards_count: int, steps: list[tuple[str, int, int]]
) -> None:
    world = World(shards_count)
    for kind, shard, number in [("hello", 0, 0), *steps]:
        # Two shards may contradict each other, or speak for a holder that was forgotten.
        with contextlib.suppress(CallerError):
            world.step(kind, shard % shards_count, number)
        state = world.state
        holder = state.fleet.find_worker(InstanceId("w"), 0)
        if holder is None:
            assert world.listener.told == {}
            continue
        trust, _ = state.trust(holder)
        assert state.described(holder) == (state.fleet.record(holder).info, trust)
        assert world.listener.told == {holder: trust}
        assert state.described(holder) is state.described(holder)

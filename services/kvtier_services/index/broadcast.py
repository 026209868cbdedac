"""Tells replicas and watchers what changed, in messages that are serialized once for all of them.

A follower is sent each holder's blocks exactly once, in one step with the log: what changes in a
holder that it has not been sent yet is left out, because the blocks that follow will contain it.

What must not live here: decisions (state.py), the queues (feed.py), RPC handlers (service.py).
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.core.event_columns import EventBatch, EventKind, PackedBatch
from kvtier.core.fleet import HolderRecord
from kvtier.core.prefix_index import TIERS_OF_KIND, PrefixIndex
from kvtier.core.reservations import Reservation
from kvtier.errors import UnavailableError
from kvtier.limits import BATCH_BLOCKS_MAX, BATCH_EVENTS_MAX
from kvtier.types import HolderId, Tier
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb
from kvtier_services.index.feed import Receiver
from kvtier_services.index.state import IndexState, Stream

Clock = Callable[[], float]


class Follower:
    """An index replica on the other end: what it wants and what it has been sent."""

    def __init__(self, receiver: Receiver, models: frozenset[str], router: str = "") -> None:
        self.receiver = receiver
        self.models = models
        self.router = router
        """Whose reservations it needs not be told; empty for a follower that is no router."""
        self.holders: set[HolderId] = set()

    def wants(self, record: HolderRecord) -> bool:
        return _wants(self.models, record)


class Watcher:
    """Somebody who watches the fleet, without blocks."""

    def __init__(self, receiver: Receiver, models: frozenset[str]) -> None:
        self.receiver = receiver
        self.models = models

    def wants(self, record: HolderRecord) -> bool:
        return _wants(self.models, record)


def _wants(models: frozenset[str], record: HolderRecord) -> bool:
    """Without a filter everything; stores whose Hello names no model are always wanted."""
    card = record.info.card
    if not models or card is None:
        return True
    return card.model_id in models or not models.isdisjoint(card.served_names)


class Broadcast:
    """`state.Changes` for all receivers; numbers the changes of this index process."""

    def __init__(self, index: PrefixIndex, clock: Clock, index_epoch: int) -> None:
        self._index = index
        self._clock = clock
        self.index_epoch = index_epoch
        self.position = 0
        self.followers: set[Follower] = set()
        self.watchers: set[Watcher] = set()
        self._state: IndexState | None = None

    def attach(self, state: IndexState) -> None:
        """Give it the state that it describes; once, before the first change."""
        self._state = state

    @property
    def state(self) -> IndexState:
        assert self._state is not None
        return self._state

    def stop(self, reason: UnavailableError) -> None:
        """End every follower and watcher, and say why."""
        receivers = [one.receiver for one in self.followers]
        for receiver in (*receivers, *(one.receiver for one in self.watchers)):
            receiver.stop(reason)

    # ---- Changes

    def holder_joined(self, holder: HolderId) -> None:
        record = self.state.fleet.record(holder)
        self._tell_watchers(pb.FleetEvent.KIND_JOINED, record)
        for follower in self.followers:
            if follower.wants(record):
                follower.holders.add(holder)
        self._tell_holder(record)

    def holder_changed(self, holder: HolderId) -> None:
        record = self.state.fleet.record(holder)
        self._tell_watchers(pb.FleetEvent.KIND_CHANGED, record)
        self._tell_holder(record)

    def holder_hidden(self, holder: HolderId) -> None:
        record = self.state.fleet.record(holder)
        self._tell_watchers(pb.FleetEvent.KIND_HIDDEN, record)
        self._tell_holder(record)

    def holder_resumed(self, holder: HolderId) -> None:
        record = self.state.fleet.record(holder)
        self._tell_watchers(pb.FleetEvent.KIND_RESUMED, record)
        self._tell_holder(record)

    def holder_left(self, record: HolderRecord) -> None:
        gone = pb.Holder(holder=record.holder, hello=convert.hello_to(record.info, 0, 0))
        event = pb.FleetEvent(kind=pb.FleetEvent.KIND_LEFT, holder=gone).SerializeToString()
        for watcher in self.watchers:
            if watcher.wants(record):
                watcher.receiver.offer(event)
        self._tell(record.holder, lambda: pb.SnapshotResponse(removed_holder=record.holder))
        for follower in self.followers:
            follower.holders.discard(record.holder)

    def batch_applied(self, stream: Stream, batch: PackedBatch) -> None:
        if not self.followers:  # the most frequent change of all
            self.position += 1
            return
        self._tell_batch(stream, convert.packed_to(batch))

    def messages_applied(self, stream: Stream, messages: list[bytes], count: int) -> None:
        if not self.followers:
            self.position += count
            return
        for message in messages[:count]:
            batch = pb.PublishRequest.FromString(message).batch
            batch.seq = 0  # its publisher's; a follower goes by the position
            self._tell_batch(stream, batch)

    def stream_replaced(self, stream: Stream) -> None:
        receivers = [f for f in self.followers if stream[0] in f.holders]
        if receivers:  # or a large holder would be read out for nobody
            for message in self._blocks(stream):
                self._send(receivers, message)

    def reserved(self, ticket: int, reservation: Reservation) -> None:
        router = reservation.router.router_id
        self._tell(
            reservation.worker, lambda: _predicted(ticket, reservation, reservation.ttl_ms), router
        )

    def reservation_over(self, ticket: int, reservation: Reservation) -> None:
        prediction = pb.Prediction(
            holder=reservation.worker,
            ticket=ticket,
            router=reservation.router.router_id,
            key=reservation.key,
            over=True,
        )
        self._tell(
            reservation.worker,
            lambda: pb.SnapshotResponse(prediction=prediction),
            reservation.router.router_id,
        )

    # ---- what a new receiver is sent first

    async def catch_up(self, follower: Follower) -> None:
        """Send a new follower everything, holder by holder, at its own pace; then `complete`."""
        pending = [record.holder for record in self.state.fleet.records()]
        for holder in pending:
            await follower.receiver.room()
            if follower.receiver.closed or holder in follower.holders:
                continue
            try:
                record = self.state.fleet.record(holder)
            except ValueError:
                continue  # it left while others were sent
            if not follower.wants(record):
                continue
            follower.holders.add(holder)
            self._send([follower], pb.SnapshotResponse(holder=self.describe(record)))
            for shard, _ in self.state.streams(holder):
                for message in self._blocks((holder, shard)):
                    self._send([follower], message)
            for ticket, reservation, expires_at in self.state.routers.reservations(holder):
                if reservation.router.router_id == follower.router:
                    continue
                ttl_ms = max(1, int((expires_at - self._clock()) * 1000))
                self._send([follower], _predicted(ticket, reservation, ttl_ms))
        self._send([follower], pb.SnapshotResponse(complete=True))

    def current_fleet(self, watcher: Watcher) -> Iterator[bytes]:
        """Every holder a new watcher is to know, then the mark that those were all."""
        for record in self.state.fleet.records():
            if watcher.wants(record):
                kind = pb.FleetEvent.KIND_JOINED
                yield pb.FleetEvent(kind=kind, holder=self.describe(record)).SerializeToString()
        yield pb.FleetEvent(kind=pb.FleetEvent.KIND_CURRENT).SerializeToString()

    def heartbeat(self) -> bytes:
        """Sent when nothing happened, so that a follower sees its lag."""
        return self._serialized(pb.SnapshotResponse(heartbeat=True))

    def joined(self, messages: list[bytes]) -> bytes:
        """Serialized messages as one: the only one of them, or a group. O(bytes)."""
        if len(messages) == 1:
            return messages[0]
        return self._serialized(pb.SnapshotResponse(group=pb.SnapshotGroup(messages=messages)))

    def describe(self, record: HolderRecord) -> pb.Holder:
        """A holder in the words of the wire, as of now."""
        trust, reason = self.state.trust(record.holder)
        totals = self.state.routers.reserved(record.holder)
        epoch, seq = 0, 0
        for _, stream in self.state.streams(record.holder):
            epoch, seq = stream.acceptor.epoch or 0, stream.acceptor.applied_seq
            break
        silent_s = self._clock() - self.state.heard_at(record.holder)
        shards_count = record.info.shards_count
        return pb.Holder(
            holder=record.holder,
            hello=convert.hello_to(record.info, epoch, seq),
            trust=convert.trust_to(trust),
            degraded_reason=reason,
            hidden=record.hidden,
            load=holders.load_to(self.state.load(record.holder)),
            reserved_prefill_tokens=totals.prefill_tokens,
            reserved_requests=totals.reservations_count,
            age_ms=max(0, int(silent_s * 1000)),
            namespaces=[
                record.shards[shard].namespace if shard in record.shards else b""
                for shard in range(shards_count)
            ],
        )

    # ---- parts

    def _tell_watchers(self, kind: pb.FleetEvent.Kind.ValueType, record: HolderRecord) -> None:
        receivers = [watcher for watcher in self.watchers if watcher.wants(record)]
        if receivers:
            event = pb.FleetEvent(kind=kind, holder=self.describe(record)).SerializeToString()
            for watcher in receivers:
                watcher.receiver.offer(event)

    def _tell_holder(self, record: HolderRecord) -> None:
        self._tell(record.holder, lambda: pb.SnapshotResponse(holder=self.describe(record)))

    def _tell_batch(self, stream: Stream, batch: pb.Batch) -> None:
        part = pb.HolderBatch(holder=stream[0], shard=stream[1], batch=batch)
        self._tell(stream[0], lambda: pb.SnapshotResponse(batch=part))

    def _tell(
        self, holder: HolderId, message: Callable[[], pb.SnapshotResponse], router: str = ""
    ) -> None:
        """Tell who has the holder, but for the router that it comes from."""
        self.position += 1
        receivers = [follower for follower in self.followers if holder in follower.holders]
        if router:
            receivers = [follower for follower in receivers if follower.router != router]
        if receivers:
            self._send(receivers, message())

    def _send(self, receivers: list[Follower], message: pb.SnapshotResponse) -> None:
        if receivers:
            data = self._serialized(message)
            for follower in receivers:
                follower.receiver.offer(data)

    def _serialized(self, message: pb.SnapshotResponse) -> bytes:
        message.position = self.position
        message.index_epoch = self.index_epoch
        return message.SerializeToString()

    def _blocks(self, stream: Stream) -> Iterator[pb.SnapshotResponse]:
        """Everything that a stream holds, as chunks; chunk 0 is sent even when it holds nothing."""
        number = 0
        for batch in self._chunks(stream):
            yield pb.SnapshotResponse(
                blocks=pb.HolderBlocks(
                    holder=stream[0],
                    shard=stream[1],
                    number=number,
                    batch=convert.batch_to(batch, 0),
                )
            )
            number += 1
        if number == 0:
            yield pb.SnapshotResponse(blocks=pb.HolderBlocks(holder=stream[0], shard=stream[1]))

    def _chunks(self, stream: Stream) -> Iterator[EventBatch]:
        kind = self.state.fleet.record(stream[0]).key.kind
        for tier in TIERS_OF_KIND[kind]:
            snapshot = self._index.snapshot(stream[0], tier, stream[1])
            yield from store_batches(tier, snapshot.hashes, snapshot.run_lengths)


def _predicted(ticket: int, reservation: Reservation, ttl_ms: int) -> pb.SnapshotResponse:
    return pb.SnapshotResponse(
        prediction=pb.Prediction(
            holder=reservation.worker,
            ticket=ticket,
            hashes=np.array(reservation.blocks, dtype="<u8").tobytes(),
            ttl_ms=ttl_ms,
            prefill_tokens=reservation.prefill_tokens,
            router=reservation.router.router_id,
            key=reservation.key,
        )
    )


def store_batches(
    tier: Tier, hashes: npt.NDArray[np.uint64], run_lengths: npt.NDArray[np.uint32]
) -> Iterator[EventBatch]:
    """Runs of hashes as store events without known parents, in batches within the limits.

    A run longer than a batch may carry is cut; the pieces keep their order.
    """
    cut = _cut_runs(run_lengths, BATCH_BLOCKS_MAX)
    ends = np.cumsum(cut, dtype=np.int64)
    first_run, done = 0, 0
    while first_run < len(cut):
        last_run = int(np.searchsorted(ends, done + BATCH_BLOCKS_MAX, side="right"))
        last_run = min(max(last_run, first_run + 1), first_run + BATCH_EVENTS_MAX)
        lengths = cut[first_run:last_run]
        until = int(ends[last_run - 1])
        yield EventBatch(
            kinds=np.full(len(lengths), EventKind.STORE, np.uint8),
            tiers=np.full(len(lengths), tier, np.uint8),
            lengths=lengths,
            parents=np.zeros(len(lengths), np.uint64),
            hashes=hashes[done:until],
        )
        first_run, done = last_run, until


def _cut_runs(run_lengths: npt.NDArray[np.uint32], blocks_max: int) -> npt.NDArray[np.uint32]:
    if not len(run_lengths) or int(run_lengths.max()) <= blocks_max:
        return run_lengths
    pieces: list[int] = []
    for length in run_lengths.tolist():
        pieces += [blocks_max] * (length // blocks_max)
        if length % blocks_max:
            pieces.append(length % blocks_max)
    return np.array(pieces, np.uint32)

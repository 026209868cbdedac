"""The index on grpc.aio: each RPC turns messages into calls of `IndexState` and back.

Everything runs on one event loop; native calls release the GIL. What must not live here:
decisions (state.py), what receivers are told (broadcast.py), configuration (main.py).
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from kvtier.core.reservations import Reservation, ReserveVerdict, RouterLife
from kvtier.errors import CallerError, KvtierError, OverloadedError, UnavailableError
from kvtier.limits import BATCH_BLOCKS_MAX, FOLLOWERS_COUNT_MAX, WATCHERS_COUNT_MAX
from kvtier.types import Epoch, HolderId, InstanceId, PrefixHash, Tier
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import end
from kvtier_services.index.broadcast import Broadcast, Follower, Watcher
from kvtier_services.index.feed import Receiver
from kvtier_services.index.locating import Locator
from kvtier_services.index.matching import Answerer
from kvtier_services.index.metrics import IndexMetrics
from kvtier_services.index.publishing import Intake, PublishStream
from kvtier_services.index.state import IndexState

Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")

FEED_IDLE_S: Final = 0.5
FEED_QUEUED_BYTES_MAX: Final = 256 << 20
WATCH_QUEUED_BYTES_MAX: Final = 16 << 20
GATHER_S: Final = 0.01
"""Who follows in groups is woken about that often at most, and hears no later than that."""
GROUP_BYTES_MAX: Final = 1 << 20


class IndexService:
    """Handlers of kvtier.v1.Index over one state. `handler()` is what a server serves."""

    def __init__(
        self,
        state: IndexState,
        broadcast: Broadcast,
        metrics: IndexMetrics,
        clock: Callable[[], float],
        welcome: pb.Welcome,
    ) -> None:
        self._state = state
        self._broadcast = broadcast
        self._metrics = metrics
        self._clock = clock
        self._welcome = welcome
        self._intake = Intake(state, clock)
        self._publishing: set[PublishStream] = set()
        self._reserving: set[asyncio.Timeout] = set()
        self._stopping: UnavailableError | None = None
        self._locator = Locator(state)
        self._answerer = Answerer(state, metrics, clock, broadcast.index_epoch)

    def handler(self) -> grpc.GenericRpcHandler:
        return rpc.service_handler(
            rpc.INDEX,
            {
                "Publish": self.publish,
                "Match": self.match,
                "Locate": self.locate,
                "Reserve": self.reserve,
                "Release": self.release,
                "Snapshot": self.snapshot,
                "WatchFleet": self.watch_fleet,
                "Stats": self.stats,
            },
            raw={"Publish"},
        )

    def stop(self, reason: UnavailableError) -> None:
        """End every stream and say why; calls that are answered at once go on. For good.

        Who is sent away comes back or goes elsewhere, so the server must take no more calls.
        """
        self._stopping = reason
        for stream in self._publishing:
            stream.leave(reason)
        for reserving in self._reserving:
            reserving.reschedule(asyncio.get_running_loop().time())
        self._broadcast.stop(reason)

    # ---- publishers

    async def publish(self, _: AsyncIterator[bytes], context: Context) -> None:
        stream = PublishStream(self._state, self._clock, self._welcome, self._metrics, self._intake)
        with self._metrics.open_stream("publish"), _listed(stream, self._publishing):
            if self._stopping is not None:  # came in between
                stream.leave(self._stopping)
            await stream.serve(context)

    # ---- queries

    async def match(self, request: pb.MatchRequest, context: Context) -> bytes:
        try:
            return self._answerer.answer(request)
        except KvtierError as error:
            await refuse(context, error)
            raise

    async def locate(self, request: pb.LocateRequest, context: Context) -> pb.LocateResponse:
        try:
            return self._locator.answer(request)
        except KvtierError as error:
            await refuse(context, error)
            raise

    # ---- routers

    async def reserve(self, _: AsyncIterator[pb.ReserveRequest], context: Context) -> None:
        try:
            async with asyncio.timeout(None) as reserving:
                with _listed(reserving, self._reserving):
                    await self._serve_router(context)
        except TimeoutError:
            await refuse(context, self._stopping or UnavailableError("the stream is over"))
        except KvtierError as error:
            await refuse(context, error)
        except grpc.aio.InternalError:
            return  # the router is gone

    async def _serve_router(self, context: Context) -> None:
        router: RouterLife | None = None
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                kind = rpc.well_formed(request).WhichOneof("message")
                if (kind == "hello") != (router is None):
                    raise CallerError("a Reserve stream begins with RouterHello and has but one")
                if router is None:
                    router = RouterLife(request.hello.router, Epoch(request.hello.epoch))
                    self._state.routers.router_came(router)
                    if request.hello.groups:
                        await context.write(pb.ReserveResponse(groups=True))
                elif kind == "reserve":
                    await context.write(self._reserve(router, request.reserve))
                elif kind == "release_key":
                    self._state.routers.release(router, request.release_key)
                elif kind == "group":
                    for key in request.group.release_keys:
                        self._state.routers.release(router, key)
                    for reserve in request.group.reserve:
                        self._reserve(router, reserve)
        finally:
            if router is not None:
                self._state.routers.router_gone(router)

    def _reserve(self, router: RouterLife, message: pb.Reservation) -> pb.ReserveResponse:
        worker = self._state.fleet.find_worker(InstanceId(message.instance), message.dp_rank)
        if worker is None:
            return pb.ReserveResponse(key=message.key, granted=False, reason="unknown_worker")
        hashes = convert.u64_column("predicted_hashes", message.predicted_hashes, BATCH_BLOCKS_MAX)
        wanted = Reservation(
            router=router,
            key=message.key,
            worker=worker,
            prefill_tokens=message.prefill_tokens,
            ttl_ms=message.ttl_ms,
            blocks=tuple(PrefixHash(one) for one in hashes.tolist()),
        )
        verdict = self._state.routers.reserve(wanted, self._clock())
        self._metrics.reserved(verdict)
        granted = verdict in {ReserveVerdict.GRANTED, ReserveVerdict.REPEATED}
        return pb.ReserveResponse(
            key=message.key,
            granted=granted,
            reason="" if granted else verdict.value,
            worker_prefill_tokens=self._state.routers.reserved(worker).prefill_tokens,
        )

    async def release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        try:
            router = RouterLife(request.router, Epoch(request.epoch))
            released = sum(self._state.routers.release(router, key) for key in request.keys)
        except KvtierError as error:
            await refuse(context, error)
        return pb.ReleaseResponse(released=released)

    # ---- replicas and watchers

    async def snapshot(self, request: pb.SnapshotRequest, context: Context) -> AsyncIterator[bytes]:
        if len(self._broadcast.followers) >= FOLLOWERS_COUNT_MAX:
            await refuse(context, OverloadedError(f"{FOLLOWERS_COUNT_MAX} replicas follow already"))
        receiver = Receiver(FEED_QUEUED_BYTES_MAX)
        follower = Follower(receiver, frozenset(request.models), request.router)
        self._broadcast.followers.add(follower)
        sending = asyncio.create_task(self._feed(follower, follow=request.follow))
        try:
            with self._metrics.open_stream("snapshot"):
                bytes_max = GROUP_BYTES_MAX if request.groups else 0
                gather_s = GATHER_S if request.groups else 0.0
                async for group in receiver.groups(FEED_IDLE_S, gather_s, bytes_max):
                    yield self._broadcast.joined(group) if group else self._broadcast.heartbeat()
        except OverloadedError as error:
            self._metrics.cut_off()
            await refuse(context, error)
        except UnavailableError as error:
            await refuse(context, error)
        finally:
            self._broadcast.followers.discard(follower)
            receiver.close()
            await end([sending])

    async def _feed(self, follower: Follower, *, follow: bool) -> None:
        await self._broadcast.catch_up(follower)
        if not follow:
            self._broadcast.followers.discard(follower)
            follower.receiver.finish()

    async def watch_fleet(
        self, request: pb.WatchFleetRequest, context: Context
    ) -> AsyncIterator[bytes]:
        if len(self._broadcast.watchers) >= WATCHERS_COUNT_MAX:
            await refuse(context, OverloadedError(f"{WATCHERS_COUNT_MAX} watch the fleet already"))
        receiver = Receiver(WATCH_QUEUED_BYTES_MAX)
        watcher = Watcher(receiver, frozenset(request.models))
        for message in self._broadcast.current_fleet(watcher):
            receiver.offer(message)
        self._broadcast.watchers.add(watcher)
        try:
            with self._metrics.open_stream("watch"):
                async for event in receiver.messages(FEED_IDLE_S):
                    if event is not None:
                        yield event
        except OverloadedError as error:
            self._metrics.cut_off()
            await refuse(context, error)
        except UnavailableError as error:
            await refuse(context, error)
        finally:
            self._broadcast.watchers.discard(watcher)
            receiver.close()

    # ---- operators

    async def stats(self, _: pb.StatsRequest, __: Context) -> pb.StatsResponse:
        state, index = self._state, self._state.fleet.index
        sizes = index.stats()
        return pb.StatsResponse(
            index_epoch=self._broadcast.index_epoch,
            blocks=sizes.blocks,
            holdings=sizes.holdings,
            index_bytes=sizes.bytes,
            nodes=sizes.pages,
            holders=[self._holder_stats(record.holder) for record in state.fleet.records()],
            events=[pb.NamedCount(name=name, count=count) for name, count in state.counts.named()],
            queried_blocks=self._metrics.queried_blocks_count,
            matched_blocks=self._metrics.matched_blocks_count,
            position=self._broadcast.position,
            followers=len(self._broadcast.followers),
        )

    def _holder_stats(self, holder: HolderId) -> pb.HolderStats:
        state = self._state
        record = state.fleet.record(holder)
        tiers, events, last_seq = [], [], 0
        blocks: Counter[Tier] = Counter()
        for shard, _ in state.streams(holder):
            blocks.update(state.held((holder, shard)))
        for tier, count in blocks.items():
            held_bytes = count * record.info.block_bytes
            tiers.append(pb.TierStats(tier=tier, blocks=count, bytes=held_bytes))
        for _, stream in state.streams(holder):
            last_seq = max(last_seq, stream.acceptor.applied_seq)
            events += [
                pb.NamedCount(name=verdict.value, count=count)
                for verdict, count in stream.acceptor.counts.items()
                if count
            ]
        return pb.HolderStats(
            holder=self._broadcast.describe(record), tiers=tiers, events=events, last_seq=last_seq
        )


@contextlib.contextmanager
def _listed(one: T, where: set[T]) -> Iterator[None]:
    """`one` is in the set while entered."""
    where.add(one)
    try:
        yield
    finally:
        where.discard(one)


async def refuse(context: Context, error: KvtierError) -> None:
    """End a call with the status that the error's class has; raises grpc's abort."""
    await context.abort(grpc.StatusCode[error.grpc_status], str(error))

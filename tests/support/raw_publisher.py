"""A publisher that says exactly what a test tells it to, over the real wire."""

from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.fleet import HolderInfo
from kvtier.core.model_card import ModelCard
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier
from kvtier.wire import convert, rpc
from kvtier.wire import messages as pb

U64 = npt.NDArray[np.uint64]
SPACE = Fingerprint(b"n" * 32)
CARD = ModelCard(("chat",), "org/model", "rev-1", b"t" * 32, None, 16)


def worker_info(name: str = "w1", **changes: Any) -> HolderInfo:
    """A worker on its own node, with a store attached."""
    values: dict[str, Any] = {
        "kind": HolderKind.WORKER,
        "instance": InstanceId(name),
        "node": NodeId(f"node-of-{name}"),
        "namespace": SPACE,
        "card": CARD,
        "store": f"store-of-{name}",
        "block_bytes": 1000,
    }
    return HolderInfo(**(values | changes))


def stored(hashes: U64, tier: Tier = Tier.GPU, parent: int = 0) -> EventBatch:
    """One chain appeared."""
    return events([(EventKind.STORE, tier, hashes)], parent)


def removed(hashes: U64, tier: Tier = Tier.GPU) -> EventBatch:
    return events([(EventKind.REMOVE, tier, hashes)])


def events(rows: list[tuple[EventKind, Tier, U64]], parent: int = 0) -> EventBatch:
    return EventBatch(
        kinds=np.array([kind for kind, _, _ in rows], np.uint8),
        tiers=np.array([tier for _, tier, _ in rows], np.uint8),
        lengths=np.array([len(hashes) for _, _, hashes in rows], np.uint32),
        parents=np.full(len(rows), parent, np.uint64),
        hashes=np.concatenate([hashes for _, _, hashes in rows] or [np.empty(0, np.uint64)]),
    )


class RawPublisher:
    """One Publish stream; every answer of the index is kept in `answers`."""

    def __init__(self, channel: grpc.aio.Channel, info: HolderInfo, epoch: int) -> None:
        self.info = info
        self.epoch = epoch
        self.answers: list[pb.PublishResponse] = []
        self._call = self.call = rpc.call(channel, rpc.INDEX, "Publish")()

    async def hello(self, seq: int = 0) -> pb.PublishResponse:
        """Introduce oneself and read the answer that is not an acknowledgement."""
        await self._call.write(
            pb.PublishRequest(hello=convert.hello_to(self.info, self.epoch, seq))
        )
        return await self.answer()

    async def batch(self, seq: int, batch: EventBatch) -> None:
        await self._call.write(pb.PublishRequest(batch=convert.batch_to(batch, seq)))

    async def raw(self, request: pb.PublishRequest) -> None:
        await self._call.write(request)

    async def snapshot(self, at_seq: int, batches: list[EventBatch], snapshot_id: int = 1) -> None:
        """Everything at once, in as many chunks as batches; an empty one is one empty chunk."""
        chunks = batches or [events([])]
        for number in range(len(chunks)):
            await self.chunk(at_seq, chunks, number, snapshot_id)

    async def chunk(
        self, at_seq: int, chunks: list[EventBatch], number: int, snapshot_id: int = 1
    ) -> None:
        """One piece of a snapshot."""
        chunk = pb.SnapshotChunk(
            mark=pb.SnapshotMark(snapshot_id=snapshot_id, at_seq=at_seq),
            number=number,
            last=number == len(chunks) - 1,
            batch=convert.batch_to(chunks[number], 0),
        )
        await self._call.write(pb.PublishRequest(snapshot=chunk))

    async def heartbeat(self, seq: int, load: pb.Load | None = None) -> None:
        await self._call.write(pb.PublishRequest(heartbeat=pb.Heartbeat(seq=seq, load=load)))

    async def goodbye(self) -> None:
        await self._call.write(pb.PublishRequest(goodbye=pb.Goodbye(reason="test")))
        await self._call.done_writing()

    async def answer(self, wanted: str | None = None) -> pb.PublishResponse:
        """The next answer of a kind; without one, the next that is no acknowledgement."""
        while True:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                raise AssertionError(f"the stream ended: {await self._call.code()}")
            self.answers.append(response)
            kind = response.WhichOneof("message")
            if kind == wanted or (wanted is None and kind != "ack"):
                return response  # type: ignore[no-any-return]

    async def acked(self, seq: int) -> None:
        """Wait until everything up to `seq` is acknowledged."""
        while (await self.answer("ack")).ack.seq < seq:
            pass

    async def join(self, batches: list[EventBatch], at_seq: int = 0) -> None:
        """Hello, and a snapshot as the index asks for it."""
        response = await self.hello(at_seq)
        assert response.welcome.need_snapshot, response
        await self.snapshot(at_seq, batches)

    async def ended(self) -> grpc.StatusCode:
        """Read until the index ends the stream; its status."""
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.answers.append(response)
        except grpc.aio.AioRpcError as error:
            return error.code()
        code: grpc.StatusCode = await self._call.code()
        return code

    def cancel(self) -> None:
        self._call.cancel()


def unary(channel: grpc.aio.Channel, name: str) -> Callable[..., Any]:
    return rpc.call(channel, rpc.INDEX, name)


def tokens_of(response: pb.MatchResponse, result: int = 0) -> dict[str, int]:
    """Instance -> tokens of one result."""
    found = response.results[result]
    workers = np.frombuffer(found.workers, "<u4").tolist()
    tokens = np.frombuffer(found.tokens, "<u8").tolist()
    return {
        response.workers[worker].instance: count
        for worker, count in zip(workers, tokens, strict=True)
    }

"""A Publish server inside the test's process that keeps what it is told, and misbehaves on demand.

It decides with the core's own `Acceptor` and keeps a plain multiset, so that "the index equals its
publisher" can be asked at any time. It runs on a thread of its own.
"""

import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Fence,
    Heartbeat,
    Hello,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotMark,
    TierDigest,
)
from kvtier.core.events import (
    Acceptor,
    Action,
    ApplyBatch,
    ClearStream,
    DiscardStaged,
    Outcome,
    ReplaceWithSnapshot,
    StageChunk,
    Verdict,
)
from kvtier.types import HOLDER_TIERS, Epoch, Seq, Tier
from kvtier.wire import convert, rpc, transport
from kvtier.wire import messages as pb
from kvtier.wire.loop_thread import LoopThread

Blocks = dict[Tier, Counter[int]]


def empty() -> Blocks:
    return {tier: Counter() for tier in HOLDER_TIERS}


def apply(blocks: Blocks, batch: EventBatch) -> None:
    """What a batch does to a multiset, event by event: the oracle."""
    at = 0
    for kind, tier, length in zip(
        batch.kinds.tolist(), batch.tiers.tolist(), batch.lengths.tolist(), strict=True
    ):
        names = batch.hashes[at : at + length].tolist()
        at += length
        held = blocks[Tier(tier)]
        if kind == EventKind.STORE:
            held.update(names)
        elif kind == EventKind.REMOVE:
            for name in names:
                remove_one(held, name)
        elif kind == EventKind.CLEAR_TIER:
            held.clear()
        else:
            for each in blocks.values():
                each.clear()


def remove_one(held: Counter[int], name: int) -> None:
    if held[name] > 1:
        held[name] -= 1
    else:
        held.pop(name, None)


@dataclass(slots=True)
class Script:
    """What goes wrong. Written by the test, read by the server, both at any time."""

    lose: Callable[[pb.PublishRequest], bool] = lambda _: False
    refuse: str = ""
    deny: grpc.StatusCode | None = None
    is_mute: bool = False
    lease_ms: int = 300
    heartbeat_ms: int = 30


@dataclass(slots=True)
class _Held:
    acceptor: Acceptor[EventBatch] = field(default_factory=Acceptor)
    blocks: Blocks = field(default_factory=empty)
    staged: list[EventBatch] = field(default_factory=list)


class ScriptedIndex:
    """One index process in miniature. `stop` and `start` restart it, with or without memory."""

    def __init__(self, port: int = 0) -> None:
        self.script = Script()
        self.port = port
        self.hellos: list[pb.Hello] = []
        self.heartbeats: list[pb.Heartbeat] = []
        self.goodbyes: list[str] = []
        self.lost_count = 0
        self.snapshot_chunks_count = 0
        self.batches_count = 0
        self.index_epoch = 0
        self._guard = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._server: grpc.aio.Server | None = None
        self._thread = LoopThread("scripted index")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "ScriptedIndex":
        self._thread.start()
        self._thread.submit(self._start()).result(40)
        return self

    def stop(self) -> None:
        """End all streams at once; the memory stays for `start`."""
        if self._thread.is_running:
            self._thread.submit(self._stop()).result(40)
            self._thread.stop()

    def forget(self) -> None:
        """Lose the memory, as a restarted process does."""
        with self._guard:
            self._held.clear()

    def damage(self, instance: str) -> None:
        """Let what is held of an instance differ from what it said."""
        with self._guard:
            self._held[instance].blocks[Tier.GPU][2**63] += 1

    def blocks(self, instance: str) -> Blocks:
        """A copy of what is held of an instance."""
        with self._guard:
            held = self._held.get(instance)
            found = empty() if held is None else held.blocks
            return {tier: Counter(found[tier]) for tier in HOLDER_TIERS}

    def counts(self, instance: str) -> dict[Verdict, int]:
        with self._guard:
            held = self._held.get(instance)
            return {} if held is None else dict(held.acceptor.counts)

    # ---- serving

    async def _start(self) -> None:
        self.index_epoch += 1
        self._server = transport.new_server()
        self.port = transport.open_port(self._server, f"127.0.0.1:{self.port}", None)
        names = dict.fromkeys(rpc.methods(rpc.INDEX), self._unimplemented)
        handler = rpc.service_handler(rpc.INDEX, {**names, "Publish": self._publish})
        self._server.add_generic_rpc_handlers((handler,))
        await self._server.start()

    async def _stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _unimplemented(self, _: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")

    async def _publish(
        self,
        requests: AsyncIterator[pb.PublishRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if self.script.deny is not None:
            await context.abort(self.script.deny, "denied by the script")
        held, epoch = _Held(), Epoch(0)
        async for request in requests:
            if self.script.lose(request):
                self.lost_count += 1
                continue
            kind = request.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(request.hello)
                if self.script.refuse:
                    refused = pb.Refused(reason=self.script.refuse)
                    await context.write(pb.PublishResponse(refused=refused))
                    return
                epoch = Epoch(request.hello.epoch)
                with self._guard:
                    held = self._held.setdefault(request.hello.instance, _Held())
            if kind == "goodbye":
                self.goodbyes.append(request.goodbye.reason)
                return
            with self._guard:
                outcome = self._decide(held, epoch, request)
                for action in outcome.actions:
                    self._act(held, action)
            if self.script.is_mute:
                continue
            for response in map(self._response, outcome.actions):
                if response is None:
                    continue
                if kind == "hello" and response.HasField("snapshot_needed"):
                    response = pb.PublishResponse(welcome=self._welcome(0, need_snapshot=True))
                await context.write(response)
            if outcome.verdict is Verdict.FENCED:
                return

    def _decide(self, held: _Held, epoch: Epoch, request: pb.PublishRequest) -> Outcome[EventBatch]:
        acceptor, now = held.acceptor, time.monotonic()
        match request.WhichOneof("message"):
            case "hello":
                return acceptor.hello(Hello(epoch, Seq(request.hello.seq)), now)
            case "batch":
                self.batches_count += 1
                columns = convert.batch_from(request.batch)
                seq = Seq(request.batch.seq)
                return acceptor.batch(Batch(epoch, seq, columns, columns.payload_bytes), now)
            case "snapshot":
                self.snapshot_chunks_count += 1
                chunk = request.snapshot
                mark = SnapshotMark(epoch, chunk.mark.snapshot_id, Seq(chunk.mark.at_seq))
                columns = convert.batch_from(chunk.batch)
                piece = SnapshotChunk(mark, chunk.number, chunk.last, columns)
                return acceptor.snapshot_chunk(piece, now)
            case "heartbeat":
                self.heartbeats.append(request.heartbeat)
                digests = request.heartbeat.digests
                digest = tuple(TierDigest(one.count, one.xor) for one in digests) or None
                beat = Heartbeat(epoch, Seq(request.heartbeat.seq), digest)
                return acceptor.heartbeat(beat, _digest(held.blocks), now)
            case kind:
                raise AssertionError(f"unexpected {kind}")

    def _act(self, held: _Held, action: Action[EventBatch]) -> None:
        match action:
            case ApplyBatch(_, batch):
                apply(held.blocks, batch)
            case StageChunk(_, batch):
                held.staged.append(batch)
            case DiscardStaged():
                held.staged.clear()
            case ReplaceWithSnapshot():
                held.blocks = empty()
                for batch in held.staged:
                    apply(held.blocks, batch)
                held.staged.clear()
            case ClearStream():
                held.blocks = empty()

    def _response(self, action: Action[EventBatch]) -> pb.PublishResponse | None:
        match action:
            case Resume(_, seq):
                return pb.PublishResponse(welcome=self._welcome(seq))
            case RequestSnapshot(_, reason):
                needed = pb.SnapshotNeeded(reason=reason.value)
                return pb.PublishResponse(snapshot_needed=needed)
            case RequestResend(_, seq):
                return pb.PublishResponse(resend=pb.ResendRequest(from_seq=seq))
            case RequestHello():
                return pb.PublishResponse(hello_needed=pb.HelloNeeded())
            case AckUpTo(_, seq):
                return pb.PublishResponse(ack=pb.Ack(seq=seq))
            case Fence(_, reason):
                return pb.PublishResponse(fenced=pb.Fenced(reason=reason.value))
            case _:
                return None

    def _welcome(self, seq: int, *, need_snapshot: bool = False) -> pb.Welcome:
        return pb.Welcome(
            resume_after_seq=seq,
            need_snapshot=need_snapshot,
            lease_ms=self.script.lease_ms,
            heartbeat_ms=self.script.heartbeat_ms,
            index_epoch=self.index_epoch,
        )


def _digest(blocks: Blocks) -> tuple[TierDigest, ...]:
    digests = []
    for tier in HOLDER_TIERS:
        xor = 0
        for name in blocks[tier]:
            xor ^= name
        digests.append(TierDigest(blocks[tier].total(), xor))
    return tuple(digests)

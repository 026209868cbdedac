"""Publishers of the index service bench that send bytes made beforehand.

So the client's own cost stays small, and the server's can be measured next to it on two cores.
What must not live here: what is measured.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.bench.index_service_processes import BenchError
from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.fleet import HolderInfo
from kvtier.core.model_card import ModelCard
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId, Tier
from kvtier.wire import convert, rpc, transport
from kvtier.wire import messages as pb

Blocks: TypeAlias = npt.NDArray[np.uint64]
Row: TypeAlias = tuple[EventKind, Blocks]

CHAIN: Final = 64
BLOCK_TOKENS: Final = 16
ANSWER_S_MAX: Final = 60.0
_CARD: Final = ModelCard(("bench",), "bench/model", "1", b"t" * 32, None, BLOCK_TOKENS)


def worker(name: str) -> HolderInfo:
    """A worker of the bench's one pool."""
    return HolderInfo(
        HolderKind.WORKER, InstanceId(name), NodeId(f"{name}-node"), Fingerprint(b"n" * 32), _CARD
    )


def random_blocks(rng: np.random.Generator, *shape: int) -> Blocks:
    return rng.integers(1, 2**64, size=shape, dtype=np.uint64)


def events(rows: Sequence[Row]) -> EventBatch:
    """One event a row, all on the GPU."""
    count = len(rows)
    return EventBatch(
        kinds=np.array([kind for kind, _ in rows], np.uint8),
        tiers=np.full(count, Tier.GPU, np.uint8),
        lengths=np.array([len(blocks) for _, blocks in rows], np.uint32),
        parents=np.zeros(count, np.uint64),
        hashes=np.concatenate([blocks for _, blocks in rows] or [np.empty(0, np.uint64)]),
    )


class RawStream:
    """One Publish stream of one worker; holds `resident` chains, oldest first."""

    def __init__(self, port: int, name: str) -> None:
        self.resident: deque[Blocks] = deque()
        self.seq = 0
        self._acked = 0
        self._info = worker(name)
        self._channel = transport.new_channel(f"127.0.0.1:{port}")
        self._call = rpc.call(self._channel, rpc.INDEX, "Publish")()

    async def join(self, epoch: int, held: Sequence[Blocks] = ()) -> None:
        """Hello, and a snapshot that holds `held`; waits until the index answers both."""
        hello = convert.hello_to(self._info, epoch, 0)
        await self._call.write(pb.PublishRequest(hello=hello))
        await self._answer()
        chunks = [held[first : first + 512] for first in range(0, len(held), 512)] or [()]
        mark = pb.SnapshotMark(snapshot_id=1, at_seq=0)
        for number, chains in enumerate(chunks):
            rows: list[Row] = [(EventKind.STORE, chain) for chain in chains]
            chunk = pb.SnapshotChunk(
                mark=mark,
                number=number,
                last=number == len(chunks) - 1,
                batch=convert.batch_to(events(rows), 0),
            )
            await self._call.write(pb.PublishRequest(snapshot=chunk))
        await self._answer()
        self.resident.extend(held)

    def pack(self, rows: Sequence[Row]) -> bytes:
        """The next numbered batch, ready to be sent."""
        self.seq += 1
        batch = convert.batch_to(events(rows), self.seq)
        return pb.PublishRequest(batch=batch).SerializeToString()

    async def send(self, messages: Sequence[bytes]) -> None:
        """Send all and wait until everything packed so far is acknowledged."""
        acks = asyncio.create_task(self._await_acks())
        for message in messages:
            await self._call.write(message)
        await acks

    async def beat(self) -> None:
        await self._call.write(pb.PublishRequest(heartbeat=pb.Heartbeat(seq=self.seq)))

    async def _await_acks(self) -> None:
        while self._acked < self.seq:
            response = await self._answer()
            if response.WhichOneof("message") != "ack":
                raise BenchError(f"the index answered {response}")
            self._acked = response.ack.seq

    async def _answer(self) -> pb.PublishResponse:
        async with asyncio.timeout(ANSWER_S_MAX):
            response = await self._call.read()
        if response is grpc.aio.EOF:
            raise BenchError(f"the index ended a stream: {await self._call.details()}")
        assert isinstance(response, pb.PublishResponse)
        return response

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@contextlib.asynccontextmanager
async def raw_streams(
    port: int, count: int, held: Sequence[Sequence[Blocks]] | None = None
) -> AsyncIterator[list[RawStream]]:
    """Joined streams of `count` workers while entered."""
    streams = [RawStream(port, f"worker-{number}") for number in range(count)]
    try:
        for number, stream in enumerate(streams):
            await stream.join(number + 1, held[number] if held is not None else ())
        yield streams
    finally:
        for stream in streams:
            await stream.close()


@contextlib.asynccontextmanager
async def beating(streams: Sequence[RawStream], every_s: float = 0.5) -> AsyncIterator[None]:
    """Keep the leases of streams that send nothing else while entered."""

    async def beat() -> None:
        for turn in itertools.count():
            await asyncio.sleep(every_s if turn else 0)
            for stream in streams:
                await stream.beat()

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

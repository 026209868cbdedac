"""A store service inside the test's process, with channels to it and small blocks."""

import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvtier.core.frame import FrameName
from kvtier.sections import ListenConfig
from kvtier.types import Fingerprint
from kvtier.wire import blocks, rpc, transport
from kvtier.wire import messages as pb
from kvtier_services.store.config import ArenaSection, NvmeSection, StoreConfig
from kvtier_services.store.main import RunningStore, serve
from tests.tiers.contract import NAMESPACE, name_of, payload_of

MIB = 1 << 20
SMALL_ARENA = ArenaSection(
    bytes_max=8 * MIB, slab_bytes=MIB, blocks_max=4096, segments_bytes_max=64 * MIB
)
BLOCK = 64 << 10


def small_store(directory: Path, **changes: Any) -> StoreConfig:
    """A store without a disk tier on free ports."""
    return replace(
        StoreConfig(
            listen=ListenConfig(bind="127.0.0.1:0"),
            data_dir=directory,
            dram=SMALL_ARENA,
            nvme=NvmeSection(enabled=False),
            instance="s1",
            node="n1",
            drain_ms_max=1000,
        ),
        **changes,
    )


@dataclass
class Client:
    """Raw calls over one channel."""

    channel: grpc.aio.Channel

    async def ask(self, name: str, request: Any) -> Any:
        return await rpc.call(self.channel, rpc.STORE, name)(request, timeout=40)

    def stream(self, name: str, request: Any) -> Any:
        return rpc.call(self.channel, rpc.STORE, name)(request, timeout=40)

    async def put(
        self,
        payloads: dict[int, bytes],
        chunk: int = 40_000,
        namespace: Fingerprint = NAMESPACE,
        **head: Any,
    ) -> tuple[list[str], str]:
        """Put blocks by number; the statuses and the reason."""
        names = [name_of(n, namespace) for n in payloads]
        first = pb.PutHead(
            names=blocks.names_to(names),
            lengths=blocks.u64s(len(one) for one in payloads.values()),
            **head,
        )
        data = b"".join(payloads.values())

        async def messages() -> AsyncIterator[pb.PutBlocksRequest]:
            yield pb.PutBlocksRequest(head=first)
            for at in range(0, len(data), chunk):
                yield pb.PutBlocksRequest(data=data[at : at + chunk])

        answer = await rpc.call(self.channel, rpc.STORE, "Put")(messages(), timeout=40)
        return [s.value for s in blocks.put_statuses_from(answer.statuses)], answer.reason

    async def put_numbers(self, *numbers: int, size: int = BLOCK) -> list[str]:
        return (await self.put({n: payload_of(n, size) for n in numbers}))[0]

    async def get(
        self, numbers: Sequence[int], payload_bytes: int = 0, namespace: Fingerprint = NAMESPACE
    ) -> list[bytes | None]:
        """Payloads of hits, each checked against its checksum by the test that asks."""
        request = pb.GetBlocksRequest(
            names=blocks.names_to([name_of(n, namespace) for n in numbers]),
            payload_bytes=payload_bytes,
        )
        statuses, lengths, data = bytearray(), bytearray(), bytearray()
        async for message in self.stream("Get", request):
            statuses += message.statuses
            lengths += message.lengths
            data += message.data
        sizes = iter(blocks.u64s_from("lengths", bytes(lengths)))
        found: list[bytes | None] = []
        at = 0
        for status in statuses:
            if status:
                found.append(None)
                continue
            size = next(sizes)
            found.append(bytes(data[at : at + size]))
            at += size
        assert at == len(data)
        return found


def names(*numbers: int) -> list[FrameName]:
    return [name_of(n) for n in numbers]


@asynccontextmanager
async def a_store(config: StoreConfig) -> AsyncIterator[tuple[RunningStore, Client]]:
    """A served store and a client over TCP."""
    async with serve(config, io.StringIO()) as running:
        channel = transport.new_channel(f"127.0.0.1:{running.port}")
        try:
            yield running, Client(channel)
        finally:
            await channel.close()


@asynccontextmanager
async def on_socket(running: RunningStore) -> AsyncIterator[Client]:
    channel = transport.new_channel(f"unix:{running.socket}")
    try:
        yield Client(channel)
    finally:
        await channel.close()

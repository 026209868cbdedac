"""Stands between publishers and an index and mistreats whole messages of their Publish streams.

The TCP proxy of the harness cannot lose, double or swap messages; this one speaks gRPC, so it can.
Answers of the index pass untouched. What must not live here: faults of bytes or links.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport

Rule = Callable[[int, str, pb.PublishRequest], list[pb.PublishRequest]]
"""(number of the stream, kind, message) -> what is passed on instead, in order."""


def honest(_: int, __: str, request: pb.PublishRequest) -> list[pb.PublishRequest]:
    return [request]


class Mischief:
    """Loses, doubles and swaps batches and chunks at random, from a seed; counts what it did."""

    def __init__(self, seed: int, drop: float, double: float, swap: float) -> None:
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(seed)
        self._drop, self._double, self._swap = drop, double, swap
        self._kept: dict[int, pb.PublishRequest] = {}

    def __call__(
        self, stream: int, kind: str, request: pb.PublishRequest
    ) -> list[pb.PublishRequest]:
        if kind not in {"batch", "snapshot"}:
            return [request]
        kept = [self._kept.pop(stream)] if stream in self._kept else []
        dice = self._dice.random()
        if dice < self._drop:
            self.counts[f"dropped_{kind}"] += 1
            return kept
        if dice < self._drop + self._double:
            self.counts[f"doubled_{kind}"] += 1
            return [request, request, *kept]
        if dice < self._drop + self._double + self._swap and not kept:
            self.counts[f"swapped_{kind}"] += 1
            self._kept[stream] = request
            return []
        return [request, *kept]


class PublishProxy:
    """Serves Publish on loopback; `rule` decides about each message and may be changed any time."""

    def __init__(self, upstream: str) -> None:
        self.rule: Rule = honest
        self.address = ""
        self.passed: Counter[str] = Counter()
        """Messages that arrived from publishers, by kind."""
        self._upstream = upstream
        self._streams = 0

    async def publish(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        async with transport.new_channel(self._upstream) as channel:
            call = rpc.call(channel, rpc.INDEX, "Publish")(self._treated(requests))
            try:
                async for answer in call:
                    yield answer.SerializeToString()
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")

    async def _treated(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self._streams += 1
        stream = self._streams
        async for data in requests:
            request = pb.PublishRequest.FromString(data)
            kind = request.WhichOneof("message") or ""
            self.passed[kind] += 1
            for passed in self.rule(stream, kind, request):
                yield passed.SerializeToString()


@asynccontextmanager
async def publish_proxy(upstream: str) -> AsyncIterator[PublishProxy]:
    """A proxy in front of one index, on the running event loop."""
    proxy = PublishProxy(upstream)
    server = transport.new_server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Publish": grpc.stream_stream_rpc_method_handler(proxy.publish)
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(rpc.INDEX.full_name, handlers),)
    )
    proxy.address = f"127.0.0.1:{transport.open_port(server, '127.0.0.1:0', None)}"
    await server.start()
    try:
        yield proxy
    finally:
        await server.stop(None)

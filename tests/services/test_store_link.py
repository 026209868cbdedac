"""Calls of one link to a store that is in trouble: each ends in an error its caller expects."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from kvtier.client.store_link import Pauses, StoreLink
from kvtier.errors import UnavailableError
from kvtier.sections import DialConfig
from kvtier.wire import messages as pb


class Troubled(grpc.GenericRpcHandler):
    """Holds every Contains until `release`, and is not available for a Prefetch."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.release = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        holds = handler_call_details.method.endswith("/Contains")
        return grpc.unary_unary_rpc_method_handler(self._hold if holds else self._refuse)

    async def _hold(self, request: bytes, context: Any) -> bytes:
        self.is_asked.set()
        await self.release.wait()
        return b""

    async def _refuse(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "in trouble")
        return b""


async def test_a_call_beside_one_that_fails_is_unavailable_and_cancels_nobody() -> None:
    troubled = Troubled()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((troubled,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = StoreLink(DialConfig((f"127.0.0.1:{port}",)), Pauses())
    try:
        beside = asyncio.create_task(link.ask("Contains", pb.ContainsRequest(), 60))
        await troubled.is_asked.wait()
        with pytest.raises(UnavailableError):
            await link.ask("Prefetch", pb.PrefetchRequest(), 60)
        with pytest.raises(UnavailableError):
            await beside
    finally:
        await link.close()
        await server.stop(None)


async def test_a_caller_that_is_cancelled_is_cancelled() -> None:
    troubled = Troubled()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((troubled,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = StoreLink(DialConfig((f"127.0.0.1:{port}",)), Pauses())
    try:
        call = asyncio.create_task(link.ask("Contains", pb.ContainsRequest(), 60))
        await troubled.is_asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    finally:
        await link.close()
        await server.stop(None)

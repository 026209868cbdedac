"""A Snapshot server inside the test's process: replays a log to whoever follows it, then goes on.

What must not live here: an index. The test writes the log.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport
from kvtier.wire.loop_thread import LoopThread

HEARTBEAT_S = 0.02


class ScriptedFeed:
    """One index process in the eyes of a replica. Its log survives a restart unless forgotten."""

    def __init__(self, index_epoch: int = 1) -> None:
        self.index_epoch = index_epoch
        self.port = 0
        self.log: list[pb.SnapshotResponse] = []
        self.followers_count = 0
        self.asked: list[tuple[str, ...]] = []
        self.is_silent = False
        self.is_held = False
        """Keep `complete` back."""
        self._server: grpc.aio.Server | None = None
        self._thread = LoopThread("scripted feed")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def position(self) -> int:
        return len(self.log)

    def start(self) -> "ScriptedFeed":
        self._thread.start()
        self._thread.submit(self._start()).result(40)
        return self

    def stop(self) -> None:
        if self._thread.is_running:
            self._thread.submit(self._stop()).result(40)
            self._thread.stop()

    def forget(self) -> None:
        """Begin anew, as a restarted process does."""
        self.log = []
        self.index_epoch += 1

    def tell(self, message: pb.SnapshotResponse) -> None:
        message.position = len(self.log) + 1
        message.index_epoch = self.index_epoch
        self.log.append(message)

    # ---- serving

    async def _start(self) -> None:
        self._server = transport.new_server()
        self.port = transport.open_port(self._server, f"127.0.0.1:{self.port}", None)
        names = dict.fromkeys(rpc.methods(rpc.INDEX), self._unimplemented)
        handler = rpc.service_handler(rpc.INDEX, {**names, "Snapshot": self._snapshot})
        self._server.add_generic_rpc_handlers((handler,))
        await self._server.start()

    async def _stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def _unimplemented(self, _: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")

    async def _snapshot(
        self, request: pb.SnapshotRequest, _: object
    ) -> AsyncIterator[pb.SnapshotResponse]:
        self.asked.append(tuple(request.models))
        self.followers_count += 1
        sent, is_complete = 0, False
        try:
            while True:
                while sent < len(self.log):
                    yield self.log[sent]
                    sent += 1
                if not is_complete and not self.is_held:
                    is_complete = True
                    yield self._marked(pb.SnapshotResponse(complete=True))
                if not self.is_silent:
                    yield self._marked(pb.SnapshotResponse(heartbeat=True))
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            self.followers_count -= 1

    def _marked(self, message: pb.SnapshotResponse) -> pb.SnapshotResponse:
        message.position = len(self.log)
        message.index_epoch = self.index_epoch
        return message

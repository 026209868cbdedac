"""The real index service on a thread of the test's process: started, stopped, started empty again.

What must not live here: scripted behaviour (scripted_index, scripted_feed).
"""

import asyncio
import io
import time
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from kvtier.sections import ListenConfig
from kvtier.types import HolderId, InstanceId, Tier, Trust
from kvtier.wire.loop_thread import LoopThread
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import RunningIndex, serve
from kvtier_services.index.state import IndexState

DEADLINE_S = 45.0


class LiveIndex:
    """One index; keeps its port, and nothing else, over restarts. A context manager."""

    def __init__(self, **config: Any) -> None:
        self.port = 0
        defaults: dict[str, Any] = {"lease_ms": 600, "drain_ms_max": 0, "listen": ListenConfig()}
        self._config = IndexConfig(**(defaults | config))
        self._thread = LoopThread("live index")
        self._running: RunningIndex | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def state(self) -> IndexState:
        assert self._running is not None
        return self._running.state

    def start(self) -> None:
        self._thread.start()
        listen = replace(self._config.listen, bind=self.target)
        self._thread.submit(self._start(replace(self._config, listen=listen))).result(DEADLINE_S)

    def stop(self) -> None:
        """End all calls at once; whatever the index knew is gone."""
        if self._thread.is_running:
            self._thread.submit(self._stop()).result(DEADLINE_S)
            self._thread.stop()

    def freeze(self, seconds: float) -> None:
        """Let the whole service stand still for so long, as a suspended process does."""
        self._thread.soon(time.sleep, seconds)

    def held(self, instance: str, tier: Tier) -> dict[int, int]:
        """Copies per block that the index has of one worker's tier."""
        holder = self.holder(instance)
        if holder is None:
            return {}
        found = self.state.fleet.index.snapshot(holder, tier, 0).hashes.tolist()
        counts: dict[int, int] = {}
        for name in found:
            counts[name] = counts.get(name, 0) + 1
        return counts

    def holder(self, instance: str) -> HolderId | None:
        return self.state.fleet.find_worker(InstanceId(instance), 0)

    def trust(self, instance: str) -> Trust | None:
        holder = self.holder(instance)
        return None if holder is None else self.state.trust(holder)[0]

    def is_hidden(self, instance: str) -> bool:
        holder = self.holder(instance)
        return holder is not None and self.state.fleet.record(holder).hidden

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def _start(self, config: IndexConfig) -> None:
        self._serving = serve(config, io.StringIO())
        self._running = await self._serving.__aenter__()
        self.port = self._running.port

    async def _stop(self) -> None:
        await self._serving.__aexit__(None, None, None)
        await asyncio.sleep(0)

"""What the engine is doing, from its own metrics page, for routers.

The page is plain HTTP on the engine's endpoint, read by one thread at a time. What it does not say
stays zero: no engine tells how many tokens wait. What must not live here: how loads are weighed.
"""

import asyncio
import http.client
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvtier.core.engine_load import (
    PAGE_BYTES_MAX,
    SGLANG,
    VLLM,
    LoadNames,
    RankLoad,
    read_loads,
)
from kvtier.core.workers import Load
from kvtier.engines.events import Dialect
from kvtier.sections import parse_address
from kvtier.telemetry.logs import EventLog
from kvtier_services.bridge.config import EngineSection

LOG: Final = EventLog("kvtier_services.bridge")
_ANSWER_S: Final = 2.0
_NAMES: Final[Mapping[Dialect, LoadNames]] = {Dialect.VLLM: VLLM, Dialect.SGLANG: SGLANG}


def loads_of(page: bytes, engine: EngineSection) -> list[Load]:
    """The load of each rank; an empty list where the page does not say it. Raises nothing."""
    names = _NAMES.get(engine.kind)
    found = None if names is None else read_loads(page, names)
    if found is None or not any(rank in found.ranks for rank in range(engine.ranks)):
        return []
    blocks = engine.blocks or found.blocks
    return [_load(found.ranks.get(rank, _IDLE), blocks) for rank in range(engine.ranks)]


_IDLE: Final = RankLoad(0, 0, 0.0)


def _load(rank: RankLoad, blocks: int) -> Load:
    return Load(
        running_requests=rank.running,
        waiting_requests=rank.waiting,
        free_blocks=blocks - math.ceil(rank.usage * blocks),
        total_blocks=blocks,
    )


class LoadReader:
    """Reads the page again and again, and says what changed."""

    def __init__(self, engine: EngineSection, say: Callable[[int, Load], None]) -> None:
        self._engine = engine
        self._say = say
        self._last: Sequence[Load] = ()
        self.failures = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._engine.load_ms / 1000)

    async def look(self) -> None:
        """Read once; an engine that does not answer keeps the load that it had."""
        try:
            page = await asyncio.to_thread(_read, self._engine.http)
        except (OSError, http.client.HTTPException):
            self.failures += 1
            return
        loads = loads_of(page, self._engine)
        for rank, load in enumerate(loads):
            if rank >= len(self._last) or self._last[rank] != load:
                self._say(rank, load)
        self._last = loads


def _read(address: str) -> bytes:
    at = parse_address(address)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"status {answer.status}")
        return answer.read(PAGE_BYTES_MAX)
    finally:
        connection.close()

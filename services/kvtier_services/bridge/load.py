"""What the engine is doing, from its own metrics page, for routers.

The page is plain HTTP on the engine's endpoint, read by one thread at a time. What it does not say
stays zero: no engine tells how many tokens wait. What must not live here: how loads are weighed.
"""

import asyncio
import http.client
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.core.workers import Load
from kvtier.engines.events import Dialect
from kvtier.sections import parse_address
from kvtier.telemetry.logs import EventLog
from kvtier_services.bridge.config import EngineSection

LOG: Final = EventLog("kvtier_services.bridge")
_PAGE_BYTES_MAX: Final = 8 << 20
_ANSWER_S: Final = 2.0
_COUNT_MAX: Final = 2**31
_SAMPLE: Final = re.compile(r"([a-z_]+:[a-z_]+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class _Names:
    """How an engine calls what a load is made of; `usage` is a share of the KV pool."""

    running: str
    waiting: str
    usage: str
    rank: str


_NAMES: Final[Mapping[Dialect, _Names]] = {
    Dialect.VLLM: _Names(
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "engine",
    ),
    Dialect.SGLANG: _Names(
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "dp_rank"
    ),
}  # fmt: skip
_BLOCKS: Final = ("vllm:cache_config_info", "num_gpu_blocks")
"""Where vLLM says how many blocks a rank has."""


def loads_of(page: str, engine: EngineSection) -> list[Load]:
    """The load of each rank; an empty list where the page does not say it. Raises nothing."""
    names = _NAMES.get(engine.kind)
    if names is None:
        return []
    found: dict[tuple[str, int], float] = {}
    blocks = engine.blocks
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels = sample[1], dict(_LABEL.findall(sample[2] or ""))
        if name == _BLOCKS[0] and not engine.blocks:
            blocks = _count(labels.get(_BLOCKS[1], ""))
        elif name in {names.running, names.waiting, names.usage}:
            key = name, _count(labels.get(names.rank, "0"))
            found[key] = max(found.get(key, 0.0), _number(sample[3]))
    if not any((names.running, rank) in found for rank in range(engine.ranks)):
        return []
    return [_load(names, found, rank, blocks) for rank in range(engine.ranks)]


def _load(names: _Names, found: Mapping[tuple[str, int], float], rank: int, blocks: int) -> Load:
    used = min(1.0, found.get((names.usage, rank), 0.0)) * blocks
    return Load(
        running_requests=int(found.get((names.running, rank), 0.0)),
        waiting_requests=int(found.get((names.waiting, rank), 0.0)),
        free_blocks=blocks - math.ceil(used),
        total_blocks=blocks,
    )


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return min(max(value, 0.0), _COUNT_MAX) if math.isfinite(value) else 0.0


def _count(text: str) -> int:
    return min(int(text), _COUNT_MAX) if text.isascii() and text.isdigit() else 0


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


def _read(address: str) -> str:
    at = parse_address(address)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"status {answer.status}")
        return answer.read(_PAGE_BYTES_MAX).decode("utf-8", "replace")
    finally:
        connection.close()

"""Loads of workers of which nobody tells, read from their own /metrics: a static list's, and those
behind a bridge that reports none.

A page is believed number by number; one that is late, endless, or says nothing of load leaves the
worker as if it were idle, which is what a router knows of it without asking. What must not live
here: what pages mean (kvtier.core.engine_load), how loads are weighed.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Final, Protocol

from kvtier.core.engine_load import SGLANG, VLLM, EngineLoads, read_loads
from kvtier.core.workers import Load, WorkerName
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import LOAD_POLLS_MAX
from kvtier.wire.loop_thread import end
from kvtier_router.front.credentials import Credentials
from kvtier_router.web.upstream import (
    Origin,
    ResponseHead,
    Upstream,
    UpstreamError,
    request_bytes,
)

_PAGE_BYTES_MAX: Final = 4 << 20
_SLOWER: Final = 10
"""Who said nothing of use is asked so many times more rarely."""


@dataclass(frozen=True, slots=True)
class LoadsConfig:
    """How workers are asked for their load where nobody tells it."""

    every_ms: int = 1_000
    """How often; 0: never."""
    answer_ms_max: int = 2_000
    """A whole page must have come by then."""

    def __post_init__(self) -> None:
        if not 0 <= self.every_ms <= 1 << 31 or not 1 <= self.answer_ms_max <= 1 << 31:
            raise ConfigError("every_ms must not be negative and answer_ms_max be positive")


class Asked(StrEnum):
    """What became of a question."""

    TOLD = "told"
    SILENT = "silent"
    """A page without anything of load."""
    FAILED = "failed"
    """No page, or no end of one, in time."""


class LoadBrain(Protocol):
    """What this needs of a RoutingBrain."""

    def unreported(self) -> Sequence[tuple[WorkerName, str]]: ...
    def take_load(self, worker: WorkerName, load: Load | None) -> None: ...


class LoadPoll:
    """A chore of the router's loop. `asked` counts questions by what became of them."""

    def __init__(
        self,
        upstream: Upstream,
        brain: LoadBrain,
        credentials: Credentials,
        config: LoadsConfig,
        clock: Callable[[], float],
    ) -> None:
        self._upstream = upstream
        self._brain = brain
        self._credentials = credentials
        self._config = config
        self._clock = clock
        self._look_at = 0.0
        self._due: deque[tuple[str, list[WorkerName]]] = deque()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        """By address of those that had nothing to say."""
        self.asked: Counter[Asked] = Counter()

    def watch(self) -> None:
        """Begin what is due: each address once a round, LOAD_POLLS_MAX at once."""
        if not self._config.every_ms:
            return
        now = self._clock()
        if now >= self._look_at and not self._due:
            self._look_at = now + self._config.every_ms / 1e3
            self._look(now)
        while self._due and len(self._asking) < LOAD_POLLS_MAX:
            address, workers = self._due.popleft()
            if address not in self._asking:
                task = asyncio.get_running_loop().create_task(self._ask(address, workers))
                self._asking[address] = task

    async def close(self) -> None:
        """End every question. Idempotent."""
        self._due.clear()
        await end(self._asking.values())

    def _look(self, now: float) -> None:
        """Whom this round asks: ranks that share an address share a page."""
        by_address: dict[str, list[WorkerName]] = {}
        for worker, address in self._brain.unreported():
            by_address.setdefault(address, []).append(worker)
        self._not_before = {
            address: at for address, at in self._not_before.items() if address in by_address
        }
        self._due.extend(
            (address, workers)
            for address, workers in by_address.items()
            if address and self._not_before.get(address, now) <= now
        )

    async def _ask(self, address: str, workers: list[WorkerName]) -> None:
        try:
            page = await self._page(address, workers[0])
            found = None if page is None else _loads(page)
            outcome = Asked.FAILED if page is None else Asked.TOLD if found else Asked.SILENT
            self.asked[outcome] += 1
            if outcome is not Asked.TOLD:
                rest_s = _SLOWER * self._config.every_ms / 1e3
                self._not_before[address] = self._clock() + rest_s
            for worker in workers:
                load = None if found is None else _load_of(found, worker, workers)
                self._brain.take_load(worker, load)
        finally:
            self._asking.pop(address, None)

    async def _page(self, address: str, worker: WorkerName) -> bytes | None:
        """Its metrics; None where they do not come whole and in time."""
        sink = _Page()
        connection = None
        try:
            origin = self._upstream.origin(address)
            async with asyncio.timeout(self._config.answer_ms_max / 1e3):
                connection = await self._upstream.connection(origin, fresh=True)
                connection.send(self._request(origin, address, worker), sink)
                return await sink.answer
        except (TimeoutError, UpstreamError, CallerError):
            return None
        finally:
            if connection is not None:
                connection.abandon(sink)

    def _request(self, origin: Origin, address: str, worker: WorkerName) -> bytes:
        headers = [("host", origin.authority), ("connection", "close")]
        token = self._credentials.find(worker, address)
        if token is not None:
            headers.append(("authorization", f"Bearer {token}"))
        return request_bytes("GET", origin.prefix + "/metrics", headers, b"")


class _Page:
    """A sink that collects one page, as long as it is no longer than any page is."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._parts = bytearray()
        self._is_page = False

    def on_head(self, head: ResponseHead) -> None:
        self._is_page = head.status == 200
        if not self._is_page:
            self._set(None)

    def on_body(self, data: bytes) -> None:
        if self._is_page:
            self._parts += data
            if len(self._parts) > _PAGE_BYTES_MAX:
                self._is_page = False
                self._set(None)

    def on_end(self) -> None:
        self._set(bytes(self._parts))

    def on_lost(self, error: UpstreamError) -> None:
        self._set(None)

    def _set(self, page: bytes | None) -> None:
        if not self.answer.done():
            self.answer.set_result(page)


def _loads(page: bytes) -> EngineLoads | None:
    found = (read_loads(page, names) for names in (VLLM, SGLANG))
    return next((loads for loads in found if loads is not None), None)


def _load_of(loads: EngineLoads, worker: WorkerName, workers: Sequence[WorkerName]) -> Load | None:
    """One rank's part of a page; a server that speaks for one rank may call it any number."""
    rank = loads.ranks.get(worker.dp_rank)
    if rank is None and len(loads.ranks) == 1 and len(workers) == 1:
        (rank,) = loads.ranks.values()
    if rank is None:
        return None
    return Load(
        running_requests=rank.running,
        waiting_requests=rank.waiting,
        # In tokens: the block size of a worker in a list is not known.
        running_tokens=ceil(rank.usage * loads.blocks) * loads.block_tokens,
    )

"""Requests that wait for a worker which has stopped: found by asking, long before their deadline.

A stopped process keeps its connections, so nothing but time tells. A worker whose events the index
has stopped hearing (`hidden`), and that has said nothing to a request for some seconds, is asked
for its health; if no answer comes either, twice, what waits for it counts as lost, and the relay
does with it what it does with any loss. A worker whose bridge died answers, and keeps its requests.
What must not live here: where a request goes next (relay.py), what a lost worker is worth (brain).
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.telemetry.logs import EventLog
from kvtier.wire.loop_thread import end
from kvtier_router.web.upstream import Origin, ResponseHead, Upstream, UpstreamError, request_bytes

LOG = EventLog("kvtier_router.front")


@dataclass(frozen=True, slots=True)
class SilenceConfig:
    """When a worker that says nothing is asked, and given up."""

    asked_after_ms: int = 3_000
    """Since the last byte of an answer, or since the request."""
    health_ms_max: int = 2_000
    """How long it may take to say that it is well."""
    asked_times: int = 2
    """Given up after so many questions in a row without an answer."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 1 <= getattr(self, name) <= 1 << 31:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)!r}")


class Silence:
    """A chore of the router's loop; `lost` counts exchanges that were given up."""

    def __init__(
        self,
        upstream: Upstream,
        hidden: Callable[[], Iterable[str]],
        config: SilenceConfig,
        clock: Callable[[], float],
    ) -> None:
        """`hidden` gives the addresses of workers that the index has stopped hearing."""
        self._upstream = upstream
        self._hidden = hidden
        self._config = config
        self._clock = clock
        self._asking: dict[Origin, asyncio.Task[None]] = {}
        self._look_at = 0.0
        self.lost = 0

    def watch(self) -> None:
        """Once a second: ask those for whom somebody waits."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        quiet = self._quiet(now)
        if not quiet:
            return
        for address in self._hidden():
            origin = self._upstream.origin(address)
            if origin in quiet and origin not in self._asking:
                self._asking[origin] = asyncio.get_running_loop().create_task(self._ask(origin))

    async def close(self) -> None:
        """End every question. Idempotent."""
        await end(self._asking.values())

    def _quiet(self, now: float) -> set[Origin]:
        """Origins of which some exchange has heard nothing for long."""
        before = now - self._config.asked_after_ms / 1e3
        return {one.origin for one in self._upstream.busy if one.heard_at < before}

    async def _ask(self, origin: Origin) -> None:
        try:
            for _ in range(self._config.asked_times):
                if await self._is_well(origin):
                    return
        finally:
            self._asking.pop(origin, None)
        before = self._clock() - self._config.asked_after_ms / 1e3
        lost = self._upstream.lose_silent(origin, before)
        self.lost += lost
        if lost:
            LOG.warning("worker is silent", worker=origin.authority, exchanges=lost)

    async def _is_well(self, origin: Origin) -> bool:
        """Whether any HTTP answer comes to a question for its health."""
        heard = _Heard()
        try:
            async with asyncio.timeout(self._config.health_ms_max / 1e3):
                connection = await self._upstream.connection(origin, fresh=True)
                headers = [("host", origin.authority), ("connection", "close")]
                connection.send(
                    request_bytes("GET", origin.prefix + "/health", headers, b""), heard
                )
                try:
                    return await heard.answer
                finally:
                    connection.abandon(heard)
        except (TimeoutError, UpstreamError):
            return False


class _Heard:
    """A sink that wants to know only that something came."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def on_head(self, head: ResponseHead) -> None:
        self._set(True)

    def on_body(self, data: bytes) -> None:
        """The head said enough."""

    def on_end(self) -> None:
        self._set(True)

    def on_lost(self, error: UpstreamError) -> None:
        self._set(False)

    def _set(self, value: bool) -> None:
        if not self.answer.done():
            self.answer.set_result(value)

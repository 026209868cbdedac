"""Whether the store serves: not that its process runs, but that a block goes in and comes out.

Once a second the arena is tried out (`ArenaTier.try_out`): a block of fresh bytes is written into
a free slot, published, read back and taken away, by the code that serves clients, on the thread
that serves them, after the threads that copy have answered. Where every slot is taken (blocks,
leases, writers' reservations) one block that is there is read back instead: a full store serves.
It does not serve when neither can be done, or is not done in time; nor when its own tasks have
ended. Tiers below DRAM have breakers and verdicts of their own: a store without them serves.

What must not live here: gRPC, the trial itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvtier.errors import KvtierError
from kvtier.telemetry.logs import EventLog
from kvtier.tiers.arena.holdings import Trial

LOG = EventLog("kvtier_services.store.health")

Report: TypeAlias = Callable[[bool], Awaitable[None]]
"""Told whether the store serves, at the beginning and at each change."""


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """How often it is tried, and how much must go wrong."""

    period_s: float = 1.0
    patience_s: float = 5.0
    """Of one trial."""
    failures_max: int = 3
    """Failures one after another that end the service; one success begins it again."""


_DEFAULT: Final = HealthPolicy()


class HealthWatch:
    """Tries, counts, and reports changes. Of one event loop."""

    def __init__(
        self,
        try_out: Callable[[], Awaitable[Trial]],
        report: Report,
        policy: HealthPolicy = _DEFAULT,
    ) -> None:
        self._try_out = try_out
        self._report = report
        self._policy = policy
        self._failures = 0
        self.is_serving = False
        self.failures_count = 0
        """Of trials, since the start."""

    async def look(self) -> None:
        """One trial, and the report where it changes anything."""
        if await self._passes():
            self._failures = 0
            if not self.is_serving:
                LOG.info("a block goes in and comes out")
                await self._becomes(is_serving=True)
            return
        self._failures += 1
        self.failures_count += 1
        if self.is_serving and self._failures >= self._policy.failures_max:
            LOG.error("no block goes in or comes out", trials=self._failures)
            await self._becomes(is_serving=False)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._policy.period_s)
            await self.look()

    async def _becomes(self, *, is_serving: bool) -> None:
        self.is_serving = is_serving
        await self._report(is_serving)

    async def _passes(self) -> bool:
        try:
            async with asyncio.timeout(self._policy.patience_s):
                return await self._try_out() is Trial.PASSED
        except (TimeoutError, KvtierError, ValueError):
            return False

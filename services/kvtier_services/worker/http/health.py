"""Readiness that does real work, once for all who ask at the same time.

What must not live here: HTTP; what the work is (Engine.check).
"""

import asyncio
import time
from collections.abc import Callable

from kvtier.errors import DeadlineError, KvtierError
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.requests import Engine


class HealthGate:
    """Asks the engine for a token at most once at a time and once in `check_fresh_ms`.

    So nobody can load the engine by probing it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: EndpointSettings,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._now = now
        self._lock = asyncio.Lock()
        self._checked_at = float("-inf")
        self._failure: KvtierError | None = None

    async def check(self) -> None:
        """Return where the engine computes; raise why it does not."""
        async with self._lock:
            if (self._now() - self._checked_at) * 1e3 >= self._settings.check_fresh_ms:
                self._failure = await self._ask()
                self._checked_at = self._now()
        if self._failure is not None:
            raise self._failure

    async def _ask(self) -> KvtierError | None:
        try:
            async with asyncio.timeout(self._settings.check_ms_max / 1e3):
                await self._engine.check()
        except TimeoutError:
            return DeadlineError("the engine computed no token in time")
        except KvtierError as error:
            return error
        return None

"""`IndexClient` without asyncio: the same calls, from any thread, on a loop of their own.

What must not live here: anything that the async client does not do.
"""

import concurrent.futures
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvtier.client import client as aio
from kvtier.client.calls import ClientConfig
from kvtier.client.client import TokenPrompt
from kvtier.client.reservations import ReserveResult
from kvtier.client.reservations import ReserveSession as _AioSession
from kvtier.client.results import FleetChange, IndexStats, Match
from kvtier.core.event_columns import Hashes
from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import Pool
from kvtier.core.workers import OwnReservation
from kvtier.errors import DeadlineError
from kvtier.publisher import Publisher, PublisherConfig, PublisherListener
from kvtier.sections import DialConfig
from kvtier.wire.loop_thread import LoopThread

T = TypeVar("T")

_GRACE_S = 5.0
"""Beyond a call's own deadline; passing it means that the loop's thread is stuck."""


class IndexClient:
    """See `kvtier.client.IndexClient`. A context manager; may be shared by threads."""

    def __init__(self, dial: DialConfig, config: ClientConfig | None = None) -> None:
        self._config = config or ClientConfig()
        self._client = aio.IndexClient(dial, self._config)
        self._thread = LoopThread("index client")
        self._thread.start()

    def match(
        self, hashes: Hashes, pool: Pool | None = None, *, deadline_s: float | None = None
    ) -> Match:
        return self._run(self._client.match(hashes, pool, deadline_s=deadline_s), deadline_s)

    def match_many(
        self,
        queries: Sequence[Hashes],
        pool: Pool | None = None,
        *,
        deadline_s: float | None = None,
    ) -> tuple[Match, ...]:
        return self._run(self._client.match_many(queries, pool, deadline_s=deadline_s), deadline_s)

    def match_tokens(
        self, prompt: TokenPrompt, *, deadline_s: float | None = None
    ) -> tuple[Match, ...]:
        return self._run(self._client.match_tokens(prompt, deadline_s=deadline_s), deadline_s)

    def stats(self, *, deadline_s: float | None = None) -> IndexStats:
        return self._run(self._client.stats(deadline_s=deadline_s), deadline_s)

    def watch_fleet(
        self, told: Callable[[FleetChange], None], models: Sequence[str] = ()
    ) -> "FleetWatch":
        """Call `told` with every change, on the client's thread: return at once from it."""
        return FleetWatch(self._thread.submit(self._tell(told, models)))

    def reservations(self, router: str) -> "ReserveSession":
        """One life of a router, to reserve with: `with client.reservations(name) as it`."""
        return ReserveSession(self, router)

    def publisher(
        self,
        info: HolderInfo,
        config: PublisherConfig | None = None,
        listener: PublisherListener | None = None,
    ) -> Publisher:
        return self._client.publisher(info, config, listener)

    def close(self) -> None:
        """End all calls at once. Idempotent."""
        if self._thread.is_running:
            self._run(self._client.close(), None)
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- parts

    async def _tell(self, told: Callable[[FleetChange], None], models: Sequence[str]) -> None:
        async for change in self._client.watch_fleet(models):
            told(change)

    async def open_session(self, router: str) -> _AioSession:
        return await self._client.reservations(router).__aenter__()

    def _run(self, work: Coroutine[Any, Any, T], deadline_s: float | None) -> T:
        future = self._thread.submit(work)
        try:
            return future.result((deadline_s or self._config.deadline_s) + _GRACE_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineError("the client's thread does not answer") from None


class FleetWatch:
    """A watch that runs; `close` ends it."""

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    @property
    def error(self) -> BaseException | None:
        """Why the watch has ended by itself; None while it runs or after `close`."""
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()

    def close(self) -> None:
        self._future.cancel()


class ReserveSession:
    """See `kvtier.client.ReserveSession`. A context manager."""

    def __init__(self, client: IndexClient, router: str) -> None:
        self._client = client
        self._router = router
        self._session: _AioSession | None = None

    def __enter__(self) -> Self:
        self._session = self._client._run(self._client.open_session(self._router), None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        self._client._run(self._session.__aexit__(kind, error, trace), None)

    def reserve(self, wanted: OwnReservation, *, deadline_s: float | None = None) -> ReserveResult:
        assert self._session is not None
        work = self._session.reserve(wanted, deadline_s=deadline_s)
        return self._client._run(work, deadline_s)

    def release(self, key: str) -> None:
        assert self._session is not None
        self._client._run(self._release(self._session, key), None)

    @staticmethod
    async def _release(session: _AioSession, key: str) -> None:
        session.release(key)

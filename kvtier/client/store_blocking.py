"""`BlockStoreClient` without asyncio: what shared memory can do runs on the caller's own thread.

What must not live here: anything that the async client does not do.
"""

import concurrent.futures
import time
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvtier.client import store as aio
from kvtier.client.store import ReadTerms, StoreClientConfig, WriteTerms
from kvtier.client.store_memory import Payload
from kvtier.core.frame import FrameName
from kvtier.errors import DeadlineError
from kvtier.ports import GetResult, GetStatus, PutResult, PutStatus
from kvtier.sections import DialConfig
from kvtier.types import Tier
from kvtier.wire.loop_thread import LoopThread

T = TypeVar("T")

_GRACE_S = 5.0
"""Beyond a call's own deadline; passing it means that the loop's thread is stuck."""
_READ = ReadTerms()
_WRITE = WriteTerms()


class BlockStoreClient:
    """See `kvtier.client.store.BlockStoreClient`. A context manager; may be shared by threads."""

    def __init__(self, dial: DialConfig, config: StoreClientConfig | None = None) -> None:
        self._config = config or StoreClientConfig()
        self._client = aio.BlockStoreClient(dial, self._config)
        self._thread = LoopThread("store client")
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        return self._client.is_attached

    def get_many(
        self,
        names: Sequence[FrameName],
        into: Sequence[Payload | None] | None = None,
        terms: ReadTerms = _READ,
        *,
        deadline_s: float | None = None,
    ) -> list[GetResult]:
        requests = aio.get_requests(names, into, terms)
        end = self._end(deadline_s)
        results = aio.read_arena(self._client.arena, requests)
        if all([result.status is GetStatus.HIT for result in results]):  # noqa: C419 (hot)
            return results
        return self._run(self._client.complete(requests, results, terms, end), deadline_s)

    def put_many(
        self,
        names: Sequence[FrameName],
        payloads: Sequence[Payload],
        terms: WriteTerms = _WRITE,
        *,
        deadline_s: float | None = None,
    ) -> list[PutResult]:
        if not self._client.is_attached or terms.prefix_hashes:
            work = self._client.put_many(names, payloads, terms, deadline_s=deadline_s)
            return self._run(work, deadline_s)
        aio.rouse_arena(self._client.arena, len(names))
        requests = aio.put_requests(names, payloads, terms, self._client.writer_id)
        end = self._end(deadline_s)
        results = aio.write_arena(self._client.arena, requests, end)
        stored = all([result.status is PutStatus.STORED for result in results])  # noqa: C419 (hot)
        if stored or not any(map(aio.needs_chunks, results)):
            return results
        return self._run(self._client.complete_put(requests, results, terms, end), deadline_s)

    def contains(
        self,
        names: Sequence[FrameName],
        *,
        shared: bool = False,
        deadline_s: float | None = None,
    ) -> list[frozenset[Tier]]:
        work = self._client.contains(names, shared=shared, deadline_s=deadline_s)
        return self._run(work, deadline_s)

    def prefix_hashes(
        self, names: Sequence[FrameName], *, deadline_s: float | None = None
    ) -> list[int | None] | None:
        work = self._client.prefix_hashes(names, deadline_s=deadline_s)
        return self._run(work, deadline_s)

    def prefetch(self, names: Sequence[FrameName], terms: ReadTerms = _READ) -> int:
        return self._run(self._client.prefetch(names, terms), None)

    def drop(self, names: Sequence[FrameName]) -> int:
        return self._run(self._client.drop(names), None)

    def close(self) -> None:
        """End the session and all calls. Idempotent."""
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

    def _end(self, deadline_s: float | None) -> float:
        return time.monotonic() + (deadline_s or self._config.deadline_s)

    def _run(self, work: Coroutine[Any, Any, T], deadline_s: float | None) -> T:
        future = self._thread.submit(work)
        try:
            return future.result((deadline_s or self._config.deadline_s) + _GRACE_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineError("the client's thread does not answer") from None

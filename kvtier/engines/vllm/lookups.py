"""Which blocks a store has, asked beside vLLM's scheduler: on a thread, with a deadline.

A store that is absent or silent answers "nobody could say" and is left alone for a while.
What must not live here: what follows from the answer (scheduling.py).
"""

import asyncio
import concurrent.futures
import logging

from kvtier.client.store import BlockStoreClient, StoreClientConfig
from kvtier.core.frame import FrameName, KeyKind
from kvtier.engines.vllm.scheduling import BlockNames
from kvtier.errors import KvtierError
from kvtier.sections import DialConfig
from kvtier.wire.loop_thread import LoopThread

LOG = logging.getLogger("vllm.kvtier")
_CLOSE_S = 5.0


class PendingAnswer:
    """`Answer` of a future."""

    def __init__(self, future: "concurrent.futures.Future[tuple[bool, ...] | None]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def held(self) -> tuple[bool, ...] | None:
        """See `Answer`; only once done."""
        return self._future.result()


class StoreLookups:
    """`Store` over a `BlockStoreClient`; `look` from any thread."""

    def __init__(self, dial: DialConfig) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        self._client = BlockStoreClient(dial, StoreClientConfig())
        self._thread = LoopThread("kvtier lookups")
        self._thread.start()

    def look(self, names: BlockNames, deadline_s: float) -> PendingAnswer:
        return PendingAnswer(self._thread.submit(self._look(names, deadline_s)))

    def close(self) -> None:
        """End everything that runs. Idempotent."""
        if self._thread.is_running:
            try:
                self._thread.submit(self._client.close()).result(_CLOSE_S)
            except concurrent.futures.TimeoutError:
                LOG.warning("kvtier: the client of the store does not end")
            self._thread.stop()

    async def _look(self, names: BlockNames, deadline_s: float) -> tuple[bool, ...] | None:
        held = [True] * len(names.digests)
        for namespace in dict.fromkeys(names.namespaces):
            asked = [
                FrameName(KeyKind.ENGINE_DIGEST, digest, namespace) for digest in names.digests
            ]
            try:
                async with asyncio.timeout(deadline_s):
                    tiers = await self._client.find(asked, shared=True, deadline_s=deadline_s)
            except TimeoutError:
                return None
            except KvtierError as error:
                LOG.warning("kvtier: the store refused: %s", error)
                return None
            if tiers is None:
                return None
            held = [one and bool(found) for one, found in zip(held, tiers, strict=True)]
        return tuple(held)

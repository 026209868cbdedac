"""Which blocks a store has, asked beside vLLM's scheduler: on a thread, with a deadline.

A store that is absent or silent answers "nobody could say" and is left alone for a while.
What must not live here: what follows from the answer (scheduling.py).
"""

import asyncio
import concurrent.futures
import logging

from kvtier.client.store import BlockStoreClient, ReadTerms, SharedMemory, StoreClientConfig
from kvtier.core.frame import FrameName, KeyKind
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.scheduling import BlockNames
from kvtier.engines.vllm.terms import RECORD_BYTES, differences, record_name, record_of
from kvtier.errors import KvtierError
from kvtier.sections import DialConfig
from kvtier.wire.loop_thread import LoopThread

LOG = logging.getLogger("vllm.kvtier")
_CLOSE_S = 5.0
_COMPARE_S = 5.0
"""Deadline of a call about the record of a model, and the time between two attempts."""


class PendingAnswer:
    """`Answer` of a future."""

    def __init__(self, future: "concurrent.futures.Future[tuple[bool, ...] | None]") -> None:
        self._future = future

    def wait(self, seconds: float) -> None:
        concurrent.futures.wait([self._future], seconds)

    def done(self) -> bool:
        return self._future.done()

    def held(self) -> tuple[bool, ...] | None:
        """See `Answer`; only once done. Whatever went wrong, the scheduler must go on."""
        if self._future.cancelled():
            return None
        error = self._future.exception()
        if error is not None:
            LOG.error("kvtier: a lookup broke off", exc_info=error)
            return None
        return self._future.result()


class StoreLookups:
    """`Store` over a `BlockStoreClient`; `look` from any thread."""

    def __init__(self, dial: DialConfig) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones."""
        # Questions and one small record: no shared memory for those.
        config = StoreClientConfig(_COMPARE_S, SharedMemory.NEVER)
        self._client = BlockStoreClient(dial, config)
        self._thread = LoopThread("kvtier lookups")
        self._thread.start()
        self._comparison: concurrent.futures.Future[None] | None = None

    def look(self, names: BlockNames, deadline_s: float) -> PendingAnswer:
        return PendingAnswer(self._thread.submit(self._look(names, deadline_s)))

    def compare(self, facts: EngineFacts) -> "concurrent.futures.Future[None]":
        """Warn, once a store is there, if it has blocks of this model under other terms."""
        self._comparison = self._thread.submit(self._compare(facts))
        return self._comparison

    def close(self) -> None:
        """End everything that runs. Idempotent."""
        if self._thread.is_running:
            if self._comparison is not None:
                self._comparison.cancel()
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

    async def _compare(self, facts: EngineFacts) -> None:
        name, ours = record_name(facts.pool.model_id), record_of(facts)
        try:
            while True:
                if await self._client.find([name]) is not None:
                    break
                await asyncio.sleep(_COMPARE_S)
            terms = ReadTerms(payload_bytes=RECORD_BYTES)
            (found,) = await self._client.get_many([name], None, terms)
            if found.is_hit and found.payload is not None:
                theirs = bytes(found.payload)
                if theirs == ours:
                    return
                LOG.warning(
                    "kvtier: another engine of model %s shares nothing with this one: %s",
                    facts.pool.model_id,
                    "; ".join(differences(ours, theirs)) or "its record cannot be read",
                )
                await self._client.drop([name])
            await self._client.put_many([name], [ours])
        except KvtierError as error:
            LOG.warning("kvtier: the store refused: %s", error)

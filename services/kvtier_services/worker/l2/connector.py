"""`StoreConnector`: the tiers below as the store of this node has them, on a thread of their own.

A store that is absent, slow or wrong costs the blocks that were asked of it and nothing else: every
failure is an outcome. What must not live here: what to load or save.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Final, TypeVar

from kvtier.client.store import BlockStoreClient, ReadTerms, StoreClientConfig, WriteTerms
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import KvtierError, LimitError, UnavailableError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.ports import GetResult, GetStatus, PutStatus
from kvtier.sections import DialConfig
from kvtier.telemetry.logs import EventLog
from kvtier.types import Fingerprint, Source, Tier
from kvtier.wire.loop_thread import LoopThread, end
from kvtier_services.worker.l2.port import (
    Drop,
    Dropped,
    Fetch,
    Fetched,
    Load,
    Loaded,
    LoadRun,
    Looked,
    Lookup,
    Order,
    Outcome,
    RunOutcome,
    Save,
    Saved,
)

LOG = EventLog("kvtier_services.worker")
T = TypeVar("T")
SOURCE_OF_TIER: Final = {
    Tier.DRAM: Source.DRAM,
    Tier.NVME: Source.NVME,
    Tier.PEER: Source.PEER,
    Tier.REDIS: Source.REDIS,
}
_CLOSE_S: Final = 5.0
_ABSENT: Final = "unavailable"


class StoreConnector:
    """`BlockCache` over a `BlockStoreClient`. `begin` and `outcomes` may be on any thread."""

    def __init__(
        self,
        dial: DialConfig,
        config: StoreClientConfig,
        wake: Callable[[], None],
        save_deadline_s: float,
    ) -> None:
        """Reads the credential files; connects nothing. `wake` is called, on the connector's
        thread, whenever there is an outcome. ConfigError for unsafe or missing files."""
        self._client = BlockStoreClient(dial, config)
        self._thread = LoopThread("store connector")
        self._wake = wake
        self._save_deadline_s = save_deadline_s
        self._outcomes: deque[Outcome] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = threading.Event()
        self._thread.start()
        self._thread.soon(self._keep, self._warm_up)

    @property
    def is_attached(self) -> bool:
        """Whether payload goes through shared memory now."""
        return self._client.is_attached

    @property
    def writer_id(self) -> int:
        """What every block that this worker writes is marked with; drawn at its start."""
        return self._client.writer_id

    def begin(self, order: Order) -> None:
        """See `BlockCache`. After `close` every order fails."""
        if len(order.names) > TIER_BATCH_BLOCKS_MAX:
            raise LimitError(f"{len(order.names)} blocks in an order of {TIER_BATCH_BLOCKS_MAX}")
        if self._closed.is_set():
            self._end(_failed(order))
        else:
            self._thread.soon(self._spawn, order)

    def outcomes(self) -> Sequence[Outcome]:
        """See `BlockCache`."""
        ended = []
        while self._outcomes:
            ended.append(self._outcomes.popleft())
        return ended

    async def call(self, work: Callable[[BlockStoreClient], Coroutine[None, None, T]]) -> T:
        """Run something with the store's client, on its thread, while the caller's loop goes on.

        UnavailableError after `close`; otherwise what `work` raises.
        """
        if self._closed.is_set():
            raise UnavailableError("the store's client is closed")
        return await asyncio.wrap_future(self._thread.submit(work(self._client)))

    def close(self) -> None:
        """End everything that runs, and the thread. Idempotent; blocks for a few seconds at most.

        Nobody writes into the memory of a load, or reads that of a save, afterwards.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._thread.submit(self._close()).result(_CLOSE_S + self._save_deadline_s)
        except concurrent.futures.TimeoutError:
            LOG.warning("the store's client does not end")
        self._thread.stop()

    # ---- on the connector's thread

    def _spawn(self, order: Order) -> None:
        self._keep(partial(self._carry_out, order))

    def _keep(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm_up(self) -> None:
        """Connect and attach before the first request: it would pay for both."""
        nothing = FrameName(KeyKind.PREFIX_KEY, bytes(32), Fingerprint(bytes(32)))
        try:
            await self._client.get_many([nothing], None, ReadTerms(payload_bytes=1))
        except KvtierError as error:
            LOG.warning("store refused", reason=str(error))

    async def _carry_out(self, order: Order) -> None:
        outcome: Outcome = _failed(order)
        try:
            match order:
                case Lookup():
                    outcome = await self._look(order)
                case Load():
                    outcome = await self._load(order)
                case Save():
                    outcome = await self._save(order)
                case Fetch():
                    outcome = await self._fetch(order)
                case Drop():
                    await self._client.drop(order.names)
                    outcome = Dropped(order.ticket, is_done=True)
        except KvtierError as error:
            # Denied, or a mistake of ours: the blocks are recomputed, and an operator is told.
            LOG.warning("store refused", reason=str(error))
        finally:
            self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._wake()

    async def _look(self, order: Lookup) -> Looked:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(order.deadline_s):
                tiers = await self._client.contains(
                    order.names, shared=True, deadline_s=order.deadline_s
                )
        except TimeoutError:
            return Looked(order.ticket, (), is_known=False)
        sources = tuple(
            min((SOURCE_OF_TIER[t] for t in held if t in SOURCE_OF_TIER), default=None)
            for held in tiers
        )
        # The client answers "nowhere" where it cannot ask: soon while the store is left alone.
        found = any(source is not None for source in sources)
        late = not found and time.monotonic() - began_s >= order.deadline_s
        return Looked(order.ticket, () if late else sources, is_known=not late)

    async def _load(self, order: Load) -> Loaded:
        """Run after run, so that each is measured alone and has its own time."""
        outcomes: list[RunOutcome] = []
        reasons: list[str] = []
        at = leading = 0
        for run in order.runs:
            began_s = time.monotonic()
            results = await self._read(order, at, run)
            seconds = time.monotonic() - began_s
            statuses = [result.status for result in results]
            outcomes.append(
                RunOutcome(
                    run.source,
                    run.blocks_count,
                    statuses.count(GetStatus.HIT),
                    seconds,
                    GetStatus.TIMEOUT in statuses,
                )
            )
            reasons += [status.value for status in statuses if status is not GetStatus.HIT]
            arrived = next(
                (i for i, status in enumerate(statuses) if status is not GetStatus.HIT),
                len(statuses),
            )
            leading += arrived
            at += run.blocks_count
            if arrived < run.blocks_count:
                break
        return Loaded(order.ticket, leading, tuple(outcomes), tuple(reasons))

    async def _read(self, order: Load, at: int, run: LoadRun) -> list[GetResult]:
        stop = at + run.blocks_count
        terms = ReadTerms(payload_bytes=order.into[at].nbytes, scope=order.scope)
        return await self._client.get_many(
            order.names[at:stop], order.into[at:stop], terms, deadline_s=run.deadline_s
        )

    async def _save(self, order: Save) -> Saved:
        began_s = time.monotonic()
        terms = WriteTerms(scope=order.scope, priority=order.priority)
        results = await self._client.put_many(
            order.names, order.payloads, terms, deadline_s=self._save_deadline_s
        )
        return Saved(
            order.ticket,
            tuple(result.is_held for result in results),
            tuple(_reason(result.status, result.reason) for result in results),
            time.monotonic() - began_s,
        )

    async def _fetch(self, order: Fetch) -> Fetched:
        terms = ReadTerms(payload_bytes=order.into[0].nbytes, scope=order.scope)
        results = await self._client.get_many(
            order.names, order.into, terms, deadline_s=order.deadline_s
        )
        return Fetched(order.ticket, tuple(_writer_of(result) for result in results))

    async def _close(self) -> None:
        await end(self._tasks)
        await self._client.close()


def _reason(status: PutStatus, reason: str) -> str:
    return _ABSENT if reason == _ABSENT else status.value


def _writer_of(result: GetResult) -> int | None:
    if result.status is not GetStatus.HIT or result.header is None:
        return None
    return result.header.writer_id


def _failed(order: Order) -> Outcome:
    """What an order comes to that could not be carried out."""
    match order:
        case Lookup():
            return Looked(order.ticket, (), is_known=False)
        case Load():
            return Loaded(order.ticket, 0, (), (GetStatus.ERROR.value,) * len(order.names))
        case Save():
            blocks = len(order.names)
            return Saved(order.ticket, (False,) * blocks, (PutStatus.ERROR.value,) * blocks, 0.0)
        case Fetch():
            return Fetched(order.ticket, (None,) * len(order.names))
        case Drop():
            return Dropped(order.ticket, is_done=False)

"""`IndexReplica`: the index inside another process, fed by a stream, asked in microseconds.

A thread of its own follows one of several index targets and takes the next one when that fails or
falls silent. The new stream fills a new picture beside the old one, which answers meanwhile; a
picture that is complete takes over as soon as it knows every holder that the old one shows. An
index that has just restarted is waited for a little: its publishers are still on their way to it.

Several event loops or threads of one process may share a replica: matches run on the native index,
which is thread-safe and lets other threads run during long queries. Router *processes* of one host
have one replica each for now; one process that owns the replica and answers its neighbours through
shared memory would put an end to that, behind this same interface.

What must not live here: what a message does (`picture`), scoring, reservations at the index.
"""

import asyncio
import itertools
import secrets
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.core.fleet import Chain
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.prefix_index import MatchResult, NativePrefixIndex, Snapshot
from kvtier.core.workers import HolderView, OwnReservation, WorkerName
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import INDEX_BYTES_MAX
from kvtier.replica.picture import Picture
from kvtier.replica.predictions import OwnReservations, Reserved
from kvtier.sections import DialConfig
from kvtier.security import Dialer
from kvtier.telemetry.logs import EventLog
from kvtier.types import HolderId, Integers, Tier, Trust
from kvtier.wire import messages as pb
from kvtier.wire import rpc
from kvtier.wire.loop_thread import LoopThread, end, raise_if_cancelled, spawn

LOG = EventLog("kvtier.replica")

_START_S = 10.0
_SETTLE_STEP_S = 0.05
"""A picture that waits to take over is compared with the one in use this often."""
_JITTER = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What to follow and for how long to bear silence."""

    models: tuple[str, ...] = ()
    """Served names or model ids to hold; empty means all."""
    router: str = ""
    """Name under which this process reserves, so that it knows its own reservations again."""
    index_bytes_max: int = INDEX_BYTES_MAX
    silence_s: float = 2.0
    """An index that sends nothing for so long (it sends something twice a second) is left."""
    lag_s_max: float = 1.5
    """Above this age of the last message the replica says DEGRADED."""
    settle_s: float = 3.0
    """How long a complete picture waits for holders that the one in use still shows."""
    reconnect_s_min: float = 0.05
    reconnect_s_max: float = 1.0

    def __post_init__(self) -> None:
        for name in ("silence_s", "lag_s_max", "settle_s", "reconnect_s_min"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise CallerError(f"{name}: want a finite duration, got {getattr(self, name)}")
        if not 0 < self.reconnect_s_min <= self.reconnect_s_max < float("inf"):
            raise CallerError("reconnect_s_min, reconnect_s_max: want 0 < min <= max")


class ReplicaLag(NamedTuple):
    """How far the picture in use can be trusted."""

    trust: Trust
    age_s: float
    """Since the last message of the picture in use; infinite before the first picture."""
    position: int
    """Number of the last change that is in it."""
    index_epoch: int
    target: str
    """The index that is followed now; empty while there is none."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Counters since the start, and sizes of now."""

    messages: int
    pictures: int
    """Pictures that were taken into use."""
    failures: int
    """Streams that ended by an error or by silence."""
    last_error: str
    holders: int
    foreign_reservations: int
    own_reservations: int


class ReplicaMatch(NamedTuple):
    """Who holds how much of one chain. `holders` describes the numbers in `result.workers`."""

    result: MatchResult
    holders: dict[HolderId, HolderView]
    hashes: npt.NDArray[np.uint64]
    chain: Chain | None
    """None where the caller brought hashes."""


class ReplicaLook(NamedTuple):
    """Who is there, cheaply: nothing is copied. `holders` may change while it is read (iterate over
    a copy) but not what it holds; another dict is another picture, with other holder numbers."""

    holders: dict[HolderId, HolderView]
    changes_count: int
    """The same holders and the same number: nothing has changed."""
    foreign_tokens: npt.NDArray[np.int64]
    """By holder number, prefill tokens that other routers have on their way; may be too short."""
    foreign_requests: npt.NDArray[np.int64]
    """How many requests those are of."""
    trust: Trust
    age_s: float
    """As ReplicaLag."""


class HolderCensus(NamedTuple):
    """One holder and how many copies of blocks it has, by Tier, all shards together."""

    view: HolderView
    copies: tuple[int, int, int, int]


class IndexReplica:
    """See the module. All methods may be called from any thread; none waits for the network."""

    def __init__(
        self,
        dial: DialConfig,
        config: ReplicaConfig | None = None,
        thread: LoopThread | None = None,
    ) -> None:
        """Reads the credential files; connects nothing. ConfigError for unsafe or missing ones.

        `thread`, where given, stays its owner's: `start` may find it running, `close` lets it run.
        """
        if not dial.targets:
            raise ConfigError("targets: a replica needs an index to follow")
        self._config = config or ReplicaConfig()
        self._dialers = {target: Dialer(dial, target) for target in dial.targets}
        self._thread = thread or LoopThread("index replica")
        self._is_thread_own = thread is None
        self._is_started = False
        self._own = OwnReservations(self._config.router)
        self._reserving = threading.Lock()
        """Guards own reservations and their place in the picture in use."""
        self._picture = self._new_picture()
        self._followed: Picture | None = None
        self._target = ""
        self._complete = threading.Event()
        self._messages = 0
        self._pictures = 0
        self._failures = 0
        self._last_error = ""
        self._is_closed = False

    # ---- asking

    def match(self, hashes: npt.NDArray[np.uint64], pool: Pool | None = None) -> ReplicaMatch:
        """Longest unbroken prefix per worker, of one pool or of all. Microseconds, no lock."""
        picture = self._picture
        return ReplicaMatch(picture.match(hashes, pool), picture.holders, hashes, None)

    def match_tokens(
        self, served_name: str, tokens: Integers, scope_salt: str | None = None
    ) -> tuple[ReplicaMatch, ...]:
        """One match for each chain behind a served name; compare tokens, never blocks."""
        picture = self._picture
        matches = []
        for chain in picture.chains(served_name):
            root = chain_root(chain.pool, scope_salt, chain.adapter)
            hashes = prefix_hashes(root, tokens, chain.pool.block_tokens)
            result = picture.match(hashes, chain.pool)
            matches.append(ReplicaMatch(result, picture.holders, hashes, chain))
        return tuple(matches)

    def chains(self, served_name: str) -> tuple[Chain, ...]:
        """The distinct chains behind a served name; empty when nobody serves it."""
        return self._picture.chains(served_name)

    def look(self) -> ReplicaLook:
        """Everybody with what is on its way to them, for a caller that asks all the time. O(1)."""
        picture = self._picture
        foreign, (trust, age_s) = picture.foreign, self._trust(picture)
        return ReplicaLook(
            picture.holders, picture.changes_count, foreign.tokens, foreign.requests, trust, age_s
        )

    def holders(self) -> tuple[HolderView, ...]:
        """Everybody that the index knows, hidden ones too, with cards and loads."""
        return tuple(self._picture.holders.values())

    def census(self) -> tuple[HolderCensus, ...]:
        """Everybody with how much each has. O(holders)."""
        picture = self._picture
        copies = {one.holder: one.copies for one in picture.index.stats().holders}
        nothing = (0, 0, 0, 0)
        return tuple(
            HolderCensus(view, copies.get(view.holder, nothing))
            for view in picture.holders.copy().values()
        )

    def snapshot(self, holder: HolderId, tier: Tier, shard: int = 0) -> Snapshot:
        """All that one holder has in a tier, for inspection. O(blocks); CallerError if unknown."""
        return self._picture.index.snapshot(holder, tier, shard)

    def reserved(self, worker: WorkerName) -> Reserved:
        """What all routers have on its way to a worker, this one's own first."""
        picture = self._picture
        holder = picture.fleet.find_worker(worker.instance, worker.dp_rank)
        own = self._own.totals(worker)
        if holder is None:
            return own
        return own.plus(*picture.foreign.totals(holder))

    @property
    def lag(self) -> ReplicaLag:
        """Trust and age of the picture in use; the age is what a scorer lets credit decay by."""
        picture = self._picture
        trust, age_s = self._trust(picture)
        return ReplicaLag(trust, age_s, picture.position, picture.index_epoch, self._target)

    def _trust(self, picture: Picture) -> tuple[Trust, float]:
        """Of one picture, with the age of what it heard last."""
        age_s = time.monotonic() - picture.heard_at if picture.is_complete else float("inf")
        is_exact = picture is self._followed and age_s <= self._config.lag_s_max
        return Trust.EXACT if is_exact else Trust.DEGRADED, age_s

    def stats(self) -> ReplicaStats:
        picture = self._picture
        return ReplicaStats(
            messages=self._messages,
            pictures=self._pictures,
            failures=self._failures,
            last_error=self._last_error,
            holders=len(picture.holders),
            foreign_reservations=len(picture.foreign),
            own_reservations=len(self._own),
        )

    # ---- reserving

    def reserve_local(self, wanted: OwnReservation) -> None:
        """Let one's own reservation count here at once; call it before telling the index.

        What the index says of it later changes nothing. Replaces one of the same key.
        LimitError above RESERVATIONS_PER_ROUTER_MAX.
        """
        with self._reserving:
            ended = self._own.end(wanted.key)
            if ended is not None:
                self._picture.index.release(ended)
            ticket, expires_at = self._own.add(wanted, time.monotonic())
            self._picture.predict(wanted, ticket, expires_at)

    def release_local(self, key: str) -> None:
        """End one's own reservation here. Unknown keys are no error."""
        with self._reserving:
            ended = self._own.end(key)
            if ended is not None:
                self._picture.index.release(ended)

    def prefilled_local(self, key: str, keep_s: float) -> None:
        """The worker has prefilled: the work counts no more, the blocks do for `keep_s` longer,
        until events can have told of them. Unknown keys are no error."""
        with self._reserving:
            for ticket in self._own.prefilled(key, time.monotonic() + keep_s):
                self._picture.index.release(ticket)

    def keep_local(self, keep_s: float) -> None:
        """All that was kept after its prefill is kept for `keep_s` from now on, no more and no
        less: longer where no index tells of it, shorter where one does again. O(kept)."""
        with self._reserving:
            self._own.keep_until(time.monotonic() + keep_s)

    # ---- the owner

    def start(self) -> Self:
        """Begin to follow. Idempotent; CallerError after `close`."""
        if self._is_closed:
            raise CallerError("a closed replica cannot be started again")
        if not self._is_started:
            self._is_started = True
            self._thread.start()
            self._thread.submit(self._open()).result(_START_S)
        return self

    def wait_complete(self, deadline_s: float) -> bool:
        """Block until the first picture is complete; False at the deadline."""
        return self._complete.wait(deadline_s)

    def close(self) -> None:
        """Stop following; what is known can still be asked. Idempotent."""
        self._is_closed = True
        if self._is_started and self._thread.is_running:
            self._is_started = False
            self._thread.submit(self._shut()).result(_START_S)
            if self._is_thread_own:
                self._thread.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- following, on the replica's thread

    def _new_picture(self) -> Picture:
        return Picture(NativePrefixIndex(self._config.index_bytes_max), self._own)

    async def _open(self) -> None:
        self._following = spawn(self._follow_for_ever(), LOG)
        self._ticking = spawn(self._tick(), LOG)

    async def _shut(self) -> None:
        await end([self._following, self._ticking])
        for dialer in self._dialers.values():
            await dialer.close()

    async def _tick(self) -> None:
        """Let reservations expire."""
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            with self._reserving:
                for ticket in self._own.tick(now):
                    self._picture.index.release(ticket)
            self._picture.tick(now)

    async def _follow_for_ever(self) -> None:
        """One target after the other; a pause after each whole round without success."""
        targets = list(self._dialers)
        first = _JITTER.randrange(len(targets))
        targets = targets[first:] + targets[:first]
        failures = 0
        for target in itertools.cycle(targets):
            pictures = self._pictures
            await self._attempt(target)
            raise_if_cancelled()
            failures = 0 if self._pictures > pictures else failures + 1
            await asyncio.sleep(self._pause_s(failures // len(targets)))

    def _pause_s(self, rounds: int) -> float:
        if rounds == 0:
            return 0.0
        doubled = self._config.reconnect_s_min * 2.0 ** min(rounds - 1, 30)
        return min(self._config.reconnect_s_max, doubled) * _JITTER.uniform(0.5, 1.0)

    async def _attempt(self, target: str) -> None:
        try:
            await self._follow(target)
        except TimeoutError:
            self._failed(target, f"nothing was heard for {self._config.silence_s:g} s")
        except grpc.aio.AioRpcError as error:
            self._failed(target, f"{error.code().name}: {error.details()}")
        except (CallerError, grpc.aio.UsageError) as error:
            self._failed(target, str(error))
        finally:
            self._followed = None
            self._target = ""
        await self._dialers[target].close()

    def _failed(self, target: str, reason: str) -> None:
        self._failures += 1
        self._last_error = reason
        LOG.warning("index stream lost", target=target, reason=reason)

    async def _follow(self, target: str) -> None:
        """Follow one index until it ends, fails, or falls silent."""
        call_snapshot = rpc.call(self._dialers[target].channel(), rpc.INDEX, "Snapshot")
        picture, looked_at = self._new_picture(), float("-inf")
        call = call_snapshot(
            pb.SnapshotRequest(
                models=self._config.models, follow=True, groups=True, router=self._config.router
            )
        )
        try:
            while True:
                async with asyncio.timeout(self._config.silence_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise CallerError("the index ended the stream")
                now = time.monotonic()
                picture.take(message, now)
                self._messages += 1
                if picture.is_complete and picture is not self._picture:
                    if now - looked_at < _SETTLE_STEP_S:
                        continue
                    looked_at = now
                    if self._may_take_over(picture, now):
                        self._take_over(picture, target)
        finally:
            call.cancel()

    def _may_take_over(self, picture: Picture, now: float) -> bool:
        waited_s = now - picture.completed_at
        return waited_s >= self._config.settle_s or picture.knows(self._picture)

    def _take_over(self, picture: Picture, target: str) -> None:
        with self._reserving:
            for wanted, ticket, expires_at in self._own.live():
                picture.predict(wanted, ticket, expires_at)
            self._picture = picture
        self._followed = picture
        self._target = target
        self._pictures += 1
        self._complete.set()
        LOG.info("index replica is complete", target=target, holders=len(picture.holders))

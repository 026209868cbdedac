"""A fleet in virtual time: workers with LRU caches, one index, any number of routing brains.

Everything a brain meets is here but the network: embedded indexes that are fed with a delay, load
reports twice a second, reservations that reach the other routers, answers, failures. Timing comes
from the model below, not from `core.costs`: overhead a request, noise, attention over the context.
What must not live here: assertions.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from random import Random

import numpy as np
import numpy.typing as npt

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.fleet import Addresses, Chain, Fleet, HolderInfo, TierCapacity
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.core.prefix_index import NativePrefixIndex
from kvtier.core.workers import HolderView, Load, OwnReservation, WorkerName
from kvtier.errors import UnavailableError
from kvtier.replica import HolderCensus, ReplicaLook, ReplicaMatch
from kvtier.replica.predictions import ForeignReservations, OwnReservations
from kvtier.types import Fingerprint, HolderId, HolderKind, InstanceId, NodeId, Tier, Trust
from kvtier_router.routing import FailureKind, RouteAsk, Usage
from kvtier_router.routing.config import RoutingConfig, StaticWorker
from kvtier_router.routing.router import Router

Tokens = npt.NDArray[np.uint32]
Hashes = npt.NDArray[np.uint64]

BLOCK_TOKENS = 64
CARD = ModelCard(("model",), "org/model", "r1", b"t" * 32, None, BLOCK_TOKENS)
INDEX_BYTES = 32 << 20
REPORT_S = 0.5


class Clock:
    """Virtual time, and what happens in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._events, (max(when, self.now), next(self._numbers), action))

    def every(self, seconds: float, action: Callable[[], None], until: float) -> None:
        def again() -> None:
            action()
            if self.now + seconds <= until:
                self.at(self.now + seconds, again)

        self.at(self.now + seconds, again)

    def run(self, until: float = float("inf")) -> None:
        while self._events and self._events[0][0] <= until:
            when, _, action = heappop(self._events)
            self.now = when
            action()
        if until < float("inf"):
            self.now = max(self.now, until)


@lru_cache(maxsize=1024)
def info_of(number: int, card: ModelCard = CARD, capacity_blocks: int = 0) -> HolderInfo:
    return HolderInfo(
        kind=HolderKind.WORKER,
        instance=InstanceId(f"w{number}"),
        node=NodeId(f"n{number}"),
        namespace=Fingerprint(b"n" * 32),
        card=card,
        addresses=Addresses(http=f"http://10.0.0.{number}:8000"),
        capacities=(TierCapacity(Tier.GPU, capacity_blocks, 0),) if capacity_blocks else (),
        block_bytes=BLOCK_TOKENS * (128 << 10),
    )


def view_of(
    holder: int,
    info: HolderInfo,
    *,
    load: Load | None = None,
    is_hidden: bool = False,
    trust: Trust = Trust.EXACT,
    heard_at: float = 0.0,
) -> HolderView:
    return HolderView(HolderId(holder), info, trust, "", is_hidden, load or Load(), 0, 0, heard_at)


def stored(hashes: Hashes, kind: EventKind = EventKind.STORE) -> EventBatch:
    return EventBatch(
        kinds=np.array([kind], np.uint8),
        tiers=np.array([Tier.GPU], np.uint8),
        lengths=np.array([len(hashes)], np.uint32),
        parents=np.zeros(1, np.uint64),
        hashes=hashes,
    )


class VirtualReplica:
    """An IndexSource in virtual time; what it holds is written by the test."""

    def __init__(self, clock: Clock, router: str = "router") -> None:
        self._clock = clock
        self.router = router
        self.own = OwnReservations(router)
        self.trust = Trust.EXACT
        self.lost_at = 0.0
        self.new_picture()

    def new_picture(self) -> None:
        self.index = NativePrefixIndex(INDEX_BYTES)
        self.fleet = Fleet(self.index)
        self.holders: dict[HolderId, HolderView] = {}
        self.changes_count = 0
        self.foreign = ForeignReservations(self.index)

    # ---- the test's side

    def tell(self, view: HolderView) -> None:
        """A holder joined, or anything of it changed."""
        before = self.holders.get(view.holder)
        if before is None or before.info is not view.info:
            self.fleet.join(view.info, view.holder)
        was_hidden = view.holder in self.holders and self.holders[view.holder].is_hidden
        if was_hidden != view.is_hidden:
            (self.fleet.hide if view.is_hidden else self.fleet.resume)(view.holder)
        self.holders[view.holder] = view
        self.changes_count += 1

    def remove(self, holder: int) -> None:
        self.foreign.holder_left(HolderId(holder))
        self.fleet.leave(HolderId(holder))
        del self.holders[HolderId(holder)]
        self.changes_count += 1

    def store(self, holder: int, hashes: Hashes) -> None:
        self.index.apply(HolderId(holder), 0, stored(hashes))

    def evict(self, holder: int, hashes: Hashes) -> None:
        self.index.apply(HolderId(holder), 0, stored(hashes, EventKind.REMOVE))

    def lose(self) -> None:
        """The index falls silent."""
        self.trust, self.lost_at = Trust.DEGRADED, self._clock.now

    def find(self) -> None:
        self.trust = Trust.EXACT

    def expire(self) -> None:
        now = self._clock.now
        for ticket in self.own.tick(now):
            self.index.release(ticket)
        self.foreign.tick(now)

    # ---- IndexSource

    def look(self) -> ReplicaLook:
        age_s = 0.0 if self.trust is Trust.EXACT else self._clock.now - self.lost_at
        return ReplicaLook(
            self.holders,
            self.changes_count,
            self.foreign.tokens,
            self.foreign.requests,
            self.trust,
            age_s,
        )

    def census(self) -> tuple[HolderCensus, ...]:
        copies = {one.holder: one.copies for one in self.index.stats().holders}
        return tuple(
            HolderCensus(view, copies.get(view.holder, (0, 0, 0, 0)))
            for view in self.holders.values()
        )

    def match(self, hashes: Hashes, pool: Pool | None = None) -> ReplicaMatch:
        return ReplicaMatch(self.fleet.match(hashes, pool), self.holders, hashes, None)

    def chains(self, served_name: str) -> tuple[Chain, ...]:
        return self.fleet.chains(served_name)

    def reserve_local(self, wanted: OwnReservation) -> None:
        ticket, expires_at = self.own.add(wanted, self._clock.now)
        holder = self.fleet.find_worker(wanted.worker.instance, wanted.worker.dp_rank)
        if holder is not None and len(wanted.hashes):
            self.index.predict(holder, wanted.hashes, ticket, expires_at)

    def release_local(self, key: str) -> None:
        ended = self.own.end(key)
        if ended is not None:
            self.index.release(ended)

    def prefilled_local(self, key: str, keep_s: float) -> None:
        for ticket in self.own.prefilled(key, self._clock.now + keep_s):
            self.index.release(ticket)

    def keep_local(self, keep_s: float) -> None:
        self.own.keep_until(self._clock.now + keep_s)


class VirtualIndex:
    """One index: tells every replica, after a delay, what workers and routers tell it."""

    def __init__(self, clock: Clock, event_delay_s: float, reserve_delay_s: float) -> None:
        self.clock = clock
        self.replicas: list[VirtualReplica] = []
        self.is_up = True
        self._event_delay_s = event_delay_s
        self._reserve_delay_s = reserve_delay_s
        self._tickets = itertools.count(1)
        self._ticket_of: dict[str, int] = {}

    def publish(self, holder: int, batch: EventBatch) -> None:
        def deliver() -> None:
            if self.is_up:
                for replica in self.replicas:
                    if HolderId(holder) in replica.holders:
                        replica.index.apply(HolderId(holder), 0, batch)

        self.clock.at(self.clock.now + self._event_delay_s, deliver)

    def report(self, view: HolderView) -> None:
        if self.is_up:
            for replica in self.replicas:
                replica.tell(view)

    def lose(self) -> None:
        self.is_up = False
        for replica in self.replicas:
            replica.lose()

    def find(self, workers: Sequence["Worker"]) -> None:
        """A new index, to which every publisher has sent its snapshot."""
        self.is_up = True
        for replica in self.replicas:
            replica.new_picture()
            for worker in workers:
                if worker.is_alive:
                    replica.tell(worker.view(self.clock.now))
                    replica.store(worker.number, worker.held())
            for wanted, ticket, expires_at in replica.own.live():
                holder = replica.fleet.find_worker(*wanted.worker)
                if holder is not None and len(wanted.hashes):
                    replica.index.predict(holder, wanted.hashes, ticket, expires_at)
            replica.find()

    def sink(self, replica: VirtualReplica) -> "Sink":
        return Sink(self, replica)

    def reserve(self, own: VirtualReplica, wanted: OwnReservation) -> None:
        ticket = self._ticket_of[wanted.key] = next(self._tickets)

        def deliver() -> None:
            for replica in self.replicas if self.is_up else ():
                holder = replica.fleet.find_worker(*wanted.worker)
                if replica is not own and holder is not None and wanted.key in self._ticket_of:
                    expires_at = self.clock.now + wanted.ttl_ms / 1000
                    replica.foreign.add(
                        ticket, holder, wanted.prefill_tokens, wanted.hashes, expires_at
                    )

        self.clock.at(self.clock.now + self._reserve_delay_s, deliver)

    def release(self, key: str) -> None:
        ticket = self._ticket_of.pop(key, None)

        def deliver() -> None:
            for replica in self.replicas if self.is_up else ():
                if ticket is not None:
                    replica.foreign.end(ticket)

        self.clock.at(self.clock.now + self._reserve_delay_s, deliver)


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A ReservationSink."""

    index: VirtualIndex
    replica: VirtualReplica

    def tell(self, wanted: OwnReservation) -> None:
        self.index.reserve(self.replica, wanted)

    def release(self, key: str) -> None:
        self.index.release(key)


@dataclass(slots=True, eq=False)
class Call:
    """One request at one worker."""

    tokens_count: int
    hashes: Hashes
    decode_s: float
    on_first: Callable[[float, int], None]
    on_end: Callable[[int], None]
    on_failure: Callable[[FailureKind], None]


@dataclass(frozen=True, slots=True)
class Noise:
    """What a real fleet adds to times: jitter on every prefill, and now and then an answer that is
    held up on its way (a collected heap, a busy neighbour) while its worker goes on."""

    log_sd: float = 0.2
    pause_share: float = 0.02
    pause_min: float = 5.0
    pause_max: float = 20.0
    """Pauses are multiples of the time that the prefill took."""

    def jitter(self, random: Random) -> float:
        return random.lognormvariate(0.0, self.log_sd)

    def pause(self, random: Random) -> float:
        """What a time to first token grows by, as a part of the prefill's own time."""
        if random.random() >= self.pause_share:
            return 0.0
        return random.uniform(self.pause_min, self.pause_max) - 1.0


@dataclass(slots=True, eq=False)
class Worker:
    """Prefills one request after the other; decoding costs the others nothing. LRU cache of
    blocks, a request's tail goes first; what is cached counts when a prefill begins."""

    number: int
    clock: Clock
    index: VirtualIndex | None
    random: Random
    capacity_blocks: int
    tokens_per_s: float = 12_000.0
    noise: Noise | None = None
    slow: float = 1.0
    is_alive: bool = True
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    queue: list[Call] = field(default_factory=list)
    decoding: set[Call] = field(default_factory=set)
    is_busy: bool = False
    computed_tokens: int = 0
    calls_count: int = 0

    @property
    def name(self) -> WorkerName:
        return WorkerName(InstanceId(f"w{self.number}"), 0)

    def view(self, now: float) -> HolderView:
        load = Load(
            running_requests=len(self.decoding) + self.is_busy,
            waiting_requests=max(0, len(self.queue) - self.is_busy),
            queued_prefill_tokens=sum(call.tokens_count for call in self.queue),
        )
        return view_of(self.number, info_of(self.number), load=load, heard_at=now)

    def held(self) -> Hashes:
        return np.fromiter(self.blocks, np.uint64, len(self.blocks))

    def submit(self, call: Call) -> None:
        self.calls_count += 1
        if not self.is_alive:
            self.clock.at(self.clock.now + 0.001, lambda: call.on_failure(FailureKind.CONNECT))
            return
        self.queue.append(call)
        if not self.is_busy:
            self._begin()

    def kill(self) -> None:
        self.is_alive, self.is_busy = False, False
        lost, self.queue = [*self.queue, *self.decoding], []
        self.decoding = set()
        self.blocks.clear()
        for call in lost:
            call.on_failure(FailureKind.CONNECT)

    def _begin(self) -> None:
        self.is_busy = True
        call = self.queue[0]
        cached = 0
        for block in call.hashes.tolist():
            if block not in self.blocks:
                break
            cached += BLOCK_TOKENS
        cached = min(cached, call.tokens_count - 1)
        tokens = call.tokens_count - cached
        context = (call.tokens_count + cached) / 2
        seconds = 0.004 + tokens / self.tokens_per_s * (1 + context / 40_000)
        held_up_s = 0.0
        if self.noise is None:
            seconds *= self.slow * self.random.uniform(0.9, 1.15)
        else:
            seconds *= self.slow * self.noise.jitter(self.random)
            held_up_s = seconds * self.noise.pause(self.random)
        self.computed_tokens += tokens
        self.clock.at(self.clock.now + seconds, lambda: self._prefilled(call, cached, held_up_s))

    def _prefilled(self, call: Call, cached: int, held_up_s: float) -> None:
        if not self.is_alive or not self.queue or self.queue[0] is not call:
            return
        self.queue.pop(0)
        self._keep(call.hashes)
        self.decoding.add(call)
        if held_up_s:
            self.clock.at(self.clock.now + held_up_s, lambda: self._first(call, cached))
        else:
            self._first(call, cached)
        if self.queue:
            self._begin()
        else:
            self.is_busy = False

    def _first(self, call: Call, cached: int) -> None:
        if call in self.decoding:
            call.on_first(self.clock.now, cached)
            self.clock.at(self.clock.now + call.decode_s, lambda: self._ended(call, cached))

    def _ended(self, call: Call, cached: int) -> None:
        if call in self.decoding:
            self.decoding.discard(call)
            call.on_end(cached)

    def _keep(self, hashes: Hashes) -> None:
        fresh = [block for block in hashes.tolist() if block not in self.blocks]
        for block in reversed(hashes.tolist()):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        gone = []
        while len(self.blocks) > self.capacity_blocks:
            gone.append(self.blocks.popitem(last=False)[0])
        if self.index is not None:
            if fresh:
                self.index.publish(self.number, stored(np.array(fresh, np.uint64)))
            if gone:
                self.index.publish(self.number, stored(np.array(gone, np.uint64), EventKind.REMOVE))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload."""

    at_s: float
    tokens: Tokens
    decode_s: float


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    share: dict[str, int] = field(default_factory=dict)
    placed: list[tuple[float, str]] = field(default_factory=list)
    """When and where."""
    failures: int = 0
    refused: int = 0

    @property
    def hit(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def quantile(self, part: float) -> float:
        return float(np.quantile(self.ttfts, part))

    def spread(self) -> float:
        return max(self.share.values()) / max(min(self.share.values()), 1)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a virtual fleet is made of."""

    workers_count: int = 8
    routers_count: int = 1
    seed: int = 1
    has_index: bool = True
    shares_reservations: bool = True
    capacity_blocks: int = 600
    event_delay_s: float = 0.005
    reserve_delay_s: float = 0.002
    horizon_s: float = 300.0
    config: RoutingConfig = field(default_factory=RoutingConfig)
    reports: bool = True
    noise: Noise | None = None


class World:
    """A fleet with its routers; requests go to the routers in turn."""

    def __init__(self, setup: Setup | None = None) -> None:
        self.setup = setup or Setup()
        self.clock = Clock()
        self.random = Random(self.setup.seed)
        self.index: VirtualIndex | None = None
        if self.setup.has_index:
            self.index = VirtualIndex(
                self.clock, self.setup.event_delay_s, self.setup.reserve_delay_s
            )
        self.workers = [
            Worker(
                number,
                self.clock,
                self.index,
                self.random,
                self.setup.capacity_blocks,
                noise=self.setup.noise,
            )
            for number in range(self.setup.workers_count)
        ]
        self.routers = [self._router(number) for number in range(self.setup.routers_count)]
        self.outcome = Outcome(share={worker.name.instance: 0 for worker in self.workers})
        self._turn = itertools.cycle(self.routers)
        self._by_name = {worker.name: worker for worker in self.workers}
        until = self.setup.horizon_s
        self.clock.every(0.1, self._tick, until)
        if self.index is not None and self.setup.reports:
            for worker in self.workers:
                offset = REPORT_S * worker.number / len(self.workers)
                self.clock.at(offset, lambda worker=worker: self._report_from(worker))  # type: ignore[misc]

    def _router(self, number: int) -> Router:
        name = f"router-{number}"
        config = replace(self.setup.config, router=name)
        draw = Random(self.setup.seed * 1000 + number).random
        if self.index is None:
            static = tuple(
                StaticWorker(worker.name, info_of(worker.number).addresses.http, CARD)
                for worker in self.workers
            )
            return Router(replace(config, workers=static), clock=self.clock, draw=draw)
        replica = VirtualReplica(self.clock, name)
        self.index.replicas.append(replica)
        for worker in self.workers:
            replica.tell(worker.view(0.0))
        sink = self.index.sink(replica) if self.setup.shares_reservations else None
        return Router(config, replica, sink, self.clock, draw)

    def _report_from(self, worker: Worker) -> None:
        self.clock.every(REPORT_S, lambda: self._report(worker), self.setup.horizon_s)

    def _report(self, worker: Worker) -> None:
        if worker.is_alive and self.index is not None:
            self.index.report(worker.view(self.clock.now))

    def _tick(self) -> None:
        for router in self.routers:
            router.tick()
        if self.index is not None:
            for replica in self.index.replicas:
                replica.expire()

    # ---- load

    def submit(
        self, prompt: Prompt, after: Callable[[], None] | None = None, retries: int = 3
    ) -> None:
        """Send one request through the next router, now; `after` is called at its end."""
        router = next(self._turn)
        self._send(router, prompt, self.clock.now, frozenset(), after, retries)

    def _send(
        self,
        router: Router,
        prompt: Prompt,
        began: float,
        excluded: frozenset[WorkerName],
        after: Callable[[], None] | None,
        retries: int,
    ) -> None:
        try:
            decision = router.route(RouteAsk("model", prompt.tokens, excluded=excluded))
        except UnavailableError:
            self.outcome.refused += 1
            return
        sent_at = self.clock.now
        placement = decision.placement
        worker = self._by_name[decision.worker]
        self.outcome.placed.append((sent_at, decision.worker.instance))

        def first(now: float, cached: int) -> None:
            placement.first_token(now - sent_at + 0.001, cached)
            self.outcome.ttfts.append(now - began)
            self.outcome.cached_tokens += cached
            self.outcome.prompt_tokens += len(prompt.tokens)
            self.outcome.share[worker.name.instance] += 1

        def end(cached: int) -> None:
            placement.finished(Usage(len(prompt.tokens), 10, cached))
            if after is not None:
                after()

        def fail(kind: FailureKind) -> None:
            placement.failed(kind)
            self.outcome.failures += 1
            if retries > 0:
                again = excluded | {decision.worker}
                self._send(router, prompt, began, again, after, retries - 1)

        hashes = prefix_hashes(chain_root(CARD.pool, None, None), prompt.tokens, BLOCK_TOKENS)
        worker.submit(Call(len(prompt.tokens), hashes, prompt.decode_s, first, end, fail))

    def play(self, prompts: Sequence[Prompt]) -> Outcome:
        """An open loop: every request at its time."""
        for prompt in prompts:
            self.clock.at(prompt.at_s, lambda prompt=prompt: self.submit(prompt))  # type: ignore[misc]
        self.clock.run()
        return self.outcome

    def loop(self, prompts: Sequence[Prompt], concurrency: int) -> Outcome:
        """A closed loop: each end starts the next request."""
        left = iter(prompts)

        def following() -> None:
            prompt = next(left, None)
            if prompt is not None:
                self.submit(prompt, following)

        for _ in range(concurrency):
            following()
        self.clock.run()
        return self.outcome


# Workloads


def words(label: str, count: int) -> Tokens:
    """`count` tokens that depend on `label` alone."""
    seed = np.frombuffer(label.encode().ljust(16, b"\0")[:16], np.uint32)
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.uint32)


def cold(seed: int, count: int) -> list[Prompt]:
    """Prompts that have nothing in common."""
    random = Random(seed)
    return [
        Prompt(
            0.0, words(f"c{seed}/{number}", random.randrange(300, 1500)), random.uniform(0.05, 0.4)
        )
        for number in range(count)
    ]


def mixed(seed: int, count: int, rate_per_s: float, begin_s: float = 0.0) -> list[Prompt]:
    """Chats that grow turn by turn (45 %), documents asked about by many (25 %), one hot prefix
    (20 %) and prompts that never come again (10 %)."""
    random, now, prompts = Random(seed), begin_s, list[Prompt]()
    chats: dict[int, Tokens] = {}
    hot = words("hot", 40 * BLOCK_TOKENS)
    for number in range(count):
        now += random.expovariate(rate_per_s)
        kind = random.random()
        fresh = f"{seed}/{number}"
        if kind < 0.45:
            chat = random.randrange(number // 12 + 10)
            before = chats.get(chat, np.empty(0, np.uint32))
            tokens = np.concatenate([before, words(fresh, random.randrange(400, 1500))])
            chats[chat] = tokens if len(tokens) < 160 * BLOCK_TOKENS else np.empty(0, np.uint32)
        elif kind < 0.70:
            document = min(random.randrange(40), random.randrange(40))
            begin = words(f"doc{document}", (20 + 2 * document) * BLOCK_TOKENS)
            tokens = np.concatenate([begin, words(fresh, random.randrange(100, 500))])
        elif kind < 0.90:
            tokens = np.concatenate([hot, words(fresh, random.randrange(100, 400))])
        else:
            tokens = words(fresh, random.randrange(250, 2500))
        prompts.append(Prompt(now, tokens, random.uniform(0.2, 2.0)))
    return prompts

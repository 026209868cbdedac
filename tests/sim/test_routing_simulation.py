"""A fleet in virtual time: scoring against bounded-load affinity hashing and least loaded.

Eight workers with LRU prefix caches, one of them slow, serve chats, families with a common document
and one hot prefix; the working set is about two and a half times the caches. A worker's timing
comes from the model below, not from core.costs: overhead a request, noise, and attention.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from heapq import heappop, heappush
from random import Random

import numpy as np
import pytest

from kvtier.core.costs import CostBook, PrefillSample
from kvtier.core.fallback import BoundedHash, Member, member_seed
from kvtier.core.scoring import Ask, Fleet, RecentTokens, decide
from kvtier.types import HolderId, InstanceId, PrefixHash, Source

WORKERS, BLOCK_TOKENS = 8, 64
ROWS = [HolderId(row) for row in range(WORKERS)]
CAPACITY_BLOCKS = 600
SLOW_WORKER, SLOW_FACTOR = 5, 3.0


# The workload


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    chain: tuple[int, ...]
    """Hash of each prefix, a block at a time."""
    decode_s: float

    @property
    def prompt_tokens(self) -> int:
        return len(self.chain) * BLOCK_TOKENS + 1


def extend(chain: tuple[int, ...], label: str, blocks_count: int) -> tuple[int, ...]:
    """The chain with `blocks_count` more blocks whose tokens are named by `label`."""
    longer = list(chain)
    for number in range(blocks_count):
        parent = longer[-1] if longer else 0
        digest = sha256(f"{parent}/{label}/{number}".encode()).digest()
        longer.append(int.from_bytes(digest[:8], "little"))
    return tuple(longer)


def workload(seed: int, requests_count: int, rate_per_s: float) -> list[Request]:
    """Chats that grow turn by turn (45 %), documents asked about by many (25 %), one hot prefix
    (20 %) and prompts that never come again (10 %)."""
    random, now, requests = Random(seed), 0.0, list[Request]()
    chats: dict[int, tuple[int, ...]] = {}
    hot = extend((), "hot", 40)
    for number in range(requests_count):
        now += random.expovariate(rate_per_s)
        kind = random.random()
        if kind < 0.45:
            chat = random.randrange(number // 12 + 10)
            chain = chats.get(chat, ())
            chain = extend(chain, f"chat{chat}/{number}", random.randrange(6, 24))
            chats[chat] = chain if len(chain) < 160 else ()
        elif kind < 0.70:
            document = min(random.randrange(40), random.randrange(40))
            chain = extend((), f"doc{document}", 20 + 2 * document)
            chain = extend(chain, f"ask{number}", random.randrange(2, 8))
        elif kind < 0.90:
            chain = extend(hot, f"hot{number}", random.randrange(2, 6))
        else:
            chain = extend((), f"cold{number}", random.randrange(4, 40))
        requests.append(Request(now, chain, random.uniform(0.2, 2.0)))
    return requests


# The fleet


@dataclass(slots=True)
class Worker:
    """Prefills one request after the other; LRU cache of blocks, a request's tail goes first."""

    slow: float
    free_at_s: float = 0.0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    in_flight: int = 0
    queued_tokens: float = 0.0

    def held_blocks(self, chain: tuple[int, ...]) -> int:
        for position, block in enumerate(chain):
            if block not in self.blocks:
                return position
        return len(chain)

    def touch(self, chain: tuple[int, ...]) -> None:
        for block in reversed(chain):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > CAPACITY_BLOCKS:
            self.blocks.popitem(last=False)

    def prefill_s(self, held_tokens: int, request: Request, random: Random) -> float:
        tokens = request.prompt_tokens - held_tokens
        context = (request.prompt_tokens + held_tokens) / 2
        seconds = 0.004 + tokens / 12_000 * (1 + context / 40_000)
        return seconds * self.slow * random.uniform(0.9, 1.15)


class Policy:
    """Chooses a row and hears what came of it; the base class is least loaded."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def choose(self, request: Request, workers: list[Worker], now: float) -> int:
        least = min(worker.in_flight for worker in workers)
        return self.random.choice([r for r in range(WORKERS) if workers[r].in_flight == least])

    def measured(self, row: int, sample: PrefillSample, now: float) -> None:
        """A prefill ended."""


class LeastTokens(Policy):
    """Least loaded, by the prefill that waits."""

    def choose(self, request: Request, workers: list[Worker], now: float) -> int:
        return min(range(WORKERS), key=lambda r: (workers[r].queued_tokens, self.random.random()))


class Affinity(Policy):
    """Bounded-load hashing on the first blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        names = [InstanceId(f"worker-{row}") for row in range(WORKERS)]
        self.hashing = BoundedHash([Member(member_seed(name, 0)) for name in names])

    def choose(self, request: Request, workers: list[Worker], now: float) -> int:
        loads = np.array([float(worker.in_flight) for worker in workers])
        return self.hashing.choose(PrefixHash(request.chain[1]), loads)


class CacheAware(Policy):
    """core.scoring on what an index would say."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.book, self.fleet = CostBook(), Fleet.idle(WORKERS)
        self.recent = RecentTokens(WORKERS)

    def matched_blocks(self, row: int, worker: Worker, request: Request, now: float) -> int:
        """What the index says."""
        return worker.held_blocks(request.chain)

    def choose(self, request: Request, workers: list[Worker], now: float) -> int:
        fleet = self.fleet
        for row, worker in enumerate(workers):
            matched = self.matched_blocks(row, worker, request, now)
            fleet.held_tokens[row, Source.GPU] = matched * BLOCK_TOKENS
            fleet.queued_tokens[row] = worker.queued_tokens
            fleet.decoding_count[row] = worker.in_flight
        fleet.recent_tokens = self.recent.column(now)
        speeds = self.book.table(ROWS, now)
        row = decide(Ask(request.prompt_tokens), fleet, speeds, self.random.random()).chosen
        held = float(fleet.held_tokens[row, Source.GPU])
        self.recent.add(row, request.prompt_tokens - held, now)
        return row

    def measured(self, row: int, sample: PrefillSample, now: float) -> None:
        self.book.observe_prefill(ROWS[row], sample, now)


class LostIndex(CacheAware):
    """The index dies at 5 s for a minute: a frozen view plus what this router placed itself, with
    credit that decays by age."""

    LOST_S, FOUND_S = 5.0, 65.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.view: list[Worker] = []

    def choose(self, request: Request, workers: list[Worker], now: float) -> int:
        lost = self.LOST_S <= now < self.FOUND_S
        if lost and not self.view:
            self.view = [Worker(1.0, blocks=worker.blocks.copy()) for worker in workers]
        self.fleet.age_s[:] = now - self.LOST_S if lost else 0.0
        row = super().choose(request, workers, now)
        if lost:
            self.view[row].touch(request.chain)
        return row

    def matched_blocks(self, row: int, worker: Worker, request: Request, now: float) -> int:
        lost = self.LOST_S <= now < self.FOUND_S
        return (self.view[row] if lost else worker).held_blocks(request.chain)


@dataclass(frozen=True, slots=True)
class Result:
    hit: float
    """Reused tokens over prompt tokens."""
    ttft_p50_s: float
    ttft_p99_s: float
    share: tuple[int, ...]
    """Requests by worker."""


def run(policy: Policy, requests: list[Request], seed: int) -> Result:
    """Play the requests in virtual time. Blocks are in the cache (and in the index) as soon as
    their request is placed, since whoever comes later waits behind it in the same queue."""
    random = Random(seed)
    workers = [Worker(SLOW_FACTOR if row == SLOW_WORKER else 1.0) for row in range(WORKERS)]
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order, reused, ttfts, share = 0, 0, list[float](), [0] * WORKERS

    def at(when_s: float, action: Callable[[float], None]) -> None:
        nonlocal order
        order += 1
        heappush(events, (when_s, order, action))

    def place(request: Request, now: float) -> None:
        nonlocal reused
        row = policy.choose(request, workers, now)
        worker = workers[row]
        held = worker.held_blocks(request.chain) * BLOCK_TOKENS
        tokens = request.prompt_tokens - held
        seconds = worker.prefill_s(held, request, random)
        worker.touch(request.chain)
        worker.free_at_s = max(now, worker.free_at_s) + seconds
        worker.in_flight += 1
        worker.queued_tokens += tokens
        reused += held
        share[row] += 1
        ttfts.append(worker.free_at_s - now)
        sample = PrefillSample(tokens, held, seconds)

        def prefilled(now: float) -> None:
            worker.queued_tokens -= tokens
            policy.measured(row, sample, now)

        def ended(now: float) -> None:
            worker.in_flight -= 1

        at(worker.free_at_s, prefilled)
        at(worker.free_at_s + request.decode_s, ended)

    for request in requests:
        while events and events[0][0] <= request.at_s:
            when_s, _, action = heappop(events)
            action(when_s)
        place(request, request.at_s)
    total = sum(request.prompt_tokens for request in requests)
    p50, p99 = np.quantile(ttfts, [0.5, 0.99])
    return Result(reused / total, float(p50), float(p99), tuple(share))


@cache
def played(policy: type[Policy], seed: int, rate_per_s: float) -> Result:
    return run(policy(seed), workload(seed, 900, rate_per_s), seed)


SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])
RATES = pytest.mark.parametrize("rate_per_s", [10.0, 30.0, 50.0])


@SEEDS
def test_the_working_set_exceeds_the_caches_and_the_hot_prefix_is_hot(seed: int) -> None:
    requests = workload(seed, 900, 30.0)
    distinct = {block for request in requests for block in request.chain}
    assert len(distinct) > 2.3 * WORKERS * CAPACITY_BLOCKS
    hot = extend((), "hot", 40)
    assert sum(request.chain[:40] == hot for request in requests) > 0.15 * len(requests)


@SEEDS
@RATES
def test_scoring_keeps_the_hits_of_affinity_and_the_tail_of_balance(
    seed: int, rate_per_s: float
) -> None:
    ours = played(CacheAware, seed, rate_per_s)
    rivals = [played(policy, seed, rate_per_s) for policy in (Affinity, Policy, LeastTokens)]
    assert ours.hit >= 0.95 * max(rival.hit for rival in rivals)
    assert ours.ttft_p99_s <= min(rival.ttft_p99_s for rival in rivals)
    assert ours.ttft_p50_s <= min(rival.ttft_p50_s for rival in rivals)


@SEEDS
@RATES
def test_no_worker_is_left_out_but_the_slow_one_gets_less_work(
    seed: int, rate_per_s: float
) -> None:
    share = played(CacheAware, seed, rate_per_s).share
    assert min(share) >= 1
    assert min(count for row, count in enumerate(share) if row != SLOW_WORKER) >= 0.05 * sum(share)


@SEEDS
def test_a_minute_without_the_index_costs_little(seed: int) -> None:
    with_index = played(CacheAware, seed, 15.0)
    without = played(LostIndex, seed, 15.0)
    assert without.hit >= 0.85 * with_index.hit
    assert without.hit != with_index.hit  # The view was really frozen


def test_the_simulation_is_deterministic() -> None:
    requests = workload(4, 200, 30.0)
    assert run(CacheAware(4), requests, 4) == run(CacheAware(4), requests, 4)

"""One mock engine: continuous batching in the time of a recorded profile, with a real prefix cache.

Steps as vLLM schedules them: first come, first served; long prompts in chunks; a prompt's cached
blocks are looked up when its prefill starts, and its own can be hit from then on. A token of a
request stands for `token_scale` tokens of the profile, so that long prompts stay cheap to send.
What must not live here: HTTP, events (router_mock).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.bench.router_profile import RUNNING_MAX, STEP_TOKENS_MAX, decode_s, prefill_s

PIECE_TOKENS: Final = 32
"""Tokens of the profile that leave in one piece of a stream after the first."""

Run = tuple[int, list[int]]
"""Parent (0: none) and consecutive blocks that appeared under it."""


class PrefixCache:
    """Blocks of chains, the least recently used of the tails evicted first."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def match(self, chain: Sequence[int]) -> int:
        """Leading blocks of a chain that are held."""
        held = self._held
        for number, block in enumerate(chain):
            if block not in held:
                return number
        return len(chain)

    def insert(self, chain: Sequence[int]) -> tuple[list[Run], list[int]]:
        """Hold a chain; returns what appeared and what was evicted for it."""
        runs: list[Run] = []
        held, previous, is_open = self._held, 0, False
        for block in chain:
            if block in held:
                is_open = False
            elif is_open:
                runs[-1][1].append(block)
            else:
                runs.append((previous, [block]))
                is_open = True
            previous = block
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        evicted = []
        while len(held) > self._blocks_max:
            evicted.append(held.popitem(last=False)[0])
        return runs, evicted


@dataclass(slots=True)
class Work:
    """One request inside an engine."""

    prompt_tokens: int
    chain: Sequence[int]
    output_tokens: int
    on_first: Callable[["Work"], None]
    on_piece: Callable[["Work"], None]
    on_done: Callable[["Work"], None]
    cached_tokens: int = 0
    is_gone: bool = False
    """Nobody waits for it any more."""
    prefill_left: int = field(default=-1)
    """Not started: -1."""
    made: float = 0.0
    piece_at: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What one engine is like."""

    cache_blocks: int
    block_tokens: int = 16
    token_scale: int = 1
    time_scale: float = 1.0


class Engine:
    """Works on requests; `changed` hears what the cache gained and lost."""

    def __init__(
        self, shape: EngineShape, changed: Callable[[list[Run], list[int]], None] | None = None
    ) -> None:
        self.shape = shape
        self.slowness = 1.0
        self.cache = PrefixCache(shape.cache_blocks)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.requests = 0
        self._changed = changed
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._ready: list[Work] = []
        """Prefilled in the step under way."""
        self._timer: asyncio.TimerHandle | None = None
        self._stretch: tuple[float, float] | None = None
        """Begin and seconds a token of a step that only decodes: it may be cut short."""
        self._loop = asyncio.get_running_loop()

    def submit(self, work: Work) -> None:
        self._waiting.append(work)
        if self._stretch is not None:
            self._cut()
        if self._timer is None:
            self._begin()

    @property
    def load(self) -> tuple[int, int, int]:
        """Running requests, waiting ones, and their prompt tokens that are not computed."""
        waiting = sum(max(w.prefill_left, 0) or w.prompt_tokens for w in self._waiting)
        return len(self._running) + len(self._ready), len(self._waiting), waiting

    def _begin(self) -> None:
        computed = self._schedule()
        if computed or self._ready:
            duration = prefill_s(computed * self.shape.token_scale)
            self._stretch = None
        elif self._running:
            tokens = min(min(w.piece_at, w.output_tokens) - w.made for w in self._running)
            each = self._scaled(decode_s(self._used_share()))
            self._stretch = self._loop.time(), each
            self._timer = self._loop.call_later(tokens * each, self._decoded, tokens)
            return
        else:
            return
        self._timer = self._loop.call_later(self._scaled(duration), self._stepped)

    def _scaled(self, seconds: float) -> float:
        return seconds * self.slowness * self.shape.time_scale

    def _schedule(self) -> int:
        """Take prompts into the next step; returns how many tokens it computes."""
        budget = computed = 0
        budget = max(1, STEP_TOKENS_MAX // self.shape.token_scale)
        while self._waiting and computed < budget:
            work = self._waiting[0]
            if work.is_gone or len(self._running) + len(self._ready) >= RUNNING_MAX:
                if not work.is_gone:
                    break
                self._waiting.popleft()
                continue
            if work.prefill_left < 0:
                self._look_up(work)
            take = min(budget - computed, work.prefill_left)
            work.prefill_left -= take
            computed += take
            if work.prefill_left == 0:
                self._ready.append(self._waiting.popleft())
        return computed

    def _look_up(self, work: Work) -> None:
        hit = self.cache.match(work.chain) * self.shape.block_tokens
        work.cached_tokens = min(hit, work.prompt_tokens - 1)
        work.prefill_left = work.prompt_tokens - work.cached_tokens
        self.requests += 1
        self.prompt_tokens += work.prompt_tokens
        self.cached_tokens += work.cached_tokens
        gained, lost = self.cache.insert(work.chain)
        if self._changed is not None and (gained or lost):
            self._changed(gained, lost)

    def _stepped(self) -> None:
        """A step with prompts in it ended: every running request got a token as well."""
        ready, self._ready = self._ready, []
        self._advance(1.0)
        for work in ready:
            if work.is_gone:
                continue
            work.made, work.piece_at = 1.0, 1.0 + PIECE_TOKENS
            work.on_first(work)
            if work.made < work.output_tokens:
                self._running.append(work)
            else:
                work.on_done(work)
        self._timer = None
        self._begin()

    def _decoded(self, tokens: float) -> None:
        self._timer = self._stretch = None
        self._advance(tokens)
        self._begin()

    def _cut(self) -> None:
        """A prompt came while only decoding went on: the present step ends now."""
        assert self._stretch is not None
        begin, each = self._stretch
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._stretch = None
        self._advance((self._loop.time() - begin) / each)

    def _advance(self, tokens: float) -> None:
        left = []
        for work in self._running:
            if work.is_gone:
                continue
            work.made += tokens
            if work.made >= work.output_tokens - 1e-6:
                work.on_done(work)
                continue
            if work.made >= work.piece_at - 1e-6:
                work.piece_at += PIECE_TOKENS
                work.on_piece(work)
            left.append(work)
        self._running = left

    def _used_share(self) -> float:
        shape = self.shape
        used = sum(w.prompt_tokens * shape.token_scale + w.made for w in self._running)
        return min(1.0, used / (shape.cache_blocks * shape.block_tokens * shape.token_scale))

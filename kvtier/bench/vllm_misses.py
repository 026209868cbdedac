"""What the connector costs where nothing is ever found, and what it saves where everything is.

Two servers of one model, one with the connector and one without, answer prompts that nobody has
seen: in turns for times to first token, in turns of bursts for throughput. Every answer's engine
must say that nothing was cached. For hits a second server with the connector loads what the first
computed; vLLM's own ExampleConnector does the same beside it. What must not live here: processes.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.vllm_processes import (
    BLOCK_TOKENS,
    Answer,
    Endpoint,
    Rig,
    ServerSpec,
    example_connector,
    kvtier_connector,
)
from kvtier.bench.worker_pairs import Pairs, interval
from kvtier.errors import BackendError

TTFT_MAX: Final = 1.05
THROUGHPUT_MIN: Final = 0.97
HIT_MAX: Final = 0.10
LOADED_MIN: Final = 0.95
_STORE_BYTES: Final = 2 << 30
_SAVED_S: Final = 60.0
_POLL_S: Final = 0.2
_QUIET_S: Final = 2.0
"""Before each measured request: a vLLM process spins for a second after its last message, and where
two servers share cores, the other one's spinning would be measured."""


@dataclass(frozen=True, slots=True)
class MissSizes:
    """How much is measured."""

    pairs: int = 12
    prompt_tokens: int = 600
    answer_tokens: int = 8
    bursts: int = 10
    burst_prompts: int = 4
    burst_prompt_tokens: int = 300
    hit_rounds: int = 5
    hit_tokens: int = 2_000
    seed: int = 1


QUICK: Final = MissSizes(
    pairs=2, prompt_tokens=96, bursts=2, burst_prompts=2, hit_rounds=1, hit_tokens=200
)


class _Prompts:
    """Prompts that begin like no other."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def draw(self, count: int) -> list[int]:
        return [self._dice.randrange(1_000, 40_000) for _ in range(count)]


def misses(rig: Rig, sizes: MissSizes) -> list[Result]:
    """Scenario of complete misses. Starts its processes in `rig` and ends them."""
    store = rig.store(_STORE_BYTES)
    on, off = rig.servers(ServerSpec("on", connector=kvtier_connector(store)), ServerSpec("off"))
    prompts = _Prompts(sizes.seed)
    for server in (on, off):  # whatever is made at first use
        _missed(server, prompts.draw(sizes.prompt_tokens), sizes.answer_tokens)
    ttft, rate = Pairs(), Pairs()
    for turn in range(sizes.pairs):

        def first_s(server: Endpoint) -> float:
            tokens = prompts.draw(sizes.prompt_tokens)
            return _missed(server, tokens, sizes.answer_tokens).ttft_s

        ttft.add(*_in_turn(turn, on, off, first_s))
    for turn in range(sizes.bursts):
        rate.add(*_in_turn(turn, on, off, lambda server: _burst(server, sizes, prompts)))
    rig.end()
    return [
        ttft.result("complete misses: TTFT, connector on / off", TTFT_MAX, Bar.AT_MOST),
        rate.result(
            "complete misses: throughput, connector on / off", THROUGHPUT_MIN, Bar.AT_LEAST
        ),
        Result("complete misses: TTFT, off", statistics.median(ttft.second) * 1e3, "ms"),
        Result("complete misses: throughput, off", statistics.median(rate.second), "tokens/s"),
    ]


def _in_turn(
    turn: int, on: Endpoint, off: Endpoint, measure: Callable[[Endpoint], float]
) -> tuple[float, float]:
    """Measure both, every other time the other one first."""
    took = {}
    for server in (off, on) if turn % 2 else (on, off):
        time.sleep(_QUIET_S)
        took[server.port] = measure(server)
    return took[on.port], took[off.port]


def _missed(server: Endpoint, tokens: Sequence[int], count: int) -> Answer:
    answer = server.ask(tokens, count)
    if answer.cached_tokens:
        raise BackendError(f"{answer.cached_tokens} tokens were cached of a prompt never sent")
    return answer


def _burst(server: Endpoint, sizes: MissSizes, prompts: _Prompts) -> float:
    """Tokens a second, of prompts and answers, of several requests at once."""
    drawn = [prompts.draw(sizes.burst_prompt_tokens) for _ in range(sizes.burst_prompts)]
    began = time.perf_counter()
    with ThreadPoolExecutor(len(drawn)) as pool:
        counts = [sizes.answer_tokens] * len(drawn)
        answers = list(pool.map(_missed, [server] * len(drawn), drawn, counts))
    took_s = time.perf_counter() - began
    return sum(answer.prompt_tokens + len(answer.tokens) for answer in answers) / took_s


def hits(rig: Rig, sizes: MissSizes) -> list[Result]:
    """What a server takes for what another one computed. Starts its processes and ends them."""
    store = rig.store(_STORE_BYTES)
    a, b = rig.servers(
        *(ServerSpec(name, connector=kvtier_connector(store)) for name in ("hit-a", "hit-b"))
    )
    found, loaded = _loaded(a, b, sizes)
    rig.end()
    return [
        Result("prompts loaded", loaded, f"of {sizes.hit_rounds}", sizes.hit_rounds),
        found.result("loaded from the store: TTFT / cold", HIT_MAX, Bar.AT_MOST),
        Result("loaded from the store: cold TTFT", statistics.median(found.second) * 1e3, "ms"),
    ]


def example(rig: Rig, sizes: MissSizes, directory: Path) -> list[Result]:
    """The same by vLLM's ExampleConnector."""
    a, b = rig.servers(
        *(ServerSpec(name, connector=example_connector(directory)) for name in ("ex-a", "ex-b"))
    )
    found, _ = _loaded(a, b, sizes)
    rig.end()
    low, high = interval(found.ratios())
    name = "loaded by vLLM's ExampleConnector: TTFT / cold"
    value = statistics.median(found.ratios())
    return [Result(name, value, "ratio", None, Bar.AT_MOST, (low, high))]


def _loaded(a: Endpoint, b: Endpoint, sizes: MissSizes) -> tuple[Pairs, int]:
    """Times of b, which never saw a prompt, against those of a, which computed it; and of how many
    prompts b loaded as good as all."""
    prompts, pairs, loaded = _Prompts(sizes.seed), Pairs(), 0
    warm = prompts.draw(sizes.hit_tokens)
    a.ask(warm, 1)
    _wait_saved(a, warm)
    b.ask(warm, 1)
    for _ in range(sizes.hit_rounds):
        tokens = prompts.draw(sizes.hit_tokens)
        time.sleep(_QUIET_S)
        cold = _missed(a, tokens, sizes.answer_tokens)
        _wait_saved(a, tokens)
        time.sleep(_QUIET_S)
        hit = b.ask(tokens, sizes.answer_tokens)
        loaded += hit.cached_tokens >= LOADED_MIN * len(tokens)
        pairs.add(hit.ttft_s, cold.ttft_s)
    return pairs, loaded


def _wait_saved(server: Endpoint, tokens: Sequence[int]) -> None:
    """Until what a server computed can be loaded: by itself, once it has forgotten it."""
    wanted = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    end = time.monotonic() + _SAVED_S
    while True:
        server.forget()
        if server.ask(tokens, 1).cached_tokens >= wanted:
            return
        if time.monotonic() > end:
            raise BackendError("what a server computed was not saved")
        time.sleep(_POLL_S)

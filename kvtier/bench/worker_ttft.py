"""Time to first token: cold, from L1, from the store's DRAM and from its NVMe, over HTTP.

Every prompt is new to all when a round begins. One worker computes it (cold) and writes it to the
store, a second one of the same store finds it there, then in its own L1; a third worker's store has
all prompts on NVMe only, and its kernel nothing of those files. So a round is four measurements of
one prompt within a few seconds, and all four answers must have the same tokens from the right tier.
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_pairs import Pairs, interval
from kvtier.bench.worker_processes import MIB, Answer, Node, StoreSizes, Worker
from kvtier.errors import BackendError

BLOCK_TOKENS: Final = 16
PREFIX_TOKENS: Final = 2000
QUESTION_TOKENS: Final = 15
ANSWER_TOKENS: Final = 8
L1_MAX, DRAM_MAX, NVME_MAX = 0.10, 0.13, 0.20
LOAD_MAX: Final = 2.5
LOADED_SHARE_MIN: Final = 0.3
GPU_MAX: Final = 0.75
GPU_TOKENS_PER_S: Final = 30_000
GPU_TOKEN_BYTES: Final = 128 << 10
GPU_PREFIX_TOKENS: Final = 4096
GPU_STRIDE_BYTES: Final = 8 * 4099
"""A prime number of words: about 64 of a block, from all layers and tokens."""
SMOLLM2_TOKEN_BYTES: Final = 30 * 2 * 3 * 64 * 4


@dataclass(frozen=True, slots=True)
class TtftSizes:
    """How much is measured."""

    rounds: int = 9
    prefix_tokens: int = PREFIX_TOKENS
    gpu_rounds: int = 9
    gpu_prefix_tokens: int = GPU_PREFIX_TOKENS
    model: str = "smollm2"
    token_bytes: int = SMOLLM2_TOKEN_BYTES
    vocab: range = range(1000, 40_000)
    threads: int = 2


QUICK = TtftSizes(
    rounds=2,
    prefix_tokens=160,
    gpu_rounds=2,
    gpu_prefix_tokens=256,
    model="tiny",
    token_bytes=4 * 2 * 2 * 16 * 4,
    vocab=range(256),
)


@dataclass(slots=True)
class Round:
    """One prompt's times, seconds."""

    cold: float
    l1: float
    dram: float
    nvme: float | None
    copy: float
    """Plain memcpy of the prefix's KV."""


@dataclass(slots=True)
class Rounds:
    """All measured rounds, and answers that had other tokens than the cold one."""

    rounds: list[Round] = field(default_factory=list)
    differing: int = 0
    loaded: int = 0
    """Tokens that came from DRAM, of `asked`."""
    asked: int = 0

    def against_cold(self, of: Callable[[Round], float | None]) -> Pairs:
        """Pairs of one time with the cold one."""
        pairs = Pairs()
        for one in self.rounds:
            value = of(one)
            if value is not None:
                pairs.add(value, one.cold)
        return pairs

    def load_ratios(self) -> list[float]:
        """What loading from DRAM adds to a hit in L1, in plain copies of as many bytes."""
        return [(one.dram - one.l1) / one.copy for one in self.rounds]


class Prompts:
    """New prompts, equal on every machine."""

    def __init__(self, vocab: range, prefix_tokens: int) -> None:
        self._rng = random.Random(prefix_tokens)
        self._vocab = vocab
        self._count = prefix_tokens + QUESTION_TOKENS

    def next(self) -> list[int]:
        return self._rng.choices(self._vocab, k=self._count)


def smollm2_rows(node: Node, sizes: TtftSizes, *, with_nvme: bool) -> list[Result]:
    """The rows of the real model."""
    blocks = sizes.prefix_tokens // BLOCK_TOKENS
    prefix_bytes = sizes.prefix_tokens * sizes.token_bytes
    room = slabs(4 * prefix_bytes)
    near = node.store("near", StoreSizes(dram_bytes=room))
    table: dict[str, object] = {
        "model": {
            "model": sizes.model,
            "served_names": ["bench"],
            "threads": sizes.threads,
        },
        "cache": {"kv_memory_bytes": max(64 * MIB, 4 * prefix_bytes)},
        "store": {"targets": [near.target]},
    }
    first, second = node.worker("first", table), node.worker("second", table)
    prompts = Prompts(sizes.vocab, sizes.prefix_tokens)
    asked = [prompts.next() for _ in range(sizes.rounds + 1)]
    third = _prepared(node, table, asked, blocks, prefix_bytes) if with_nvme else None
    measured = Rounds()
    copy = Copying(prefix_bytes)
    for number, prompt in enumerate(asked):
        one = _round((first, second, third), prompt, (number + 1) * blocks, measured)
        one.copy = copy.seconds()
        if number:  # the first shows all of them the way
            measured.rounds.append(one)
    return _smollm2_results(measured, with_nvme=with_nvme)


def _smollm2_results(measured: Rounds, *, with_nvme: bool) -> list[Result]:
    results = [
        _median("SmolLM2 TTFT cold", [one.cold for one in measured.rounds]),
        measured.against_cold(lambda one: one.l1).result(
            "SmolLM2 TTFT from L1 / cold", L1_MAX, Bar.AT_MOST
        ),
        measured.against_cold(lambda one: one.dram).result(
            "SmolLM2 TTFT from DRAM / cold", DRAM_MAX, Bar.AT_MOST
        ),
    ]
    if with_nvme:
        results.append(
            measured.against_cold(lambda one: one.nvme).result(
                "SmolLM2 TTFT from NVMe / cold", NVME_MAX, Bar.AT_MOST
            )
        )
    loads = measured.load_ratios()
    results += [
        Result(
            "SmolLM2 (DRAM - L1) / memcpy",
            statistics.median(loads),
            "ratio",
            LOAD_MAX,
            Bar.AT_MOST,
            interval(loads),
        ),
        _median("SmolLM2 prefix, memcpy", [one.copy for one in measured.rounds]),
        Result("SmolLM2 answers that differ", measured.differing, "answers", 0, Bar.AT_MOST),
    ]
    return results


def gpu_rows(node: Node, sizes: TtftSizes) -> list[Result]:
    """The emulated GPU, warm from DRAM against cold."""
    blocks = sizes.gpu_prefix_tokens // BLOCK_TOKENS
    prefix_bytes = sizes.gpu_prefix_tokens * GPU_TOKEN_BYTES
    store = node.store("gpu-store", StoreSizes(dram_bytes=slabs(3 * prefix_bytes)))
    table = gpu_worker_table(prefix_bytes) | {"store": {"targets": [store.target]}}
    first, second = node.worker("gpu-first", table), node.worker("gpu-second", table)
    prompts = Prompts(range(256), sizes.gpu_prefix_tokens)
    measured = Rounds()
    copy = Copying(prefix_bytes)
    for number in range(sizes.gpu_rounds + 1):
        one = _round((first, second, None), prompts.next(), (number + 1) * blocks, measured)
        one.copy = copy.seconds()
        if number:
            measured.rounds.append(one)
    dram = measured.against_cold(lambda one: one.dram)
    return [
        _median("emulated GPU TTFT cold", [one.cold for one in measured.rounds]),
        measured.against_cold(lambda one: one.l1).result(
            "emulated GPU TTFT from L1 / cold", None, Bar.AT_MOST
        ),
        dram.result("emulated GPU TTFT from DRAM / cold", GPU_MAX, Bar.AT_MOST),
        _median("emulated GPU prefix, memcpy", [one.copy for one in measured.rounds]),
        Result(
            "emulated GPU, part of the prefix loaded, the rest computed meanwhile",
            measured.loaded / measured.asked,
            "share",
        ),
        Result("emulated GPU answers that differ", measured.differing, "answers", 0, Bar.AT_MOST),
    ]


def gpu_worker_table(prefix_bytes: int) -> dict[str, object]:
    """A worker's configuration with the emulated GPU, whose pool holds two prefixes."""
    return {
        "model": {
            "model": "fake",
            "served_names": ["bench"],
            "fake": {
                "prefill_tokens_per_s": float(GPU_TOKENS_PER_S),
                "token_bytes": GPU_TOKEN_BYTES,
                "stride_bytes": GPU_STRIDE_BYTES,
            },
        },
        "cache": {"kv_memory_bytes": 2 * prefix_bytes + 64 * MIB},
    }


def _prepared(
    node: Node,
    table: dict[str, object],
    prompts: list[list[int]],
    blocks: int,
    prefix_bytes: int,
) -> Worker:
    """A worker without anything in L1, whose store has every prompt on NVMe and only there."""
    nvme_bytes = (len(prompts) + 2) * prefix_bytes * 3 // 2 + 512 * MIB
    far = node.store("far", StoreSizes(slabs(4 * prefix_bytes), nvme_bytes))
    worker = node.worker("third", table | {"store": {"targets": [far.target]}})
    for number, prompt in enumerate(prompts):
        worker.ask(prompt, ANSWER_TOKENS)
        worker.wait_saved((number + 1) * blocks)
    worker.service.stop()
    far.forget_dram()
    worker.restart()
    return worker


def _round(
    workers: tuple[Worker, Worker, Worker | None],
    prompt: list[int],
    saved: int,
    measured: Rounds,
) -> Round:
    """Ask for one prompt from everywhere."""
    first, second, third = workers
    prefix = len(prompt) - QUESTION_TOKENS
    cold = first.ask(prompt, ANSWER_TOKENS)
    first.wait_saved(saved)
    answers: list[tuple[Answer, dict[str, int]]] = [(cold, {})]
    dram = second.ask(prompt, ANSWER_TOKENS)
    l1 = second.ask(prompt, ANSWER_TOKENS)
    answers += [(dram, {"dram": prefix}), (l1, {"gpu": prefix})]
    nvme = None if third is None else third.ask(prompt, ANSWER_TOKENS)
    if nvme is not None:
        answers.append((nvme, {"nvme": prefix}))
    for answer, tiers in answers:
        if not _came_from(answer.cached, tiers):
            raise BackendError(f"{prefix} tokens should come from {tiers}, not {answer.cached}")
        measured.differing += answer.tokens != cold.tokens
    measured.loaded += sum(dram.cached.values())
    measured.asked += prefix
    return Round(cold.ttft_s, l1.ttft_s, dram.ttft_s, None if nvme is None else nvme.ttft_s, 0.0)


def _came_from(cached: Mapping[str, int], wished: Mapping[str, int]) -> bool:
    """Whether tokens came from the right tier: L1 has all; of what is below, the worker may compute
    the head while it loads the rest."""
    if set(cached) != set(wished):
        return False
    return all(
        count == wished[tier] or (tier != "gpu" and count >= LOADED_SHARE_MIN * wished[tier])
        for tier, count in cached.items()
    )


class Copying:
    """Plain memcpy of so many bytes, on one thread, between areas that were touched before."""

    def __init__(self, size: int) -> None:
        self._source = np.ones(size, np.uint8)
        self._target = np.ones(size, np.uint8)

    def seconds(self) -> float:
        """Of one copy: the median of three."""
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, self._source.nbytes)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def _median(name: str, seconds: list[float]) -> Result:
    low, high = interval(seconds)
    return Result(name, 1e3 * statistics.median(seconds), "ms", interval=(1e3 * low, 1e3 * high))


def slabs(size: int) -> int:
    """A whole number of the arena's slabs, two at least."""
    slab = 64 * MIB
    return max(2, -(-size // slab)) * slab
